"""What samples and batches hold that no training expects: text for labels, nothing, colours for class numbers."""

from __future__ import annotations

import io
import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from kdpipes.core.chain import Chain
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import form_of
from kdpipes.core.registry import pipe_name
from kdpipes.core.sample import Sample
from kdpipes.look.doctor.facts import Facts, Finding, contents, readable, samples_of, selected_from, selector_in
from kdpipes.storage.tar import DottedKeys
from kdpipes.work.decode import DecodedImage, ImageDecoder, orientation_of
from kdpipes.work.fields import FieldAdder
from kdpipes.work.joint import fields_of
from kdpipes.work.transform import Transformer

__all__ = ["equal_images", "merged_samples", "misread_images", "nothing_made", "text_labels", "unnamed_classes"]

_log = logging.getLogger("kdpipes")
_LABELS = {"y", "label", "labels", "target", "targets", "class", "classes"}
_MASK = re.compile("mask|segm|label_?map|annotation|trimap", re.IGNORECASE)
_NUM_PROBED = 16  # images whose headers are read
_LEAST = 4  # equal images that are no accident


class _Column(NamedTuple):
    """The values of one field in a batch."""

    field: str
    values: Sequence[Any]


def _columns(chain: Chain, batch: Any) -> list[_Column]:
    """Return the fields of a batch, where the chain still knows which part of it is which."""
    form, selector = form_of(chain.end.pipe), selector_in(chain)
    if form is None or selector is None:
        return []
    keys: Sequence[Any] = form.names if form.kind == "dict" else range(len(form.names))
    if isinstance(batch, list):  # of items
        parts = [item[0] if form.has_ctx else item for item in batch]
        columns: list[Any] = [parts] if form.kind == "bare" else [[part[key] for part in parts] for key in keys]
    else:
        parts = batch[0] if form.has_ctx else batch
        columns = [parts] if form.kind == "bare" else [parts[key] for key in keys]
    return [_Column(name, values) for name, values in zip(selector.names, columns, strict=True)]


def text_labels(chain: Chain, facts: Facts, batch: Any) -> Iterator[Finding]:
    """Labels that leave the chain as text: the same few words again and again, so no captions."""
    for field, values in _columns(chain, batch):
        if field not in _LABELS or not len(values) or not isinstance(values[0], str):
            continue
        labels = [label for label in contents(selected_from(chain), field) if isinstance(label, str)]
        if len(set(labels)) * 2 <= len(labels):
            names = sorted(set(labels))
            pairs = [f"{name!r}: {number}" for number, name in enumerate(names)]
            shown = ", ".join([*pairs[:3], *["..."] * (len(pairs) > 3)])
            yield Finding(
                "text-labels",
                "warning",
                "select",
                f"Field {field!r} holds text, like {names[0]!r}.",
                "A loss takes the numbers of classes.",
                "Name the classes where the source is made, `class_names=[...]`, which numbers text; or map it: "
                f"`.map_classes({{{shown}}}, class_names=[...])`.",
            )


def nothing_made(chain: Chain, facts: Facts, batch: Any) -> Iterator[Finding]:
    """A batch that is None, or a field of all its samples that a function makes; a source may well have no labels."""
    if batch is None or (isinstance(batch, list) and batch and all(item is None for item in batch)):
        yield _nothing("error", chain.end.name, f"`.{chain.end.name}()` gives None in place of batches.")
        return
    added = {adder.name for adder in chain.operations(FieldAdder)}
    for field, values in _columns(chain, batch):
        if field in added and isinstance(values, list) and all(value is None for value in values):
            yield _nothing("warning", "add_field", f"Field {field!r} is None in all samples of a batch.")


def _nothing(severity: Any, pipe: str, what: str) -> Finding:
    return Finding(
        "nothing-made", severity, pipe, what, "A function may lack its `return`.", "Return the new value in it."
    )


def equal_images(chain: Chain, facts: Facts, batch: Any) -> Iterator[Finding]:
    """Images of a batch that are all alike behind their transforms, though they differ before."""
    for field, values in _columns(chain, batch):
        mine = [
            node
            for node in reversed(chain)
            if isinstance(node.operation, Transformer) and field in node.operation.fields.names
        ]
        if not mine or fields_of((field,), None).kinds[0] != "image" or not _are_equal_images(values):
            continue
        before = [
            _bytes_of(value) for value in itertools.islice(contents(mine[-1].upstream[0].pipe, field), _NUM_PROBED)
        ]
        if len(set(before)) * 2 > len(before):
            yield Finding(
                "equal-images",
                "warning",
                "transform",
                f"All {len(values)} images of a batch, field {field!r}, are equal after the transforms, not before.",
                "A transform gives the same for every image.",
                "Look at what it returns: `kdp.show_batch(batch)`.",
            )


