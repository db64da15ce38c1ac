"""Fingerprints: the same in every process for the same chain, another one for what changes its items."""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable, ItemsView
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.fingerprint import digest, fingerprint, hash_value
from kdpipes.core.shared import Shared
from tests.hashes import fingerprints
from tests.torchdata_parts import SampleMultiplexer, needs_torchdata

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")

SCRIPT = """
import enum, functools, re
from collections import OrderedDict, deque
from pathlib import Path
import numpy as np, torch
import kdpipes as kdp
from kdpipes.core.fingerprint import fingerprint
from tests.hashes import fingerprints
from kdpipes.core.fingerprint import fingerprint

class Colour(enum.Enum):
    RED = 1

class Plain:
    def __init__(self, *parts):
        self.parts, self.names = parts, {"x", "y", "z"}
    def __call__(self, x):
        return x
    def method(self, x):
        return x in {"p", "q", "r"}

class Slotted:
    __slots__ = ("a", "b")
    def __init__(self):
        self.a, self.b = {"1", "2", "3"}, Plain(1)

def closing(over):
    return lambda x: (x, over, [y in ("a", "b") for y in over])

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

class Linked:
    def __init__(self, name):
        self.name, self.others = name, set()

linked = [Linked(name) for name in "abcd"]
for one, other in [(0, 1), (1, 2), (2, 0), (0, 3), (3, 0)]:
    linked[one].others.add(linked[other])

path = Path("data/birds")
hash(path)
values = {
    "cycles in sets": linked[0],
    "cycles as keys": {one: one.others for one in linked},
    "strings": {"a", "b", "c", "d"},
    "frozen": frozenset({1, "x", (2, "y")}),
    "sets_in_sets": {frozenset({"a", "b", "c"}), frozenset({"d", "e", "f"})},
    "objects_in_sets": {len, Plain, closing},
    "dictionary": dict.fromkeys({"a", "b", "c"}, 1),
    "array": np.arange(6).reshape(2, 3),
    "objects": np.array([None, {"a", "b"}], dtype=object),
    "tensor": torch.arange(3),
    "lambda": lambda x, y={"a", "b", "c"}: x in {"d", "e", "f"},
    "closure": closing({"a", "b", "c"}),
    "decorated": decorated(closing(1)),
    "partial": functools.partial(closing, over={"a", "b"}),
    "method": Plain({"g", "h", "i"}).method,
    "object": Plain(Slotted(), Colour.RED, np.float32(1)),
    "class": Plain,
    "enum": Colour.RED,
    "regex": re.compile("a+"),
    "path": path,
    "queue": deque([1, 2]),
    "nothing": object(),
    "module": np,
}
for name, value in values.items():
    try:
        print(name, fingerprint(value))
    except Exception as error:
        print(name, repr(error))
chain = kdp.from_dataset([(1, 0)]).transform("x", Plain(1), closing({"a", "b"})).select("x").deal(1).map(len)
print("chain", *fingerprints(chain))
"""


