"""What the tests of transforms share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def assert_rejected(cases: Iterable[tuple[Callable[[], Any], type[Exception], str]]) -> None:
    """Assert that each call raises an error with a message."""
    for make, error, message in cases:
        with pytest.raises(error) as raised:
            make()
        assert message in str(raised.value)
