"""The state and the epoch of a dealt chain, alone and as the dataset of torch's loaders."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.demo import write_photo_shards
from kdpipes.storage.urls import expand_urls
from tests.torchdata_parts import StatefulDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # which StatefulDataLoader calls
]
both = pytest.mark.parametrize("flavour", ["map", "iter"])


def draw(x: int, rng: Any) -> int:
    return x * 1000 + int(rng.integers(1000))


def chain(flavour: str = "map", *, batch_size: int = 4, seed: int = 1) -> Any:
    items = [(number, 0) for number in range(18)]
    source = kdp.from_dataset(items) if flavour == "map" else IterableWrapper(items).to_samples(fields="x y")
    return source.transform("x", draw).select("x").deal(batch_size=batch_size, shuffle=flavour == "map", seed=seed)


def collated(flavour: str = "map") -> Any:
    return chain(flavour).collate_samples()


def values(batches: Any) -> list[list[int]]:
    return [x.tolist() for (x,) in batches]


def epochs(flavour: str, number: int) -> list[list[list[int]]]:
    pipe = collated(flavour)
    return [values(pipe) for _ in range(number)]


@both
@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("batch", [0, 3, 5])
def test_a_chain_resumes_where_its_state_was_taken(flavour: str, epoch: int, batch: int) -> None:
    expected = epochs(flavour, 4)
    pipe = collated(flavour)
    pipe.set_epoch(epoch)
    assert values(islice(iter(pipe), batch)) == expected[epoch][:batch]
    state = json.loads(json.dumps(pipe.state_dict()))
    fresh = collated(flavour)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert [values(fresh), values(fresh)] == [expected[epoch][batch:], expected[epoch + 1]]


@both
def test_a_state_after_the_last_batch_means_the_next_epoch(flavour: str) -> None:
    expected = epochs(flavour, 2)
    pipe = collated(flavour)
    list(pipe)
    assert (pipe.state_dict()["epoch"], pipe.state_dict()["batch"]) == (1, 0)
    fresh = collated(flavour)
    fresh.load_state_dict(pipe.state_dict())
    assert values(fresh) == expected[1]


def test_another_epoch_drops_a_state_that_was_loaded() -> None:
    expected = epochs("map", 2)
    pipe = collated()
    next(iter(pipe))
    state = pipe.state_dict()
    pipe.load_state_dict(state)
    pipe.set_epoch(1)
    assert values(pipe) == expected[1]
    pipe.load_state_dict(state)
    pipe.set_epoch(0)
    assert values(pipe) == expected[0][1:]


def test_all_pipes_after_deal_have_epochs() -> None:
    expected = epochs("map", 3)
    for pipe in (collated(), collated().to_device("cpu"), collated().map(tuple).to_device("cpu")):
        pipe.set_epoch(2)
        assert values(pipe) == expected[2]


def test_a_state_of_another_chain_is_an_error() -> None:
    with pytest.raises(ValueError, match="of `deal` have changed"):
        chain(seed=2).load_state_dict(chain(seed=1).state_dict())
    with pytest.raises(ValueError, match="global batches of 2 samples"):
        chain().load_state_dict(chain(batch_size=2).state_dict())
    with pytest.warns(UserWarning, match="of `deal` have changed"):
        chain(seed=2).load_state_dict(chain(seed=1).state_dict(), strict=False)


def test_a_chain_that_holds_batches_back_has_no_state() -> None:
    pipe = collated().prefetch(2).to_device("cpu")
    with pytest.raises(kdp.ChainError, match=r"`to_device` after `\.deal\(\)` may hold batches back.*kdp\.Loader"):
        pipe.state_dict()
    with pytest.raises(kdp.ChainError, match="`prefetch` after"):
        StatefulDataLoader(collated().prefetch(2), batch_size=None).state_dict()


WAYS = [
    pytest.param({"num_workers": 0}, id="no worker"),
    pytest.param({"num_workers": 2}, id="new workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent workers"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "forkserver"}, id="forkserver"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("epoch", "batch"), [(0, 2), (2, 3), (2, 5), (2, None)])
def test_a_stateful_loader_resumes_in_any_epoch(way: dict[str, Any], epoch: int, batch: int | None) -> None:
    expected = epochs("map", 5)
    loader = StatefulDataLoader(collated(), batch_size=None, **way)
    loader.dataset.set_epoch(epoch)
    batches = iter(loader)
    assert values(islice(batches, batch)) == expected[epoch][:batch]
    state = loader.state_dict()
    del batches, loader
    fresh = StatefulDataLoader(collated(), batch_size=None, **way)
    fresh.load_state_dict(state)
    rest = [] if batch is None else [expected[epoch][batch:]]  # after the end, the next epoch begins at once
    assert [values(fresh) for _ in range(len(rest) + 2)] == [*rest, expected[epoch + 1], expected[epoch + 2]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_resumes_after_a_final_stock_pipe(num_workers: int) -> None:
    def made() -> Any:
        return StatefulDataLoader(collated("iter").map(tuple), batch_size=None, num_workers=num_workers)

    expected = epochs("iter", 2)
    loader = made()
    values(loader)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    fresh = made()
    fresh.load_state_dict(state)
    assert values(fresh) == expected[1][1:] == values(batches)


def test_workers_resume_lanes_when_one_has_ended(tmp_path_factory: Any) -> None:
    urls = expand_urls(write_photo_shards(str(tmp_path_factory.mktemp("shards"))))[:3]

    def made() -> Any:
        pipe = kdp.stream_shards(urls).select("key").deal(batch_size=10)
        return StatefulDataLoader(pipe, batch_size=None, num_workers=2)

    loader = made()
    expected = [list(loader), list(loader)]
    for number in range(1, len(expected[0])):
        loader = made()
        batches = iter(loader)
        begun = list(islice(batches, number))
        state = loader.state_dict()
        del batches
        fresh = made()
        fresh.load_state_dict(state)
        assert sorted([*begun, *fresh]) == sorted(expected[0])
    assert sorted(fresh) == sorted(expected[1])


def test_workers_of_torchs_loader_resume_from_a_chains_state() -> None:
    expected = epochs("map", 4)
    pipe = collated()
    pipe.set_epoch(2)
    next(iter(pipe))
    fresh = collated()
    fresh.load_state_dict(pipe.state_dict())
    loader = DataLoader(fresh, batch_size=None, num_workers=2)
    assert [sorted(values(loader)) for _ in range(2)] == [sorted(expected[2][1:]), sorted(expected[3])]


@both
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_from_a_state_of_its_chain(flavour: str, num_workers: int) -> None:
    expected = epochs(flavour, 4)
    pipe = collated(flavour)
    pipe.set_epoch(2)
    next(iter(pipe))
    fresh = collated(flavour)
    fresh.load_state_dict(pipe.state_dict())
    with kdp.Loader(fresh, num_workers=num_workers) as loader:
        assert [values(loader), values(loader)] == [expected[2][1:], expected[3]]


def test_a_loader_takes_the_end_of_a_chains_epoch_for_the_next() -> None:
    pipe = collated()
    pipe.load_state_dict({**pipe.state_dict(), "batch": 5})
    with kdp.Loader(pipe) as loader:
        assert loader.epoch == 1
        assert values(loader) == epochs("map", 2)[1]


def test_accelerate_skips_batches_of_any_epoch_of_a_chain() -> None:
    expected = epochs("map", 4)
    loader = Accelerator(cpu=True).prepare(DataLoader(collated(), batch_size=None))
    loader.set_epoch(2)
    skipped = skip_first_batches(loader, 3)
    skipped.set_epoch(2)  # as transformers' Trainer does
    assert values(skipped) == expected[2][3:]
    loader.set_epoch(3)
    assert values(loader) == expected[3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_dataset_of_torchs_loader_has_epochs(num_workers: int) -> None:
    expected = epochs("map", 4)
    loader = DataLoader(collated().map(tuple), batch_size=None, num_workers=num_workers)
    for epoch in (3, 1):
        loader.dataset.set_epoch(epoch)
        assert values(loader) == expected[epoch]
    assert values(loader) == expected[2]


@pytest.mark.parametrize("end", ["deal", "collate_samples", "map"])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_torchs_loader_may_not_shuffle_batches(end: str, kind: Any) -> None:
    pipe = {"deal": chain(), "collate_samples": collated(), "map": collated().map(tuple)}[end]
    assert len(kind(pipe, batch_size=None, shuffle=False)) == len(pipe)
    with pytest.raises(ValueError, match="use `deal"):
        kind(pipe, batch_size=None, shuffle=True)


def test_a_collate_function_may_take_the_only_batch() -> None:
    loader = DataLoader(collated(), batch_size=1, collate_fn=lambda batches: batches[0])
    assert values(loader) == epochs("map", 1)[0]


def test_items_of_batches_may_be_batched_again() -> None:
    loader = DataLoader(chain().unbatch(), batch_size=8)
    assert [len(x) for (x,) in loader] == [8, 8, 2]


def indexed() -> Any:
    return kdp.from_dataset([(number, 0) for number in range(6)]).transform("x", draw).select("x")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_indexed_chain_has_epochs_in_torchs_loader(num_workers: int) -> None:
    dealt = indexed().deal(batch_size=6)
    expected = [next(iter(dealt)) for _ in range(3)]
    pipe = indexed()
    pipe.set_epoch(1)
    loader = DataLoader(pipe, batch_size=None, num_workers=num_workers)
    assert [tuple(item) for item in loader] == expected[1]
    pipe.set_epoch(2)
    assert [tuple(item) for item in loader] == expected[2]
    assert list(indexed()) == expected[0]


def test_an_epoch_is_not_part_of_what_a_chain_is() -> None:
    before = indexed().deal(batch_size=2).state_dict()
    pipe = indexed()
    pipe.set_epoch(3)
    assert pipe.deal(batch_size=2).state_dict() == before


def test_the_dataset_of_a_loader_may_be_that_of_another() -> None:
    expected = epochs("map", 1)[0]
    dataset = DataLoader(collated(), batch_size=None).dataset
    loader = StatefulDataLoader(DataLoader(dataset, batch_size=None).dataset, batch_size=None)
    assert values(islice(iter(loader), 2)) == expected[:2]
    fresh = StatefulDataLoader(collated(), batch_size=None)
    fresh.load_state_dict(loader.state_dict())
    assert values(fresh) == expected[2:]


def test_a_worker_that_starts_late_does_not_reset_the_epoch() -> None:
    pipe = collated()
    pipe.set_epoch(3)
    dataset: Any = DataLoader(collated(), batch_size=None).dataset
    late = bytes(ForkingPickler.dumps(dataset))
    dataset.load_state_dict(pipe.state_dict())
    copied = pickle.loads(late)
    assert [dataset.state_dict()["epoch"], copied.state_dict()["epoch"]] == [3, 3]
