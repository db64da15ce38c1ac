"""`Sample`, a mapping of fields that load when they are first read, and `Lazy`, the value of such a field."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np

from kdpipes.core import activity
from kdpipes.core.errors import ChainError, MissingMemberError, add_note, must_be, reject_field
from kdpipes.core.on_use import call_slot
from kdpipes.core.randomness import SampleKey, borrowed_generator, current_key, generator
from kdpipes.core.secrets import printable
from kdpipes.core.tracebacks import shorten

_UNPACKING = [dis.opmap[name] for name in ("UNPACK_SEQUENCE", "UNPACK_EX")]
_DRAW, _EARLY = "draw", "early_draws"  # entries of the ctx
_NOTHING: tuple[frozenset[str], str] = frozenset(), ""
UNLOADED: Any = type("_Unloaded", (), {"__repr__": lambda self: "<not loaded>"})()


class Inputs(NamedTuple):
    """What a value is computed from, besides what is still to be loaded from the source.

    Args:
        names: The names of the fields that functions of the whole sample get.
        values: The values that the source has handed over with the sample, or that are cheap to get.
    """

    names: tuple[str, ...]
    values: tuple[Lazy, ...]


_NO_INPUTS = Inputs((), ())


class Lazy:
    """The value of a field that is computed once, when it is first read.

    Args:
        load: A function that is called as `load(sample, *values)` with the values of `inputs`.
        inputs: The values that this one is computed from.
        what: A description for the note on an error, such as "reading field 'x'".
        scope: The fields of the sample that `load` gets, if they are not the current ones.
        is_cheap: Whether loading takes almost no time, so that caches do not keep the value.
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

    @property
    def is_loaded(self) -> bool:
        """Whether the value has been loaded."""
        return self._value is not UNLOADED

    def get(self, sample: Sample) -> Any:
        """Return the value. A note on an error names the sample and the operation."""
        if self._value is UNLOADED:
            values = [value.get(sample) for value in self._inputs] if self._inputs else ()
            record = activity.current
            before = record.enter(sample, self._what) if record is not None else (None, "")
            try:
                self._value = self._load(sample if self._scope is None else sample.view(self._scope), *values)
            except BaseException as error:  # including SystemExit, which workers send to the main process
                add_note(error, f"kdpipes: while {self._what} of sample {sample.key!r} (ordinal {sample.ordinal})")
                raise
            finally:
                if record is not None:
                    record.leave(before)
            self._load, self._inputs, self._scope = UNLOADED, (), None
        return self._value

    def reaches(self, others: Collection[Lazy]) -> list[Lazy]:
        """Return those of some values that this one is, or is still to be computed from."""
        found, waiting, seen = list[Lazy](), [self], set[int]()
        while waiting:
            value = waiting.pop()
            if id(value) not in seen:
                seen.add(id(value))
                found += [value] if any(value is other for other in others) else []
                waiting += [*value._inputs, *(value._scope or {}).values()]
        return found

    def inputs(self, others: Collection[Lazy]) -> Inputs:
        """Return what this value is computed from, also through the values `others`, always in the same order."""
        first = self
        while first._scope is None and len(first._inputs) == 1:  # most fields: a row of work on one value
            first = first._inputs[0]
        if first._scope is None and not first._inputs and not others:
            return Inputs((), (first,)) if first.is_loaded or first.is_cheap else _NO_INPUTS
        names, values = list[str](), list[Lazy]()
        waiting, seen = [first, *others], set[int]()
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            scope = value._scope
            if scope is not None:
                names += sorted(scope)
                waiting += [scope[name] for name in sorted(scope)]
            elif not value._inputs and (value.is_loaded or value.is_cheap):
                values.append(value)
            waiting += value._inputs
        return Inputs(tuple(names), tuple(values))

    def before(self, is_step: Callable[[str], bool]) -> Lazy | None:
        """Return the value before the last steps; None if it is no longer known.

        `is_step` takes a description of a value, and returns whether it is such a step.
        """
        value = self
        while is_step(value._what):
            if value.is_loaded or not value._inputs:
                return None
            value = value._inputs[0]
        return value

    def wrap(self, wrapped: Callable[[Callable[..., Any], str], Callable[..., Any] | None]) -> None:
        """Replace each function that computes the value or its inputs by `wrapped(function, description)`.

        If `wrapped` returns None, the value and its inputs are left unchanged.
        """
        if self._value is UNLOADED and (load := wrapped(self._load, self._what)) is not None:
            self._load = load
            for value in self._inputs:
                value.wrap(wrapped)

    def fork(self, forks: dict[Lazy, Lazy]) -> Lazy:
        """Return the value for another delivery; if it is not loaded yet, it is computed anew, once.

        `forks` holds the values already forked for that delivery; this one is added.
        """
        if self not in forks:
            if self.is_loaded:
                forks[self] = Loaded(self._value)
            else:
                scope = self._scope and {name: value.fork(forks) for name, value in self._scope.items()}
                inputs = [value.fork(forks) for value in self._inputs]
                forks[self] = Lazy(self._load, *inputs, what=self._what, scope=scope, is_cheap=self.is_cheap)
        return forks[self]


