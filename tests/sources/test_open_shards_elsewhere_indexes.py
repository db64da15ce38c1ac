"""What is known of shards elsewhere before a sample is read: where they lie, and their indexes."""

from __future__ import annotations

import secrets
import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.storage.files import matching_urls
from tests.faulty_storage import Fault, FaultyFileSystem, faulty_storage
from tests.sources.shards_elsewhere import (
    LARGE,
    NAME,
    PER_SHARD,
    SERVICES,
    TARS,
    Service,
    bodies,
    body_bytes,
    dealt,
    epochs,
    opened,
)

pytestmark = pytest.mark.usefixtures("cache")


def test_what_is_known_of_the_index_opens_no_member(large: str) -> None:
    with faulty_storage(large) as files:
        len(kdp.open_shards(f"faulty://{NAME}"))
        before = len(files.requests())
        again = opened("faulty://").filter_classes(valid=[1]).oversample()
        assert again.column("y").tolist() == [1] * 9
        assert again.column("key")[0] == "birds-0.tar/01"
        assert kdp.class_counts(again.column("y")) is not None
        assert {request.kind for request in files.requests()[before:]} == {"info"}
        assert bodies(files, before) == [], "the sidecars and no shard"


def test_classes_of_samples_come_from_the_index(large: str) -> None:
    with faulty_storage(large) as files:
        pipe = opened("faulty://")
        assert len(pipe) == 36
        before = len(files.requests())
        assert [pipe[index]["y"] for index in range(12)] == [0, 1, 2, 3] * 3
        assert bodies(files, before) == []


def test_the_index_is_written_beside_and_read_in_a_second_run(large: str) -> None:
    total = sum(path.stat().st_size for path in Path(large).glob(TARS))
    with faulty_storage(large) as files:
        assert len(opened("faulty://")) == 36
        first = len(files.requests())
        assert body_bytes(files) >= total * 0.99
        assert sorted(path.name for path in Path(large).glob("*.index")) == [f"birds-{n}.tar.index" for n in range(3)]
        again = opened("faulty://")
        assert (len(again), again[3]["y"]) == (36, 3)
        assert body_bytes(files, first) < 0.1 * total


@pytest.mark.parametrize("service", SERVICES)
def test_workers_do_not_index(large: str, service: Service) -> None:
    with faulty_storage(large) as files:
        epochs(dealt(opened("faulty://")), service, 1)
        # Of each of the three shards: its version, and that of the stream, which is compared at its end.
        assert sum(request.kind == "info" and request.path.endswith(".tar") for request in files.requests()) <= 9
        assert len([one for one in files.requests() if one.path.endswith(".tar.index")]) == 3


class Rejecting(Exception):
    """What no base class of the standard library tells, as those of aiohttp and gcsfs."""


