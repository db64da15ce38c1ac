"""HTML for notebooks, made by the template beside this module."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

__all__ = ["render"]


def render(macro: str, *arguments: Any) -> str:
    """Return what a macro of `look.html.jinja` makes of some arguments. Text is escaped."""
    return str(getattr(_template().module, macro)(*arguments))


@functools.cache
def _template() -> jinja2.Template:
    import jinja2  # takes 50 ms, which only what is shown should pay

    loader = jinja2.PackageLoader("kdpipes", "look")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("look.html.jinja")
