"""Fast JPEG decoders: Pillow's pixels, whole and by region, and Pillow's errors, whatever the file is like."""

from __future__ import annotations

import ctypes
import io
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

import kdpipes as kdp
from kdpipes.storage.codec import encode
from kdpipes.work import DecodedImage, EncodedImage, decode, jpeg
from kdpipes.work.jpeg import Box, JpegDecoder, UnfitError, find_decoders
from tests.pictures import file_of

turbojpeg = pytest.importorskip("turbojpeg")  # has no wheels for Python 3.14
ASTRONAUT = Image.fromarray(data.astronaut()).resize((213, 187))
FAST = ["turbojpeg", "simplejpeg"]


def saved(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def sampled(kind: str, width: int = 213, height: int = 187) -> bytes:
    pixels = np.ascontiguousarray(np.asarray(ASTRONAUT.resize((width, height))))
    return bytes(turbojpeg.compress(pixels, 90, getattr(turbojpeg.SAMP, kind)))


def without_huffman_tables(content: bytes) -> bytes:
    """As frames of a film have it: decoders know the usual ones."""
    parts, place = [content[:2]], 2
    while content[place + 1] != 0xDA:
        stop = place + 2 + int.from_bytes(content[place + 2 : place + 4], "big")
        parts += [content[place:stop]] if content[place + 1] != 0xC4 else []
        place = stop
    return b"".join([*parts, content[place:]])


def odd_files() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    whole = saved(ASTRONAUT, quality=90)
    return {
        **{kind: sampled(kind) for kind in ("Y444", "Y422", "Y420", "Y440", "Y411", "Y441", "GRAY")},
        **{f"{width}x{height}": saved(ASTRONAUT.resize((width, height))) for width, height in SIZES},
        "progressive": saved(ASTRONAUT, progressive=True, quality=85),
        "with restarts": saved(ASTRONAUT, restart_marker_rows=1),
        "gray": saved(ASTRONAUT.convert("L")),
        "cmyk": saved(ASTRONAUT.convert("CMYK")),
        "rgb": saved(ASTRONAUT, keep_rgb=True),
        "turned": saved(ASTRONAUT, exif=exif),
        "with a profile": saved(ASTRONAUT, icc_profile=b"profile" * 9),
        "without its tables": without_huffman_tables(whole),
        "with a tail": whole + b"tail",
        "with a second image": whole + whole,
        "coarse": saved(ASTRONAUT, quality=3),
        "fine": saved(ASTRONAUT, quality=100, subsampling=0),
    }


SIZES = [(1, 1), (1, 40), (40, 1), (7, 9), (16, 16), (17, 33), (15, 31)]
ODD = odd_files()


def by_pillow(content: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.mark.parametrize("backend", ["auto", *FAST, "pillow"])
@pytest.mark.parametrize("name", ODD)
def test_every_file_has_pillows_pixels(name: str, backend: Any) -> None:
    expected = by_pillow(ODD[name])
    image = EncodedImage(ODD[name], backend=backend)
    height, width = expected.shape[:2]
    assert image.size == (width, height)
    for _ in range(2):
        assert np.array_equal(np.asarray(image), expected)
    draw = random.Random(0)
    for _ in range(60):
        top, left = draw.randrange(height), draw.randrange(width)
        rows, columns = draw.randint(1, height - top), draw.randint(1, width - left)
        region = image.region(top, left, rows, columns)
        assert region.shape == (3, rows, columns)
        assert np.array_equal(region.permute(1, 2, 0), expected[top : top + rows, left : left + columns])


@pytest.mark.parametrize("backend", FAST)
def test_shipped_photos_have_pillows_pixels_in_every_region(photo_folder: Path, backend: Any) -> None:
    draw = random.Random(1)
    for path in sorted(photo_folder.rglob("*.jpg"))[::8]:
        content = path.read_bytes()
        expected, known = by_pillow(content), find_decoders()[backend]
        height, width = expected.shape[:2]
        assert known.open(content).size == (width, height)
        for _ in range(10):
            top, left = draw.randrange(height), draw.randrange(width)
            box = Box(top, left, draw.randint(1, height - top), draw.randint(1, width - left))
            cut = expected[top : top + box.height, left : left + box.width]
            assert np.array_equal(known.open(content).region(box), cut)


@pytest.mark.parametrize("backend", ["auto", *FAST])
def test_images_with_sizes_read_first_are_not_mixed_up(backend: Any) -> None:
    names = ["17x33", "Y420", "coarse", "without its tables", "fine"]
    images = [EncodedImage(ODD[name], backend=backend) for name in names]
    sizes = [image.size for image in images]
    for order in (names, names[::-1]):
        for name in order:
            image, (width, height) = images[names.index(name)], sizes[names.index(name)]
            assert np.array_equal(image.region(0, 0, height, width).permute(1, 2, 0), by_pillow(ODD[name]))


@pytest.mark.parametrize("name", ["cmyk", "rgb"])
@pytest.mark.parametrize("backend", FAST)
def test_colours_that_need_pillow_are_left_to_it(name: str, backend: str) -> None:
    with pytest.raises(UnfitError):
        find_decoders()[backend].open(ODD[name])


def result(content: bytes, backend: Any) -> Any:
    image = EncodedImage(content, "sample '0'", backend=backend)
    try:
        return np.asarray(image).tobytes(), image.size
    except kdp.DataError as error:
        return str(error)


@pytest.mark.parametrize("backend", FAST)
def test_damaged_files_give_what_pillow_gives(backend: Any) -> None:
    draw, content = random.Random(2), saved(ASTRONAUT, quality=80)
    errors, good = 0, result(content, "pillow")
    for number in range(150):
        damaged = bytearray(content)
        if number % 3 == 0:
            del damaged[draw.randrange(2, len(damaged)) :]
        else:
            for _ in range(draw.randint(1, 4)):
                damaged[draw.randrange(2, len(damaged))] ^= 1 << draw.randrange(8)
        expected = result(bytes(damaged), "pillow")
        errors += isinstance(expected, str)
        assert result(bytes(damaged), backend) == expected
        assert result(content, backend) == good, "a whole file after it"
    assert 50 <= errors < 150


def test_other_formats_are_pillows() -> None:
    for suffix in ("PNG", "WEBP", "BMP"):
        content = file_of(ASTRONAUT, suffix, lossless=True)
        assert np.array_equal(np.asarray(EncodedImage(content)), np.asarray(ASTRONAUT))


def test_a_bomb_is_rejected_as_pillow_rejects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
    with pytest.raises(kdp.DataError, match="decompression bomb"):
        np.asarray(EncodedImage(ODD["Y420"]))


def test_threads_decode_side_by_side() -> None:
    names = [name for name in ODD for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda name: np.asarray(EncodedImage(ODD[name])), names))
    assert all(np.array_equal(pixels, by_pillow(ODD[name])) for name, pixels in zip(names, found, strict=True))


def test_threads_that_share_an_image_open_it_each(monkeypatch: pytest.MonkeyPatch) -> None:
    both, used = threading.Barrier(2), []

    class Opened:
        size = 30, 20

        def region(self, box: Box, factor: int = 1) -> Any:
            used.append(self)
            both.wait(30)
            return np.zeros((box.height, box.width, 3), np.uint8)

    monkeypatch.setattr(decode, "decoder", lambda backend: JpegDecoder("fake", "1", lambda content: Opened()))
    image = EncodedImage(ODD["Y420"])
    assert image.size == (30, 20)
    with ThreadPoolExecutor(2) as pool:
        assert [len(planes) for planes in pool.map(lambda top: image.region(top, 0, 5, 5), range(2))] == [3, 3]
    assert used[0] is not used[1]


@pytest.mark.parametrize("backend", [*FAST, "pillow"])
def test_batches_are_the_same_for_every_backend_and_workers(photo_folder: Path, backend: Any) -> None:
    def epochs(num_workers: int, backend: Any) -> list[Any]:
        pipe = kdp.image_folder(photo_folder).decode_images("x", backend=backend)
        pipe = pipe.transform("x", kdp.RandomResizedCrop(64), kdp.HorizontalFlip(), kdp.ColorJitter(brightness=0.3))
        with kdp.Loader(pipe.select("x").deal(batch_size=32, shuffle=True).collate_samples(), num_workers) as loader:
            return [x.numpy().tobytes() for _ in range(2) for (x,) in loader]

    assert epochs(2, backend) == epochs(0, "pillow")


def test_crops_differ_from_pillows_by_two_grey_levels_at_most(photo_folder: Path) -> None:
    crop = kdp.RandomResizedCrop(96)
    differences = []
    for number, path in enumerate(sorted(photo_folder.rglob("*.jpg"))[::4]):
        image = EncodedImage(path.read_bytes())
        params = crop.draw(image, np.random.default_rng(number))
        left, top = params["left"], params["top"]
        region = image.to_pil().crop((left, top, left + params["width"], top + params["height"]))
        expected = np.asarray(region.resize((96, 96), Image.Resampling.BILINEAR))
        differences.append(np.abs(np.asarray(crop.apply(image, params)).astype(int) - expected))
    assert np.max(differences) <= 2
    assert np.mean(differences) < 0.1


def test_a_decoded_image_is_an_image() -> None:
    image = kdp.CenterCrop((40, 60)).apply(EncodedImage(ODD["Y420"]), {"top": 3, "left": 5, "height": 40, "width": 60})
    assert isinstance(image, DecodedImage)
    assert (image.size, image.width, image.height, image.mode) == ((60, 40), 60, 40, "RGB")
    pil = image.to_pil()
    assert np.array_equal(np.asarray(image), by_pillow(ODD["Y420"])[3:43, 5:65])
    assert pil.tobytes() == image.tobytes()
    assert np.array_equal(np.asarray(pickle.loads(pickle.dumps(image))), np.asarray(pil))
    assert Image.open(io.BytesIO(image._repr_png_())).tobytes() == pil.tobytes()
    assert repr(image) == "DecodedImage(60x40)"


def test_what_is_no_image_of_bytes_is_not_cached() -> None:
    for pixels in (torch.rand(3, 4, 5), torch.zeros(1, 4, 5, dtype=torch.uint8)):
        with pytest.raises(TypeError, match=r"must be \[3, H, W\] uint8 in main memory, but are \["):
            encode(DecodedImage(pixels))


def test_a_missing_backend_is_an_error_when_the_chain_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    photos = kdp.from_dataset([(ODD["Y420"], 0)])
    with pytest.raises(ValueError, match="`backend` must be one of 'auto', 'turbojpeg', 'simplejpeg', 'pillow'"):
        photos.decode_images("x", backend="opencv")
    monkeypatch.setattr(jpeg, "find_decoders", dict)
    for backend, way_out in {"simplejpeg": r"kdpipes\[fast\]", "turbojpeg": "KDPIPES_TURBOJPEG"}.items():
        with pytest.raises(ImportError, match=way_out):
            photos.decode_images("x", backend=backend)
    assert np.array_equal(np.asarray(photos.decode_images("x")[0]["x"]), by_pillow(ODD["Y420"])), "by Pillow"


def test_a_library_that_is_too_old_or_missing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.util.find_library("c")
    for path in (libc, "/nowhere/libturbojpeg.so"):
        monkeypatch.setenv("KDPIPES_TURBOJPEG", str(path))
        with pytest.warns(UserWarning, match=r"^KDPIPES_TURBOJPEG is not the path of libjpeg-turbo 3, .*: .*\.$"):
            assert jpeg._load_turbojpeg() is None
    monkeypatch.delenv("KDPIPES_TURBOJPEG")
    assert jpeg._load_turbojpeg() is not None


LARGE = [Image.fromarray(getattr(data, name)()) for name in ("astronaut", "chelsea", "coffee", "rocket")]


def reduced(content: bytes, transform: Any, backend: Any, *, exact: bool) -> np.ndarray[Any, Any]:
    image = EncodedImage(content, "", backend, exact)
    made = transform.apply(image, transform.draw(image, np.random.default_rng(3)))
    return np.asarray(made).astype(int)


@pytest.mark.parametrize(
    "transform", [kdp.Resize((90, 120)), kdp.Resize(50), kdp.RandomResizedCrop(60)], ids=["both", "short", "crop"]
)
@pytest.mark.parametrize("kind", ["plain", "progressive", "gray", "4:4:4"])
def test_scaled_decoding_is_the_same_by_each_backend(transform: Any, kind: str) -> None:
    options = {"progressive": {"progressive": True}, "4:4:4": {"subsampling": 0}}.get(kind, {})
    for image in LARGE:
        content = saved(image.convert("L") if kind == "gray" else image, quality=92, **options)
        exact, *others = (reduced(content, transform, name, exact=False) for name in ("pillow", *FAST))
        pixels = reduced(content, transform, "pillow", exact=True)
        assert all(np.array_equal(exact, other) for other in others)
        assert pixels.shape == exact.shape
        assert 0 < np.abs(pixels - exact).mean() < 6


def test_scaled_decoding_never_gives_less_than_is_wanted() -> None:
    content = saved(LARGE[0])
    for backend in ("pillow", *FAST):
        image = EncodedImage(content, "", backend, exact=False)
        sizes = [
            tuple(image.region(3, 5, 401, 305, least=least).shape[1:]) for least in [(401, 305), (201, 1), (50, 38)]
        ]
        assert sizes == [(401, 305), (401, 305), (50, 38)]
        assert tuple(image.region(511, 511, 1, 1, least=(1, 1)).shape[1:]) == (1, 1)


def test_without_a_smaller_result_nothing_is_scaled() -> None:
    content = saved(LARGE[1])
    for transform in (kdp.Resize(299), kdp.CenterCrop(40)):
        for backend in ("pillow", *FAST):
            pixels = [reduced(content, transform, backend, exact=exact) for exact in (True, False)]
            assert np.array_equal(*pixels)


def test_a_scaled_image_stays_scaled_in_copies_and_caches() -> None:
    photos = kdp.from_dataset([(saved(LARGE[0]), 0)])
    image = photos.decode_images("x", exact=False)[0]["x"]
    assert (pickle.loads(pickle.dumps(image)).exact, EncodedImage(image.content).exact) == (False, True)
    operations = [photos.decode_images("x", exact=exact).operation.value_fingerprint() for exact in (True, False)]
    assert operations[0] != operations[1]
    with pytest.raises(TypeError, match="`exact` must be True or False"):
        photos.decode_images("x", exact="no")
