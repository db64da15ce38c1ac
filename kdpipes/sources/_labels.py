"""Convert text labels to class numbers, and find the class names of a dataset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import UNLABELLED
from kdpipes.core.errors import DataError, closest
from kdpipes.core.map_pipe import as_column
from kdpipes.core.sample import Lazy, Sample


@runtime_checkable
class _Labelled(Protocol):
    """A feature of a Hugging Face dataset with class names."""

    names: Any


Names = tuple[str, ...] | None


def as_classes(labels: NDArray[Any], names: Names) -> tuple[NDArray[Any], Names]:
    """Return text labels as numbers, and the names of the classes 0, 1, ...; other labels are returned unchanged.

    Without `names`, the classes are the sorted labels, as in an image folder, but texts of integers become these
    integers. None and NaN, which mark samples without a label, become -1.

    Raises:
        ValueError: A label is not among `names`, or a number has no name.
    """
    if names is not None and labels.dtype.kind in "iu" and len(labels) and labels.max() >= len(names):
        raise ValueError(f"`labels` has {int(labels.max())}, but `class_names` names {len(names)} classes.")
    if labels.dtype.kind not in "UO":  # numbers
        return labels, names
    given = [None if isinstance(label, float) and math.isnan(label) else label for label in labels.tolist()]
    present = {label for label in given if isinstance(label, str)}
    if not present or not all(label is None or isinstance(label, str) for label in given):
        return labels, names
    if names is None and all(text.isascii() and text.removeprefix("-").isdigit() for text in present):
        return as_column([UNLABELLED if label is None else int(label) for label in given]), None
    names = tuple(sorted(present)) if names is None else names
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    strange = next((label for label in given if label is not None and label not in numbers), None)
    if strange is not None:
        raise ValueError(f"`labels` has {_not_among(strange, names)}")
    numbers[None] = UNLABELLED
    return np.fromiter((numbers[label] for label in given), dtype=np.int64, count=len(given)), names


def _not_among(label: str, names: Sequence[str]) -> str:
    return f"{label!r}, which is not among the classes {', '.join(names)}.{closest(label, names)}"


def numbered(label: Lazy, names: Sequence[str]) -> Lazy:
    """Return a label that is converted from text to a class number when it is read."""

    def number(sample: Sample, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in names:
            raise DataError(f"Sample {sample.key!r} has class {_not_among(value, names)}")
        return names.index(value)

    return Lazy(number, label, what="reading the label", is_cheap=label.is_cheap)


def class_names_in(dataset: Any, fields: Sequence[str]) -> Names:
    """Return the names of a dataset's classes, or None if the dataset does not have them.

    These are its `classes` (torchvision) or `class_names` (KappaData), or the names of the only `ClassLabel` among
    `fields` (Hugging Face).
    """
    for attribute in ("classes", "class_names"):
        try:
            names = getattr(dataset, attribute, None)
            names = names() if callable(names) else names
        except (NotImplementedError, TypeError):
            continue
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping):
        return None
    labeled = (feature for field in fields if isinstance(feature := features.get(field), _Labelled))
    found = [feature.names for feature in labeled if feature.names is not None]
    return tuple(found[0]) if len(found) == 1 else None