def test_another_process_with_another_hash_seed_finds_the_same() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed},
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, other = (run.communicate(timeout=60)[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(one) == 24
    assert [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1] or "Error" in pair[0]] == []


class Holder:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


class Slotted:
    __slots__ = ("__hidden",)

    def __init__(self, value: Any) -> None:
        self.__hidden = value


def adding(number: int) -> Callable[..., Any]:
    return lambda x: x + number


PAIRS: dict[str, tuple[Any, Any]] = {
    "numbers": (1, 2),
    "a number and its text": (1, "1"),
    "a number and a truth": (1, True),
    "arrays": (np.arange(3), np.arange(1, 4)),
    "objects without dimensions": (np.array(None, dtype=object), np.array(1, dtype=object)),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "dtypes": (np.zeros(2, np.int64), np.zeros(2)),
    "tensors": (torch.arange(3), torch.arange(1, 4)),
    "shapes of tensors": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtypes of tensors": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "closures": (adding(1), adding(2)),
    "code": (lambda x: x + 1, lambda x: x - 1),
    "inner code": (lambda xs: [x + 1 for x in xs], lambda xs: [x - 1 for x in xs]),
    "names": (lambda x: x.real, lambda x: x.imag),
    "defaults": (lambda x=1: x, lambda x=2: x),
    "keyword defaults": (lambda *, x=1: x, lambda *, x=2: x),
    "partials": (functools.partial(pow, 1), functools.partial(pow, 2)),
    "keywords of partials": (functools.partial(sorted, reverse=True), functools.partial(sorted, reverse=False)),
    "methods": (Holder(1).method, Holder(2).method),
    "builtin functions": (abs, max),
    "builtin methods": (str.upper, str.lower),
    "classes": (int, float),
    "objects": (Holder([1, [2]]), Holder([1, [3]])),
    "hidden slots": (Slotted(1), Slotted(2)),
    "getters of items": (operator.itemgetter(0), operator.itemgetter(1)),
    "getters of attributes": (operator.attrgetter("a"), operator.attrgetter("b")),
    "patterns": (re.compile("a"), re.compile("b")),
    "types of torch": (torch.float32, torch.float16),
    "types of numpy": (np.dtype("f4"), np.dtype("f8")),
    "functions of numpy": (np.sin, np.cos),
    "functions of torch": (torch.sin, torch.cos),
    "slices": (slice(1), slice(2)),
    "ranges": (range(10_000), range(1, 10_001)),
    "dates": (date(2020, 1, 1), date(2021, 1, 1)),
    "queues": (deque([1]), deque([2])),
    "sets": ({"a", "b"}, {"a", "c"}),
    "dictionaries": ({"a": 1}, {"a": 2}),
    "keys": ({1: 0}, {"1": 0}),
    "nesting": ([[1], [2]], [[1, 2]]),
    "a list that ends otherwise": ([0] * 1000, [0] * 1001),
    "long integers": (10**5000, 10**5000 + 1),
    "lists of long integers": ([10**5000], [10**5000 + 1]),
    "what mappings hold": ({"a": {"b": {1}}}, {"a": {"b": {2}}}),
    "which key has which value": ({"a": [1], "b": [2]}, {"a": [2], "b": [1]}),
    "tuples in sets": ({(1, "a"), (2, "b")}, {(1, "b"), (2, "a")}),
    "dates in arrays": (np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-02"], "M8[D]")),
    "numbers of numpy": (np.float32(1), np.float64(1)),
    "strided arrays": (np.arange(12).reshape(3, 4)[:, ::2], np.arange(12).reshape(3, 4)[:, 1::2]),
    "small floats": (torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)),
    "conjugates": (torch.tensor([1j]).conj(), torch.tensor([1j])),
    "modules of torch": (torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)),
}


@pytest.mark.parametrize("what", PAIRS)
def test_what_differs_has_another_fingerprint(what: str) -> None:
    one, other = PAIRS[what]
    assert fingerprint(one) != fingerprint(other)


def test_what_is_equal_has_the_same_fingerprint() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint(OrderedDict(a=1, b=2)) == fingerprint(OrderedDict(b=2, a=1))
    assert fingerprint({"a", "b"}) == fingerprint({"b", "a"})
    assert fingerprint(np.arange(6)[::2]) == fingerprint(np.arange(0, 6, 2))
    assert fingerprint(np.asfortranarray(np.ones((2, 3)))) == fingerprint(np.ones((2, 3)))
    assert fingerprint(torch.arange(6)[::2]) == fingerprint(torch.arange(0, 6, 2))
    assert fingerprint(torch.ones(2, requires_grad=True)) == fingerprint(torch.ones(2))
    assert fingerprint(adding(1)) == fingerprint(adding(1))
    assert fingerprint(Holder(Holder(adding(1)))) == fingerprint(Holder(Holder(adding(1))))
    assert fingerprint(Holder(threading.Lock())) == fingerprint(Holder(threading.Lock()))
    assert fingerprint(Holder(object())) == fingerprint(Holder(object()))


def test_arrays_of_equal_entries_have_the_same_fingerprint() -> None:
    fields = np.dtype([("a", "i4"), ("b", "O")])
    for array in (
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(5)[::-1],
        np.broadcast_to(np.array(1.5), (3, 4)),
        np.zeros((0, 3)),
        np.array(7),
        np.array(["a", "bc"]),
        np.array([(1, {"x", "y"})], dtype=fields),
        np.array([[{1}, None], ["a", 2]], dtype=object).T,
    ):
        assert fingerprint(array) == fingerprint(array.copy(order="C"))
    assert fingerprint(torch.tensor([1j]).conj()) == fingerprint(torch.tensor([complex(0, -1)]))


def test_it_does_not_count_how_often_an_object_is_met() -> None:
    one = Holder([1])
    assert fingerprint([one, one]) == fingerprint([one, Holder([1])])
    assert fingerprint([{1: {2}}] * 2) == fingerprint([{1: {2}}, {1: {2}}])


def test_memory_addresses_do_not_count() -> None:
    kept = [Holder(number) for number in range(100)]
    assert fingerprint({Holder(1)}) == fingerprint({Holder(1)})
    assert fingerprint({adding(1): 1, adding(2): 2}) == fingerprint({adding(1): 1, adding(2): 2})
    assert len(kept) == 100


def test_what_an_object_remembers_of_its_use_does_not_count() -> None:
    path = Path("data") / "birds"
    before = fingerprint(path)
    assert str(path)
    assert hash(path)
    assert fingerprint(path) == before


