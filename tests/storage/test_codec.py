"""The codec: every value of plain data comes back exactly, and no damage does more than raise."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import struct
import zlib
from collections import OrderedDict, namedtuple
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.msgpack import Ext
from msgspec.msgpack import encode as pack
from PIL import Image

from kdpipes.core.errors import DataError
from kdpipes.storage.codec import DamagedError, decode, encode, register_type

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Box:
    top: int = 0


def entry_of(value: Any, **options: Any) -> bytes:
    return b"".join(encode(value, **options))


def back(value: Any, **options: Any) -> Any:
    return decode(entry_of(value, **options), **options)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are of one type, deeply, and equal, NaN being equal to NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, np.longdouble):
        return bool(one == other)  # its 16 bytes hold a number of 10 bytes and padding that differs between copies
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return bool(one == other) or (one != one and other != other)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
    | hnp.from_dtype(np.dtype("<f4"))
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.text(), st.integers())
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | keys, inner),
    max_leaves=12,
)


@settings(max_examples=150)
@given(values)
def test_plain_data_comes_back_with_its_types(value: Any) -> None:
    assert same(back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(2**64, id="int-of-65-bits"),
        pytest.param(-(10**6000), id="int-of-6000-digits"),
        pytest.param(-0.0, id="minus-zero"),
        pytest.param(math.nan, id="nan"),
        pytest.param([math.inf, -math.inf], id="infinities"),
        pytest.param("\ud800\udc00 \0 é" * 300, id="long-string-with-lone-surrogates"),
        pytest.param("\ud83d\ude00", id="two-lone-surrogates"),
        pytest.param({1: "a", False: "b", "1": "c", None: "d", (1, b"x"): "e", 1.5: "f"}, id="keys-of-all-kinds"),
        pytest.param({"b": 1, "a": {"": []}}, id="keys-in-order"),
        pytest.param([[], (), {}, "", b"", ((),)], id="empty"),
        pytest.param(bytearray(b"abc"), id="bytearray"),
        pytest.param(np.float32(1.5), id="numpy-float"),
        pytest.param(np.datetime64("2024-02-29T12", "h"), id="numpy-date"),
        pytest.param(np.str_("héron"), id="numpy-str"),
        pytest.param(np.bool_(True), id="numpy-bool"),
        pytest.param(np.longdouble(1) / 3, id="numpy-longdouble"),
    ],
)
def test_odd_values_come_back(value: Any) -> None:
    assert same(back(value), value)


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(6, dtype=">i4").reshape(2, 3), id="big-endian"),
        pytest.param(np.array(7, dtype=np.int16), id="0-d"),
        pytest.param(np.zeros((0, 3), dtype=np.complex64), id="empty"),
        pytest.param(np.arange(24).reshape(2, 3, 4)[:, ::2, ::-1], id="not-contiguous"),
        pytest.param(np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1), id="transposed"),
        pytest.param(np.broadcast_to(np.float16(3), (4, 5)), id="broadcast"),
        pytest.param(np.array(["heron", "gull"]), id="strings"),
        pytest.param(np.array(["", ""]), id="empty-strings"),
        pytest.param(np.array([b"a\0b", b""], dtype="S4"), id="bytes"),
        pytest.param(np.zeros(3, dtype="V5"), id="void"),
        pytest.param(np.array(["2024-01-01", "NaT"], dtype="M8[25s]"), id="dates"),
        pytest.param(np.zeros(2, dtype=[("x", ">f4", (2, 3)), ("y", [("z", "u1"), ("w", "M8[ns]")])]), id="structured"),
        pytest.param(np.zeros(2, dtype=np.dtype([("a", "u1"), ("b", "f8")], align=True)), id="with-gaps"),
        pytest.param(np.zeros(2, dtype=[(("title", "a"), "u1")]), id="with-titles"),
        pytest.param(np.array((1, 2.5), dtype=[("a", "i4"), ("b", "f8")]), id="0-d-structured"),
    ],
)
def test_arrays_come_back_in_dtype_shape_and_content(array: Any) -> None:
    twin = back(array)
    assert type(twin) is np.ndarray
    assert (twin.dtype, twin.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(twin, array)


def test_columns_that_lie_together_still_do() -> None:
    twin = back(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    assert twin.flags.f_contiguous
    assert twin.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_arrays_are_read_only_views_at_multiples_of_64_bytes() -> None:
    buffer = bytearray(entry_of({"a": b"12345", "x": np.arange(100, dtype=np.uint8), "y": np.arange(3.0)}))
    twin = decode(buffer)
    base = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    assert [(twin[name].ctypes.data - base) % 64 for name in "xy"] == [0, 0]
    assert not twin["x"].flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        twin["x"].flags.writeable = True
    buffer[-24:] = np.array([5.0, 6.0, 7.0]).tobytes()
    assert twin["y"].tolist() == [5, 6, 7]
    with pytest.raises(BufferError):  # which would leave the views without memory
        buffer.extend(b"more")


def test_a_memory_map_becomes_an_array_and_a_memoryview_bytes(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "map", dtype=np.int32, mode="w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    twin = back([mapped, memoryview(b"abcd")[::2]])
    assert type(twin[0]) is np.ndarray
    assert (twin[0].tolist(), twin[1]) == ([1, 2, 3], b"ac")


DTYPES = [kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)]
PLAIN_DTYPES = sorted({str(kind) for kind in DTYPES if not str(kind).startswith(("torch.q", "torch.bits"))})


@pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental:UserWarning")
@pytest.mark.parametrize("name", PLAIN_DTYPES)
def test_tensors_of_every_dtype_come_back(name: str) -> None:
    kind = getattr(torch, name.removeprefix("torch."))
    tensor = torch.arange(4 * kind.itemsize, dtype=torch.uint8).remainder(2).view(kind).reshape(2, 2)
    for each in (tensor, tensor[:0], tensor[0, 0]):
        twin = back(each)
        assert (twin.dtype, twin.shape, type(twin)) == (kind, each.shape, torch.Tensor)
        assert twin.reshape(-1).view(torch.uint8).tolist() == each.reshape(-1).view(torch.uint8).tolist()


def test_tensors_of_any_strides_come_back_as_copies() -> None:
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    entry = entry_of([tensor.mT[:, ::2], torch.tensor([1 + 2j]).conj()])
    twin = decode(entry)
    assert torch.equal(twin[0], tensor.mT[:, ::2])
    assert twin[1].tolist() == [1 - 2j]
    twin[0].zero_()
    assert decode(entry)[0].sum() != 0


@pytest.mark.parametrize(
    ("tensor", "way_out"),
    [
        (torch.zeros(2, requires_grad=True), r"`\.detach\(\)`"),
        (torch.zeros(2, device="meta"), r"on 'meta'.*`\.cpu\(\)`"),
        (torch.eye(2).to_sparse(), r"`\.to_dense\(\)`"),
    ],
)
def test_tensors_with_more_than_numbers_are_an_error_with_hint(tensor: torch.Tensor, way_out: str) -> None:
    with pytest.raises(TypeError, match=way_out):
        encode(tensor)


def noise(mode: str, size: tuple[int, int] = (7, 5)) -> Image.Image:
    """Return an image of a mode that has no two rows alike."""
    image = Image.new(mode, size)
    content = bytes(np.random.default_rng(0).integers(1, 60, len(image.tobytes()), dtype=np.uint8))
    return Image.frombytes(mode, size, content)


MODES = ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F"]


@pytest.mark.parametrize("mode", [*MODES, "I;16", "I;16B"])
def test_images_of_every_mode_come_back(mode: str) -> None:
    image = noise(mode)
    if mode in ("P", "PA"):
        image.putpalette(bytes(range(256)) * 3)
    twin = back({"x": image})["x"]
    assert (type(twin), twin.mode, twin.size, twin.tobytes()) == (Image.Image, mode, (7, 5), image.tobytes())
    assert twin.getpalette() == image.getpalette()
    twin.putpixel((0, 0), twin.getpixel((1, 1)))


@pytest.mark.parametrize("transparency", [3, bytes(range(60))])
def test_what_a_file_says_of_transparency_comes_back(transparency: Any, tmp_path: Path) -> None:
    image = noise("P")
    image.putpalette(bytes(range(240)))
    image.save(tmp_path / "x.png", transparency=transparency, dpi=(72, 72))
    with Image.open(tmp_path / "x.png") as opened:
        twin = back(opened)
        assert twin.convert("RGBA").tobytes() == opened.convert("RGBA").tobytes()
        assert twin.info["transparency"] == transparency
        assert twin.info["dpi"] == opened.info["dpi"]


def test_a_palette_with_transparency_of_its_own_comes_back() -> None:
    image = noise("P")
    image.putpalette(bytes(range(240)), "RGBA")
    assert back(image).convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_the_orientation_of_a_photo_and_an_empty_image_come_back(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    noise("RGB").save(tmp_path / "x.jpg", exif=exif)
    with Image.open(tmp_path / "x.jpg") as opened:
        assert back(opened).getexif()[0x0112] == 6
    assert back(Image.new("RGB", (0, 4))).size == (0, 4)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Point(1, 2), "Point"),
        (Box(), "Box"),
        (OrderedDict(a=1), r"collections\.OrderedDict"),
        ({1, 2}, "`set`"),
        (1j, "`complex`"),
        (datetime.date(2024, 2, 29), r"datetime\.date"),
        (np.ma.masked_array([1, 2]), "MaskedArray"),
        (torch.nn.Parameter(torch.zeros(1)), "Parameter"),
        (lambda: None, "function"),
        (Opaque(), "Opaque"),
    ],
)
def test_unknown_types_and_subclasses_are_an_error_by_name(value: Any, name: str) -> None:
    for each in (value, {"x": [value]}):
        with pytest.raises(TypeError, match=f"of type `?.*{name}.*cannot be kept.*allow_pickle=True"):
            encode(each)


@pytest.mark.parametrize(
    "array", [np.array([None]), np.zeros(1, dtype=[("x", "O")]), np.array(["a"], dtype=np.dtypes.StringDType())]
)
def test_arrays_of_objects_are_rejected_with_the_way_out(array: Any) -> None:
    with pytest.raises(TypeError, match="array of objects cannot be kept: make it one of numbers or strings"):
        encode(array)


def test_a_value_in_itself_is_rejected() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="more than 64 levels deep, or in itself"):
        encode(endless)


def test_pickles_are_written_and_read_only_on_request() -> None:
    entry = entry_of([1, Box(3)], allow_pickle=True)
    assert decode(entry, allow_pickle=True) == [1, Box(3)]
    with pytest.raises(DataError, match=r"pickle, which could execute arbitrary code.*allow_pickle=True") as rejection:
        decode(entry)
    assert not isinstance(rejection.value, DamagedError)


@pytest.fixture
def registered() -> Any:
    from kdpipes.storage import codec

    tables: list[dict[Any, Any]] = [codec._by_type, codec._by_tag]
    before = [dict(table) for table in tables]
    yield register_type
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def test_a_type_that_is_registered_comes_back(registered: Any) -> None:
    registered("box", Box, lambda box: (box.top,), lambda plain: Box(*plain))
    registered("box", Box, lambda box: (box.top,), lambda plain: Box(*plain))  # as when a module is loaded anew
    assert back({"boxes": [Box(3), Box(4)]}) == {"boxes": [Box(3), Box(4)]}
    with pytest.raises(ValueError, match=r"`tag` must be unused, but is 'box' instead\. It already stands for Box"):
        registered("box", Opaque, lambda _: None, lambda _: Opaque())


def test_a_type_that_is_not_registered_here_is_no_damage(registered: Any) -> None:
    registered("box", Box, lambda box: (box.top,), lambda plain: Box(*plain))
    entry = entry_of(Box(3))
    from kdpipes.storage import codec

    del codec._by_tag["box"]
    with pytest.raises(DataError, match="holds a 'box', which is not registered in this process") as rejection:
        decode(entry)
    assert not isinstance(rejection.value, DamagedError)


EXAMPLE = {
    "x": np.arange(12, dtype=">f4").reshape(3, 4),
    "rows": np.zeros(2, dtype=[("a", "u1"), ("b", "<f8")]),
    "t": torch.arange(3, dtype=torch.bfloat16),
    "image": noise("P"),
    "words": ["heron", ("stork", None, 1.5, b"gull" * 20)],
    7: "a" * 300,
}
ENTRY = entry_of(EXAMPLE)


@given(st.integers(0, len(ENTRY) - 1), st.integers(1, 255))
@example(3, 3)  # the other format number
def test_one_changed_byte_is_found(place: int, change: int) -> None:
    damaged = bytearray(ENTRY)
    damaged[place] ^= change
    with pytest.raises(DamagedError):
        decode(damaged)


@pytest.mark.parametrize("length", [0, 1, 23, 24, 64, len(ENTRY) - 1])
def test_a_cut_or_longer_entry_is_found_without_its_checksum(length: int) -> None:
    for entry in (ENTRY[:length], ENTRY + b"\0"):
        with pytest.raises(DamagedError):
            decode(entry, verify=False)


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, len(ENTRY) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@example([(99, 77)])
def test_damage_that_is_not_looked_for_does_no_harm(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(ENTRY)
    for place, value in changes:
        damaged[place % 400 if value % 2 else place] = value  # the header most of the time
    try:
        found = decode(damaged, verify=False)
    except DataError:
        return
    with suppress(ValueError):  # NumPy cannot show dates without a unit, which one changed letter makes of numbers
        repr(found)


def ext(code: int, *content: Any) -> Ext:
    """Return an extension with a list as its content."""
    return Ext(code, pack(content))


def crafted(header: bytes, contents: bytes = bytes(128)) -> bytes:
    """Return an entry with a header and contents of one's own, with the right checksum."""
    lead = header + bytes(-(24 + len(header)) % 64)
    frame = struct.pack("<3sBIQQ", b"kdp", 3, 0, 24 + len(lead) + len(contents), len(header))
    checksum = zlib.crc32(frame[8:] + lead + contents)
    return frame[:4] + checksum.to_bytes(4, "little") + frame[8:] + lead + contents