class Loaded(Lazy):
    """A value that is already loaded, as most fields are. Making one takes a quarter of the time of a `Lazy`."""

    __slots__ = ()
    _load: Any = UNLOADED  # these attributes hide the slots of the base class
    _inputs: Any = ()
    _scope: Any = None
    _what: Any = ""
    is_cheap: Any = False

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, sample: Sample) -> Any:
        return self._value


class _Origin:
    """The data that all views of one delivered sample share."""

    __slots__ = (
        "ctx",
        "drawn",
        "failure",
        "index",
        "is_index_read",
        "is_recording",
        "key",
        "lacking",
        "names",
        "promises",
        "route",
        "sample_key",
        "shared_key",
        "version",
    )

    def __init__(
        self,
        key: str | Callable[[], str] | None,
        index: int,
        sample_key: SampleKey,
        version: str | Callable[[], str] = "",
    ) -> None:
        self.version = version
        self.route: tuple[int, ...] = ()
        self.drawn: list[tuple[str, np.random.Generator | None]] | None = None
        self.key = key
        self.shared_key: str | None = None
        self.index = index
        self.is_index_read = False
        self.sample_key = sample_key
        self.ctx: dict[str, Any] = {}
        self.failure: Exception | None = None
        self.is_recording = False
        self.names: dict[str, int] = {}
        self.promises: dict[str, Lazy] = {}
        self.lacking = _NOTHING


