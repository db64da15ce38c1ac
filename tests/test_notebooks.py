"""Every notebook runs from top to bottom, in a kernel of its own, and leaves nothing behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short name, below which torch and the S3 store can make sockets."""
    with tempfile.TemporaryDirectory(prefix="nb-") as name:
        yield Path(name)


# What notebook 2 provokes on purpose, and what other packages print that import tqdm where ipywidgets is missing.
EXPECTED = ("Storage does not respond", "TqdmWarning: IProgress not found", "from .autonotebook import tqdm")


@pytest.mark.filterwarnings("ignore")  # jupyter's own: what a notebook's user sees is asserted below
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_shows_no_warning_and_leaves_nothing(
    path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: root / name for name in ("here", "temporary", "cache")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))  # the S3 server is in tests/
    monkeypatch.setenv("TMPDIR", str(folders["temporary"]))
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(folders["cache"]))
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import os; os.getpid()"))
    where = {"metadata": {"path": str(folders["here"])}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    *outputs, last = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    written = "".join(output["text"] for output in outputs if output.get("name") == "stderr")
    assert [line for line in written.splitlines() if not any(known in line for known in EXPECTED)] == []
    left = [file for folder in folders.values() for file in folder.iterdir()]
    kept = ("torchinductor_", "indexes")  # torch's own; copies of remote indexes, with which shards open offline
    assert [file for file in left if not file.name.startswith(kept)] == []
    assert _processes_left_with(f"TMPDIR={folders['temporary']}") == []
    assert list(Path("/dev/shm").glob(f"*_{last['data']['text/plain']}_*")) == []


def _processes_left_with(variable: str) -> list[str]:
    """Return the command lines of the processes with a variable that do not end: one that watches ends a bit later."""
    deadline = time.monotonic() + 10
    while (left := _processes_with(variable)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _processes_with(variable: str) -> list[str]:
    """Return the command lines of the processes that have a variable in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (ProcessLookupError, FileNotFoundError, PermissionError):  # it has ended, or is somebody else's
            continue
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_outputs_but_no_traces_of_their_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert [cell.id for cell in notebook.cells] == [f"cell-{number}" for number in range(len(notebook.cells))]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [cell.metadata for cell in notebook.cells if cell.metadata]
    assert not [output for cell in cells for output in cell.outputs if "image/jpeg" in output.get("data", {})]


def test_the_notebooks_are_one_course() -> None:
    index = (FOLDER / "README.md").read_text()
    assert [path.name for path in NOTEBOOKS if f"]({path.name})" not in index] == []
    for path, following in zip(NOTEBOOKS, [*NOTEBOOKS[1:], FOLDER / "README.md"], strict=True):
        assert f"]({following.name})" in nbformat.read(path, as_version=4).cells[-1].source
