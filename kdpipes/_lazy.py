"""The value of a field, which is computed when it is first read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from kdpipes import _record
from kdpipes.errors import add_note

if TYPE_CHECKING:
    from kdpipes.sample import Sample

__all__ = ["UNLOADED", "Lazy", "Loaded"]

UNLOADED: Any = type("_Unloaded", (), {"__repr__": lambda self: "<not loaded>"})()


class Lazy:
    """The value of a field that is computed when it is first read, once.

    Args:
        load: Called as `load(sample, *values)` with the values of `inputs`.
        inputs: The values that this one is computed from.
        what: What goes on here, for the note on an error: "reading field 'x'".
        scope: The fields that `load` finds in the sample, where these are not the sample's own.
        is_cheap: Whether loading costs next to nothing, so that no cache is to keep the value.
    """

    __slots__ = ("_inputs", "_load", "_scope", "_value", "_what", "is_cheap")

    def __init__(
        self,
        load: Callable[..., Any],
        *inputs: Lazy,
        what: str,
        scope: Mapping[str, Lazy] | None = None,
        is_cheap: bool = False,
    ) -> None:
        self.is_cheap = is_cheap
        self._load = load
        self._inputs = inputs
        self._what = what
        self._scope = scope
        self._value = UNLOADED

    @staticmethod
    def of(value: Any) -> Lazy:
        """Return a value that is there already."""
        return Loaded(value)

    @property
    def is_loaded(self) -> bool:
        """Whether reading the value costs nothing."""
        return self._value is not UNLOADED

    def get(self, sample: Sample) -> Any:
        """Return the value; an error gains a note that names the sample and the operation."""
        if self._value is UNLOADED:
            values = [value.get(sample) for value in self._inputs] if self._inputs else ()
            record = _record.current
            before = record.enter(sample, self._what) if record is not None else (None, "")
            try:
                self._value = self._load(sample if self._scope is None else sample.view(self._scope), *values)
            except BaseException as error:  # also SystemExit, which workers pass on to the main process
                add_note(error, f"kdpipes: while {self._doing(sample)} (ordinal {sample.ordinal})")
                raise
            finally:
                if record is not None:
                    record.leave(before)
            self._load, self._inputs, self._scope = UNLOADED, (), None
        return self._value

    def reaches(self, others: Collection[Lazy]) -> list[Lazy]:
        """Return which of some values this one is computed from, as far as it is not loaded yet; or is."""
        found, waiting, seen = list[Lazy](), [self], set[int]()
        while waiting:
            value = waiting.pop()
            if id(value) not in seen:
                seen.add(id(value))
                found += [value] if any(value is other for other in others) else []
                waiting += [*value._inputs, *(value._scope or {}).values()]
        return found

    def before(self, is_step: Callable[[str], bool]) -> Lazy | None:
        """Return the value that the steps at the end were applied to; None where it is no longer known.

        Args:
            is_step: Tells a step by what it does.
        """
        value = self
        while is_step(value._what):
            if value.is_loaded or not value._inputs:
                return None
            value = value._inputs[0]
        return value

    def wrap(self, wrapped: Callable[[Callable[..., Any], str], Callable[..., Any] | None]) -> None:
        """Put something around what computes the value, and the values that it is computed from.

        Args:
            wrapped: Called with what computes a value and what goes on then; returns what does so from now on. None
                leaves it, and what it is computed from, as it is.
        """
        if self._value is UNLOADED and (load := wrapped(self._load, self._what)) is not None:
            self._load = load
            for value in self._inputs:
                value.wrap(wrapped)

    def _doing(self, sample: Sample) -> str:
        return f"{self._what} of sample {sample.key!r}"

    def fork(self, forks: dict[Lazy, Lazy]) -> Lazy:
        """Return the same value for another delivery of the sample: what is not loaded yet is computed anew, once.

        Args:
            forks: The values that have been forked for that delivery so far; this one is added.
        """
        if self not in forks:
            forks[self] = Lazy.of(self._value) if self.is_loaded else self._unloaded_fork(forks)
        return forks[self]

    def _unloaded_fork(self, forks: dict[Lazy, Lazy]) -> Lazy:
        scope = None if self._scope is None else {name: value.fork(forks) for name, value in self._scope.items()}
        inputs = [value.fork(forks) for value in self._inputs]
        return Lazy(self._load, *inputs, what=self._what, scope=scope, is_cheap=self.is_cheap)


class Loaded(Lazy):
    """A value that is there already, which most of the fields are: made in a quarter of the time."""

    __slots__ = ()
    _load: Any = UNLOADED  # it hides a slot, and so do those that follow
    _inputs: Any = ()
    _scope: Any = None
    _what: Any = ""
    is_cheap: Any = False

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, sample: Sample) -> Any:
        return self._value
