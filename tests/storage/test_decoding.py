"""What the members of shards are decoded to, and what is an error instead of a crash, a lot of memory, or code."""

from __future__ import annotations

import _codecs
import io
import zipfile
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kdpipes.storage.decoding import decode_array, decode_member


def npy(array: Any, *, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def pth(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def header(shape: str, dtype: str = "'<f8'", content: bytes = b"") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def test_members_are_decoded_by_their_extension() -> None:
    known: list[tuple[str, bytes, Any]] = [
        ("cls", b" -3\n", -3),
        ("cls", b"heron\n", "heron"),
        ("seg.index", b"12", 12),
        ("txt", " wei\u00df\n".encode(), " wei\u00df\n"),
        ("page.html", b"<p>", "<p>"),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("jpg", b"\xff\xd8", b"\xff\xd8"),
    ]
    for field, content, value in known:
        assert decode_member(field, content) == value
    for field, content in [("json", b"{"), ("txt", b"\xff"), ("cls", b"\xff"), ("json", b"[" * 100_000)]:
        with pytest.raises(ValueError):
            decode_member(field, content)


def test_undecoded_members_stay_bytes_but_for_numbers() -> None:
    for field, content in [("npy", npy(np.zeros(2))), ("json", b"{"), ("txt", b"\xff"), ("html", b"a"), ("pth", b"b")]:
        assert decode_member(field, content, decode=False) is content
    assert decode_member("cls", b"7", decode=False) == 7


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.zeros((0, 3), np.float16),
        np.array(5),
        np.array(["a", "größe"]),
        np.array([(1, 2.5)], dtype=[("größe", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["", ""]),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:Stored array in format 3.0:UserWarning")
def test_arrays_come_back_writable(array: Any) -> None:
    back = decode_array("npy", npy(array))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (npy(np.array([{}], dtype=object), allow_pickle=True), "objects"),
        (header("(1,)", "[('a', '<i4'), ('b', '|O')]", b"\0" * 64), "objects"),
        (header("(1000000000000, 1000)"), "declares an array of float64"),
        (header("(99999999999999999999999,)"), "declares an array of float64"),
        (header("(1000000000000,)", "'|V0'"), "declares an array"),
        (header("(-1, -8)", content=b"\0" * 64), "declares an array of float64"),
        (header("(9,)", content=b"\0" * 64), "64 bytes follow it"),
        (header("(True,)", "'<nope'"), "."),
        (header("(" * 300), "."),
        (b"PK\x03\x04", "magic"),
        (b"", "."),
        (b"\x93NUMPY\x07\x00\x01\x00", "."),
    ],
    ids=lambda value: value[-20:].hex() if isinstance(value, bytes) else None,
)
def test_hostile_npy_files_are_errors_of_the_data(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_array("npy", content)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_damaged_npy_files_raise_nothing_but_value_errors(noise: bytes, place: int) -> None:
    content = npy(np.arange(20.0))
    for damaged in (content[:place], content[:place] + noise + content[place:], noise):
        with suppress(ValueError):
            assert isinstance(decode_array("npy", damaged), np.ndarray)


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_come_back_from_pth_files(is_zip: bool) -> None:
    value = {"a": torch.arange(3, dtype=torch.bfloat16), "b": [torch.zeros(2, 2), 5, "c"]}
    back = decode_member("features.PTH", pth(value, _use_new_zipfile_serialization=is_zip))
    assert torch.equal(back["a"], value["a"])
    assert back["b"][1:] == [5, "c"]


class Exploding:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


def test_pth_files_that_would_run_code_are_errors() -> None:
    with pytest.raises(ValueError, match="UnpicklingError: Weights only load failed"):
        decode_array("pt", pth({"a": Exploding()}))


def test_pth_files_that_unpack_to_more_are_errors() -> None:
    bomb = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(pth(torch.zeros(1000, 1000)))) as source, zipfile.ZipFile(bomb, "w") as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"the file of \d{4} bytes declares 400\d{4} bytes"):
        decode_array("pth", bomb.getvalue())
    with pytest.raises(ValueError, match="the file is compressed, which torch does not do"):
        decode_array("pth", bytes(4_100_000) + bomb.getvalue())


class Calling:
    """A function and arguments, of which a pickle makes a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(1).expand(1 << 40), r"holds tensors that take \d+ bytes once they are copied"),
        ({"a": [torch.zeros(1).expand(3, 1 << 22)]}, r"holds tensors that take 5033164[89] bytes"),
        ([torch.zeros(1).expand(1 << 21) for _ in range(3)], "holds tensors that take 25165824 bytes"),
        (Calling(bytearray, 1 << 36), "holds bytes, which can take any size"),
        (Calling(_codecs.encode, Calling(_codecs.encode, "aa", "latin1"), "hex"), "holds bytes"),
    ],
    ids=["expanded", "nested", "many", "bytearray", "codec"],
)
def test_pth_files_that_grow_in_memory_are_errors(value: Any, reason: str, is_zip: bool) -> None:
    content = pth(value, _use_new_zipfile_serialization=is_zip)
    assert len(content) < 10_000
    with pytest.raises(ValueError, match=reason):
        decode_array("pth", content)


def test_views_of_tensors_come_back_from_pth_files() -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    back = decode_array("pth", pth([rows, rows.T, torch.zeros(1).expand(100), torch.eye(3).to_sparse()]))
    assert torch.equal(back[1], rows.T)
    assert back[2].shape == (100,)
