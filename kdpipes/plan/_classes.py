"""Check class names and numbers, and convert them to labels, for plan pipes that take classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdpipes.core.arithmetic import UNLABELLED
from kdpipes.core.errors import DataError, closest, must_be
from kdpipes.core.labels import label_of, no_class
from kdpipes.core.sample import Sample


def check_classes(param: str, classes: Any) -> tuple[int | str, ...]:
    """Return class numbers or names as a tuple, with -1 for None (unlabeled samples); raise TypeError otherwise."""
    is_one = isinstance(classes, str) or not hasattr(classes, "__iter__")
    given = [UNLABELLED if entry is None else plain(entry) for entry in ([classes] if is_one else classes)]
    if classes is None or not all(isinstance(entry, int | str) and not isinstance(entry, bool) for entry in given):
        raise TypeError(must_be(param, "class numbers or class names", classes))
    return tuple(given)


def plain(value: Any) -> Any:
    """Return an argument as a plain number or name, even if it is a NumPy scalar or a tensor."""
    return value.item() if hasattr(value, "item") else value


def class_in(sample: Sample, name: str) -> int | str:
    """Return the class of a sample of a stream for the plan pipe `name`, -1 if it is unlabeled."""
    label = label_of(sample["y"])
    if not isinstance(label, int | str):
        raise DataError(no_class(name, sample, sample["y"]))
    return label


def shown(label: Any, names: Sequence[str] | None) -> str:
    """Return a class as shown in errors: by name, if the source has class names."""
    is_named = names is not None and isinstance(label, int) and 0 <= label < len(names)
    return repr(names[label] if names is not None and is_named else label)


def to_labels(
    param: str, classes: Sequence[int | str], names: Sequence[str] | None, *, are_names: bool, present: Any = None
) -> list[int | str]:
    """Return classes in the form of field `y`: numbers, or names if the labels are names.

    Args:
        param: The name of the argument, for errors.
        classes: Class numbers or names.
        names: The names of the classes 0, 1, ...; None if the source has no class names.
        are_names: Whether the labels are names.
        present: All labels, if known. A name that is missing among them is an error.
    """
    known = sorted(filter(None, map(str, present or ())))
    labels: list[int | str] = []
    for entry in classes:
        if are_names and entry == UNLABELLED:
            labels.append("")
        elif are_names:
            labels.append(_known(param, str(entry), known) if known else str(entry))
        elif isinstance(entry, str):
            if names is None:
                hint = (
                    "The source does not know class names. Pass it `class_names=[...]`, or implement `class_names()`."
                )
                raise ValueError(must_be(param, "class numbers", entry, hint))
            labels.append(names.index(_known(param, entry, names)))
        elif names is not None and not 0 <= entry < len(names) and entry != UNLABELLED:
            raise ValueError(must_be(param, f"class numbers below {len(names)}, or names of {', '.join(names)}", entry))
        else:
            labels.append(entry)
    return labels


def _known(param: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise ValueError(must_be(param, f"among the classes {', '.join(names)}", name) + closest(name, names))
    return name
