"""What kind of work pipes do."""

from __future__ import annotations

from typing import Any, Literal

from kdpipes.core.chain import Chain
from kdpipes.core.registry import pipe_name
from kdpipes.core.sample_pipe import SampleMapper

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
    node = Chain.of(pipe).end
    if not node.upstream:
        return "storage"
    if node.traits.role == "cache":
        return "cache"
    if node.traits.role == "deal":
        return "transfer"
    if node.traits.is_plan:
        return "plan"
    return _KINDS.get(pipe_name(pipe), "transforms" if isinstance(pipe, SampleMapper) else "transfer")
