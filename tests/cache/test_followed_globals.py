"""Caches know entries by the globals that users' functions read, and not by what changes while a source is read."""

from __future__ import annotations

import sqlite3
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdpipes as kdp

opened: list[Any] = []  # what reading changes, too
PRELUDE = """
import argparse, functools, threading, math
import numpy as np
import kdpipes as kdp
from dataclasses import dataclass
from torch.nn import functional as F
"""


def in_notebook(*cells: str) -> dict[str, Any]:
    """Run cells one after the other in a module of their own, and return its globals."""
    module = types.ModuleType("a_notebook")
    sys.modules["a_notebook"] = module
    for cell in (PRELUDE, *cells):
        exec(compile(cell, f"<cell {abs(hash(cell))}>", "exec"), vars(module))
    return vars(module)


@pytest.fixture(autouse=True)
def forget_modules() -> Iterator[None]:
    """Take back the modules that a test has made."""
    before = dict(sys.modules)
    yield
    for name in ("a_notebook", "a_helper"):
        sys.modules.pop(name, None)
        if name in before:
            sys.modules[name] = before[name]


def read(function: Callable[[int], Any], folder: Path, **options: Any) -> tuple[Any, int]:
    """Return what a new cached chain gives for 3, and how many entries it found."""
    cached = kdp.from_dataset([(3, 0)]).transform("x", function).cache_on_disk(folder, **options)
    return cached[0]["x"], cached.stats().hits


