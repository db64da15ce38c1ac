"""`replay_grid`: one batch of any epoch as a picture, drawn again from the chain alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.look import replay_grid
from tests.look.test_show_batch import photo
from tests.pictures import file_of

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")

TILE = 34  # images of 32 by 32 pixels are shown as they are


PHOTOS = [(photo(number), number % 2) for number in range(5)]


def cropped(source: Any) -> Any:
    return source.record_ctx().transform("x", kdp.RandomResizedCrop(32), kdp.HorizontalFlip())


def chain(**cut: Any) -> Any:
    pipe = cropped(kdp.from_dataset(PHOTOS))
    return pipe.select("x key", return_ctx=True).deal(**({"batch_size": 2, "shuffle": True, "seed": 3} | cut))


def tiles(picture: Image.Image) -> Any:
    """Return the images of a grid, `[rows, columns, 32, 32, 3]`."""
    pixels, height = np.asarray(picture), TILE + 14
    num_rows, num_columns = pixels.shape[0] // height, pixels.shape[1] // TILE
    grid = pixels.reshape(num_rows, height, num_columns, TILE, 3).swapaxes(1, 2)
    return grid[:, :, 1:33, 1:33]


def shown(picture: Image.Image, number: int, num_each: int = 2) -> list[Any]:
    """Return the images of the sample of a number: the original, and what became of it."""
    found = tiles(picture).reshape(-1, 32, 32, 3)
    return list(found[number * num_each : (number + 1) * num_each])


@pytest.mark.parametrize("end", ["deal", "collate_samples"])
def test_each_sample_shows_original_crop_and_batch_image(end: str) -> None:
    dealt = chain()
    whole = dealt if end == "deal" else dealt.collate_samples()
    epochs = [list(dealt) for _ in range(2)]
    for epoch, batches in enumerate(epochs):
        for number, batch in enumerate(batches):
            picture = replay_grid(whole, epoch=epoch, batch=number, tile=TILE)
            for place, ((x, key), _) in enumerate(batch):
                original, result = shown(picture, place)
                assert np.array_equal(result, np.asarray(x))
                assert np.array_equal(original, np.asarray(photo(int(key))))


def test_another_seed_is_another_order_and_moves_no_chain() -> None:
    dealt = chain()
    pictures = [replay_grid(dealt, seed=seed, tile=TILE).tobytes() for seed in (None, 3, 4)]
    assert pictures[0] == pictures[1] != pictures[2]
    assert pictures[2] == replay_grid(chain(seed=4), tile=TILE).tobytes()
    keys = [[key for batch in pipe for (_, key), _ in batch] for pipe in (dealt, chain())]
    assert keys[0] == keys[1], "still epoch 0 of seed 3"


def test_the_batch_need_not_be_the_next_and_loads_nothing_else() -> None:
    loads: list[str] = []

    def load(id: str) -> Image.Image:
        loads.append(id)
        return photo(int(id))

    ids = [str(number) for number in range(7)]
    dealt = cropped(kdp.from_ids(ids, load=load)).select("x").deal(batch_size=2)
    for _ in range(2):
        loads.clear()
        replay_grid(dealt, epoch=4, batch=2, tile=TILE)
        assert set(loads) == {"4", "5"}


def test_views_stand_beside_their_original() -> None:
    views = [[kdp.RandomResizedCrop(32)], [], [kdp.RandomResizedCrop(32), kdp.HorizontalFlip()]]
    pipe = kdp.from_dataset(PHOTOS).record_ctx().transform("x", views=views).select("x key", return_ctx=True)
    dealt = pipe.deal(batch_size=3)
    picture = replay_grid(dealt, tile=TILE)
    assert picture.size == (8 * TILE, 2 * (TILE + 14))
    for place, ((x, key), _) in enumerate(next(iter(dealt))):
        original, *results = shown(picture, place, num_each=4)
        assert np.array_equal(original, np.asarray(photo(int(key))))
        assert all(np.array_equal(result, np.asarray(view)) for result, view in zip(results, x, strict=True))


@pytest.mark.parametrize("end", ["select", "whole samples"])
def test_originals_are_shown_where_samples_may_be_left_out(photo_shards: str, end: str) -> None:
    stream = kdp.stream_shards(photo_shards).rename_fields(x="jpg", y="cls").decode_images()
    for source in (kdp.from_dataset(PHOTOS), stream):
        work = cropped(source)
        pipes = [work, work.on_error("skip")]
        dealt = [(pipe.select("x") if end == "select" else pipe).deal(batch_size=4) for pipe in pipes]
        one, other = (replay_grid(pipe, tile=TILE).tobytes() for pipe in dealt)
        assert one == other


@pytest.mark.parametrize("end", ["select", "whole samples"])
def test_files_and_shards_are_shown(photo_folder: Path, photo_shards: str, end: str) -> None:
    folder = kdp.image_folder(photo_folder).filter_classes(valid=["cat"]).oversample().decode_images()
    for source in (
        folder,
        kdp.open_shards(photo_shards).rename_fields(x="jpg", y="cls").decode_images(),
        kdp.stream_shards(photo_shards).rename_fields(x="jpg", y="cls").decode_images(),
    ):
        pipe = cropped(source).select("x y") if end == "select" else cropped(source)
        for epoch in range(2):
            picture = replay_grid(pipe.deal(batch_size=5), epoch=epoch, batch=1, tile=130)
            assert picture.size == (8 * 130, 2 * (130 + 14))


def test_arguments_that_make_no_sense_are_rejected() -> None:
    with pytest.raises(kdp.ChainError, match="The chain has no batches"):
        replay_grid(kdp.from_dataset(PHOTOS))
    with pytest.raises(IndexError, match="Epoch 1 has no batch 3"):
        replay_grid(chain(), epoch=1, batch=3)
    with pytest.raises(kdp.FieldError, match="has no field 'image'"):
        replay_grid(chain(), field="image")
    for name in ("epoch", "batch", "seed"):
        with pytest.raises(ValueError, match=f"`{name}` must be an integer of at least 0"):
            replay_grid(chain(), **{name: -1})
    both = cropped(kdp.concat(kdp.from_dataset(PHOTOS), kdp.from_dataset(PHOTOS))).select("x").deal(batch_size=2)
    assert replay_grid(both).size == replay_grid(chain()).size


def test_tensors_of_floats_are_shown() -> None:
    pipe = cropped(kdp.from_dataset(PHOTOS)).transform("x", kdp.ToTensor(), kdp.Normalize([0.5], [0.25]))
    picture = replay_grid(pipe.select("x y").deal(batch_size=2).collate_samples(), tile=TILE)
    assert picture.size == (4 * TILE, TILE + 14)


@pytest.mark.parametrize("wrap", [IterableWrapper, SequenceWrapper])
def test_samples_that_are_made_of_a_stock_pipe_are_shown(wrap: Any) -> None:
    dealt = cropped(wrap(PHOTOS).to_samples(fields="x y")).select("x").deal(batch_size=2)
    for batch in range(2):
        original, _ = shown(replay_grid(dealt, batch=batch, tile=TILE), 0)
        assert np.array_equal(original, np.asarray(photo(2 * batch)))


def test_the_original_of_a_random_source_is_what_was_cropped() -> None:
    class Source(kdp.SampleSource):
        def __len__(self) -> int:
            return 4

        def getitem_x(self, index: int, rng: Any) -> Image.Image:
            return photo(int(rng.integers(1000)))

    dealt = Source().record_ctx().transform("x", lambda image: image).select("x").deal(batch_size=2)
    original, result = shown(replay_grid(dealt, epoch=1, batch=1, tile=TILE), 0)
    assert np.array_equal(original, result)


@pytest.mark.parametrize("before", ["decode_images", "rename_fields"])
def test_a_transform_of_another_field_may_come_first(before: str) -> None:
    if before == "decode_images":
        source = kdp.from_dataset([(file_of(image), y) for image, y in PHOTOS]).transform("y", str).decode_images()
    else:
        source = kdp.from_dataset(PHOTOS, "image y").transform("y", str).rename_fields(x="image")
    picture = replay_grid(cropped(source).select("x").deal(batch_size=2), tile=TILE)
    assert picture.size == (4 * TILE, TILE + 14)


def test_a_batch_that_was_left_out_is_no_batch() -> None:
    items = [PHOTOS[0], PHOTOS[1], (None, 0), (None, 0), PHOTOS[2], PHOTOS[3]]
    dealt = cropped(kdp.from_dataset(items)).on_error("skip").select("x").deal(batch_size=2)
    assert replay_grid(dealt, batch=2, tile=TILE).size == (4 * TILE, TILE + 14)
    with pytest.raises(IndexError):
        replay_grid(dealt, batch=1, tile=TILE)


def test_tensors_of_bytes_are_shown() -> None:
    tensors = [(torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1), y) for image, y in PHOTOS]
    picture = replay_grid(cropped(kdp.from_dataset(tensors)).select("x").deal(batch_size=2), tile=TILE)
    assert picture.size == (4 * TILE, TILE + 14)


def test_a_stock_pipe_before_deal_is_rejected() -> None:
    dealt = cropped(kdp.from_dataset(PHOTOS)).select("x").map(tuple).deal(batch_size=2)
    with pytest.raises(kdp.ChainError):
        replay_grid(dealt, tile=TILE)
