"""What stands in a tar: headers as tarfile's, keys that can stand there, and what becomes of a field's value."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features

import kdpipes as kdp
from kdpipes.core.errors import ChainError, DataError
from kdpipes.storage.catalog import make_index
from kdpipes.storage.files import read_url
from kdpipes.storage.index_home import index_url
from kdpipes.write import members
from tests.write.shards import QUIET, write

pytestmark = QUIET


def members_of(tar: Path | str) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(read_url(str(tar)))) as file:
        return {member.name: file.extractfile(member).read() for member in file}


def one(folder: Path, sample: dict[str, Any], **options: Any) -> dict[str, bytes]:
    """Return the members of one sample."""
    pipe = kdp.from_dataset([sample], fields=" ".join(sample))
    return members_of(write(pipe, folder, **options).urls[0])


@pytest.mark.parametrize(
    "name", ["a.jpg", "heron/1.cls", "x" * 96 + ".jpg", "x" * 97 + ".jpg", "größe.jpg", "a\udcff.jpg"]
)
@pytest.mark.parametrize("size", [0, 1, 511, 110_000, 8**11 - 1, 8**11])
def test_headers_are_those_of_tarfile(name: str, size: int) -> None:
    made = members.as_tar_sample(name.partition(".")[0], [])
    assert made.num_bytes == 0
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    assert members._header(name, size) == info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def test_long_and_odd_keys_come_back(tmp_path: Path) -> None:
    keys = ["deep/" * 30 + "a", "größe ☃", "a\udcffb", "f.older/b"]
    pipe = kdp.from_ids(keys, [0, 1, 2, 3], load=lambda key: key.encode("utf-8", "surrogateescape"))
    result = write(pipe, tmp_path, extensions={"x": "bin"}, max_samples=None, max_bytes=10**5)
    back = kdp.open_shards(result.urls)
    assert [key.partition("/")[2] for key in back.column("key")] == keys
    assert make_index(result.urls[0], with_checksums=True).to_bytes() == read_url(index_url(result.urls[0]))


KINDS: list[tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]] = [
    ({"y": 3, "n": np.int64(4)}, {}, {"0.cls": b"3", "0.n.cls": b"4"}),
    ({"y": "heron", "caption": "größe"}, {}, {"0.cls": b"heron", "0.caption.txt": "größe".encode()}),
    ({"meta": {"a": [1, 2.5, None]}, "score": 0.5, "ok": True}, {},
     {"0.meta.json": b'{"a": [1, 2.5, null]}', "0.score.json": b"0.5", "0.ok.json": b"true"}),
    ({"jpg": b"any", "json": '{"a":1}', "txt": "t", "mp3": b"m"}, {},
     {"0.jpg": b"any", "0.json": b'{"a":1}', "0.txt": b"t", "0.mp3": b"m"}),
    ({"x": b"\xff\xd8\xff-", "mask": b"\x89PNG\r\n\x1a\n"}, {},
     {"0.jpg": b"\xff\xd8\xff-", "0.mask.png": b"\x89PNG\r\n\x1a\n"}),
    ({"x": 1, "y": 2}, {"encode": {"x": lambda x: bytes([x])}, "extensions": {"x": "bin"}, "fields": "x"},
     {"0.bin": b"\1"}),
    ({"x": None, "y": 2}, {}, {"0.cls": b"2"}),
]  # fmt: skip


@pytest.mark.parametrize(("sample", "options", "expected"), KINDS, ids=[" ".join(sample) for sample, *_ in KINDS])
def test_what_a_field_becomes_follows_from_its_value(
    tmp_path: Path, sample: dict[str, Any], options: dict[str, Any], expected: dict[str, bytes]
) -> None:
    assert one(tmp_path, sample, **options) == expected


def test_arrays_and_pixels_come_back(tmp_path: Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    members = one(tmp_path, {"x": pixels, "depth": pixels[..., 0] / 7}, encode={"x": "png"})
    assert np.array_equal(np.load(io.BytesIO(members["0.depth.npy"])), pixels[..., 0] / 7)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(members["0.png"]))), pixels)
    encoded = {"x": members["0.png"]}
    assert one(tmp_path / "again", encoded, encode={"x": "png"})["0.png"] == members["0.png"]
    with pytest.raises(ChainError, match="Field 'x' holds Image, which has no encoding of its own"):
        one(tmp_path / "pixels", {"x": Image.fromarray(pixels)})
    with pytest.raises(ChainError, match="Field 'x' of sample '0' holds bytes of an unknown kind"):
        one(tmp_path / "bytes", {"x": b"any"})
    with pytest.raises(ChainError, match="an array of objects would need pickle"):
        one(tmp_path / "objects", {"x": np.array([{}, 1])})
    with pytest.raises(ChainError, match="Two fields of sample '0' have the extension 'jpg'"):
        one(tmp_path / "two", {"x": b"\xff\xd8\xff", "jpg": b"a"})


def picture(mode: str = "RGB") -> Image.Image:
    values = np.arange(12 * 8 * 4, dtype=np.uint16).reshape(12, 8, 4)
    return Image.fromarray(values[..., 0]) if mode == "I;16" else Image.fromarray(values.astype(np.uint8)).convert(mode)


IMAGE_KINDS = ["jpg", "png", "webp", "gif", "tif", "bmp", "ppm", "jp2", "j2k", "avif"]


@pytest.mark.parametrize("kind", IMAGE_KINDS)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_of_every_format_are_written_and_recognized(kind: str, mode: str, tmp_path: Path) -> None:
    if kind == "avif" and not features.check("avif"):
        pytest.skip("this Pillow cannot write AVIF")
    image = picture(mode)
    content = one(tmp_path, {"x": image}, encode={"x": kind})[f"0.{kind}"]
    assert one(tmp_path / "again", {"x": image}, encode={"x": kind}) == {f"0.{kind}": content}
    assert one(tmp_path / "bytes", {"x": content}) == {f"0.{kind}": content}
    assert one(tmp_path / "named", {"photo": content}) == {f"0.photo.{kind}": content}
    assert one(tmp_path / "kept", {"x": content}, encode={"x": kind}) == {f"0.{kind}": content}
    read = Image.open(io.BytesIO(content))
    assert read.size == (8, 12)
    if kind not in ("jpg", "avif"):
        assert read.convert(mode).tobytes() == image.tobytes()


def test_depth_and_opacity_survive_jpeg_2000(tmp_path: Path) -> None:
    for mode in ("I;16", "LA", "RGBA"):
        content = one(tmp_path / mode[0:2], {"x": picture(mode)}, encode={"x": "jp2"})["0.jp2"]
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), np.asarray(picture(mode)))


@pytest.mark.parametrize(
    ("content", "extension"),
    [
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif-", "avif"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic-", "heic"),
        (b"\0\0\0\x0cjP  \r\n\x87\n-", "jp2"),
        (b"\xff\x4f\xff\x51-", "j2k"),
    ],
)
def test_formats_are_recognized_by_their_first_bytes(content: bytes, extension: str, tmp_path: Path) -> None:
    assert one(tmp_path, {"x": content}) == {f"0.{extension}": content}


def test_a_video_is_bytes_of_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ChainError, match="Field 'x' of sample '0' holds bytes of an unknown kind"):
        one(tmp_path, {"x": b"\0\0\0\x18ftypisom\0\0\0\0isommp41-"})


@pytest.mark.parametrize("key", ["a.b", "", "a/", "../a", "/a", "a\n"])
def test_a_key_that_a_tar_cannot_hold_is_rejected(letters: Any, tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match="cannot be used in a tar"):
        write(letters, tmp_path, key=lambda sample: key)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_key_that_comes_twice_is_rejected(letters: Any, tmp_path: Path, num_workers: int) -> None:
    twice = letters.repeat_until(repetitions=2)
    with pytest.raises(DataError, match=r"Two samples have the key '[0-5]', in shards 0 and 1: keys must be unique"):
        write(twice, tmp_path / "across", max_samples=6, num_workers=num_workers)
    with pytest.raises(DataError, match="Two samples have the key '0', in shard '"):
        write(twice, tmp_path / "within", max_samples=12, num_workers=num_workers)
    key: Callable[[Any], str] = lambda sample: f"{sample.ordinal:09}"  # noqa: E731
    assert write(twice, tmp_path / "named", max_samples=6, num_workers=num_workers, key=key).num_samples == 12


@pytest.mark.parametrize(
    ("value", "encode", "why"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), None, "BFloat16"),
        ("\ud800", None, "surrogates"),
        (np.array([object()]), None, "would need pickle"),
        (Image.new("F", (3, 3)), "png", "cannot write mode F"),
        (Image.new("I;16", (3, 3)), "jpg", "cannot store an image of mode 'I;16' without loss: .* 'png'"),
        (Image.new("P", (3, 3)), "jpg", "cannot store an image of mode 'P' without loss"),
        (Image.new("P", (3, 3)), "jp2", "cannot store an image of mode 'P' without loss: .* 'png'"),
        (Image.new("I;16", (3, 3)), "avif", "cannot store an image of mode 'I;16' without loss: .* 'png'"),
        (Image.new("F", (3, 3)), "webp", "cannot store an image of mode 'F' without loss: .* 'tif'"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_a_value_that_cannot_be_written_is_told_with_its_field(
    value: Any, encode: str | None, why: str, tmp_path: Path
) -> None:
    chain = kdp.from_dataset([(value, 0)])
    with pytest.raises(kdp.ChainError, match=rf"Field 'x' cannot be written.*{why}.*takes a function") as caught:
        write(chain, tmp_path, encode=None if encode is None else {"x": encode})
    assert ".." not in str(caught.value).replace("...", "")
