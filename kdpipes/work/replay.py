"""`replay`: repeat the operations on a sample from the parameters that its ctx recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kdpipes.core.chain import Chain, why_whole
from kdpipes.core.errors import ChainError, DataError, check_type, closest
from kdpipes.core.iter_pipe import IterPipe, seed_streams
from kdpipes.core.map_pipe import MapPipe, redrawing_name
from kdpipes.core.operation import finished
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.randomness import SampleKey, planning, using_key
from kdpipes.core.sample import Sample
from kdpipes.core.sample_pipe import SampleMapper
from kdpipes.core.stock import upstream_of
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe, Shuffler


def replay(sample_or_key: Sample | str, ctx: Mapping[str, Any], source_datapipe: Any) -> Any:
    """Repeat the operations on a sample exactly as recorded in its ctx.

    Transforms use the recorded parameters, which may be edited. Other callables get random numbers derived from the
    recorded `draw`. For a batch, `kdpipes.delivery.split_ctx(ctx)` returns the ctx of each sample. `mixup` and `cutmix`
    are not repeated; `kdp.find` makes whole batches again.

    Args:
        sample_or_key: The key of a sample of the chain; if several samples of a stream have this key, the one with the
            recorded ordinal, or the first one if the ctx has none. Or a raw sample of the source, to which all work
            pipes of the chain are applied, but no plan pipe.
        ctx: The ctx of the sample: plain data, which may come from JSON.
        source_datapipe: The chain that recorded the ctx. `deal` and all pipes after it are ignored.

    Returns:
        The item of the chain for the sample: a sample, or the item that `select` makes.

    Raises:
        DataError: The chain has no sample with this key.
        ChainError: An operation draws random numbers that are missing in the ctx; or several samples of a chain of
            indexed sources, or of `kdp.stream_shards` with `.to_samples(key=...)`, have the key.

    Example:
        >>> pipe = kdp.from_ids(["a.jpg"], load=lambda id: Image.new("RGB", (9, 9))).record_ctx()
        >>> pipe = pipe.transform("x", kdp.RandomResizedCrop(4)).select("x", return_ctx=True)
        >>> (x,), ctx = pipe[0]
        >>> (again,), _ = kdp.replay("a.jpg", ctx, pipe)
        >>> again.tobytes() == x.tobytes()
        True
    """
    check_type("ctx", ctx, Mapping, "the ctx of a sample, a dictionary")
    if _holds_tensors(ctx):
        raise TypeError(
            "`ctx` must be the ctx of a sample, but is that of a batch. Use `kdpipes.delivery.split_ctx(ctx)`."
        )
    chain = _chain_of_samples(source_datapipe)
    entry = ctx.get("draw", {})
    if not isinstance(entry, Mapping) or not set(entry) <= {"seed", "epoch", "ordinal"}:
        raise ChainError(f"The entry 'draw' of the ctx must be as kdpipes recorded it, but is {entry!r} instead.")
    if not isinstance(ctx.get("early_draws", {}), Mapping):
        raise ChainError("Entry 'early_draws' of the ctx has been changed. Pass the ctx as kdpipes recorded it.")
    sample_key = SampleKey.from_entry(entry, replayed=ctx)
    if isinstance(sample_or_key, str):
        return _by_key(sample_or_key, chain, sample_key)
    check_type("sample_or_key", sample_or_key, Sample, "a sample or its key")
    if sample_or_key.block.claimed or sample_or_key.block.is_recording:
        raise ChainError("`sample_or_key` must be a sample as its source makes it, but this one has been changed.")
    with using_key(sample_key):
        made = sample_or_key.fork()
        for pipe in _path_of(chain):
            made = pipe.apply_to(made) if isinstance(pipe, SampleMapper) else made
    return finished(chain, made)


def _holds_tensors(ctx: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, torch.Tensor) or (isinstance(value, Mapping) and _holds_tensors(value))
        for value in ctx.values()
    )


def _chain_of_samples(source_datapipe: Any) -> MapPipe | IterPipe:
    """Return the part of a chain that yields samples: the source of `deal`, or the whole chain if there is none."""
    pipe = source_datapipe
    if isinstance(pipe, IterDataPipe | MapDataPipe):
        deal = next((node for node in Chain.of(pipe).path() if node.traits.role == "deal"), None)
        pipe = pipe if deal is None else deal.upstream[0].pipe
    while isinstance(pipe, Shuffler):  # changes only the order
        (pipe,) = upstream_of(pipe)
    if not isinstance(pipe, MapPipe | IterPipe):
        raise ChainError(f"{type(pipe).__name__} is not a pipe of samples. Use pipes of kdpipes instead.")
    return pipe


def _path_of(chain: MapPipe | IterPipe) -> list[Any]:
    """Return the pipes of a chain in order, starting with its source, without the pipes that the source reads from."""
    path: list[Any] = [chain]
    while any(
        isinstance(pipe, MapPipe | IterPipe) for source in upstream_of(path[-1]) for pipe in Chain.of(source).pipes
    ):
        sources = upstream_of(path[-1])
        if len(sources) > 1:
            raise ChainError(
                f"{type(path[-1]).__name__} has several sources. Pass the key of a sample instead of a sample."
            )
        if not isinstance(sources[0], MapPipe | IterPipe):
            name = type(sources[0]).__name__
            raise ChainError(f"{name} cannot be applied to one sample. Pass the key of a sample instead of a sample.")
        path.append(sources[0])
    return path[::-1]


def _by_key(key: str, chain: MapPipe | IterPipe, sample_key: SampleKey) -> Any:
    if isinstance(chain, MapPipe):
        if sum(int(np.count_nonzero(source.column("key") == key)) for source in _sources_of(chain)) > 1:
            raise ChainError(
                f"Several samples of the chain's sources have the key {key!r}. Pass the raw sample instead of the key, "
                "or give the samples unique keys."
            )
        with using_key(sample_key):
            made = find_sample(key, chain)
            if made is None:
                keys = chain.column("key")
                raise DataError(f"The chain has no sample with key {key!r}.{closest(key, map(str, keys))}")
            return finished(chain, made)
    stream: Any = Chain.of(chain).copy_streams()  # the stream may be in use
    # Otherwise, stock pipes would draw from the global generators, which other threads may seed.
    seed_streams(reversed(Chain.of(stream)), sample_key.seed, sample_key.epoch)
    # The ordinals of lanes do not give the order of the stream, so a key that `to_samples` made must occur only once.
    has_names = why_whole(chain) is None and any(
        node.traits.role == "source" and node.upstream for node in Chain.of(chain)
    )
    with using_key(sample_key):
        found = None
        for number, sample in enumerate(stream.samples()):
            if sample.key == key:
                if has_names and found is not None:
                    if found.index == sample.index:
                        break
                    raise ChainError(
                        f"Samples {found.index} and {sample.index} of the stream have the key {key!r}. To repeat the "
                        "one of a batch, use `kdp.find`, or give the samples unique keys."
                    )
                found = sample
            if found is not None and number >= sample_key.position and not has_names:
                break
        if found is not None:
            return finished(stream, found)
    raise DataError(f"The stream has no sample with key {key!r}. `Sample.key` is the key of a sample.")


def _sources_of(chain: MapPipe) -> list[MapPipe]:
    """Return the indexed sources whose samples a chain passes on."""
    chained = Chain.of(chain)
    joined = [other for plan in chained.of_type(PlanPipe) for other in plan.other_sources()]
    ends = {id(chained.path_of(route)[-1].pipe): chained.path_of(route) for route in chained.routes()}
    paths = [path for path in ends.values() if not any(node.pipe is other for node in path for other in joined)]
    return [path[-1].pipe for path in paths if isinstance(path[-1].pipe, MapPipe)]


def find_sample(key: str, pipe: MapPipe) -> Sample | None:
    """Return the sample with a key that `pipe` yields in some epoch, or None."""
    places = np.flatnonzero(pipe.column("key") == key)
    if len(places):
        with planning(0):  # the column holds the keys of epoch 0
            return pipe.fetch(int(places[0]))
    if redrawing_name(pipe) is None:
        return None
    for number, source in enumerate(upstream_of(pipe)):  # other epochs may contain it
        if isinstance(source, MapPipe) and (sample := find_sample(key, source)) is not None:
            sample = sample.come_from(number) if len(upstream_of(pipe)) > 1 else sample
            return pipe.apply_to(sample) if isinstance(pipe, SampleMapper) else sample
    return None
