"""`storage_options=`: used for every request, in workers too, and shown and written nowhere."""

from __future__ import annotations

import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.cache.open_cache import check_cache, clear_cache, look_at_cache
from kdpipes.core.errors import DataError
from kdpipes.core.fingerprint import fingerprint
from kdpipes.storage.access import Access, Threads, current_access, using
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.remote import Span, read_range
from kdpipes.write import FileLocalizer, copy_to_local
from tests.faulty_storage import Fault, faulty_storage

Open = Callable[[str, dict[str, Any]], Any]

SOURCES: dict[str, Open] = {
    "open_shards": lambda root, options: kdp.open_shards(
        f"{root}/photos-{{000..003}}.tar", storage_options=options
    ).select("jpg"),
    "stream_shards": lambda root, options: kdp.stream_shards(
        f"{root}/photos-{{000..003}}.tar", storage_options=options
    ).select("jpg"),
    "image_folder": lambda root, options: kdp.image_folder(f"{root}/photos", storage_options=options).select("x"),
    "from_ids": lambda root, options: kdp.from_ids(
        ["photos-000", "photos-001"], load=f"{root}/{{id}}.tar", storage_options=options
    ).select("x"),
    "from_table": lambda root, options: kdp.from_table(
        f"{root}/shards.csv", path="file", storage_options=options
    ).select("x"),
}


