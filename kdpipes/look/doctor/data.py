"""Rules about samples and batches: text for labels, None, class numbers that become colors, merged samples."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from kdpipes.core.chain import Chain
from kdpipes.core.errors import DataError
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import logger
from kdpipes.core.pipe import form_of
from kdpipes.core.registry import pipe_name
from kdpipes.core.secrets import masked
from kdpipes.look.batch import columns_of
from kdpipes.look.doctor.rules import Facts, Wrong, contents, rule, samples_of, selector_in
from kdpipes.sources.open_shards import ShardReaderMapDataPipe
from kdpipes.storage.decoding import open_image
from kdpipes.storage.tar import DottedKeys
from kdpipes.work.decode import DecodedImage, ImageDecoder, orientation_of
from kdpipes.work.fields import FieldAdder, Selector
from kdpipes.work.joint import fields_of
from kdpipes.work.transform import Transformer

_log = logger("kdpipes")
_LABELS = {"y", "label", "labels", "target", "targets", "class", "classes"}
_MASK = re.compile("mask|segm|label_?map|annotation|trimap", re.IGNORECASE)
_NUM_PROBED = 16  # images whose headers are read
_LEAST = 4  # equal values that are not a coincidence


def _columns(chain: Chain, batch: Any) -> list[tuple[str, Sequence[Any]]]:
    """Return the names and values of the fields of a batch, if the chain still knows which part is which field."""
    form = form_of(chain.end.pipe)
    selector = selector_in(chain)
    if form is None or selector is None:
        return []
    values, _ = columns_of(batch, form)
    return [(field, values[name]) for field, name in zip(selector.names, form.names, strict=True) if name in values]


@rule("text-labels", "warning", runs_chain=True)
def text_labels(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """Labels leave the chain as text: the same few words again and again, so not captions."""
    for field, values in _columns(chain, facts.batch):
        if field not in _LABELS or not len(values) or not isinstance(values[0], str):
            continue
        source = next(node.upstream[0].pipe for node in reversed(chain) if isinstance(node.operation, Selector))
        labels = [label for label in contents(source, field) if isinstance(label, str)]
        if len(set(labels)) * 2 <= len(labels):
            names = sorted(set(labels))
            pairs = [f"{name!r}: {number}" for number, name in enumerate(names)]
            shown = ", ".join([*pairs[:3], *["..."] * (len(pairs) > 3)])
            yield (
                "select",
                f"Field {field!r} holds text, like {names[0]!r}.",
                "A loss takes the numbers of classes.",
                "Name the classes where the source is made, `class_names=[...]`, which numbers text; or map it: "
                f"`.map_classes({{{shown}}}, class_names=[...])`.",
            )


_RETURN = ("A function may lack its `return`.", "Return the new value in it.")


@rule("nothing-made", "error", runs_chain=True)
def no_batches(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A function returns None instead of batches or items."""
    if _are_none(facts.batch if isinstance(facts.batch, list) else [facts.batch]):
        yield (chain.end.name, f"`.{chain.end.name}()` returns None instead of batches.", *_RETURN)


