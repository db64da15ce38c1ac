"""`class_counts`: of an indexed pipe or of labels, and of nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kdpipes as kdp


def test_pipes_and_labels_are_counted() -> None:
    pipe: Any = kdp.from_dataset([("a", 1), ("b", 0), ("c", 1)])
    assert kdp.class_counts(pipe) == kdp.class_counts(pipe.column("y")) == kdp.class_counts([1, 0, 1]) == {0: 1, 1: 2}
    assert kdp.class_counts(np.array(["cat", "dog", "cat"])) == {"cat": 2, "dog": 1}
    assert kdp.class_counts([]) == {}


def test_an_array_is_counted_without_a_loop_over_it() -> None:
    class Labels(np.ndarray[Any, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("10^7 labels are no list")

    assert kdp.class_counts(np.array([1, 0, 1]).view(Labels)) == {0: 1, 1: 2}


@pytest.mark.parametrize("wrong", [3, (label for label in [1, 2]), [(1, 0), (2, 1)], torch.zeros(2, 2), "cat", [[1]]])
def test_anything_else_is_rejected(wrong: Any) -> None:
    with pytest.raises(TypeError, match="`labels` must be an indexed pipe with labels `y`"):
        kdp.class_counts(wrong)
    with pytest.raises(TypeError, match="`labels` must be an indexed pipe"):
        kdp.class_counts(kdp.from_dataset([("a", 1)]).deal(batch_size=1))
