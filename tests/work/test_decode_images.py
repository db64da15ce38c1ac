"""`decode_images`: encoded images that decode as late as possible."""

from __future__ import annotations

import io
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.storage.codec import decode, encode
from kdpipes.work import EncodedImage
from tests.pictures import file_of

WIDTH, HEIGHT = 160, 120


def encoded(mode: str = "RGB", suffix: str = "jpeg", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
    image = (
        Image.fromarray(pixels).convert("RGB").quantize(16) if mode == "P" else Image.fromarray(pixels).convert(mode)
    )
    assert image.mode == mode
    return file_of(image, suffix, **options)


def indexed(content: Any) -> Any:
    return kdp.from_dataset([(content, 0)])


def stream(content: Any) -> Any:
    return IterableWrapper([(content, 0)]).to_samples(fields="x y")


FLAVOURS = pytest.mark.parametrize("make", [indexed, stream])
FORMATS = [
    *[("RGB", suffix) for suffix in ("jpeg", "png", "webp", "bmp", "gif")],
    *[("L", "jpeg"), ("L", "png"), ("RGBA", "png"), ("RGBA", "webp"), ("LA", "png"), ("CMYK", "jpeg"), ("P", "png")],
]


def test_an_images_name_is_made_for_errors_and_keeps_no_sample() -> None:
    sample = indexed(b"no image")[0]
    sample["held"] = held = np.zeros(1)
    name, alive = sample.naming(), weakref.ref(held)
    del sample, held
    assert (alive(), name()) == (None, "sample '0'")
    asked: list[str] = []
    image = EncodedImage(encoded(), lambda: asked.append("once") or "sample 'heron'")
    assert (image.size, asked) == ((WIDTH, HEIGHT), [])
    assert (image.name, pickle.loads(pickle.dumps(image)).name, asked) == ("sample 'heron'", "sample 'heron'", ["once"])


def test_every_format_becomes_rgb_as_pillow_reads_it() -> None:
    for make in (indexed, stream):
        for mode, suffix in FORMATS:
            content = encoded(mode, suffix)
            expected = Image.open(io.BytesIO(content)).convert("RGB")
            pipe = make(content).decode_images()
            for _ in range(2):
                image = next(iter(pipe))["x"]
                assert isinstance(image, EncodedImage)
                assert image.size == (WIDTH, HEIGHT), (mode, suffix)
                pixels = np.asarray(image)
                assert (pixels.shape, pixels.dtype) == ((HEIGHT, WIDTH, 3), np.uint8)
                assert np.array_equal(pixels, np.asarray(expected)), (mode, suffix)
                assert image.to_pil().tobytes() == expected.tobytes(), "and again"


def test_the_size_comes_from_the_header_and_pixels_come_late() -> None:
    for suffix in ("jpeg", "png"):
        content = encoded("RGB", suffix)
        image = indexed(content[: len(content) * 3 // 4]).decode_images()[0]["x"]
        assert image.size == (WIDTH, HEIGHT)
        with pytest.raises(kdp.DataError, match="The image of sample '0' cannot be decoded"):
            np.asarray(image)


def test_a_truncated_image_names_the_sample() -> None:
    for make in (indexed, stream):
        for suffix in ("jpeg", "png"):
            content = encoded("RGB", suffix)
            pipe = make(content[: len(content) // 2]).decode_images().transform("x", kdp.HorizontalFlip()).select("x")
            for _ in range(2):
                with pytest.raises(
                    kdp.DataError, match=r"The image of sample '0' cannot be decoded: .*truncated"
                ) as error:
                    next(iter(pipe))
                assert "of sample '0' (ordinal 0)" in error.value.__notes__[0]


def test_bytes_that_are_no_image_name_the_sample() -> None:
    for make in (indexed, stream):
        for content in (b"", b"no image", encoded()[:20]):
            with pytest.raises(kdp.DataError, match=f"{len(content)} bytes are not an image") as error:
                next(iter(make(content).decode_images().select("x")))
            assert error.value.__notes__ == ["kdpipes: while decoding field 'x' of sample '0' (ordinal 0)"]


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("form", ["path", "Path", "bytes", "struct", "struct of a path", "array", "tensor"])
def test_encoded_images_may_have_any_form(form: str, batch_size: int, tmp_path: Path) -> None:
    content, path = encoded(suffix="png"), tmp_path / "a.png"
    path.write_bytes(content)
    value: Any = {
        "path": str(path),
        "Path": path,
        "bytes": content,
        "struct": {"bytes": content, "path": "elsewhere.png"},
        "struct of a path": {"bytes": None, "path": str(path)},
        "array": np.frombuffer(content, np.uint8),
        "tensor": torch.tensor(list(content), dtype=torch.uint8),
    }[form]
    expected = Image.open(io.BytesIO(content)).convert("RGB").tobytes()
    for make in (indexed, stream):
        assert next(iter(make(value).decode_images()))["x"].to_pil().tobytes() == expected
    chain = kdp.from_dataset([{"x": value}] * 9, "x").decode_images().select("x")
    images = [image for batch in chain.deal(batch_size=batch_size, uneven="keep") for (image,) in batch]
    assert [image.to_pil().tobytes() for image in images] == [expected] * 9


def test_images_of_hugging_face_are_decoded_from_tables(tmp_path: Path) -> None:
    content = encoded(suffix="png")
    (tmp_path / "b.png").write_bytes(content)
    rows = [{"bytes": content, "path": "a.png"}, str(tmp_path / "b.png"), None]
    features = datasets.Features({"image": datasets.Image()})
    table = datasets.Dataset.from_dict({"image": rows}, features=features)
    table.to_parquet(tmp_path / "images.parquet")
    expected = Image.open(io.BytesIO(content)).convert("RGB").tobytes()
    for source in (table, tmp_path / "images.parquet"):
        images = [sample["image"] for sample in kdp.from_table(source).decode_images("image")]
        assert [image and image.to_pil().tobytes() for image in images] == [expected, expected, None]


def test_a_value_that_is_no_encoded_image_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "`decode_images` takes bytes or the path of a local file, but the field holds int"),
        ({"width": 3}, TypeError, "but the field holds dict"),
        ({}, TypeError, "but the field holds dict"),
        (np.zeros((4, 4, 3), np.uint8), TypeError, "holds ndarray. Arrays and tensors of pixels need no decoding"),
        (str(tmp_path / "missing.jpg"), FileNotFoundError, "There is no file '.*missing.jpg'"),
        (str(tmp_path), kdp.DataError, "' is not a regular file"),
        ("/dev/zero", kdp.DataError, "'/dev/zero' is not a regular file"),
        (str(tmp_path / "pipe"), kdp.DataError, "pipe' is not a regular file"),
        (
            "http://127.0.0.1/a.jpg",
            kdp.DataError,
            r"is not a local file. To read URLs, use `kdp.from_table\(..., path=...\)`",
        ),
        ("file:///a.jpg", kdp.DataError, "is not a local file"),
    ]
    for value, kind, words in cases:
        for make in (indexed, stream):
            with pytest.raises(kind, match=words):
                next(iter(make(value).decode_images().select("x")))


def test_an_image_that_is_decoded_already_and_a_missing_one_pass() -> None:
    picture = Image.new("RGB", (4, 2), "red")
    for make in (indexed, stream):
        assert next(iter(make(picture).decode_images()))["x"].tobytes() == picture.tobytes()
        assert next(iter(make(None).decode_images()))["x"] is None
        assert next(iter(make(bytearray(encoded())).decode_images()))["x"].size == (WIDTH, HEIGHT)


def test_nothing_is_decoded_for_a_label() -> None:
    pipe = indexed(b"no image").decode_images()
    assert pipe.column("y").tolist() == [0]
    assert pipe.select("y")[0] == (0,)


def test_an_encoded_image_travels_as_bytes_and_is_new_each_time() -> None:
    image = indexed(encoded()).decode_images()[0]["x"]
    copy = pickle.loads(pickle.dumps(image))
    assert copy.content == image.content
    assert copy.to_pil().tobytes() == image.to_pil().tobytes()
    image.to_pil().paste("black", (0, 0, WIDTH, HEIGHT))
    assert image.to_pil().tobytes() == copy.to_pil().tobytes()
    assert repr(image) == f"EncodedImage({len(image.content):,} bytes)"
    assert np.asarray(image, dtype=np.float32).dtype == np.float32


def test_an_encoded_image_is_kept_as_its_bytes() -> None:
    image = indexed(encoded()).decode_images("x")[0]["x"]
    twin = decode(b"".join(encode({"x": image})))["x"]
    assert type(twin) is EncodedImage
    assert (twin.content, twin.name, twin.size) == (image.content, image.name, (WIDTH, HEIGHT))
    assert np.array_equal(np.asarray(twin), np.asarray(image))


def test_a_missing_field_is_an_error_when_the_chain_is_built() -> None:
    with pytest.raises(kdp.FieldError, match="The source has no field 'image'; it has 'x', 'y'"):
        indexed(b"").decode_images("image")
    with pytest.raises(TypeError, match="`field` must be the name of a field"):
        indexed(b"").decode_images(3)


def test_transformed_images_are_stored_as_pixels_with_backend() -> None:
    image = EncodedImage(encoded(), "a", "pillow")
    crop = kdp.CenterCrop(40)(image)
    for one in (image, crop):
        again = decode(b"".join(encode(one)))
        assert type(again) is type(one)
        assert np.array_equal(np.asarray(again), np.asarray(one))
    assert decode(b"".join(encode(image))).backend == "pillow"