@rule("nothing-made", "warning", runs_chain=True)
def no_values(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A function returns None for a field of all samples of a batch; sources may lack labels."""
    added = {adder.name for adder in chain.operations(FieldAdder)}  # a transform that returns None is an error
    for field, values in _columns(chain, facts.batch):
        if field in added and isinstance(values, list) and _are_none(values):
            yield ("add_field", f"Field {field!r} is None in all samples of a batch.", *_RETURN)


def _are_none(values: list[Any]) -> bool:
    return bool(values) and all(value is None for value in values)


@rule("equal-images", "warning", runs_chain=True)
def equal_images(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """All images, or all arrays of a field, are equal after the transforms, but not before."""
    before: dict[str, Any] = {}  # by field: the pipe before its first transform
    for node in chain:
        for name in node.operation.fields.names if isinstance(node.operation, Transformer) else ():
            before.setdefault(name, node.upstream[0].pipe)
    for field, values in _columns(chain, facts.batch):
        is_part = fields_of((field,), None).kinds[0] != "image"  # small crops of masks may be empty
        if field not in before or is_part or not _are_equal(values):
            continue
        values_before = itertools.islice(contents(before[field], field), _NUM_PROBED)
        contents_before = [getattr(value, "content", None) or np.asarray(value).tobytes() for value in values_before]
        if len(set(contents_before)) * 2 > len(contents_before):
            yield (
                "transform",
                f"All {len(values)} values of field {field!r} in a batch are equal after the transforms, not before.",
                "A transform gives the same for every sample.",
                "Look at what it returns: `kdp.show_batch(batch)`.",
            )


def _are_equal(values: Sequence[Any]) -> bool:
    """Return whether these are at least four images or arrays, all equal. Single numbers may be equal by chance."""
    if not isinstance(values, torch.Tensor | list) or len(values) < _LEAST:
        return False
    if not isinstance(values[0], torch.Tensor | np.ndarray | Image.Image | DecodedImage):
        return False
    arrays = [np.asarray(value) for value in values]
    return arrays[0].ndim > 0 and all(np.array_equal(arrays[0], other) for other in arrays[1:])


@rule("wide-pixels", "warning", runs_chain=True)
def wide_pixels(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """`decode_images` cannot hold images of more than 8 bits."""
    for decoder, modes, _ in _decoded(chain, facts):
        wide = next((found for found in sorted(modes) if found == "F" or found.startswith("I")), None)
        if wide is not None and decoder.mode in ("RGB", "L"):
            kept = "F" if wide == "F" else "I;16" if wide.startswith("I;16") else "unchanged"
            yield (
                "decode_images",
                f"Field {decoder.field!r} has images of mode {wide!r}, more than 8 bits.",
                f"`mode={decoder.mode!r}` cannot hold them: decoding one is an error, in the middle of an epoch.",
                f'`.decode_images("{decoder.field}", mode="{kept}")` keeps their values.',
            )


@rule("mask-as-colors", "warning", runs_chain=True)
def mask_as_colours(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """The class numbers of a mask with a palette become colors."""
    for decoder, modes, _ in _decoded(chain, facts):
        if "P" in modes and decoder.mode in ("RGB", "L") and _MASK.search(decoder.field):
            yield (
                "decode_images",
                f"Field {decoder.field!r} has images with a palette, and is decoded as {decoder.mode!r}.",
                "The numbers of classes become the colors that they are shown in.",
                f'`.decode_images("{decoder.field}", mode="P")` keeps the numbers.',
            )


@rule("turned-photos", "hint", runs_chain=True)
def turned_photos(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """The orientation tags of photos are not followed."""
    for decoder, _, is_turned in _decoded(chain, facts):
        if is_turned and not decoder.exif:
            yield (
                "decode_images",
                f"Field {decoder.field!r} has photos that lie on their side or upside down, by their orientation tag.",
                "They stay so, as in torchvision's datasets; viewers show them upright.",
                f'`.decode_images("{decoder.field}", exif=True)` turns them upright.',
            )


def _decoded(chain: Chain, facts: Facts) -> Iterator[tuple[ImageDecoder, set[str], bool]]:
    """Yield each decoder with the modes of some of its images, which are read once, and whether one is turned."""
    for node in reversed(chain):
        if isinstance(node.operation, ImageDecoder):
            if node.place not in facts.probed:
                headers = list(_headers(node.upstream[0].pipe, node.operation.field))
                is_turned = any(orientation_of(header) > 1 for header in headers)
                facts.probed[node.place] = {header.mode for header in headers}, is_turned
            yield node.operation, *facts.probed[node.place]


def _headers(source: Any, field: str) -> Iterator[Image.Image]:
    """Yield some of the images of a field, opened, but not decoded: of an indexed source from all over it."""
    positions = None
    if isinstance(source, MapPipe):
        positions = np.linspace(0, len(source) - 1, min(len(source), _NUM_PROBED)).astype(int).tolist()
    for value in itertools.islice(contents(source, field, positions), _NUM_PROBED):
        if isinstance(value, bytes | bytearray | memoryview):
            try:
                yield open_image(value)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # which the chain reports
                continue


@rule("merged-samples", "warning", runs_chain=True)
def merged_samples(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """Samples of shards became one, because their keys have dots."""
    for source in chain.pipes:
        if not isinstance(source, MapPipe | IterPipe) or _upstream(source) is not None:
            continue
        dotted = DottedKeys(warns=False)
        for sample in samples_of(source):
            if not any("." in name for name in sample):
                break
            dotted.see(sample.key, tuple(sample))
        dotted.end()
        if dotted.message is not None:
            what, _, explanation = dotted.message.partition(" A key ends")
            yield (
                pipe_name(source),
                what,
                f"A key ends{explanation.partition(':')[0]}.",
                "Write the shards with keys without dots, as `kdp.write_shards` does.",
            )


def _upstream(pipe: Any) -> Any:
    """Return the nearest of kdpipes' pipes upstream."""
    return next((other for other in Chain.of(pipe).pipes[1:] if isinstance(other, MapPipe | IterPipe)), None)


@rule("unindexed-shards", "hint")
def unindexed_shards(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """Remote shards without an index are read once to make it, and again for their samples."""
    for source in chain.of_type(ShardReaderMapDataPipe):
        try:
            urls = source.read_twice()
        except (DataError, OSError) as error:  # making a batch reports it
            _log.debug("The indexes of shards cannot be looked for: %s", error)
            continue
        if urls:
            yield (
                pipe_name(source),
                f"The remote shard {masked(urls[0])!r} has no index.",
                "To open the chain reads all bytes of such shards, and to read their samples does so again.",
                'Run `kdpipes index` on them once; or pass `fetch="shards"`, which copies them first.',
            )


@rule("unnamed-classes", "hint")
def unnamed_classes(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A `map_classes` to numbers leaves the new classes without names."""
    for pipe in chain.pipes:
        if pipe_name(pipe) != "map_classes" or pipe.class_names() is not None:
            continue
        if _upstream(pipe) is not None and _upstream(pipe).class_names() is not None:
            yield (
                "map_classes",
                "`.map_classes()` maps named classes to numbers.",
                "The new classes have no names: pictures show numbers, and filters take no names any more.",
                "Pass `class_names=[...]`, the names of the classes 0, 1, ...",
            )
