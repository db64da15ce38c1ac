"""The documentation: every block and every line of ours runs, links lead somewhere, and the API has every name."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from torch.utils.data import IterDataPipe, MapDataPipe

import kdpipes as kdp
from kdpipes.cli import COMMANDS, main
from kdpipes.core.registry import registered
from tests.torchdata_parts import HAS_TORCHDATA, needs_torchdata

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUN_HERE = [page for page in PAGES if page.name != "trainers.md"]  # test_trainers.py runs that with two ranks
STEP = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$|^\| (?P<row>[^\n]*) \|$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RESULTS = re.compile(r"\(\.\./benchmarks/results/(\w+\.txt)\)")
NOT_RUN = "# not run by the tests: "


class Step(NamedTuple):
    """A block of a page, or a cell of ours in a table: its language, its text, and the page's text before it."""

    language: str
    code: str
    before: str


def steps(text: str) -> list[Step]:
    """Return what a page shows as code, in order; of tables whose last column is "kdpipes", the cells of that."""
    found, is_ours = [], False
    for match in STEP.finditer(text):
        before = text[: match.start()]
        if match["row"] is None:
            found.append(Step(match["language"], match["code"], before))
        elif re.match(r"[ |:-]+$", text[match.end() + 1 :].split("\n")[0]):
            is_ours = match["row"].endswith("| kdpipes")
        elif is_ours and not match["row"].startswith("-"):
            cell = match["row"].split(" | ")[-1]
            found += [Step("cell", code, before) for code in re.findall(r"`([^`]+)`", cell)]
    return found


def load(name: str) -> ModuleType:
    """Return a script of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def api() -> dict[str, str]:
    """The generated pages by path."""
    pages: dict[str, str] = load("api_pages").api_pages()
    return pages


def run_python(code: str, name: str, namespace: dict[str, Any]) -> str:
    """Run code, and return what it has printed: the error last, if there was one."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, name, "exec"), namespace)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


def run_cell(code: str, name: str, namespace: dict[str, Any]) -> str:
    """Run a line of a table; of a chain or a loader, also what it gives first."""
    try:
        made = eval(compile(code, name, "eval"), namespace)  # noqa: S307
    except SyntaxError:
        return run_python(code, name, namespace)
    if isinstance(made, kdp.Loader):
        with made:
            next(iter(made))
    elif isinstance(made, IterDataPipe | MapDataPipe) and "redis" not in code:
        first = next(iter(made))
        dict(first) if isinstance(first, kdp.Sample) else None
    return ""


