"""Models of `torch.compile`: its own threads and processes do not disturb workers, and workers do not disturb it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, kdpipes as kdp

def load(n):
    return torch.full((4,), float(n))

def outputs(batches):
    early = torch.cat([compiled(x) for (x,) in batches])
    return early, torch.cat([torch.compile(model)(x) for (x,) in batches])

if __name__ == "__main__":
    model = torch.nn.Linear(4, 2)
    compiled = torch.compile(model)
    compiled(torch.zeros(8, 4))
    chain = kdp.from_ids(range(32), load=load).select("x").deal(batch_size=8).collate_samples()
    with kdp.Loader(chain, num_workers=2, start_method=sys.argv[1]) as loader:
        found = outputs(loader)
    expected = model(torch.arange(32.0).repeat(4, 1).T)
    torch.testing.assert_close(found, (expected, expected))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_models_compile_before_workers_start_and_in_the_loop(method: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", tmp_path / "train.py", method]
    subprocess.run(command, check=True, timeout=110)
