"""A loader in a real process group: every rank its part, and the same number of batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from webdataset import TarWriter

import kdpipes as kdp
from tests.torchdata_parts import needs_torchdata

SCRIPT = """
import json, os, sys, warnings
from datetime import timedelta
import torch, torch.distributed
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchdata.dataloader2 as dl2
    except ModuleNotFoundError:  # on Python 3.13: these kinds are not asked for there
        dl2 = None
import kdpipes as kdp

kind, *urls = sys.argv[1:]

def join():
    torch.distributed.init_process_group(
        "gloo",
        init_method=os.environ.get("MEETING"),  # a file; else where torchrun says
        world_size=int(os.environ["NUM_RANKS"]),
        rank=int(os.environ["THIS_RANK"]),
        timeout=timedelta(seconds=60),
    )

def look(x, rng):
    if kind == "one fails" and x == 5:
        raise KeyError("mine")
    return [x, rng.random()]

def die(sample):
    deadly = urls[0] + ".deadly." + os.environ["THIS_RANK"]
    if sample.key.endswith("/5") and os.path.exists(deadly):  # once on each rank
        os.unlink(deadly)
        os.kill(os.getpid(), 9)
    return 0

def make():
    source = kdp.from_dataset([(number, 0) for number in range(22)]).transform("x", look)
    pipe = source.select("x").deal(global_batch_size=8, shuffle=True, seed=2)
    if kind == "dataloader":
        return torch.utils.data.DataLoader(pipe, batch_size=None, num_workers=2)
    if kind == "sequential":
        service = dl2.SequentialReadingService(dl2.DistributedReadingService(), kdp.ProcessReadingService(2))
        return dl2.DataLoader2(pipe, reading_service=service)
    if kind == "torchdata":
        return dl2.DataLoader2(pipe, reading_service=dl2.MultiProcessingReadingService(2))
    if kind.startswith("stream"):
        _, uneven, num_workers, *dies = kind.split()
        stream = kdp.stream_shards(urls)
        stream = (stream.add_field("died", die) if dies else stream).select("key is_padding" + " died" * bool(dies))
        cut = {"num_batches": 9} if uneven == "steps" else {"uneven": uneven}
        pipe = stream.deal(global_batch_size=4, split=kdp.lanes(6, max_ranks=2), shuffle="shards", **cut)
        return kdp.Loader(pipe, num_workers=int(num_workers))
    return kdp.Loader(pipe, num_workers=int(kind[0]) if kind[0].isdigit() else 2)

if kind.endswith("early"):
    join()
loader = make()
alone = list(loader) if kind.endswith("grows") else None
if not kind.endswith("early"):
    join()
length = len(loader) if isinstance(loader, kdp.Loader) and not urls else None
epochs = [list(loader) for _ in range(2)]
if isinstance(loader, kdp.Loader):
    begun = [next(iter(loader))]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    epochs.append(begun + list(resumed))
states = []
if urls:
    with make() as other:
        for number, _ in enumerate(other):
            if number in (2, 7, 40):
                states.append(other.state_dict())
gathered = [None] * torch.distributed.get_world_size()
torch.distributed.all_gather_object(gathered, {"epochs": epochs, "length": length, "alone": alone, "states": states})
if torch.distributed.get_rank() == 0:
    print(json.dumps(gathered))
if kind in ("sequential", "torchdata"):
    loader.shutdown()
torch.distributed.destroy_process_group()
"""


def run(interpreter: Any, tmp_path: Path, num_ranks: int, *arguments: str, script: str = SCRIPT) -> list[Any]:
    """Run a script with as many ranks; return what each got."""
    places = {"MEETING": f"file://{tmp_path}/meeting", "NUM_RANKS": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    scripts = []
    with (tmp_path / "out").open("a+") as out, (tmp_path / "err").open("a+") as err, Path(os.devnull).open() as nothing:
        files = [file.fileno() for file in (nothing, out, err)]
        for rank in range(num_ranks):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in {**places, "THIS_RANK": str(rank)}.items():
                    patch.setenv(name, value)
                scripts.append(interpreter.start(script, *arguments, files=files))
    assert [each.wait() for each in scripts] == [0] * num_ranks, (tmp_path / "err").read_text()
    ranks: list[Any] = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    return ranks


def run_with_torchrun(tmp_path: Path, num_ranks: int, *arguments: str) -> list[Any]:
    """Run the script under torchrun; return what each rank got."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("NUM_RANKS", "WORLD_SIZE").replace("THIS_RANK", "RANK"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run([*command, str(script), *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ranks: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return ranks


