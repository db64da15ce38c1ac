"""The words of the code and the documentation: none of those that readers stumbled over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "kdpipes").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
# The words, and those to write instead.
BANNED = {
    r"elsewhere": "remote, another place",
    r"of this machine": "local",
    r"\w*refus(e|es|ed|al|als)\b": "reject, raise, error",
    r"way[_ ]out": "hint",
    r"(is|are|was) told": "is reported",
    r"parcels?|tally|teller": "payload, counters, sender",
    r"announced?": "prefetch",
    r"whoever": "name the person or thing",
    r"there is nothing": "say what is missing",
}


@pytest.mark.parametrize("word", BANNED)
def test_words_that_readers_stumbled_over_are_not_used(word: str) -> None:
    pattern = re.compile(rf"(?<![A-Za-z])({word})(?![A-Za-z])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line) and "ConnectionRefused" not in line
    ]
    assert not found, f"write {BANNED[word]!r} instead: {found}"


def test_names_of_tests_have_at_most_60_characters() -> None:
    names = [
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(names) > 1000
    assert not [name for name in names if len(name) > 60]
