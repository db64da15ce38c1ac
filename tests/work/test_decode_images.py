"""`decode_images`: encoded images that decode as late as possible."""

from __future__ import annotations

import io
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.storage.codec import decode, encode
from kdpipes.work import EncodedImage

WIDTH, HEIGHT = 160, 120


def encoded(mode: str = "RGB", suffix: str = "jpeg", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
    image = (
        Image.fromarray(pixels).convert("RGB").quantize(16) if mode == "P" else Image.fromarray(pixels).convert(mode)
    )
    assert image.mode == mode
    file = io.BytesIO()
    image.save(file, suffix, **options)
    return file.getvalue()


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
    with pytest.raises(TypeError, match="`decode_images` takes bytes, but the field holds str"):
        indexed("path.jpg").decode_images().select("x")[0]


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
    assert repr(image) == f"EncodedImage({len(image.content)} bytes)"
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
