"""The rates of loaders in notebooks."""

from __future__ import annotations

from typing import Any

import IPython.display
import pytest

import kdpipes as kdp
from kdpipes.look import profile as live
from tests.torchdata_parts import InProcessReadingService


def numbers(size: int = 8) -> Any:
    return kdp.from_dataset([(n, n % 2) for n in range(size)])


def test_a_loader_shows_its_rates() -> None:
    chain = numbers().transform("x", lambda x: 1 / (x - 3)).on_error("skip", max_share=0.5).cache_in_memory()
    with kdp.Loader(chain.select("x").deal(batch_size=2)) as loader:
        assert "<td" in loader._repr_html_()
        assert len(list(loader)) + len(list(loader)) == 8
        shown = loader._repr_html_()
    assert "kdpipes.Loader of from_dataset → transform" in shown
    for text in ("8, ", "samples", "waited for batches", "of the loop", "batches ready", "skipped samples"):
        assert text in shown
    assert "7 of 14 fields" in shown, "the second epoch finds what the first one made, but for the bad one"
    assert "worker deaths" not in shown


def test_a_loader_of_a_foreign_service_shows_its_pipes() -> None:
    loader = kdp.Loader(numbers().select("x").deal(batch_size=2), reading_service=InProcessReadingService())
    assert "Loader of from_dataset" in loader._repr_html_()
    loader.close()


class Handle:
    """What IPython returns for something that was displayed."""

    def __init__(self) -> None:
        self.updates: list[str] = []

    def update(self, shown: Any, *, raw: bool) -> None:
        assert raw
        self.updates.append(shown["text/html"])


def test_what_is_shown_follows_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle()
    monkeypatch.setattr(IPython.display, "display", lambda shown, raw, display_id: handle)
    monkeypatch.setattr(live, "_EVERY_S", 0)
    with kdp.Loader(numbers().select("x").deal(batch_size=2), num_workers=1) as loader:
        loader._ipython_display_()
        for number, _ in enumerate(loader, 1):
            assert len(handle.updates) == number
        assert "4, " in handle.updates[-1]
        monkeypatch.setattr(live, "_EVERY_S", 1e9)
        list(loader)
        assert len(handle.updates) == 4, "not more often than every half second"
        loader.on_batch(None)
        monkeypatch.setattr(live, "_EVERY_S", 0)
        list(loader)
        assert len(handle.updates) == 4
