"""Shards that a stream cannot read on: what becomes of the rest, in every loader, and on which list it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.delivery.skipping import Skip
from kdpipes.loader.merge import SameDamage
from tests.faulty_storage import Fault, faulty_storage

PER_SHARD = 6
SERVICES: dict[str, Callable[[], dict[str, Any]]] = {
    "0": dict,
    "1": lambda: {"num_workers": 1},
    "2": lambda: {"num_workers": 2},
    "threads": lambda: {"reading_service": kdp.ThreadReadingService(2)},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of five shards: 1 is cut in its fourth sample, 2 has a bad header before it, 3 is missing."""
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    for shard in range(5):
        with TarWriter(str(tmp_path / f"{shard}.tar"), mtime=0) as writer:
            for n in range(PER_SHARD):
                writer.write({"__key__": f"{n}", "txt": "heron" * 100, "cls": n})
    content = (tmp_path / "1.tar").read_bytes()
    place = content.index(b"3.cls")
    (tmp_path / "1.tar").write_bytes(content[: place + 700])
    (tmp_path / "2.tar").write_bytes(content[:place] + b"\xff" * 20 + content[place + 20 :])
    (tmp_path / "3.tar").unlink()
    return tmp_path


# Of shard 2, nobody knows whether the third sample has more members.
GOOD = [f"{shard}.tar/{n}" for shard, number in ((0, 6), (1, 3), (2, 2), (4, 6)) for n in range(number)]
ENTRIES = [("1.tar", 9), ("2.tar", 11), ("3.tar", 11)]
WORDS = {
    "1.tar": "unexpected end of data",
    "2.tar": "damaged: no header of a member stands at offset",
    "3.tar": "There is no file",
}


def chain(root: Any, *policy: Any, split: Any = "samples", **options: Any) -> Any:
    urls = [f"{root}/{shard}.tar" for shard in range(5)]
    return kdp.stream_shards(urls).on_error(*policy, **options).select("key txt").deal(batch_size=4, split=split)


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key, _ in batch]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("split", ["samples", "auto"])
def test_the_rest_of_a_damaged_shard_is_left_out_and_listed_once(folder: Path, service: str, split: Any) -> None:
    with kdp.Loader(chain(folder, "skip", split=split), **SERVICES[service]()) as loader:
        for epoch in range(2):
            found = keys(loader)
            assert (found if split == "samples" else sorted(found)) == GOOD
            assert loader.stats()["skipped_shards"] == 3 * (epoch + 1)
            assert (loader.stats()["skipped_samples"], loader.stats()["samples"]) == (0, (epoch + 1) * len(GOOD))
        skipped = loader.skipped
    assert all(skip["is_shard"] and WORDS[skip["key"]] in skip["error"] for skip in skipped)
    assert all(f"{folder}/{skip['key']}" in skip["error"] for skip in skipped)
    assert sorted((skip["epoch"], skip["key"]) for skip in skipped) == [(e, k) for e in (0, 1) for k, _ in ENTRIES]
    if split == "samples":
        assert [(skip["key"], skip["ordinal"]) for skip in skipped[:3]] == ENTRIES


def test_damage_is_an_error_where_nobody_says_otherwise(folder: Path) -> None:
    for pipe in (chain(folder, "raise"), kdp.stream_shards([folder / "0.tar", folder / "1.tar"]).on_error("skip")):
        with pytest.raises((kdp.DataError, FileNotFoundError), match=r"[13]\.tar'"):
            list(pipe)


def test_other_loaders_leave_the_rest_out_and_say_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert keys(chain(folder, "skip")) == GOOD
    assert "The rest of shard '1.tar' is left out from batch 2 on: DataError: Shard " in caplog.text
    assert sorted(keys(DataLoader(chain(folder, "skip"), batch_size=None, num_workers=2))) == sorted(GOOD)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("split", ["samples", "auto"])
