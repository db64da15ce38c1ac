"""What a chain gives: its length, its classes, and its first samples, made as in training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from kdpipes._giving_up import given_up_by
from kdpipes.core.chain import Chain
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.randomness import SampleKey, using_key, with_stream_keys
from kdpipes.core.registry import pipe_name
from kdpipes.delivery.dealer import Dealer
from kdpipes.delivery.skipping import LEFT_OUT, Skipper, unrecorded
from kdpipes.look.contents import ClassSeen, Contents, FieldSeen, SampleSeen, classes_seen
from kdpipes.plan.class_counts import class_counts
from kdpipes.sample import Sample
from kdpipes.work.on_error import OnError

__all__ = ["look_at_chain"]

_SHOWN = (bool, int, float, type(None))  # of which the value is told


def look_at_chain(pipe: Any, *, num_samples: int = 3, scan: bool = True) -> Contents:
    """Return what a chain gives, of which the first samples are made, as those of epoch 0 without `deal`.

    Samples that `on_error` leaves out are left out here as well, and put into no quarantine.

    Args:
        pipe: A chain, with or without `deal`.
        num_samples: How many of the first samples are made and listed.
        scan: Whether to count the classes of an indexed chain, if its samples have a `y`.
    """
    chain = Chain.of(pipe).pipes
    dealer = next((one for one in chain if isinstance(one, Dealer)), None)
    source = pipe if dealer is None else Chain.of(dealer).pipes[1]
    with unrecorded(source):
        samples = [_seen(sample) for sample in islice(_samples_of(source), num_samples)]
    return Contents(
        "chain",
        _length_of(source),
        None,
        _fields_of(samples),
        _classes_of(source) if scan and isinstance(source, MapPipe) else None,
        samples,
        pipes=[pipe_name(one) for one in reversed(chain)],
        num_batches=_length_of(pipe),
    )


def _samples_of(source: Any) -> Iterator[Sample]:
    """Yield samples as the chain makes them; none of a pipe that is not kdpipes' own."""
    skipper = Skipper(Chain.of(source).error_handler() or OnError(), {}, None)
    if isinstance(source, MapPipe):
        for place in range(len(source)):
            with using_key(sample_key := SampleKey(position=place)):
                sample = skipper.make(sample_key, 0, partial(source.fetch, place), _as_it_is)
            if sample is not LEFT_OUT:
                yield sample
    elif isinstance(source, IterPipe):
        samples = given_up_by(partial(skipper.give_up, 0, 0), with_stream_keys(source.samples(), 0, 0))
        for place, sample in enumerate(samples):
            sample.bind(sample_key := SampleKey(position=place))
            if skipper.make(sample_key, 0, partial(_as_it_is, sample), _as_it_is) is not LEFT_OUT:
                yield sample


def _as_it_is(sample: Sample) -> Sample:
    return sample


def _length_of(pipe: Any) -> int | None:
    try:
        return len(pipe)
    except TypeError:  # so says a pipe that does not know
        return None


def _classes_of(source: MapPipe) -> list[ClassSeen] | None:
    known = source.field_names()
    if not len(source) or "y" not in (source.fetch(0) if known is None else known):
        return None
    column = source.column("y")
    return classes_seen(class_counts(column), source.class_names()) if column.dtype.kind in "biuU" else None


def _seen(sample: Sample) -> SampleSeen:
    return SampleSeen(sample.key, {name: _described(sample[name]) for name in sorted(sample)})


def _described(value: Any) -> dict[str, Any]:
    """Return type and size of a value, and the value itself of numbers."""
    kind = type(value).__name__
    if isinstance(value, _SHOWN):
        is_for_json = not isinstance(value, float) or math.isfinite(value)
        return {"type": kind, "value": value if is_for_json else str(value)}
    if isinstance(value, bytes | memoryview | bytearray):
        return {"type": kind, "bytes": len(value)}
    if isinstance(value, str):
        return {"type": kind, "bytes": len(value.encode("utf-8", "surrogateescape"))}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"type": f"{kind} {dtype} {list(value.shape)}", "bytes": int(value.nbytes)}
    size = getattr(value, "size", None)  # of an image: width and height
    shown = f"{kind} {size[0]} x {size[1]}" if isinstance(size, tuple) and len(size) == 2 else kind
    content = getattr(value, "content", None)
    return {"type": shown, **({"bytes": len(content)} if isinstance(content, bytes) else {})}


def _fields_of(samples: Sequence[SampleSeen]) -> list[FieldSeen]:
    names = sorted({name for sample in samples for name in sample.fields})
    return [_field_of(name, [sample.fields[name] for sample in samples if name in sample.fields]) for name in names]


def _field_of(name: str, seen: Sequence[dict[str, Any]]) -> FieldSeen:
    types = sorted({each["type"] for each in seen})
    kind = types[0] if len(types) == 1 else f"{types[0]}, and {len(types) - 1} others"
    if all("bytes" in each for each in seen):
        return FieldSeen.of(name, [each["bytes"] for each in seen], kind)
    return FieldSeen(name, len(seen), type=kind)
