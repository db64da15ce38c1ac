"""The work on samples: randomness that nobody can repeat, and decoders that are slower than they need be."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data.datapipes.iter import Shuffler

from kdpipes.cache.cache import CacheIterDataPipe, CacheMapDataPipe
from kdpipes.core.chain import Chain, Node
from kdpipes.core.iter_pipe import Streaming
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import fields_of as fields_known
from kdpipes.core.registry import pipe_name
from kdpipes.look.doctor.facts import Facts, Finding, callables_of, contents, selected_names
from kdpipes.work.adapters import unwrapped
from kdpipes.work.decode import EncodedImage, ImageDecoder
from kdpipes.work.fields import FieldAdder
from kdpipes.work.joint import fields_of
from kdpipes.work.on_error import OnError
from kdpipes.work.transform import Transformer

__all__ = [
    "decoders_of",
    "drawn_apart",
    "global_generators",
    "held_generators",
    "is_same",
    "slow_decoder",
    "tolerant",
    "unhashed_globals",
    "unrepeatable",
]

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_CALLING = ("map", "transform", "add_field")
_RANDOM = re.compile("rand|shuffle|choice|uniform|normal$")
_MOVING = re.compile(
    "random.*crop|flip|rotat|affine|perspective|elastic|shiftscale|transpose|ioucrop|zoomout|griddistort", re.IGNORECASE
)
_JPEG = b"\xff\xd8\xff"


def held_generators(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """Callables that draw from a generator of their own."""
    for node in reversed(chain):
        for name, function in callables_of(node):
            if any(isinstance(value, _GENERATORS) for value in _held(function)):
                yield Finding(
                    "unrecorded-randomness",
                    "warning",
                    node.name,
                    f"`{name}` holds a random generator of its own.",
                    "Each worker has a copy of it: they draw the same numbers, in an order that depends on their "
                    "number, and nothing records them.",
                    "Take a parameter `rng`, which is the sample's own generator: `def f(x, rng)`.",
                )


def drawn_apart(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """An image that is moved at random without its mask, boxes or points, or each of them for itself."""
    transforms = [(node, node.operation) for node in chain if isinstance(node.operation, Transformer)]
    kinds: dict[str, str] = {name: fields_of((name,), None).kinds[0] for name in selected_names(chain)}
    steps: dict[str, set[str]] = {}  # what is drawn for each field
    for _, operation in transforms:
        kinds.update(zip(operation.fields.names, operation.fields.kinds, strict=True))
        for name in operation.fields.names:
            steps.setdefault(name, set()).update(step.name for step in operation.random_steps())
    added = [(node.pipe, node.operation.name) for node in chain if isinstance(node.operation, FieldAdder)]
    belonging = [name for name, kind in kinds.items() if kind in ("mask", "boxes", "points")]
    for node, operation in transforms:
        if "image" not in operation.fields.kinds:
            continue
        image, known, upstream = operation.field, fields_known(node.pipe), Chain.of(node.pipe)
        later = [name for pipe, name in added if pipe not in upstream]  # these fields are made of what was moved
        left_out = {*operation.fields.names, *later}
        apart = [name for name in belonging if name not in left_out and (not known or name in known)]
        for step in operation.random_steps():
            for name in apart:
                if step.name in steps.get(name, ()):
                    what = f"`{step.name}` stands in two transforms, of field {image!r} and of field {name!r}."
                    yield _apart(what, "Each draws for itself, so that they no longer fit each other.", image, name)
                elif _moves(step.function) and "ctx" not in selected_names(chain):
                    what = f"`{step.name}` moves the pixels of field {image!r} at random, and field {name!r} stays."
                    yield _apart(what, "They no longer fit each other.", image, name)


def _apart(what: str, why: str, image: str, name: str) -> Finding:
    way_out = f'Transform them together: `.transform("{image} {name}", ...)` draws once.'
    return Finding("drawn-apart", "warning", "transform", what, why, way_out)


def _moves(function: Any) -> bool:
    """Return whether a random transform moves pixels, going by its name and the names of those that it is made of."""
    transform = unwrapped(function)
    parts = getattr(transform, "transforms", None)
    if isinstance(parts, list | tuple | torch.nn.ModuleList):
        return any(map(_moves, parts))
    return bool(_MOVING.search(getattr(transform, "__name__", type(transform).__name__)))


def tolerant(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """An `on_error` that lets any number of samples fail."""
    handler = chain.error_handler()
    if isinstance(handler, OnError) and handler.max_share == 1 and handler.max_samples is None:
        yield Finding(
            "unlimited-errors",
            "hint",
            "on_error",
            "`.on_error(max_share=1)` lets any number of samples fail.",
            "A mistake in a transform looks like bad data: the run goes on with the few samples that are left.",
            "Set `max_share` to the share of bad samples that you expect, or `max_samples` to their number.",
        )


def unhashed_globals(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A cache that other runs find, whose key cannot follow everything that functions before it read."""
    for pipe in chain.of_type(CacheMapDataPipe, CacheIterDataPipe):
        names = pipe.unhashed()
        if names:
            yield Finding(
                "unhashed-globals",
                "warning",
                pipe_name(pipe),
                f"Functions before `.{pipe_name(pipe)}()` read values that cannot be hashed: {', '.join(names)}.",
                "When they change, the cache still gives what it has kept.",
                f"Pass `version=` to `.{pipe_name(pipe)}()`, and another one when they change.",
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


def unrepeatable(
    chain: Chain, facts: Facts, batches: tuple[Any, Any], generators: tuple[Any, Any]
) -> Iterator[Finding]:
    """A batch that comes out differently the second time, or for which something draws unseeded numbers.

    Functions that kdpipes seeds leave the global generators as they were. One that seeds them itself leaves them in the
    same state each time.
    """
    dealer = chain.deal
    if dealer is None or any(dealer.pipe in Chain.of(pipe) for pipe in chain.of_type(Shuffler)):
        return
    if is_same(*batches) and is_same(*generators):
        return
    what = "The same batch of the same epoch was made twice, and came out differently."
    if is_same(*batches):
        what = "Something draws from the global generators of `random`, NumPy or torch, and nothing seeds them for it."
    yield Finding(
        "unrecorded-randomness",
        "warning",
        _suspect(chain),
        what,
        "Something draws random numbers that neither `deal(seed=...)` decides nor a ctx records: no run can be "
        "repeated, and no resumed one goes on alike.",
        "Let the callable take a parameter `rng`. Generators that it makes for itself are not seeded, nor are "
        "functions of stock pipes (`.filter()`, `.flatmap()`, ...) other than a `.map()` of kdpipes' own pipes: draw "
        "in a `.transform()`.",
    )


def global_generators() -> tuple[Any, ...]:
    """Return the states of the global generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _suspect(chain: Chain) -> str:
    """Return the name of a stock pipe whose function names random numbers, or else of a pipe that calls functions."""
    names = [node.name for node in reversed(chain)]
    others = [node for node in reversed(chain) if not isinstance(node.pipe, MapPipe | Streaming)]
    stock = [node.name for node in others if _names_random(node)]
    return next((name for name in [*stock, *names] if name in _CALLING or stock), names[0])


def _names_random(node: Node) -> bool:
    codes = [getattr(function, "__code__", None) for _, function in callables_of(node)]
    return any(_RANDOM.search(name) for code in codes if code is not None for name in code.co_names)


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


def slow_decoder(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """JPEGs that Pillow decodes, where something faster gives the same pixels."""
    for node in reversed(chain):
        decoder = node.operation
        if not isinstance(decoder, ImageDecoder) or (decoder.backend != "pillow" and facts.fast_decoders):
            continue
        backend, content = decoder.backend, next(contents(node.upstream[0].pipe, decoder.field), b"")
        content = content.content if isinstance(content, EncodedImage) else content
        if not isinstance(content, bytes | bytearray | memoryview) or bytes(content[:3]) != _JPEG:
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


def decoders_of(chain: Chain) -> tuple[str, ...]:
    """Return what decodes the JPEGs of a chain, each once."""
    told = [decoder.decoded_by() for decoder in chain.operations(ImageDecoder)]
    return tuple(dict.fromkeys(" ".join(filter(None, names)) for names in told))
