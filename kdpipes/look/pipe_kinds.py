"""What kind of work pipes do."""

from __future__ import annotations

from typing import Any, Literal

from kdpipes._graph import sources_of
from kdpipes._pipe_name import pipe_name
from kdpipes._sample_pipe import SampleMapper
from kdpipes.delivery.behind_deal import DEALERS

__all__ = ["Kind", "kind_of"]

Kind = Literal["storage", "plan", "decoding", "transforms", "cache", "transfer", "device"]
_KINDS: dict[str, Kind] = {
    "decode_images": "decoding",
    "transform": "transforms",
    "add_field": "transforms",
    "to_device": "device",
    "pin_memory": "device",
    "collate_samples": "transfer",
    "collate": "transfer",
    "mixup": "transfer",
    "cutmix": "transfer",
    "map": "transforms",
}


def kind_of(pipe: Any) -> Kind:
    """Return what kind of work a pipe does."""
    if not sources_of(pipe):
        return "storage"
    if callable(getattr(pipe, "counted_by_cache", None)):
        return "cache"
    if isinstance(pipe, DEALERS):
        return "transfer"
    if getattr(pipe, "is_plan", False):
        return "plan"
    return _KINDS.get(pipe_name(pipe), "transforms" if isinstance(pipe, SampleMapper) else "transfer")
