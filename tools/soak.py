"""Disturb random chains for a while, and compare every batch that they deliver with the undisturbed sequence.

A case is a random chain of the contract test's examples over samples in memory or shards on storage that fails. It is
read for two epochs without a loader. Then loaders with random services, workers and simulated ranks deliver it, each
resumed from the state of the one before, while workers are killed, stopped and interrupted. Nothing may be left behind.
After every second case, data are damaged, replaced and made hostile, or several threads share an iterator: attacks.py.

    make soak                      ten minutes
    make soak MINUTES=60 SEED=7    an hour of the cases of that seed
    python tools/soak.py --seed 7 --case 123    one case again
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import attacks  # noqa: E402

import kdpipes as kdp  # noqa: E402
from tests.faulty_storage import Fault, faulty_storage  # noqa: E402
from tests.resuming import digest, of_rank, travelled  # noqa: E402
from tests.test_contract import EXAMPLES, EXAMPLES_BY_FLAVOUR, ITEMS  # noqa: E402

NUM_EPOCHS = 2
LONGEST_S = 8.0
ENDS = ("cutmix", "mixup")  # examples with a `deal` of their own
NO_STEPS = {*ENDS, "collate_samples", "deal", "select", "to_device"}  # what stands at the end of a chain
NO_STEPS |= {"decode_images", "localize_files", "cache_on_disk", "to_samples"}  # and what needs images or files
STEPS = sorted({*EXAMPLES, *(name for name, _ in EXAMPLES_BY_FLAVOUR)} - NO_STEPS)
SIGNALS = [signal.SIGKILL] * 5 + [signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP]
NOTICED_FAULTS = ["reset", "reset_midway", "timeout", "unavailable", "too_many_requests", "truncate"]
CHECKED_FAULTS = ["flip_bit", "wrong_range"]  # that an index finds


def grown(x: float) -> Any:
    return np.full((40, 50), x, dtype=np.float32)


class Case:
    """One random chain, with its undisturbed batches.

    Args:
        seed: Of all cases.
        number: Of this one.
        shards: The pattern of the shards.
    """

    def __init__(self, seed: int, number: int, shards: str) -> None:
        self.draw = draw = random.Random(f"{seed}/{number}")
        self.flavour = draw.choice(["map", "iter"])
        self.is_stored = draw.random() < 0.4
        self.shards = shards
        self.steps = draw.sample(STEPS, draw.randint(0, 3))
        self.tail = draw.choice(["plain", "collate", "collate", *ENDS])
        self.num_ranks = 1 if self.tail in ENDS else draw.choice([1, 1, 2])
        uneven = draw.choice(["pad", "drop"]) if self.num_ranks > 1 else draw.choice(["keep", "pad", "drop"])
        self.cut: dict[str, Any] = {"global_batch_size": draw.choice([2, 4, 6]), "uneven": uneven}
        self.cut |= {"shuffle": True} if self.flavour == "map" and draw.random() < 0.7 else {}
        self.cut |= {"seed": draw.randrange(1000)}
        self.expected: dict[int, list[list[str]]] = {}
        self.numbers: dict[int, list[list[int]]] = {}  # the number of the next batch, after each expected one

    def __str__(self) -> str:
        source = ("open_shards" if self.flavour == "map" else "stream_shards") if self.is_stored else self.flavour
        return " > ".join([source, *self.steps, self.tail, str(self.cut), f"{self.num_ranks} ranks"])

    def chain(self, rank: int, root: str) -> Any:
        """Return the chain, anew."""
        if self.is_stored:
            opened = (kdp.open_shards if self.flavour == "map" else kdp.stream_shards)(f"{root}{self.shards}")
            pipe = opened.rename_fields(x="id", y="cls")
        else:
            items = [(number, label) for number, (_, label) in enumerate(4 * ITEMS)]
            wrapper = SequenceWrapper if self.flavour == "map" else IterableWrapper
            pipe = wrapper(items, deepcopy=False).to_samples(fields="x y")
        for name in self.steps:
            pipe = (EXAMPLES_BY_FLAVOUR.get((name, self.flavour)) or EXAMPLES[name])(pipe)
        if self.tail in ENDS:
            return EXAMPLES[self.tail](pipe)
        if self.tail == "plain":
            return of_rank(pipe.select("key y ordinal").deal(**self.cut), self.num_ranks, rank)
        field = "image" if "rename_fields" in self.steps else "x"
        pipe = pipe.transform(field, grown).select(f"{field} y").deal(**self.cut).collate_samples()
        return of_rank(pipe, self.num_ranks, rank)

    def read(self, root: str) -> bool:
        """Read the chain undisturbed; return whether it is one that can be read."""
        try:
            for rank in range(self.num_ranks):
                pipe = self.chain(rank, root)
                self.expected[rank] = [[digest(batch) for batch in pipe] for _ in range(NUM_EPOCHS)]
                self.numbers[rank] = numbers_of(self.chain(rank, root))
        except (kdp.ChainError, kdp.DataError, kdp.FieldError, AttributeError, TypeError, ValueError):
            return False  # pipes that do not fit together, or leave too few samples
        return all(any(epochs) for epochs in self.expected.values())

    def service(self) -> Any:
        """Return a random service."""
        draw, kind = self.draw, self.draw.random()
        if kind < 0.1:
            return None
        if kind < 0.25:
            return kdp.ThreadReadingService(draw.randint(1, 3), prefetch=draw.randint(1, 3))
        return kdp.ProcessReadingService(
            draw.randint(1, 3),
            prefetch=draw.randint(1, 3),
            start_method="forkserver" if not self.is_stored and draw.random() < 0.2 else "fork",
            timeout_s=3,  # so that a stopped worker is replaced
            num_deaths=1000,
            max_worker_deaths=1000,
        )


def numbers_of(chain: Any) -> list[list[int]]:
    """Return the number that a state has after each batch. Lanes without samples leave gaps."""
    with kdp.Loader(chain) as loader:
        epochs = []
        for epoch in range(NUM_EPOCHS):
            states = [loader.state_dict() for _ in loader]
            epochs.append([state["batch"] for state in states if state["epoch"] == epoch])
        return epochs


class Storm:
    """A thread that disturbs workers, and this process while it is armed, until it is closed."""

    def __init__(self, draw: random.Random, table: Counter[str], every_s: float) -> None:
        self._draw, self._table, self._every_s = draw, table, every_s
        self.is_armed = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        until = time.monotonic() + LONGEST_S  # then the case comes to its end undisturbed
        while not self._over.wait(self._draw.random() * self._every_s) and time.monotonic() < until:
            pids = workers()
            if self.is_armed and self._draw.random() < 0.08:  # Ctrl-C reaches all processes of a terminal
                self._table["signal: SIGINT to all"] += 1
                for pid in [os.getpid(), *pids]:
                    send(pid, signal.SIGINT)
            elif pids:
                number = self._draw.choice(SIGNALS)
                self._table[f"signal: {number.name}"] += send(self._draw.choice(pids), number)
        for pid in workers():  # one that was stopped as it started would be waited for for a minute
            send(pid, signal.SIGCONT)


def send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def workers() -> list[int]:
    """Return the worker processes of this one: forked ones, and those of multiprocessing's fork server."""
    own = command(os.getpid())
    started = {pid: command(pid) for pid in children(os.getpid())}
    servers = [pid for pid, said in started.items() if b"multiprocessing.forkserver" in said]
    return [pid for pid, said in started.items() if said == own] + [pid for each in servers for pid in children(each)]


