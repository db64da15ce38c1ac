"""Add, rename and select fields of samples, and record the parameters of transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdpipes.core.callback import Callback, call_seeded
from kdpipes.core.column import Column
from kdpipes.core.entries import entry_column, field_of
from kdpipes.core.errors import FieldError, check_flag, check_type, is_sequence, must_be, reject_field
from kdpipes.core.operation import Step
from kdpipes.core.randomness import row_key
from kdpipes.core.sample import Block, Sample
from kdpipes.core.sample_pipe import work_pipe
from kdpipes.core.traits import ItemForm, Traits


@work_pipe("add_field")
class FieldAdder(Step):
    """Adds a field that is computed from the sample when it is read (functional name: ``add_field``).

    The function gets the fields at this point of the chain, before later transforms.

    Args:
        name: The name of the new field. An existing field of that name is replaced.
        function: A function of the sample that returns the value. If it has a parameter `rng`, it gets a
            `numpy.random.Generator`; if it has a parameter `ctx`, the sample's ctx.

    Example:
        >>> kdp.from_dataset([(3, 0)]).add_field("twice", lambda sample: 2 * sample["x"]).select("twice")[0]
        (6,)
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(must_be("name", "a valid name of a field", name))
        self.name = name
        self._function = called = Callback("function", function)
        self.traits = Traits(
            changes=frozenset({name}),
            random=called.name if called.is_random else None,
            records=called.name if "ctx" in called.parameters else None,
            seeds=called.seeds,
        )
        self._place = f"add_field.{name}"
        self._what = f"computing field {name!r}"

    def change(self, block: Block) -> None:
        place = block.claim_name(self._place)
        is_recorded = block.is_recording

        def compute(view: Sample) -> Any:
            return call_seeded(self._function, view, place, view, ctx=view.ctx if is_recorded else None)

        column = Column(compute, what=self._what, scope=dict(block.fields))
        if is_recorded and "ctx" in self._function.parameters:
            block.promises[place] = column
        block.fields[self.name] = column

    def drawing(self) -> tuple[str, ...]:
        return self._function.drawing


_MANY = 1_000  # maximum number of cached sets of names


@work_pipe("rename_fields")
class FieldRenamer(Step):
    """Renames fields (functional name: ``rename_fields``).

    No field is loaded. Other fields do not change.

    Args:
        renames: The new and the old name of each field, `x="jpg"`. Of several old names, `x="jpg;jpeg;png"`, the first
            one that a sample has is renamed, as in webdataset. `y="json.label"` makes a field of the entry "label" of
            the field `json`, which is kept.

    Raises:
        FieldError: A sample has none of the old names, or already has a field of the new name. If only some samples of
            a shard lack the field, reading it raises DataError instead.

    Example:
        >>> kdp.from_dataset([("a.jpg", 0)], "jpg cls").rename_fields(x="jpg;png", y="cls").select("x y")[0]
        ('a.jpg', 0)
    """

    def __init__(self, **renames: str) -> None:
        if not renames:
            raise ValueError('`rename_fields` must be given at least one name, like `x="jpg;png"`.')
        for new, old in renames.items():
            check_type(new, old, str, 'one or several old names, like "jpg;png"')
        self._renames = {new: [name.strip() for name in old.split(";")] for new, old in renames.items()}
        renamed = {new: tuple(names) for new, names in self._renames.items()}
        read = frozenset(name for names in renamed.values() for name in names)
        self.traits = Traits(reads=read, changes=frozenset(), renames=renamed)
        self._orders: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # by the original names of the fields

    def change(self, block: Block) -> None:
        fields = block.fields
        is_whole = not block.lacking[0]
        known = tuple(block.fields)
        if (order := self._orders.get(known)) is not None:
            renamed = {new: fields[name] for new, name in order}
            # Samples refer to this dictionary, so it is modified in place.
            fields.clear()
            fields.update(renamed)
            return
        columns = dict[str, Column]()
        used = set[str]()
        for new, names in self._renames.items():
            for old in names:
                if old in fields:
                    used.add(old)
                    columns[new] = fields[old]
                    break
                if (entry := entry_column(block, old)) is not None:
                    is_whole = False
                    columns[new] = entry
                    break
            else:
                sample = block.sample()
                missing = sample.missing(names)
                columns[new] = missing or reject_field(";".join(names), f"Sample {sample.key!r}", fields)
        for old in used:
            del fields[old]
        for new, column in columns.items():
            if new in fields:
                raise FieldError(
                    f"Sample {block.sample().key!r} already has a field {new!r}, which `rename_fields` would "
                    "replace. Choose another name, or rename that field, too."
                )
            fields[new] = column
        if is_whole and len(self._orders) < _MANY:
            old_names = {new: next(old for old in names if old in known) for new, names in self._renames.items()}
            self._orders[known] = [(name, old_names.get(name, name)) for name in fields]

    def fingerprint(self) -> Any:
        return self._renames

    def check(self, known: frozenset[str]) -> None:
        renamed = {
            next((name for name in names if name in known or field_of(name, known)), None)
            or reject_field(";".join(names), "The source", known, _DIRECTION if set(self._renames) & known else "")
            for names in self._renames.values()
        }
        taken = next((new for new in self._renames if new in known - renamed), None)
        if taken is not None:
            raise FieldError(
                f"The source already has a field {taken!r}, which `rename_fields` would replace. "
                "Choose another name, or rename that field, too."
            )


