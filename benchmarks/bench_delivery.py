"""How fast do ready batches come from two workers, and small samples one by one?

Question: batches of 64x3x224x224 that lie ready in each of two workers (nothing is decoded), the consumer reading every
byte: what does it cost to move them? Baselines, in the same run, interleaved: torch's DataLoader, whose workers return
tensors or NumPy arrays, and torchdata's MultiProcessingReadingService. Then integers one by one, the seconds from
`iter()` to the first batch of a million labeled samples, and the CPU seconds that an idle loader's processes use in
three seconds. Ratios are of medians. Each loader has its defaults (two batches ahead for each worker), torchdata's
service no prefetching threads, with which it is fastest.

Result (results/delivery.txt): 5 to 7 times DataLoader for uint8, 4 to 5 times for float32. One copy into memory that is
used again takes the place of fresh shared memory, whose every page is a fault in the worker and in the consumer; what
remains is bound by two processes' memcpy beside the consumer's reading.

    python benchmarks/bench_delivery.py            # writes benchmarks/results/delivery.txt
    python benchmarks/bench_delivery.py --smoke    # a few small batches, one round, writes nothing
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import kdpipes as kdp  # before torchdata, whose banner it keeps quiet

# isort: split
import numpy as np
import torch
from rounds import machine, main, medians, spread, turns
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper

NUM_WORKERS = 2
ENDLESS = 10**6


class Ready(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Batches that lie ready. Tensors are made anew around the same memory: DataLoader would share one only once."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, *, as_tensors: bool = True) -> None:
        self._batches = [np.random.default_rng(n).integers(0, 255, shape).astype(dtype) for n in range(2)]
        self._as_tensors = as_tensors

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        batch = self._batches[index % 2]
        return torch.from_numpy(batch) if self._as_tensors else batch


def _as_it_is(item: Any) -> Any:
    return item


def _only(batch: Any) -> Any:
    return batch[0][0]


def _chain(source: Any) -> Any:
    return kdp.from_dataset(source, fields="x").select("x").deal(batch_size=1).map(_only)


@contextmanager
def kdpipes_loader(source: Any) -> Iterator[Any]:
    with kdp.Loader(_chain(source), num_workers=NUM_WORKERS) as loader:
        yield loader


@contextmanager
def dataloader(source: Any) -> Iterator[Any]:
    yield DataLoader(source, batch_size=None, num_workers=NUM_WORKERS, collate_fn=_as_it_is)


@contextmanager
def _torchdata(pipe: Any) -> Iterator[Any]:
    service = MultiProcessingReadingService(NUM_WORKERS, worker_prefetch_cnt=0, main_prefetch_cnt=0)  # its fastest
    loader = DataLoader2(pipe, reading_service=service)
    try:
        yield loader
    finally:  # its own shutdown may wait for ever for workers that have been asked for another item
        loader._terminated = loader.reading_service._finalized = True
        for process, *_ in loader.reading_service._worker_processes:
            process.kill()
            process.join()
            for left in Path("/dev/shm").glob(f"torch_{process.pid}_*"):
                left.unlink(missing_ok=True)


@contextmanager
def torchdata_service(source: Any) -> Iterator[Any]:
    with _torchdata(_chain(source)) as loader:
        yield loader


def rate(open_loader: Callable[[Any], Any], source: Any, number: int, read: Callable[[Any], Any]) -> float:
    """Return how many batches come per second, once the first few have come."""
    with open_loader(source) as loader:
        batches = iter(loader)
        for batch in islice(batches, 8):
            read(batch)
        begin = time.perf_counter()
        for batch in islice(batches, number):
            read(batch)
        found = number / (time.perf_counter() - begin)
        del batch, batches
    return found


def read_all(batch: Any) -> Any:
    return np.asarray(batch).max()


def compare(title: str, ways: dict[str, Callable[[], float]], rounds: int) -> list[str]:
    found = turns(ways, rounds, warm_up=False)
    median = medians(found)
    lines = [f"{title:<34}{'median/s':>10}{'min':>9}{'max':>9}{'kdpipes is':>12}"]
    for name, rates in found.items():
        ratio = median["kdpipes"] / median[name]
        lines.append(f"  {name:<32}{spread(rates)}{ratio:>11.1f}x")
    return [*lines, ""]


def batches(dtype: Any, shape: tuple[int, ...], number: int, rounds: int) -> list[str]:
    tensors, arrays = Ready(shape, dtype), Ready(shape, dtype, as_tensors=False)
    ways = {
        "kdpipes": lambda: rate(kdpipes_loader, tensors, number, read_all),
        "DataLoader, tensors": lambda: rate(dataloader, tensors, number, read_all),
        "DataLoader, NumPy arrays": lambda: rate(dataloader, arrays, max(number // 4, 1), read_all),
        "MultiProcessingReadingService": lambda: rate(torchdata_service, tensors, number, read_all),
    }
    return compare(f"{np.dtype(dtype).name} {'x'.join(map(str, shape))} batches", ways, rounds)


@contextmanager
def small_kdpipes(source: Any) -> Iterator[Any]:
    with kdp.Loader(IterableWrapper(source, deepcopy=False).sharding_filter(), num_workers=NUM_WORKERS) as loader:
        yield loader


@contextmanager
def small_torchdata(source: Any) -> Iterator[Any]:
    with _torchdata(IterableWrapper(source, deepcopy=False).sharding_filter()) as loader:
        yield loader


def small(number: int, rounds: int) -> list[str]:
    source = range(ENDLESS)
    ways = {
        "kdpipes": lambda: rate(small_kdpipes, source, number, _as_it_is),
        "DataLoader": lambda: rate(dataloader, source, number, _as_it_is),
        "MultiProcessingReadingService": lambda: rate(small_torchdata, source, max(number // 10, 1), _as_it_is),
    }
    return compare(f"integers one by one, {NUM_WORKERS} workers", ways, rounds)


def _cpu_s() -> float:
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def start_and_idle(size: int, idle_s: float, rounds: int) -> list[str]:
    labels = np.arange(size) % 1000
    ids = [f"image-{number:07}" for number in range(size)]
    first, idle = [], []
    for _ in range(rounds):
        plan = kdp.from_ids(ids, labels, load=len).oversample().select("x y")
        with kdp.Loader(plan.deal(64, shuffle=True).collate_samples(), num_workers=NUM_WORKERS) as loader:
            begin = time.perf_counter()
            loader_batches = iter(loader)
            next(loader_batches)
            first.append(time.perf_counter() - begin)
            time.sleep(idle_s / 10)  # workers make a few batches ahead, and then wait
            used = _cpu_s()
            time.sleep(idle_s)
            idle.append(_cpu_s() - used)
            del loader_batches
    return [
        f"{size:,} samples: {statistics.median(first):.3f} s from iter() to the first batch (max {max(first):.3f})",
        f"idle for {idle_s:g} s: {statistics.median(idle):.2f} CPU s in all processes (max {max(idle):.2f})",
    ]


def report(*, is_smoke: bool) -> str:
    shape = (4, 3, 32, 32) if is_smoke else (64, 3, 224, 224)
    rounds = 1 if is_smoke else 5
    torch.set_num_threads(1)
    lines = [
        f"{NUM_WORKERS} workers, {rounds} interleaved rounds; {machine(torch=torch.__version__, NumPy=np.__version__)}",
        "the consumer reads every byte; ratios vs kdpipes are of medians",
        "",
        *batches(np.uint8, shape, 20 if is_smoke else 400, rounds),
        *batches(np.float32, shape, 20 if is_smoke else 150, rounds),
        *small(200 if is_smoke else 40_000, rounds),
        *start_and_idle(1_000 if is_smoke else ENDLESS, 0.1 if is_smoke else 3.0, rounds),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main("delivery", __doc__, report)
