"""Mistakes that newcomers make: the error says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.look import image_grid

ITEMS = [(number, number % 2) for number in range(8)]


def source() -> Any:
    return kdp.from_dataset(ITEMS)


def dealt() -> Any:
    return source().select("x").deal(batch_size=4)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a share without a name": (lambda: source().take_percent(0.5), TypeError, "`to_percent=0.5` takes the first half"),
    "one unnamed argument": (lambda: source().cache_on_disk("a", "b"), TypeError, r"arguments\. Name the argument\."),
    "a function for collate_samples": (
        lambda: source().select("x").deal(batch_size=4).collate_samples(len),
        TypeError,
        r"`\.collate\(function\)`",
    ),
    "filter": (lambda: source().filter(len), AttributeError, r"use `\.filter_samples\(columns=\.\.\., keep="),
    "batch, then deal": (lambda: source().batch(2).deal(batch_size=4), kdp.ChainError, r"Remove `\.batch\(\)`"),
    "a stream in batches, then deal": (
        lambda: IterableWrapper(ITEMS).to_samples(fields="x y").select("x").batch(2).deal(batch_size=4),
        kdp.ChainError,
        r"Remove `\.batch\(\)`",
    ),
    "batch in a loader": (
        lambda: kdp.Loader(source().batch(2)),
        kdp.ChainError,
        r"End it with `\.deal\(batch_size=\.\.\.\)` in place of `\.batch\(\)`",
    ),
    "a DataLoader that shuffles batches": (
        lambda: DataLoader(dealt(), batch_size=None, shuffle=True),  # type: ignore[arg-type]
        ValueError,
        r"use `deal\(shuffle=True\)`",
    ),
    "a stream in split": (
        lambda: kdp.split(IterableWrapper(ITEMS).to_samples(fields="x y"), a=0.5, b=0.5),  # type: ignore[arg-type]
        kdp.ChainError,
        r"`kdp\.open_shards` is indexed\.$",
    ),
    "a field as an attribute": (lambda: source()[0].x, AttributeError, r'Fields are items: `sample\["x"\]`'),
    "another attribute": (lambda: source()[0].z, AttributeError, "has no attribute 'z'.$"),
    "encoded images in a grid": (lambda: image_grid([b"\xff\xd8\xff"]), TypeError, r"`\.decode_images\(\.\.\.\)`"),
    "weights of a mix": (
        lambda: source().mix([source()], weights=[1]),
        ValueError,
        "`weights` must be 2 numbers, one for each source, the first one included",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_what_to_write(name: str) -> None:
    make, kind, match = MISTAKES[name]
    with pytest.raises(kind, match=match):
        make()


def test_an_empty_choice_of_classes_warns() -> None:
    with pytest.warns(UserWarning, match=r"filter_classes\(valid=\[\]\)` keeps none of 8 samples"):
        assert len(source().filter_classes(valid=[])) == 0
