"""Every block of the README runs, and prints what the README says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes._names import PIPES
from tests.torchdata_parts import HAS_TORCHDATA

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def run(code: str, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, "README.md", "exec"), namespace)
        except ValueError as error:
            text = str(error)
            for note in reversed(getattr(error, "__notes__", [])):  # the text ends with them on Python 3.10
                text = text.removesuffix(f"\n{note}")
            print(f"{type(error).__name__}: {text}")
    return printed.getvalue()


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
def test_every_block_prints_what_stands_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    following = [*BLOCKS[1:], ("", "")]
    checked = 0
    for (language, code), (next_language, expected) in zip(BLOCKS, following, strict=True):
        if "torchdata" in code and not HAS_TORCHDATA:
            continue
        if language == "python":
            printed = run(code, namespace)
            if next_language == "text":
                lines = printed.splitlines()
                wanted = expected.splitlines()
                assert lines == wanted, code
                checked += 1
            else:
                assert not printed
    assert checked == sum(language == "text" for language, _ in BLOCKS) >= 4


def test_the_table_links_to_sections_that_name_the_pipe() -> None:
    for pipe in PIPES:
        page = ROOT / "docs" / pipe.docs.partition("#")[0]
        text = page.read_text(encoding="utf-8")
        assert re.search(rf"\b{pipe.name}\b", text), f"Describe `{pipe.name}` in docs/{pipe.docs}."


def test_its_links_lead_to_pages_and_headings() -> None:
    for page, anchor in re.findall(r"\]\(([\w/.]+)#?([\w-]*)\)", README):
        titles = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
        assert not anchor or anchor in anchors, f"{page}#{anchor}"


def test_the_sources_are_all_named() -> None:
    for name in (
        "image_folder",
        "open_shards",
        "open_records",
        "stream_shards",
        "from_ids",
        "from_table",
        "from_dataset",
        "SampleSource",
    ):
        assert name in kdp.__all__
        assert f"`kdp.{name}" in README


def test_every_command_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([\w-]+)`", README))
    assert targets >= {"demo", "docs", "quick", "test", "test-all"}
    for target in targets:
        assert f"\n{target}: " in makefile
    assert "make test test-all" in (ROOT / ".ci" / "run").read_text()
    assert (ROOT / "constraints.txt").read_text().splitlines()[-1] == "torch==2.13.0"


def test_the_extras_are_all_named() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    section = project.split("[project.optional-dependencies]")[1].split("\n\n")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    paragraph = README.split("Extras:")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) == extras


def test_it_is_short_enough_to_read() -> None:
    lines = [line for line in README.splitlines() if not line.startswith("| [`")]  # a pipe a line
    assert len(lines) < 118, "Shorten README.md."
    text = re.sub(r"```text\n.*?```", "", README, flags=re.DOTALL)
    assert max(map(len, text.splitlines())) <= 100
