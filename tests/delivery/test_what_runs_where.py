"""The documentation's page about what runs where names classes and modules that exist, as its picture does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| (\d)\. (?:The )?`?(\w+)`? .* \| `(kdpipes/loader/\w+)\.py` \|", re.MULTILINE)


def test_the_pages_stations_are_those_of_code_and_picture() -> None:
    stations = ROW.findall((DOCS / "what_runs_where.md").read_text())
    assert [number for number, *_ in stations] == ["1", "2", "3", "4", "5", "6"]
    from_code = importlib.import_module("kdpipes.loader.loader").__doc__ or ""
    picture = (DOCS / "what_runs_where.svg").read_text()
    for number, name, path in stations:
        module = importlib.import_module(path.replace("/", "."))
        assert name == "channel" or hasattr(module, name)
        assert re.search(rf"^{number}\. .*\b{Path(path).name}\.py\b|^{number}\. .*`{name}`", from_code, re.MULTILINE)
        assert number == "5" or f"{number}. {name.capitalize() if name == 'channel' else name}" in picture
