"""Entries of dictionaries by paths with dots, where keys may have dots themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import kdpipes as kdp
from kdpipes.core.entries import entry_of
from tests.pictures import file_of

NESTED = {"size": {"width": 3, "a.b": 4}, "m.w": 5, "m.n": {"x.y": 6}, "a": {"c": 7}, "a.b": {"c": 8}, "": 9, "e": {}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("size.width", 3),
        ("size.a.b", 4),
        ("m.w", 5),
        ("m.n.x.y", 6),
        ("a.c", 7),
        ("a.b.c", 8),
        ("", 9),
        ("e", {}),
    ],
)
def test_an_entry_is_found_whatever_its_keys_are(path: str, value: Any) -> None:
    assert entry_of(NESTED, path, f"json.{path}") == value


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        (NESTED, "m", "Column 'json.m': there is no entry 'm'; there is 'size', 'm.w', "),
        (NESTED, "size.height", "there is no entry 'height'; there is 'width', 'a.b'"),
        (NESTED, "a.b.d", "there is no entry 'd'; there is 'c'"),
        (NESTED, "e.f", "there is no entry 'f'; the dictionary is empty"),
        ({}, "w", "there is no entry 'w'; the dictionary is empty"),
        (NESTED, "m.w.x", "looks up 'x' in a dictionary, but found int"),
        (bytearray(b"no image"), "width", "needs the bytes of an image file"),
    ],
)
def test_a_missing_entry_is_an_error_with_those_that_exist(value: Any, path: str, words: str) -> None:
    with pytest.raises((kdp.FieldError, kdp.DataError), match=words):
        entry_of(value, path, f"json.{path}")


def rows() -> list[dict[str, Any]]:
    return [{"json": {"m.w": number, "size": {"in.px": 2 * number}}} for number in range(9)]


@pytest.mark.parametrize("source", ["dataset", "table", "shards", "index", "stream"])
def test_dots_in_keys_are_read_from_every_source(source: str, tmp_path: Path) -> None:
    columns = ["json.m.w", "json.size.in.px"]
    url = str(tmp_path / "birds-000000.tar")
    kdp.write_shards(kdp.from_dataset(rows(), "json"), str(tmp_path / "birds-%06d.tar"), max_samples=9)
    if source == "index":
        kdp.index_shards(url, columns=columns)
    pipe: Any = {
        "dataset": lambda: kdp.from_dataset(rows(), "json"),
        "table": lambda: kdp.from_table({"json": [row["json"] for row in rows()]}),
        "shards": lambda: kdp.open_shards(url),
        "index": lambda: kdp.open_shards(url),
        "stream": lambda: kdp.stream_shards(url),
    }[source]()
    chain = pipe.filter_samples(columns=columns, keep=lambda w, px: (w > 2) & (px < 14))
    chain = chain.rename_fields(y="json.m.w", px="json.size.in.px").select("y px")
    expected = [(number, 2 * number) for number in range(3, 7)]
    assert list(chain) == expected
    if source != "stream":
        assert pipe.column("json.m.w").tolist() == list(range(9))
        assert [item for batch in chain.deal(batch_size=8, uneven="keep") for item in batch] == expected


def picture(width: int, format: str) -> bytes:
    return file_of(Image.new("L" if format == "PNG" else "RGB", (width, 7)), format)


@pytest.mark.parametrize("source", ["dataset", "folder", "table", "shards", "index", "stream"])
def test_headers_of_images_are_columns_of_all_sources(tmp_path: Path, source: str) -> None:
    pictures = [picture(5, "JPEG"), picture(6, "PNG"), picture(9, "JPEG")]
    samples = kdp.from_dataset(pictures, "x")
    for number, content in enumerate(pictures):
        path = tmp_path / "photos" / "a" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    url = str(tmp_path / "0.tar")
    kdp.write_shards(samples.rename_fields(jpg="x"), str(tmp_path / "%d.tar"), max_samples=9)
    if source == "index":
        kdp.index_shards(url, columns="jpg.width,jpg.format")
    pipe: Any = {
        "dataset": lambda: samples,
        "folder": lambda: kdp.image_folder(tmp_path / "photos"),
        "table": lambda: kdp.from_table({"x": pictures}),
        "shards": lambda: kdp.open_shards(url).rename_fields(x="jpg"),
        "index": lambda: kdp.open_shards(url).rename_fields(x="jpg"),
        "stream": lambda: kdp.stream_shards(url).rename_fields(x="jpg"),
    }[source]()
    large = pipe.filter_samples(columns=["x.width", "x.format"], keep=lambda w, kind: (w > 5) & (kind != "GIF"))
    sizes = large.rename_fields(w="x.width", h="x.height", c="x.channels", n="x.bytes").select("w h c n")
    assert list(sizes) == [(6, 7, 1, len(pictures[1])), (9, 7, 3, len(pictures[2]))]
