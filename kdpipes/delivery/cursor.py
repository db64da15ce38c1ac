"""Where a stream of shards stands, so that it can go on there without reading what came before."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError

__all__ = ["Cursor", "Shards", "is_passed_straight", "refuse_whole", "shards_behind"]

Cursor = tuple[int, int, int]  # the shard (of this part), the sample in the shard, the sample in all


@runtime_checkable
class Shards(Protocol):
    """A stream of shards, some of which can be left out."""

    cursor: Cursor

    @property
    def num_shards(self) -> int: ...
    def read_part(self, part: int, num_parts: int) -> None: ...
    def order_by(self, key: bytes | None) -> None: ...
    def seek(self, cursor: Cursor) -> None: ...


def shards_behind(pipe: Any) -> Any:
    """Return the stream of shards that a chain reads, if it reads one and nothing else."""
    found = Chain.of(pipe).sources
    return found[0].pipe if len(found) == 1 and isinstance(found[0].pipe, Shards) else None


def is_passed_straight(pipe: Any, shards: Any) -> bool:
    """Return whether each sample that reaches `pipe` is the one that was read last: nothing between holds any back."""
    between = [node for node in list(reversed(Chain.of(pipe)))[1:] if node.pipe is not shards]
    return not any(node.traits.holds_back for node in between)


def refuse_whole(pipe: Any) -> None:
    """Refuse to split by shard what cannot be: other sources, and pipes that count over the whole stream."""
    if shards_behind(pipe) is None:
        raise ChainError('`deal(split="shards")` needs `kdp.stream_shards` as the one source of the chain.')
    for node in list(reversed(Chain.of(pipe)))[1:]:
        if node.traits.counts_whole:
            raise ChainError(
                f"`{node.name}` counts over the whole stream, but each worker would have shards of its "
                'own. Use `deal(split="samples")`.'
            )
