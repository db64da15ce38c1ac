"""`Loader`: a DataLoader2 with a length that closes itself and can be iterated whatever happened."""

from __future__ import annotations

import inspect
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.shared import sharing
from tests.torchdata_parts import DistributedReadingService, MultiProcessingReadingService, SequentialReadingService


def numbers(size: int = 10) -> Any:
    return kdp.from_dataset([(number, 0) for number in range(size)]).select("x")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_has_a_length(num_workers: int) -> None:
    with kdp.Loader(numbers().deal(batch_size=4).collate_samples(), num_workers=num_workers) as loader:
        assert len(loader) == len(list(loader)) == len(list(loader)) == 3
        assert loader


def test_next_of_a_loader_names_its_iterator() -> None:
    with kdp.Loader(numbers().deal(batch_size=4)) as loader:
        with pytest.raises(TypeError, match=r"`next\(iter\(loader\)\)` returns the first batch"):
            next(loader)
        assert next(iter(loader)) == [(0,), (1,), (2,), (3,)]


def test_an_unknown_length_is_a_type_error() -> None:
    stream = IterableWrapper(iter(range(3)), deepcopy=False).to_samples(fields="x").deal(batch_size=2)
    with pytest.raises(TypeError, match="len"):
        len(kdp.Loader(stream))


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_lambdas_closures_and_local_classes_reach_workers(start_method: str) -> None:
    class Shift:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, x: int) -> int:
            return x + self.by

    pipe = kdp.from_dataset([(1, 0), (2, 0)]).transform("x", Shift(10), lambda x: -x).select("x")
    stocked = pipe.deal(batch_size=1).map(lambda batch: batch[0][0])
    with kdp.Loader(stocked, num_workers=2, start_method=start_method) as loader:
        assert list(loader) == [-11, -12]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_an_error_in_the_chain_comes_the_next_epoch(num_workers: int, tmp_path: Any) -> None:
    broken = tmp_path / "broken"
    broken.touch()

    def check(x: int) -> int:
        if x == 5 and broken.exists():
            raise ArithmeticError(f"number {x}")
        return x

    def epochs(pipe: Any) -> Any:
        return pipe.deal(batch_size=2, shuffle=True, seed=3)

    chain = kdp.from_dataset([(number, 0) for number in range(10)]).transform("x", check).select("x")
    with kdp.Loader(epochs(chain), num_workers=num_workers) as loader:
        with pytest.raises(ArithmeticError, match="number 5") as caught:
            list(loader)
        assert "sample '5'" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        broken.unlink()
        expected = epochs(numbers())
        expected.set_epoch(1)
        assert list(loader) == list(expected)
        assert list(loader) == list(expected)


def test_a_closed_loader_says_so_and_closes_again() -> None:
    loader = kdp.Loader(numbers().deal(batch_size=4), num_workers=1)
    list(loader)
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match=r"closed\. Make a new one"):
        iter(loader)


def test_a_dropped_loader_leaves_no_process() -> None:
    loader = kdp.Loader(numbers().deal(batch_size=1), num_workers=2)
    next(iter(loader))
    del loader  # the fixture of all tests looks for children


