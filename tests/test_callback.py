"""What user callables are called, what they take, and that they travel."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Collection
from typing import Any

import pytest
import torch

from kdpipes.core.callback import Callback, snake_case


class RandomCrop:
    def __call__(self, image: Any, rng: Any = None) -> Any:
        return image[1:]


def to_grey(image: Any, ctx: dict[str, Any], rng: Any) -> Any:
    return image


def test_a_callback_knows_its_name_and_parameters() -> None:
    known: list[tuple[Any, str, set[str]]] = [
        (to_grey, "to_grey", {"image", "ctx", "rng"}),
        (RandomCrop(), "random_crop", {"image", "rng"}),
        (lambda x: x, "lambda", {"x"}),
        (functools.partial(to_grey, ctx={}), "to_grey", {"image", "ctx", "rng"}),
        (functools.partial(RandomCrop(), None), "random_crop", {"rng"}),
        (torch.nn.Identity(), "identity", {"input"}),
        (max, "max", set()),
    ]
    for function, name, parameters in known:
        callback = Callback("transform", function)
        assert (callback.name, repr(callback), callback.parameters) == (name, name, parameters)


def test_class_names_become_words() -> None:
    for name, words in {
        "RandomResizedCrop": "random_resized_crop",
        "HTTPServer": "http_server",
        "flip": "flip",
    }.items():
        assert snake_case(name) == words


def test_a_closure_travels_with_what_it_closes_over() -> None:
    amount = 3
    callback = Callback("transform", lambda x, *, rng=None: x + amount)
    twin = pickle.loads(pickle.dumps(callback))
    assert twin(4) == callback(4) == 7
    assert (twin.name, twin.parameters) == ("lambda", {"x", "rng"})


def test_what_cannot_be_called_is_rejected_by_the_arguments_name() -> None:
    with pytest.raises(TypeError, match=r"`load` must be a callable, but is 3 instead\."):
        Callback("load", 3)
    with pytest.raises(TypeError, match=r"Write `RandomCrop\(\.\.\.\)` to make one\."):
        Callback("transform", RandomCrop)


def test_errors_of_the_function_pass_unchanged() -> None:
    error = KeyError("heron")
    with pytest.raises(KeyError) as caught:
        Callback("label", lambda item: (_ for _ in ()).throw(error))(1)
    assert caught.value is error


def test_torch_does_not_walk_through_a_callback() -> None:
    assert not isinstance(Callback("classes", {"heron": 1}.get), Collection)
