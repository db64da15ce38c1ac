"""Rules about the work on samples: randomness that cannot be repeated, and what workers cannot get or send cheaply."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from kdpipes.cache.cache import CacheIterDataPipe, CacheMapDataPipe
from kdpipes.core import pickling
from kdpipes.core.chain import Chain
from kdpipes.core.iter_pipe import Streaming
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import fields_of as fields_known
from kdpipes.core.registry import pipe_name
from kdpipes.core.sample import Sample
from kdpipes.core.shared import Shared, sharing
from kdpipes.core.torch_pipes import PIPES, Shuffler
from kdpipes.core.user_code import is_kdpipes, is_own_generator, reached_from
from kdpipes.loader.profile import size_of
from kdpipes.look.doctor.rules import Facts, Wrong, callables_of, rule, selected_names, shrinks
from kdpipes.look.rendering import bytes_text
from kdpipes.work.adapters import unwrapped
from kdpipes.work.decode import DecodedImage, EncodedImage, ImageDecoder
from kdpipes.work.fields import FieldAdder
from kdpipes.work.joint import fields_of
from kdpipes.work.on_error import OnError
from kdpipes.work.transform import Transformer

_CALLING = ("map", "transform", "add_field")
_RANDOM = re.compile("rand|shuffle|choice|uniform|normal$")
_MOVING = re.compile(
    "random.*crop|flip|rotat|affine|perspective|elastic|shiftscale|transpose|ioucrop|zoomout|griddistort", re.IGNORECASE
)
_LARGE = 512 << 10  # bytes of a sample above which sending it takes a while
_ENOUGH = 16 << 20  # bytes of a pickle after which the rest is not tried
_PREFETCH, _BORROWED = 2, 2  # batches of each worker that take shared memory


@rule("unrecorded-randomness", "warning")
def held_generators(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A callable draws from a generator of its own."""
    for node in reversed(chain):
        for name, function in callables_of(node):
            if is_kdpipes(type(function)):  # an operation: what it holds is among the callables as well
                continue
            if any(is_own_generator(each.value) for each in reached_from(function, beyond=PIPES)):
                yield (
                    node.name,
                    f"`{name}` holds a random generator of its own.",
                    "Each worker has a copy of it: they draw the same numbers, in an order that depends on the number "
                    "of workers, and nothing records them.",
                    "Take a parameter `rng`, which is the sample's own generator: `def f(x, rng)`, or "
                    "`def __call__(self, sample, rng)` of an operation.",
                )


