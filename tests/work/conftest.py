"""A source whose columns alone can be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kdpipes as kdp


class OnlyColumns(kdp.MapPipe):
    """Columns that can be read, samples that cannot even be made."""

    def __len__(self) -> int:
        return 2

    def fetch(self, index: int) -> kdp.Sample:
        raise OSError("a sample was made")

    def column(self, name: str) -> Any:
        return np.array([f"{name}0", f"{name}1"])


@pytest.fixture
def only_columns() -> kdp.MapPipe:
    """A source whose samples are not to be made."""
    return OnlyColumns()
