"""Run scripts of docs/trainers.md, each on two ranks: `python run_trainers.py FOLDER SECTION...`.

It imports the trainers once and forks a process for each rank. Every script is stopped inside the second epoch and at
its end, and started again. `FOLDER/SECTION/seen-RANK.pt` then has the batches that its loader gave in all runs, and
`expected.pt` those that its chain gives in one process.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import kdpipes as kdp
import kdpipes.demo
from kdpipes.demo import write_photo_folder, write_photo_shards

PAGE = Path(__file__).parent.parent / "docs" / "trainers.md"
NUM_RANKS, NUM_EPOCHS = 2, 3
STOPS = (7, 10, sys.maxsize)  # after how many batches a run stops: inside an epoch, at the end of one, never


def script_of(section: str) -> str:
    """Return the code of the page before its first section, and that of one section; before it, another one's.

    "Lightning with Streams" is the script of Lightning with the chain of streams.
    """
    start, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    name, _, source = section.partition(" with ")
    chosen = [next(text for text in sections if text.startswith(f"{part}\n")) for part in (source, name) if part]
    text = start + "".join(chosen)
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def batches_of(script: Path, number: int) -> tuple[Any, list[Any]]:
    """Return the chain of a script and the batches that its loader gives; it stops after `number` batches."""
    chains, seen = [], []

    class NotedLoader(kdp.Loader):
        def __init__(self, source_datapipe: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(source_datapipe, *args, **kwargs)
            chains.append(source_datapipe)

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                if len(seen) == number:
                    raise SystemExit
                seen.append(parts_of(batch))
                yield batch

    kdp.Loader = NotedLoader  # type: ignore[misc]
    try:
        runpy.run_path(str(script))
    except SystemExit:
        assert len(seen) == number
    return chains[0], seen


def parts_of(batch: Any) -> list[torch.Tensor]:
    return [part.clone() for part in (batch.values() if isinstance(batch, dict) else batch)]


def run_rank(folder: Path, rank: int, run: int, port: int) -> None:
    """Run a script as one rank, as torchrun does, and add what its loader gave to the file of the rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
    server = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    places = {**numbers, **server, "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": run}
    os.environ |= {name: str(value) for name, value in places.items()}
    os.environ["ACCELERATE_USE_CPU"] = "1"
    os.chdir(folder)
    kdpipes.demo.write_photo_shards = lambda root, num_shards: f"{root}/photos-{{000..{num_shards - 1:03}}}.tar"
    file = Path(f"seen-{rank}.pt")
    before = torch.load(file) if file.exists() else []
    chain, seen = batches_of(Path("train.py"), STOPS[run] - len(before))
    torch.save(before + seen, file)
    if rank == 0 and run == len(STOPS) - 1:
        torch.distributed.destroy_process_group()
        for name in numbers:
            del os.environ[name]
        torch.save([parts_of(batch) for _ in range(NUM_EPOCHS) for batch in chain], "expected.pt")


def forked(log: Path, *arguments: Any) -> int:
    """Return a process that runs a rank, and writes what it prints to a file."""
    if child := os.fork():
        return child
    status = 1
    signal.alarm(120)  # if the other rank has failed, this one may wait for it
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            run_rank(log.parent, *arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main(folder: Path, *sections: str) -> None:
    photos = write_photo_folder(folder / "photos")
    for section in sections:
        (folder / section).mkdir()
        (folder / section / "photos").symlink_to(photos)
        write_photo_shards(folder / section / "shards", num_shards=8)  # the ranks would write it at the same time
        (folder / section / "train.py").write_text(script_of(section))
        log = folder / section / "log.txt"
        for run in range(len(STOPS)):
            store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            children = [forked(log, rank, run, store.port) for rank in range(NUM_RANKS)]
            statuses = [os.waitpid(child, 0)[1] for child in children]
            if any(statuses):
                sys.exit(log.read_text(errors="replace")[-6000:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # its wheels for CUDA lack operators beside torch for the CPU
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in ("lightning.pytorch", "accelerate", "transformers.trainer", "timm.data"):  # once, for all ranks
        importlib.import_module(name)
    main(Path(sys.argv[1]), *sys.argv[2:])
