"""The work on samples: randomness that nobody can repeat, and decoders that are slower than they need be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Shuffler

from kdpipes._giving_up import given_up_by
from kdpipes._graph import copy_streams, walk
from kdpipes._map_pipe import MapPipe
from kdpipes._pipe_name import pipe_name
from kdpipes.look.doctor.chain_facts import callables_of, dealer_in, draws, operation_of, readable, readable_field
from kdpipes.look.doctor.finding import Facts, Finding
from kdpipes.work.joint import fields_of
from kdpipes.work.transform import Transformer

__all__ = ["decoders_of", "drawn_apart", "held_generators", "is_same", "slow_decoder", "unrepeatable"]

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_FEW = 64  # samples of which one can be read
_JPEG = b"\xff\xd8\xff"


def held_generators(chain: Any, facts: Facts) -> Iterator[Finding]:
    """Callables that draw from a generator of their own."""
    for pipe in walk(chain):
        for name, function in callables_of(pipe):
            if any(isinstance(value, _GENERATORS) for value in _held(function)):
                yield Finding(
                    "unrecorded-randomness",
                    "warning",
                    pipe_name(pipe),
                    f"`{name}` holds a random generator of its own.",
                    "Each worker has a copy of it: they draw the same numbers, in an order that depends on their "
                    "number, and nothing records them.",
                    "Take a parameter `rng`, which is the sample's own generator: `def f(x, rng)`.",
                )


def drawn_apart(chain: Any, facts: Facts) -> Iterator[Finding]:
    """The same random transform applied to an image and, separately, to its mask, boxes or points."""
    fields_by_name: dict[str, list[str]] = {}
    for pipe in reversed(walk(chain)):
        operation, name = operation_of(pipe), draws(pipe)
        if isinstance(operation, Transformer) and name is not None:
            fields_by_name.setdefault(name, []).append(operation.field)
    for name, fields in fields_by_name.items():
        follows = [field for field in fields if not {"image", "other"} & set(fields_of((field,), None).kinds)]
        others = [field for field in fields if field not in follows]
        if follows and others:
            yield Finding(
                "drawn-apart",
                "warning",
                "transform",
                f"`{name}` is applied separately to field {others[0]!r} and to field {follows[0]!r}.",
                "Each transform draws for itself, so the fields no longer fit each other.",
                f'Transform them together: `.transform("{others[0]} {follows[0]}", ...)` draws once.',
            )


def _held(function: Any) -> Iterator[Any]:
    """Yield what a function finds in its closure, defaults and globals, or an object in its attributes."""
    code = getattr(function, "__code__", None)
    if code is None:
        yield from getattr(function, "__dict__", {}).values()
        return
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield from getattr(owner, "__dict__", {}).values()
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is not bound yet
            continue
    yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def unrepeatable(chain: Any, facts: Facts, batches: tuple[Any, Any]) -> Iterator[Finding]:
    """A batch that comes out differently the second time."""
    dealer = dealer_in(chain)
    behind = [pipe for pipe in walk(chain) if dealer is not None and dealer in walk(pipe)[1:]]
    if dealer is None or any(isinstance(pipe, Shuffler) for pipe in behind) or is_same(*batches):
        return
    yield Finding(
        "unrecorded-randomness",
        "warning",
        _suspect(chain),
        "The same batch of the same epoch was made twice, and came out differently.",
        "Something draws random numbers that neither `deal(seed=...)` decides nor a ctx records: no run can be "
        "repeated, and no resumed one goes on alike.",
        "Give the callable a parameter `rng`. Generators that it creates itself are not seeded, nor are functions of "
        "stock pipes, except `.map()` of kdpipes' own pipes.",
    )


def _suspect(chain: Any) -> str:
    names = [pipe_name(pipe) for pipe in walk(chain)]
    return next((name for name in names if name in ("map", "transform", "add_field")), names[0])


def is_same(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same; what cannot be compared counts as the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other) or torch.isnan(one).any())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, str | bytes | int | float | bool):
        return one == other or one != one
    return True


def slow_decoder(chain: Any, facts: Facts) -> Iterator[Finding]:
    """JPEGs that Pillow decodes, where something faster gives the same pixels."""
    for pipe in walk(chain):
        backend = getattr(operation_of(pipe), "_backend", None)
        if pipe_name(pipe) != "decode_images" or (backend != "pillow" and facts.fast_decoders):
            continue
        if not _is_jpeg(pipe):
            continue
        what = '`decode_images(backend="pillow")` is asked for.' if backend == "pillow" else "No fast decoder is there."
        way_out = "`pip install 'kdpipes[fast]'`: of a crop it decodes just the region."
        yield Finding(
            "slow-decoder",
            "hint",
            "decode_images",
            what,
            "Pillow takes longer for the same pixels of a JPEG.",
            'Leave `backend="auto"`.' if backend == "pillow" and facts.fast_decoders else way_out,
        )


def decoders_of(chain: Any) -> tuple[str, ...]:
    """Return what decodes the JPEGs of a chain, each once."""
    told = [operation_of(pipe).decoded_by() for pipe in walk(chain) if pipe_name(pipe) == "decode_images"]
    return tuple(dict.fromkeys(" ".join(filter(None, names)) for names in told))


def _is_jpeg(pipe: Any) -> bool:
    """Return whether the first sample that can be read is a JPEG."""
    content = next(_contents(pipe._source, operation_of(pipe)._field), b"")
    content = getattr(content, "content", content)
    return isinstance(content, bytes | bytearray | memoryview) and bytes(content[:3]) == _JPEG


def _contents(source: Any, field: str) -> Iterator[Any]:
    """Yield a field of samples as the source has it."""
    if isinstance(source, MapPipe):
        yield from readable(source, range(min(len(source), _FEW)), field)
        return
    copied: Any = copy_streams(source) if isinstance(source, IterDataPipe) else source
    samples = copied.samples() if hasattr(copied, "samples") else iter(())
    for sample in given_up_by(_are_passed_over, islice(samples, _FEW)):
        yield from readable_field(partial(_itself, sample), field)


def _itself(sample: Any) -> Any:
    return sample


def _are_passed_over(key: str, index: int, error: Exception) -> bool:
    """Say that shards that cannot be read are no matter here: the chain gives a batch all the same."""
    return True