def run_shell(code: str) -> str:
    """Run the lines of `kdpipes`; others are for readers."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        for line in code.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["kdpipes"]:
                assert main(words[1:]) == 0, line
    return printed.getvalue()


def run_page(page: Path) -> Iterator[tuple[Step, Step, str]]:
    """Run the steps of a page, one after the other; yield each, the next, and what was printed."""
    found = steps(page.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": f"docs_{page.stem}"}
    for step, following in zip(found, [*found, Step("", "", "")][1:], strict=True):
        if step.language == "cell":
            yield step, following, run_cell(step.code, page.name, namespace)
        elif step.language == "python" and not step.code.startswith(NOT_RUN):
            yield step, following, run_python(step.code, page.name, namespace)
        elif step.language == "sh":
            yield step, following, run_shell(step.code)
    namespace.clear()  # which classes of the page, that others remember, hold


def differences(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield what was run, what was to be printed, and what was, where they differ."""
    for step, following, printed in run_page(page):
        is_shown = following.language == "text"
        found = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
        wanted = following.code if is_shown else ""
        if not HAS_TORCHDATA and "import DataLoader2" in step.code:
            continue
        if found != wanted and (is_shown or step.language != "sh"):
            yield step.code, wanted, found


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves files to the collector
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_every_block_of_a_page_runs_and_prints_its_output(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert not list(differences(page))


def test_blocks_are_python_that_runs_shell_or_what_they_print() -> None:
    for page in PAGES:
        found = steps(page.read_text(encoding="utf-8"))
        assert {step.language for step in found} <= {"python", "cell", "sh", "text"}, page
        for before, step in pairwise(found):
            if step.language == "text" and page.name != "performance.md":
                assert before.language in ("python", "sh"), step.code
                assert not before.code.startswith(NOT_RUN), before.code


def test_what_is_wrong_on_a_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    right = "```python\nimport kdpipes as kdp; print(1)\n```\n```text\n1\n```\n"
    right += "| theirs | kdpipes |\n|---|---|\n| `one` | `kdp.Resize(8)` |\n"
    page.write_text(right)
    assert not list(differences(page))
    page.write_text(right.replace("text\n1", "text\n2"))
    assert list(differences(page)) == [("import kdpipes as kdp; print(1)\n", "2\n", "1\n")]
    page.write_text(right.replace("print", "prin"))
    [(_, _, printed)] = differences(page)
    assert printed.startswith("NameError")
    page.write_text(right.replace("Resize", "Resise"))
    with pytest.raises(AttributeError, match="Resise"):
        list(differences(page))


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    found = [step.code for page in PAGES for step in steps(page.read_text(encoding="utf-8"))]
    left_out = [code.splitlines()[0] for code in found if code.startswith(NOT_RUN)]
    assert len(left_out) <= 5
    assert all(len(line) > len(NOT_RUN) + 10 for line in left_out)
    assert len(found) - len(left_out) >= 100


def test_numbers_stand_in_the_results_of_benchmarks() -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    found = steps(text)
    quotes = 0
    for before, step in zip([Step("", "", ""), *found], found, strict=False):
        if step.language == "text" and before.language not in ("python", "sh"):
            name = RESULTS.findall(step.before)[-1]
            lines = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8").splitlines()
            assert not set(map(str.rstrip, step.code.splitlines())) - set(map(str.rstrip, lines)), name
            quotes += 1
    assert quotes >= 5


def anchors_of(text: str) -> set[str]:
    """Return what `#...` of a link may name: given ids, and those that mkdocs makes of headings."""
    without_code = BLOCK.sub("", text)
    titles = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    given = set(re.findall(r"\{: #(\w+) \}", text))
    made = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
    return given | made


def test_links_lead_to_pages_headings_and_files(api: dict[str, str]) -> None:
    texts = {name_of(page): page.read_text(encoding="utf-8") for page in PAGES} | api
    num_links = 0
    for name, text in texts.items():
        for link in LINK.findall(BLOCK.sub("", text) if name not in api else ""):
            target, _, anchor = link.partition("#")
            assert not re.match(r"\w+:", link), f"{name}: {link} needs the network"
            path = ((DOCS / name).parent / target).resolve() if target else DOCS / name
            num_links += 1
            if path.is_relative_to(DOCS) and path.suffix != ".svg":
                assert path.relative_to(DOCS).as_posix() in texts, f"{name}: {link}"
                assert not anchor or anchor in anchors_of(texts[path.relative_to(DOCS).as_posix()]), f"{name}: {link}"
            else:
                assert path.is_file(), f"{name}: {link}"
                assert path.suffix != ".md", f"{name}: {link} is a page outside of the site"
    assert num_links >= 45


def test_the_links_of_the_index_of_names_lead_to_their_entries(api: dict[str, str]) -> None:
    links = LINK.findall(api["api/index.md"])
    assert len(links) >= 80
    for link in links:
        target, _, anchor = link.partition("#")
        assert f"api/{target}" in api, link
        assert not anchor or f"{{: #{anchor} }}" in api[f"api/{target}"], link


def test_every_name_pipe_and_command_is_in_the_api(api: dict[str, str]) -> None:
    text = "\n".join(api.values())
    assert not [name for name in kdp.__all__ if f"`kdp.{name}`" not in text]
    ours = {name for (name, _), pipe in registered().items() if pipe.__module__.startswith("kdpipes.")}
    assert not [name for name in ours if f"## `.{name}()`" not in text]
    assert not [name for name in COMMANDS if f"## `kdpipes {name}`" not in text]


def test_the_api_shows_signatures_and_docstrings_once(api: dict[str, str]) -> None:
    oversample = api["api/plan.md"].split("## `.oversample()`")[1].split("\n## ")[0]
    assert "*On indexed sources.*" in oversample
    assert "*On streams.*\n\n```text\n.oversample(*, mode='multiply', redraw=True, class_counts=None)" in oversample
    assert oversample.count("::: kdpipes.plan.oversample.") == 1
    assert "'state_dict'" in api["api/delivery.md"].split("::: kdpipes.loader.loader.Loader")[1].split("\n\n")[0]


def test_our_docstring_sections_become_those_that_griffe_knows() -> None:
    arguments = "Args:\n    source_datapipe: Any\n        pipe.\n    n: A number.\n"
    docstring = f"Do it.\n\n{arguments}\nLength: n.\n\nExample:\n    >>> 1\n"
    assert load("api_pages").understood(docstring) == (
        "Do it.\n\nArgs:\n    n: A number.\n\n**Length:** n.\n\nExamples:\n    >>> 1\n"
    )


@needs_torchdata
@pytest.mark.parametrize(("path", "maker"), [("llms.txt", "llms"), ("coding_agents.md", "coding_agents")])
def test_pages_for_programs_are_up_to_date(path: str, maker: str) -> None:
    assert (DOCS / path).read_text(encoding="utf-8") == getattr(load("names"), maker)(), "Run `make names`."


def test_every_page_is_in_the_menu(api: dict[str, str]) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r": ([\w/]+\.md)$", menu, re.MULTILINE)) == {name_of(page) for page in PAGES} | set(api)


def test_links_out_of_the_pages_lead_to_copies_in_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    hooks = load("docs_hooks")
    text = "[numbers](../benchmarks/results/open.txt), [page](plan.md)"
    [(link, target)] = hooks.files_outside(DOCS / "performance.md", text)
    assert link == "../benchmarks/results/open.txt"
    assert hooks.copied_to(target) == "repository/benchmarks/results/open.txt"
