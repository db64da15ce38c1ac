"""`doctor` finds each mistake that would spoil training without a message, and leaves sound chains alone."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchdata.datapipes.iter import IterableWrapper

import kdpipes as kdp

STOCK = "ignore:(Lambda|Local) function is not supported:UserWarning"


def jitter(x: int, rng: np.random.Generator) -> int:
    return x + int(rng.integers(1000))


def numbers() -> Any:
    return kdp.from_dataset([(number, number % 4) for number in range(64)])


def findings(pipe: Any) -> list[Any]:
    return list(kdp.doctor(pipe, measure=False, num_workers=0).findings)


def found(pipe: Any) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in findings(pipe)]


# Random numbers


def half(item: Any) -> bool:
    return random.random() < 0.5


def nearly_all(item: Any) -> bool:
    return torch.rand(()).item() >= 0


def seeds_itself(item: Any) -> bool:
    random.seed(item[0])
    return random.random() < 2


@pytest.mark.parametrize("draws", [half, nearly_all])
def test_unseeded_numbers_of_a_stock_pipe_are_found(draws: Any) -> None:
    items = [(number, 0) for number in range(64)]
    chain = IterableWrapper(items).filter(draws).to_samples(fields="x y").map(tuple).to_samples(fields="x y")
    (finding,) = findings(chain.select("x").deal(batch_size=8))
    assert (finding.code, finding.severity, finding.pipe) == ("unrecorded-randomness", "warning", "filter")
    assert "`.filter()`" in finding.way_out


def test_numbers_that_a_function_seeds_itself_are_fine() -> None:
    chain = IterableWrapper([(number, 0) for number in range(64)]).filter(seeds_itself).to_samples(fields="x y")
    assert found(chain.select("x").deal(batch_size=8)) == []


def rotated(image: Any, rng: np.random.Generator) -> Any:
    return image.rotate(int(rng.integers(90)))


def pairs(fields: str = "image mask") -> Any:
    return kdp.from_dataset([(Image.new("RGB", (9, 9)), Image.new("L", (9, 9)))] * 8, fields)


def ends(chain: Any, fields: str = "image mask") -> Any:
    return chain.select(fields).deal(batch_size=2)


def test_an_image_and_a_mask_that_draw_apart_are_found() -> None:
    crop, colours = kdp.RandomResizedCrop(4), kdp.ColorJitter(0.1)
    for chain in (
        pairs().transform("image", crop).transform("mask", crop),
        pairs().transform("image", colours, crop).transform("mask", crop),
        pairs().transform("image", rotated).transform("mask", rotated),
    ):
        (finding,) = findings(ends(chain))
        assert (finding.code, finding.severity, finding.pipe) == ("drawn-apart", "warning", "transform")
        assert "two transforms" in finding.what
        assert '`.transform("image mask", ...)`' in finding.way_out
    for chain in (pairs().transform("image mask", crop), pairs().transform("image", colours)):
        assert found(ends(chain)) == []


def test_a_mask_that_stays_as_its_image_moves_is_found() -> None:
    A = pytest.importorskip("albumentations")
    crop, small = kdp.RandomResizedCrop(4), kdp.Resize((4, 4))
    for chain in (
        pairs().transform("image", crop).transform("mask", small),
        pairs().transform("image mask", small).transform("image", kdp.HorizontalFlip()),
        pairs().transform("image", A.Compose([A.RandomBrightnessContrast(), A.HorizontalFlip()])),
        pairs().transform("image", views=[[crop], [small]]),
    ):
        (finding,) = findings(ends(chain))
        assert (finding.code, finding.severity, finding.pipe) == ("drawn-apart", "warning", "transform")
        assert "moves the pixels of field 'image' at random, and field 'mask' stays" in finding.what


def test_images_that_move_without_belonging_fields_are_fine() -> None:
    A = pytest.importorskip("albumentations")
    crop = kdp.RandomResizedCrop(4)
    both = pairs().transform("image mask", kdp.Resize((4, 4)))
    assert found(ends(both.transform("image", A.Compose([A.CenterCrop(4, 4), A.RGBShift()])))) == []
    assert found(ends(pairs().transform("image", crop), "image")) == [], "the mask is not selected"
    assert found(ends(pairs("image other").transform("image", crop), "image other")) == []
    assert found(ends(pairs().record_ctx().transform("image", crop), "image mask ctx")) == [], "its ctx tells how"
    stream = IterableWrapper([(Image.new("RGB", (9, 9)), 0)] * 8).to_samples(fields="image y").shuffle()
    for source in (pairs("image other"), stream.transform("y", abs)):
        made = source.transform("image", crop).add_field("mask", lambda sample: 1)
        assert found(ends(made)) == [], "it is made of what was cropped"


# Caches and errors


@pytest.mark.filterwarnings("ignore:Functions before a cache read:UserWarning")
def test_a_cache_that_cannot_follow_a_function_is_found(tmp_path: Path) -> None:
    database = sqlite3.connect(":memory:")
    namespace: dict[str, Any] = {"database": database, "__name__": "__main__"}
    exec("def looked_up(x):\n    return x if database else 0", namespace)
    work = numbers().transform("x", namespace["looked_up"])
    chains = [work.cache_on_disk(tmp_path / name, **given) for name, given in (("a", {}), ("b", {"version": 1}))]
    codes = [found(chain.select("x").deal(batch_size=8)) for chain in (*chains, work.cache_in_memory())]
    database.close()
    assert [("unhashed-globals", "warning") in each for each in codes] == [True, False, False]
    plain = numbers().transform("x", float).cache_on_disk(tmp_path / "c")
    assert found(plain.select("x").deal(batch_size=8)) == []


def test_any_number_of_errors_is_found() -> None:
    def chain(**limits: Any) -> Any:
        return numbers().transform("x", float).on_error("skip", **limits).select("x").deal(batch_size=8)

    (finding,) = findings(chain(max_share=1))
    assert (finding.code, finding.severity, finding.pipe) == ("unlimited-errors", "hint", "on_error")
    for limits in ({}, {"max_share": 0.5}, {"max_share": 1, "max_samples": 9}):
        assert found(chain(**limits)) == []
