"""Chains need torch's DataPipes in one module only, so a copy of them can take their place when torch removes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kdpipes.core import torch_pipes

# Copies the DataPipes of torch, removes them from torch, and points the module that imports them at the copy.
WITHOUT = """
import multiprocessing, pathlib, shutil, sys, types
import torch, torch.utils.data as data

folder, copied = pathlib.Path(data.__file__).parent, pathlib.Path("copied")
shutil.copytree(folder / "datapipes", copied / "datapipes")
for name in ("graph.py", "graph_settings.py"):
    shutil.copy(folder / name, copied)
for path in copied.rglob("*.py"):
    text = path.read_text().replace("from torch.utils.data import", "from copied import")
    for name in ("datapipes", "graph"):
        text = text.replace(f"torch.utils.data.{name}", f"copied.{name}")
    path.write_text(text)
names = "from copied.datapipes.datapipe import DFIterDataPipe, DataChunk, IterDataPipe, MapDataPipe"
(copied / "__init__.py").write_text(names + "; from copied.datapipes import iter, map")

multiprocessing.set_start_method("fork")  # other workers would import the DataPipes of torch
sys.modules["torchdata"] = None
for name in [*sys.modules, "torch.utils.data.graph_settings"]:
    if name.startswith(("torch.utils.data.datapipes", "torch.utils.data.graph")):
        sys.modules[name] = None
for name in [name for name in vars(data) if name.endswith("DataPipe") or name.startswith(("datapipes", "graph"))]:
    delattr(data, name)
sys.path.insert(0, ".")
module = sys.modules["kdpipes.core.torch_pipes"] = types.ModuleType("kdpipes.core.torch_pipes")
exec(open(sys.argv[1]).read().replace("torch.utils.data", "copied"), vars(module))

import kdpipes as kdp, numpy as np
from kdpipes.demo import write_photo_folder, write_photo_shards

def double(x):
    return 2 * x

photos = kdp.image_folder(write_photo_folder("photos")).oversample(mode="exact").decode_images("x").record_ctx()
photos = photos.transform("x", kdp.RandomResizedCrop(8)).select("x y", return_ctx=True).deal(batch_size=16, seed=0)
stream = kdp.stream_shards(write_photo_shards("shards")).rename_fields(x="cls").shuffle(buffer_size=9).to_samples()
stream = stream.transform("x", double).select("x").deal(batch_size=16, num_batches=10).collate_samples()
for chain in (photos.collate_samples().map(lambda batch: batch[0]), stream):
    sums = set()
    for number in (0, 2):
        with kdp.Loader(chain, num_workers=number) as loader:
            batches = list(loader)
            state = loader.state_dict()
            sums.add((len(batches), loader.epoch, sum(float(np.sum(np.asarray(batch[0]))) for batch in batches)))
    assert len(sums) == 1, sums
assert "copied.datapipes.datapipe" in [base.__module__ for base in type(photos).__mro__]
assert "deal(batch_size=16" in repr(photos)
"""


def test_chains_run_with_a_copy_of_the_datapipes_of_torch(tmp_path: Path) -> None:
    run = [sys.executable, "-W", "ignore", "-c", WITHOUT, str(torch_pipes.__file__)]
    subprocess.run(run, check=True, cwd=tmp_path, timeout=100)
