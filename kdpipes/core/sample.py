"""`Sample`, a mapping of lazily loaded fields, and `Block`, a table of samples that are computed together."""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.column import UNLOADED, Column, Loaded, keep_no_inputs, stacked, upstream_of
from kdpipes.core.errors import ChainError, MissingMemberError, must_be, reject_field
from kdpipes.core.on_use import call_slot
from kdpipes.core.randomness import SampleKey, borrowed_generator, current_key, generator, plan_epoch
from kdpipes.core.secrets import printable
from kdpipes.core.tracebacks import shorten

_UNPACKING = [dis.opmap[name] for name in ("UNPACK_SEQUENCE", "UNPACK_EX")]
_DRAW, _EARLY = "draw", "early_draws"  # reserved entries of the ctx


class Rows:
    """The samples that a block holds: their positions in a source, and their ordinals in the dealt epoch.

    Args:
        positions: The positions of the samples in the source.
        keys: A function that returns the random keys of the samples. It is called only if they are needed.
        planned: The epoch for which plan pipes choose the samples.
        places: The index of each sample in the batch.
    """

    def __init__(
        self, positions: NDArray[Any], keys: Callable[[], list[SampleKey]], planned: int, places: Sequence[int]
    ) -> None:
        self.positions = positions
        self.keys = keys
        self.planned = planned
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def at(self, positions: Any, planned: int) -> Rows:
        """Return the same samples at other positions: those in a source upstream."""
        return Rows(np.asarray(positions), self.keys, planned, self.places)

    def part(self, numbers: Sequence[int]) -> Rows:
        """Return a part of the samples, by their numbers."""
        if len(numbers) == len(self.places):
            return self
        keys = cache(lambda: [self.keys()[number] for number in numbers])
        return Rows(self.positions[numbers], keys, self.planned, [self.places[number] for number in numbers])


def one_row(position: int) -> Rows:
    """Return the rows of a single sample with the current random key."""
    key = current_key() or SampleKey(position=position)
    return Rows(np.array([position]), lambda: [key], plan_epoch(), [0])


class Block:
    """Samples that are computed together: a table whose rows are samples and whose columns are fields, loaded lazily.

    All samples have the same fields and have passed the same pipes.

    Args:
        fields: The columns, by the names of the fields.
        rows: The positions and ordinals of the samples.
        key: A function from a position to the sample's key; None numbers the samples.
        version: A function from a position to a text that changes when the data of the sample change.
        shared_key: A function from a position to the key that samples of the same file share.
    """

    key: Callable[[int], str] | None = None
    version: Callable[[int], str] | None = None
    shared_key: Callable[[int], str] | None = None
    route: tuple[int, ...] = ()
    lacking: tuple[frozenset[str], str] = frozenset(), ""
    is_recording = is_part = False
    # The samples from which `stack` made this block.
    origins: Sequence[Sample] = ()
    places: Sequence[int] = (0,)
    _rows: list[_Row] | None = None
    _samples: list[Sample] | None = None

    def __init__(
        self,
        fields: dict[str, Column],
        rows: Rows,
        *,
        key: Callable[[int], str] | None,
        version: Callable[[int], str] | None = None,
        shared_key: Callable[[int], str] | None = None,
    ) -> None:
        self.fields = fields
        self.positions: Sequence[int] = rows.positions.tolist()
        self.keys = rows.keys
        self.places = rows.places
        self.key = key
        self.version = version
        self.shared_key = shared_key
        self.claimed: dict[str, int] = {}
        self.promises: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self.places)

    def samples(self) -> list[Sample]:
        """Return the samples. The block keeps them until `release`, because they refer to it and so form a cycle."""
        if self._samples is not None:
            return self._samples
        if self._rows is None:
            self._rows = list(map(_Row, self.keys()))
        samples = [Sample.of_row(self, row, number) for number, row in enumerate(self._rows)]
        if len(samples) > 1:
            self._samples = samples
        return samples

    def sample(self, number: int = 0) -> Sample:
        """Return one of the samples."""
        if self._rows is None:
            self._rows = list(map(_Row, self.keys()))
        return Sample.of_row(self, self._rows[number], number)

    def first(self) -> Sample:
        """Return the first sample, of which only the key may be used."""
        return self.sample() if self._rows else Sample.of_row(self, _Row(SampleKey()), 0)

    def drop_failures(self) -> None:
        """Forget the errors of all columns, after they have been raised."""
        for column in upstream_of([*self.fields.values(), *self.promises.values()]):
            column.drop_failures()

    def release(self) -> None:
        """Drop the reference to the samples."""
        self._samples = None

    def only(self, number: int) -> Block:
        """Return a block with one of the samples, which shares the columns."""
        if len(self.places) == 1:
            return self
        part = copy.copy(self)
        part._samples = [self.sample(number)]
        part.is_part = True
        part.places = [self.places[number]]
        return part

    def values(self, name: str) -> Sequence[Any]:
        """Return the values of a field, one for each sample."""
        return self.column(name).values(self)

    def column(self, name: str) -> Column:
        """Return a field without loading it."""
        column = self.fields.get(name)
        return self.sample().lazy(name) if column is None else column

    def claim_name(self, operation: str) -> str:
        """Return an operation name that is unique for these samples: "crop", "crop_2", ..."""
        names = self.claimed
        if operation not in names and operation not in (_DRAW, _EARLY):
            names[operation] = 1
            return operation
        name = operation
        count = names.get(operation, int(operation in (_DRAW, _EARLY)))
        while count and (name := f"{operation}_{count + 1}") in names:
            count += 1
        names[operation] = count + 1
        names.setdefault(name, 1)
        return name

    def drop_inputs(self) -> None:
        """Discard values after use if only one other field depends on them, such as the bytes of files."""
        if len(self.places) > 1 and not self.is_part:
            keep_no_inputs([*self.fields.values(), *self.promises.values()])