class Sample(MutableMapping[str, Any]):
    """A mutable mapping of named fields. Each field is loaded once, when it is first read.

    `name in sample` loads nothing. Pickling and copying load all fields.

    Args:
        fields: The fields by name. A value of type `Lazy` is computed when it is read.
        key: A stable name that is unique in the source, such as a relative path or an ID; or a function that returns
            it. Caches, quarantines and `replay` need it. None numbers the sample by `index`.
        index: The sample's position in its source, from 0.
        draw: The key that the sample's random numbers derive from. By default, it is the one that `deal` has set.
        version: A string that changes when the data of the sample change, such as the size and time of its file; or a
            function that returns it. Caches use it.

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
        key: str | Callable[[], str] | None = "",
        index: int = 0,
        draw: SampleKey | None = None,
        version: str | Callable[[], str] = "",
    ) -> None:
        self._origin = _Origin(key, index, draw or current_key() or SampleKey(position=index), version)
        self._fields = {name: value if isinstance(value, Lazy) else Loaded(value) for name, value in fields.items()}

    @property
    def key(self) -> str:
        """The sample's name, which is stable and unique in its source."""
        key = self._origin.key
        if key is None:
            return str(self._origin.index)
        if not isinstance(key, str):
            key = self._origin.key = key()
        return key

    @property
    def has_number(self) -> bool:
        """Whether the key is only the number of the sample in its source."""
        return self._origin.key is None

    def required_key(self, needed_by: str) -> str:
        """Return the key; raise ChainError, which names a pipe, if it is empty."""
        if not self.key:  # all samples without a key would look the same
            raise ChainError(
                f"`{needed_by}` identifies samples by their keys, but sample {self._origin.index} has none. Pass a "
                "unique key, `kdp.Sample(fields, key=..., index=...)`, in the source."
            )
        return self.key

    @property
    def index(self) -> int:
        """The sample's position in its source."""
        self._origin.is_index_read = True
        return self._origin.index

    @contextmanager
    def watching_index(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns whether `index` has been read meanwhile."""
        before, self._origin.is_index_read = self._origin.is_index_read, False
        try:
            yield lambda: self._origin.is_index_read
        finally:
            self._origin.is_index_read |= before

    @property
    def shared_key(self) -> str:
        """The key that samples share if the same file was read for them; for all others, their own key."""
        shared = self._origin.shared_key
        return self.key if shared is None else shared

    def share(self, key: str) -> Sample:
        """Set the key that samples of the same file share, and return the sample."""
        self._origin.shared_key = key
        return self

    @property
    def version(self) -> str:
        """A string that changes when the sample's data change; empty if the source does not know."""
        version = self._origin.version
        if not isinstance(version, str):
            version = self._origin.version = version()
        return version

    @property
    def route(self) -> tuple[int, ...]:
        """For each pipe with several sources that the sample passed, the number of the source it came from."""
        return self._origin.route

    def come_from(self, number: int) -> Sample:
        """Add the number of a source to the route, and return the sample."""
        self._origin.route = (*self._origin.route, number)
        return self

    def depend_on(self, other: Sample) -> None:
        """Include the key and the version of another sample, whose fields this one takes, in the version of this."""
        own = self._origin.version
        self._origin.version = lambda: f"{own if isinstance(own, str) else own()} {other.key!r} {other.version}"

    @property
    def failure(self) -> Exception | None:
        """Why the sample could not be made, if `deal` leaves out such samples of a stream; otherwise None."""
        return self._origin.failure

    def fail(self, error: Exception) -> None:
        """Note why the sample could not be made; the pipes downstream leave it as it is."""
        self._origin.failure = error

    @property
    def ordinal(self) -> int:
        """The sample's position in the dealt epoch."""
        return self._origin.sample_key.position

    @property
    def draw(self) -> SampleKey:
        """The key that all random numbers of the delivered sample derive from."""
        return self._origin.sample_key

    @property
    def ctx(self) -> dict[str, Any]:
        """The entries that operations after `record_ctx` have recorded, by the name of the operation."""
        return self._origin.ctx

    def __getitem__(self, name: str) -> Any:
        try:
            value = self._fields.get(name) or self.lazy(name)
            return value.get(self)
        except BaseException as error:
            shorten(error)
            raise error  # KDPIPES_TRACEBACK=full shows the frames in between

    if not TYPE_CHECKING:  # with it, type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            is_field = not name.startswith("_") and name in self._fields
            hint = f' Fields are items: `sample["{name}"]`.' if is_field else ""
            raise AttributeError(f"'Sample' object has no attribute {name!r}.{hint}")

    def __setitem__(self, name: str, value: Any) -> None:
        self._fields[name] = value if isinstance(value, Lazy) else Loaded(value)

    def __delitem__(self, name: str) -> None:
        self.lazy(name)
        self._fields.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if (
            caller is not None and caller.f_code.co_code[caller.f_lasti] in _UNPACKING
        ):  # the names would be taken for the values
            names = " ".join(self._fields)
            raise TypeError(f"A sample is a mapping and cannot be unpacked. `.select({names!r})` returns tuples.")
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        shown = {name: self[name] if value.is_loaded else UNLOADED for name, value in self._fields.items()}
        fields = ", ".join(f"{name}={_short(value)}" for name, value in shown.items())
        return printable(f"Sample({self.key!r}, {fields})")

    def _repr_html_(self) -> str:
        return str(call_slot("Peek", [self], None, 1)._repr_html_())

    def __reduce__(self) -> tuple[Any, ...]:
        origin = self._origin
        fields = dict(self)  # first, because loading fields records entries of the ctx
        copied = ("route", "names", "is_recording", "ctx", "shared_key")
        kept = {name: getattr(origin, name) for name in copied}
        key = None if self.has_number else self.key
        return _restore, (fields, key, origin.index, self.draw, self.version, kept)

    def lazy(self, name: Any) -> Lazy:
        """Return a field without loading it."""
        try:
            return self._fields[name]
        except KeyError:
            if not isinstance(name, str):
                hint = 'Fields have names: `sample["x"]`. `.select("x y")` makes tuples.'
                raise TypeError(must_be("name", "the name of a field", name, hint)) from None
            if (missing := self.missing([name])) is not None:
                return missing
            reject_field(name, f"Sample {self.key!r}", self._fields)

    def naming(self) -> Callable[[], str]:
        """Return a function that returns the sample's name for errors, and does not keep the sample in memory."""
        key = self._origin.key
        return partial(sample_name, self.key if key is None else key)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(self._fields)

    def arrange(self, orders: Mapping[tuple[str, ...], Sequence[tuple[str, str]]]) -> bool:
        """Keep, rename and order fields. `orders` maps the names of all fields to pairs of a new and an old name.

        Return False if `orders` has no entry for the names of this sample.
        """
        fields = self._fields
        order = orders.get(tuple(fields))
        if order is None:
            return False
        self._fields = {new: fields[old] for new, old in order}
        return True

    def lack(self, names: Collection[str], place: str) -> None:
        """Set the fields that this sample lacks but others have; reading one raises an error, which names `place`."""
        self._origin.lacking = frozenset(names), place

    @property
    def lacking(self) -> frozenset[str]:
        """The fields that this sample lacks but others of the source have."""
        return self._origin.lacking[0]

    def missing(self, names: Sequence[str]) -> Lazy | None:
        """Return a field that raises MissingMemberError when it is read; None unless this sample lacks one of these."""
        lacking, place = self._origin.lacking
        if not any(name in lacking for name in names):
            return None
        there = ", ".join(map(repr, sorted(self._fields))) or "nothing"
        text = f"Sample {self.key!r} in {place} has no member {';'.join(names)!r}, as other samples have, but {there}. "
        text += '`.on_error("skip")` leaves such samples out.'

        def reject(_: Sample) -> NoReturn:
            raise MissingMemberError(text)

        return Lazy(reject, what=f"reading field {';'.join(names)!r}")

    def key_of(self, operation: str) -> bytes:
        """Return the key of an operation, which depends only on the delivered sample and the operation's name."""
        sample_key = self._origin.sample_key
        if sample_key.replayed is not None:
            early = sample_key.replayed.get(_EARLY, {}).get(operation)
            sample_key = sample_key if early is None else SampleKey.from_entry(early, is_early=True)
        return sample_key.key(operation)

    def rng(self, operation: str, *, is_borrowed: bool = False) -> np.random.Generator:
        """Return a generator that depends only on the delivered sample and the operation's name.

        Args:
            operation: The name of the operation, unique for the sample.
            is_borrowed: Whether the operation no longer uses the generator when this thread asks for the next one.
        """
        origin = self._origin
        replayed = origin.sample_key.replayed
        if replayed is not None and operation not in replayed.get(_EARLY, {}) and _DRAW not in replayed:
            return cast("np.random.Generator", _Unknown(operation))
        if origin.drawn is None:
            return (borrowed_generator if is_borrowed else generator)(self.key_of(operation))
        made = generator(self.key_of(operation))
        origin.drawn.append((operation, made))
        return made

    @property
    def is_watched(self) -> bool:
        """Whether it must be known which operations draw random numbers."""
        origin = self._origin
        return origin.drawn is not None or origin.is_recording or origin.sample_key.replayed is not None

    @contextmanager
    def watching_draws(self) -> Iterator[Callable[[], str | None]]:
        """Yield a function that returns the name of an operation that has drawn random numbers meanwhile, or None."""
        before, drawn = self._origin.drawn, list[tuple[str, np.random.Generator | None]]()
        self._origin.drawn = drawn
        try:
            yield lambda: next((name for name, rng in drawn if rng is None or self._has_moved(name, rng)), None)
        finally:
            self._origin.drawn = before

    def _has_moved(self, operation: str, rng: np.random.Generator) -> bool:
        return repr(rng.bit_generator.state) != repr(generator(self.key_of(operation)).bit_generator.state)

    def record_key(self, operation: str, *, is_recorded: bool) -> np.random.Generator:
        """Record the sample's key for an operation that records no parameters, and return its generator.

        The ctx entry is `draw`, one for all operations; or `early_draws`, by operation, if a sample of a stream is
        loaded before its position in the dealt epoch is known.

        Raises:
            ChainError: In a replay, the recorded ctx does not contain the key.
        """
        rng = self.rng(operation)
        if isinstance(rng, _Unknown):
            rng.reject()
        if self._origin.drawn is not None:
            self._origin.drawn.append((operation, None))
        early = (self.draw.replayed or {}).get(_EARLY, {}).get(operation)
        if not is_recorded:
            return rng
        if not all(isinstance(self.ctx.get(name, {}), dict) for name in (_DRAW, _EARLY)):
            raise ChainError(f"The ctx entries {_DRAW!r} and {_EARLY!r} are reserved for kdpipes. Use other names.")
        if early is not None or self.draw.is_early:
            self.ctx.setdefault(_EARLY, {})[operation] = early or self.draw.as_entry()
        else:
            self.ctx[_DRAW] = self.draw.as_entry()
        return rng

    @contextmanager
    def using_key(self, sample_key: SampleKey) -> Iterator[None]:
        """Let operations derive their random numbers from `sample_key` instead of the sample's own key."""
        before, self._origin.sample_key = self._origin.sample_key, sample_key
        try:
            yield
        finally:
            self._origin.sample_key = before

    def bind(self, sample_key: SampleKey) -> None:
        """Set the key of the delivered sample."""
        self._origin.sample_key = sample_key

    def scope(self) -> dict[str, Lazy]:
        """Return a copy of the current fields, without loading them."""
        return dict(self._fields)

    def view(self, scope: Mapping[str, Lazy]) -> Sample:
        """Return the same delivered sample with other fields: an earlier `scope`."""
        view = Sample.__new__(Sample)
        view._origin, view._fields = self._origin, dict(scope)
        return view

    def fork(self, *, key: str | None = None) -> Sample:
        """Return the sample, or one with another key, for another delivery, with a ctx of its own.

        Fields that are not loaded are computed anew.
        """
        fork, origin, forks = Sample.__new__(Sample), self._origin, dict[Lazy, Lazy]()
        sample_key = current_key() or origin.sample_key
        made = fork._origin = _Origin(origin.key if key is None else key, origin.index, sample_key, origin.version)
        made.route, made.is_recording, made.lacking = origin.route, origin.is_recording, origin.lacking
        made.shared_key = origin.shared_key if key is None else None
        made.failure = origin.failure
        made.names = dict(origin.names)
        made.ctx = {name: dict(value) if isinstance(value, dict) else value for name, value in origin.ctx.items()}
        fork._fields = {name: value.fork(forks) for name, value in self._fields.items()}
        made.promises = {name: value.fork(forks) for name, value in origin.promises.items()}
        return fork

    def record(self) -> None:
        """Record the parameters of the following operations in `ctx`."""
        self._origin.is_recording = True

    @property
    def is_recording(self) -> bool:
        """Whether there is a `record_ctx` upstream."""
        return self._origin.is_recording

    @property
    def claimed_names(self) -> dict[str, int]:
        """How many operations have claimed each name."""
        return self._origin.names

    def claim_name(self, operation: str) -> str:
        """Return a name for an operation that is unique for this sample: "crop", "crop_2", ..."""
        return claim_name(self._origin.names, operation)

    def promise_ctx(self, name: str, value: Lazy) -> None:
        """Declare that loading `value` records the entry `name` of the ctx."""
        self._origin.promises[name] = value

    def promises(self) -> dict[str, Lazy]:
        """Return the values that record entries of the ctx when they are loaded, by the names of the entries."""
        return dict(self._origin.promises)

    def recorded(self, name: str) -> Any:
        """Return one entry of the ctx. Load the field whose loading records it, if necessary."""
        promises = self._origin.promises
        for promise in [promises[name]] if name in promises else list(promises.values()):
            if name not in self.ctx:
                promise.get(self)
        if name not in self.ctx:
            names = sorted({*self.ctx, *self._origin.promises})
            hint = "" if self.is_recording else "Put `.record_ctx()` before the operations to record."
            reject_field(name, f"The ctx of sample {self.key!r}", names, hint)
        return self.ctx[name]


class _Unknown:
    """A stand-in for the generator of an operation that the replayed ctx does not know. Drawing from it raises."""

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def reject(self) -> NoReturn:
        raise ChainError(
            f"`{self._operation}` draws random numbers, but the ctx does not contain them. Put `.record_ctx()` before "
            "it, or rebuild the whole batch with `kdp.rebuild_batch`."
        )

    def __getattr__(self, name: str) -> Any:
        self.reject()


def _restore(
    fields: dict[str, Any], key: str | None, index: int, sample_key: SampleKey, version: str, kept: dict[str, Any]
) -> Sample:
    sample = Sample(fields, key=key, index=index, draw=sample_key, version=version)
    for name, value in kept.items():
        setattr(sample._origin, name, dict(value) if isinstance(value, dict) else value)
    return sample


def claim_name(names: dict[str, int], operation: str) -> str:
    """Return a name for an operation that is not in `names`, and add it: "crop", "crop_2", ..."""
    if operation not in names and operation not in (_DRAW, _EARLY):
        names[operation] = 1
        return operation
    name, count = operation, names.get(operation, int(operation in (_DRAW, _EARLY)))
    while count and (name := f"{operation}_{count + 1}") in names:
        count += 1
    names[operation] = count + 1
    names.setdefault(name, 1)
    return name


def sample_name(key: str | Callable[[], str]) -> str:
    """Return the name of a sample for errors."""
    return f"sample {(key if isinstance(key, str) else key())!r}"


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"<{type(value).__name__} {list(shape)} {getattr(value, 'dtype', '')}>"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_sample(item: Any, index: int, pipe: str) -> Sample:
    """Return a sample (as a new object, because a stock pipe may keep it) or a dictionary of fields as a new sample."""
    if isinstance(item, Sample):
        return item.fork()
    if isinstance(item, Mapping) and all(isinstance(name, str) for name in item):
        fields = {name.lstrip("."): value for name, value in item.items() if not name.startswith("__")}
        return Sample(fields, key=str(item["__key__"]) if "__key__" in item else None, index=index)
    hint = "`.to_samples()` makes them."
    if isinstance(item, list):
        hint = f"These are batches: put `.{pipe}()` before `.deal()`."
    elif isinstance(item, str):
        hint = "If these are paths, `.to_samples()` makes samples of the files."
    elif isinstance(item, tuple):
        hint = 'Name the fields first: `.to_samples(fields="x y")`. '
        hint += f"If these are batches, put `.{pipe}()` before `.deal()`."
    raise ChainError(f"`{pipe}` takes samples, but its source yields {type(item).__name__}. {hint}")
