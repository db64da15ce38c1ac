"""The ranks of an epoch are those of the moment when it begins, whoever iterates, and whatever tells them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

import kdpipes as kdp
from tests.torchdata_parts import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    StatefulDataLoader,
)

NUM_SAMPLES = 22
Loaders = dict[str, Callable[[Any], Any]]
OWN: Loaders = {
    "inline": kdp.Loader,
    "threads": lambda pipe: kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(2)),
    "processes": lambda pipe: kdp.Loader(pipe, num_workers=2),
    "forkserver": lambda pipe: kdp.Loader(pipe, num_workers=1, start_method="forkserver"),
    "torchdata's workers": lambda pipe: kdp.Loader(pipe, reading_service=MultiProcessingReadingService(2)),
}
OTHERS: Loaders = {
    "dataloader": lambda pipe: DataLoader(pipe, batch_size=None),
    "dataloader with workers": lambda pipe: DataLoader(pipe, batch_size=None, num_workers=2),
    "stateful dataloader": lambda pipe: StatefulDataLoader(pipe, batch_size=None, num_workers=1),
    "dataloader2": DataLoader2,
    "dataloader2 in process": lambda pipe: DataLoader2(pipe, reading_service=InProcessReadingService()),
    "dataloader2 with workers": lambda pipe: DataLoader2(pipe, reading_service=MultiProcessingReadingService(2)),
    "dataloader2 with own workers": lambda pipe: DataLoader2(pipe, reading_service=kdp.ProcessReadingService(2)),
    "no loader": lambda pipe: pipe,
}
LOADERS = OWN | OTHERS


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process a rank, as torchrun does."""

    def be(rank: int, num_ranks: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))

    return be


def dealt(**arguments: Any) -> Any:
    pipe = kdp.from_dataset(list(range(NUM_SAMPLES)), "x").select("x")
    return pipe.deal(**({"batch_size": 4, "shuffle": True, "seed": 3} | arguments))


def values(loader: Any) -> list[int]:
    return [x for batch in loader for (x,) in batch]


def shutdown(loader: Any) -> None:
    getattr(loader, "shutdown", bool)()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which StatefulDataLoader calls
@pytest.mark.parametrize("name", LOADERS)
def test_each_rank_of_torchrun_gets_its_part_without_a_group(name: str, be: Any) -> None:
    expected, parts = dealt(batch_size=None, global_batch_size=8), []
    wholes = [values(expected) for _ in range(2)]
    for rank in range(2):
        loader = LOADERS[name](dealt())  # as another rank than it will be
        be(rank, 2)
        parts.append([values(loader) for _ in range(2)])
        shutdown(loader)
    for epoch, whole in enumerate(wholes):
        assert sorted(chain(*(part[epoch] for part in parts))) == sorted(whole)
        assert parts[0][epoch][:4] + parts[1][epoch][:4] == whole[:8]


@pytest.mark.parametrize("name", OWN)
def test_the_length_of_a_loader_is_that_of_the_ranks_now(name: str, be: Any) -> None:
    with OWN[name](dealt()) as loader:
        assert len(loader) == 6
        be(1, 2)
        assert len(loader) == 3
        assert len(list(loader)) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_length_of_torchs_loader_is_that_of_the_ranks_now(num_workers: int, be: Any) -> None:
    loader: Any = DataLoader(dealt(), batch_size=None, num_workers=num_workers)
    assert len(loader) == 6
    be(1, 2)
    assert len(loader) == len(list(loader)) == 3


@pytest.mark.parametrize("name", OWN)
def test_a_loader_follows_ranks_that_change_between_epochs(name: str, be: Any) -> None:
    epochs = [values(epoch) for epoch in (dealt(batch_size=None, global_batch_size=8),) * 2]
    with OWN[name](dealt(batch_size=None, global_batch_size=8)) as loader:
        assert values(loader) == epochs[0]
        be(1, 2)
        assert values(loader) == [*epochs[1][4:8], *epochs[1][12:16], *epochs[1][19:]]


@pytest.mark.parametrize("name", ["inline", "threads", "processes", "dataloader", "dataloader2", "no loader"])
def test_ranks_that_change_inside_an_epoch_are_an_error(name: str, be: Any) -> None:
    loader = LOADERS[name](dealt())
    batches = iter(loader)
    next(batches)
    be(1, 2)
    with pytest.raises(RuntimeError, match="dealt to rank 0 of 1, but this process is now rank 1 of 2"):
        next(batches)
    shutdown(loader)


