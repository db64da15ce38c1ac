"""What type checkers say of chains: in the README and in `typing/chains.py`, they find just what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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


def test_pyright_finds_what_mypy_must_find() -> None:
    lines = CHAINS.read_text(encoding="utf-8").splitlines()
    mistakes = [number for number, line in enumerate(lines, 1) if "# type: ignore[" in line]
    assert sorted({line for line, _ in errors_of_pyright(CHAINS)}) == mistakes != []
