"""What tests compare chains by."""

from __future__ import annotations

from typing import Any

from kdpipes.core.chain import Chain


def fingerprints(pipe: Any) -> list[str]:
    """Return one `name:hash` for each pipe of a chain, as states hold them."""
    return Chain.of(pipe).fingerprints()
