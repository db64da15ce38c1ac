"""The sample: named fields that load when they are first read, a key, an ordinal and a ctx."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np

from kdpipes.core import activity
from kdpipes.core.errors import ChainError, MissingMemberError, add_note, refuse_field
from kdpipes.core.randomness import SampleKey, borrowed_generator, current_key, generator

__all__ = ["UNLOADED", "Lazy", "Loaded", "Sample", "as_sample"]

_DRAW, _EARLY = "draw", "early_draws"  # entries of the ctx
_NOTHING: tuple[frozenset[str], str] = frozenset(), ""


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
            record = activity.current
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


class _Origin:
    """What all views of one delivered sample share."""

    __slots__ = (
        "ctx",
        "drawn",
        "index",
        "is_recording",
        "key",
        "lacking",
        "names",
        "promises",
        "route",
        "sample_key",
        "version",
    )

    def __init__(
        self, key: str | Callable[[], str], index: int, sample_key: SampleKey, version: str | Callable[[], str] = ""
    ) -> None:
        self.version = version
        self.route: tuple[int, ...] = ()
        self.drawn: list[tuple[str, np.random.Generator | None]] | None = None
        self.key = key
        self.index = index
        self.sample_key = sample_key
        self.ctx: dict[str, Any] = {}
        self.is_recording = False
        self.names: dict[str, int] = {}
        self.promises: dict[str, Lazy] = {}
        self.lacking = _NOTHING


class Sample(MutableMapping[str, Any]):
    """A mutable mapping of named fields. A field is loaded when it is first read, once; `name in sample` loads nothing.

    Pickling and copying load all fields.

    Args:
        fields: The fields; a value of type `Lazy` is computed when it is read.
        key: Stable and unique in its source: a relative path, an ID, a shard and member; or what makes it when it is
            read first.
        index: The sample's position in its source.
        draw: The key that the sample's random numbers derive from; by default, the one that `deal` has set.
        version: What tells the sample's data from what they were before, for caches: size and date of its file, say; or
            what returns that.

    Example:
        >>> sample = Sample({"x": b"pixels", "y": 3}, key="heron/0001.jpg")
        >>> sample["y"], sample.key, list(sample)
        (3, 'heron/0001.jpg', ['x', 'y'])
    """

    __slots__ = ("_fields", "_origin")
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        key: str | Callable[[], str] = "",
        index: int = 0,
        draw: SampleKey | None = None,
        version: str | Callable[[], str] = "",
    ) -> None:
        self._origin = _Origin(key, index, draw or current_key() or SampleKey(position=index), version)
        self._fields = {name: value if isinstance(value, Lazy) else Loaded(value) for name, value in fields.items()}

    @property
    def key(self) -> str:
        """The sample's name, stable and unique in its source."""
        key = self._origin.key
        if not isinstance(key, str):
            key = self._origin.key = key()
        return key

    def required_key(self, needed_by: str) -> str:
        """Return the key.

        Args:
            needed_by: The pipe that needs the key, for the error.

        Raises:
            ChainError: The sample has no key. All samples without a key would look the same.
        """
        if not self.key:
            raise ChainError(
                f"`{needed_by}` identifies samples by their keys, but sample {self.index} has none. Pass a unique key, "
                "`kdp.Sample(fields, key=..., index=...)`, in the source."
            )
        return self.key

    @property
    def index(self) -> int:
        """The sample's position in its source."""
        return self._origin.index

    @property
    def version(self) -> str:
        """What tells the sample's data from what they were before; empty where the source does not know."""
        version = self._origin.version
        if not isinstance(version, str):
            version = self._origin.version = version()
        return version

    @property
    def route(self) -> tuple[int, ...]:
        """Which source each pipe took it from that has several, the first such pipe first."""
        return self._origin.route

    def come_from(self, number: int) -> Sample:
        """Note that a pipe of several sources has taken the sample from one of them."""
        self._origin.route = (*self._origin.route, number)
        return self

    @property
    def ordinal(self) -> int:
        """The sample's position in the dealt epoch."""
        return self._origin.sample_key.position

    @property
    def draw(self) -> SampleKey:
        """The key of the delivered sample, which all of its random numbers derive from."""
        return self._origin.sample_key

    @property
    def ctx(self) -> dict[str, Any]:
        """What the operations after `record_ctx` have recorded, by the operation's name."""
        return self._origin.ctx

    def __getitem__(self, name: str) -> Any:
        value = self._fields.get(name) or self.lazy(name)
        return value.get(self)

    def __setitem__(self, name: str, value: Any) -> None:
        self._fields[name] = value if isinstance(value, Lazy) else Loaded(value)

    def __delitem__(self, name: str) -> None:
        self.lazy(name)
        self._fields.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        shown = {name: self[name] if value.is_loaded else UNLOADED for name, value in self._fields.items()}
        fields = ", ".join(f"{name}={_short(value)}" for name, value in shown.items())
        return f"Sample({self.key!r}, {fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        origin = self._origin
        place = self.key, self.index, self.draw, self.version, origin.route
        return _restore, (dict(self), *place, self.ctx, origin.names, self.is_recording)

    def lazy(self, name: str) -> Lazy:
        """Return a field without loading it."""
        try:
            return self._fields[name]
        except KeyError:
            if (missing := self.missing([name])) is not None:
                return missing
            refuse_field(name, f"Sample {self.key!r}", self._fields)

    def naming(self) -> Callable[[], str]:
        """Return what names the sample for errors, should there be one, and does not keep the sample."""
        return partial(_named, self._origin.key)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(self._fields)

    def arrange(self, orders: Mapping[tuple[str, ...], Sequence[tuple[str, str]]]) -> bool:
        """Keep some of the fields, in an order, by other names; return False where there is no order for them.

        Args:
            orders: Each field as a pair of its new name and its old one, by the names of all fields.
        """
        fields = self._fields
        order = orders.get(tuple(fields))
        if order is None:
            return False
        self._fields = {new: fields[old] for new, old in order}
        return True

    def lack(self, names: Collection[str], place: str) -> None:
        """Say which fields of the source are missing in this sample alone: reading one is an error of the data.

        Args:
            names: Of the fields.
            place: Where the sample lies, for the error.
        """
        self._origin.lacking = frozenset(names), place

    @property
    def lacking(self) -> frozenset[str]:
        """The fields of the source that are missing in this sample alone."""
        return self._origin.lacking[0]

    def missing(self, names: Sequence[str]) -> Lazy | None:
        """Return a field that is an error when it is read, if this sample lacks a field that others have; else None.

        Args:
            names: Of the field; any of them would do.
        """
        lacking, place = self._origin.lacking
        if not any(name in lacking for name in names):
            return None
        there = ", ".join(map(repr, sorted(self._fields))) or "nothing"
        text = f"Sample {self.key!r} in {place} has no member {';'.join(names)!r}, as other samples have, but {there}."

        def refuse(_: Sample) -> NoReturn:
            raise MissingMemberError(text)

        return Lazy(refuse, what=f"reading field {';'.join(names)!r}")

    def key_of(self, operation: str) -> bytes:
        """Return what an operation's random numbers come from: the delivered sample and the operation's name alone."""
        early = (self.draw.replayed or {}).get(_EARLY, {}).get(operation)
        return (self.draw if early is None else SampleKey.from_entry(early, is_early=True)).key(operation)

    def rng(self, operation: str, *, is_borrowed: bool = False) -> np.random.Generator:
        """Return a generator that depends on the delivered sample and the operation's name alone.

        Args:
            operation: The name of the operation, unique for the sample.
            is_borrowed: Whether the operation is done with the generator before this thread asks for another one.
        """
        replayed = self.draw.replayed
        if replayed is not None and operation not in replayed.get(_EARLY, {}) and _DRAW not in replayed:
            return cast("np.random.Generator", _Unknown(operation))
        if self._origin.drawn is None:
            return (borrowed_generator if is_borrowed else generator)(self.key_of(operation))
        made = generator(self.key_of(operation))
        self._origin.drawn.append((operation, made))
        return made

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to know which operations draw random numbers."""
        return self._origin.drawn is not None or self.is_recording or self.draw.replayed is not None

    @contextmanager
    def watching_draws(self) -> Iterator[Callable[[], str | None]]:
        """Yield what returns the name of an operation that has drawn random numbers since, or None."""
        before, drawn = self._origin.drawn, list[tuple[str, np.random.Generator | None]]()
        self._origin.drawn = drawn
        try:
            yield lambda: next((name for name, rng in drawn if rng is None or self._has_moved(name, rng)), None)
        finally:
            self._origin.drawn = before

    def _has_moved(self, operation: str, rng: np.random.Generator) -> bool:
        return repr(rng.bit_generator.state) != repr(generator(self.key_of(operation)).bit_generator.state)

    def record_key(self, operation: str, *, is_recorded: bool) -> np.random.Generator:
        """Record the sample's key for an operation that records no parameters to replay; return its generator.

        The entry is `draw`, one for all operations, or `early_draws`, by operation, where a stream's sample is loaded
        before it is known at which position it will be delivered.

        Raises:
            ChainError: In a replay, if that is not known.
        """
        rng = self.rng(operation)
        if isinstance(rng, _Unknown):
            rng.refuse()
        if self._origin.drawn is not None:
            self._origin.drawn.append((operation, None))
        early = (self.draw.replayed or {}).get(_EARLY, {}).get(operation)
        if not is_recorded:
            return rng
        if not all(isinstance(self.ctx.get(name, {}), dict) for name in (_DRAW, _EARLY)):
            raise ChainError(f"The entries {_DRAW!r} and {_EARLY!r} of the ctx are kdpipes' own: use other names.")
        if early is not None or self.draw.is_early:
            self.ctx.setdefault(_EARLY, {})[operation] = early or self.draw.as_entry()
        else:
            self.ctx[_DRAW] = self.draw.as_entry()
        return rng

    @contextmanager
    def using_key(self, sample_key: SampleKey) -> Iterator[None]:
        """Let operations take their random numbers from `sample_key` in place of the sample's own."""
        before, self._origin.sample_key = self._origin.sample_key, sample_key
        try:
            yield
        finally:
            self._origin.sample_key = before

    def bind(self, sample_key: SampleKey) -> None:
        """Set the key of the delivered sample."""
        self._origin.sample_key = sample_key

    def scope(self) -> dict[str, Lazy]:
        """Return the fields that the sample has now, not loaded, whatever happens to it later."""
        return dict(self._fields)

    def view(self, scope: Mapping[str, Lazy]) -> Sample:
        """Return the same delivered sample with other fields: an earlier `scope`."""
        view = Sample.__new__(Sample)
        view._origin, view._fields = self._origin, dict(scope)
        return view

    def fork(self, *, key: str | None = None) -> Sample:
        """Return the sample for another delivery: its own key and ctx; what is not loaded yet is computed anew.

        Args:
            key: The new sample's key, if it is to have another.
        """
        fork = Sample.__new__(Sample)
        origin = self._origin
        fork._origin = _Origin(
            origin.key if key is None else key, self.index, current_key() or self.draw, origin.version
        )
        fork._origin.route = origin.route
        fork._origin.is_recording = self._origin.is_recording
        fork._origin.names = dict(self._origin.names)
        fork._origin.lacking = self._origin.lacking
        fork._origin.ctx.update({k: dict(v) if isinstance(v, dict) else v for k, v in self.ctx.items()})
        forks: dict[Lazy, Lazy] = {}
        fork._fields = {name: value.fork(forks) for name, value in self._fields.items()}
        fork._origin.promises = {name: value.fork(forks) for name, value in self._origin.promises.items()}
        return fork

    def record(self) -> None:
        """Record in `ctx` what the operations that follow report."""
        self._origin.is_recording = True

    @property
    def is_recording(self) -> bool:
        """Whether `record_ctx` stands upstream."""
        return self._origin.is_recording

    @property
    def is_raw(self) -> bool:
        """Whether no operation has been done, as far as operations leave a trace."""
        return not self._origin.names and not self._origin.is_recording

    def claim_name(self, operation: str) -> str:
        """Return a name for an operation that no other operation of this sample has: "crop", "crop_2", ..."""
        names = self._origin.names
        if operation not in names and operation not in (_DRAW, _EARLY):
            names[operation] = 1
            return operation
        name, count = operation, names.get(operation, int(operation in (_DRAW, _EARLY)))
        while count and (name := f"{operation}_{count + 1}") in names:
            count += 1
        names[operation] = count + 1
        names.setdefault(name, 1)
        return name

    def promise_ctx(self, name: str, value: Lazy) -> None:
        """Say that loading `value` will record the entry `name` of the ctx."""
        self._origin.promises[name] = value

    def promises(self) -> dict[str, Lazy]:
        """Return which value will record which entry of the ctx when it is loaded."""
        return dict(self._origin.promises)

    def recorded(self, name: str) -> Any:
        """Return one entry of the ctx, loading the field that it is recorded with."""
        promises = self._origin.promises
        for promise in [promises[name]] if name in promises else list(promises.values()):
            if name not in self.ctx:
                promise.get(self)
        if name not in self.ctx:
            names = sorted({*self.ctx, *self._origin.promises})
            way_out = (
                "" if self.is_recording else "`.record_ctx()` must stand before the operations that are to be recorded."
            )
            refuse_field(name, f"The ctx of sample {self.key!r}", names, way_out)
        return self.ctx[name]


