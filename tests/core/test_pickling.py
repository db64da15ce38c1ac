"""Pickles of users' functions keep what tracebacks need."""

from __future__ import annotations

import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

import kdpipes
from kdpipes.core import pickling

ROOT = Path(kdpipes.__file__).parent


def chain_of(divisor: int) -> Any:
    class Divider:
        def __call__(self, number: int) -> float:
            return self.inner()(number)

        def inner(self) -> Any:
            return lambda number: number / divisor  # shown in the traceback

    return Divider()


def test_tracebacks_of_what_was_pickled_show_their_source() -> None:
    divide = pickle.loads(pickling.dumps(chain_of(0)))
    # cloudpickle finds a class that this process pickled again, so its code is pickled by itself, too.
    inner = pickle.loads(pickling.dumps(type(chain_of(0)).inner.__code__))
    with pytest.raises(ZeroDivisionError) as caught:
        divide(1)
    assert "# shown in the traceback" in "".join(traceback.format_exception(caught.value))
    assert inner.co_filename == __file__
    assert [code.co_filename for code in inner.co_consts if hasattr(code, "co_filename")] == [__file__]


def test_functions_are_pickled_by_one_module_only() -> None:
    pattern = re.compile(r"cloudpickle\.(dumps?|Pickler|CloudPickler)\b")
    users = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if pattern.search(path.read_text())}
    assert users == {"core/pickling.py"}