def test_a_quarantined_shard_stands_once_and_good_samples_come(folder: Path, service: str, split: Any) -> None:
    path = folder / "bad.jsonl"
    for _ in range(2):  # two runs of two epochs
        with kdp.Loader(chain(folder, "quarantine", path=path, split=split), **SERVICES[service]()) as loader:
            assert [sorted(keys(loader)) for _ in range(2)] == [GOOD] * 2
            assert loader.stats()["skipped_shards"] == 6
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(entry["key"] for entry in entries) == [key for key, _ in ENTRIES]
    assert all(WORDS[entry["key"]] in entry["error"] for entry in entries)


def test_damage_after_shuffle_and_filter_is_equal_in_workers(folder: Path) -> None:
    stream = kdp.stream_shards([folder / f"{shard}.tar" for shard in range(5)]).rename_fields(y="cls")
    pipe = stream.filter_classes(invalid=[1]).shuffle(buffer_size=5).on_error("skip").select("key y").deal(batch_size=3)
    found = []
    for num_workers in (0, 1, 2):
        with kdp.Loader(pipe, num_workers=num_workers) as loader:
            found.append([keys(loader), keys(loader)])
    assert found[0] == found[1] == found[2]
    assert sorted(found[0][1]) == [key for key in GOOD if not key.endswith("/1")]


def test_a_stream_goes_on_behind_a_shard_that_was_given_up(folder: Path) -> None:
    with kdp.Loader(chain(folder, "skip")) as loader:
        batches, states = [], []
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
    for done, state in enumerate(states[:-1], 1):
        with kdp.Loader(chain(folder, "skip"), num_workers=2) as loader:
            loader.load_state_dict(state)
            assert list(loader) == batches[done:]


@pytest.mark.parametrize("errors", ["builtin", "s3fs"])
@pytest.mark.parametrize("kind", ["reset", "timeout", "unavailable", "truncate"])
def test_a_shard_that_cannot_be_reached_is_left_out(folder: Path, kind: Any, errors: Any) -> None:
    with faulty_storage(str(folder), faults=[Fault(kind, paths="0.tar", on="range")], errors=errors):
        with kdp.Loader(chain("faulty:/", "skip"), num_workers=2) as loader:
            assert keys(loader) == GOOD[PER_SHARD:]
            first = loader.skipped[0]
        with pytest.raises(kdp.DataError, match=r"0\.tar' cannot be read at offset 0"):
            list(chain("faulty:/", "raise"))
    assert (first["key"], first["ordinal"]) == ("0.tar", 0)
    assert "Shard 'faulty://0.tar' cannot be read at offset 0" in first["error"]


def test_that_no_shard_can_be_read_is_an_error(folder: Path) -> None:
    with faulty_storage(str(folder), faults=[Fault("unavailable")]):
        pipe = chain("faulty:/", "skip")
        with pytest.raises(kdp.DataError, match=r"(?s)4\.tar.*none of the 5 shards could be read"):
            list(pipe)


def test_workers_that_see_different_damage_are_found_out(folder: Path) -> None:
    (folder / "5.tar").write_bytes((folder / "0.tar").read_bytes())
    urls = ["faulty://0.tar", "faulty://4.tar", "faulty://5.tar"]
    for times, paths in ((1, "4.tar"), (1, "5.tar"), (3, "0.tar")):  # of four times in two epochs of two workers
        faults = [Fault("missing", paths=paths, on="info", times=times)]
        with faulty_storage(str(folder), faults=faults):
            pipe = kdp.stream_shards(urls).on_error("skip").select("key txt").deal(batch_size=2, split="samples")
            words = rf"Shard '{paths}' could be read by only one of workers [01] and"
            with kdp.Loader(pipe, num_workers=2) as loader, pytest.raises(kdp.DataError, match=words):
                print([keys(loader), keys(loader)])


def test_only_what_all_workers_have_passed_must_agree() -> None:
    one, other = (Skip(0, batch, 9, "a.tar", "cut", is_shard=True) for batch in (4, 4))
    check = SameDamage(3)
    check.note(1, 4, one)
    check.check(0, 3)
    check.check(1, 4)  # the others have not come so far
    check.note(2, 4, other)
    check.check(2, 5)
    with pytest.raises(kdp.DataError, match=r"'a\.tar' could be read by only one of workers 0 and"):
        check.check(0, 6)
