"""Models of `torch.compile`: its own threads and processes do not disturb workers, and workers do not disturb it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, kdpipes as kdp

model = torch.nn.Linear(4, 2)
chain = kdp.from_ids(range(32), load=lambda n: torch.full((4,), float(n))).select("x").deal(batch_size=8)
early = torch.compile(model)
early(torch.zeros(8, 4))

def outputs(function):
    chain.set_epoch(0)
    with kdp.Loader(chain.collate_samples(), num_workers=2) as loader:
        return torch.cat([(torch.compile(model) if function is None else function)(x) for (x,) in loader])

for function in (early, None):
    torch.testing.assert_close(outputs(function), outputs(model))
"""


def test_models_compile_before_workers_start_and_in_the_loop(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "-W", "ignore", tmp_path / "train.py"], check=True, cwd=tmp_path, timeout=110)
