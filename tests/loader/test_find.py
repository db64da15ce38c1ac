"""`find`: the samples of any batch, the batches of any sample, and any batch again, without the ones before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

import kdpipes as kdp
from kdpipes.core.errors import ChainError
from kdpipes.demo import write_photo_folder
from tests.resuming import travelled
from tests.work.replaying import plus_random, told

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")

NUMBERS = [(n, n % 3) for n in range(11)]


class Shift:
    """Adds a recorded number."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"by": rng.random(3).tolist()}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        return torch.tensor(params["by"]) + value


def augmented(source: Any) -> Any:
    shifted = source.record_ctx().transform("x", Shift(), plus_random)
    return shifted.select("x y ordinal is_padding", return_ctx=True)


def indexed() -> Any:
    return augmented(kdp.from_dataset(NUMBERS).oversample())


def stream() -> Any:
    source = IterableWrapper(NUMBERS).shuffle(buffer_size=4).to_samples(fields="x y")
    return augmented(source.oversample(class_counts={0: 3, 1: 2, 2: 1}).shuffle(buffer_size=5))


def by_length() -> Any:
    return augmented(kdp.from_dataset(NUMBERS).add_field("length", lambda sample: 1 + sample["x"] % 4))


CHAINS: dict[str, Callable[[], Any]] = {
    "indexed": lambda: indexed().deal(batch_size=3, shuffle=True, seed=4).collate_samples(),
    "indexed, padded": lambda: indexed().deal(batch_size=5, shuffle=True, uneven="pad").collate_samples(),
    "indexed, dropped": lambda: indexed().deal(batch_size=5, shuffle=True, uneven="drop").collate_samples(),
    "stream": lambda: stream().deal(batch_size=4, seed=7).collate_samples(),
    "stream, padded": lambda: stream().deal(batch_size=4, uneven="pad").collate_samples(),
    "by length": lambda: (
        by_length().deal(shuffle=True, batching=kdp.by_length("length", max_tokens=9)).collate_samples()
    ),
    "by length, padded": lambda: (
        by_length()
        .deal(global_batch_size=3, uneven="pad", batching=kdp.by_length("length", global_max_tokens=8))
        .collate_samples()
    ),
    "mixup": lambda: indexed().deal(batch_size=4, shuffle=True).collate_samples().mixup(num_classes=3),
    "mixup twice": lambda: (
        stream().deal(batch_size=4).collate_samples().mixup(num_classes=3).mixup(0.5, p=0.5, num_classes=3)
    ),
    "cutmix": lambda: (
        augmented(kdp.from_dataset([(torch.full((1, 5, 6, 3), float(n)), n % 3) for n in range(9)]))
        .deal(batch_size=4, shuffle=True, seed=1)
        .collate_samples()
        .cutmix(num_classes=3)
    ),
    "a map behind": lambda: indexed().deal(batch_size=3, shuffle=True).collate_samples().map(lambda batch: [batch]),
}
every_chain = pytest.mark.parametrize("name", CHAINS)

SERVICES: dict[str, Callable[[], dict[str, Any]]] = {
    "inline": lambda: {"num_workers": 0},
    "2 workers": lambda: {"num_workers": 2},
    "3 threads": lambda: {"reading_service": kdp.ThreadReadingService(3)},
}


def recorded(loader: Any) -> tuple[list[Any], list[list[Any]]]:
    """Return the states before each of two epochs, after each batch and at the end; and the batches."""
    states, epochs = [loader.state_dict()], []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(told(batch))
            states.append(loader.state_dict())
    return [travelled(state) for state in states], epochs


@every_chain
@pytest.mark.parametrize("service", SERVICES)
def test_every_batch_of_two_epochs_can_be_built_again(name: str, service: str) -> None:
    chain = CHAINS[name]()
    with kdp.Loader(chain, **SERVICES[service]()) as loader:
        states, epochs = recorded(loader)
        assert len({str(epoch) for epoch in epochs}) == 2
    for epoch, batches in enumerate(epochs):
        for number, batch in enumerate(batches):
            assert told(kdp.find(chain, {**states[0], "epoch": epoch}, number).load()) == batch


