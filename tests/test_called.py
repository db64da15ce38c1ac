"""How a pipe was called, as text: short, without secrets, and without calling anything of the user's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.call_text import CALLED, arguments_of, masked, shown_value
from kdpipes.core.fingerprint import fingerprint


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
        ("redis://:p@ss@host/0", "redis://***@host/0"),
        ("zip://a/b.txt::https://u:p@s/s@host/a", "zip://a/b.txt::https://***@host/a"),
        ("https://user@host:80/a", "https://***@host:80/a"),
        ("Authorization: Token abcdef", "Authorization: Token ***"),
        ("Cookie: id=abc; more=def", "Cookie: ***"),
        ("passphrase=abc pwd: def", "passphrase=*** pwd: ***"),
        (
            "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----",
            "-----BEGIN PRIVATE KEY-----***-----END PRIVATE KEY-----",
        ),
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


@pytest.mark.parametrize("name", ["private_key", "pwd", "passphrase", "X-Api-Key", "session_cookie", "db_pass"])
@pytest.mark.parametrize("value", ["abc", b"abc", ["abc"], ("abc",), {"any": "abc"}, Path("abc")])
def test_under_the_name_of_a_secret_nothing_but_numbers_is_shown(name: str, value: Any) -> None:
    assert shown_value({name: value}) == f"{{'{name}': ***}}"
    assert shown_value({name.encode(): value}).endswith(": ***}")


def test_a_secret_collection_is_masked_whole_everywhere() -> None:
    class Table:
        def __init__(self, password: Any, num_tokens: int = 0) -> None:
            self.password, self.num_tokens = password, num_tokens

    assert shown_value(Table(("x",), 3)) == "Table(password=***, num_tokens=3)"
    assert shown_value({"token": {"type": "account", "private_key": "MIIE"}}) == "{'token': ***}"
    assert shown_value({"headers": {"X-Api-Key": "k"}}) == "{'headers': {'X-Api-Key': ***}}"


def test_what_is_only_named_like_a_secret_is_shown() -> None:
    assert shown_value({"tokenizer": "words", "key": "k", "token_of": len}) == (
        "{'tokenizer': 'words', 'key': 'k', 'token_of': len}"
    )
    assert shown_value({"tokens": np.zeros(3), "secret": None}) == "{'tokens': <float64 [3]>, 'secret': None}"


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


def test_functions_and_objects_are_named_but_not_called() -> None:
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


def test_arguments_travel_with_copies_without_effect() -> None:
    one, other = (kdp.from_dataset([(1, 0)], class_names=["a"]) for _ in range(2))
    assert vars(pickle.loads(pickle.dumps(one)))[CALLED] == ("[(1, 0)]", "class_names=['a']")
    before = fingerprint(one)
    vars(one).pop(CALLED)
    assert fingerprint(one) == fingerprint(other) == before
    dealt = [one.select("x").deal(batch_size=1), one.select("x").deal(1)]
    assert fingerprint(dealt[0]) == fingerprint(dealt[1])
    collated = [pipe.collate_samples() for pipe in dealt]
    vars(collated[1]).pop(CALLED)
    assert fingerprint(collated[0]) == fingerprint(collated[1])
