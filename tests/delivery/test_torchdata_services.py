"""`Loader` and DataLoader2 with kdpipes' and torchdata's reading services; `limit`, `pause` and `resume`."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

import kdpipes as kdp
from tests.torchdata_parts import (
    CheckpointableReadingServiceInterface,
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)

SERVICES: dict[str, Callable[[], Any]] = {
    "process": lambda: kdp.ProcessReadingService(2),
    "thread": lambda: kdp.ThreadReadingService(2),
    "torchdata's process": lambda: MultiProcessingReadingService(2),
    "torchdata's in process": InProcessReadingService,
    "torchdata's sequence of its own": lambda: SequentialReadingService(InProcessReadingService()),
}
OWN = ["process", "thread"]


def dealt() -> Any:
    source = kdp.from_dataset([(number, 0) for number in range(20)])
    return source.select("x").deal(batch_size=2, shuffle=True, seed=3).collate_samples()


def read(batches: Any) -> list[list[int]]:
    return [x.tolist() for (x,) in batches]


def epochs(number: int) -> list[list[list[int]]]:
    with kdp.Loader(dealt()) as loader:
        return [read(loader) for _ in range(number)]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("make_loader", [kdp.Loader, DataLoader2])
def test_every_service_gives_the_same_epochs(make_loader: Any, service: str) -> None:
    loader = make_loader(dealt(), reading_service=SERVICES[service]())
    try:
        assert [sorted(read(loader)) for _ in range(2)] == [sorted(epoch) for epoch in epochs(2)]
    finally:
        loader.shutdown()


@pytest.mark.parametrize("service", ["torchdata's process", "torchdata's in process"])
def test_a_state_under_torchdatas_services_names_the_next_epoch(service: str) -> None:
    with kdp.Loader(dealt(), reading_service=SERVICES[service]()) as loader:
        list(loader)
        state = loader.state_dict()
    with kdp.Loader(dealt(), reading_service=SERVICES[service]()) as resumed:
        resumed.load_state_dict(state)
        assert sorted(read(resumed)) == sorted(epochs(2)[1])


@pytest.mark.parametrize("service", ["torchdata's process", "torchdata's in process"])
def test_stock_pipes_draw_alike_after_a_resume(service: str) -> None:
    def loader() -> kdp.Loader:
        return kdp.Loader(dealt().shuffle(), reading_service=SERVICES[service]())

    with loader() as first:
        read(first)
        state, expected = first.state_dict(), read(first)
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert read(resumed) == expected


@pytest.mark.parametrize("service", ["process", "thread"])
def test_dataloader2_takes_kdpipes_services_as_checkpointable(service: str) -> None:
    loader = DataLoader2(dealt(), reading_service=SERVICES[service]())
    assert isinstance(loader.reading_service, CheckpointableReadingServiceInterface)
    loader.shutdown()


@pytest.mark.parametrize("service", OWN)
def test_an_iterator_pauses_after_its_limit_and_resumes(service: str) -> None:
    first, second = epochs(2)
    with kdp.Loader(dealt(), reading_service=SERVICES[service]()) as loader:
        batches = iter(loader)
        batches.limit(3)
        assert read(batches) == first[:3]
        assert read(batches) == []
        batches.resume()
        assert read(batches) == first[3:6]
        batches.limit(None)
        assert read(batches) == first[6:]
        assert read(loader) == second
        with pytest.raises(ValueError, match="`num_batches` must be an integer of at least 1"):
            batches.limit(0)


@pytest.mark.parametrize("service", OWN)
def test_a_paused_iterator_returns_no_batch_until_it_resumes(service: str) -> None:
    (first,) = epochs(1)
    with kdp.Loader(dealt(), reading_service=SERVICES[service]()) as loader:
        batches = iter(loader)
        assert next(batches)[0].tolist() == first[0]
        batches.pause()
        assert read(batches) == []
        state = loader.state_dict()
        batches.resume()
        assert read(batches) == first[1:]
    with kdp.Loader(dealt()) as resumed:
        resumed.load_state_dict(state)
        assert read(resumed) == first[1:]


def test_the_end_of_an_epoch_may_be_reached_twice() -> None:
    with kdp.Loader(dealt()) as loader:
        batches = iter(loader)
        list(batches)
        state = loader.state_dict()
        assert list(batches) == []
        assert loader.state_dict() == state


def test_an_older_iterator_of_a_loader_raises() -> None:
    with kdp.Loader(dealt()) as loader:
        older, newer = iter(loader), iter(loader)
        with pytest.raises(RuntimeError, match="another iterator has been created"):
            next(older)
        assert read(newer) == epochs(1)[0]


class OtherService:
    """A reading service of a user's own, with the methods of the interface and no base class."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def initialize(self, datapipe: Any) -> Any:
        self.calls.append("initialize")
        return datapipe

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        self.calls.append("initialize_iteration")
        return None

    def finalize_iteration(self) -> None:
        self.calls.append("finalize_iteration")

    def finalize(self) -> None:
        self.calls.append("finalize")


def test_a_loader_uses_the_interface_of_a_reading_service() -> None:
    loader = kdp.Loader(dealt(), reading_service=OtherService())
    assert [read(loader), read(loader)] == epochs(2)
    loader.close()
    epoch = ["initialize_iteration", "finalize_iteration"]
    assert loader.reading_service.service.calls == ["initialize", *epoch, *epoch, "finalize_iteration", "finalize"]


