"""Rendering: HTML by the template next to this module, tables of text, numbers with units."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kdpipes.core.secrets import printable

if TYPE_CHECKING:
    import jinja2


_INDENT = 2  # of tables in other texts
_NARROWEST = 16  # the first column of a table


def render(macro: str, *arguments: Any) -> str:
    """Return the text that a macro of `look.html.jinja` makes of its arguments. Values are escaped."""
    return str(getattr(_template().module, macro)(*arguments))


@functools.cache
def _template() -> jinja2.Template:
    import jinja2  # takes 50 ms, so import it only for display

    loader = jinja2.PackageLoader("kdpipes", "look")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # Text is shown without control characters. What a macro has made is of another type, and passes.
        finalize=lambda value: printable(value, keep="\n\t") if type(value) is str else value,
    )
    return environment.get_template("look.html.jinja")


def elided(text: str, longest: int) -> str:
    """Return a text without its middle if it is too long.

    >>> elided("applying 'crop'", 9)
    "appl…rop'"
    """
    begin = longest // 2
    return text if len(text) <= longest else f"{text[:begin]}…{text[begin + 1 - longest :]}"


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose first column is aligned to the left and whose others are to the right.

    Long entries of the first column lose their middle if the table would not fit the terminal.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    free = shutil.get_terminal_size().columns - _INDENT - sum(width + 2 for width in widths[1:])
    widths[0] = min(widths[0], max(free, _NARROWEST))
    for name, *others in rows:
        first = elided(name, widths[0])
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()


def seconds_text(seconds: float) -> str:
    """Return a duration as text."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def bytes_text(size: float) -> str:
    """Return a size in bytes as text."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def class_name(label: Any, names: Sequence[str] | None) -> str | None:
    """Return the name of a class that is given by its number; None if it is unknown."""
    return names[label] if names is not None and isinstance(label, int) and 0 <= label < len(names) else None