@work_pipe("record_ctx")
class CtxRecorder(Step):
    """Records the parameters of all following transforms in `sample.ctx` (functional name: ``record_ctx``).

    Each entry is plain data under the name of the operation: `ctx["random_resized_crop"] == {"top": 3, ...}`. The
    second operation of the same name is `random_resized_crop_2`. An entry is recorded when the transform runs, which is
    when its field is read. For callables that draw random numbers without recording parameters, the entry `draw`
    contains the origin of the numbers: the seed, the epoch and the ordinal, which is the position of the sample in the
    order of the epoch.

    Source: KappaData's ctx.

    Example:
        >>> def shift(x, ctx, rng):
        ...     ctx["shift"] = int(rng.integers(5))
        ...     return x + ctx["shift"]
        >>> x, ctx = kdp.from_dataset([(10, 0)]).record_ctx().transform("x", shift).select("x", return_ctx=True)[0]
        >>> x[0] == 10 + ctx["shift"]
        True
    """

    traits = Traits(reads=frozenset(), changes=frozenset())

    def change(self, block: Block) -> None:
        block.is_recording = True


_DIRECTION = 'Write the new name first: `.rename_fields(new="old")`.'
_SPECIAL: dict[str, Callable[[Sample], Any]] = {
    "index": lambda sample: sample.index,
    "key": lambda sample: sample.key,
    "ordinal": lambda sample: sample.ordinal,
    "is_padding": lambda sample: sample.draw.is_padding,
    "ctx": lambda sample: dict(sample.ctx),
}
_CTX = "ctx."