def test_a_chain_that_workers_would_double_is_rejected() -> None:
    stream = IterableWrapper(range(4)).to_samples(fields="x")
    with pytest.raises(kdp.ChainError, match=r"Each of the 2 workers.*\.deal\(batch_size=\.\.\.\)"):
        kdp.Loader(stream, num_workers=2)
    with pytest.raises(kdp.ChainError, match="Each of the 3 workers"):
        kdp.Loader(stream, reading_service=MultiProcessingReadingService(3))
    in_sequence = SequentialReadingService(DistributedReadingService(), MultiProcessingReadingService(4))
    with pytest.raises(kdp.ChainError, match="Each of the 4 workers"):
        kdp.Loader(stream, reading_service=in_sequence)
    with kdp.Loader(stream, num_workers=1) as loader:
        assert len(list(loader)) == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("batch_size", "`Loader` takes no argument `batch_size`: end the chain with `.deal(batch_size=...)"),
        ("shuffle", "`Loader` takes no argument `shuffle`: set it in the chain: `.deal("),
        ("collate_fn", "`.collate_samples()`"),
        ("num_worker", "`num_worker`. Did you mean 'num_workers'?"),
        ("color", "`Loader` takes no argument `color`."),
    ],
)
def test_an_argument_of_torchs_loader_is_an_error_with_a_hint(name: str, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        kdp.Loader(numbers().deal(batch_size=2), **{name: 4})
    assert "num_workers" in inspect.signature(kdp.Loader).parameters


def test_an_indexed_chain_has_no_epochs() -> None:
    with pytest.raises(kdp.ChainError, match=r"End it with `\.deal\(batch_size=\.\.\.\)`"):
        kdp.Loader(numbers())


class OwnSharder(IterDataPipe[Any]):
    def __init__(self, source: Any) -> None:
        self.source = source

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: Any = None) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def jitter(x: int, rng: np.random.Generator) -> int:
    return x + int(rng.integers(1000))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: numbers().deal(batch_size=5).sharding_filter(), "`.sharding_filter()` and `.deal()` both shard"),
        (lambda: IterableWrapper([1]).sharding_filter().sharding_filter(), "Keep one of them"),
        (lambda: OwnSharder(IterableWrapper([1]).shuffle()), "`OwnSharder` shards the output of `.shuffle"),
        (lambda: kdp.from_dataset([1]).transform("x", jitter).deal(batch_size=1).in_memory_cache(), "of `jitter`"),
    ],
    ids=["deal and filter", "two filters", "own sharder", "stock cache"],
)
def test_chains_that_lose_or_repeat_samples_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(kdp.ChainError) as error:
        kdp.Loader(make())
    assert message in str(error.value)


def test_other_orders_of_stock_pipes_are_accepted() -> None:
    kdp.Loader(OwnSharder(IterableWrapper([1])))
    kdp.Loader(IterableWrapper([1]).shuffle().sharding_filter().in_memory_cache())
    kdp.Loader(numbers().deal(batch_size=5).in_memory_cache())