@every_chain
def test_any_state_will_do(name: str) -> None:
    chain = CHAINS[name]()
    with kdp.Loader(chain, num_workers=2) as loader:
        states, epochs = recorded(loader)
    for state in states:
        epoch = epochs[state["epoch"]] if state["epoch"] < 2 else []
        for number in range(len(epoch)):
            assert told(kdp.find(chain, state, number).load()) == epoch[number]
        coming = [batch for batches in epochs[state["epoch"] :] for batch in batches][state["batch"] :]
        if coming:
            assert told(kdp.find(chain, state).load()) == coming[0], "the next one"


@pytest.fixture
def shards(photo_shards: str) -> Any:
    source = kdp.stream_shards(photo_shards).rename_fields(x="jpg", y="cls").decode_images().record_ctx()
    return source.transform("x", kdp.RandomResizedCrop(4), kdp.HorizontalFlip()).select("x y key", return_ctx=True)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("behind", ["nothing", "shuffle"])
def test_streams_are_read_again(shards: Any, num_workers: int, behind: str) -> None:
    pipe = shards if behind == "nothing" else shards.source.shuffle(buffer_size=7).select("x y key", return_ctx=True)
    chain = pipe.deal(batch_size=24, seed=3).collate_samples()
    with kdp.Loader(chain, num_workers=num_workers) as loader:
        states, epochs = recorded(loader)
    for place, state in enumerate(states[: len(epochs[0])]):
        assert told(kdp.find(chain, state).load()) == epochs[0][place]
        for number in (0, 3):
            assert told(kdp.find(chain, state, number).load()) == epochs[0][number]
    assert told(kdp.find(chain, {**states[0], "epoch": 1}, 2).load()) == epochs[1][2]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_batches_of_a_rank_are_its_own(rank: int) -> None:
    def of_rank() -> Any:
        chain = indexed().deal(global_batch_size=4, shuffle=True, uneven="pad", seed=4)
        chain.apply_sharding(2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        return chain.collate_samples()

    with kdp.Loader(of_rank(), num_workers=2) as loader:
        states, epochs = recorded(loader)
    for number, batch in enumerate(epochs[0]):
        assert told(kdp.find(of_rank(), states[-2], number).load()) == epochs[states[-2]["epoch"]][number]
        assert told(kdp.find(of_rank(), states[0], number).load()) == batch


def test_no_other_sample_is_loaded() -> None:
    loads: list[int] = []

    def load(sample: Any) -> int:
        loads.append(sample.index)
        return int(sample["x"])

    chains = {
        "indexed": kdp.from_dataset(NUMBERS).add_field("z", load).select("z").deal(batch_size=3, shuffle=True, seed=2),
        "stream": IterableWrapper(NUMBERS).to_samples(fields="x y").add_field("z", load).select("z").deal(batch_size=3),
    }
    for chain in chains.values():
        loads.clear()  # the function's closure is part of the chain
        with kdp.Loader(chain) as loader:
            state, epochs = loader.state_dict(), [list(loader) for _ in range(2)]
        for epoch, batches in enumerate(epochs):
            for number, batch in enumerate(batches):
                loads.clear()
                assert kdp.find(chain, {**state, "epoch": epoch}, number).load() == batch
                assert loads == [index for (index,) in batch]


def test_building_again_changes_no_chain_and_no_loader() -> None:
    chain = CHAINS["stream"]()
    expected = [[told(batch) for batch in chain] for _ in range(2)]
    with kdp.Loader(CHAINS["stream"]()) as loader:
        for epoch in range(2):
            seen = []
            for number, batch in enumerate(loader):
                state = loader.state_dict()
                seen.append(told(batch))
                again = kdp.find(chain, {**state, "epoch": epoch}, number).load()
                assert told(again) == seen[-1]
                assert loader.state_dict() == state
            assert seen == expected[epoch]


def test_what_is_no_state_and_no_number_is_rejected() -> None:
    chain = CHAINS["indexed"]()
    with kdp.Loader(chain) as loader:
        state = loader.state_dict()
    for wrong in ("state", {}, {"epoch": 0}):
        with pytest.raises(ValueError, match="`state` must be what `state_dict\\(\\)` of a Loader returns"):
            kdp.find(chain, wrong, 0).load()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`batch` must be an integer of at least 0, but is -1"):
        kdp.find(chain, state, -1).load()
    for number in (1.0, True):
        with pytest.raises(TypeError, match="`batch` must be an integer of at least 0"):
            kdp.find(chain, state, number).load()  # type: ignore[arg-type]


def test_the_state_of_another_chain_is_rejected() -> None:
    with kdp.Loader(CHAINS["indexed"]()) as loader:
        state = loader.state_dict()
    for other in ("stream", "mixup", "indexed, padded"):
        with pytest.raises(ValueError, match="The state"):
            kdp.find(CHAINS[other](), state, 0).load()


@every_chain
def test_a_number_behind_the_last_batch_is_an_error(name: str) -> None:
    chain = CHAINS[name]()
    with kdp.Loader(chain) as loader:
        state, num_batches = loader.state_dict(), sum(1 for _ in loader)
    for epoch in range(2):
        for number in (num_batches, num_batches + 1, num_batches + 100):
            with pytest.raises(IndexError, match=f"Epoch {epoch} has no batch {number}"):
                kdp.find(chain, {**state, "epoch": epoch}, number).load()


@pytest.mark.parametrize("kind", ["left out", "filtered out"])
def test_a_batch_without_samples_is_an_error(kind: str) -> None:
    items = [(1, 0), (2, 0), (0, 0), (0, 0), (3, 0), (4, 0)]
    chain = kdp.from_dataset(items).transform("x", lambda x: 1 / x).on_error("skip").select("x").deal(batch_size=2)
    if kind == "filtered out":
        chain = kdp.from_dataset(NUMBERS).select("x").deal(batch_size=2).filter(lambda batch: batch[0][0] != 2)
    with kdp.Loader(chain) as loader:
        state, batches = loader.state_dict(), list(loader)
    assert kdp.find(chain, state, 2).load() == batches[1]
    with pytest.raises(IndexError):
        kdp.find(chain, state, 1).load()


def birds() -> Any:
    return kdp.from_dataset(NUMBERS, class_names=list("abc"))


def told_by_key(chain: Any) -> Any:
    return chain.select("key ordinal is_padding")


PLANS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: told_by_key(birds()).deal(batch_size=2, shuffle=True, seed=3),
    "redrawn": lambda: told_by_key(birds().oversample(mode="exact")).deal(batch_size=2, shuffle=True),
    "weighted": lambda: told_by_key(birds().sample_weighted({"a": 1, "b": 5, "c": 1})).deal(batch_size=2, uneven="pad"),
    "mixed": lambda: told_by_key(birds().mix(birds()[:4].mix(birds()[4:], weights=[1, 2]), weights=[3, 1])).deal(
        global_batch_size=4, uneven="drop"
    ),
    "joined": lambda: told_by_key(birds().join(birds()[::-1].rename_fields(z="x", q="y"))).deal(batch_size=2),
    "by class": lambda: told_by_key(birds()).deal(batching=kdp.by_class(2, 1), shuffle=True),
    "by value": lambda: told_by_key(birds()).deal(batch_size=2, batching=kdp.by_value("y"), shuffle=True, uneven="pad"),
    "by length": lambda: told_by_key(birds().add_field("length", lambda sample: 1 + sample["x"] % 4)).deal(
        shuffle=True, batching=kdp.by_length("length", max_tokens=9), uneven="pad"
    ),
    "continued": lambda: told_by_key(birds()).deal(batch_size=3, shuffle=True, num_batches=2),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_find_names_the_samples_that_are_delivered(name: str, num_ranks: int) -> None:
    delivered: dict[tuple[int, int, int], list[tuple[Any, ...]]] = {}
    for rank in range(num_ranks):
        chain = PLANS[name]()
        chain.apply_sharding(num_ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        with kdp.Loader(chain) as loader:
            for epoch in range(3):
                for number, batch in enumerate(loader):
                    delivered[epoch, number, rank] = batch
            state = loader.state_dict()
    for epoch, number, _ in delivered:
        ranks = num_ranks if name == "mixed" else None  # whose states fit any number of ranks
        found = kdp.find(PLANS[name](), state, number, epoch=epoch, num_ranks=ranks)
        for rank in range(num_ranks):
            samples = [(found.key, found.ordinal, found.is_padding) for found in found if found.rank == rank]
            assert samples == delivered[epoch, number, rank]
    for key in {key for batch in delivered.values() for key, _, _ in batch}:
        steps = sorted({where[:2] for where, batch in delivered.items() if key in [entry[0] for entry in batch]})
        assert kdp.find(PLANS[name](), key=key, epoch=range(3), num_ranks=num_ranks).steps == steps


def test_find_reads_a_stream_up_to_the_batch() -> None:
    source = IterableWrapper(NUMBERS).shuffle(buffer_size=4).to_samples(fields="x y")
    chain = told_by_key(source.shuffle(buffer_size=5)).deal(batch_size=4, seed=7)
    with kdp.Loader(chain) as loader:
        epochs = [list(loader), list(loader)]
    for epoch, batches in enumerate(epochs):
        for number, batch in enumerate(batches):
            samples = kdp.find(chain, epoch=epoch, batch=number).samples
            assert [(sample.key, sample.ordinal, sample.is_padding) for sample in samples] == batch
    assert kdp.find(chain, key=epochs[1][2][0][0], epoch=1).steps.count((1, 2)) == 1


def test_steps_count_from_the_start_of_the_run() -> None:
    chain = PLANS["shuffled"]()
    assert kdp.find(chain, step=len(chain) + 1).samples == kdp.find(chain, epoch=1, batch=1).samples
    with pytest.raises(ValueError, match="pass neither"):
        kdp.find(chain, step=1, epoch=0)
    with pytest.raises(ValueError, match="needs a batch, epochs or the key"):
        kdp.find(chain)
    with pytest.raises(ChainError, match=r"needs a chain with `\.deal"):
        kdp.find(birds(), batch=0)


def test_labels_that_are_drawn_are_those_delivered() -> None:
    chain = birds().transform("y", lambda y: y + random.random()).select("y").deal(batch_size=4, shuffle=True)
    with kdp.Loader(chain) as loader:
        epochs = [list(loader) for _ in range(2)]
    for epoch, batches in enumerate(epochs):
        for number, batch in enumerate(batches):
            assert [(sample.label,) for sample in kdp.find(chain, epoch=epoch, batch=number)] == batch


def test_find_opens_no_image(tmp_path: Path) -> None:
    photos = kdp.image_folder(write_photo_folder(tmp_path))
    chain = photos.decode_images("x").select("x y").deal(batch_size=8, shuffle=True)
    expected = photos.column("key").tolist()
    for path in tmp_path.rglob("*.jpg"):
        path.write_bytes(b"no image")
    (sample, *_) = kdp.find(chain, epoch=2, batch=1)
    assert (expected[sample.position], sample.label) == (sample.key, int(photos.column("y")[sample.position]))


def test_blame_reads_streams() -> None:
    stream = IterableWrapper(range(600)).to_samples(fields="x", key=str).shuffle(buffer_size=300)
    chain = stream.select("x").deal(batch_size=6, num_batches=100)
    losses = [(77,) in batch for _ in range(8) for batch in chain]
    suspects = kdp.find(chain, epoch=range(8)).blame(losses, 3)
    assert [suspect.chance < 0.01 for suspect in suspects] == [suspect.key == "77" for suspect in suspects]
