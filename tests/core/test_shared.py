"""Shared values: one object in a process, one memory file for all spawned workers, and a plain copy elsewhere."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpipes.core.callback import Callback
from kdpipes.core.shared import PackedStrings, Shared


def _in_children(method: str, function: Callable[[Any], Any], value: Any, *, num_children: int = 1) -> list[Any]:
    """Return what `function(value)` gives in new processes. It travels by value, so it must be a lambda or local."""
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    work = Callback("work", lambda value, answers: answers.put(function(value)))
    children: list[Any] = [context.Process(target=work, args=(value, answers)) for _ in range(num_children)]
    for child in children:
        child.start()
    found = [answers.get() for _ in children]
    for child in children:
        child.join()
    return found


def _memory_files() -> set[str]:
    """Return the inodes of the memory files that this process holds open."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    mine = [link for link in links if link.is_symlink() and "memfd:kdpipes" in os.readlink(link)]  # noqa: PTH115
    return {str(link.stat().st_ino) for link in mine}


def test_a_copy_in_the_same_process_is_the_same_object() -> None:
    shared = Shared(np.arange(5))
    holder = {"labels": [shared]}
    copies = [copy.deepcopy(holder), *(kind.loads(kind.dumps(holder)) for kind in (pickle, cloudpickle))]
    assert all(twin["labels"][0] is shared for twin in copies)
    assert copy.copy(shared) is shared


def test_two_handles_of_equal_values_stay_two() -> None:
    one, other = Shared([1]), Shared([1])
    twin = pickle.loads(pickle.dumps((one, other)))
    assert (twin[0] is one, twin[1] is other, one is other) == (True, True, False)


def test_a_copy_outlives_the_original_that_is_gone() -> None:
    shared = Shared({"labels": np.arange(3)})
    payload = pickle.dumps(shared)
    del shared
    gc.collect()
    one, other = pickle.loads(payload), pickle.loads(payload)
    assert one is other
    assert one.value["labels"].tolist() == [0, 1, 2]


def test_a_forked_process_has_the_same_object() -> None:
    shared = Shared(np.arange(5))
    payload = pickle.dumps(shared)
    address = shared.value.ctypes.data
    look = lambda shared: (pickle.loads(payload) is shared, shared.value.ctypes.data == address)  # noqa: E731
    assert _in_children("fork", look, shared) == [(True, True)]


def test_processes_not_forked_map_arrays_from_one_file() -> None:
    arrays = {
        "labels": np.arange(100_000),
        "empty": np.zeros((0, 3), dtype=np.float32),
        "columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "paths": PackedStrings(["heron/1.jpg", "stork/2.jpg"]),
    }
    shared, before = Shared(arrays), _memory_files()

    def look(pair: Any) -> Any:
        import pathlib

        first, second = pair
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
        maps = [line.split() for line in lines if "memfd:kdpipes" in line]
        spans = [tuple(int(end, 16) for end in entry[0].split("-")) for entry in maps]
        labels, columns = first.value["labels"], first.value["columns"]
        return {
            "inodes": {entry[4] for entry in maps},
            "is mapped": all(any(a <= v.ctypes.data < b for a, b in spans) for v in (labels, columns)),
            "is writeable": [v.flags.writeable for v in (labels, columns)],
            "values": (int(labels.sum()), columns.tolist(), first.value["empty"].shape, list(first.value["paths"])),
            "is one handle": first is second,
        }

    found = _in_children("forkserver", look, (shared, shared), num_children=2)
    (inode,) = _memory_files() - before
    assert (
        found[0]
        == found[1]
        == {
            "inodes": {inode},
            "is mapped": True,
            "is writeable": [False, False],
            "values": (4_999_950_000, arrays["columns"].tolist(), (0, 3), ["heron/1.jpg", "stork/2.jpg"]),
            "is one handle": True,
        }
    )
    del shared
    gc.collect()
    assert inode not in _memory_files()


def test_a_pickle_loads_in_a_fresh_interpreter(interpreter: Any) -> None:
    payload = pickle.dumps([Shared(np.arange(4)), Shared(lambda x: x + 1)])
    code = "import pickle, sys; a, f = pickle.load(sys.stdin.buffer); print(a.value.tolist(), f.value(3))"
    assert interpreter.run(code, stdin=payload) == (0, "[0, 1, 2, 3] 4\n", "")


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=())).filter(lambda s: not any("\ud800" <= c <= "\udfff" for c in s))
    )
)
def test_packed_strings_read_like_a_list(strings: list[str]) -> None:
    strings = strings + [os.fsdecode(b"h\xe9ron")] * (len(strings) % 3)
    packed = PackedStrings(strings)
    assert list(packed) == strings
    assert [packed[-1 - place] for place in range(len(strings))] == strings[::-1]
    assert packed[1:] == strings[1:]
    assert packed[::-2] == strings[::-2]
    for outside in (len(strings), -len(strings) - 1):
        with pytest.raises(IndexError):
            packed[outside]


@given(parts=st.lists(st.lists(st.text(max_size=5), max_size=4), max_size=4))
def test_packed_strings_are_joined_and_taken_apart(parts: list[list[str]]) -> None:
    joined = PackedStrings.joined([PackedStrings(part) for part in parts])
    assert list(joined) == [string for part in parts for string in part]
    assert list(PackedStrings.of_arrays(*joined.arrays())) == list(joined)


def test_strings_that_end_nowhere_are_rejected() -> None:
    letters = np.frombuffer(b"ab", dtype=np.uint8)
    for ends in ([1, 3], [-1, 2], [2, 1]):
        with pytest.raises(ValueError, match="ends of the strings do not match the bytes"):
            PackedStrings.of_arrays(np.array(ends), letters)