def stack(samples: Sequence[Sample]) -> Block | None:
    """Combine samples of one-sample blocks into one block; return None if their fields differ."""
    first = samples[0].block
    forms = [
        (each.claimed, each.is_recording, tuple(each.fields), each.lacking, tuple(each.promises))
        for each in (sample.block for sample in samples)
    ]
    if any(form != forms[0] for form in forms) or any(sample.failure is not None for sample in samples):
        return None
    fields = {name: stacked([sample.block.fields[name] for sample in samples], samples) for name in first.fields}
    positions = [sample.position for sample in samples]
    sample_keys = [sample.draw for sample in samples]
    block = Block(fields, Rows(np.array(positions), lambda: sample_keys, 0, range(len(samples))), key=None)
    promised = {name: [sample.block.promises[name] for sample in samples] for name in first.promises}
    block.promises = {name: stacked(columns, samples) for name, columns in promised.items()}
    block.claimed = dict(first.claimed)
    block.is_recording = first.is_recording
    block.lacking = first.lacking
    block.origins = samples
    block._rows = [sample.row for sample in samples]
    return block


class _Row:
    """State shared by all views of one sample."""

    drawn: list[tuple[str, np.random.Generator | None]] | None = None
    failure: Exception | None = None
    is_index_read = False
    key: str | None = None
    version: str | None = None
    shared_key: str | None = None
    # The key, encoded for the activity record.
    name: bytes | None = None

    def __init__(self, sample_key: SampleKey) -> None:
        self.sample_key = sample_key
        self.ctx: dict[str, Any] = {}


def _single(fields: dict[str, Column], position: int, row: _Row) -> Block:
    """Return a block of one sample."""
    block = Block.__new__(Block)
    block.fields = fields
    block.positions = [position]
    block.claimed = {}
    block.promises = {}
    block.keys = lambda: [row.sample_key]
    block._rows = [row]
    return block