KINDS = [(2, "0"), (2, "2 early"), (4, "1"), (2, "0 grows"), (2, "2 grows"), (2, "dataloader")]
KINDS_OF_TORCHDATA = [pytest.param(2, kind, marks=needs_torchdata) for kind in ("sequential", "torchdata")]


@pytest.mark.parametrize(("num_ranks", "kind"), [*KINDS, *KINDS_OF_TORCHDATA])
def test_the_ranks_share_what_one_process_gets(interpreter: Any, tmp_path: Path, num_ranks: int, kind: str) -> None:
    def look(x: int, rng: Any) -> list[float]:
        return [x, rng.random()]

    source = kdp.from_dataset([(number, 0) for number in range(22)]).transform("x", look)
    pipe = source.select("x").deal(global_batch_size=8, shuffle=True, seed=2)
    expected = json.loads(json.dumps([list(pipe) for _ in range(4)]))
    found = run(interpreter, tmp_path, num_ranks, kind)
    if kind.endswith("grows"):
        assert [rank["alone"] for rank in found] == [expected.pop(0)] * num_ranks
    for epoch, parts in enumerate(zip(*(rank["epochs"] for rank in found), strict=True)):
        if kind == "torchdata":  # whose order depends on the number of workers
            assert sorted(chain(*chain(*parts))) == sorted(chain(*expected[epoch]))
        else:
            assert [list(chain(*batches)) for batches in zip(*parts, strict=True)] == expected[epoch]
    if kind[0].isdigit():
        assert {rank["length"] for rank in found} == {3}


def test_a_rank_is_told_once_whoever_tells_it() -> None:
    pipe = kdp.from_dataset([(number, 0) for number in range(8)]).select("x").deal(batch_size=2)
    for _ in range(2):
        pipe.apply_sharding(2, 1, SHARDING_PRIORITIES.DISTRIBUTED)
    assert list(pipe) == [[(2,), (3,)], [(6,), (7,)]]


@pytest.mark.parametrize(
    "kind",
    ["stream pad 0", "stream drop 2", "stream pad 2", "stream pad 2 dies", "stream steps 2", "stream steps 2 dies"],
)
@pytest.mark.filterwarnings("ignore:.*makes no batch from:UserWarning")
def test_ranks_that_read_lanes_of_their_own_end_together(tmp_path: Path, interpreter: Any, kind: str) -> None:
    urls = []
    for shard, size in enumerate((12, 3, 9, 1, 14, 7, 8)):
        urls.append(str(tmp_path / f"{shard}.tar"))
        with TarWriter(urls[-1]) as writer:
            for sample in range(size):
                writer.write({"__key__": str(sample), "txt": "word"})

    def made() -> Any:
        fields = "key is_padding" + " died" * kind.endswith("dies")
        stream = kdp.stream_shards(urls)
        stream = (stream.add_field("died", lambda sample: 0) if kind.endswith("dies") else stream).select(fields)
        uneven: Any = kind.split()[1]
        cut: dict[str, Any] = {"num_batches": 9} if uneven == "steps" else {"uneven": uneven}
        return stream.deal(global_batch_size=4, shuffle="shards", split=kdp.lanes(6, max_ranks=2), **cut)

    deadly = [Path(f"{urls[0]}.deadly.{rank}") for rank in range(2)]
    for path in deadly if kind.endswith("dies") else ():
        path.touch()
    pipe = made()
    expected = json.loads(json.dumps([list(pipe) for _ in range(3)]))
    found = run(interpreter, tmp_path, 2, kind, *urls)
    for epoch, parts in enumerate(zip(*(rank["epochs"] for rank in found), strict=True)):
        assert [list(chain(*batches)) for batches in zip(*parts, strict=True)] == expected[epoch]
    assert found[0]["states"][0]["cursors"]
    for rank in found:  # the state of each rank is that of all, and fits one rank
        for number, state in zip((2, 7, 40), rank["states"], strict=False):
            with kdp.Loader(made(), num_workers=3) as loader:
                if not kind.endswith("dies"):  # which has a function of its own
                    loader.load_state_dict(state)
                    assert json.loads(json.dumps(list(loader))) == expected[0][number + 1 :]
    assert not any(path.exists() for path in deadly)


def test_ranks_that_would_not_end_together_are_an_error(tmp_path: Path, interpreter: Any, photo_shards: str) -> None:
    with pytest.raises(AssertionError, match=r"Use `deal\(uneven=\"pad\"\)` or `deal\(uneven=\"drop\"\)`"):
        run(interpreter, tmp_path, 2, "stream keep 0", photo_shards)


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="KeyError: 'mine'"):
        run_with_torchrun(tmp_path, 2, "one fails")
