"""Count the samples of each class."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdpipes.core import arithmetic
from kdpipes.core.column import as_column
from kdpipes.core.errors import must_be
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.labels import RANGES, are_classes, as_classes
from kdpipes.core.map_pipe import MapPipe


def class_counts(labels: Any) -> dict[Any, int]:
    """Return the number of samples of each class, in ascending order of the classes.

    Args:
        labels: An indexed pipe, of which only field `y` is read; or labels, `[num_samples]`. A missing label,
            such as None, counts as -1, unlabeled.

    Raises:
        TypeError: The labels are neither numbers nor names.

    Example:
        >>> kdp.class_counts(kdp.from_dataset(["a", "b", "c"], "x", labels=[2, 0, 2]))
        {0: 1, 2: 2}
    """
    column = labels.column("y") if isinstance(labels, MapPipe | IterPipe) else labels
    if isinstance(column, list | tuple | np.ndarray) and np.ndim(column) == 1:
        column = as_classes(as_column(column))
        if are_classes(column):
            counts = arithmetic.class_counts(column)
            return {arithmetic.UNLABELLED if label == "" else label: count for label, count in counts.items()}
        hint = RANGES.strip() if column.dtype.kind == "f" else ""
        raise TypeError(must_be("labels", "all class numbers or all names", column.tolist()[:5], hint))
    raise TypeError(must_be("labels", "an indexed pipe with labels `y`, or labels, numbers or names", labels))
