"""Shards written to storage elsewhere, or from sources there: the same bytes, faults outlasted, requests prefetched."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pytest

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.storage.files import read_url, version_of
from kdpipes.storage.index_home import index_url
from kdpipes.storage.shard_index import ShardIndex
from kdpipes.write import members, shards
from kdpipes.write.shards import ShardsResult
from tests.faulty_storage import Fault, faulty_storage
from tests.write.shards import LIMITS, QUIET, tars_in, write

pytestmark = QUIET


def test_a_real_store_gets_the_same_shards(photo_folder: Path, s3: str, references: Any) -> None:
    urls = f"{s3}/set/train-%06d.tar"
    result = kdp.write_shards(kdp.image_folder(photo_folder), urls, max_samples=30, num_workers=1)
    store = fsspec.filesystem("s3")
    store.invalidate_cache()
    names = [path.rpartition("/")[2] for path in store.find(f"{s3}/set")]
    assert {name: store.cat_file(f"{s3}/set/{name}") for name in names if name.endswith(".tar")} == (
        references[str(LIMITS[0])]
    )
    expected = {name for tar in references[str(LIMITS[0])] for name in (tar, f"{tar}.index")}
    assert set(names) == expected | {"train-shards.json"}
    for url in result.urls:
        index = ShardIndex.from_bytes(read_url(index_url(url)), url)
        assert index.version == version_of(url)
        assert index.version.tag
    back = kdp.open_shards(result.urls).rename_fields(x="jpg", y="cls")
    assert list(back.select("x y")) == list(kdp.image_folder(photo_folder).select("x y"))


def test_a_run_to_a_store_is_gone_on_with(photo_folder: Path, s3: str, references: Any) -> None:
    urls = f"{s3}/train-%06d.tar"
    first = kdp.write_shards(kdp.image_folder(photo_folder), urls, max_samples=30)
    indexes = [read_url(index_url(url)) for url in first.urls]
    store = fsspec.filesystem("s3")
    store.rm([f"{s3}/train-000001.tar", f"{s3}/train-000004.tar.index"])
    result = kdp.write_shards(kdp.image_folder(photo_folder), urls, max_samples=30)
    assert result.num_found == 4
    assert [read_url(index_url(url)) for url in result.urls] == indexes
    assert [read_url(url) for url in result.urls] == list(references[str(LIMITS[0])].values())


def test_a_source_that_fails_now_and_then_changes_nothing(
    photo_shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    write(kdp.open_shards(photo_shards), tmp_path / "whole")
    folder, name = photo_shards.rsplit("/", 1)
    with faulty_storage(folder, faults=[Fault("reset", every=7), Fault("truncate", every=11)]) as storage:
        write(kdp.open_shards(f"faulty://{name}", fetch="members"), tmp_path / "faulty")
        assert sum(storage.stats().faults.values()) > 3
    assert tars_in(tmp_path / "faulty") == tars_in(tmp_path / "whole")


def test_an_upload_is_tried_again_and_an_error_names_the_shard(
    letters: Any, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    kind = fsspec.get_filesystem_class("memory")
    put, failing = kind.put_file, iter([True, True])

    def put_file(self: Any, *args: Any, **kwargs: Any) -> None:
        if next(failing, False):
            raise ConnectionResetError("reset")
        put(self, *args, **kwargs)

    monkeypatch.setattr(kind, "put_file", put_file)
    result = kdp.write_shards(letters, f"memory://{s3[5:]}/birds-%d.tar", max_samples=4)
    assert [len(kdp.open_shards(url)) for url in result.urls] == [4, 2]
    failing = iter([True] * 100)
    with pytest.raises(DataError, match=r"birds-0\.tar' cannot be written: reset"):
        kdp.write_shards(letters, f"memory://{s3[5:]}/other/birds-%d.tar", max_samples=4)


def test_sources_elsewhere_are_told_what_will_be_read(photo_shards: str, tmp_path: Path) -> None:
    told: list[list[int]] = []

    class Telling(kdp.MapPipe):
        def __len__(self) -> int:
            return 150

        def fetch(self, index: int) -> kdp.Sample:
            return kdp.Sample({"y": index}, key=str(index), index=index)

        def prefetch(self, order: Any) -> None:
            told.append(order.positions().tolist())

    write(Telling(), tmp_path, max_samples=100)
    assert sorted(chain.from_iterable(told)) == list(range(150)), "each once, and so kept until it is read once"
    assert all(told)
    assert max(map(len, told)) <= 2 * members._AHEAD


@pytest.mark.parametrize("kind", ["s3", "memory"])
def test_two_jobs_that_begin_at_once_do_not_mix(
    kind: str, letters: Any, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = s3 if kind == "s3" else f"memory://{s3[5:]}"
    urls = f"{folder}/birds-%d.tar"
    read = shards._read_notes
    with monkeypatch.context() as patched:

        def read_before_the_other(places: Any) -> Any:
            patched.setattr(shards, "_read_notes", read)
            found = read(places)
            kdp.write_shards(letters, urls, max_samples=4)
            return found

        patched.setattr(shards, "_read_notes", read_before_the_other)
        patched.setattr(shards.ShardPlaces, "existing", lambda places: [])  # listed before the other one, too
        with pytest.raises(FileExistsError, match=r"another job has begun.*`max_samples` was 4, and is 3"):
            kdp.write_shards(letters, urls, max_samples=3)
    result = kdp.write_shards(letters, urls, max_samples=4)
    assert result.num_found == 2, "the first job is complete"
    assert [len(kdp.open_shards(url)) for url in result.urls] == [4, 2]


def test_a_job_without_shards_keeps_others_out_until_it_fails(letters: Any, s3: str) -> None:
    urls = f"{s3}/birds-%d.tar"

    def fail(value: Any) -> bytes:
        with pytest.raises(FileExistsError, match=r"another job has begun.*if that job is not running, delete this"):
            kdp.write_shards(letters, urls, max_samples=3)
        raise LookupError("no such letter")

    field = next(iter(letters[0]))
    with pytest.raises(LookupError, match="no such letter"):
        kdp.write_shards(letters, urls, max_samples=4, encode={field: fail})
    assert len(kdp.write_shards(letters, urls, max_samples=3).urls) == 2


class Breaking(Fingerprinted):
    """Encodes letters: the notes are gone after the first one, and the fifth one fails."""

    def __init__(self, notes: str) -> None:
        self._notes, self._num_made = notes, 0

    def __call__(self, value: Any) -> bytes:
        self._num_made += 1
        if self._num_made == 1:  # the other run failed, and listed the folder before this one has written a shard
            fsspec.filesystem("s3").rm_file(self._notes)
        if self._num_made == 5:
            raise LookupError("no such letter")
        return b"letter"

    def fingerprint(self) -> str:
        return "letters"


def test_notes_that_another_run_removed_are_put_back(letters: Any, s3: str) -> None:
    field, notes = next(iter(letters[0])), f"{s3}/birds-shards.json"

    def run() -> ShardsResult:
        encode = {field: Breaking(notes)}
        return kdp.write_shards(letters, f"{s3}/birds-%d.tar", max_samples=4, encode=encode, extensions={field: "bin"})

    with pytest.raises(LookupError, match="no such letter"):
        run()
    fsspec.filesystem("s3").invalidate_cache()
    assert fsspec.filesystem("s3").exists(notes)
    result = run()
    assert (result.num_found, len(result.urls)) == (1, 2)


def test_a_failed_run_leaves_the_notes_of_anothers_shards(
    letters: Any, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, store, listings = f"{s3}/birds-%d.tar", fsspec.filesystem("s3"), []
    existing = shards.ShardPlaces.existing

    def existing_before_the_other(places: Any) -> list[str]:
        listings.append(existing(places))
        if len(listings) == 2:  # the other run writes its first shard between the listing and the removal
            store.pipe_file(f"{s3}/birds-0.tar", b"")
        return listings[-1]

    def fail(value: Any) -> bytes:
        raise LookupError("no such letter")

    monkeypatch.setattr(shards.ShardPlaces, "existing", existing_before_the_other)
    with pytest.raises(LookupError, match="no such letter"):
        kdp.write_shards(letters, urls, max_samples=4, encode={next(iter(letters[0])): fail})
    assert listings == [[], [], ["birds-0.tar"]]
    store.invalidate_cache()
    assert store.exists(f"{s3}/birds-shards.json")


def test_storage_that_cannot_separate_jobs_reports_them_late(
    letters: Any, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = f"memory://{s3[5:]}/birds-%d.tar"

    def replace_notes(url: str) -> str:
        store.pipe_file(notes, store.cat_file(notes).replace(b'"max_samples": 4', b'"max_samples": 5'))
        return index_url(url)

    store, notes = fsspec.filesystem("memory"), f"/{s3[5:]}/birds-shards.json"
    monkeypatch.setattr(shards, "index_url", replace_notes)
    with pytest.raises(FileExistsError, match="belong to another job: `max_samples` was 5, and is 4"):
        kdp.write_shards(letters, urls, max_samples=4)
