"""How much time does kdpipes itself take for a sample, when its pipes do next to nothing?

Question: an indexed chain with a plan, lazy fields and six sample-wise pipes, dealt into batches: microseconds a
sample, all in all? A stream: microseconds a sample for six sample-wise pipes, beyond those of the stream itself?
Baselines, in the same run, interleaved: six stock `.map` pipes of torch, and six generators. CPU time of one process.
What a callable adds is in rows of its own: kdpipes seeds the global generators for one that was seen to draw from them.

Result (results/overhead.txt): an indexed chain takes 15 microseconds a sample, all in all; six pipes on a stream 5.0,
where torch's take 6.6.

    python benchmarks/bench_overhead.py            # writes benchmarks/results/overhead.txt
    python benchmarks/bench_overhead.py --smoke    # a few samples, one round, writes nothing
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from rounds import load, machine, main, medians, turns
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp


class Rows:
    """Dictionaries, one after the other."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"x": number, "y": number % 10} for number in range(self._number))


class Items:
    """A dataset as of torch."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index % 10


def same(value: Any) -> Any:
    return value


def drawing(value: Any) -> Any:
    return value + random.random()


def normalized(row: Any) -> Any:
    return (row - row.mean()) / row.std()


def all_normalized(rows: list[Any]) -> Any:
    stacked = np.stack(rows)
    return (stacked - stacked.mean(1, keepdims=True)) / stacked.std(1, keepdims=True)


def arrays(number: int) -> Any:
    return kdp.from_dataset(np.random.default_rng(0).random((number, 64)), "x")


def passed_on(items: Iterable[Any]) -> Iterator[Any]:
    yield from items


def six_maps(pipe: Any) -> Any:
    for _ in range(6):
        pipe = pipe.map(same)
    return pipe


def six_generators(items: Iterable[Any]) -> Iterable[Any]:
    for _ in range(6):
        items = passed_on(items)
    return items


def six_pipes(pipe: Any) -> Any:
    pipe = pipe.rename_fields(image="x", label="y").record_ctx().rename_fields(x="image").rename_fields(y="label")
    return pipe.add_field("z", same).rename_fields(extra="z")


def stock(number: int) -> Any:
    return IterableWrapper(Rows(number), deepcopy=False)


def stream(number: int) -> Any:
    return stock(number).to_samples()


def indexed(number: int) -> Any:
    return kdp.from_dataset([(place, place % 10) for place in range(number)], "x y")


def planned(number: int) -> Any:
    return indexed(number).filter_classes(valid=list(range(9)))


WAYS: dict[str, Callable[[int], Iterable[Any]]] = {
    "stock": stock,
    "stock six": lambda number: six_maps(stock(number)),
    "generators": lambda number: six_generators(Rows(number)),
    "rows": Rows,
    "stream": stream,
    "stream six": lambda number: six_pipes(stream(number)),
    "indexed": lambda number: indexed(number).select("x y").deal(64),
    "indexed six": lambda number: six_pipes(planned(number)).select("x y").deal(64, shuffle=True),
    "texts": lambda number: kdp.from_dataset([(f"text {n}", n % 10) for n in range(number)]).select("x y").deal(4096),
    "dataset": lambda number: kdp.from_dataset(Items(number)).select("x y").deal(4096),
    "drawing": lambda number: indexed(number).transform("x", drawing).select("x y").deal(64),
    "arrays": lambda number: arrays(number).select("x").deal(4096),
    "normalized": lambda number: arrays(number).transform("x", normalized).select("x").deal(4096),
    "all normalized": lambda number: arrays(number).transform_batch("x", all_normalized).select("x").deal(4096),
    "called": lambda number: indexed(number).transform("x", same).select("x y").deal(64),
}


def microseconds(way: Callable[[int], Iterable[Any]], number: int) -> float:
    """Return the CPU time of one sample."""
    items, count = iter(way(number)), 0
    begin = time.process_time()
    for item in items:
        count += len(item) if isinstance(item, list) else 1
    return (time.process_time() - begin) / count * 1e6


def report(*, is_smoke: bool) -> str:
    number, rounds = (200, 1) if is_smoke else (4_000, 31)
    ways = {name: partial(microseconds, way, number) for name, way in WAYS.items()}
    median = medians(turns(ways, rounds, warm_up=False))

    def row(label: str, value: float, baseline: str) -> str:
        return f"{label:<72}{value:>8.2f}  {baseline}"

    return "\n".join(
        [
            f"generators and torch's `.map` vs kdpipes: CPU microseconds a sample, medians of {rounds} interleaved "
            f"rounds of {number:,} samples",
            machine(load(), torch=torch.__version__),
            "",
            row("six generators", median["generators"] - median["rows"], ""),
            row("six stock `.map` pipes", median["stock six"] - median["stock"], ""),
            row("six pipes of kdpipes on a stream", median["stream six"] - median["stream"], "target 3"),
            row("a stream of samples, `to_samples` alone", median["stream"] - median["stock"], ""),
            row(
                "an indexed chain, plan, shuffle, six pipes, select, deal, all in all",
                median["indexed six"],
                "target 25",
            ),
            row("an indexed chain, select, deal, all in all", median["indexed"], ""),
            row("texts of a list, select, deal, all in all", median["texts"], "target 3"),
            row("items of a torch Dataset, select, deal, all in all", median["dataset"], "target 8"),
            row("`transform`: 64 numbers normalized by NumPy", median["normalized"] - median["arrays"], ""),
            row("`transform_batch`: the same", median["all normalized"] - median["arrays"], ""),
            row("a callable that is known to draw nothing", median["called"] - median["indexed"], ""),
            row("a callable that draws, with seeded global generators", median["drawing"] - median["indexed"], ""),
        ]
    )


if __name__ == "__main__":
    main("overhead", __doc__, report)
