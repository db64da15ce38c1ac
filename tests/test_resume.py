"""The same epochs byte for byte in every set-up, and from every batch on: services, ranks and chains."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import IterDataPipe, graph_settings
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, SequentialReadingService
from torchdata.datapipes.iter import IterableWrapper
from webdataset import TarWriter

import kdpipes as kdp

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")

CLASSES = ("heron", "stork", "gull")


def digest(value: Any) -> str:
    """Return a hash of every byte, type and shape in a batch."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        value = (str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, dict):
        value = {name: digest(part) for name, part in value.items()}
    elif isinstance(value, list | tuple):
        value = (type(value).__name__, [digest(part) for part in value])
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def digests(batches: Any) -> list[str]:
    return [digest(batch) for batch in batches]


def inline() -> None:
    return None


def processes(number: int, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return kdp.ProcessReadingService(number, **options)

    make.__name__ = f"processes{number}{''.join(map(str, options.values()))}"
    return make


def threads(number: int) -> Callable[[], Any]:
    def make() -> Any:
        return kdp.ThreadReadingService(number)

    make.__name__ = f"threads{number}"
    return make


FORKED = [processes(number, start_method="fork") for number in (1, 2, 3, 4)]
FRESH = processes(2, start_method="forkserver")
THREADS = [threads(number) for number in (1, 2, 3)]
SERVICES = [inline, *FORKED, *THREADS]
every_service = pytest.mark.parametrize("service", SERVICES, ids=lambda make: make.__name__)


def of_rank(pipe: Any, num_ranks: int, rank: int) -> Any:
    graph_settings.apply_sharding(pipe, num_ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
    return pipe


def travelled(state: Any) -> Any:
    """Return a state as a checkpoint on disk gives it back."""
    return json.loads(json.dumps(state))


def states_of(loader: Any) -> list[Any]:
    """Return the state before the first batch, after each one, and after the end of the epoch."""
    batches = iter(loader)
    states = [loader.state_dict()]
    for _ in batches:
        states.append(loader.state_dict())
    return [*states, loader.state_dict()]


def without_seed(state: Any) -> Any:
    return {name: value for name, value in state.items() if name != "seed"}


def resumed_everywhere(loader: Any, states: list[Any], epochs: list[list[str]]) -> None:
    """Load each state of the first epoch, and compare what is left of it and the next epoch."""
    for number, state in enumerate(states):
        loader.load_state_dict(travelled(state))
        is_over = number >= len(epochs[0])
        expected = [epochs[1], epochs[2]] if is_over else [epochs[0][number:], epochs[1]]
        assert [digests(loader), digests(loader)] == expected, f"after {number} batches"


def jitter(x: int, rng: np.random.Generator) -> float:
    return x + rng.random()


def number_chain(**cut: Any) -> Any:
    source = kdp.from_dataset([(number, number % 3) for number in range(45)]).filter_classes(valid=[0, 2])
    chain = source.transform("x", jitter).select("x y key ordinal is_padding")
    return chain.deal(**(cut or {"global_batch_size": 8}), shuffle=True, seed=5).collate_samples()


@pytest.fixture(scope="module")
def number_epochs() -> dict[tuple[int, int], list[list[str]]]:
    """Three epochs of each rank of 1, 2 and 4, made without a loader."""
    made = {}
    for num_ranks in (1, 2, 4):
        for rank in range(num_ranks):
            pipe = of_rank(number_chain(), num_ranks, rank)
            made[num_ranks, rank] = [digests(pipe) for _ in range(3)]
    return made


@pytest.fixture(scope="module")
def number_states() -> list[Any]:
    return [without_seed(state) for state in states_of(kdp.Loader(number_chain()))]


@every_service
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_numbers_have_one_order_one_list_of_states_and_go_on_from_each(
    service: Any, num_ranks: int, number_epochs: Any, number_states: list[Any]
) -> None:
    rank = num_ranks - 1
    expected = number_epochs[num_ranks, rank]
    with kdp.Loader(of_rank(number_chain(), num_ranks, rank), reading_service=service()) as loader:
        assert [without_seed(state) for state in states_of(loader)] == number_states
        assert digests(loader) == expected[1]
        resumed_everywhere(loader, number_states, expected)


def test_workers_that_are_not_forked_have_that_order_and_those_states_too(
    number_epochs: Any, number_states: list[Any]
) -> None:
    with kdp.Loader(of_rank(number_chain(), 2, 0), reading_service=FRESH()) as loader:
        assert [without_seed(state) for state in states_of(loader)] == number_states
        resumed_everywhere(loader, number_states, number_epochs[2, 0])


def _tiny_image(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (10 + number % 3, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 tiny images in three classes of unequal size, as a folder and as two tars."""
    root = tmp_path_factory.mktemp("birds")
    labels = [0] * 8 + [1] * 4 + [2] * 3
    for number, label in enumerate(labels):
        path = root / "folder" / CLASSES[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_tiny_image(number))
    for shard in range(2):
        with TarWriter(str(root / f"birds-{shard}.tar")) as writer:
            for number in range(shard, len(labels), 2):
                writer.write({"__key__": str(number), "png": _tiny_image(number), "cls": str(labels[number])})
    return root


def _crops(plan: Any) -> Any:
    augmented = plan.decode_images("x").record_ctx().transform("x", kdp.RandomResizedCrop(6), kdp.HorizontalFlip())
    return augmented.transform("x", np.asarray).select("x y key ordinal is_padding", return_ctx=True)


def folder_chain(birds: Path, **cut: Any) -> Any:
    plan = kdp.image_folder(birds / "folder").filter_classes(valid=["gull", "heron"]).oversample()
    return _crops(plan.repeat_until(min_size=37)).deal(**cut, shuffle=True, seed=2)


def shard_chain(birds: Path, **cut: Any) -> Any:
    source = kdp.open_shards(str(birds / "birds-{0..1}.tar"), class_names=CLASSES).rename_fields(x="png", y="cls")
    plan = source.filter_classes(valid=["gull", "heron"]).oversample().repeat_until(min_size=37)
    return _crops(plan).deal(**cut, shuffle=True, seed=2)


def record_chain(birds: Path, **cut: Any) -> Any:
    kdp.write_records(kdp.image_folder(birds / "folder"), birds / "records")  # the first time
    plan = kdp.open_records(birds / "records").filter_classes(valid=["gull", "heron"]).oversample()
    return _crops(plan.repeat_until(min_size=37)).deal(**cut, shuffle="shards", window=12, seed=2)


def stream_chain(birds: Path, **cut: Any) -> Any:
    source = kdp.stream_shards(str(birds / "birds-{0..1}.tar"), class_names=CLASSES).rename_fields(x="png", y="cls")
    plan = source.filter_classes(valid=["gull", "heron"]).repeat_until(min_size=37)
    return _crops(plan.shuffle(buffer_size=9)).deal(**cut, seed=2)


def stock_stream_chain(birds: Path, **cut: Any) -> Any:
    source = IterableWrapper(range(42)).shuffle().to_samples(fields="x").transform("x", jitter)
    return source.select("x ordinal").deal(**cut, seed=2)


CHAINS = [folder_chain, shard_chain, record_chain, stream_chain, stock_stream_chain]
every_chain = pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
SETUPS = [
    (inline, 1),
    (threads(3), 2),
    (FORKED[1], 1),
    (FORKED[2], 2),
    (threads(2), 4),
    (inline, 4),
    (FORKED[3], 1),
    (threads(1), 1),
]


@every_chain
@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_a_run_that_changes_workers_and_ranks_after_every_batch_gives_what_one_process_gives(
    chain: Any, uneven: Any, birds: Path
) -> None:
    pipe = chain(birds, global_batch_size=12, uneven=uneven)
    expected = [digest(item) for _ in range(2) for batch in pipe for item in batch]
    num_batches = 2 * (3 if uneven == "drop" else 4)
    found, state = [], None
    for service, num_ranks in islice(cycle(SETUPS), num_batches):
        states = []
        for rank in range(num_ranks):
            pipe = of_rank(chain(birds, global_batch_size=12, uneven=uneven), num_ranks, rank)
            with kdp.Loader(pipe, reading_service=service()) as loader:
                if state is not None:
                    loader.load_state_dict(travelled(state))
                found += [digest(item) for item in next(iter(loader))]
                states.append(loader.state_dict())
        assert len({json.dumps(without_seed(state)) for state in states}) == 1
        state = states[-1]
    assert found == expected


@every_chain
@pytest.mark.parametrize("service", [inline, FORKED[2], threads(2)], ids=lambda make: make.__name__)
def test_images_and_streams_go_on_from_every_batch(chain: Any, service: Any, birds: Path) -> None:
    pipe = chain(birds, batch_size=6)
    epochs = [digests(pipe) for _ in range(3)]
    states = states_of(kdp.Loader(chain(birds, batch_size=6), reading_service=threads(3)()))
    with kdp.Loader(chain(birds, batch_size=6), reading_service=service()) as loader:
        resumed_everywhere(loader, states, epochs)


# What stands behind `deal`.


def _is_kept(x: int) -> bool:
    return x % 5 < 3


def _kept(batch: list[Any]) -> bool:
    return batch[0][0] % 3 > 0


def _doubled(item: Any) -> list[Any]:
    return [item, item] if item[0] % 2 else []


def dealt(size: int = 17) -> Any:
    return kdp.from_dataset([(n, 0) for n in range(size)]).transform("x", int).select("x").deal(3, shuffle=True, seed=1)


TAILS: dict[str, Callable[[Any], Any]] = {
    "map": lambda pipe: pipe.map(lambda batch: [x * 2 for (x,) in batch]),
    "filter": lambda pipe: pipe.filter(_kept),
    "unbatch": lambda pipe: pipe.unbatch(),
    "flatmap": lambda pipe: pipe.unbatch().flatmap(_doubled),
    "all_of_them": lambda pipe: pipe.filter(_kept).unbatch().map(list).flatmap(_doubled).filter(lambda x: x[0] > 3),
    "nothing_is_left": lambda pipe: pipe.filter(lambda batch: False),
}


@pytest.mark.parametrize("tail", TAILS)
def test_a_tail_without_memory_goes_on_from_each_of_its_items(tail: str) -> None:
    pipe = TAILS[tail](dealt())
    epochs = [digests(pipe) for _ in range(3)]
    states = states_of(kdp.Loader(TAILS[tail](dealt()), reading_service=threads(2)()))
    assert len(states) == len(epochs[0]) + 2
    for service in (inline, FORKED[2], threads(2)):
        with kdp.Loader(TAILS[tail](dealt()), reading_service=service()) as loader:
            resumed_everywhere(loader, states, epochs)


@pytest.mark.parametrize("tail", ["unbatch", "flatmap"])
def test_behind_the_last_item_of_an_only_batch_comes_the_next_epoch(tail: str) -> None:
    pipe = TAILS[tail](dealt(3))
    epochs = [list(pipe) for _ in range(2)]
    loader = kdp.Loader(TAILS[tail](dealt(3)))
    list(islice(loader, len(epochs[0])))
    resumed = kdp.Loader(TAILS[tail](dealt(3)))
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == epochs[1]


MEMORIES: dict[str, Callable[[Any], Any]] = {
    "shuffle": lambda pipe: pipe.shuffle(),
    "batch": lambda pipe: pipe.batch(2),
    "header": lambda pipe: pipe.header(2),
    "prefetch": lambda pipe: pipe.prefetch(2),
    "enumerate": lambda pipe: pipe.enumerate(),
}


@pytest.mark.parametrize("tail", MEMORIES)
def test_a_tail_with_memory_goes_on_at_the_same_number_of_workers_only(tail: str) -> None:
    with kdp.Loader(MEMORIES[tail](dealt()), reading_service=FORKED[1]()) as loader:
        loader.seed(3)
        states = states_of(loader)
        epochs = [digests(loader) for _ in range(2)]
        loader.load_state_dict(states[0])
        epochs.insert(0, digests(loader))
    with kdp.Loader(MEMORIES[tail](dealt()), reading_service=threads(2)()) as loader:
        resumed_everywhere(loader, states, epochs)
    with pytest.raises(ValueError, match="taken with 2 workers, but there are 3"):
        kdp.Loader(MEMORIES[tail](dealt()), reading_service=threads(3)()).load_state_dict(states[1])


# DataLoader2 itself.


@pytest.mark.parametrize("is_new", [False, True])
def test_a_dataloader2_goes_on_with_the_very_next_batch(is_new: bool) -> None:
    pipe = number_chain()
    epochs = [digests(pipe) for _ in range(2)]
    loader = DataLoader2(number_chain(), reading_service=kdp.ProcessReadingService(2))
    states = states_of(loader)
    loader.shutdown()
    for number in (0, 1, 3, len(epochs[0])):
        if is_new:
            resumed = DataLoader2.from_state(states[number], kdp.ProcessReadingService(3))
        else:
            resumed = DataLoader2(number_chain(), reading_service=kdp.ProcessReadingService(3))
            resumed.load_state_dict(states[number])
        assert resumed.state_dict() == states[number]
        assert digests(resumed) == (epochs[0][number:] or epochs[1])
        if number < len(epochs[0]):
            assert digests(resumed) == epochs[1]
        resumed.shutdown()


def test_a_service_inside_a_sequential_one_keeps_its_state() -> None:
    pipe = number_chain()
    epochs = [digests(pipe) for _ in range(3)]
    sequence = SequentialReadingService(kdp.ThreadReadingService(2))
    loader = DataLoader2(number_chain(), reading_service=sequence)
    next(iter(loader))
    state = loader.state_dict()
    loader.shutdown()
    resumed = DataLoader2.from_state(state, SequentialReadingService(kdp.ThreadReadingService(3)))
    assert [digests(resumed), digests(resumed)] == [epochs[0][1:], epochs[1]]
    resumed.shutdown()
    with kdp.Loader(number_chain(), reading_service=sequence) as ours:
        resumed_everywhere(ours, states_of(ours), epochs)


def test_a_dataloader2_over_a_stock_chain_goes_on_in_the_order_that_it_had() -> None:
    loader = DataLoader2(stock(), reading_service=kdp.ThreadReadingService(2))
    loader.seed(4)
    items = iter(loader)
    seen = list(islice(items, 5))
    state = loader.state_dict()
    resumed = DataLoader2.from_state(state, kdp.ThreadReadingService(2))
    assert sorted(seen + list(resumed)) == [*range(-11, 1)]
    loader.shutdown()
    resumed.shutdown()


@pytest.mark.parametrize("service", [FORKED[1], threads(2)], ids=lambda make: make.__name__)
@pytest.mark.parametrize("make_loader", [kdp.Loader, DataLoader2])
def test_a_limit_pauses_the_epoch_at_the_right_state(make_loader: Any, service: Any) -> None:
    expected = digests(number_chain())
    loader = make_loader(number_chain(), reading_service=service())
    batches = iter(loader)
    batches.limit(2)
    assert digests(batches) == expected[:2]
    state = loader.state_dict()
    batches.resume()
    assert digests(batches) == expected[2:4]
    resumed = make_loader(number_chain(), reading_service=service())
    resumed.load_state_dict(state)
    assert digests(resumed) == expected[2:]
    loader.shutdown()
    resumed.shutdown()


def test_a_loader_that_was_paused_goes_on_where_a_state_says() -> None:
    expected = digests(number_chain())
    with kdp.Loader(number_chain()) as loader:
        batches = iter(loader)
        batches.limit(2)
        list(batches)
        loader.load_state_dict(loader.state_dict())
        assert digests(loader) == expected[2:]


# Chains without `deal`, and several of them.


def negative(x: int) -> int:
    return -x


def stock(size: int = 12) -> Any:
    return IterableWrapper(range(size)).shuffle().sharding_filter().map(negative)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_stock_chain_gives_all_once_in_one_order_and_goes_on_from_each_item(number: int) -> None:
    with kdp.Loader(stock(), reading_service=processes(number)()) as loader:
        loader.seed(4)
        states = states_of(loader)
        loader.load_state_dict(states[0])
        epochs = [list(loader) for _ in range(3)]
    assert all(sorted(epoch) == [*range(-11, 1)] for epoch in epochs)
    assert epochs[0] != epochs[1]
    with kdp.Loader(stock(), reading_service=threads(number)()) as loader:
        resumed_everywhere(loader, states, [digests(epoch) for epoch in epochs])


@settings(max_examples=25)
@given(size=st.integers(0, 12), number=st.integers(1, 4), kept=st.sets(st.integers(0, 11)), taken=st.integers(0, 13))
def test_workers_of_uneven_lengths_lose_and_double_nothing(size: int, number: int, kept: set[int], taken: int) -> None:
    def chain() -> Any:
        return IterableWrapper(range(size)).sharding_filter().filter(kept.__contains__)

    parts = [[n for n in range(worker, size, number) if n in kept] for worker in range(number)]
    expected = [part[place] for place in range(size) for part in parts if place < len(part)]
    with kdp.Loader(chain(), reading_service=threads(number)()) as loader:
        assert [list(loader), list(loader)] == [expected, expected]
        assert list(islice(loader, taken)) == expected[:taken]
        state = loader.state_dict()
    with kdp.Loader(chain(), reading_service=threads(number)()) as loader:
        loader.load_state_dict(travelled(state))
        assert list(loader) == (expected[taken:] or expected)


def test_two_dealt_chains_side_by_side_have_one_order_and_go_on() -> None:
    def chain() -> Any:
        return number_chain(batch_size=4).zip(dealt(24))

    pipe = chain()
    epochs = [digests(pipe) for _ in range(3)]
    assert len(epochs[0]) == 8
    for service in (inline, FORKED[1], threads(2), threads(3)):
        with kdp.Loader(chain(), reading_service=service()) as loader:
            states = states_of(loader)
            assert digests(loader) == epochs[1]
            resumed_everywhere(loader, states, epochs)


class Endless(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


@pytest.mark.parametrize("service", [inline, FORKED[1], threads(2)], ids=lambda make: make.__name__)
def test_an_endless_stream_is_left_and_gone_on_with(service: Any) -> None:
    def chain() -> Any:
        return Endless().shuffle(buffer_size=5).to_samples(fields="x").select("x").deal(batch_size=3, seed=1)

    pipe = chain()
    epochs = [list(islice(pipe, 6)) for _ in range(2)]
    with kdp.Loader(chain(), reading_service=service()) as loader:
        assert list(islice(loader, 2)) == epochs[0][:2]
        state = loader.state_dict()
        assert list(islice(loader, 6)) == epochs[1]
        loader.load_state_dict(state)
        assert list(islice(loader, 4)) == epochs[0][2:]


@pytest.mark.parametrize("service", [inline, FORKED[3], threads(3)], ids=lambda make: make.__name__)
@pytest.mark.parametrize("size", [0, 1])
def test_no_sample_and_one_sample_are_epochs_too(size: int, service: Any) -> None:
    streamed = IterableWrapper(range(size)).to_samples(fields="x").select("x").deal(batch_size=2)
    indexed = kdp.from_dataset([(n, 0) for n in range(size)]).select("x").deal(batch_size=2)
    for pipe in (streamed, indexed, indexed.unbatch()):
        expected = list(pipe)
        with kdp.Loader(pipe, reading_service=service()) as loader:
            assert [list(loader), list(loader)] == [expected, expected]
            state = loader.state_dict()
            loader.load_state_dict(travelled(state))
            assert [list(loader), list(loader)] == [expected, expected]
            assert loader.state_dict()["epoch"] == state["epoch"] + 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_without_deal_goes_on_in_the_epoch_that_was_set_before(num_workers: int) -> None:
    def chain() -> Any:
        return IterableWrapper(range(6)).to_samples(fields="x").transform("x", jitter).select("x")

    pipe = chain()
    pipe.set_epoch(3)
    expected = list(pipe)
    pipe.set_epoch(3)
    with kdp.Loader(pipe, num_workers) as loader:
        assert list(islice(loader, 2)) == expected[:2]
        state = loader.state_dict()
    with kdp.Loader(chain(), num_workers) as loader:
        loader.load_state_dict(state)
        assert list(loader) == expected[2:]


def test_set_epoch_counts_from_0_also_for_a_stream_that_was_looked_at() -> None:
    pipe = IterableWrapper(range(6)).to_samples(fields="x").transform("x", jitter).select("x")
    epochs = [list(pipe) for _ in range(3)]
    with kdp.Loader(pipe) as loader:
        loader.set_epoch(1)
        assert list(loader) == epochs[1]
