"""File formats, byte by byte: tar shards and their indexes, record files, and the codec of caches and records.

Record files are LMDB files with pages of 4,096 bytes, the page size of Linux on x86-64.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import kdpipes as kdp
from kdpipes.cli import main
from kdpipes.demo import write_photo_folder
from kdpipes.storage.codec import encode
from kdpipes.work import EncodedImage


def small() -> Any:
    """Five samples with a field of each kind that shards and records take."""
    samples = [
        {"x": bytes([number] * number), "y": number % 2, "caption": f"heron {number} ü", "meta": {"n": [number, 0.5]}}
        for number in range(5)
    ]
    arrays = [np.arange(number * 3, dtype=np.float32).reshape(number, 3) for number in range(5)]
    rows = [{**sample, "array": array} for sample, array in zip(samples, arrays, strict=True)]
    return kdp.from_dataset(rows, "x y caption meta array", class_names=["heron", "stork"])


def digest(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def digests(folder: Path, pattern: str) -> dict[str, Any]:
    return {path.name: digest(path.read_bytes()) for path in sorted(folder.glob(pattern))}


def shards(pipe: Any, folder: Path, **limits: Any) -> dict[str, Any]:
    kdp.write_shards(pipe, folder / "train-%06d.tar", **limits)
    return digests(folder, "*.tar")


def index(pipe: Any, folder: Path, *options: str) -> dict[str, Any]:
    """Write shards, date them, and return the indexes that `kdpipes index` makes."""
    urls = kdp.write_shards(pipe, folder / "train-%06d.tar", max_samples=80).urls
    for url in urls:
        os.utime(url, ns=(1_700_000_000_000_000_000, 1_700_000_000_000_000_000))
    with redirect_stdout(io.StringIO()):
        assert main(["index", *options, *urls]) == 0
    contents = {path.name: path.read_bytes() for path in sorted(folder.glob("*.index"))}
    return {
        name: base64.b64encode(content).decode() if len(content) < 2000 else digest(content)
        for name, content in contents.items()
    }


def records(pipe: Any, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Write record files. Their indexes and `records.json` name the chain by its fingerprint: see `versioned.py`."""
    kdp.write_records(pipe, folder, **arguments)
    return digests(folder, "*.mdb")


def codec(value: Any) -> str:
    return base64.b64encode(b"".join(encode(value, key=b"key"))).decode()


def photos(folder: Path) -> Any:
    return kdp.image_folder(write_photo_folder(folder / "photos"))


ENTRIES: dict[str, Callable[[Path], Any]] = {
    "shards, small": lambda folder: shards(small().rename_fields(bin="x"), folder, max_samples=2),
    "shards, by size": lambda folder: shards(small().rename_fields(bin="x"), folder, max_bytes=16_000),
    "shards, photos": lambda folder: shards(photos(folder), folder, max_samples=80),
    "index, small": lambda folder: index(small().rename_fields(bin="x"), folder),
    "index, small without checksums": lambda folder: index(small().rename_fields(bin="x"), folder, "--no-checksums"),
    "index, photos": lambda folder: index(photos(folder), folder),
    "records, small": lambda folder: records(small(), folder, num_parts=1),
    "records, shuffled parts": lambda folder: records(small(), folder, num_parts=2, shuffle=True, seed=1),
    "records, photos": lambda folder: records(photos(folder), folder / "records", num_parts=2),
    "codec, plain data": lambda _: codec([None, True, -3, 2**70, 1.5, "heron ü", b"\0\xff", (1, "a"), {"a": 1, 2: []}]),
    "codec, arrays": lambda _: codec([np.arange(6, dtype="<i2").reshape(2, 3), np.float32(0.5), np.array(["ab", "c"])]),
    "codec, Fortran order": lambda _: codec(np.asfortranarray(np.arange(6, dtype="<f8").reshape(2, 3))),
    "codec, tensors": lambda _: codec({"x": torch.arange(4, dtype=torch.int16), "y": torch.ones(2, 2).bfloat16()}),
    "codec, images": lambda _: codec(Image.frombytes("RGB", (3, 2), bytes(range(18)))),
    "codec, encoded image": lambda _: codec(EncodedImage(b"\xff\xd8not an image")),
}