def _are_equal_images(values: Sequence[Any]) -> bool:
    if not isinstance(values, torch.Tensor | list) or len(values) < _LEAST:
        return False
    is_image = isinstance(values[0], torch.Tensor | np.ndarray | Image.Image | DecodedImage)
    return (
        is_image
        and np.ndim(values[0]) >= 2
        and all(np.array_equal(np.asarray(values[0]), np.asarray(value)) for value in values[1:])
    )


def _bytes_of(value: Any) -> bytes:
    return getattr(value, "content", None) or np.asarray(value).tobytes()


def misread_images(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """Images that `decode_images` cannot hold, whose class numbers become colours, or that lie on their side."""
    for node in reversed(chain):
        operation, modes, is_turned = node.operation, set(), False
        if not isinstance(operation, ImageDecoder):
            continue
        field, mode = operation.field, operation.mode
        for header in _headers(node.upstream[0].pipe, field):
            modes.add(header.mode)
            is_turned = is_turned or orientation_of(header) > 1
        wide = next((found for found in sorted(modes) if found == "F" or found.startswith("I")), None)
        if wide is not None and mode in ("RGB", "L"):
            kept = "F" if wide == "F" else "I;16" if wide.startswith("I;16") else "unchanged"
            yield _misread(
                "wide-pixels",
                "warning",
                f"Field {field!r} has images of mode {wide!r}, more than 8 bits.",
                f"`mode={mode!r}` cannot hold them: decoding one is an error, in the middle of an epoch.",
                f'`.decode_images("{field}", mode="{kept}")` keeps their values.',
            )
        if "P" in modes and mode in ("RGB", "L") and _MASK.search(field):
            yield _misread(
                "mask-as-colours",
                "warning",
                f"Field {field!r} has images with a palette, and is decoded as {mode!r}.",
                "The numbers of classes become the colours that they are shown in.",
                f'`.decode_images("{field}", mode="P")` keeps the numbers.',
            )
        if is_turned and not operation.exif:
            yield _misread(
                "turned-photos",
                "hint",
                f"Field {field!r} has photos that lie on their side or upside down, as their orientation tag says.",
                "They stay so, as in torchvision's datasets; viewers show them upright.",
                f'`.decode_images("{field}", exif=True)` turns them upright.',
            )


def _misread(code: str, severity: Any, what: str, why: str, way_out: str) -> Finding:
    return Finding(code, severity, "decode_images", what, why, way_out)


def _headers(source: Any, field: str) -> Iterator[Image.Image]:
    """Yield some of the images of a field, opened, but not decoded: of an indexed source from all over it."""
    values = itertools.islice(contents(source, field), _NUM_PROBED)
    if isinstance(source, MapPipe):
        positions = np.linspace(0, len(source) - 1, min(len(source), _NUM_PROBED)).astype(int).tolist()
        values = itertools.islice(readable(source, positions, field), _NUM_PROBED)
    for value in values:
        if isinstance(value, bytes | bytearray | memoryview):
            try:
                yield Image.open(io.BytesIO(value))
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # which the chain reports
                continue


def merged_samples(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """Samples of shards that became one, because their keys have dots."""
    for source in chain.pipes:
        if not isinstance(source, MapPipe | IterPipe) or _upstream(source) is not None:
            continue
        dotted = DottedKeys(warns=False)
        for sample in _read(source):
            if not any("." in name for name in sample.names):
                break
            dotted.see(sample.key, sample.names)
        dotted.end()
        if dotted.message is not None:
            what, _, rule = dotted.message.partition(" A key ends")
            yield Finding(
                "merged-samples",
                "warning",
                pipe_name(source),
                what,
                f"A key ends{rule.partition(':')[0]}.",
                "Write the shards with keys without dots, as `kdp.write_shards` does.",
            )


def _read(source: Any) -> Iterator[Sample]:
    for read in samples_of(source):
        try:
            yield read()
        except Exception as error:  # whatever a user's code raises; making a batch reports it
            _log.debug("A sample cannot be read: %s", error)


def _upstream(pipe: Any) -> Any:
    """Return the nearest of kdpipes' pipes upstream."""
    return next((other for other in Chain.of(pipe).pipes[1:] if isinstance(other, MapPipe | IterPipe)), None)


def unnamed_classes(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A `map_classes` to numbers without names for the new classes."""
    for pipe in chain.pipes:
        if pipe_name(pipe) != "map_classes" or pipe.class_names() is not None:
            continue
        if _upstream(pipe) is not None and _upstream(pipe).class_names() is not None:
            yield Finding(
                "unnamed-classes",
                "hint",
                "map_classes",
                "`.map_classes()` maps named classes to numbers.",
                "The new classes have no names: pictures show numbers, and filters take no names any more.",
                "Pass `class_names=[...]`, the names of the classes 0, 1, ...",
            )
