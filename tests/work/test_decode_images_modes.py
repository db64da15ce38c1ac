"""`decode_images(mode=, exif=)`: depth maps, masks and floats keep their values, and photos stand upright."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.fingerprint import fingerprint
from kdpipes.demo import write_photo_folder
from kdpipes.storage.codec import decode, encode
from kdpipes.work import EncodedImage
from kdpipes.work.jpeg import find_decoders
from tests.pictures import file_of

DEPTH = np.arange(4000, dtype=np.uint16).reshape(50, 80)
FLOATS = (np.arange(4000, dtype=np.float32).reshape(50, 80) - 7) / 3
IDS = (np.arange(4000).reshape(50, 80) // 700).astype(np.uint8)
GREY = np.random.default_rng(0).integers(0, 256, (50, 80), dtype=np.uint8)


def mask() -> Image.Image:
    image = Image.fromarray(IDS, "L").convert("P")
    image.putpalette([200, 10, 30, 128, 0, 0, 0, 128, 0, 9, 9, 9, 0, 0, 255, 255, 0, 255])
    return image


FILES: dict[str, tuple[bytes, Any]] = {
    "I;16": (file_of(DEPTH, "PNG"), DEPTH),
    "F": (file_of(FLOATS, "TIFF"), FLOATS),
    "P": (file_of(mask(), "PNG"), IDS),
    "L": (file_of(GREY, "PNG"), GREY),
}
MODES = pytest.mark.parametrize("mode", FILES)


def indexed(content: Any, **options: Any) -> Any:
    return kdp.from_dataset([(content, n) for n in range(4)]).decode_images("x", **options)


def stream(content: Any, **options: Any) -> Any:
    return IterableWrapper([(content, n) for n in range(4)]).to_samples(fields="x y").decode_images("x", **options)


FLAVOURS = pytest.mark.parametrize("make", [indexed, stream])


def first(pipe: Any) -> Any:
    return next(iter(pipe))["x"]


@FLAVOURS
@MODES
@pytest.mark.parametrize("is_unchanged", [False, True])
def test_pixels_keep_their_values(make: Any, mode: str, is_unchanged: bool) -> None:
    content, pixels = FILES[mode]
    image = first(make(content, mode="unchanged" if is_unchanged else mode))
    assert image.size == (80, 50)
    assert image.to_pil().mode == mode
    for found in (np.asarray(image), np.asarray(image.to_pil()), image.region(0, 0, 50, 80)[0].numpy()):
        assert found.dtype == pixels.dtype
        assert np.array_equal(found, pixels)


@MODES
def test_images_of_all_modes_become_batches(mode: str) -> None:
    content, pixels = FILES[mode]
    for transforms in ([], [kdp.CenterCrop((50, 80))]):
        pipe = indexed(content, mode=mode)
        pipe = pipe.transform("x", *transforms) if transforms else pipe
        (x,) = next(iter(pipe.select("x").deal(batch_size=4).collate_samples()))
        expected = torch.from_numpy(np.stack([pixels if mode == "P" else pixels[None]] * 4))
        assert x.dtype == expected.dtype
        assert torch.equal(x, expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@MODES
def test_batches_are_the_same_in_workers(mode: str, num_workers: int) -> None:
    content, _ = FILES[mode]
    chain = indexed(content, mode=mode).transform("x", kdp.RandomResizedCrop(16), kdp.HorizontalFlip())
    chain = chain.select("x y").deal(batch_size=2, seed=1).collate_samples()
    with kdp.Loader(chain, num_workers=num_workers) as loader:
        found = [x.clone() for x, _ in loader]
    again = indexed(content, mode=mode).transform("x", kdp.RandomResizedCrop(16), kdp.HorizontalFlip())
    for x, (y, _) in zip(found, again.select("x y").deal(batch_size=2, seed=1).collate_samples(), strict=True):
        assert torch.equal(x, y)
        assert x.shape == ((2, 16, 16) if mode == "P" else (2, 1, 16, 16))


def test_tensors_of_all_modes_are_scaled_as_they_should_be() -> None:
    to_tensor = kdp.ToTensor()
    made = {mode: first(indexed(content, mode=mode).transform("x", to_tensor)) for mode, (content, _) in FILES.items()}
    assert torch.equal(made["P"], torch.from_numpy(IDS))
    assert torch.equal(made["F"], torch.from_numpy(FLOATS)[None])
    assert torch.equal(made["L"], torch.from_numpy(GREY)[None] / 255)
    assert torch.allclose(made["I;16"], torch.from_numpy(DEPTH.astype(np.float32))[None] / 65_535)
    assert made["I;16"].dtype == torch.float32


def test_masks_are_resized_by_nearest_and_cropped_by_black() -> None:
    for interpolation in ("bilinear", "bicubic", "nearest"):
        content = FILES["P"][0]
        made = first(indexed(content, mode="P").transform("x", kdp.Resize((23, 31), interpolation=interpolation)))
        assert np.array_equal(np.asarray(made), np.asarray(mask().resize((31, 23), Image.Resampling.NEAREST)))
    outside = np.asarray(first(indexed(content, mode="P").transform("x", kdp.CenterCrop(90))))
    assert outside[:20].max() == 0
    assert np.array_equal(outside[20:70, 5:85], IDS)


def test_wide_images_are_an_error_where_8_bits_are_asked_for() -> None:
    wide = [("I;16", "I;16"), ("F", "F")]
    for name, kept in wide:
        for mode in ("RGB", "L"):
            pipe = indexed(FILES[name][0], mode=mode)
            expected = rf"The image of sample '0' cannot be decoded: `mode='{mode}'` cannot hold its pixels, of mode "
            with pytest.raises(kdp.DataError, match=expected + rf"'{name}'; `decode_images\(\.\.\., mode='{kept}'\)`"):
                np.asarray(pipe[0]["x"])
            with pytest.raises(kdp.DataError, match=expected):
                first(pipe.transform("x", kdp.Resize(8)))


@pytest.mark.parametrize(
    ("content", "mode", "found"),
    [
        (file_of(Image.new("RGB", (3, 2)), "PNG"), "P", "RGB"),
        (file_of(Image.new("RGB", (3, 2)), "PNG"), "I;16", "RGB"),
        (file_of(Image.new("RGB", (3, 2)), "JPEG"), "F", "RGB"),
        (FILES["F"][0], "I;16", "F"),
        (FILES["I;16"][0], "P", "I;16"),
        (FILES["P"][0], "I;16", "P"),
        (file_of(np.full((2, 2), 70_000, np.int32), "TIFF"), "I;16", "I"),
        (file_of(np.full((2, 2), 2**24 + 1, np.int32), "TIFF"), "F", "I"),
    ],
)
def test_modes_that_cannot_hold_the_pixels_are_errors(content: bytes, mode: Any, found: str) -> None:
    with pytest.raises(kdp.DataError, match=f"`mode='{mode}'` cannot hold its pixels, of mode '{found}'"):
        np.asarray(indexed(content, mode=mode)[0]["x"])


def test_modes_take_all_that_they_can_hold() -> None:
    assert np.array_equal(first(indexed(FILES["L"][0], mode="P")), GREY), "masks are often saved as gray"
    assert np.array_equal(first(indexed(FILES["L"][0], mode="I;16")), GREY)
    assert np.array_equal(first(indexed(FILES["I;16"][0], mode="F")), DEPTH)
    bits = file_of(Image.fromarray(IDS == 1), "PNG")
    assert np.array_equal(first(indexed(bits, mode="P")), IDS == 1)
    big_endian = file_of(Image.frombytes("I;16B", (80, 50), DEPTH.astype(">u2").tobytes()), "TIFF")
    for mode in ("I;16", "unchanged"):
        image = first(indexed(big_endian, mode=mode))
        assert np.asarray(image).dtype == np.uint16
        assert np.array_equal(image, DEPTH)
    colors = np.asarray(first(indexed(FILES["P"][0])))
    assert colors.shape == (50, 80, 3), "photos with a palette stay photos"
    assert np.array_equal(colors, np.asarray(mask().convert("RGB")))
    assert first(indexed(file_of(Image.new("CMYK", (3, 2)), "JPEG"), mode="unchanged")).to_pil().mode == "CMYK"


def test_grey_is_that_of_pillow_for_every_backend() -> None:
    photo = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    content = file_of(photo, "JPEG")
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("L"))
    for backend in ("auto", "pillow", *find_decoders()):
        assert np.array_equal(first(indexed(content, mode="L", backend=backend)), expected)


def test_modes_and_orientations_have_their_own_fingerprints(tmp_path: Path) -> None:
    source = kdp.from_dataset([(FILES["P"][0], 1)])
    assert fingerprint(source.decode_images("x")) == "040ebf21"
    options: list[Any] = [{}, {"mode": "P"}, {"mode": "unchanged"}, {"exif": True}, {"mode": "P", "exif": True}]
    assert len({fingerprint(source.decode_images("x", **given)) for given in options}) == 5
    for _ in range(2):  # written, and read
        for given, mode in zip(options, ("RGB", "P", "P", "RGB", "P"), strict=True):
            pipe = source.decode_images("x", **given).transform("x", kdp.Resize((9, 7))).cache_on_disk(tmp_path)
            image = pipe[0]["x"]
            assert getattr(image, "mode", None) == mode
    before_pixels = source.decode_images("x", mode="P").cache_on_disk(tmp_path)
    assert [np.array_equal(before_pixels[0]["x"], IDS) for _ in range(2)] == [True, True]


def test_encoded_images_travel_with_their_mode() -> None:
    for given in ((), ("P",), ("RGB", True)):
        image = EncodedImage(FILES["P"][0], "", "auto", True, *given)
        for again in (pickle.loads(pickle.dumps(image)), decode(memoryview(b"".join(encode(image))))):
            assert (again.mode, again.exif, again.content) == (image.mode, image.exif, image.content)


def test_pictures_of_all_modes_can_be_shown() -> None:
    for mode, (content, _) in FILES.items():
        pipe = indexed(content, mode=mode).select("x y").deal(batch_size=4)
        for batch in (next(iter(pipe)), next(iter(pipe.collate_samples()))):
            if mode != "P" or isinstance(batch, list):
                assert np.asarray(kdp.show_batch(batch, pipe, tile=32)).std() > 0
    assert np.asarray(kdp.show_batch([FILES["I;16"][0]], tile=32)).std() > 0, "bytes, not decoded yet"


def test_bad_modes_are_rejected_when_the_chain_is_built() -> None:
    for make in (indexed, stream):
        with pytest.raises(ValueError, match="`mode` must be one of 'RGB', 'L', 'I;16', 'F', 'P', 'unchanged', but is"):
            make(b"", mode="rgb")
        with pytest.raises(TypeError, match="`exif` must be True or False, but is 1 instead"):
            make(b"", exif=1)


def turned(turn: int, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = turn
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (6, 9, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    return file_of(Image.fromarray(pixels).convert(mode), kind, exif=exif)


def upright(content: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(content)))


BACKENDS = ["auto", "pillow", *find_decoders()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn", range(1, 9))
def test_photos_stand_upright_where_exif_counts(turn: int, backend: Any) -> None:
    content = turned(turn)
    for make in (indexed, stream):
        image = first(make(content, exif=True, backend=backend))
        expected = upright(content)
        assert image.size == expected.size
        assert np.array_equal(image, expected)
        assert np.array_equal(image.to_pil(), expected)
        assert np.array_equal(ImageOps.exif_transpose(image.to_pil()), expected), "it is not turned twice"
        lying = first(make(content, backend=backend))
        assert lying.size == (72, 48), "by default, tags do not count"
        assert np.array_equal(lying, Image.open(io.BytesIO(content)))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn", range(1, 9))
def test_regions_are_those_of_the_upright_photo(turn: int, backend: Any, exact: bool) -> None:
    content = turned(turn)
    expected = torch.from_numpy(np.array(upright(content))).permute(2, 0, 1)
    image = EncodedImage(content, "", backend, exact, "RGB", True)
    width, height = image.size
    for top, left, rows, columns in ((0, 0, height, width), (3, 5, 17, 30), (height - 9, width - 4, 9, 4)):
        region = image.region(top, left, rows, columns, least=(rows, columns))
        assert torch.equal(region, expected[:, top : top + rows, left : left + columns])
    half = image.region(0, 0, height, width, least=(height // 2, width // 2))
    assert tuple(half.shape[1:]) == ((height, width) if exact else (height // 2, width // 2))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_orientation_counts_in_every_format_and_mode(kind: str, mode: Any) -> None:
    for turn in (1, 3, 6):
        content = turned(turn, kind)
        image = first(indexed(content, exif=True, mode=mode))
        expected = upright(content).convert(mode)
        assert image.size == expected.size == image.to_pil().size
        assert np.array_equal(image, expected)


def test_crops_of_turned_photos_are_recorded_upright() -> None:
    content = turned(6)
    straight = file_of(upright(content), "PNG")
    crop = kdp.RandomResizedCrop(12)
    made = []
    for data, options in ((content, {"exif": True}), (straight, {})):
        pipe = indexed(data, **options).record_ctx().transform("x", crop, kdp.HorizontalFlip())
        made.append(next(iter(pipe.select("x", return_ctx=True).deal(batch_size=4, seed=2))))
    for ((x,), ctx), ((y,), same) in zip(*made, strict=True):
        assert ctx == same
        assert np.array_equal(x, y)


def test_damaged_exif_names_no_orientation() -> None:
    content = turned(6).replace(b"Exif\0\0MM\0*", b"Exif\0\0MM\0\0")
    assert content != turned(6)
    assert first(indexed(content, exif=True)).size == (72, 48)


def test_photos_of_a_folder_are_unchanged_by_default(tmp_path: Path) -> None:
    photos = kdp.image_folder(write_photo_folder(tmp_path / "photos"))[:8]
    for plain, with_exif in zip(photos.decode_images("x"), photos.decode_images("x", exif=True), strict=True):
        assert np.array_equal(plain["x"], with_exif["x"])


@pytest.mark.parametrize("batch_size", [1, 64])
@pytest.mark.parametrize("name", ["mask", "masks", "segmentation", "seg", "annotation", "label_map"])
@pytest.mark.parametrize("mode", ["P", "L", "1"])
def test_fields_named_like_masks_keep_class_numbers(name: str, mode: str, batch_size: int) -> None:
    numbers = np.array([[0, 1, 1], [1, 0, 1]], dtype=np.uint8)
    mask = Image.fromarray(numbers).convert("P")
    mask.putpalette([0, 0, 0, 128, 0, 0])
    mask = mask if mode == "P" else Image.fromarray(numbers if mode == "L" else numbers.astype(bool))
    rows = [(file_of(mask),) * 2] * 2
    chain = kdp.from_dataset(rows, fields=f"{name} other").decode_images(name).decode_images("other")
    assert np.array_equal(np.asarray(chain[0][name]), numbers)
    masks, others = next(iter(chain.select(f"{name} other").deal(batch_size=batch_size).collate_samples()))
    assert (masks.dtype, masks.shape[1:], others.shape[1:]) == (torch.uint8, (2, 3), (3, 2, 3))
    assert np.array_equal(masks[0], numbers)


def test_a_mask_in_colors_is_an_error_that_names_the_mode() -> None:
    sample = kdp.from_dataset([(file_of(Image.new("RGB", (2, 2))),)], fields="mask").decode_images("mask")[0]
    with pytest.raises(kdp.DataError, match=r"of mode 'RGB'; `decode_images\(\.\.\., mode='RGB'\)` keeps them"):
        np.asarray(sample["mask"])