class _Unknown:
    """The generator of an operation in a replay that does not know it: an error for who draws from it."""

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def refuse(self) -> NoReturn:
        raise ChainError(
            f"`{self._operation}` draws random numbers, and nothing in the ctx says which. Put `.record_ctx()` before "
            "it, or build the whole batch again: `kdp.rebuild_batch`."
        )

    def __getattr__(self, name: str) -> Any:
        self.refuse()


def _restore(
    fields: dict[str, Any],
    key: str,
    index: int,
    sample_key: SampleKey,
    version: str,
    route: tuple[int, ...],
    ctx: dict[str, Any],
    names: dict[str, int],
    is_recording: bool,
) -> Sample:
    sample = Sample(fields, key=key, index=index, draw=sample_key, version=version)
    sample._origin.route = route
    sample._origin.ctx.update(ctx)
    sample._origin.names.update(names)
    sample._origin.is_recording = is_recording
    return sample


def _named(key: str | Callable[[], str]) -> str:
    return f"sample {(key if isinstance(key, str) else key())!r}"


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"<{type(value).__name__} {list(shape)} {getattr(value, 'dtype', '')}>"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_sample(item: Any, index: int, pipe: str) -> Sample:
    """Return `item` as a new sample, which a stock pipe may have kept; a dictionary as its fields; or refuse it."""
    if isinstance(item, Sample):
        return item.fork()
    if isinstance(item, Mapping) and all(isinstance(name, str) for name in item):
        fields = {name.lstrip("."): value for name, value in item.items() if not name.startswith("__")}
        return Sample(fields, key=str(item.get("__key__", index)), index=index)
    raise ChainError(
        f"`{pipe}` takes samples, but its source gives {type(item).__name__}. {_way_to_samples(item, pipe)}"
    )


def _way_to_samples(item: Any, pipe: str) -> str:
    if isinstance(item, list):
        return f"Those are batches: put `.{pipe}()` before `.deal()`."
    if isinstance(item, str):
        return "If those are paths, `.to_samples()` makes samples of the files."
    return (
        f'Name the fields first: `.to_samples(fields="x y")`; if those are batches, put `.{pipe}()` before `.deal()`.'
        if isinstance(item, tuple)
        else "`.to_samples()` makes them."
    )
