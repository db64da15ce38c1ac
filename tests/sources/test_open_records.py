"""Records by position: labels alone, views without copies, damage by name, any process, and nothing left open."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdpipes as kdp
from kdpipes.storage import readers
from kdpipes.write import copy_to_local

NUMBER = 24


def items() -> list[dict[str, Any]]:
    return [
        {"x": np.full((50, 40, 3), n, dtype=np.uint8), "y": n % 3, "text": f"bird {n}", "length": np.int64(n * n)}
        for n in range(NUMBER)
    ]


def itself(item: Any) -> Any:
    return item


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records") / "birds"
    kdp.write_records(items(), folder, num_parts=3, encode=itself, class_names=["heron", "stork", "gull"])
    return folder


@pytest.fixture
def birds(original: Path, tmp_path: Path) -> Path:
    """24 samples in three parts."""
    return Path(shutil.copytree(original, tmp_path / "birds"))


def numbers(folder: Path) -> list[int]:
    return [int(key) for key in kdp.open_records(folder).column("key")]


def test_positions_give_fields_keys_and_columns(birds: Path) -> None:
    records = kdp.open_records(birds)
    order = numbers(birds)
    assert sorted(order) == list(range(NUMBER)) != order
    for index in random.Random(0).sample(range(NUMBER), NUMBER):
        sample, expected = records[index], items()[order[index]]
        assert (sample.key, sample.index, list(sample)) == (str(order[index]), index, ["x", "y", "text", "length"])
        assert (sample["x"] == expected["x"]).all()
        assert (sample["y"], sample["text"], sample["length"]) == tuple(expected.values())[1:]
        assert type(sample["y"]) is int
    assert records.column("text").tolist() == [f"bird {n}" for n in order]
    assert records.field_names() == {"x", "y", "text", "length"}
    with pytest.raises(kdp.FieldError, match=r"has no field 'txet'; it has .* Did you mean 'text'\?"):
        records.column("txet")


def test_labels_keys_and_plans_need_no_part_to_be_read(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = numbers(birds)

    def reject(*args: Any) -> Any:
        raise AssertionError("a part has been opened")

    monkeypatch.setattr(readers, "_Map", reject)
    for path in birds.glob("*.mdb"):
        size = path.stat().st_size
        path.write_bytes(b"")
        os.truncate(path, size)
    records = kdp.open_records(birds)
    assert records.column("y").tolist() == [n % 3 for n in order]
    assert records.column("length").tolist() == [n * n for n in order]
    plan = records.filter_classes(valid=["heron", "gull"]).oversample(mode="exact").repeat_until(min_size=50)
    kept = [n for n in order if n % 3 in (0, 2)]
    assert sorted(set(plan.column("key"))) == sorted(map(str, kept))
    assert [(sample.key, sample["y"]) for sample in records][:3] == [(str(n), n % 3) for n in order[:3]]
    with pytest.raises(AssertionError):
        records[0]["x"]


def test_arrays_are_read_only_views_that_outlive_the_pipe(birds: Path) -> None:
    records = kdp.open_records(birds)
    views = [(int(sample.key), sample["x"]) for sample in records]
    assert not any(view.flags.writeable for _, view in views)
    assert all(np.shares_memory(view, kdp_again) for (_, view), kdp_again in zip(views, _again(records), strict=True))
    del records
    gc.collect()
    shutil.rmtree(birds)
    assert all((view == number).all() for number, view in views)


def _again(records: Any) -> Iterator[Any]:
    return (sample["x"] for sample in records)


def test_records_are_known_by_content_not_by_place(birds: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(birds, tmp_path / "moved"))
    kdp.write_records(items(), tmp_path / "again", num_parts=3, encode=itself, class_names=["heron", "stork", "gull"])
    changed = items()
    changed[5]["x"] = changed[5]["x"] + 1
    kdp.write_records(changed, tmp_path / "changed", num_parts=3, encode=itself)
    first, *same = (kdp.open_records(folder) for folder in (birds, moved, tmp_path / "again"))
    other = kdp.open_records(tmp_path / "changed")
    states = [kdp.Loader(pipe.select("x").deal(batch_size=5)).state_dict()["pipes"] for pipe in (first, *same, other)]
    assert states[0] == states[1] == states[2] != states[3]
    versions = {sample.key: sample.version for sample in first}
    assert {sample.key: sample.version for sample in same[0]} == versions
    assert {sample.key for sample in other if sample.version != versions[sample.key]} == {"5"}


def test_a_cache_over_records_is_kept_when_they_move(birds: Path, tmp_path: Path) -> None:
    def chain(folder: Path) -> Any:
        return kdp.open_records(folder).transform("x", lambda x: int(x[0, 0, 0])).cache_on_disk(tmp_path / "cache")

    filled = chain(birds).warm_up(progress=False)
    moved = birds.rename(tmp_path / "moved")
    pipe = chain(moved)
    assert [sample["x"] for sample in pipe] == numbers(moved)
    assert (pipe.stats().entries, pipe.stats().misses) == (filled.entries, 0)


@pytest.mark.parametrize("verify", [True, False])
def test_flipped_bytes_are_damage_of_the_sample_whose_they_are(birds: Path, verify: bool) -> None:
    records = kdp.open_records(birds, verify=verify)
    expected = [(sample.key, bytes(sample["x"])) for sample in records]
    path = birds / "part-00001.mdb"
    content = bytearray(path.read_bytes())
    victim = int(records[9].key)
    place = content.find(bytes([victim]) * 3_000) + 2_000
    content[place] ^= 1
    path.write_bytes(content)
    if not verify:
        assert records[9]["x"].sum() != np.frombuffer(expected[9][1], np.uint8).sum()
        records = kdp.open_records(birds)
    text = rf"Field 'x' of sample '{victim}' in '.*part-00001\.mdb' at offset \d+: .* is damaged: its checksum differs"
    with pytest.raises(kdp.DataError, match=text):
        records[9]["x"]
    assert records[9]["y"] == victim % 3
    assert [(sample.key, bytes(sample["x"])) for sample in records[10:]] == expected[10:]
    kept = [key for batch in records.on_error("skip").select("key x").deal(batch_size=5) for key, _ in batch]
    assert kept == [key for key, _ in expected if key != str(victim)]


def test_a_cut_part_is_named_when_opened_and_when_read(birds: Path) -> None:
    records = kdp.open_records(birds)
    records[0]["x"]
    path = birds / "part-00000.mdb"
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    text = rf"part-00000\.mdb' should have {size} bytes, but has {size - 4096}\. Write or copy it again"
    with pytest.raises(kdp.DataError, match=rf"Field 'x' of sample '\d+' in .*{text}"):
        records[1]["x"]
    with pytest.raises(kdp.DataError, match=text):
        len(kdp.open_records(birds))
    path.unlink()
    with pytest.raises(kdp.DataError, match=r"Field 'x' of sample .*part-00000\.mdb' cannot be read: No such file"):
        records[1]["x"]


def test_another_part_of_the_same_length_is_not_taken_for_it(birds: Path) -> None:
    shutil.copy(birds / "part-00000.mdb", birds / "part-00001.mdb")
    records = kdp.open_records(birds)
    with pytest.raises(
        kdp.DataError, match=r"Field 'x' of sample '\d+' in '.*part-00001\.mdb' at offset \d+: its bytes differ"
    ):
        records[8]["x"]
    shutil.copy(birds / "part-00000.mdb.index", birds / "part-00001.mdb.index")
    with pytest.raises(kdp.DataError, match=r"part-00001\.mdb\.index' belongs to other records"):
        len(kdp.open_records(birds))


def test_a_folder_without_whole_records_is_an_error(birds: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`folder` must be a local folder, .* `kdpipes\.write\.copy_to_local\(url"):
        kdp.open_records("s3://bucket/birds")
    with pytest.raises(FileNotFoundError, match="`folder` must be a folder that exists"):
        kdp.open_records(tmp_path / "none")
    with pytest.raises(kdp.DataError, match=r"holds no records: `kdp\.write_records` writes them"):
        len(kdp.open_records(tmp_path))
    header = birds / "records.json"
    said = json.loads(header.read_text())
    header.write_text(json.dumps({**said, "format": 2}))
    with pytest.raises(
        kdp.DataError, match=r"contains 'kdpipes records' in format 2, .* reads only 'kdpipes records' in format 3"
    ):
        len(kdp.open_records(birds))
    header.write_text("{}")
    with pytest.raises(kdp.DataError, match=r"holds no records, or its records\.json is damaged"):
        len(kdp.open_records(birds))
    header.write_text(json.dumps(said))
    index = birds / "part-00002.mdb.index"
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(kdp.DataError, match=r"part-00002\.mdb\.index' is damaged"):
        len(kdp.open_records(birds))


def test_a_copy_and_a_read_only_folder_are_read_unchanged(birds: Path, tmp_path: Path) -> None:
    local = copy_to_local(birds, tmp_path / "local").path
    for path in [*local.iterdir(), local]:
        path.chmod(path.stat().st_mode & ~0o222)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in local.iterdir())
    try:
        assert [sample["text"] for sample in kdp.open_records(local)] == [f"bird {n}" for n in numbers(birds)]
        assert sorted((path.name, path.stat().st_mtime_ns) for path in local.iterdir()) == before
    finally:
        local.chmod(0o755)


def chain(folder: Path) -> Any:
    records = kdp.open_records(folder).filter_classes(valid=[0, 2])
    pipe = records.transform("x", lambda x, rng: x[0, 0].astype(np.int64) + rng.integers(5)).select("x y key")
    return pipe.deal(batch_size=4, shuffle=kdp.by_shard(window=6), seed=1).collate_samples()


def plain(batches: Any) -> list[Any]:
    return [(x.tolist(), y.tolist(), key) for x, y, key in batches]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver", "threads"])
def test_all_kinds_of_workers_read_them_after_this_process(birds: Path, method: str) -> None:
    pipe = chain(birds)
    expected = [plain(pipe) for _ in range(2)]
    service: Any = kdp.ThreadReadingService(3) if method == "threads" else None
    options = {"reading_service": service} if service else {"num_workers": 2, "start_method": method}
    with kdp.Loader(chain(birds), **options) as loader:
        assert [plain(loader) for _ in range(2)] == expected


def test_a_forked_process_reads_what_its_parent_is_reading(birds: Path) -> None:
    records = kdp.open_records(birds)
    first = records[0]["x"]
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work() -> None:
        there.send([int(sample["x"][0, 0, 0]) for sample in records])

    child = context.Process(target=work)
    child.start()
    assert here.recv() == numbers(birds)
    child.join()
    assert (first == numbers(birds)[0]).all()


def parts_in_windows(pipe: Any, seed: int) -> list[set[int]]:
    """Return of which parts each window of 8 samples is, of an epoch that has all samples once."""
    batches = pipe.select("index").deal(batch_size=4, shuffle=kdp.by_shard(window=8), seed=seed)
    epoch = [index for batch in batches for (index,) in batch]
    assert sorted(epoch) == list(range(NUMBER))
    return [{index // 8 for index in epoch[start : start + 8]} for start in (0, 8, 16)]


def test_windows_hold_samples_of_parts(birds: Path) -> None:
    records = kdp.open_records(birds)
    assert records.shard_numbers().tolist() == [0] * 8 + [1] * 8 + [2] * 8
    by_part = [parts_in_windows(records, seed) for seed in range(5)]
    assert all(sorted(map(tuple, windows)) == [(0,), (1,), (2,)] for windows in by_part)
    assert len({str(windows) for windows in by_part}) > 1


def test_a_field_that_some_samples_lack_is_damage_of_these(tmp_path: Path) -> None:
    made = [{"x": n, **({"mask": bytes(5_000)} if n % 2 else {})} for n in range(6)]
    kdp.write_records(made, tmp_path / "r", num_parts=2, shuffle=False, encode=itself)
    records = kdp.open_records(tmp_path / "r")
    assert [len(sample) for sample in records] == [1, 2] * 3
    assert records.field_names() == {"x", "mask"}
    with pytest.raises(kdp.DataError, match=r"Sample '2' in '.*part-00000\.mdb' has no member 'mask'"):
        records[2]["mask"]
    assert [len(batch) for batch in records.on_error("skip").select("mask").deal(batch_size=2)] == [1, 1, 1]


def test_a_pipe_is_listed_once_and_pickles_small_and_unopened(birds: Path) -> None:
    records = kdp.open_records(birds)
    assert len(pickle.dumps(records)) < 1_000
    records[0]["x"]
    twin = pickle.loads(pickle.dumps(records))
    for path in birds.glob("*.index"):
        path.unlink()
    assert len(twin) == NUMBER
    assert (twin[3]["x"] == int(twin[3].key)).all()


def descriptors() -> int:
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_nothing_stays_open_after_a_pipe_and_few_parts_at_once(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    copies = [pickle.loads(pickle.dumps(kdp.open_records(birds))) for _ in range(5)]
    for records in copies:
        assert sum(int(sample["y"]) + len(sample["x"]) for sample in records)
    assert descriptors() == before + 3, "copies share the maps"
    del copies, records
    assert descriptors() == before
    monkeypatch.setattr(readers, "_KEPT", 1)
    records = kdp.open_records(birds)
    assert [int(sample["x"][0, 0, 0]) for sample in records] == numbers(birds)
    assert descriptors() == before + 1
    del records
    with kdp.Loader(chain(birds), reading_service=kdp.ThreadReadingService(2)) as loader:
        list(loader)
    del loader
    assert descriptors() == before


def test_a_part_that_is_written_anew_is_mapped_anew(birds: Path, original: Path) -> None:
    records = kdp.open_records(birds)
    view = records[0]["x"]
    fresh = birds / "fresh"
    shutil.copy(original / "part-00000.mdb", fresh)
    fresh.replace(birds / "part-00000.mdb")
    again = records[0]["x"]
    assert (again == view).all()
    assert not np.shares_memory(again, view)


def resident_bytes(folder: Path) -> int:
    """Return how much of the files in a folder is in this process's memory."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            is_ours = str(folder) in line
        elif is_ours and name == "Rss:":
            found += int(line.split()[1]) << 10
    return found


def test_parts_that_were_read_leave_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [{"x": np.full(1 << 18, number, np.uint8)} for number in range(128)]
    kdp.write_records(contents, tmp_path, num_parts=2, encode=itself)
    records = kdp.open_records(tmp_path)
    expected = [int(sample.key) for sample in records]
    everything = [sample["x"] for sample in records]
    assert resident_bytes(tmp_path) >= 128 << 18, "below the limit nothing is released"
    monkeypatch.setattr(readers, "_RESIDENT", 1 << 20)
    for sample in records:
        assert sample["x"].any() == (int(sample.key) > 0)
        assert resident_bytes(tmp_path) <= 8 << 20, "with what the system reads ahead"
    assert [int(view[-1]) for view in everything] == expected, "views are valid after their pages were released"
