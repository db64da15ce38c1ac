"""Accelerate and transformers' Trainer on two ranks: each sample once per epoch, or an error that names the way."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

JOIN = """
import os
import torch.distributed

def join():
    rank, folder = int(os.environ["RANK"]), os.environ["FOLDER"]
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", world_size=2, rank=rank)
"""

ACCELERATE = """
import json, sys
import torch
import accelerate
import kdpipes as kdp
from torch.utils.data import DataLoader

folder = sys.argv[1]

def dealt(**arguments):
    pipe = kdp.from_dataset(list(range(48)), "x").select("x")
    return pipe.deal(**({"batch_size": 4, "shuffle": True} | arguments)).collate_samples()

early = kdp.Loader(dealt(), num_workers=1)  # before there is a process group
join()
accelerator = accelerate.Accelerator(cpu=True)
found = {}

def note(name, make):
    try:
        loader = make()
        found[name] = {"epochs": [[x.tolist() for (x,) in loader] for _ in range(2)], "length": len(loader)}
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}

def torchs(num_workers, batch_size=None, **arguments):
    collate = {} if batch_size is None else {"collate_fn": lambda items: items[0]}
    loader = DataLoader(dealt(**arguments), batch_size=batch_size, num_workers=num_workers, **collate)
    return accelerator.prepare(loader)

note("early", lambda: accelerator.prepare(early))
for num_workers in (0, 2):
    note(f"dispatched {num_workers}", lambda: torchs(num_workers))
    note(f"dispatched for all {num_workers}", lambda: torchs(num_workers, ranks=1))
note("dispatched singly", lambda: torchs(0, 1, ranks=1))
accelerator.dataloader_config.dispatch_batches = False
for num_workers in (0, 1):
    note(f"split {num_workers}", lambda: torchs(num_workers, 1))
note("split for all 0", lambda: torchs(0, 1, ranks=1))
note("split for all 2", lambda: torchs(2, 1, ranks=1))

iterator = iter(early)
begun = [next(iterator)[0].tolist()]
resumed = kdp.Loader(dealt())
resumed.load_state_dict(early.state_dict())
found["resumed"] = {"epochs": [begun + [x.tolist() for (x,) in resumed]]}
with open(f"{folder}/{accelerator.process_index}.json", "w") as file:
    json.dump(found, file)
accelerator.end_training()
"""

TRAINER = """
import json, sys
import torch

try:
    import torchvision
except RuntimeError:  # its wheels for CUDA lack operators beside torch for the CPU
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import transformers
import kdpipes as kdp

folder, found, seen = sys.argv[1], {}, []
join()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        seen.append(x.tolist())
        return {"loss": (self.weight * x).mean()}

for name, arguments in {"auto": {}, "for all": {"ranks": 1}}.items():
    chain = kdp.from_dataset(list(range(48)), "x").select("x").deal(batch_size=4, **arguments).collate_samples()
    options = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, ddp_backend="gloo", num_train_epochs=2, per_device_train_batch_size=1,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=Model(), args=options, train_dataset=chain, data_collator=lambda batches: {"x": batches[0][0]}
    )
    try:
        trainer.train()
        found[name] = {"epochs": [seen[:6], seen[6:]], "steps": trainer.state.global_step}
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}
with open(f"{folder}/{options.process_index}.json", "w") as file:
    json.dump(found, file)
torch.distributed.destroy_process_group()
"""

ADVICE = "Accelerate splits the batches of this chain between 2 ranks"


def run(interpreter: Any, folder: Path, script: str) -> list[dict[str, Any]]:
    """Run a script on two ranks; return what each has found."""
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the last two are not used
    places |= {"ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FOLDER": str(folder)}
    scripts = []
    with (folder / "err").open("a+") as err, Path(os.devnull).open() as nothing:
        files = [file.fileno() for file in (nothing, err, err)]
        for rank in range(2):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in {**places, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
                    patch.setenv(name, value)
                scripts.append(interpreter.start(JOIN + script, str(folder), files=files))
    assert [script.wait() for script in scripts] == [0, 0], (folder / "err").read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def has_each_once(ranks: list[dict[str, Any]], name: str) -> bool:
    """Return whether each epoch gave each sample once, over both ranks, in batches of four."""
    epochs = list(zip(*(rank[name]["epochs"] for rank in ranks), strict=True))
    return all(
        Counter(x for part in epoch for batch in part for x in batch) == Counter(range(48))
        and {len(batch) for part in epoch for batch in part} == {4}
        for epoch in epochs
    )


def test_accelerate_gives_each_sample_once_or_raises(interpreter: Any, tmp_path: Path) -> None:
    ranks = run(interpreter, tmp_path, ACCELERATE)
    right = ["early", "resumed", "dispatched for all 0", "dispatched for all 2", "dispatched singly", "split for all 0"]
    for name in right:
        assert has_each_once(ranks, name), (name, [rank[name] for rank in ranks])
        assert {rank[name].get("length", 6) for rank in ranks} == {6}
    for name in ("dispatched 0", "dispatched 2", "split 0", "split 1"):
        assert all(ADVICE in rank[name]["error"] and "ranks=1" in rank[name]["error"] for rank in ranks), ranks[0][name]
    assert all("Each of the 2 workers would yield every batch" in rank["split for all 2"]["error"] for rank in ranks)


def test_transformers_trainer_gives_each_sample_once_or_raises(interpreter: Any, tmp_path: Path) -> None:
    ranks = run(interpreter, tmp_path, TRAINER)
    assert all(ADVICE in rank["auto"]["error"] for rank in ranks), ranks[0]["auto"]
    assert has_each_once(ranks, "for all")
    assert {rank["for all"]["steps"] for rank in ranks} == {12}