class Watched(dict[str, Any]):
    """A dictionary that is not to be read again and again."""

    num_reads = 0

    def items(self) -> ItemsView[str, Any]:
        Watched.num_reads += 1
        assert Watched.num_reads < 1000
        return super().items()


def test_objects_that_know_each_other_are_read_once() -> None:
    everyone: dict[str, Watched] = {name: Watched() for name in "abc"}
    for one in everyone.values():
        one.update(everyone)
    Watched.num_reads = 0
    assert fingerprint(everyone)


class Person:
    """Knows others, who know it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.friends: set[Person] = set()
        self.first: Person | None = None


def a_ring(names: str, steps: tuple[int, ...] = (1,)) -> list[Person]:
    people = [Person(name) for name in names]
    for place, one in enumerate(people):
        one.friends = {people[(place + step) % len(people)] for step in steps}
        one.first = people[0]
    return people


def test_where_a_cycle_is_entered_does_not_count() -> None:
    people, same = a_ring("abcdef", (1, 2)), a_ring("abcdef", (1, 2))
    assert fingerprint({*people}) == fingerprint({*same[::-1]})
    assert fingerprint({one.name: one for one in people}) == fingerprint({one.name: one for one in same[::-1]})
    assert fingerprint(people) != fingerprint(people[::-1])


def test_each_change_in_a_cycle_counts_however_far_away() -> None:
    names = "a" * 100
    known = fingerprint(a_ring(names)[0])
    assert fingerprint(a_ring(names)[0]) == known
    assert fingerprint(a_ring(names[:50] + "b" + names[51:])[0]) != known
    assert fingerprint(a_ring(names[:-1])[0]) != known
    assert fingerprint(a_ring(names, (1, 2))[0]) != known


def test_what_is_nested_deeply_has_a_fingerprint() -> None:
    def nested(number: int) -> Any:
        held: Any = {number}
        for _ in range(50_000):
            held = [held]
        return held

    known = fingerprint(nested(1))
    assert known == fingerprint(nested(1)) != fingerprint(nested(2))


class Read:
    """Counts how often it is asked for what it is."""

    count = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def fingerprinted(self) -> int:
        Read.count += 1
        return self.number


def closing_over(value: Any) -> Callable[[], Any]:
    return lambda: value


LARGE: dict[str, Callable[[int], Any]] = {
    "dictionary of dictionaries": lambda n: {i: {"id": i, "of": Read(i)} for i in range(n)},
    "closure": lambda n: closing_over({i: {"id": i, "of": Read(i)} for i in range(n)}),
    "attribute": lambda n: Holder({i: {"id": i, "of": Read(i)} for i in range(n)}),
    "keys of several types": lambda n: {(i if i % 2 else str(i)): {"of": Read(i)} for i in range(n)},
    "objects as keys": lambda n: {Read(i): {i} for i in range(n)},
    "set": lambda n: {(i, Read(i)) for i in range(n)},
    "nested": lambda n: {i: {j: {(i, Read(i))} for j in range(1)} for i in range(n)},
    "people": lambda n: [Holder([one, Read(0)]) for one in a_ring("a" * n, (1, 2, 3))],
}


@pytest.mark.parametrize("what", LARGE)
@pytest.mark.parametrize(
    "hashed", [digest, functools.partial(hash_value, globals=True)], ids=["digest", "with_globals"]
)
def test_twice_as_much_takes_twice_the_work(what: str, hashed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 0

    class Counting:
        def __init__(self, data: Any = b"", *, digest_size: int) -> None:
            self.hash = blake2b(digest_size=digest_size)
            self.update(data)

        def update(self, data: Any) -> None:
            nonlocal num_bytes
            num_bytes += len(data)
            self.hash.update(data)

        def digest(self) -> bytes:
            return self.hash.digest()

    blake2b = hashlib.blake2b
    work = []
    for size in (200, 400):
        value = LARGE[what](size)
        with monkeypatch.context() as patch:
            patch.setattr(hashlib, "blake2b", Counting)
            num_bytes, Read.count = 0, 0
            hashed(value)
        work.append((num_bytes, Read.count))
    (bytes_of_one, reads_of_one), (bytes_of_two, reads_of_two) = work
    assert reads_of_one <= 200
    assert reads_of_two == 2 * reads_of_one
    assert 1.5 * bytes_of_one < bytes_of_two < 2.5 * bytes_of_one


def test_arrays_are_hashed_without_copies() -> None:
    array = np.zeros((4, 1 << 22), dtype=np.uint8)
    for value in (array, Shared(array), torch.from_numpy(array), array[:, ::2], array.T):
        tracemalloc.start()
        try:
            hash_value(value, globals=True)
            assert tracemalloc.get_traced_memory()[1] < array.nbytes / 4
        finally:
            tracemalloc.stop()


def test_a_range_is_hashed_by_its_ends() -> None:
    assert len({digest(range(stop)) for stop in (10**18, 10**18 + 1)}) == 2


def test_functions_that_call_each_other_have_a_fingerprint() -> None:
    def make(step: int) -> Callable[[int], int]:
        def down(x: int) -> int:
            return x if x <= 0 else up(x - step)

        def up(x: int) -> int:
            return down(x - step)

        return down

    assert fingerprint(make(1)) == fingerprint(make(1)) != fingerprint(make(2))


def peeked_chains() -> list[Any]:
    one, other = IterableWrapper(range(8)).fork(2)
    even, odd = IterableWrapper(range(8)).shuffle().demux(2, lambda x: x % 2)
    plan = kdp.from_dataset([(n, n % 2) for n in range(8)]).filter_classes(valid=[0, 1]).oversample()
    return [
        plan.repeat_until(min_size=20).subset(range(12)).select("x y").deal(2, shuffle=True),
        kdp.from_ids(list("abcd"), [0, 1, 0, 1], load=len).filter_classes(valid=[0]).deal(1),
        IterableWrapper(range(8)).shuffle().header(6).to_samples(fields="x").deal(2).batch(2),
        one.zip(other).to_samples(fields="x y").deal(2),
        even.concat(odd).to_samples(fields="x").deal(2),
    ]


@needs_torchdata
@pytest.mark.parametrize("number", range(5))
def test_a_chain_that_was_looked_at_is_what_it_was(number: int) -> None:
    pipe, looked_at = peeked_chains()[number], peeked_chains()[number]
    list(looked_at)
    next(iter(looked_at))
    assert kdp.Loader(looked_at).state_dict()["pipes"] == kdp.Loader(pipe).state_dict()["pipes"]


def test_every_pipe_of_a_chain_counts_wherever_it_is_kept() -> None:
    def mixed(size: int) -> Any:
        source = IterableWrapper(range(size)).map(abs)
        return SampleMultiplexer({source: 1.0, IterableWrapper([0]): 2.0}, seed=1)

    assert fingerprints(mixed(3)) == fingerprints(mixed(3)) != fingerprints(mixed(4))


def test_a_plan_needs_no_sample_for_its_fingerprint() -> None:
    namespace = SimpleNamespace(num_reads=0)

    class Counted(kdp.SampleSource):
        def __len__(self) -> int:
            return 4

        def getitem_x(self, index: int) -> int:
            namespace.num_reads += 1
            return index

    assert fingerprints(Counted().select("x").deal(1))
    assert not namespace.num_reads


def test_the_code_of_a_users_class_counts() -> None:
    def transform(code: str) -> Any:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(f"class Crop:\n    def __call__(self, x):\n        return {code}\n", names)
        return kdp.from_dataset([(1, 0)]).transform("x", names["Crop"]())

    one, same, other = (fingerprints(transform(code)) for code in ("x + 1", "x + 1", "x + 2"))
    assert one == same != other


def turned(how: str, value: int) -> Any:
    """Return an object of a class whose code is the same for each value, and whose results are not."""

    def decorated(function: Any) -> Any:
        return functools.wraps(function)(lambda self, x: function(self, x) + value)

    class Attribute:
        size = value

    class Static:
        shift = staticmethod(lambda x: x + value)

    class Class:
        shift = classmethod(lambda cls, x: x + value)

    class Property:
        shift = property(lambda self: value)

    class Cached:
        shift = functools.cached_property(lambda self: value)

    class Decorated:
        @decorated
        def __call__(self, x: int) -> int:
            return x

    class Remembered:
        shift = functools.cache(lambda self: value)

    class Closing:
        def __call__(self, x: int) -> int:
            return x + value

    class Inheriting(Closing):
        pass

    class Source(kdp.SampleSource):
        size = value

        def __len__(self) -> int:
            return 4

        def getitem_x(self, index: int) -> int:
            return index * self.size

    made: dict[str, Any] = {
        kind.__name__.lower(): kind
        for kind in (Attribute, Static, Class, Property, Cached, Decorated, Remembered, Closing, Inheriting, Source)
    }
    return made[how]()


@pytest.mark.parametrize(
    "how",
    "attribute static class property cached decorated remembered closing inheriting".split(),  # noqa: SIM905
)
def test_what_a_class_says_counts_like_what_its_object_says(how: str) -> None:
    assert fingerprint(turned(how, 1)) == fingerprint(turned(how, 1)) != fingerprint(turned(how, 2))


def test_an_attribute_of_a_sources_class_counts_for_caches() -> None:
    first, again, other = (fingerprint(turned("source", value).value_fingerprint()) for value in (1, 1, 2))
    assert first == again != other