def test_a_sharding_filter_is_a_sharding_point_too() -> None:
    stream = IterableWrapper(range(5)).sharding_filter()
    with kdp.Loader(stream, num_workers=2) as loader:
        assert Counter(loader) == Counter(range(5))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_workers": -1}, ValueError, "`num_workers` must be an integer of at least 0"),
        ({"num_workers": "2"}, TypeError, "`num_workers` must be an integer"),
        (
            {"num_workers": 2, "reading_service": kdp.ProcessReadingService(2)},
            ValueError,
            "cannot be combined with `num_workers`",
        ),
    ],
)
def test_bad_arguments_are_rejected(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kdp.Loader(numbers().deal(batch_size=2), **arguments)


def test_what_is_no_chain_is_rejected() -> None:
    with pytest.raises(TypeError, match="`source_datapipe` must be a datapipe, but is"):
        kdp.Loader([1, 2, 3])  # type: ignore[arg-type]


def test_a_loader_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with kdp.Loader(numbers().deal(batch_size=5)) as loader:
        list(loader)
    assert torch.rand(1) == expected


def test_stock_pipes_behind_deal_draw_anew_in_each_epoch() -> None:
    pipe = numbers(40).deal(batch_size=1).shuffle()
    with kdp.Loader(pipe) as loader:
        assert list(loader) != list(loader)


def test_two_loaders_are_built_and_iterated_in_two_threads() -> None:
    results: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        with kdp.Loader(numbers().deal(batch_size=5)) as loader:
            results[number] = [list(loader) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == [list(numbers().deal(batch_size=5))] * 5


SCRIPT = """
import os, signal, sys
import kdpipes as kdp
pipe = kdp.from_dataset([(n, 0) for n in range(100)]).select("x").deal(batch_size=1)
loader = kdp.Loader(pipe, num_workers=2)
for batch in loader:
    {}
print("after the loop")
"""


@pytest.mark.parametrize(("ending", "status"), [("break", 0), ("raise ValueError('mine')", 1), ("sys.exit(3)", 3)])
def test_an_interpreter_ends_without_closing_its_loader(ending: str, status: int, interpreter: Any) -> None:
    ended, _, told = interpreter.run(SCRIPT.format(ending))
    assert ended == status, told


def test_workers_share_a_large_list_and_do_not_copy_it() -> None:
    class Counted(list[Any]):
        copies = 0

        def __reduce__(self) -> Any:
            raise AssertionError("the list was copied")

    items = Counted((number, 0) for number in range(1000))
    pipe = kdp.from_dataset(items).select("x").deal(batch_size=500).collate_samples()
    with kdp.Loader(pipe, num_workers=2, start_method="fork") as loader:
        assert sum(int(x.sum()) for (x,) in loader) == sum(range(1000))


def test_a_chain_is_copied_without_its_index() -> None:
    ids = [f"image-{number:06}" for number in range(50_000)]
    plan = (
        kdp.from_ids(ids, [number % 7 for number in range(50_000)], load=len).filter_classes(valid=[1, 2]).oversample()
    )
    pipe = plan.select("x y").deal(batch_size=64, shuffle=True)
    assert len(pipe) == 224
    with sharing():
        assert len(cloudpickle.dumps(pipe)) < 5_000
    assert len(cloudpickle.dumps(pipe)) > 500_000


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_epoch_can_be_set(num_workers: int) -> None:
    pipe = numbers(30).deal(batch_size=4, shuffle=True, seed=1)
    expected = [list(pipe) for _ in range(4)]
    pipe.set_epoch(0)
    with kdp.Loader(pipe.collate_samples(), num_workers=num_workers) as loader:

        def epoch() -> list[list[tuple[int]]]:
            return [list(zip(x.tolist())) for (x,) in loader]

        loader.set_epoch(2)
        assert [epoch(), epoch()] == expected[2:]
        loader.set_epoch(1)
        for number in (1, 2, 3):
            loader.set_epoch(number)
            assert epoch() == expected[number]
        next(iter(loader))
        loader.set_epoch(0)
        assert epoch() == expected[0]


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_nested_sources_and_closures_reach_workers(start_method: str) -> None:
    inner = kdp.from_ids(["a", "b", "c"], np.arange(3), load=str.upper)

    class Outer:
        source = inner

        def __len__(self) -> int:
            return 3

        def getitem_x(self, index: int) -> str:
            return self.source[index]["x"]

    chain = kdp.from_dataset(Outer()).add_field("p", lambda sample: int(inner[0]["y"]) + len(inner))
    with kdp.Loader(chain.select("x p").deal(1), num_workers=2, start_method=start_method) as loader:
        assert [list(loader), list(loader)] == [[[("A", 3)], [("B", 3)], [("C", 3)]]] * 2


class Whole:
    """A reading service of a user's own, which may fail when an epoch begins."""

    fails = False

    def initialize(self, datapipe: Any) -> Any:
        return datapipe

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        if Whole.fails:
            Whole.fails = False
            raise OSError("once")

    def finalize_iteration(self) -> None: ...

    def finalize(self) -> None: ...


def test_an_epoch_set_after_iter_counts_under_other_services() -> None:
    pipe = numbers(30).deal(batch_size=4, shuffle=True, seed=1)
    expected = [list(pipe) for _ in range(3)]
    pipe.set_epoch(0)
    with kdp.Loader(pipe, reading_service=Whole()) as loader:
        loader.set_epoch(0)
        batches = iter(loader)
        loader.set_epoch(1)
        assert list(batches) == expected[1]
        Whole.fails = True
        with pytest.raises(OSError, match="once"):
            iter(loader)
        assert (loader.epoch, list(loader), loader.epoch) == (2, expected[2], 3)


def test_the_epoch_of_the_chain_counts_under_other_services() -> None:
    pipe = numbers(30).deal(batch_size=4, shuffle=True, seed=1)
    expected = [list(pipe) for _ in range(4)]
    pipe.set_epoch(2)
    with kdp.Loader(pipe, reading_service=Whole()) as loader:
        assert (loader.epoch, list(loader), loader.epoch) == (2, expected[2], 3)
        loader.set_epoch(1)
        assert (list(loader), loader.epoch) == (expected[1], 2)
