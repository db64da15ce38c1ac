"""How a pipe was called, as text: short, without secrets, and without calling anything of the user's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes._called import CALLED, arguments_of, masked, shown_value
from kdpipes._fingerprint import fingerprint


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:pa/ss@bucket/a.tar", "s3://***@bucket/a.tar"),
        ("redis://:hunter2@host:6379/0", "redis://***@host:6379/0"),
        ("https://user@host/a", "https://***@host/a"),
        ("simplecache::https://u:p@host/a", "simplecache::https://***@host/a"),
        ("https://host/a.tar?X-Amz-Signature=1f&X-Amz-Expires=60", "https://host/a.tar?***"),
        ("az://box/a.tar?sv=1&sig=abc%3D", "az://box/a.tar?***"),
        ("s3://bucket/a-??.tar", "s3://bucket/a-??.tar"),
        ("s3://bucket/a@b-{000..127}.tar", "s3://bucket/a@b-{000..127}.tar"),
        ("curl -H 'Authorization: Bearer abc.def' x", "curl -H 'Authorization: Bearer ***' x"),
        ("token=abc&n=3", "token=***&n=3"),
    ],
)
def test_what_must_not_be_shown_is_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert shown_value(text) == repr(shown)


def test_secrets_are_masked_by_their_names() -> None:
    assert shown_value({"secret": "abc", "key": "k", "n": 1}) == "{'secret': ***, 'key': 'k', 'n': 1}"
    pipe = IterableWrapper([1]).map(len)
    pipe.password = "abc"
    assert "abc" not in repr(list(arguments_of(pipe)))

    class Client:
        def __init__(self, access_key: str, region: str = "x") -> None:
            self._access_key, self.region = access_key, region

    assert shown_value(Client("abc", "y")) == "Client(access_key=***, region='y')"


def test_values_are_short_whatever_their_size() -> None:
    assert shown_value(list(range(10**6))) == "[0, 1, 2, 3, 4, 5, … 1,000,000 in all]"
    assert shown_value(np.zeros((3, 4), np.uint8)) == shown_value(torch.zeros(3, 4, dtype=torch.uint8))
    assert shown_value(np.zeros((3, 4), np.uint8)) == "<uint8 [3, 4]>"
    assert len(shown_value("a" * 10**6)) < 80
    assert shown_value(Path("a/b")) == "'a/b'"
    assert shown_value((1,)) == "(1,)"
    nested: list[Any] = []
    nested.append(nested)
    assert shown_value(nested) == "[[[[…]]]]"


def test_functions_and_objects_are_named_and_nothing_of_theirs_is_called() -> None:
    class Loud:
        size = 3

        def __init__(self, size: int = 3, other: int = 0) -> None:
            self.size, self._other = size, other

        def __repr__(self) -> str:
            raise AssertionError("was called")

    assert shown_value([Loud(), Loud(4), Loud(4, 5)]) == "[Loud(), Loud(size=4), Loud(size=4, other=5)]"
    assert shown_value(lambda x: x) == "lambda"
    assert shown_value(kdp.RandomResizedCrop(8, scale=(0.5, 1.0))) == "RandomResizedCrop(size=(8, 8), scale=(0.5, 1.0))"
    assert shown_value(int) == "int"


def test_arguments_travel_with_copies_and_make_no_difference_to_a_chain() -> None:
    one, other = (kdp.from_dataset([(1, 0)], class_names=["a"]) for _ in range(2))
    assert vars(pickle.loads(pickle.dumps(one)))[CALLED].arguments == ("[(1, 0)]", "class_names=['a']")
    before = fingerprint(one)
    vars(one).pop(CALLED)
    assert fingerprint(one) == fingerprint(other) == before
    dealt = [one.select("x").deal(batch_size=1), one.select("x").deal(1)]
    assert fingerprint(dealt[0]) == fingerprint(dealt[1])
    collated = [pipe.collate_samples() for pipe in dealt]
    vars(collated[1]).pop(CALLED)
    assert fingerprint(collated[0]) == fingerprint(collated[1])
