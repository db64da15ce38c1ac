"""How chains show themselves: by `repr`, and in notebooks, also where a stock pipe stands at their end."""

from __future__ import annotations

import sys

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.core.pipe import show_by
from kdpipes.look.chain_html import chain_html
from kdpipes.look.chain_text import chain_text

__all__ = ["show_in_notebook"]

show_by(text=chain_text, html=chain_html)


def show_in_notebook() -> None:
    """Let IPython, if this process runs it, show stock pipes as it shows kdpipes' own. Nothing is imported for it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    for pipe_class in (IterDataPipe, MapDataPipe):
        shell.display_formatter.formatters["text/html"].for_type(pipe_class, chain_html)


show_in_notebook()
