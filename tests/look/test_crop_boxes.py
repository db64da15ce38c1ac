"""`crop_boxes`: recorded regions as rectangles, on a copy of the image."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kdpipes as kdp
from kdpipes.look import crop_boxes
from kdpipes.work import EncodedImage

FIRST, SECOND = (228, 87, 46), (23, 190, 187)
WHITE, BLACK = (255, 255, 255), (0, 0, 0)
REGION = {"top": 2, "left": 4, "height": 5, "width": 7}


def black(size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.new("RGB", size)


def box_of(picture: Image.Image, color: tuple[int, int, int] = FIRST) -> dict[str, int]:
    """Return the region whose outline has a color."""
    rows, columns = np.nonzero((np.asarray(picture) == color).all(axis=2))
    top, left = int(rows.min()), int(columns.min())
    return {"top": top, "left": left, "height": int(rows.max()) - top + 1, "width": int(columns.max()) - left + 1}


def num_colours(picture: Image.Image) -> int:
    return len({color for _, color in picture.getcolors() or []} - {BLACK, WHITE})  # but for the edges


def test_a_region_is_drawn_along_its_inner_edge() -> None:
    for line in (1, 2, 3):
        picture = crop_boxes(black(), {"crop": REGION}, line=line)
        assert box_of(picture) == REGION
    assert picture.getpixel((7, 4)) == FIRST
    assert crop_boxes(black(), {"crop": REGION}, line=1).getpixel((7, 4)) == (0, 0, 0), "what is inside stays"


def test_it_shows_on_an_image_of_its_own_colour() -> None:
    region = {"top": 5, "left": 10, "height": 20, "width": 20}
    for line in (1, 3, 6):
        edge = max(1, round(line / 3))
        pixels = np.asarray(crop_boxes(Image.new("RGB", (40, 30), FIRST), {"crop": region}, line=line))
        row = [tuple(map(int, pixel)) for pixel in pixels[16]]
        left = [FIRST] * (10 - edge) + [WHITE] * edge + [FIRST] * line + [BLACK] * edge
        assert row[:20] == left + [FIRST] * (20 - len(left))
        assert row == row[::-1]


def test_an_edge_hides_no_line_beside_it() -> None:
    beside = {**REGION, "left": REGION["left"] + REGION["width"]}
    picture = crop_boxes(black(), {"crop": REGION, "view_1": {"crop": beside}}, line=1)
    assert (box_of(picture), box_of(picture, SECOND)) == (REGION, beside)


def test_the_image_stays_as_it_is() -> None:
    for mode in ("RGB", "L", "RGBA"):
        image = Image.new(mode, (40, 30))
        before = image.tobytes()
        picture = crop_boxes(image, {"crop": REGION})
        assert (image.tobytes(), picture.mode) == (before, "RGB")
        assert crop_boxes(image, {}).tobytes() == image.convert("RGB").tobytes()
    array = np.zeros((30, 40, 3), np.uint8)
    assert box_of(crop_boxes(array, {"crop": REGION})) == REGION
    assert not array.any()


def test_an_encoded_image_is_decoded() -> None:
    content = io.BytesIO()
    black().save(content, "PNG")
    assert box_of(crop_boxes(EncodedImage(content.getvalue()), {"crop": REGION})) == REGION


def test_the_first_region_counts_and_views_have_own_colours() -> None:
    later = {**REGION, "top": 12}
    other = {**REGION, "left": 20}
    assert num_colours(crop_boxes(black(), {"crop": REGION, "crop_2": later})) == 1
    views = {"view_1": {"crop": REGION, "crop_2": later}, "view_2": {"flip": {"flipped": True}, "crop": other}}
    picture = crop_boxes(black(), views)
    assert (num_colours(picture), box_of(picture), box_of(picture, SECOND)) == (
        2,
        REGION,
        {**other, "left": 40 - 20 - 7},
    )
    both = crop_boxes(black(), {"crop": REGION, "view_1": {"crop": other}})
    assert (box_of(both), box_of(both, SECOND)) == (REGION, other)


def test_a_ctx_without_regions_draws_nothing() -> None:
    ctxs: list[dict[str, Any]] = [
        {},
        {"flip": {"flipped": True}, "draw": {"seed": 1, "epoch": 0, "ordinal": 3}},
        {"size": {"height": 3, "width": 4}, "n": 5, "none": None, "steps": [REGION]},
        {"view_1": {}},
    ]
    for ctx in ctxs:
        assert num_colours(crop_boxes(black(), ctx)) == 0


def test_a_region_beyond_the_image_is_cut_off() -> None:
    outside = {"top": -5, "left": -5, "height": 60, "width": 60}
    assert num_colours(crop_boxes(black(), {"center_crop": outside})) == 0
    reaching = crop_boxes(black(), {"crop": {"top": 20, "left": 30, "height": 40, "width": 40}}, line=1)
    assert box_of(reaching) == {"top": 20, "left": 30, "height": 10, "width": 10}


def test_what_a_transform_recorded_is_what_is_drawn() -> None:
    image = black()
    pipe = kdp.from_dataset([(image, 0)] * 5).record_ctx().transform("x", kdp.RandomResizedCrop(8))
    dealt = pipe.select("x", return_ctx=True).deal(batch_size=2, seed=3)
    for _ in range(2):
        for batch in dealt:
            for _, ctx in batch:
                assert box_of(crop_boxes(image, ctx)) == ctx["random_resized_crop"]


def test_empty_regions_are_left_out() -> None:
    cutmix = {"partner": 0, "weight": 1.0, "top": 3, "left": 3, "height": 0, "width": 0}
    assert num_colours(crop_boxes(black(), {"cutmix": cutmix})) == 0


def test_a_region_behind_a_resize_is_drawn_where_it_was() -> None:
    ctx = {"resize": {"height": 15, "width": 20}, "center_crop": {"top": 1, "left": 2, "height": 10, "width": 10}}
    assert box_of(crop_boxes(black(), ctx)) == {"top": 2, "left": 4, "height": 20, "width": 20}


def test_the_ctx_of_a_batch_is_rejected() -> None:
    with pytest.raises((TypeError, ValueError)):
        crop_boxes(black(), {"crop": {name: torch.tensor([value, 9]) for name, value in REGION.items()}})


def test_a_tensor_is_an_image_as_well() -> None:
    assert box_of(crop_boxes(torch.zeros(3, 30, 40, dtype=torch.uint8), {"crop": REGION})) == REGION
