"""Shards elsewhere, and faults: what passes is outlasted, what stays is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.storage import remote
from kdpipes.storage.catalog import make_index
from kdpipes.storage.index_home import index_url
from kdpipes.storage.remote import Span
from tests.faulty_storage import Fault, FaultyFileSystem, faulty_storage
from tests.sources.shards_elsewhere import LARGE, SERVICES, TARS, Service, body_bytes, dealt, epochs, in_order, opened

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("kind", ["flip_bit", "wrong_range", "truncate", "reset_midway"])
def test_damage_on_the_way_is_healed(small: str, service: Service, kind: Any) -> None:
    want = epochs(dealt(opened(f"{small}/")))
    for path in Path(small).glob("*.index"):
        path.unlink()
    with faulty_storage(small):
        assert len(opened("faulty://")) == 36
    with faulty_storage(small, faults=[Fault(kind, every=2, times=1, on="range")], seed=2) as files:
        assert epochs(dealt(opened("faulty://")), service) == want
        assert files.stats().faults[kind] > 0


@pytest.mark.parametrize("kind", ["flip_bit", "wrong_range"])
def test_damage_on_the_way_may_come_twice(small: str, kind: Any) -> None:
    with faulty_storage(small):
        want = opened("faulty://")[0]["x"]
    with faulty_storage(small, faults=[Fault(kind, times=2, on="range")]):
        assert opened("faulty://")[0]["x"] == want


def damage(folder: str) -> tuple[str, int]:
    """Flip a bit of a photo at rest; return the shard and the offset of that photo."""
    path = Path(folder) / "birds-1.tar"
    index = make_index(str(path))
    offset = int(index.fields["jpg"].offsets[4])
    Path(index_url(str(path))).unlink()
    content = bytearray(path.read_bytes())
    content[offset + 10] ^= 4
    path.write_bytes(content)
    return path.name, offset


@pytest.mark.parametrize("service", SERVICES)
def test_damage_at_rest_is_named_and_can_be_skipped(small: str, service: Service) -> None:
    with faulty_storage(small):
        assert len(opened("faulty://")) == 36
    damaged = Path(small) / "birds-1.tar"
    status = damaged.stat()
    indexes = {path: path.read_bytes() for path in Path(small).glob("*.index")}
    name, offset = damage(small)
    for path, content in indexes.items():
        path.write_bytes(content)
    os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
    ours = r"Sample 'birds-1\.tar/04' differs from the index: .* 500 bytes at offset {} of 'faulty://{}' does"
    place = ours.format(offset, name)
    with faulty_storage(small, faults=[Fault("latency", seconds=1e-6)]) as files:
        monkey = pytest.MonkeyPatch()
        monkey.setattr(FaultyFileSystem, "info", _as_before(indexes))
        try:
            pipe = opened("faulty://")
            with pytest.raises(DataError, match=place):
                pipe[16]["x"]
            assert pipe[16]["y"] == 0
            with pytest.raises(DataError, match=place):
                epochs(dealt(pipe), service)
            with kdp.Loader(dealt(pipe.on_error("skip")), **service()) as loader:
                got = [[key for batch in loader for _, _, key in batch] for _ in range(2)]
                skipped = loader.skipped
        finally:
            monkey.undo()
    assert [len(set(keys)) for keys in got] == [35, 35]
    assert [(skip["epoch"], skip["key"]) for skip in skipped] == [(0, "birds-1.tar/04"), (1, "birds-1.tar/04")]
    assert all(f"at offset {offset} of" in skip["error"] for skip in skipped)
    assert body_bytes(files) > 0


def _as_before(indexes: dict[Path, bytes]) -> Any:
    """Return an `info` that says of shards what it said when they were indexed."""
    from kdpipes.storage.shard_index import ShardIndex

    versions = {
        path.name.removesuffix(".index"): ShardIndex.from_bytes(content, "").version
        for path, content in indexes.items()
    }
    honest = FaultyFileSystem.info

    def info(self: FaultyFileSystem, path: str, **kwargs: Any) -> dict[str, Any]:
        entry = honest(self, path, **kwargs)
        known = versions.get(path.rsplit("/", 1)[-1])
        return entry if known is None else {**entry, "ETag": known.tag.partition(":")[2]}

    return info


def test_a_shard_that_is_missing_is_named(elsewhere: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"^There is no file '.*birds-3\.tar'\.$"):
        len(opened(elsewhere, "birds-{0..3}.tar"))
    with pytest.raises(FileNotFoundError, match=r"^No file matches '.*gulls-\*\.tar'\.$"):
        len(opened(elsewhere, "gulls-*.tar"))


def test_a_shard_that_goes_missing_later_is_named(small: str) -> None:
    with faulty_storage(small) as files:
        pipe = opened("faulty://")
        assert len(pipe) == 36
        (Path(small) / "birds-1.tar").unlink()
        with pytest.raises(DataError, match=r"Shard 'faulty://birds-1\.tar' cannot be read at offset \d+: "):
            pipe[12]["x"]
        assert len(files.requests()) > 0


def test_a_failed_request_for_many_samples_costs_none_of_them(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = remote.read_range

    def reject_long(span: Span, **options: Any) -> bytes:
        if span.stop - span.start > 500:
            raise DataError("It is too much at once.")
        return alone(span, **options)

    with faulty_storage(small):
        pipe = opened("faulty://")
        assert len(pipe) == 36
        monkeypatch.setattr(remote, "read_range", reject_long)
        with kdp.Loader(dealt(pipe.on_error("skip"))) as loader:
            list(loader)
            assert loader.skipped == []


@pytest.mark.parametrize("service", SERVICES)
def test_a_damaged_copy_is_healed(large: str, cache: Path, service: Service) -> None:
    want = epochs(in_order(opened(f"{large}/")))
    for path in Path(large).glob("*.index"):
        path.unlink()
    with faulty_storage(large) as files:
        pipe = opened("faulty://")
        epochs(in_order(pipe))
        index = make_index("faulty://birds-1.tar")
        intact = (Path(large) / "birds-1.tar").read_bytes()
        (copy,) = (path for path in (cache / "shards").glob(TARS) if path.read_bytes() == intact)
        with copy.open("r+b") as file:
            file.seek(int(index.fields["jpg"].offsets[4]) + 10)
            file.write(bytes(50))
        before = len(files.requests())
        assert epochs(in_order(opened("faulty://")), service) == want
        assert copy.read_bytes() == intact
        assert body_bytes(files, before) == LARGE


@pytest.mark.parametrize("kind", ["flip_bit", "wrong_range", "truncate", "reset_midway"])
def test_damage_on_the_way_of_whole_shards_is_healed(large: str, kind: Any) -> None:
    want = epochs(in_order(opened(f"{large}/")))
    for path in Path(large).glob("*.index"):
        path.unlink()
    with faulty_storage(large):
        assert len(opened("faulty://")) == 36
    with faulty_storage(large, faults=[Fault(kind, times=1, on="range")], seed=2) as files:
        assert epochs(in_order(opened("faulty://"))) == want
        assert files.stats().faults[kind] == 3


def test_a_shard_that_is_replaced_while_it_is_read_is_named(large: str) -> None:
    with faulty_storage(large):
        assert len(opened("faulty://")) == 36
    with (
        faulty_storage(large, faults=[Fault("new_etag", after=1, paths="birds-1.tar")]),
        pytest.raises(DataError, match=r"Shard 'faulty://birds-1\.tar' has been replaced since its index was read: "),
    ):
        epochs(in_order(opened("faulty://")))


def test_shards_with_checksums_are_verified_beside_others(large: str) -> None:
    make_index(f"{large}/birds-0.tar")
    with faulty_storage(large, faults=[Fault("flip_bit", every=3, on="range")], seed=3) as files:
        pipe = opened("faulty://", fetch="members")
        got = [sample["x"] for sample in pipe[12:]]
        assert files.stats().faults["flip_bit"]
    assert got == [sample["x"] for sample in opened(f"{large}/")[12:]]