TUPLE, INT, STR, BYTES, BYTEARRAY, DICT, ARRAY, SCALAR, TENSOR, REGISTERED = 1, 2, 3, 5, 6, 7, 8, 9, 10, 11


def image_of(*plain: Any) -> Ext:
    return ext(REGISTERED, "image", pack(ext(TUPLE, *plain)))


@pytest.mark.parametrize(
    "header",
    [
        ext(ARRAY, "|u1", [1000000000000], 0, 0),
        ext(ARRAY, "|u1", [-1], 0, 0),
        ext(ARRAY, "|u1", [4], -4, 0),
        ext(ARRAY, "|u1", [4], 2**64 - 1, 0),
        ext(ARRAY, "|u1", ["4"], 0, 0),
        ext(ARRAY, "|O", [1], 0, 0),
        ext(ARRAY, "O", [1], 0, 0),
        ext(ARRAY, '[["a", "O"]]', [1], 0, 0),
        ext(ARRAY, "i4,O", [1], 0, 0),
        ext(ARRAY, "|V4294967295", [1], 0, 0),
        ext(ARRAY, "|u1", [4], 0),
        ext(TENSOR, "float32", [1000000000000], 0),
        ext(TENSOR, "float32", [-1, -1], 0),
        ext(TENSOR, "load", [1], 0),
        ext(TENSOR, "quint4x2", [2], 0),
        ext(TENSOR, "qint32", [2], 0),
        ext(TENSOR, "float32", [1], -8),
        ext(BYTES, 0, 1000000000000),
        ext(BYTES, -4, 2),
        image_of("RGB", ext(TUPLE, 100000, 100000), ext(BYTES, 0, 3), None, {}),
        image_of("nothing", ext(TUPLE, 1, 1), ext(BYTES, 0, 3), None, {}),
        ext(REGISTERED, ["image"], b""),
        ext(DICT, pack([[]]), pack([1])),
        ext(DICT, pack([1, 2]), pack([1])),
        ext(DICT, [1], [1]),
        ext(SCALAR, 1),
        Ext(TUPLE, b""),
        Ext(STR, b"\xff"),
        Ext(BYTEARRAY, pack("heron")),
        Ext(0, b""),
        Ext(100, b""),
    ],
    ids=lambda header: f"{header.code} {header.data!r}",
)
def test_an_extension_that_lies_is_rejected(header: Ext) -> None:
    with pytest.raises(DamagedError):
        decode(crafted(pack(header)))


