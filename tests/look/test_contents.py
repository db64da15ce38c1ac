"""What is in shards and in folders, compared with what their pipes give."""

from __future__ import annotations

import gzip
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.demo import PHOTO_CLASSES, write_photo_shards
from kdpipes.look.contents import FieldSeen, JobSeen, inspect_data
from kdpipes.storage.catalog import make_index
from kdpipes.storage.urls import expand_urls


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    with TarWriter(str(path)) as writer:
        for number, row in enumerate(rows):
            writer.write({"__key__": f"k{number}", **row})
    return str(path)


def test_shards_are_told_as_their_pipe_has_them(photo_shards: str) -> None:
    pipe: Any = kdp.open_shards(photo_shards)
    sizes = [len(sample["jpg"]) for sample in pipe]
    found = inspect_data([photo_shards], num_samples=2)
    assert (found.kind, found.num_samples) == ("shards", len(pipe))
    expected = (len(sizes), sum(sizes), min(sizes), statistics.median(sizes), max(sizes))
    assert found.fields == [FieldSeen("cls", 160, 160, 1, 1.0, 1), FieldSeen("jpg", *expected)]
    assert found.classes is not None
    assert {one.label: one.num_samples for one in found.classes} == kdp.class_counts(pipe.column("cls"))
    assert [sample.key for sample in found.samples] == [pipe[0].key, pipe[1].key]
    assert found.samples[1].fields == {
        "cls": {"bytes": 1, "value": pipe[1]["cls"]},
        "jpg": {"bytes": len(pipe[1]["jpg"])},
    }
    urls = expand_urls(photo_shards)
    assert [shard.url for shard in found.shards] == urls
    assert found.num_bytes == sum(Path(url).stat().st_size for url in urls)
    assert {shard.index for shard in found.shards} == {"fresh"}


def test_a_folder_of_shards_is_its_shards(tmp_path: Path) -> None:
    urls = expand_urls(write_photo_shards(tmp_path / "a" / "b"))
    (tmp_path / "README.txt").write_text("photos", encoding="utf-8")
    assert inspect_data([str(tmp_path)]) == inspect_data(urls)
    assert [shard.index for shard in inspect_data([str(tmp_path / "a" / "b")]).shards] == ["missing"] * 4


def test_an_image_folder_is_told_as_its_pipe_has_it(photo_folder: Path) -> None:
    pipe = kdp.image_folder(photo_folder)
    found = inspect_data([str(photo_folder)])
    assert (found.kind, found.num_samples, found.shards) == ("images", 160, [])
    sizes = [len(sample["x"]) for sample in pipe]
    assert (found.num_bytes, found.fields[0]) == (sum(sizes), FieldSeen.of("x", sizes))
    assert found.classes is not None
    assert {one.label: one.num_samples for one in found.classes} == kdp.class_counts(pipe)
    assert [one.name for one in found.classes] == list(PHOTO_CLASSES)
    assert [sample.key for sample in found.samples] == [pipe[number].key for number in range(3)]
    assert found.samples[0].fields == {"x": {"bytes": sizes[0]}, "y": {"value": 0}}


def test_what_lies_elsewhere_is_told_as_from_the_disk(photo_folder: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    urls = expand_urls(write_photo_shards(tmp_path / "shards"))
    try:
        memory.put(f"{photo_folder}/", "/kdpipes-inspect/photos/", recursive=True)
        memory.put(f"{tmp_path}/shards/", "/kdpipes-inspect/shards/", recursive=True)
        assert inspect_data(["memory://kdpipes-inspect/photos"]) == inspect_data([str(photo_folder)])
        local = inspect_data(urls)
        for places in ("memory://kdpipes-inspect/shards", "memory://kdpipes-inspect/shards/*.tar"):
            found = inspect_data([places])
            assert (found.fields, found.classes, found.samples) == (local.fields, local.classes, local.samples)
            assert found.num_bytes == local.num_bytes
    finally:
        memory.rm("/kdpipes-inspect", recursive=True)


def test_other_files_are_counted_by_suffix(tmp_path: Path) -> None:
    for name, size in {"a.jpg": 3, "b.JPG": 5, "c/d.txt": 1, "LICENSE": 2, ".hidden": 9}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    found = inspect_data([str(tmp_path)], num_samples=1)
    assert (found.kind, found.num_samples, found.num_bytes, found.classes) == ("files", 4, 11, None)
    by_name = {field.name: (field.num_samples, field.num_bytes) for field in found.fields}
    assert by_name == {".jpg": (2, 8), ".txt": (1, 1), "without suffix": (1, 2)}
    assert [(sample.key, sample.fields) for sample in found.samples] == [("LICENSE", {"file": {"bytes": 2}})]


def test_classes_that_are_names_are_counted(tmp_path: Path) -> None:
    named = write(tmp_path / "a.tar", [{"cls": name, "txt": name} for name in ("heron", "stork", "heron")])
    numbered = write(tmp_path / "b.tar", [{"cls": 7, "txt": "seven"}])
    found = inspect_data([named, numbered])
    assert found.classes is not None
    assert {one.label: one.num_samples for one in found.classes} == {"7": 1, "heron": 2, "stork": 1}
    assert inspect_data([numbered]).classes[0].label == 7  # type: ignore[index]


def test_classes_are_not_told_where_they_are_not_known(tmp_path: Path) -> None:
    lacking = write(tmp_path / "a.tar", [{"cls": 1, "txt": "a"}, {"txt": "b"}])
    without = write(tmp_path / "b.tar", [{"txt": "a"}])
    packed = tmp_path / "c.tar.gz"
    packed.write_bytes(gzip.compress(Path(write(tmp_path / "c.tar", [{"cls": "heron"}])).read_bytes()))
    for url in (lacking, without, str(packed)):
        assert inspect_data([url]).classes is None
    field = inspect_data([lacking]).fields[0]
    assert (field.name, field.num_samples) == ("cls", 1)


def test_without_a_scan_only_fresh_indexes_tell(tmp_path: Path) -> None:
    urls = expand_urls(write_photo_shards(tmp_path))
    make_index(urls[1])
    found = inspect_data(urls, scan=False)
    assert found.num_samples is None
    assert [(shard.num_samples, shard.index) for shard in found.shards] == [
        (None, "missing"),
        (40, "fresh"),
        (None, "missing"),
        (None, "missing"),
    ]
    assert found.num_bytes == sum(Path(url).stat().st_size for url in urls)
    assert found.samples[0].key.startswith("photos-001.tar/")


def test_an_empty_shard_has_no_samples(tmp_path: Path) -> None:
    found = inspect_data([write(tmp_path / "a.tar", [])])
    assert (found.num_samples, found.fields, found.classes, found.samples) == (0, [], None, [])


def test_no_member_is_decoded(tmp_path: Path) -> None:
    url = write(tmp_path / "a.tar", [{"pyd": b"cos\nsystem\n(S'false'\ntR.", "json": b"{", "cls": 1}])
    names = [field.name for field in inspect_data([url]).fields]
    assert names == ["cls", "json", "pyd"]
    assert Counter(type(sample) for sample in inspect_data([url]).samples[0].fields.values()) == {dict: 3}


def test_what_cannot_be_told_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="contains no files"):
        inspect_data([str(tmp_path / "empty")])
    with pytest.raises(FileNotFoundError, match="There is no folder 'memory://kdpipes-none'"):
        inspect_data(["memory://kdpipes-none"])
    with pytest.raises(ValueError, match="`num_samples` must be an integer of at least 0"):
        inspect_data([str(tmp_path)], num_samples=-1)
    kdp.from_ids(["a"], [0], load=str.encode).cache_on_disk(str(tmp_path / "cache")).warm_up(progress=False)
    with pytest.raises(ValueError, match=r"holds a cache: `kdpipes cache ls .*cache` shows what is in it"):
        inspect_data([str(tmp_path / "cache")])


