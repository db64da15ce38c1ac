"""What was recorded of a sample, done again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import Shuffler

from kdpipes.core.chain import Chain, upstream_of
from kdpipes.core.errors import ChainError, DataError, closest, must_be
from kdpipes.core.iter_pipe import IterPipe, seed_upstream
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.randomness import SampleKey, planning, using_key
from kdpipes.core.sample import Sample
from kdpipes.core.sample_pipe import SampleMapper

__all__ = ["find_sample", "replay"]


def replay(sample_or_key: Sample | str, ctx: Mapping[str, Any], source_datapipe: Any) -> Any:
    """Repeat on a raw sample exactly what a ctx has recorded.

    Transforms use their recorded parameters, and may be given others. Callables that take random numbers in other ways
    get those of the recorded `draw`. Of the ctx of a batch, `kdp.split_ctx(ctx)` makes those of its samples. What was
    mixed in a batch is not mixed here: `kdp.rebuild_batch` makes whole batches.

    Args:
        sample_or_key: The key of a sample that the chain has (of a stream, the first of that key); or a sample as a
            source gives it, on which all work pipes of the chain are done, and no plan pipe.
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
    chain = _chain_of_samples(source_datapipe)
    sample_key = _sample_key_of(ctx)
    if isinstance(sample_or_key, Sample):
        return chain.finish(_redone(sample_or_key, chain, sample_key))
    if not isinstance(sample_or_key, str):
        raise TypeError(must_be("sample_or_key", "a sample or its key", sample_or_key))
    return _by_key(sample_or_key, chain, sample_key)


def _holds_tensors(ctx: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, torch.Tensor) or (isinstance(value, Mapping) and _holds_tensors(value))
        for value in ctx.values()
    )


def _sample_key_of(ctx: Mapping[str, Any]) -> SampleKey:
    entry = ctx.get("draw", {})
    if not isinstance(entry, Mapping) or not set(entry) <= {"seed", "epoch", "ordinal"}:
        raise ChainError(f"The entry 'draw' of the ctx must be what kdpipes records there, but is {entry!r}.")
    if not isinstance(ctx.get("early_draws", {}), Mapping):
        raise ChainError("The entry 'early_draws' of the ctx must be what kdpipes records there.")
    return SampleKey.from_entry(entry, replayed=ctx)


def _chain_of_samples(source_datapipe: Any) -> MapPipe | IterPipe:
    """Return the part of a chain that makes samples: what `deal` reads, or the chain, if there is none."""
    pipe = source_datapipe
    if isinstance(pipe, IterDataPipe | MapDataPipe):
        deal = next((node for node in Chain.of(pipe).path() if node.traits.role == "deal"), None)
        pipe = pipe if deal is None else deal.upstream[0].pipe
    while isinstance(pipe, Shuffler):  # it changes only the order
        (pipe,) = upstream_of(pipe)
    if not isinstance(pipe, MapPipe | IterPipe):
        raise ChainError(f"{type(pipe).__name__} is no pipe of samples. Put kdpipes' own pipes in its place.")
    return pipe


def _path_of(chain: MapPipe | IterPipe) -> list[Any]:
    """Return the pipes of a chain from its source on, or refuse one with several sources or foreign pipes.

    What a source reads from is left out.
    """
    path: list[Any] = [chain]
    while any(
        isinstance(pipe, MapPipe | IterPipe) for source in upstream_of(path[-1]) for pipe in Chain.of(source).pipes
    ):
        sources = upstream_of(path[-1])
        if len(sources) > 1:
            raise ChainError(f"{type(path[-1]).__name__} has several sources: give the key of a sample in its place.")
        if not isinstance(sources[0], MapPipe | IterPipe):
            name = type(sources[0]).__name__
            raise ChainError(f"{name} cannot be done again on one sample: give the key of a sample in its place.")
        path.append(sources[0])
    return path[::-1]


def _redone(sample: Sample, chain: MapPipe | IterPipe, sample_key: SampleKey) -> Sample:
    """Return a raw sample after the work pipes of a chain."""
    if not sample.is_raw:
        raise ChainError("`sample_or_key` must be a sample as its source gives it: this one has been worked on.")
    with using_key(sample_key):
        made = sample.fork()
        for pipe in _path_of(chain):
            made = pipe.apply(made) if isinstance(pipe, SampleMapper) else made
    return made


def _by_key(key: str, chain: MapPipe | IterPipe, sample_key: SampleKey) -> Any:
    if isinstance(chain, MapPipe):
        sources = [node.pipe for node in Chain.of(chain).sources if isinstance(node.pipe, MapPipe)]
        if len(sources) > 1 and sum(bool((source.column("key") == key).any()) for source in sources) > 1:
            raise ChainError(
                f"Several sources of the chain have a sample of key {key!r}: give the raw sample in its place."
            )
        with using_key(sample_key):
            made = find_sample(key, chain)
            if made is None:
                keys = chain.column("key")
                raise DataError(f"The chain has no sample of key {key!r}.{closest(key, map(str, keys))}")
            return chain.finish(made)
    stream: Any = Chain.of(chain).copy_streams()  # it may be in use
    # Otherwise stock pipes would draw from the global generators, which other threads seed.
    seed_upstream(stream, sample_key.seed, sample_key.epoch)
    with using_key(sample_key):
        for sample in stream.samples():
            if sample.key == key:
                return stream.finish(sample)
    raise DataError(f"The stream has no sample of key {key!r}.")


def find_sample(key: str, pipe: MapPipe) -> Sample | None:
    """Return the sample of a key as `pipe` gives it in any epoch; None if there is no such sample."""
    places = np.flatnonzero(pipe.column("key") == key)
    if len(places):
        with planning(0):  # the column holds the keys of epoch 0
            return pipe.fetch(int(places[0]))
    if pipe.redrawn_by() is None:
        return None
    for number, source in enumerate(upstream_of(pipe)):  # another epoch may give it
        if isinstance(source, MapPipe) and (sample := find_sample(key, source)) is not None:
            sample = sample.come_from(number) if len(upstream_of(pipe)) > 1 else sample
            return pipe.apply(sample) if isinstance(pipe, SampleMapper) else sample
    return None
