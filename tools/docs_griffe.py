"""An extension of griffe, which reads docstrings for mkdocstrings: the sections that only kdpipes' docstrings have."""

from __future__ import annotations

from typing import Any

import griffe
from api_pages import understood

__all__ = ["Sections"]


class Sections(griffe.Extension):
    """Rewrites docstrings so that griffe's parser of Google style understands them."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = understood(obj.docstring.value)
