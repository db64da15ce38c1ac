"""What type checkers say of chains: in the README and in `typing/chains.py`, they find just what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from kdpipes._names import PIPES
from tests.torchdata_parts import HAS_TORCHDATA

ROOT = Path(__file__).parent.parent
CHAINS = ROOT / "tests" / "typing" / "chains.py"
_UNTYPED = "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls\n"


def readme(folder: Path) -> Path:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    known = [block for block in blocks if HAS_TORCHDATA or "torchdata" not in block]
    path = folder / "readme.py"
    path.write_text(_UNTYPED + "\n\n".join(known), encoding="utf-8")
    return path


def said(*command: str | Path) -> str:
    found = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert not found.stderr, found.stderr
    return found.stdout


def errors_of_pyright(path: Path) -> list[tuple[int, str]]:
    """The lines, from 1, and the messages; that `_fluent` is a stub alone is a warning of pyright's."""
    found = json.loads(said("basedpyright", "--outputjson", "--level", "error", "--pythonpath", sys.executable, path))
    assert found["summary"]["filesAnalyzed"] == 1
    wrong = [each for each in found["generalDiagnostics"] if each.get("rule") != "reportMissingModuleSource"]
    return [(each["range"]["start"]["line"] + 1, each["message"]) for each in wrong]


def test_type_checkers_find_only_the_wrong_readme_argument(tmp_path: Path) -> None:
    lines = readme(tmp_path).read_text(encoding="utf-8").splitlines()
    [wrong] = [number for number, line in enumerate(lines, 1) if 'mode="exakt"' in line]
    assert {number for number, _ in errors_of_pyright(tmp_path / "readme.py")} == {wrong}
    *found, summary = said("mypy", tmp_path / "readme.py").splitlines()
    assert [line for line in found if not line.startswith(f"{tmp_path / 'readme.py'}:{wrong}: ")] == []
    assert summary == "Found 1 error in 1 file (checked 1 source file)"


MISSPELT = """
import kdpipes as kdp
kdp.image_folder("photos").filter_clases(valid=["cat"])
kdp.stream_shards("a.tar").permute(0)
kdp.image_folder("photos").deal(batch_size=2).collate_samples().oversampel()
kdp.stream_shards("a.tar").shuffle(buffer_size=10).set_length(10)
kdp.stream_shards("a.tar").header(10)
"""


def test_pyright_finds_pipes_that_the_flavour_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "misspelled.py").write_text(MISSPELT, encoding="utf-8")
    found = errors_of_pyright(tmp_path / "misspelled.py")
    assert [number for number, _ in found] == [3, 4, 5]
    assert all("no_such_pipe" in message for _, message in found)


STRICT = """# pyright: strict
import numpy as np
import torch

import kdpipes as kdp


def brightness(sample: kdp.Sample) -> float:
    return float(np.asarray(sample["x"]).mean())


def is_large(width: int) -> bool:
    return width > 64


def train(root: str, urls: str) -> int:
    photos = kdp.image_folder(root)
    plan = (
        photos.filter_classes(valid=["cat", "rocket", "coffee"])
        .map_classes({"cat": "animal", "rocket": "thing", "coffee": "thing"}, class_names=["animal", "thing"])
        .oversample(mode="exact")
        .take_percent(to_percent=0.9)
        .permute(0)
        .repeat_until(min_size=100)
        .take_per_class(num_samples=40)
        .sample_weighted(num_samples=60)
        .subset(range(50))
    )
    parts = kdp.split(photos, train=0.8, val=0.2)
    mixed = plan.mix([parts.train.few_shot(2)], weights=[3, 1]).join(photos, how="left")
    work = (
        mixed.on_error("skip")
        .decode_images("x")
        .add_field("light", brightness)
        .rename_fields(image="x")
        .transform("image", kdp.RandomResizedCrop(32), kdp.HorizontalFlip())
        .record_ctx()
        .cache_in_memory(freeze_randomness=True)
        .select("image y", return_ctx=True)
    )
    batches = work.deal(batch_size=8, shuffle=True, seed=0).collate_samples().mixup(num_classes=2).cutmix(num_classes=2)
    print(batches.to_device("cpu").peek(1))
    tars = kdp.open_shards(urls).filter_samples(columns="cls", keep=is_large).localize_files("cache")
    stream = kdp.stream_shards(urls).rename_fields(x="jpg", y="cls").filter_classes(valid=["cat"])
    print(
        len(tars.cache_on_disk("cache")),
        stream.transform_batch("y", torch.tensor).select("x y").cache_in_redis("redis://host"),
    )
    seen = 0
    with kdp.Loader(batches, num_workers=2) as loader:
        for (image, label), ctx in loader:
            seen += len(image) + len(label) + len(ctx)
    return seen
"""


def test_a_script_with_thirty_pipes_is_strictly_typed(tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text(STRICT, encoding="utf-8")
    assert len({pipe.name for pipe in PIPES if f".{pipe.name}(" in STRICT}) >= 30
    assert errors_of_pyright(tmp_path / "strict.py") == []
    assert said("mypy", tmp_path / "strict.py").startswith("Success")


def test_pyright_finds_what_mypy_must_find() -> None:
    lines = CHAINS.read_text(encoding="utf-8").splitlines()
    mistakes = [number for number, line in enumerate(lines, 1) if "# type: ignore[" in line]
    assert sorted({line for line, _ in errors_of_pyright(CHAINS)}) == mistakes != []
