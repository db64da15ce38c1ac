"""What kdpipes changes in other libraries: docs/trainers.md lists it, and nothing else may change."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kdpipes._names import PIPES

TRAINERS = Path(__file__).parents[2] / "docs" / "trainers.md"

# Also listed in docs/trainers.md, under "What kdpipes changes in other libraries".
PATCHES = [
    "IterDataPipe.functions",
    "IterDataPipe.register_datapipe_as_function",
    "MapDataPipe.functions",
    "MapDataPipe.register_datapipe_as_function",
    "_IterDataPipeSerializationWrapper.__init__",
    "Accelerator.prepare",
]

DATAPIPES = "torch.utils.data.datapipes.datapipe:"

COMPARE = """
import importlib, json, os, sys, tempfile
from types import ModuleType

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader

LIBRARIES = "torch.utils.data torchdata fsspec multiprocessing torch.multiprocessing PIL accelerate copyreg pickle"
FIRST = "torchdata.datapipes.iter torchdata.stateful_dataloader torchdata.dataloader2 accelerate.data_loader"
for name in (*LIBRARIES.split(), *FIRST.split()):
    importlib.import_module(name)
Image.init()  # Pillow loads its plugins late

folder = tempfile.TemporaryDirectory()
for label in "ab":
    os.mkdir(f"{folder.name}/{label}")
    for number in range(2):
        Image.fromarray(np.zeros((8, 8, 3), "uint8")).save(f"{folder.name}/{label}/{number}.png")


def is_of_library(module):
    return any(f"{module}.".startswith(f"{library}.") for library in LIBRARIES.split())


modules = {name: module for name, module in sys.modules.items() if is_of_library(name)}


def attributes():
    found = {}
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            if not isinstance(value, ModuleType):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                for member, content in list(vars(value).items()):
                    if member != "__annotations__":  # made when it is first read
                        found[name, f"{key}.{member}"] = content
    return {name: (value, dict(value) if isinstance(value, dict) else None) for name, value in found.items()}


before = attributes()
import kdpipes as kdp
for patch in sys.argv[1:]:
    module, member = patch.split(":")
    setattr(sys.modules[module], member, None)
chain = kdp.image_folder(folder.name).decode_images().deal(batch_size=2).collate_samples()
for loader in (kdp.Loader(chain, num_workers=1), DataLoader(chain, batch_size=None)):
    assert len(list(loader)) == 2
after = attributes()


def is_same(name):
    (first, held), (second, holds) = before.get(name, (None, None)), after.get(name, (None, None))
    if name not in before or name not in after or first is not second:
        return False
    return held is None or (held.keys() == holds.keys() and all(held[key] is holds[key] for key in held))


changed = {name: after.get(name) for name in before.keys() | after.keys() if not is_same(name)}
names = {}
for module, key in before.keys() & changed.keys():
    if key.endswith("DataPipe.functions"):
        held, holds = before[module, key][1], changed[module, key][1]
        names[key] = sorted(name for name in held.keys() | holds.keys() if held.get(name) is not holds.get(name))
print(json.dumps({"attributes": sorted(":".join(name) for name in changed), "names": names}))
"""


def changes(*patches: str) -> dict[str, Any]:
    """Import kdpipes and iterate loaders in a new process; return what has changed in other libraries.

    Args:
        *patches: Attributes that the process replaces besides, as "module:name".
    """
    command = [sys.executable, "-W", "ignore", "-c", COMPARE, *patches]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_kdpipes_changes_nothing_else() -> None:
    found = changes()
    *of_torch, of_accelerate = PATCHES
    assert found["attributes"] == [f"accelerate.accelerator:{of_accelerate}", *(DATAPIPES + name for name in of_torch)]
    pipes = {pipe.name for pipe in PIPES}
    assert found["names"].keys() == {"IterDataPipe.functions", "MapDataPipe.functions"}
    assert set().union(*found["names"].values()) <= pipes


STOCK = """
import sys
import kdpipes
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper


class Own(IterableWrapper):
    pass


def note(frame, event, argument):
    if frame.f_globals.get("__name__", "").partition(".")[0] == "kdpipes":
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")


lines = []
sys.setprofile(note)
for shuffle in (None, True):
    pipe = Own(range(8)).shuffle().sharding_filter().map(str).batch(2)
    loader = DataLoader(pipe, batch_size=2, shuffle=shuffle, collate_fn=list)
    for _ in range(2):
        assert len(list(loader)) == 2
assert len(list(DataLoader(SequenceWrapper(range(8)).map(str), batch_size=2))) == 4
sys.setprofile(None)
assert lines == []
"""


def test_stock_pipes_in_stock_loaders_run_no_line_of_kdpipes() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", STOCK], check=True, timeout=60)


def test_other_changes_are_found() -> None:
    found = changes("fsspec.core:open_files")
    assert "fsspec.core:open_files" in found["attributes"]


def test_the_documentation_lists_the_patches() -> None:
    section = TRAINERS.read_text().partition("## What kdpipes changes in other libraries\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+\.\w+)` \|", section, re.MULTILINE) == PATCHES
