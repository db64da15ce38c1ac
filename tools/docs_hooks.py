"""The hooks of mkdocs: API pages, and the files of the repository that pages link to.

    mkdocs build --strict                                  # what `make docs` runs; mkdocs.yml names this file

Nothing here needs mkdocs but the hook `on_files`, so that tests check names and links without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api_pages import api_pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#]+)\)")
_FOUND_FIRST = "---\nsearch:\n  boost: 5\n---\n"  # a search for a pipe should begin with its documentation


def files_outside(page: Path, text: str) -> Iterator[tuple[str, Path]]:
    """Yield the links of a page that leave docs/, and the files of the repository that they name."""
    for link in OUTSIDE.findall(text):
        target = (page.parent / link).resolve()
        if not target.is_relative_to(DOCS):
            yield link, target


def copied_to(target: Path) -> str:
    """Return where a file of the repository stands in the site."""
    return "repository/" + target.relative_to(ROOT).as_posix()


def on_files(files: Any, config: Any) -> Any:
    """Add the API pages, and the files that pages link to."""
    from mkdocs.structure.files import File

    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=_FOUND_FIRST + text))
    linked = {target for page in DOCS.rglob("*.md") for _, target in files_outside(page, page.read_text())}
    for target in sorted(linked):
        files.append(File.generated(config, copied_to(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links that leave docs/ lead to the copies in the site, and mark what examples print."""
    markdown = re.sub(r"(?m)^```text$", "``` { .text .output }", markdown)
    source = DOCS / page.file.src_uri
    for link, target in files_outside(source, markdown):
        copied = os.path.relpath(DOCS / copied_to(target), source.parent)
        markdown = markdown.replace(f"]({link})", f"]({copied})")
    return markdown
