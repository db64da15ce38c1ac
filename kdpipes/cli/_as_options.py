"""Options that stand for arguments of functions: read them, and name them in errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kdpipes.core.errors import must_be

__all__ = ["as_options", "field_options", "naming_options"]

_NAMES = {
    "encode": "--encode",
    "extensions": "--extension",
    "max_samples": "--max-samples",
    "max_bytes": "--max-bytes",
    "num_workers": "--num-workers",
    "path": "--quarantine",
    "seed": "--shuffle",
}
_OF_FIELDS = re.compile(r"`(encode|extensions)=\{(['\"])(.+?)\2: (?:'(\w+)'|\.\.\.)\}`")
_NAMED = re.compile(rf"`({'|'.join(_NAMES)})=?`")
_LEAVING_OUT = re.compile(r"""`\.decode_images\('\w+'\)\.on_error\("skip"\)`""")
_VALUES = {"encode": "FORMAT", "extensions": "EXT"}


def field_options(
    option: str, value: str, given: Sequence[str], check: Callable[[str, str], None]
) -> dict[str, str] | None:
    """Return the values of an option that is given as FIELD=VALUE, once for each field, by field.

    Args:
        option: "--encode".
        value: The name of its value in the help.
        given: The words.
        check: Called with a name for errors and the value; raises for a wrong one.

    Raises:
        ValueError: A word is not FIELD=VALUE, a field is named twice, or a value is wrong.
    """
    found: dict[str, str] = {}
    for word in given:
        field, equals, text = word.partition("=")
        if not field or not equals:
            raise ValueError(must_be(option, f"FIELD={value}", word))
        if field in found:
            raise ValueError(must_be(option, "given once for each field", word))
        check(f"{option} {field}=", text)
        found[field] = text
    return found or None


@contextmanager
def naming_options(*, is_folder: bool) -> Iterator[None]:
    """Make errors name the options of the command line instead of the arguments.

    Args:
        is_folder: Whether the samples are those of a folder, so that the user has not written a chain.
    """
    try:
        yield
    except Exception as error:
        texts = (as_options(each, is_folder=is_folder) if isinstance(each, str) else each for each in error.args)
        error.args = tuple(texts)
        raise


def as_options(text: str, *, is_folder: bool = True) -> str:
    """Return an error's text with arguments written as options.

    >>> as_options("Name it: `extensions={'x': 'npz'}`; `max_bytes` is 3.")
    'Name it: `--extension x=npz`; `--max-bytes` is 3.'
    """
    text = _LEAVING_OUT.sub("`--on-error skip`", text) if is_folder else text
    text = text.replace(" takes a function that returns bytes", "").replace(", or a function that returns bytes", "")
    return _NAMED.sub(lambda found: f"`{_NAMES[found[1]]}`", _OF_FIELDS.sub(_as_option, text))


def _as_option(found: re.Match[str]) -> str:
    return f"`{_NAMES[found[1]]} {found[3]}={found[4] or _VALUES[found[1]]}`"
