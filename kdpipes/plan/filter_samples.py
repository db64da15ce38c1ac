"""Keep samples by the values of any of their fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import smallest_int
from kdpipes.core.callback import Callback
from kdpipes.core.column import as_column
from kdpipes.core.entries import entry_of, field_of, value_of
from kdpipes.core.errors import is_sequence, must_be
from kdpipes.core.iter_pipe import samples_of
from kdpipes.core.map_pipe import MapPipe, has_column
from kdpipes.core.plan_pipe import PlanPipe, StreamPlanPipe
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.torch_pipes import IterDataPipe

Keep = Callable[..., Any]


class _Rule:
    """The arguments of `filter_samples`, and the mask computed from them."""

    def __init__(self, columns: str | Sequence[str], keep: Keep) -> None:
        names = [columns] if isinstance(columns, str) else columns
        is_list = is_sequence(names) and len(names) > 0
        if not is_list or not all(isinstance(name, str) and name for name in names):
            raise TypeError(must_be("columns", 'the name of a field, or a list of names like ["json.width"]', columns))
        self.columns = tuple(names)
        self.keep = Callback("keep", keep)

    def mask(self, values: list[NDArray[Any]], size: int) -> NDArray[np.bool_]:
        """Return a mask of the samples to keep, `[size] bool`. `values` holds an array `[size]` for each column."""
        try:
            mask = np.asarray(self.keep(*values))
        except ValueError as error:
            if "truth value" not in str(error):
                raise
            raise ValueError(
                f"`keep` must work on arrays `[{size}]`, because it gets whole columns. Write `&`, `|` and `~` instead "
                "of `and`, `or` and `not`, and `numpy.where` instead of `if`."
            ) from error
        if mask.dtype != bool or mask.shape != (size,):
            raise TypeError(
                f"`keep` must return one boolean for each sample, `[{size}] bool`, but returned {mask.dtype} of shape "
                f"{list(mask.shape)} instead. It gets one array for each of `columns`: `keep=lambda w, h: (w >= 256) & "
                "(h >= 256)`."
            )
        return mask


@functional_pipe("filter_samples", flavour="map")
class SampleFilterMapDataPipe(PlanPipe):
    """Keeps the samples whose fields satisfy a condition (functional name: ``filter_samples``).

    On an indexed source, `keep` is called once, with whole columns. Columns that the index of the source contains are
    free: labels, keys, and those that `kdp.index_shards(columns=...)` stores. Any other field is read once for all
    samples, with a progress bar (in bulk from remote shards), so do not filter by the field of an image. On a stream,
    `keep` is called for each sample as it passes, with arrays of one entry.

    Args:
        source_datapipe: A pipe of samples, indexed or a stream.
        columns: The name of a field, or a list of names. `"json.width"` is the entry `"width"` of the field `"json"`.
            `"key"` is the key of the sample, and `"x.width"` the width of an encoded image in field `x`; its header has
            height, channels, format and bytes, too.
        keep: A function that takes one NumPy array `[n]` for each column, and returns a mask of the samples to keep,
            `[n] bool`. It must depend only on its arguments.

    Length: the number of samples that are kept; unknown for a stream.

    Memory: four bytes for each sample that is kept, shared by all workers.

    Raises:
        FieldError: A sample has no such field. The error is raised when the plan is made, or when the sample of a
            stream passes.
        TypeError: `keep` does not return booleans.

    Example:
        >>> sizes = kdp.from_dataset([{"x": "a", "w": 300}, {"x": "b", "w": 20}, {"x": "c", "w": 256}], "x w")
        >>> sizes.filter_samples(columns="w", keep=lambda w: w >= 256).column("x")
        array(['a', 'c'], dtype='<U1')
    """

    def __init__(self, source_datapipe: MapPipe, *, columns: str | Sequence[str], keep: Keep) -> None:
        super().__init__(source_datapipe)
        self._rule = _Rule(columns, keep)

    def plan(self, epoch: int) -> NDArray[Any]:
        size = len(self.source)
        columns = _columns(self.source, self._rule.columns)
        return np.flatnonzero(self._rule.mask(columns, size)).astype(smallest_int(size))


@functional_pipe("filter_samples", flavour="iter", doc_of=SampleFilterMapDataPipe)
class SampleFilterIterDataPipe(StreamPlanPipe):
    def __init__(self, source_datapipe: IterDataPipe[Any], *, columns: str | Sequence[str], keep: Keep) -> None:
        super().__init__(source_datapipe)
        self._rule = _Rule(columns, keep)

    def samples(self) -> Iterator[Sample]:
        for sample in samples_of(self.source, "filter_samples"):
            values = [as_column([value_of(sample, name)]) for name in self._rule.columns]
            if self._rule.mask(values, 1)[0]:
                yield sample


def _columns(source: MapPipe, names: Sequence[str]) -> list[NDArray[Any]]:
    """Return fields, or entries of fields, of all samples. A field is read once, even for several of its entries."""
    fields = {name: field_of(name, source.field_names() or ()) for name in names if not has_column(source, name)}
    numbers = Counter(field for field in fields.values() if field is not None)
    read = {field: source.column(field).tolist() for field, number in numbers.items() if number > 1}

    def column(name: str) -> NDArray[Any]:
        field = fields.get(name)
        if field is None or field not in read:
            return source.column(name)
        return as_column([entry_of(value, name[len(field) + 1 :], name) for value in read[field]])

    return [column(name) for name in names]
