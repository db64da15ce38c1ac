"""Loaders in notebooks: their rates as HTML, which follows the loop while it runs."""

from __future__ import annotations

import time
import weakref
from typing import Any

from kdpipes.loader.loader import Loader, show_loaders_by
from kdpipes.look.rendering import render

__all__ = ["loader_html", "show_live"]

_EVERY_S = 0.5


def loader_html(loader: Loader) -> str:
    """Return the rates of a loader as a piece of HTML; only its pipes if a foreign reading service runs it."""
    try:
        stats = loader.stats()
    except TypeError:  # the reading service is not one of kdpipes'
        return render("shares", repr(loader), [])
    rows: list[tuple[str, str, float | None]] = [
        ("epoch", f"{loader.epoch}", None),
        ("batches", f"{stats['batches']:,.0f}, {stats['batches_per_s']:,.1f} per s", None),
        ("samples", f"{stats['samples']:,.0f}, {stats['samples_per_s']:,.0f} per s", None),
        ("waited for batches", f"{stats['wait_share']:.0%} of the loop, {stats['wait_s']:.1f} s", stats["wait_share"]),
        ("batches ready", f"{stats['queue_depth']:,.0f}", None),
    ]
    if tried := stats.get("cache_hits", 0) + stats.get("cache_misses", 0):
        hits = stats.get("cache_hits", 0)
        rows.append(("found in caches", f"{hits:,.0f} of {tried:,.0f} fields", hits / tried))
    for name in ("skipped_samples", "skipped_shards", "worker_deaths"):
        if stats[name]:
            rows.append((name.replace("_", " "), f"{stats[name]:,.0f}", None))
    return render("shares", repr(loader), rows)


def _bundle(loader: Loader) -> dict[str, str]:
    return {"text/html": loader_html(loader), "text/plain": repr(loader)}


def show_live(loader: Loader) -> None:
    """Show the rates of a loader in a notebook, and update them while batches are delivered."""
    import IPython.display  # installed where a notebook calls this

    display: Any = IPython.display.display
    handle = display(_bundle(loader), raw=True, display_id=True)
    shown, last = weakref.ref(loader), time.monotonic()

    def update() -> None:
        nonlocal last
        current = shown()
        if current is not None and time.monotonic() - last >= _EVERY_S:
            last = time.monotonic()
            handle.update(_bundle(current), raw=True)

    loader.on_batch(update)


show_loaders_by(html=loader_html, live=show_live)