@rule("drawn-apart", "warning")
def drawn_apart(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """An image moves at random without its mask, boxes or points, or each of them with a draw of its own."""
    transforms = [(node, node.operation) for node in chain if isinstance(node.operation, Transformer)]
    kinds: dict[str, str] = {name: fields_of((name,), None).kinds[0] for name in selected_names(chain)}
    steps: dict[str, set[str]] = {}  # the random steps of each field
    for _, operation in transforms:
        kinds.update(zip(operation.fields.names, operation.fields.kinds, strict=True))
        for name in operation.fields.names:
            steps.setdefault(name, set()).update(step.name for step in operation.random_steps())
    added = [(node.pipe, node.operation.name) for node in chain if isinstance(node.operation, FieldAdder)]
    belonging = [name for name, kind in kinds.items() if kind not in ("image", "other")]
    for node, operation in transforms:
        if "image" not in operation.fields.kinds:
            continue
        image = operation.field
        known = fields_known(node.pipe)
        upstream = Chain.of(node.pipe)
        later = [name for pipe, name in added if pipe not in upstream]  # these fields are made of the moved image
        left_out = {*operation.fields.names, *later}
        apart = [name for name in belonging if name not in left_out and (not known or name in known)]
        for step in operation.random_steps():
            for name in apart:
                if step.name in steps.get(name, ()):
                    what = f"`{step.name}` is in two transforms, of field {image!r} and of field {name!r}."
                    why = "Each draws for itself, so that they no longer fit each other."
                elif _moves(step.function) and "ctx" not in selected_names(chain):
                    what = f"`{step.name}` moves the pixels of field {image!r} at random, and field {name!r} stays."
                    why = "They no longer fit each other."
                else:
                    continue
                yield (
                    "transform",
                    what,
                    why,
                    f'Transform them together: `.transform("{image} {name}", ...)` draws once.',
                )


def _moves(function: Any) -> bool:
    """Return whether a random transform moves pixels, going by its name and the names of those that it is made of."""
    transform = unwrapped(function)
    parts = getattr(transform, "transforms", None)
    if isinstance(parts, list | tuple | torch.nn.ModuleList):
        return any(map(_moves, parts))
    return bool(_MOVING.search(getattr(transform, "__name__", type(transform).__name__)))


@rule("unlimited-errors", "hint")
def tolerant(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """An `on_error` lets any number of samples fail."""
    handler = chain.error_handler()
    if isinstance(handler, OnError) and handler.max_share == 1 and handler.max_samples is None:
        yield (
            "on_error",
            "`.on_error(max_share=1)` lets any number of samples fail.",
            "A mistake in a transform looks like bad data: the run goes on with the few samples that are left.",
            "Set `max_share` to the share of bad samples that you expect, or `max_samples` to their number.",
        )


@rule("unhashed-globals", "warning")
def unhashed_globals(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """The key of a cache that other runs find leaves out values that functions upstream read."""
    for pipe in chain.of_type(CacheMapDataPipe, CacheIterDataPipe):
        if names := pipe.unhashed():
            yield (
                pipe_name(pipe),
                f"Functions before `.{pipe_name(pipe)}()` read values that cannot be hashed: {', '.join(names)}.",
                "When they change, the cache still gives what it has kept.",
                f"Pass `version=` to `.{pipe_name(pipe)}()`, and another one when they change.",
            )


@rule("empty-cache", "warning", runs_chain=True)
def empty_cache(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A cache holds nothing after a batch has passed it."""
    for pipe in chain.of_type(CacheMapDataPipe, CacheIterDataPipe):
        if not pipe.stats().entries:
            yield (
                pipe_name(pipe),
                f"`.{pipe_name(pipe)}()` holds nothing after a batch has passed it.",
                "It keeps fields that are loaded when they are read. Those of `from_dataset`, and what functions of "
                "`sample_pipe` read, are there already; and values that do not fit are left out.",
                "Load fields with `transform` or `add_field` before it, give it room (`max_bytes`), or remove it.",
            )


@rule("unrecorded-randomness", "warning", runs_chain=True)
def unrepeatable(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A batch differs the second time, or something draws unseeded numbers for it.

    Functions that kdpipes seeds leave the global generators as they were. One that seeds them itself leaves them in the
    same state each time.
    """
    dealer = chain.deal
    if dealer is None or any(dealer.pipe in Chain.of(pipe) for pipe in chain.of_type(Shuffler)):
        return
    what = "The same batch of the same epoch was made twice, and was not the same."
    if is_same(facts.batch, facts.batch_again):
        if is_same(*facts.generators):
            return
        what = "Something draws from the global generators of `random`, NumPy or torch, and nothing seeds them for it."
    yield (
        _suspect(chain),
        what,
        "Something draws random numbers that neither `deal(seed=...)` decides nor a ctx records: no run can be "
        "repeated, and no resumed one continues alike.",
        "Let the callable take a parameter `rng`. Generators that it makes for itself are not seeded, and neither are "
        "functions of stock pipes (`.filter()`, `.flatmap()`, ...) other than a `.map()` of kdpipes' own pipes: draw "
        "in a `.transform()`.",
    )


def _suspect(chain: Chain) -> str:
    """Return the name of a stock pipe whose function names random numbers, or else of a pipe that calls functions."""
    stock = []
    for node in reversed(chain):
        codes = [getattr(function, "__code__", None) for _, function in callables_of(node)]
        names = [name for code in codes if code is not None for name in code.co_names]
        if not isinstance(node.pipe, MapPipe | Streaming) and any(map(_RANDOM.search, names)):
            stock.append(node.name)
    calling = [node.name for node in reversed(chain) if node.name in _CALLING]
    return next(iter([*stock, *calling]), chain.end.name)


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


def decoders_of(chain: Chain) -> tuple[str, ...]:
    """Return what decodes the JPEGs of a chain, each once."""
    parts = [decoder.decoded_by() for decoder in chain.operations(ImageDecoder)]
    return tuple(dict.fromkeys(" ".join(filter(None, names)) for names in parts))


@rule("unpicklable", "warning")
def unpicklable(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """Spawned workers cannot get parts of the chain."""
    for node in reversed(chain):
        operation = node.operation
        for name, value in {**vars(node.pipe), **({} if operation is None else vars(operation))}.items():
            if isinstance(value, PIPES) or value is operation:
                continue
            value = value.value if isinstance(value, Shared) else value
            if (error := _pickling_error(value)) is not None:
                yield (
                    node.name,
                    f"`{name.lstrip('_')}` of `{node.name}` cannot be pickled ({error}).",
                    "Forked workers inherit it, open handles and locks included; spawned ones (macOS, CUDA in the main "
                    "process) cannot start.",
                    "Open it where it is first used, in the worker; or use `kdp.ThreadReadingService`.",
                )


class _Enough(Exception):
    """So much of a value has been pickled that the rest will do."""


class _Sink:
    """A file for a pickle that keeps nothing, and raises `_Enough`, so that large data are not pickled whole."""

    size = 0

    def write(self, content: Any) -> None:
        self.size += memoryview(content).nbytes
        if self.size > _ENOUGH:
            raise _Enough


def _pickling_error(value: Any) -> str | None:
    """Return why a value cannot be pickled; None if it can."""
    try:
        with sharing():
            pickling.Pickler(_Sink(), protocol=5).dump(value)
    except _Enough:
        return None
    except Exception as error:  # whatever a user's class raises
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


@rule("full-size-pixels", "warning", runs_chain=True)
def full_size_pixels(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """Decoded images leave the workers at their full size."""
    image = next((image for image in _images(facts.batch) if _bytes_of(image) >= _LARGE), None)
    if image is not None and chain.operations(ImageDecoder) and not shrinks(chain) and facts.num_workers:
        yield (
            chain.end.name,
            f"Images leave the workers at their full size, {bytes_text(_bytes_of(image))} each.",
            "Pixels are ten to twenty times as large as their JPEG, and each is copied on its way.",
            "Resize or crop in the workers: `.transform(field, kdp.RandomResizedCrop(224))`, which also decodes less.",
        )


@rule("float-pixels", "hint", runs_chain=True)
def float_pixels(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """Images leave the workers as floating-point numbers."""
    for image in _images(facts.batch) if facts.num_workers else ():
        is_array = isinstance(image, torch.Tensor | np.ndarray)
        if _bytes_of(image) < _LARGE or not is_array or "float" not in str(image.dtype):
            continue
        yield (
            chain.end.name,
            f"Images leave the workers as {str(image.dtype).removeprefix('torch.')}.",
            "That is four times the bytes of the uint8 that they were decoded to.",
            "Send uint8, and divide and normalize on the device: `x.to(device).float().div_(255)`.",
        )


def _bytes_of(image: Any) -> int:
    """Return the size of the pixels of one image."""
    size = getattr(image, "size", None)
    if isinstance(size, tuple) and not isinstance(image, torch.Tensor | np.ndarray):
        return int(size[0] * size[1] * 3)
    return size_of(image)


def _images(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield one image of each field of a batch that holds images."""
    if isinstance(value, Sample):  # to look into it would load its fields
        return
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim == 4 and len(value) and {value.shape[1], value.shape[3]} & {1, 3, 4}:
            yield value[0]
        elif value.ndim == 3 and {value.shape[0], value.shape[2]} & {1, 3, 4}:
            yield value
    elif isinstance(value, Mapping | list | tuple) and depth < 4:
        parts = list(value.values()) if isinstance(value, Mapping) else list(value)
        for part in parts[:8]:
            yield from _images(part, depth + 1)
    elif isinstance(value, Image.Image | EncodedImage | DecodedImage):
        yield value


@rule("small-shared-memory", "warning", runs_chain=True)
def small_shared_memory(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """The shared memory is smaller than the batches in transit need."""
    needed = facts.num_workers * (_PREFETCH + _BORROWED) * size_of(facts.batch)
    if facts.shm_free is not None and needed > facts.shm_free:
        yield (
            chain.end.name,
            f"The batches in transit need {bytes_text(needed)} of shared memory, of which "
            f"{bytes_text(facts.shm_free)} are free in /dev/shm.",
            "Batches that do not fit are sent in a slower way.",
            "Give the container more (`docker run --shm-size=2g`, `--ipc=host`), or use fewer workers.",
        )