@pytest.mark.parametrize(
    "error",
    [
        PermissionError,
        NotImplementedError,
        Rejecting,
    ],
)
def test_what_can_only_be_read_has_its_indexes_in_the_cache(
    large: str, cache: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def reject(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        raise error(path)

    monkeypatch.setattr(FaultyFileSystem, "pipe_file", reject)
    with faulty_storage(large) as files:
        for _ in range(2):
            assert opened("faulty://").column("y").tolist() == [0, 1, 2, 3] * 9
        total = sum(path.stat().st_size for path in Path(large).glob(TARS))
        assert body_bytes(files) < 1.1 * total
    assert len(list((cache / "indexes").glob("*.index"))) == 3
    assert not list(Path(large).glob("*.index"))


@pytest.mark.parametrize("kind", ["reset", "unavailable", "timeout"])
@pytest.mark.parametrize("on", ["info", "range"])
def test_what_passes_does_not_keep_shards_from_being_opened(large: str, kind: Any, on: Any) -> None:
    with faulty_storage(large, faults=[Fault(kind, times=1, on=on)]):
        assert len(opened("faulty://")) == 36


def test_an_index_that_cannot_be_read_at_once_is_read_again(large: str) -> None:
    with faulty_storage(large):
        assert len(opened("faulty://")) == 36
    with faulty_storage(large, faults=[Fault("reset", times=1, paths="*.index")]) as files:
        assert len(opened("faulty://")) == 36
        assert bodies(files) == []


def test_a_shard_that_has_changed_is_indexed_again(elsewhere: str, small: str) -> None:
    assert opened(elsewhere).column("y").tolist() == [0, 1, 2, 3] * 9
    path = Path(small) / "birds-1.tar"
    with TarWriter(str(path)) as writer:
        for n in range(PER_SHARD):
            writer.write({"__key__": f"{n:02}", "jpg": bytes(500), "cls": 3, "mask": bytes(500)})
    filesystem, root = fsspec.core.url_to_fs(elsewhere)
    filesystem.pipe_file(f"{root.rstrip('/')}/{path.name}".lstrip("/"), path.read_bytes())
    again = opened(elsewhere)
    assert again.column("y").tolist() == [0, 1, 2, 3] * 3 + [3] * 12 + [0, 1, 2, 3] * 3
    assert again[12]["x"] == bytes(500)


def test_a_new_etag_alone_makes_a_new_index(large: str) -> None:
    with faulty_storage(large) as files:
        assert len(opened("faulty://")) == 36
        assert body_bytes(files) > 0
    with faulty_storage(large, faults=[Fault("new_etag", paths="*birds-2.tar")]) as files:
        assert len(opened("faulty://")) == 36
        assert {one.path for one in bodies(files)} == {"birds-2.tar"}


def test_globs_find_what_brace_ranges_name(elsewhere: str) -> None:
    assert opened(elsewhere, TARS).column("key").tolist() == opened(elsewhere).column("key").tolist()
    assert opened(elsewhere, TARS)[20]["x"] == opened(elsewhere)[20]["x"]


def test_signed_urls_are_no_globs(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    name = f"/{secrets.token_hex(8)}/birds-0.tar?signature=abc"
    files.pipe_file(name, (Path(large) / "birds-0.tar").read_bytes())
    monkeypatch.setattr(type(files), "glob", lambda *_, **__: [])  # as HTTP has none
    assert len(opened(f"memory:/{name}", "")) == PER_SHARD


def test_a_file_whose_name_looks_like_a_glob_is_that_file(large: str) -> None:
    Path(large, "birds-0.tar").rename(Path(large, "birds [1].tar"))
    assert len(opened(f"{large}/", "birds [1].tar")) == PER_SHARD


def test_globs_within_another_file_keep_its_url(small: str, tmp_path: Path) -> None:
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", small)
    found = matching_urls([f"zip://birds-*.tar::{packed}"])
    assert found
    assert all(url.endswith(f".tar::{packed}") for url in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fetch": "all"}, r"^`fetch` must be one of 'auto', 'members', 'shards', but is 'all' instead\.$"),
        ({"cache_dir": "s3://bucket/cache"}, r"^`cache_dir` must be a local folder, but is 's3://bucket/ca"),
        ({"cache_dir": 3}, "`cache_dir` must be a local folder, but is 3 instead"),
        ({"max_cache_bytes": 0}, "`max_cache_bytes` must be an integer of at least 1, but is 0 instead"),
    ],
)
def test_wrong_arguments_are_rejected_where_the_chain_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kdp.open_shards("birds.tar", **options)


def test_tars_that_webdataset_would_join_are_all_read(small: str) -> None:
    paths = [str(path) for path in sorted(Path(small).glob(TARS))]
    assert kdp.open_shards("::".join(paths)).column("cls").tolist() == kdp.open_shards(paths).column("cls").tolist()
    assert len(list(kdp.stream_shards("::".join(paths)))) == 36


def test_a_computed_column_reads_its_members_in_bulk(tmp_path: Path) -> None:
    for shard in range(3):
        with TarWriter(str(tmp_path / f"birds-{shard}.tar")) as writer:
            for n in range(PER_SHARD):
                row = {"jpg": bytes(LARGE), "json": {"label": n % 4}}
                writer.write({"__key__": f"{n:02}", **row})
    waiting, are_four = [], threading.Event()

    def wait(seconds: float) -> None:
        waiting.append(1)
        if len(waiting) >= 4:
            are_four.set()
        assert are_four.wait(20), "the members of a shard are requested one by one"

    with faulty_storage(str(tmp_path)):
        len(opened("faulty://"))  # which makes the indexes
    slow = Fault("latency", seconds=1.0, paths="*birds-2.tar", on="range")
    with faulty_storage(str(tmp_path), faults=[slow], sleep=wait) as files:
        shards = kdp.open_shards(f"faulty://{NAME}", fetch="members")
        labeled = shards.add_field("y", lambda sample: sample["json"]["label"])
        assert len(labeled.filter_classes(valid=[1])) == 9
        assert body_bytes(files) < 2 * LARGE
        assert len(bodies(files)) <= 36 + 3
        assert files.stats().bytes_repeated == 0