def test_workers_that_cannot_change_ranks_are_an_error(be: Any) -> None:
    loader: Any = DataLoader(dealt(), batch_size=None, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 6
    be(1, 2)
    with pytest.raises(RuntimeError, match=r"now rank 1 of 2.*kdp\.Loader"):
        iter(loader)


def test_workers_do_not_keep_the_rank_of_an_epoch_before_them(be: Any) -> None:
    pipe = dealt(shuffle=False)
    be(0, 2)
    assert values(DataLoader(pipe, batch_size=None))[:4] == [0, 1, 2, 3]
    be(1, 2)
    assert values(DataLoader(pipe, batch_size=None, num_workers=2))[:4] == [4, 5, 6, 7]


def test_own_workers_in_dataloader2_keep_their_ranks_or_raise(be: Any) -> None:
    loader = DataLoader2(dealt(), reading_service=kdp.ProcessReadingService(1))
    assert len(list(loader)) == 6
    be(1, 2)
    with pytest.raises(RuntimeError, match=r"now rank 1 of 2.*kdp\.Loader"):
        list(loader)
    loader.shutdown()


@pytest.mark.parametrize(
    "named", ["RANK=1", "WORLD_SIZE=2", "RANK=a WORLD_SIZE=2", "SLURM_STEP_NUM_TASKS=2", "OMPI_COMM_WORLD_SIZE=2"]
)
def test_ranks_that_are_unknown_are_warned_of(named: str, be: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in named.split():
        monkeypatch.setenv(*text.split("="))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(kdp.Loader(dealt()))) == 6
    assert all(text in str(caught[0].message) for text in (named[:4], "every rank gets all samples", "WORLD_SIZE=1"))
    assert len(list(kdp.Loader(dealt(ranks=1)))) == 6
    be(0, 1)
    assert len(list(kdp.Loader(dealt()))) == 6


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_chain_for_all_ranks_is_not_dealt(name: str, be: Any) -> None:
    be(1, 2)
    loader = LOADERS[name](dealt(ranks=1))
    assert len(loader if name in OWN else dealt(ranks=1)) == 6
    assert sorted(values(loader)) == list(range(NUM_SAMPLES))
    shutdown(loader)


@pytest.mark.parametrize("ranks", [0, 2, True, None, "all"])
def test_other_values_of_ranks_are_rejected(ranks: Any) -> None:
    with pytest.raises(ValueError, match='`ranks` must be "auto" or 1, but is'):
        dealt(ranks=ranks)


def test_ranks_without_a_deal_are_rejected_when_they_appear(be: Any) -> None:
    loader = kdp.Loader(kdp.from_dataset([1, 2], "x").to_iter_datapipe())
    assert len(list(loader)) == 2
    be(0, 2)
    with pytest.raises(kdp.ChainError, match=r"Each of the 2 ranks would deliver every sample"):
        list(loader)


class Wrapped(IterableDataset[Any]):
    """A dataset that torch's DataLoader does not take for a chain."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def __iter__(self) -> Any:
        return iter(self.pipe)


def test_workers_that_would_each_give_every_batch_are_rejected() -> None:
    with pytest.raises(
        kdp.ChainError, match=r"Each of the 2 workers would yield every batch.*a Wrapped wraps the chain"
    ):
        list(DataLoader(Wrapped(dealt()), batch_size=None, num_workers=2))
    assert len(list(DataLoader(Wrapped(dealt()), batch_size=None, num_workers=1))) == 6


@pytest.mark.parametrize("name", ["inline", "threads", "processes"])
@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_a_state_inside_an_epoch_fits_ranks_that_appear_later(name: str, uneven: str, be: Any) -> None:
    arguments = {"batch_size": None, "global_batch_size": 8, "uneven": uneven}
    whole = list(kdp.Loader(dealt(**arguments)))
    with OWN[name](dealt(**arguments)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    parts = []
    for rank in range(2):
        with OWN[name](dealt(**arguments)) as resumed:
            resumed.load_state_dict(state)
            be(rank, 2)
            parts.append(list(resumed))
    assert [one + other for one, other in zip(*parts, strict=True)] == whole[1:]


def test_a_state_does_not_fit_ranks_that_change_its_batches(be: Any) -> None:
    with kdp.Loader(dealt()) as loader:
        next(iter(loader))
        state = loader.state_dict()
    resumed = kdp.Loader(dealt())
    resumed.load_state_dict(state)
    be(1, 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="The number of ranks has changed within an epoch"):
            list(resumed)
    with pytest.raises(ValueError, match=r"global batches of 4 samples, but this loader's have 8"):
        resumed.load_state_dict(state)


def test_a_state_names_the_ranks_that_its_batches_were_dealt_to(be: Any) -> None:
    be(0, 2)
    loader = kdp.Loader(dealt())
    next(iter(loader))
    be(0, 1)
    assert loader.state_dict()["global_batch_size"] == 8


def test_without_a_group_ranks_read_lanes_of_their_own(be: Any, photo_shards: str) -> None:
    stream, keys = kdp.stream_shards(photo_shards).select("key"), []
    for rank in range(2):
        be(rank, 2)
        with kdp.Loader(stream.deal(batch_size=7), num_workers=2) as loader:
            keys += values(loader)
    assert len(keys) == len(set(keys)) == 160


@pytest.mark.parametrize(
    "name", ["inline", "processes", "dataloader", "dataloader with workers", "dataloader2", "no loader"]
)
def test_a_rank_that_the_user_names_is_kept(name: str, be: Any) -> None:
    be(3, 4)  # two ranks each need the same batches
    expected = dealt(batch_size=None, global_batch_size=8, ranks=1)
    pipe = apply_sharding(dealt(), 2, 1, SHARDING_PRIORITIES.DISTRIBUTED)
    loader = LOADERS[name](pipe)
    assert values(loader)[:8] == [x for batch in list(expected)[:2] for (x,) in batch[4:]]
    shutdown(loader)


def test_all_ranks_can_have_all_lanes(be: Any, photo_shards: str) -> None:
    be(0, 2)
    pipe = kdp.stream_shards(photo_shards).select("key").deal(batch_size=2, ranks=1)
    assert len(set(values(DataLoader(pipe, batch_size=None, num_workers=2)))) == 160
    assert len(set(values(kdp.Loader(pipe, num_workers=2)))) == 160
