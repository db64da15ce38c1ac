"""A loader in a real process group: every rank its part, and the same number of batches."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

import kdpipes as kdp

SCRIPT = """
import json, sys
import torch, torch.distributed
import kdpipes as kdp

rank, num_ranks, store, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
source = kdp.from_dataset([(number, 0) for number in range(22)]).transform("x", lambda x, rng: [x, rng.random()])
pipe = source.select("x").deal(global_batch_size=8, shuffle=True, seed=2)
if kind == "dataloader":
    loader = torch.utils.data.DataLoader(pipe, batch_size=None, num_workers=2)
else:
    loader = kdp.Loader(pipe, num_workers=int(kind))
epochs = [list(loader) for _ in range(2)]
print(json.dumps({"epochs": epochs, "length": len(loader)}))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def run(tmp_path: Path, num_ranks: int, kind: str) -> list[Any]:
    arguments = [str(num_ranks), str(tmp_path / "store"), kind]
    started = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * num_ranks
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.mark.parametrize(("num_ranks", "kind"), [(2, "0"), (2, "2"), (2, "dataloader")])
def test_the_ranks_share_what_one_process_gets(tmp_path: Path, num_ranks: int, kind: str) -> None:
    source = kdp.from_dataset([(number, 0) for number in range(22)]).transform("x", lambda x, rng: [x, rng.random()])
    pipe = source.select("x").deal(global_batch_size=8, shuffle=True, seed=2)
    expected = json.loads(json.dumps([list(pipe) for _ in range(2)]))
    found = run(tmp_path, num_ranks, kind)
    for epoch in range(2):
        parts = [rank["epochs"][epoch] for rank in found]
        assert [list(chain(*batches)) for batches in zip(*parts, strict=True)] == expected[epoch]
    if kind != "dataloader":
        assert {rank["length"] for rank in found} == {3}


def test_a_rank_is_told_once_whoever_tells_it() -> None:
    pipe = kdp.from_dataset([(number, 0) for number in range(8)]).select("x").deal(batch_size=2)
    for _ in range(2):
        pipe.apply_sharding(2, 1, SHARDING_PRIORITIES.DISTRIBUTED)
    assert list(pipe) == [[(2,), (3,)], [(6,), (7,)]]