@pytest.fixture
def root(s3: str, photo_shards: str, photo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of a store that is reached by options alone."""
    files = fsspec.filesystem("s3")
    files.put(f"{Path(photo_shards).parent}/", f"{s3}/", recursive=True)
    files.put(f"{photo_folder}/", f"{s3}/photos/", recursive=True)
    files.pipe(f"{s3}/shards.csv", b"file\nphotos-000.tar\nphotos-001.tar\n")
    options = fsspec.config.conf["s3"]
    with monkeypatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", {})
        for name in ("KEY", "SECRET", "ENDPOINT_URL"):
            patch.delenv(f"FSSPEC_S3_{name}", raising=False)
        monkeypatch.setattr(sys.modules[__name__], "OPTIONS", dict(options), raising=False)
        yield s3


OPTIONS: dict[str, Any] = {}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_sources_read_with_their_own_options(root: str, name: str, workers: int) -> None:
    chain = SOURCES[name](root, OPTIONS).deal(batch_size=16)
    with kdp.Loader(chain, num_workers=workers) as loader:
        samples = [sample for batch in loader for sample in batch]
    assert samples
    assert all(samples)


@pytest.mark.parametrize("name", SOURCES)
def test_options_are_shown_and_written_nowhere(root: str, name: str) -> None:
    chain = SOURCES[name](root, OPTIONS)
    dealt = chain.deal(batch_size=16)
    with kdp.Loader(dealt) as loader:
        iterator = iter(loader)
        next(iterator)
        shown = [repr(chain), chain._repr_html_(), repr(loader), str(loader.state_dict())]
    shown += [str(fingerprint(chain)), repr(chain.fingerprint()), str(pickle.dumps(chain.fingerprint()))]
    wrong = {**OPTIONS, "secret": "heron-and-stork"}
    with pytest.raises(Exception) as caught, kdp.Loader(SOURCES[name](root, wrong).deal(batch_size=16)) as loader:
        list(loader)
    shown.append("".join(traceback.format_exception(caught.value)))
    for secret in (OPTIONS["secret"], OPTIONS["key"], "heron-and-stork"):
        assert not [text for text in shown if secret in text]


def photos_of(root: str, options: dict[str, Any]) -> Any:
    return kdp.image_folder(f"{root}/photos", storage_options=options)


def listed(root: str, folder: Path) -> str:
    """Return the path of a list of two photos and their classes."""
    names = [f"{root}/photos/{path}" for path in sorted(photos_of(root, OPTIONS).column("key"))[:2]]
    (folder / "list.txt").write_text("".join(f"{name} {label}\n" for label, name in enumerate(names)))
    return str(folder / "list.txt")


WRITERS: dict[str, Callable[[str, dict[str, Any], Path, int], Any]] = {
    "write_shards": lambda root, options, folder, workers: kdp.write_shards(
        photos_of(root, OPTIONS),
        f"{root}/new/train-%06d.tar",
        max_samples=40,
        num_workers=workers,
        storage_options=options,
    ),
    "write_records": lambda root, options, folder, workers: kdp.write_records(
        listed(root, folder), folder / "records", num_workers=workers, num_parts=2, storage_options=options
    ),
    "copy_to_local": lambda root, options, folder, workers: copy_to_local(
        f"{root}/photos", folder / "copy", num_workers=workers + 1, storage_options=options
    ),
    "FileLocalizer": lambda root, options, folder, workers: FileLocalizer(folder / "files", storage_options=options)(
        f"{root}/photos-000.tar"
    ),
    "localize_files": lambda root, options, folder, workers: list(
        IterableWrapper([f"{root}/photos-001.tar"]).localize_files(folder / "some", storage_options=options)
    ),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", WRITERS)
def test_writers_reach_storage_with_their_own_options(root: str, name: str, workers: int, tmp_path: Path) -> None:
    assert WRITERS[name](root, OPTIONS, tmp_path, workers)
    assert not current_access().storage_options


@pytest.mark.parametrize("name", WRITERS)
def test_writers_show_and_write_their_options_nowhere(root: str, name: str, tmp_path: Path) -> None:
    wrong = {**OPTIONS, "secret": "heron-and-stork"}
    with pytest.raises(Exception) as caught:
        WRITERS[name](root, wrong, tmp_path, 0)
    shown = "".join(traceback.format_exception(caught.value))
    assert not [secret for secret in (OPTIONS["key"], "heron-and-stork") if secret in shown]
    WRITERS[name](root, OPTIONS, tmp_path, 0)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or OPTIONS["secret"].encode() not in path.read_bytes()


def test_files_localized_with_options_are_the_same_chain() -> None:
    plain, other = (FileLocalizer("files", storage_options=options) for options in (None, {"key": "heron"}))
    assert fingerprint(plain) == fingerprint(other)
    assert "heron" not in repr(other)


def test_options_of_shards_are_not_those_of_the_samples(root: str, tmp_path: Path) -> None:
    def used(sample: Any) -> bytes:
        return repr(current_access().storage_options).encode()

    kdp.write_shards(
        kdp.from_dataset([b"a"], "bin"),
        f"{root}/own/train-%d.tar",
        max_samples=1,
        encode={"bin": used},
        storage_options=OPTIONS,
    )
    assert list(kdp.open_shards(f"{root}/own/train-0.tar", storage_options=OPTIONS).column("bin")) == [b"{}"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_uses_its_own_options_and_shows_them_nowhere(root: str, workers: int) -> None:
    place = f"{root}/cache"
    cached = kdp.from_ids(list("abcd"), load=str.upper).cache_on_disk(place, storage_options=OPTIONS)
    with kdp.Loader(cached.select("x").deal(batch_size=2), num_workers=workers) as loader:
        assert [x for batch in loader for (x,) in batch] == list("ABCD")
        shown = [repr(cached), cached._repr_html_(), repr(loader), str(loader.state_dict())]
    assert cached.warm_up(progress=False).entries == 6
    shown += [str(fingerprint(cached)), str(pickle.dumps(cached.operation.fingerprint()))]
    opened = kdp.open_cache(place, storage_options=OPTIONS)
    assert [sample["x"] for sample in pickle.loads(pickle.dumps(opened))] == list("ABCD")
    shown += [repr(opened), str(fingerprint(opened))]
    assert look_at_cache(place, OPTIONS).num_samples == 4
    assert check_cache(place, OPTIONS) == (6, 0, 0)
    wrong = {**OPTIONS, "secret": "heron-and-stork"}
    with pytest.raises(Exception) as caught:
        len(kdp.open_cache(place, storage_options=wrong))
    shown.append("".join(traceback.format_exception(caught.value)))
    with pytest.warns(UserWarning, match="cannot be") as warned:
        kdp.from_ids(["e"], load=str.upper).cache_on_disk(place, layout="files", storage_options=wrong)[0]["x"]
    shown += [str(warning.message) for warning in warned]
    for secret in (OPTIONS["secret"], OPTIONS["key"], "heron-and-stork"):
        assert not [text for text in shown if secret in text]
    clear_cache(place, OPTIONS)
    with pytest.raises(FileNotFoundError):
        look_at_cache(place, OPTIONS)


def test_two_sources_use_two_stores(root: str, tmp_path: Path) -> None:
    one, other = ({**OPTIONS, **more} for more in ({}, {"default_block_size": 1 << 20}))
    found = []
    for options in (one, other, one):
        with using(Access(storage_options=options)):
            found.append(filesystem_of(f"{root}/photos-000.tar")[0])
    assert found[0] is found[2]
    assert found[0] is not found[1]


def test_threads_work_with_the_access_of_their_caller() -> None:
    access = Access(storage_options={"key": "a"})
    with using(access):
        assert Threads(1, "kdpipes-test").submit(current_access).result() is access
    assert current_access() is not access
    assert "'a'" not in repr(access)


@pytest.mark.parametrize("options", ["key=heron", [("key", "heron")], {1: "heron"}])
def test_options_of_another_kind_are_an_error_without_values(options: Any) -> None:
    with pytest.raises(TypeError, match=r"^`storage_options` must ") as caught:
        kdp.open_shards("memory://a.tar", storage_options=options)
    assert "heron" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("gs://b/0.tar", "gcsfs", "gcs"), ("az://b/0.tar", "adlfs", "azure"), ("s3://b/0.tar", "s3fs", "s3")],
)
@pytest.mark.parametrize(
    "build",
    [kdp.open_shards, kdp.stream_shards, kdp.image_folder, lambda url: kdp.from_ids(["a"], load=f"{url}/{{id}}")],
)
def test_a_missing_extra_is_an_error_where_the_chain_is_built(
    url: str, module: str, extra: str, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    protocol = url.partition(":")[0]
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    with pytest.raises(ImportError, match=rf'`pip install "kdpipes\[{extra}\]"`'):
        build(url)


def test_an_unknown_protocol_is_an_error_when_built() -> None:
    with pytest.raises(ValueError, match=r"^`urls` must be a path, or a URL of a protocol that fsspec knows"):
        kdp.open_shards("heron://a.tar")


def test_a_straggler_is_requested_a_second_time(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"heron")
    is_open = threading.Event()
    straggler = Fault("latency", times=1, seconds=1.0)
    try:
        with faulty_storage(str(tmp_path), faults=[straggler], sleep=lambda seconds: is_open.wait(20)) as storage:
            with using(Access(hedge_s=0.01)):
                assert read_range(Span("faulty://a.bin", 1, 3)) == b"er"
            assert storage.stats().requests == 2
    finally:
        is_open.set()


def test_two_responses_that_fail_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    (tmp_path / "a.bin").write_bytes(b"heron")
    with (
        faulty_storage(str(tmp_path), faults=[Fault("unavailable")]),
        using(Access(hedge_s=5.0)),
        pytest.raises(DataError, match="offset 1"),
    ):
        read_range(Span("faulty://a.bin", 1, 3))