class Sample(MutableMapping[str, Any]):
    """A mutable mapping of named fields. Each field is loaded once, when it is first read.

    `name in sample` loads nothing. Pickling and copying load all fields.

    Args:
        fields: The fields by name. A value of type `Column` is computed when it is read.
        key: A stable name that is unique in the source, such as a relative path or an ID, or a function that returns
            it. Caches, quarantines and `replay` need it. None uses the number `index`.
        index: The sample's position in its source, from 0.
        draw: The key from which the sample's random numbers derive. By default, it is the one set by `deal`.
        version: A string that changes when the sample's data changes, such as the size and time of its file, or a
            function that returns it. Caches use it.

    Example:
        >>> sample = Sample({"x": b"pixels", "y": 3}, key="heron/0001.jpg")
        >>> sample["y"], sample.key, list(sample)
        (3, 'heron/0001.jpg', ['x', 'y'])
    """

    __slots__ = ("_fields", "block", "number", "position", "row")
    block: Block
    number: int
    position: int  # position in the source; unlike `index`, reading it is not recorded
    row: _Row
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
        self._fields = {name: value if isinstance(value, Column) else Loaded(value) for name, value in fields.items()}
        self.row = _Row(draw or current_key() or SampleKey(position=index))
        self.block = _single(self._fields, index, self.row)
        self.number = 0
        self.position = index
        if key is None or isinstance(key, str):
            self.row.key = key
        else:
            self.block.key = lambda _: key()
        if isinstance(version, str):
            self.row.version = version
        else:
            self.block.version = lambda _: version()

    @classmethod
    def of_row(cls, block: Block, row: _Row, number: int) -> Sample:
        """Return a view of one row of a block."""
        sample = cls.__new__(cls)
        sample.block = block
        sample._fields = block.fields
        sample.row = row
        sample.number = number
        sample.position = block.positions[number]
        return sample

    @property
    def key(self) -> str:
        """The sample's name, which is stable and unique in its source."""
        row = self.row
        if row.key is None:
            key_of = self.block.key
            origins = self.block.origins
            if origins:
                return origins[self.number].key
            if key_of is None:
                return str(self.position)
            row.key = key_of(self.position)
        return row.key

    @property
    def has_number(self) -> bool:
        """Whether the key is just the number of the sample in its source."""
        origins = self.block.origins
        return self.row.key is None and (origins[self.number].has_number if origins else self.block.key is None)

    def required_key(self) -> str:
        """Return the key; raise ChainError if it is empty, because caches need it."""
        # To a cache, all samples without a key would be the same sample.
        if not self.key:
            raise ChainError(
                f"`cache` identifies samples by their keys, but sample {self.position} has none. Pass a "
                "unique key, `kdp.Sample(fields, key=..., index=...)`, in the source."
            )
        return self.key

    @property
    def index(self) -> int:
        """The sample's position in its source."""
        self.row.is_index_read = True
        return self.position

    @contextmanager
    def watching_index(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns whether `index` has been read since."""
        before = self.row.is_index_read
        self.row.is_index_read = False
        try:
            yield lambda: self.row.is_index_read
        finally:
            self.row.is_index_read |= before

    @property
    def shared_key(self) -> str:
        """The key shared by all samples that were read from the same file; otherwise, the sample's own key."""
        shared = self.row.shared_key
        shared_of = self.block.shared_key
        if shared is None and shared_of is not None:
            shared = self.row.shared_key = shared_of(self.position)
        return self.key if shared is None else shared

    @property
    def version(self) -> str:
        """A string that changes when the sample's data change; empty if the source does not know."""
        row = self.row
        if row.version is None:
            version_of = self.block.version
            origins = self.block.origins
            if origins:
                return origins[self.number].version
            row.version = "" if version_of is None else version_of(self.position)
        return row.version

    @property
    def route(self) -> tuple[int, ...]:
        """The number of the source that the sample came from, for each passed pipe with several sources."""
        return self.block.route

    def come_from(self, number: int) -> Sample:
        """Add the number of a source to the route, and return the sample."""
        self.block.route = (*self.block.route, number)
        return self

    def depend_on(self, other: Sample) -> None:
        """Make the version of this sample depend on the key and version of another, from which it takes fields."""
        known = self.row.version
        version_of = self.block.version
        self.row.version = None

        def version(position: int) -> str:
            own = known if known is not None else "" if version_of is None else version_of(position)
            return f"{own} {other.key!r} {other.version}"

        self.block.version = version

    @property
    def failure(self) -> Exception | None:
        """The error because of which `deal` will leave out this sample of a stream; otherwise None."""
        return self.row.failure

    def fail(self, error: Exception) -> None:
        """Record why the sample could not be made. Pipes downstream then pass it on unchanged."""
        self.row.failure = error

    @property
    def ordinal(self) -> int:
        """The sample's position in the dealt epoch."""
        return self.row.sample_key.position

    @property
    def draw(self) -> SampleKey:
        """The key from which all random numbers of the delivered sample derive."""
        return self.row.sample_key

    @property
    def ctx(self) -> dict[str, Any]:
        """The entries that operations after `record_ctx` have recorded, by the name of the operation."""
        return self.row.ctx

    def __getitem__(self, name: str) -> Any:
        try:
            value = self._fields.get(name) or self.lazy(name)
            return value.get(self)
        except BaseException as error:
            shorten(error)
            raise error  # KDPIPES_TRACEBACK=full shows the frames in between

    if not TYPE_CHECKING:  # otherwise, type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            is_field = not name.startswith("_") and name in self._fields
            hint = f' Fields are items: `sample["{name}"]`.' if is_field else ""
            raise AttributeError(f"'Sample' object has no attribute {name!r}.{hint}")

    def __setitem__(self, name: str, value: Any) -> None:
        self._fields[name] = value if isinstance(value, Column) else Loaded(value)

    def __delitem__(self, name: str) -> None:
        self.lazy(name)
        self._fields.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        # `x, y = sample` would assign the names of fields. `f(*sample)` passes them, too, but cannot be told from
        # `function(*args)` if the function is `tuple` and the sample its argument.
        if caller is not None and caller.f_code.co_code[caller.f_lasti] in _UNPACKING:
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
        block = self.block
        fields = dict(self)  # fields come first, because loading them records entries of the ctx
        kept = block.route, block.claimed, block.is_recording, self.ctx, self.row.shared_key
        key = None if self.has_number else self.key
        return _restore, (fields, key, self.position, self.draw, self.version, kept)

    def lazy(self, name: Any) -> Column:
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
        """Return a function that returns the sample's name for errors, without keeping the sample in memory."""
        key_of = self.block.key
        return partial(sample_name, self.row.key or (self.key if key_of is None else partial(key_of, self.position)))

    def lack(self, names: Collection[str], place: str) -> None:
        """Set the fields that this sample lacks but others have; reading one raises an error, which names `place`."""
        self.block.lacking = frozenset(names), place

    @property
    def lacking(self) -> frozenset[str]:
        """The fields that this sample lacks but others of the source have."""
        return self.block.lacking[0]

    def missing(self, names: Sequence[str]) -> Column | None:
        """Return a field that raises MissingMemberError when it is read; None if this sample lacks none of `names`."""
        lacking, place = self.block.lacking
        if not any(name in lacking for name in names):
            return None
        there = ", ".join(map(repr, sorted(self._fields))) or "nothing"
        member = ";".join(names)

        def reject(sample: Sample) -> NoReturn:
            raise MissingMemberError(
                f"Sample {sample.key!r} in {place} has no member {member!r}, as other samples have, but {there}. "
                '`.on_error("skip")`, before `.select()` and `.deal()`, leaves such samples out.'
            )

        return Column(reject, what=f"reading field {member!r}")

    def key_of(self, operation: str) -> bytes:
        """Return an operation's random key, which depends only on the delivered sample and the operation's name."""
        sample_key = self.row.sample_key
        early = (sample_key.replayed or {}).get(_EARLY, {}).get(operation)
        return (sample_key if early is None else SampleKey.from_entry(early, is_early=True)).key(operation)

    def rng(self, operation: str, *, is_borrowed: bool = False) -> np.random.Generator:
        """Return a generator that depends only on the delivered sample and the operation's name.

        Args:
            operation: The name of the operation, unique for the sample.
            is_borrowed: Whether the operation is done with the generator before this thread asks for the next one.
        """
        row = self.row
        replayed = row.sample_key.replayed
        if replayed is not None and operation not in replayed.get(_EARLY, {}) and _DRAW not in replayed:
            return cast("np.random.Generator", _Unknown(operation))
        key = row.sample_key.key(operation) if replayed is None else self.key_of(operation)
        if row.drawn is None:
            return (borrowed_generator if is_borrowed else generator)(key)
        made = generator(key)
        row.drawn.append((operation, made))
        return made

    @property
    def is_watched(self) -> bool:
        """Whether draws of random numbers must be recorded."""
        row = self.row
        return row.drawn is not None or self.block.is_recording or row.sample_key.replayed is not None

    @contextmanager
    def watching_draws(self) -> Iterator[Callable[[], str | None]]:
        """Yield a function that returns the name of an operation that has drawn random numbers since, or None."""
        before = self.row.drawn
        drawn = list[tuple[str, np.random.Generator | None]]()
        self.row.drawn = drawn
        try:
            yield lambda: next((name for name, rng in drawn if rng is None or self._has_moved(name, rng)), None)
        finally:
            self.row.drawn = before

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
        if self.row.drawn is not None:
            self.row.drawn.append((operation, None))
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
        before = self.row.sample_key
        self.row.sample_key = sample_key
        try:
            yield
        finally:
            self.row.sample_key = before

    def bind(self, sample_key: SampleKey) -> None:
        """Set the key of the delivered sample."""
        self.row.sample_key = sample_key

    def scope(self) -> dict[str, Column]:
        """Return a copy of the current fields, without loading them."""
        return dict(self._fields)

    def view(self, scope: Mapping[str, Column]) -> Sample:
        """Return the same delivered sample with other fields: an earlier `scope`."""
        view = Sample.__new__(Sample)
        view.block = self.block
        view.number = self.number
        view.row = self.row
        view._fields = dict(scope)
        view.position = self.position
        return view

    def fork(self, *, key: str | None = None) -> Sample:
        """Return the sample, or a sample with another key, for a further delivery, with a separate ctx.

        Fields that are not loaded yet are computed separately.
        """
        own = self.block
        forks = dict[Column, Column]()
        fields = {name: column.fork(self, forks) for name, column in self._fields.items()}
        block = _single(fields, self.position, _Row(current_key() or self.draw))
        fork = block.sample()
        row = fork.row
        block.promises = {name: column.fork(self, forks) for name, column in own.promises.items()}
        block.route = own.route
        block.is_recording = own.is_recording
        block.lacking = own.lacking
        block.key = own.key
        block.version = own.version
        block.claimed = dict(own.claimed)
        row.key = self.row.key if key is None else key
        row.version = self.row.version
        row.failure = self.failure
        if key is None:
            block.shared_key = own.shared_key
            row.shared_key = self.row.shared_key
        elif not self.has_number:  # caches must tell samples apart that get the same key
            row.shared_key = self.shared_key
        row.ctx.update({name: dict(value) if isinstance(value, dict) else value for name, value in self.ctx.items()})
        return fork

    def recorded(self, name: str) -> Any:
        """Return one entry of the ctx. If necessary, load the field that records it."""
        promises = self.block.promises
        for promise in [promises[name]] if name in promises else list(promises.values()):
            if name not in self.ctx:
                promise.get(self)
        if name not in self.ctx:
            names = sorted({*self.ctx, *promises})
            hint = "" if self.block.is_recording else "Put `.record_ctx()` before the operations to record."
            reject_field(name, f"The ctx of sample {self.key!r}", names, hint)
        return self.ctx[name]


class _Unknown:
    """A stand-in for the generator of an operation that is missing in the replayed ctx. Drawing from it raises."""

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def reject(self) -> NoReturn:
        raise ChainError(
            f"`{self._operation}` draws random numbers, but the ctx does not contain them. Put `.record_ctx()` before "
            "it, or make the whole batch again with `kdp.find`."
        )

    def __getattr__(self, name: str) -> Any:
        self.reject()


def _restore(
    fields: dict[str, Any],
    key: str | None,
    index: int,
    sample_key: SampleKey,
    version: str,
    kept: tuple[tuple[int, ...], dict[str, int], bool, dict[str, Any], str | None],
) -> Sample:
    sample = Sample(fields, key=key, index=index, draw=sample_key, version=version)
    block = sample.block
    row = sample.row
    block.route = kept[0]
    block.is_recording = kept[2]
    row.shared_key = kept[4]
    block.claimed.update(kept[1])
    row.ctx.update(kept[3])
    return sample


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
    """Return a sample (as a new object, because a stock pipe may keep it), or a new sample made from a dictionary."""
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