def nested(depth: int) -> bytes:
    header = b""
    for _ in range(depth):
        header = pack(Ext(TUPLE, b"\x91" + header))
    return header


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x01\x02",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdd\x0f\xff\xff\xff" * 200,
        b"\x81\x91\x01",
        b"\x91" * 100_000,
        nested(2_000),
    ],
    ids=range(10),
)
def test_a_header_that_is_not_message_pack_is_rejected(header: bytes) -> None:
    with pytest.raises(DamagedError):
        decode(crafted(header))


def test_an_entry_of_another_format_is_rejected() -> None:
    for entry in (b"kdp\x02" + ENTRY[4:], b"xyz" + ENTRY[3:], os.urandom(8) + ENTRY[8:]):
        with pytest.raises(DamagedError, match="not in format 3"):
            decode(entry)


def test_an_entry_under_another_key_is_damaged() -> None:
    entry = entry_of("heron", key=b"a")
    assert decode(entry, key=b"a") == "heron"
    assert decode(entry, verify=False) == "heron"
    for other, key in ((entry, b"b"), (entry, b""), (entry_of("heron"), b"a")):
        with pytest.raises(DamagedError, match="belongs to another key"):
            decode(other, key=key)


REFERENCES = {
    "bytes": ext(BYTES, 0, 4096),
    "bytearrays": Ext(BYTEARRAY, pack(ext(BYTES, 0, 4096))),
    "arrays": ext(ARRAY, "|u1", [4096], 0, 0),
    "tensors": ext(TENSOR, "uint8", [4096], 0),
    "keys": ext(DICT, pack([ext(BYTES, 0, 4096)]), pack([0])),
    "images": image_of("L", ext(TUPLE, 64, 64), ext(BYTES, 0, 4096), None, {}),
}


def referring(node: Any, count: int) -> bytes:
    """Return an entry of 4096 bytes that a list refers to as often as it is said."""
    return crafted(pack([node] * count), bytes(4096))


@pytest.mark.parametrize("bytes_as_views", [False, True])
@pytest.mark.parametrize("kind", REFERENCES)
def test_an_entry_that_reads_its_bytes_twice_is_damaged(kind: str, bytes_as_views: bool) -> None:
    assert len(decode(referring(REFERENCES[kind], 1), bytes_as_views=bytes_as_views)) == 1
    for count in (2, 20_000):
        with pytest.raises(DamagedError, match="more than once"):
            decode(referring(REFERENCES[kind], count), bytes_as_views=bytes_as_views)