def traces() -> Counter[str]:
    """Return what there is of what must go: processes, threads, descriptors, shared memory."""
    gc.collect()
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    kinds = ("socket:", "pipe:", "/memfd:kdpipes", "anon_inode:[pidfd]")
    return Counter(
        processes=len(workers()),
        threads=sum(thread.name.startswith("kdpipes worker") for thread in threading.enumerate()),
        descriptors=sum(link.startswith(kinds) for link in links),
        shared=len(list(Path("/dev/shm").glob(f"kdpipes-*_{os.getpid()}_*"))),
    )


def leaks(before: Counter[str]) -> Counter[str]:
    """Return what has been left, after waiting a while for what is about to end."""
    deadline = time.monotonic() + 10
    while (left := traces() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


@contextmanager
def storage(case: Case, folder: str, table: Counter[str]) -> Iterator[str]:
    """Yield what stands before the names of shards: storage that fails now and then, if the case reads any."""
    if not case.is_stored:
        yield ""
        return
    kinds: list[Any] = NOTICED_FAULTS + (CHECKED_FAULTS if case.flavour == "map" else [])
    on: Any = {"on": "range"} if case.flavour == "map" else {}
    faults = [Fault(kind, every=case.draw.randint(5, 9), **on) for kind in case.draw.sample(kinds, 2)]
    with faulty_storage(folder, faults=faults, seed=case.draw.randrange(99)) as failing:
        yield "faulty://"
        table.update({f"storage: {kind}": number for kind, number in failing.stats().faults.items()})


def disturb(case: Case, root: str, table: Counter[str]) -> str:
    """Deliver a case under disturbance; return what was wrong, if anything was."""
    rank = case.draw.randrange(case.num_ranks)
    storm = Storm(random.Random(case.draw.random()), table, case.draw.choice([0.1, 0.3, 1.0]))
    state: Any = None

    def interrupt(*_: Any) -> None:
        if storm.is_armed:
            raise KeyboardInterrupt

    def deliver(loader: Any, num_batches: int) -> str:
        """Compare up to `num_batches`; whatever is interrupted goes on at the loader's state."""
        while loader.epoch < NUM_EPOCHS:
            place = loader.state_dict()
            expected = case.expected[rank][place["epoch"]]
            index = bisect_right(case.numbers[rank][place["epoch"]], place["batch"])
            for batch in loader:
                if index >= len(expected) or digest(batch) != expected[index]:
                    return f"batch {index} of epoch {place['epoch']} differs"
                index, num_batches = index + 1, num_batches - 1
                table["batches compared"] += 1
                if not num_batches:
                    return ""
            if index != len(expected):
                return f"epoch {place['epoch']} ended after {index} of {len(expected)} batches"
        return ""

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        while state is None or state["epoch"] < NUM_EPOCHS:
            loader = kdp.Loader(case.chain(rank, root), reading_service=case.service())
            if state is not None:
                table["resumes"] += 1
                loader.load_state_dict(travelled(state))
            try:
                storm.is_armed = True
                wrong = deliver(loader, case.draw.randint(1, 12))
                storm.is_armed = False
            except KeyboardInterrupt:
                storm.is_armed, wrong = False, ""
            state = loader.state_dict()
            table["worker deaths"] += int(loader.stats()["worker_deaths"])
            if case.draw.random() < 0.7:
                loader.close()
            del loader
            if wrong:
                return wrong
    finally:
        storm.is_armed = False
        storm.close()
        signal.signal(signal.SIGINT, before)
    return ""


def write_shards(folder: Path) -> str:
    for shard in range(3):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for sample in range(shard, 28, 3):
                writer.write({"__key__": f"{sample:03}", "id": sample, "cls": sample % 3})
    return "{0..2}.tar"


def run(seed: int, seconds: float, only: int | None) -> int:
    """Run cases until the time is over; return how many went wrong."""
    table, failures, started = Counter[str](), list[str](), time.monotonic()
    before, at_first = Counter[str](), 0.0
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder))
        for number in count() if only is None else [only]:
            if table["cases"] and time.monotonic() - started > seconds:
                break
            case = Case(seed, number, shards)
            if not case.read(f"{folder}/"):
                continue
            table["cases"] += 1
            if not before:  # the first case starts what stays, such as multiprocessing's helpers
                multiprocessing.set_forkserver_preload(["kdpipes"])
                forkserver.ensure_running()
                before, at_first = traces(), resident()
            with ExitStack() as stack:
                try:
                    wrong = disturb(case, stack.enter_context(storage(case, folder, table)), table)
                except Exception:
                    wrong = traceback.format_exc()
            left = leaks(before)
            table.update({"differences": int(bool(wrong)), **{f"left: {kind}": more for kind, more in left.items()}})
            if wrong or left:
                failures.append(f"seed {seed}, case {number}: {case}\n  {wrong} {dict(left) or ''}")
                print(failures[-1], file=sys.stderr, flush=True)
                before |= traces()
            if table["cases"] % 2 or only is not None:
                name = list(attacks.ATTACKS)[table["cases"] // 2 % len(attacks.ATTACKS)]
                table[f"attack: {name}"] += 1
                result = attacks.run(name, f"{seed}/{number}")
                table["attack errors"] += result == "error"
                if result not in ("equal", "error"):
                    table["differences"] += 1
                    failures.append(f"seed {seed}/{number}, attack {name}: {result}")
                    print(failures[-1], file=sys.stderr, flush=True)
    report(seed, time.monotonic() - started, table, resident() - at_first)
    return len(failures)


def shown(table: Counter[str], prefix: str) -> str:
    """Return how many there are of what begins with a prefix, and of each."""
    counts = {
        name.removeprefix(f"{prefix}: "): count for name, count in table.items() if name.startswith(f"{prefix}: ")
    }
    each = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
    return f"{sum(counts.values())} ({each})" if counts else "0"


def report(seed: int, seconds: float, table: Counter[str], grown_by: float) -> None:
    rows = {
        "seed": seed,
        "duration": f"{seconds / 60:.1f} minutes",
        "random chains": table["cases"],
        "signals sent": shown(table, "signal"),
        "worker deaths": table["worker deaths"],
        "storage faults": shown(table, "storage"),
        "attacks on data": shown(table, "attack"),
        "attacks that ended in a `DataError`": table["attack errors"],
        "resumes from a state": table["resumes"],
        "batches compared": table["batches compared"],
        "differences": table["differences"],
        "left behind": shown(table, "left"),
        "memory": f"{grown_by:+.0f} MB since the first case",
    }
    print("| | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seconds", type=float, help="in place of --minutes")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--case", type=int, help="run this case only")
    given = parser.parse_args()
    logging.getLogger("kdpipes").setLevel(logging.ERROR)  # each death is a warning
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seconds = given.minutes * 60 if given.seconds is None else given.seconds
    sys.exit(run(given.seed, seconds, given.case) > 0)


if __name__ == "__main__":
    main()
