"""What was recorded of a sample, done again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kdpipes._graph import sources_of
from kdpipes._iter_pipe import IterPipe
from kdpipes._map_pipe import MapPipe
from kdpipes._sample_pipe import SampleMapper
from kdpipes.draw import Draw, drawing
from kdpipes.errors import ChainError, DataError, closest, must_be
from kdpipes.sample import Sample

__all__ = ["chain_of_samples", "redone", "replay"]


def replay(sample_or_key: Sample | str, ctx: Mapping[str, Any], source_datapipe: Any) -> Any:
    """Repeat on a raw sample exactly what a ctx has recorded.

    Transforms use their recorded parameters, and may be given others. Callables that take random numbers in other ways
    get those of the recorded `draw`. Of the ctx of a batch, `kdp.split_ctx(ctx)` makes those of its samples. What was
    mixed in a batch is not mixed here: `kdp.rebuild_batch` makes whole batches.

    Args:
        sample_or_key: The key of a sample that the chain has; or a sample as a source gives it, on which all work pipes
            of the chain are done, and no plan pipe.
        ctx: The sample's ctx: plain data, which may come from JSON.
        source_datapipe: The chain that has recorded it. What stands from `deal` on is left out.

    Returns:
        What the chain gives for the sample: a sample, or the tuple that `select` makes.

    Raises:
        DataError: The chain has no sample of that key.
        ChainError: An operation draws random numbers of which the ctx knows nothing.

    Example:
        >>> pipe = kdp.from_ids(["a.jpg"], load=lambda id: Image.new("RGB", (9, 9))).record_ctx()
        >>> pipe = pipe.transform("x", kdp.RandomResizedCrop(4)).select("x", return_ctx=True)
        >>> (x,), ctx = pipe[0]
        >>> (again,), _ = kdp.replay("a.jpg", ctx, pipe)
        >>> again.tobytes() == x.tobytes()
        True
    """
    if not isinstance(ctx, Mapping):
        raise TypeError(must_be("ctx", "what a sample has recorded, a dictionary", ctx))
    if _holds_tensors(ctx):
        raise TypeError("`ctx` is that of a batch. `kdp.split_ctx(ctx)` makes those of its samples.")
    chain = chain_of_samples(source_datapipe)
    draw = Draw(**ctx.get("draw", {}), replayed=ctx)
    if isinstance(sample_or_key, Sample):
        return chain.finish(redone(sample_or_key, chain, draw))
    if not isinstance(sample_or_key, str):
        raise TypeError(must_be("sample_or_key", "a sample or its key", sample_or_key))
    return _by_key(sample_or_key, chain, draw)


def _holds_tensors(ctx: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, torch.Tensor) or (isinstance(value, Mapping) and _holds_tensors(value))
        for value in ctx.values()
    )


def chain_of_samples(source_datapipe: Any) -> MapPipe | IterPipe:
    """Return the part of a chain that makes samples: what stands before `deal` and stock pipes."""
    pipe = source_datapipe
    while not isinstance(pipe, MapPipe | IterPipe):
        sources = sources_of(pipe) if hasattr(pipe, "__dict__") else []
        if len(sources) != 1:
            raise ChainError(
                f"{type(pipe).__name__} is no chain of samples: give the pipe that `deal` reads, or `deal`."
            )
        (pipe,) = sources
    return pipe


def redone(sample: Sample, chain: MapPipe | IterPipe, draw: Draw, *, until: type | None = None) -> Sample:
    """Return a raw sample after the work pipes of a chain.

    Args:
        sample: As a source gives it. It stays as it is.
        chain: The pipes.
        draw: The sample's new draw.
        until: The operation before which to stop.
    """
    if not sample.is_raw:
        raise ChainError("`sample_or_key` must be a sample as its source gives it: this one has been worked on.")
    pipes: list[Any] = [chain]
    while sources := sources_of(pipes[-1]):
        if len(sources) > 1:
            raise ChainError(f"{type(pipes[-1]).__name__} has several sources: give the key of a sample in its place.")
        pipes.append(sources[0])
    with drawing(draw):
        made = Sample(sample.scope(), key=sample.key, index=sample.index)
        for pipe in reversed(pipes):
            if until is not None and isinstance(getattr(pipe, "_operation", None), until):
                break
            made = pipe.apply(made) if isinstance(pipe, SampleMapper) else made
    return made


def _by_key(key: str, chain: MapPipe | IterPipe, draw: Draw) -> Any:
    with drawing(draw):
        if isinstance(chain, MapPipe):
            keys = chain.column("key")
            places = np.flatnonzero(keys == key)
            if len(places):
                return chain.finish(chain.fetch(int(places[0])))
            raise DataError(f"The chain has no sample of key {key!r}.{closest(key, keys.tolist())}")
        for sample in chain.samples():
            if sample.key == key:
                return chain.finish(sample)
    raise DataError(f"The stream has no sample of key {key!r}.")