@work_pipe("select")
class Selector(Step):
    """Turns samples into tuples or dictionaries of some of their fields (functional name: ``select``).

    No other field is loaded.

    Args:
        mode: The names of the fields in order, in one string: "x y". Besides fields, there are `key`, `index` (the
            position in the source), `ordinal` (the position in the dealt epoch), `is_padding`, `ctx`, `ctx.NAME` (one
            entry of the ctx) and `ctx.NAME.PART`. A field with such a name takes precedence. With `as_dict`, parts can
            be renamed: "pixel_values=x labels=y".
        return_ctx: Whether to return `((x, y), ctx)`, where ctx holds the parameters recorded by operations on these
            fields.
        as_dict: Whether to return dictionaries, `{"x": x, "y": y}`, instead of tuples. `collate_samples` makes a
            dictionary of batches from them.
        bare: Whether to return the value of a single field itself: `y` instead of `(y,)`.

    Raises:
        FieldError: The field does not exist.
        ValueError: Two parts of a dictionary have the same name; a part of a tuple is renamed; or `bare` is used with
            several fields or with `as_dict`.

    Source: KappaData's ModeWrapper.

    Example:
        >>> kdp.from_dataset([("a", 7)]).select("y key")[0]
        (7, '0')
        >>> kdp.from_dataset([("a", 7)]).select("labels=y key", as_dict=True)[0]
        {'labels': 7, 'key': '0'}
        >>> kdp.from_dataset([("a", 7)]).select("y", bare=True)[0]
        7
    """

    def __init__(self, mode: str, return_ctx: bool = False, *, as_dict: bool = False, bare: bool = False) -> None:
        given: Any = mode
        if not isinstance(given, str):
            is_list = is_sequence(given) and all(isinstance(name, str) for name in given)
            hint = f" Write `.select({' '.join(given)!r})`." if is_list else ""
            raise TypeError(f"`select` takes names in one string, like `.select('x y')`, but got {given!r}.{hint}")
        if not mode.split():
            raise ValueError(must_be("mode", 'at least one name, like "x y"', mode))
        check_type("return_ctx", return_ctx, bool, "True or False", 'Names go into one string: "x y".')
        if "," in mode:
            spaced = " ".join(mode.replace(",", " ").split())
            raise ValueError(
                f"`select` takes names separated by spaces, but got {mode!r}. Write `.select({spaced!r})`."
            )
        if check_flag("as_dict", as_dict) and check_flag("bare", bare):
            raise ValueError(must_be("bare", "False if `as_dict` is True", bare, "Choose one of the two."))
        if check_flag("bare", bare) and len(mode.split()) > 1:
            raise ValueError(must_be("mode", "a single name if `bare` is True", mode, "Omit `bare` to get a tuple."))
        if "=" in mode and not as_dict:
            hint = "The parts of a tuple have no names: add `as_dict=True`."
            raise ValueError(must_be("mode", 'names like "x y"', mode, hint))
        pairs = [name.rpartition("=") for name in mode.split()]
        self.names = tuple(field for _, _, field in pairs)
        labels = tuple(label if equals else field for label, equals, field in pairs)
        if as_dict and (len(set(labels)) < len(labels) or not all(labels) or not all(self.names)):
            raise ValueError(must_be("mode", 'different names, like "x y" or "pixel_values=x labels=y"', mode))
        self.return_ctx = return_ctx
        self.form = ItemForm(labels, return_ctx, "dict" if as_dict else "bare" if bare else "tuple")
        self.traits = Traits(gives="items", item_form=self.form, changes=frozenset())

    def change(self, block: Block) -> None:
        """Leave the samples unchanged, because `items_of` makes the items."""

    def __call__(self, sample: Sample) -> Any:
        return self.items_of(sample.block.only(sample.number))[0]

    def items_of(self, block: Block) -> Sequence[Any]:
        block.drop_inputs()
        # Reading fields records entries of the ctx, so it is read last.
        columns = {name: _values(block, name) for name in sorted(self.names, key="ctx".__eq__)}
        parts = [columns[name] for name in self.names]
        if self.form.kind == "bare":
            items = list(parts[0])
        elif self.form.kind == "tuple":
            items = list(zip(*parts, strict=True))
        else:
            items = [dict(zip(self.form.names, values, strict=True)) for values in zip(*parts, strict=True)]
        if self.return_ctx:
            items = [(item, dict(sample.ctx)) for item, sample in zip(items, block.samples(), strict=True)]
        return items

    def fingerprint(self) -> Any:
        """Return the arguments that affect the items; for tuples, in the format of older states."""
        parts: dict[str, Any] = {"names": self.names, "return_ctx": self.return_ctx}
        return parts if self.form.kind == "tuple" else {**parts, "form": tuple(self.form)}

    def check(self, known: frozenset[str]) -> None:
        for name in self.names:
            if name not in known and name not in _SPECIAL and not name.startswith(_CTX):
                reject_field(name, "The source", known)


def _values(block: Block, name: str) -> Sequence[Any]:
    if name not in block.fields:
        if name in _SPECIAL:
            return _read_each(block, _SPECIAL[name])
        if name.startswith(_CTX):
            first, *within = name.removeprefix(_CTX).split(".")
            return _read_each(block, lambda sample: _entry_of(sample.recorded(first), within))
    return block.values(name)


def _read_each(block: Block, read: Callable[[Sample], Any]) -> list[Any]:
    """Return the result of a function for each sample. Chains that the function reads use that sample's random key."""
    values = []
    holder = row_key()
    for sample in block.samples():
        if holder is not None:
            holder.key = sample.draw
        values.append(read(sample))
    return values


def _entry_of(entry: Any, within: Sequence[str]) -> Any:
    for part in within:
        if not isinstance(entry, Mapping) or part not in entry:
            reject_field(part, "That entry of the ctx", entry if isinstance(entry, Mapping) else ())
        entry = entry[part]
    return entry