CHANGES = {
    "a plain value": ("K = 2", "K = 5", "def f(x): return x * K"),
    "a list": ("K = [2]", "K = [5]", "def f(x): return x * K[0]"),
    "an array": ("K = np.full(3, 2)", "K = np.full(3, 5)", "def f(x): return int(x * K[0])"),
    "a helper": ("def g(x): return x * 2", "def g(x): return x * 5", "def f(x): return g(x)"),
    "a helper's helper": ("h = lambda x: x * 2", "h = lambda x: x * 5", "def g(x): return h(x)\ndef f(x): return g(x)"),
    "a lambda": ("K = 2", "K = 5", "f = lambda x: x * K"),
    "an inner function": ("K = 2", "K = 5", "def f(x): return [(lambda: y * K)() for y in [x]][0]"),
    "a partial": ("K = 2", "K = 5", "def g(y, x): return x * K\nf = functools.partial(g, 1)"),
    "a partial's helper": (
        "g = lambda y, x: x * 2",
        "g = lambda y, x: x * 5",
        "f = functools.partial(lambda y, x: g(y, x), 1)",
    ),
    "a default": ("g = lambda x: x * 2", "g = lambda x: x * 5", "def f(x, by=None, g=lambda x: g(x)): return g(x)"),
    "a closure": ("K = 2", "K = 5", "def make():\n  def g(x): return x * K\n  return lambda x: g(x)\nf = make()"),
    "a decorator": (
        "K = 2",
        "K = 5",
        "def deco(g):\n  @functools.wraps(g)\n  def w(x): return g(x)\n  return w\n@deco\ndef f(x):\n  return x * K",
    ),
    "a method": (
        "K = 2",
        "K = 5",
        "class C:\n  def __call__(self, x): return self.g(x)\n  def g(self, x): return x * K\nf = C()",
    ),
    "a bound method": ("K = 2", "K = 5", "class C:\n  def g(self, x): return x * K\nf = C().g"),
    "a property": (
        "K = 2",
        "K = 5",
        "class C:\n  @property\n  def by(self): return K\n  def __call__(self, x): return x * self.by\nf = C()",
    ),
    "an inherited method": (
        "class A:\n  def g(self, x): return x * 2",
        "class A:\n  def g(self, x): return x * 5",
        "class C(A):\n  def __call__(self, x): return self.g(x)\nf = C()",
    ),
    "a class": (
        "class C:\n  @staticmethod\n  def g(x): return x * 2",
        "class C:\n  @staticmethod\n  def g(x): return x * 5",
        "def f(x): return C.g(x)",
    ),
    "an object": ("class C:\n  pass\nc = C()\nc.by = 2", "c.by = 5", "def f(x): return x * c.by"),
    "a dataclass": (
        "@dataclass\nclass C:\n  by: int\n  def g(self, x): return x * self.by\nc = C(2)",
        "c = C(5)",
        "def f(x): return c.g(x)",
    ),
    "an argument of a script": (
        "args = argparse.Namespace(by=2)",
        "args = argparse.Namespace(by=5)",
        "def f(x): return x * args.by",
    ),
    "an attribute of a function": ("def g(): pass\ng.by = 2", "g.by = 5", "def f(x): return x * g.by"),
    "a cached helper": (
        "@functools.lru_cache\ndef g(x): return x * 2",
        "@functools.lru_cache\ndef g(x): return x * 5",
        "def f(x): return g(x)",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_global_makes_other_entries(what: str, tmp_path: Path) -> None:
    before, after, function = CHANGES[what]
    assert read(in_notebook(before, function)["f"], tmp_path) == (6, 0)
    assert read(in_notebook(before, function)["f"], tmp_path) == (6, 1)
    assert read(in_notebook(before, after, function)["f"], tmp_path) == (15, 0)
    assert read(in_notebook(before, function)["f"], tmp_path) == (6, 1)


SAME = {
    "another global": ("K = 2; L = 1", "L = 5", "def f(x): return x * K"),
    "an attribute of that name": ("K = 2; real = 1", "real = 7", "def f(x): return x.real * K"),
    "another argument of a script": (
        "args = argparse.Namespace(by=2, lr=1)",
        "args.lr = 2",
        "def f(x): return x * args.by",
    ),
    "a counter of its own": ("step = 0", "step = 9", "def f(x):\n  global step\n  step += 1\n  return x * 2"),
    "what it loads itself": ("g = None", "g = 2", "def f(x):\n  global g\n  g = g or 2\n  return x * g"),
    "a generator": ("rng = np.random.default_rng(0)", "rng = np.random.default_rng(1)", "def f(x): rng; return x * 2"),
    "a lock": ("lock = threading.Lock()", "lock = threading.Lock()", "def f(x):\n  with lock: return x * 2"),
    "the order of definition": ("A = [1]; B = [2]", "B = [2]; A = [1]", "def f(x): return x * A[0] * B[0]"),
}


@pytest.mark.parametrize("what", SAME)
def test_what_a_function_does_not_take_in_makes_no_other_entries(what: str, tmp_path: Path) -> None:
    before, after, function = SAME[what]
    assert read(in_notebook(before, function)["f"], tmp_path) == (6, 0)
    assert read(in_notebook(before, after, function)["f"], tmp_path) == (6, 1)


def test_functions_of_users_modules_are_followed(tmp_path: Path) -> None:
    def with_helper(by: int, other: int) -> Any:
        helper = types.ModuleType("a_helper")
        sys.modules["a_helper"] = helper
        exec(f"by = {by}\nother = {other}\ndef g(x): return x * by\ndef h(x): return other", vars(helper))
        return in_notebook("import a_helper\ndef f(x): return a_helper.g(x)")["f"]

    assert read(with_helper(2, 0), tmp_path) == (6, 0)
    assert read(with_helper(2, 1), tmp_path) == (6, 1), "which it does not call"
    assert read(with_helper(5, 0), tmp_path) == (15, 0)


def test_libraries_count_by_name_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = "def f(x): return int(np.abs(x)) * 2"
    assert read(in_notebook(function)["f"], tmp_path) == (6, 0)
    monkeypatch.setattr(np, "__version__", f"{np.__version__}+local")
    assert read(in_notebook(function)["f"], tmp_path) == (6, 1)
    monkeypatch.setattr(np, "__version__", "99.0")
    assert read(in_notebook(function)["f"], tmp_path) == (6, 0)


def test_functions_that_read_each_other_are_followed_once(tmp_path: Path) -> None:
    functions = "\n".join(f"def g{n}(x): return x * {{}} if x < 0 else g{(n + 1) % 3000}" for n in range(3000))
    ring = f"def f(x): return x * 2 if x > 0 else g0(x)\n{functions}"
    assert read(in_notebook(ring.format(*range(3000)))["f"], tmp_path) == (6, 0)
    assert read(in_notebook(ring.format(*range(3000)))["f"], tmp_path) == (6, 1)
    assert read(in_notebook(ring.format(*range(2999), -1))["f"], tmp_path) == (6, 0)


def test_what_cannot_be_hashed_is_warned_of_once_by_name(tmp_path: Path) -> None:
    cells = "import sqlite3\ndb = sqlite3.connect(':memory:')", "def f(x): db; return x * 2"
    notebooks = [in_notebook(*cells) for _ in range(3)]
    with pytest.warns(UserWarning, match=r"cannot be hashed: `db` of `f` \(Connection\).*`version=`"):
        assert read(notebooks[0]["f"], tmp_path) == (6, 0)
    assert read(notebooks[1]["f"], tmp_path) == (6, 1)
    assert read(notebooks[2]["f"], tmp_path, version=2) == (6, 0)
    opened = sqlite3.connect(":memory:")
    kdp.from_dataset([(3, 0)]).transform("x", lambda x: (opened, x)[1]).cache_in_memory()[0]["x"]
    with pytest.warns(UserWarning, match="`opened` of"):
        read(lambda x: (opened, x)[1], tmp_path)
    for database in (opened, *(notebook["db"] for notebook in notebooks)):
        database.close()  # Python 3.13 warns of one that is left open


def test_a_global_that_calls_change_is_known_by_its_first_value(tmp_path: Path) -> None:
    cells = "seen, names = {}, ['a']", "def f(x):\n  seen[x] = x\n  names.append('b')\n  return x * 2"
    namespace = in_notebook(*cells)
    assert read(namespace["f"], tmp_path) == (6, 0)
    assert read(namespace["f"], tmp_path, version="other") == (6, 0)
    assert (read(namespace["f"], tmp_path), len(namespace["names"])) == ((6, 1), 3)
    assert read(in_notebook(*cells)["f"], tmp_path) == (6, 1)
    assert read(in_notebook(*cells, "seen = {3: 3, 5: 5}")["f"], tmp_path) == (6, 0)


def test_a_global_object_that_calls_change_is_warned_of(tmp_path: Path) -> None:
    cells = "class C: calls = 0\nc = C()", "def f(x):\n  c.calls += 1\n  return x * 2"
    with pytest.warns(UserWarning, match="an object that it reads during a call"):
        assert read(in_notebook(*cells)["f"], tmp_path) == (6, 0)


def test_a_state_fits_whatever_globals_have_become() -> None:
    def chain(number: int) -> Any:
        cells = f"K = {number}", "def f(x): return x * K"
        return kdp.from_dataset([(n, 0) for n in range(8)]).transform("x", in_notebook(*cells)["f"]).select("x").deal(2)

    with kdp.Loader(chain(1)) as before, kdp.Loader(chain(2)) as after:
        batches = iter(before)
        next(batches)
        after.load_state_dict(before.state_dict())
        assert [x for batch in after for (x,) in batch] == [4, 6, 8, 10, 12, 14]


def test_workers_look_for_the_entries_that_the_main_process_made(tmp_path: Path) -> None:
    function = in_notebook("K = 2\ndef g(x): return x * K\ndef f(x): return g(x)")["f"]
    cached = kdp.from_dataset([(n, 0) for n in range(8)]).transform("x", function).cache_on_disk(tmp_path)
    assert [sample["x"] for sample in cached] == [0, 2, 4, 6, 8, 10, 12, 14]
    with kdp.Loader(cached.select("x").deal(batch_size=2), num_workers=2) as loader:
        list(loader)
    assert cached.stats()[:2] == (8, 8)


class Lazily:
    """Changes in many ways while it is read."""

    def __init__(self, path: Path, scale: int = 1) -> None:
        self.path, self.scale = path, scale
        self.file: Any = None
        self.offsets: dict[int, int] | None = None
        self.seen: dict[int, int] = {}
        self.part = Part()
        self.calls = 0

    def __len__(self) -> int:
        return 3

    def getitem_x(self, index: int) -> int:
        self.file = self.file or open_for_good(self.path)
        self.seen[index] = index
        self.calls += 1
        self.part.last = index
        self.made_late = index
        self.offsets = self.offsets or {0: 0}
        return index * self.scale + self.offsets.get(index, 0)


class Part:
    """Belongs to a source."""

    last: int


class LazySource(Lazily, kdp.SampleSource):
    """The same as a source."""


class LazyDataset:
    """The same as a dataset of torch's kind, in a wrapper."""

    def __init__(self, path: Path, scale: int = 1) -> None:
        self.inner = Lazily(path, scale)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.inner.getitem_x(index), 0


@pytest.fixture(autouse=True)
def close_files() -> Iterator[None]:
    """Close what sources have opened, which they leave open."""
    yield
    while opened:
        opened.pop().close()


def open_for_good(path: Path) -> Any:
    opened.append(path.open("rb"))
    return opened[-1]


SOURCES: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "a source": lambda path: (source := LazySource(path), source),
    "a dataset": lambda path: (kdp.from_dataset(source := Lazily(path)), source),
    "a wrapped dataset": lambda path: (kdp.from_dataset(source := LazyDataset(path)), source.inner),
}


def test_a_re_run_cell_finds_what_a_lazy_source_has_cached(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"data")
    for kind, make in SOURCES.items():
        pipe, _ = make(path)
        folder = tmp_path / kind
        for hits, source in ((0, pipe), (3, pipe), (3, make(path)[0]), (3, pipe)):
            cached = source.cache_on_disk(folder)
            assert [sample["x"] for sample in cached] == [0, 1, 2]
            assert cached.stats().hits == hits, kind
        assert cached.stats().entries in (3, 5)  # an epoch that completes the cache adds the list of samples, twice


def test_a_source_that_was_changed_on_purpose_has_other_entries(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"data")
    for kind, make in SOURCES.items():
        pipe, source = make(path)
        assert [sample["x"] for sample in pipe.cache_on_disk(tmp_path / kind)] == [0, 1, 2]
        source.scale = 5
        assert [sample["x"] for sample in pipe.cache_on_disk(tmp_path / kind)] == [0, 5, 10], kind
        source.offsets = {0: 7}
        assert [sample["x"] for sample in pipe.cache_on_disk(tmp_path / kind)] == [7, 5, 10], kind


def test_a_file_that_was_opened_before_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"data")

    class Opens(kdp.SampleSource):
        def __init__(self) -> None:
            self.file: Any = None

        def __len__(self) -> int:
            return 1

        def getitem_x(self, index: int) -> bytes:
            self.file = self.file or open_for_good(path)
            return b"x"

    early = Opens()
    assert early[0]["x"] == b"x"
    assert early.cache_on_disk(tmp_path / "cache")[0]["x"] == b"x"
    cached = Opens().cache_on_disk(tmp_path / "cache")
    assert (cached[0]["x"], cached.stats().hits) == (b"x", 1)
