"""Formats of images: those that hold pixels are opened, programs and stubs are not."""

from __future__ import annotations

import io
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, UnidentifiedImageError

import kdpipes as kdp
from kdpipes.storage.decoding import image_suffixes, open_image
from kdpipes.storage.jobs import dumps_with_pillow, loads_with_pillow
from kdpipes.work import EncodedImage

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 10\n%%EndComments\n{} loop\nshowpage\n%%EOF\n"
PROGRAMS = {
    "plain": EPS,
    "preview": b"\xc5\xd0\xd3\xc6" + (30).to_bytes(4, "little") + len(EPS).to_bytes(4, "little") + bytes(18) + EPS,
}
STUBS = {
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "GRIB": b"GRIB\0\0\0\1" + bytes(100),
    "BUFR": b"BUFR" + bytes(100),
    "MPEG": b"\0\0\1\xb3\x01\0\x10" + bytes(100),
    "WMF": b"\xd7\xcd\xc6\x9a\0\0" + bytes(100),
}


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Ghostscript on the PATH, which leaves a file when it runs."""
    folder, mark = tmp_path / "bin", tmp_path / "ran"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\necho ran > {mark}\nexit 1\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return mark


@pytest.mark.parametrize("kind", PROGRAMS)
def test_postscript_is_never_run(kind: str, tmp_path: Path, ghostscript: Path) -> None:
    content = PROGRAMS[kind]
    (tmp_path / "d" / "cat").mkdir(parents=True)
    (tmp_path / "d" / "cat" / "1.jpg").write_bytes(content)
    pipe = kdp.image_folder(tmp_path / "d")
    with pytest.raises(kdp.DataError, match=r"PostScript, a program, which is not run; convert it to PNG"):
        np.asarray(pipe.decode_images("x")[0]["x"])
    with pytest.raises(kdp.DataError, match="PostScript"):
        EncodedImage(content).to_pil()
    with pytest.raises(Exception, match="PostScript"):
        kdp.write_shards(pipe, tmp_path / "encoded-%06d.tar", max_samples=10, encode={"x": "png"})
    kdp.doctor(pipe.decode_images("x").select("x").deal(batch_size=1).collate_samples())
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", STUBS)
def test_formats_without_a_decoder_are_not_opened(kind: str) -> None:
    with pytest.raises(kdp.DataError, match="not an image that Pillow can identify"):
        _ = EncodedImage(STUBS[kind]).size


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "DIB", "ICO", "PCX", "TGA"]
)
def test_formats_of_pixels_are_opened(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, kind)
    assert open_image(file.getvalue()).size == (16, 16)


def test_formats_of_plugins_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPEN", "ID"):
        monkeypatch.setattr(Image, name, getattr(Image, name).copy())
    with pytest.raises(UnidentifiedImageError):
        open_image(b"RAWX")

    def opened(file: object, name: object) -> Image.Image:
        return Image.new("RGB", (2, 3))

    Image.register_open("RAWX", opened, lambda prefix: prefix[:4] == b"RAWX")  # type: ignore[arg-type]
    assert open_image(b"RAWX").size == (2, 3)


def test_suffixes_are_those_of_formats_that_are_opened() -> None:
    assert {".jpg", ".jfif", ".jpe", ".png", ".apng", ".tif", ".jp2", ".webp", ".tga"} <= set(image_suffixes())
    assert not {".eps", ".ps", ".pdf", ".wmf", ".h5", ".mpg", ".psd"} & set(image_suffixes())


class Raw(ImageFile.ImageFile):
    """A plugin: two by two pixels behind a mark."""

    format = "RAWX"

    def _open(self) -> None:
        self._mode, self._size = "RGB", (2, 2)
        self.tile = [ImageFile._Tile("raw", (0, 0, 2, 2), 4, ("RGB", 0, 1))]


def is_raw(prefix: bytes) -> bool:
    return prefix[:4] == b"RAWX"


@pytest.fixture
def odd_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a truncated image and one for a plugin, which this process can read."""
    for name in ("OPEN", "ID", "EXTENSION"):
        monkeypatch.setattr(Image, name, getattr(Image, name).copy())
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    Image.register_open("RAWX", Raw, is_raw)
    Image.register_extension("RAWX", ".rawx")
    file = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(file, "JPEG")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(file.getvalue()[: len(file.getvalue()) // 2])
    (tmp_path / "cat" / "2.rawx").write_bytes(b"RAWX" + bytes(range(12)))
    return tmp_path


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_workers_read_what_this_process_reads(start_method: str, odd_images: Path) -> None:
    chain = kdp.image_folder(odd_images).decode_images("x").select("x").deal(batch_size=1).collate_samples()
    expected = [batch.sum().item() for (batch,) in kdp.Loader(chain)]
    with kdp.Loader(chain, num_workers=1, start_method=start_method) as loader:
        for _ in range(2):
            assert [batch.sum().item() for (batch,) in loader] == expected


def test_executors_read_what_this_process_reads(odd_images: Path) -> None:
    source = kdp.image_folder(odd_images).decode_images("x").transform("x", kdp.Resize((2, 2)))
    pattern = odd_images / "shards" / "a-%06d.tar"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        result = kdp.write_shards(source, pattern, max_samples=1, encode={"x": "png"}, executor=executor)
    assert result.num_samples == 2


def test_a_process_is_set_up_as_the_one_that_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPEN", "ID", "EXTENSION", "MAX_IMAGE_PIXELS"):
        value = getattr(Image, name)
        monkeypatch.setattr(Image, name, value if name == "MAX_IMAGE_PIXELS" else value.copy())
    Image.register_open("RAWX", Raw, is_raw)
    Image.MAX_IMAGE_PIXELS = 7
    content = dumps_with_pillow("heron")
    Image.MAX_IMAGE_PIXELS = 8
    del Image.OPEN["RAWX"]
    assert loads_with_pillow(content) == "heron"
    assert (Image.MAX_IMAGE_PIXELS, Image.OPEN["RAWX"]) == (7, (Raw, is_raw))
