"""Fields get other names."""

from __future__ import annotations

from typing import Any

from kdpipes.core.errors import FieldError, must_be, refuse_field
from kdpipes.core.operation import Operation
from kdpipes.core.sample import Lazy, Sample
from kdpipes.core.sample_pipe import work_pipe
from kdpipes.core.traits import Traits

__all__ = ["FieldRenamer"]

_MANY = 1_000  # sets of names that are kept


@work_pipe("rename_fields")
class FieldRenamer(Operation):
    """Gives fields new names (functional name: ``rename_fields``).

    Loads nothing. Fields that are not named stay as they are.

    Args:
        renames: New name and old name, `x="jpg"`. Of several old names, `x="jpg;jpeg;png"`, the first that a sample has
            is taken, as webdataset does.

    Raises:
        FieldError: A sample has none of the old names, or has a field of the new name already. (One of a shard of which
            other samples have that member is an error of the data, when the field is read.)

    Example:
        >>> kdp.from_dataset([("a.jpg", 0)], "jpg cls").rename_fields(x="jpg;png", y="cls").select("x y")[0]
        ('a.jpg', 0)
    """

    def __init__(self, **renames: str) -> None:
        if not renames:
            raise ValueError('`rename_fields` must be given at least one name, like `x="jpg;png"`.')
        for new, old in renames.items():
            if not isinstance(old, str) or not old.split(";"):
                raise TypeError(must_be(new, 'the old name, or several of them, like "jpg;png"', old))
        self._renames = {new: [name.strip() for name in old.split(";")] for new, old in renames.items()}
        renamed = {new: tuple(names) for new, names in self._renames.items()}
        read = frozenset(name for names in renamed.values() for name in names)
        self.traits = Traits(reads=read, changes=frozenset(), renames=renamed)
        self._orders: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # by the names that samples came with

    def __call__(self, sample: Sample) -> Sample:
        return sample if sample.arrange(self._orders) else self._renamed(sample)

    def fingerprint(self) -> Any:
        return self._renames

    def _renamed(self, sample: Sample) -> Sample:
        known, is_whole = sample.names, not sample.lacking
        values, used = dict[str, Lazy](), set[str]()
        for new, names in self._renames.items():
            for old in names:
                if old in sample:
                    used.add(old)
                    values[new] = sample.lazy(old)
                    break
            else:
                missing = sample.missing(names)
                values[new] = missing or refuse_field(";".join(names), f"Sample {sample.key!r}", sample)
        for old in used:
            del sample[old]
        for new, value in values.items():
            if new in sample:
                raise FieldError(f"Sample {sample.key!r} has a field {new!r} already; it would be lost.")
            sample[new] = value
        if is_whole and len(self._orders) < _MANY:
            old_names = {new: next(old for old in names if old in known) for new, names in self._renames.items()}
            self._orders[known] = [(name, old_names.get(name, name)) for name in sample]
        return sample

    def check(self, known: frozenset[str]) -> None:
        renamed = {self._old_name(new, known, "The source") for new in self._renames}
        taken = next((new for new in self._renames if new in known - renamed), None)
        if taken is not None:
            raise FieldError(f"The source has a field {taken!r} already; it would be lost.")

    def _old_name(self, new: str, known: frozenset[str], owner: str) -> str:
        found = next((name for name in self._renames[new] if name in known), None)
        return found if found is not None else refuse_field(";".join(self._renames[new]), owner, known)
