"""Ranks of a process group that do not begin an epoch at the same place: an error on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.delivery.test_ranks import run
from tests.torchdata_parts import HAS_TORCHDATA

SCRIPT = """
import functools, json, operator, os, signal, sys, time, warnings
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchdata.dataloader2 as dl2
    except ModuleNotFoundError:  # on Python 3.13: these services are not asked for there
        dl2 = None
import kdpipes as kdp
from kdpipes.loader import merge

sign, *cases = sys.argv[1:]
rank = int(os.environ["THIS_RANK"])
torch.distributed.init_process_group(
    "gloo", init_method=os.environ["MEETING"], world_size=2, rank=rank, timeout=timedelta(seconds=60)
)
interrupts = []  # where Ctrl-C comes

def interrupt(x):
    if x in interrupts:
        interrupts.remove(x)
        signal.raise_signal(signal.SIGINT)
    return x

def make(kind, service):
    source = kdp.from_dataset([(number, 0) for number in range(24)]).transform("x", interrupt)
    source = source.transform("x", functools.partial(operator.add, rank if kind == "chain" else 0)).select("x")
    source = source.to_iter_datapipe() if service == "stream" else source
    pipe = source.deal(batch_size=2, uneven="drop", **({"ranks": 1} if kind == "alone" else {}))
    if service == "DataLoader2":
        pipe.set_epoch(rank if kind == "epoch" else 0)
        return dl2.DataLoader2(pipe, reading_service=kdp.ProcessReadingService(1))
    services = {
        "threads": lambda: kdp.ThreadReadingService(2),
        "processes": lambda: kdp.ProcessReadingService(2),
        "torchdata": lambda: dl2.MultiProcessingReadingService(1),
    }
    return kdp.Loader(pipe, reading_service=services.get(service, bool)() or None)

def read(loader):
    batches, got = iter(loader), 0
    while True:
        try:
            next(batches)
            got += 1
        except StopIteration:
            return got
        except KeyboardInterrupt:
            pass

def run(kind, service):
    loader = make(kind, service)
    if kind == "epoch" and service != "DataLoader2":
        loader.set_epoch(rank)
    if kind == "later":
        list(loader)
        loader.set_epoch(rank + 1)
    if kind == "batch":
        loader.load_state_dict({**loader.state_dict(), "batch": rank})
    if kind == "interrupted" and rank == 0:
        interrupts.append(4)
    if kind == "waits":
        merge._PATIENCE_S = 0.05
        warnings.showwarning = lambda text, *_: Path(sign).write_text(str(text))
        while rank == 1 and not os.path.exists(sign):
            time.sleep(0.01)
    got = []
    try:
        for _ in range(2 if kind != "alone" or rank == 0 else 0):
            got.append(read(loader))
        if kind == "left early":
            next(iter(loader))
            got.append(read(loader))
        return got
    except RuntimeError as raised:
        return str(raised)
    finally:
        loader.shutdown()

results = [run(*case.split(":")) for case in cases]
gathered = [None] * 2
torch.distributed.all_gather_object(gathered, results)
if rank == 0:
    print(json.dumps(gathered))
torch.distributed.destroy_process_group()
"""
OWN = ["inline", "threads", "processes", "stream"]
OTHERS = ["torchdata", "DataLoader2"] if HAS_TORCHDATA else []
EPOCHS = "Rank 0 begins epoch {} at batch 0, but rank 1 begins epoch {} at batch 0, so that samples would be lost"


def read(interpreter: Any, tmp_path: Path, *cases: str) -> list[tuple[Any, Any]]:
    """Return what both ranks get in each case: the numbers of batches, or an error."""
    first, second = run(interpreter, tmp_path, 2, str(tmp_path / "sign"), *cases, script=SCRIPT)
    return list(zip(first, second, strict=True))


def test_another_epoch_is_an_error_on_all_ranks(interpreter: Any, tmp_path: Path) -> None:
    for first, second in read(interpreter, tmp_path, *(f"epoch:{service}" for service in (*OWN, *OTHERS))):
        assert first == second
        assert first.startswith(EPOCHS.format(0, 1))
        assert "Call `set_epoch` with the same number on all ranks" in first


def test_another_chain_is_an_error_on_all_ranks(interpreter: Any, tmp_path: Path) -> None:
    for first, second in read(interpreter, tmp_path, *(f"chain:{service}" for service in (*OWN, *OTHERS))):
        assert first == second
        assert first.startswith("The chain of rank 1 is not that of rank 0: `transform`, or its arguments")


def test_another_batch_is_an_error_on_all_ranks(interpreter: Any, tmp_path: Path) -> None:
    for first, second in read(interpreter, tmp_path, *(f"batch:{service}" for service in OWN)):
        assert first == second
        assert "begins epoch 0 at batch 0, but rank 1 begins epoch 0 at batch 1" in first


def test_a_later_epoch_is_checked(interpreter: Any, tmp_path: Path) -> None:
    for first, second in read(interpreter, tmp_path, "later:inline", "later:processes"):
        assert first == second
        assert first.startswith(EPOCHS.format(1, 2))


def test_ranks_at_the_same_place_read_on(interpreter: Any, tmp_path: Path) -> None:
    found = read(interpreter, tmp_path, "same:inline", "same:processes", "left early:threads", "interrupted:processes")
    assert found == [([6, 6],) * 2, ([6, 6],) * 2, ([6, 6, 6],) * 2, ([6, 6],) * 2]


def test_a_rank_alone_reads_what_is_dealt_to_all(interpreter: Any, tmp_path: Path) -> None:
    assert read(interpreter, tmp_path, "alone:inline") == [([12, 12], [])]


def test_a_rank_that_waits_says_for_what(interpreter: Any, tmp_path: Path) -> None:
    assert read(interpreter, tmp_path, "waits:inline") == [([6, 6], [6, 6])]
    text = (tmp_path / "sign").read_text()
    assert " has waited 0.05 s for the other ranks to begin an epoch. If only this rank" in text