def _fails_late(x: str) -> str:
    if x == "70":
        raise RuntimeError("the power is gone")
    return x


def broken_off(folder: Path) -> Any:
    """Return a chain whose job of 100 samples breaks off behind two shards of 30."""
    pipe = kdp.from_dataset([(str(n), n % 2) for n in range(100)], class_names=["heron", "stork"])
    with pytest.raises(RuntimeError, match="the power is gone"):
        kdp.write_shards(pipe.transform("x", _fails_late), folder / "p-%03d.tar", max_samples=30)
    return pipe


def test_an_interrupted_job_is_reported_with_its_final_size(tmp_path: Path) -> None:
    pipe = broken_off(tmp_path)
    found = inspect_data([str(tmp_path)])
    assert (found.num_samples, len(found.shards)) == (60, 2)
    assert found.jobs == [JobSeen(str(tmp_path / "p-shards.json"), 100, is_complete=False)]
    kdp.write_shards(pipe, tmp_path / "done" / "p-%03d.tar", max_samples=30)
    (done,) = inspect_data([str(tmp_path / "done")]).jobs
    assert (done.num_samples, done.is_complete) == (100, True)


def test_classes_of_shards_have_the_names_that_jobs_noted(tmp_path: Path) -> None:
    birds = kdp.from_dataset([("a", 0), ("b", 1)], class_names=["heron", "stork"])
    for name in ("train", "val"):
        kdp.write_shards(birds, tmp_path / f"{name}-%03d.tar", max_samples=1)
    classes = inspect_data([str(tmp_path)]).classes or []
    assert [(one.label, one.name, one.num_samples) for one in classes] == [(0, "heron", 2), (1, "stork", 2)]
    (tmp_path / "val-shards.json").unlink()
    assert [one.name for one in inspect_data([str(tmp_path)]).classes or []] == [None, None]


def test_records_are_told_as_their_pipe_has_them(photo_folder: Path, tmp_path: Path) -> None:
    kdp.write_records(kdp.image_folder(photo_folder), tmp_path, num_parts=3)
    pipe = kdp.open_records(tmp_path)
    found = inspect_data([str(tmp_path)], num_samples=2)
    assert (found.kind, found.num_samples, found.shards) == ("records", 160, [])
    assert {one.label: one.num_samples for one in found.classes or []} == kdp.class_counts(pipe)
    assert [one.name for one in found.classes or []] == list(PHOTO_CLASSES)
    assert [(field.name, field.num_samples) for field in found.fields] == [("x", 160), ("y", 160)]
    assert [sample.key for sample in found.samples] == [pipe[0].key, pipe[1].key]
    assert found.samples[0].fields["y"]["value"] == pipe[0]["y"]
    assert sum(part.num_samples or 0 for part in found.parts) == 160
    assert found.num_bytes == sum(Path(part.path).stat().st_size for part in found.parts)
    assert [job.is_complete for job in found.jobs] == [True]


def test_records_of_which_a_part_is_missing_are_not_complete(photo_folder: Path, tmp_path: Path) -> None:
    kdp.write_records(kdp.image_folder(photo_folder), tmp_path, num_parts=3)
    (tmp_path / "part-00001.mdb.index").unlink()
    found = inspect_data([str(tmp_path)])
    assert [part.num_samples is None for part in found.parts] == [False, True, False]
    assert found.num_samples == sum(part.num_samples or 0 for part in found.parts) < 160
    assert found.jobs == [JobSeen(str(tmp_path / "records.json"), None, is_complete=False)]