def test_a_loader_rejects_a_sequence_with_a_service_of_kdpipes() -> None:
    sequence = SequentialReadingService(kdp.ThreadReadingService(2))
    with pytest.raises(TypeError) as error:
        kdp.Loader(dealt(), reading_service=sequence)
    assert "Pass the ThreadReadingService without SequentialReadingService" in str(error.value)


def test_an_iterator_of_another_service_ends_with_its_loader() -> None:
    loader = kdp.Loader(dealt(), reading_service=OtherService())
    batches = iter(loader)
    next(batches)
    loader.shutdown()
    with pytest.raises(RuntimeError) as error:
        next(batches)
    assert "workers of this iterator have been ended" in str(error.value)
    assert read(loader) == epochs(2)[1]


def test_the_loader_itself_imports_nothing_of_dataloader2() -> None:
    program = (
        "import sys, kdpipes as kdp\n"
        "pipe = kdp.from_dataset([(n, 0) for n in range(4)]).select('x').deal(batch_size=2).collate_samples()\n"
        "with kdp.Loader(pipe, num_workers=1) as loader:\n"
        "    assert len(list(loader)) == 2\n"
        "print([name for name in sys.modules if name.startswith('torchdata.dataloader2.dataloader2')])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("service", [*OWN, "torchdata's in process", None])
@pytest.mark.parametrize("make_loader", [kdp.Loader, DataLoader2])
def test_threads_share_one_iterator(make_loader: Any, service: str | None) -> None:
    if make_loader is DataLoader2 and service not in OWN:
        pytest.skip("only torchdata's code runs, whose generators threads cannot share")
    loader = make_loader(dealt(), reading_service=None if service is None else SERVICES[service]())
    try:
        for expected in epochs(2):
            assert sorted(pulled(iter(loader))) == sorted(expected)
    finally:
        loader.shutdown()


def pulled(batches: Any) -> list[list[int]]:
    """Return what three threads take from one iterator; each of them must see its end."""
    taken: list[list[int]] = []
    ended: list[bool] = []

    def pull() -> None:
        taken.extend(read(batches))
        ended.append(True)

    pullers = [threading.Thread(target=pull, daemon=True) for _ in range(3)]
    for puller in pullers:
        puller.start()
    for puller in pullers:
        puller.join(60)
    assert ended == [True] * 3
    return taken


class RankLoader(kdp.Loader):
    """Wraps the state, as torchtitan does for its ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"rank 0": super().state_dict()}

    def load_state_dict(self, state_dict: Any, *, strict: bool = True) -> None:
        super().load_state_dict(state_dict["rank 0"], strict=strict)


@pytest.mark.parametrize("service", OWN)
def test_a_subclass_may_wrap_the_state(service: str) -> None:
    with RankLoader(dealt(), reading_service=SERVICES[service]()) as loader:
        list(loader)
        begun = read(islice(iter(loader), 3))
        state = loader.state_dict()
    with RankLoader(dealt(), reading_service=SERVICES[service]()) as again:
        again.load_state_dict(state)
        assert again.epoch == 1
        assert [begun + read(again), read(again)] == epochs(3)[1:]


@pytest.mark.parametrize("service", ["torchdata's process", "torchdata's in process"])
def test_a_subclass_may_wrap_the_state_of_whole_epochs(service: str) -> None:
    with RankLoader(dealt(), reading_service=SERVICES[service]()) as loader:
        list(loader)
        state = loader.state_dict()
    with RankLoader(dealt(), reading_service=SERVICES[service]()) as again:
        again.load_state_dict(state)
        assert again.epoch == 1
        assert sorted(read(again)) == sorted(epochs(2)[1])


def test_a_subclass_that_wraps_the_state_reads_from_any_batch() -> None:
    with RankLoader(dealt()) as loader:
        list(loader)
        assert read(loader.from_batch(4)) == epochs(2)[1][4:]


NO_POSITION: list[Callable[[], Any]] = [
    lambda: None,
    InProcessReadingService,
    lambda: MultiProcessingReadingService(1),
]


@pytest.mark.parametrize("make", NO_POSITION)
def test_a_state_of_dataloader2_without_an_epoch_is_a_warning(make: Any) -> None:
    loader = DataLoader2(dealt(), reading_service=make())
    list(loader)
    state = loader.state_dict()
    loader.shutdown()
    again = DataLoader2(dealt(), reading_service=make())
    with pytest.warns(UserWarning, match=r"state of DataLoader2 holds neither the epoch.*ProcessReadingService"):
        again.load_state_dict(state)
    again.shutdown()


@pytest.mark.parametrize("service", OWN)
def test_a_state_of_dataloader2_with_kdpipes_services_is_exact(service: str) -> None:
    loader = DataLoader2(dealt(), reading_service=SERVICES[service]())
    list(loader)
    read(islice(iter(loader), 3))
    state = loader.state_dict()
    loader.shutdown()
    again = DataLoader2(dealt(), reading_service=SERVICES[service]())
    again.load_state_dict(state)
    assert [read(again), read(again)] == [epochs(2)[1][3:], epochs(3)[2]]
    again.shutdown()


def test_copies_of_a_chain_are_no_warning() -> None:
    DataLoader2(dealt(), reading_service=MultiProcessingReadingService(1)).shutdown()
    for copied in (copy.deepcopy(dealt()), pickle.loads(pickle.dumps(dealt()))):
        assert read(copied) == epochs(1)[0]
