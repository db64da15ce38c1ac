"""Encode a sample as members of a tar: key, extension and bytes of each field; and write tars with their indexes.

The same sample makes the same bytes, on every machine and at any time.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from tarfile import PAX_FORMAT, TarInfo
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from kdpipes.core.callback import Callback
from kdpipes.core.errors import ChainError, DataError, add_note, check_callable, closest, must_be
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import logger
from kdpipes.core.operation import position_of
from kdpipes.core.order import Order
from kdpipes.core.sample import Sample
from kdpipes.core.secrets import masked
from kdpipes.storage.decoding import JSON, MARKUP, NUMBERS, TENSORS, TEXTS, decode_array, open_image
from kdpipes.storage.shard_index import IndexBuilder
from kdpipes.storage.tar import Group, Member, add_sample

_AHEAD = 64  # size of a block of samples that a remote source prefetches
_BLOCK = 512  # of a tar
_MODE = 0o644
_LONGEST, _LARGEST = 100, 8**11 - 1  # what the fields of a plain header can hold
END_MARK = bytes(2 * _BLOCK)
_SUFFIX = re.compile(r"(?<=[^/])\.[A-Za-z][A-Za-z0-9]{0,4}$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP", "tif": "TIFF", "ppm": "PPM", "gif": "GIF"}
_FORMATS |= {"avif": "AVIF", "jp2": "JPEG2000", "j2k": "JPEG2000"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "jpg": {"quality": 95},
    "webp": {"lossless": True},
    "avif": {"quality": 90, "max_threads": 1},  # bytes must not depend on the number of processors
    "j2k": {"no_jp2": True},
}
_SAME = {"jpeg": "jpg", "tiff": "tif", "pgm": "ppm"}
_MODES = {"jpg": ("1", "L", "RGB", "CMYK", "RGBA", "LA"), "webp": ("1", "L", "RGB", "RGBA", "LA")}
_MODES |= {"avif": _MODES["webp"], **dict.fromkeys(("jp2", "j2k"), ("L", "LA", "I;16", "RGB", "RGBA"))}
_IMAGES = frozenset({*_FORMATS, *_SAME, "pbm", "pnm", "img", "image"})
_EXTENSION = re.compile(r"[^\s./\\\x00-\x1f][^\s/\\\x00-\x1f]*(?<!\.)")
_STARTS = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    b"\x00\x00\x00\x0cjP  \r\n\x87\n": "jp2",
    b"\xff\x4f\xff\x51": "j2k",
}
_NETPBM = re.compile(rb"P[56]\s")
_ANONYMOUS = frozenset({"x", "y"})  # names that do not tell the kind

Made = TypeVar("Made")
_log = logger("kdpipes")


@runtime_checkable
class _Picture(Protocol):
    """An image of kdpipes, or any object with the same method."""

    def to_pil(self) -> Image.Image: ...


class MemberEncoder(Fingerprinted):
    """Encodes the fields of a sample as members of a tar: extensions and bytes.

    Args:
        fields: The fields to write; None writes all.
        encode: Maps a field name to a function that returns bytes, or to the extension of the format to use.
        extensions: Maps a field name to its extension, where the default (from the name and the kind of the value)
            does not fit.
    """

    def __init__(
        self,
        fields: tuple[str, ...] | None,
        encode: Mapping[str, Callable[[Any], bytes] | str] | None,
        extensions: Mapping[str, str] | None,
    ) -> None:
        self._fields = fields
        self._encode = {
            field: how if isinstance(how, str) else Callback("encode", how)
            for field, how in _checked("encode", encode, check_encoding).items()
        }
        self._extensions = {
            field: extension.removeprefix(".").lower()
            for field, extension in _checked("extensions", extensions, check_extension).items()
        }

    def __call__(self, sample: Sample) -> list[tuple[str, bytes]]:
        """Return the extension and content of each member, sorted by extension; fields that are None have no member."""
        members: dict[str, bytes] = {}
        for field in self._fields or tuple(sample):
            value = sample[field]
            if value is None:
                continue
            try:
                extension, content = self._member(field, value, sample.key)
            except Exception as error:
                add_note(error, f"kdpipes: while writing field {field!r} of sample {sample.key!r}")
                raise
            if extension in members:
                raise ChainError(
                    f"Two fields of sample {sample.key!r} have the extension {extension!r}; one of them is {field!r}. "
                    "Choose another: `extensions={" + f"{field!r}: ...}}`."
                )
            members[extension] = content
        if not members:
            raise ChainError(f"Sample {sample.key!r} has no field to be written. Add one: `.add_field(...)`.")
        return sorted(members.items())

    def fingerprint(self) -> Any:
        return self._fields, sorted(self._encode.items()), sorted(self._extensions.items())

    def _member(self, field: str, value: Any, key: str) -> tuple[str, bytes]:
        kind, content = self._content(field, value)
        extension = self._extensions.get(field) or _extension(field, kind)
        if extension is None:
            suffix = PurePosixPath(key).suffix.lstrip(".") or "npz"
            raise ChainError(
                f"Field {field!r} of sample {key!r} holds bytes of an unknown kind. Name their extension: "
                "`extensions={" + f"{field!r}: {suffix!r}}}`; or, if it is an image file that is broken, leave it out: "
                f'`.decode_images({field!r}).on_error("skip")`.'
            )
        if not _EXTENSION.fullmatch(extension):
            raise ChainError(
                f"The name of field {field!r} is not an extension. Give it one: `extensions={{{field!r}: 'txt'}}`."
            )
        return extension.lower(), content

    def _content(self, field: str, value: Any) -> tuple[str, bytes]:
        """Return the kind of a field's member, and its bytes."""
        how = self._encode.get(field)
        if how is not None and not isinstance(how, str):
            made = how(value)
            if not isinstance(made, bytes | bytearray | memoryview):
                raise TypeError(f"The function `encode[{field!r}]` returned {type(made).__name__}. Return bytes.")
            return _kind_of_bytes(bytes(made)), bytes(made)
        try:
            return (how, _encoded(value, how)) if how is not None else _by_type(field, value)
        except (TypeError, ValueError, OSError) as error:
            if f"Field {field!r}" in str(error):
                raise
            as_what = "" if how is None else f" as {how!r}"
            raise ChainError(
                f"Field {field!r} cannot be written{as_what}: {str(error).rstrip('.')}. Choose an encoding: "
                "`encode={" + f"{field!r}: ...}}` takes a function that returns bytes."
            ) from error


def _checked(param: str, given: Mapping[str, Any] | None, check: Callable[[str, Any], None]) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(field, str) for field in given):
        raise TypeError(must_be(param, "a mapping by field names", given))
    for field, value in given.items():
        check(f"{param}[{field!r}]", value)
    return dict(given)


def check_encoding(param: str, how: Any) -> None:
    """Raise unless an encoding is a known extension or a function."""
    known = sorted({*_FORMATS, *_SAME, "npy", "pth", "json", "txt", "cls"})
    if isinstance(how, str):
        if how not in known:
            raise ValueError(must_be(param, "one of " + ", ".join(known), how, closest(how, known).strip()))
        return
    check_callable(param, how)


def check_extension(param: str, extension: Any) -> None:
    """Raise unless `extension` is a valid file name extension."""
    if not isinstance(extension, str) or not _EXTENSION.fullmatch(extension.removeprefix(".")):
        raise ValueError(must_be(param, 'an extension, like "jpg"', extension))


def _extension(field: str, kind: str) -> str | None:
    """Return the extension of a field: its name if that tells the kind; otherwise the kind is appended, if known."""
    suffix = field.rsplit(".", 1)[-1].lower()
    is_image = kind in _FORMATS or kind in _SAME
    if is_image and (suffix in ("img", "image") or _SAME.get(suffix, suffix) == _SAME.get(kind, kind)):
        return field
    if suffix == kind or any({suffix, kind} <= family for family in (NUMBERS, TEXTS, JSON, TENSORS)):
        return field
    if field in _ANONYMOUS:
        return kind or None
    return f"{field}.{kind}" if kind else field


def _by_type(field: str, value: Any) -> tuple[str, bytes]:
    """Return the kind and the content of a value for which the user has given no encoding."""
    suffix = field.rsplit(".", 1)[-1].lower()
    content = getattr(value, "content", value)
    if isinstance(content, bytes | bytearray | memoryview):
        content = bytes(content)
        return (suffix if suffix in _IMAGES else _kind_of_bytes(content)), content
    if suffix in TENSORS:
        return "pth", _encoded(value, "pth")
    if isinstance(value, str):
        is_name = suffix in NUMBERS or field == "y"
        kind = "cls" if is_name else suffix if suffix in MARKUP | JSON else "txt"
        return kind, value.encode("utf-8", "surrogateescape")
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and suffix not in JSON:
        return "cls", str(int(value)).encode()
    if isinstance(value, Mapping | list | tuple | float | bool | int | np.bool_ | np.floating | np.integer):
        return "json", _encoded(value, "json")
    if isinstance(value, torch.Tensor | np.ndarray):
        is_label = value.ndim == 0 and suffix != "npy"
        return _by_type(field, value.item()) if is_label else ("npy", _encoded(value, "npy"))
    raise ChainError(
        f"Field {field!r} holds {type(value).__name__}, which has no encoding of its own. Say how it is written: "
        "`encode={" + f"{field!r}: 'png'}}`, or a function that returns bytes."
    )


def _encoded(value: Any, kind: str) -> bytes:
    """Return a value in the format that the user has chosen, or in the only one for its type."""
    if kind in _FORMATS or kind in _SAME:
        return _image_bytes(value, _SAME.get(kind, kind))
    if kind == "npy":
        file = io.BytesIO()
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        if array.dtype == object:
            raise ChainError("an array of objects would need pickle")
        np.save(file, np.ascontiguousarray(array) if array.ndim else array, allow_pickle=False)
        return file.getvalue()
    if kind == "pth":
        file = io.BytesIO()
        torch.save(value, file)
        decode_array(kind, file.getvalue())  # raises for data that only pickle could load
        return file.getvalue()
    if kind == "json":
        return json.dumps(value, ensure_ascii=False, default=_plain).encode("utf-8", "surrogateescape")
    return str(value).encode("utf-8")


def _plain(value: Any) -> Any:
    """Return a value of NumPy or torch as plain Python data, which JSON supports."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    raise ChainError(f"JSON cannot represent {type(value).__name__}")


def _image_bytes(value: Any, kind: str) -> bytes:
    """Return an image in a format; the bytes of an image that is already in this format do not change."""
    content = getattr(value, "content", value)
    if isinstance(content, bytes) and _kind_of_bytes(content) == kind:
        return content
    file = io.BytesIO()
    image = _as_pil(value)
    if image.mode not in _MODES.get(kind, (image.mode,)):
        instead = "tif" if image.mode == "F" else "png"
        raise ChainError(
            f"{kind!r} cannot store an image of mode {image.mode!r} without loss: choose another format, such as "
            f"{instead!r}, or convert the image"
        )
    image = image.convert("RGB") if kind == "jpg" and image.mode in ("RGBA", "LA") else image
    try:
        image.save(file, _FORMATS[kind], **_OPTIONS.get(kind, {}))
    except KeyError as error:
        raise ChainError(f"this Pillow cannot write {kind!r}: install Pillow 11.3 or newer") from error
    return file.getvalue()


def _as_pil(value: Any) -> Image.Image:
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, _Picture):
        return value.to_pil()
    if isinstance(value, bytes):
        return open_image(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
        value = value.transpose(1, 2, 0) if value.ndim == 3 else value
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        return Image.fromarray(np.ascontiguousarray(value[..., 0] if value.shape[2:] == (1,) else value))
    shown = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
    raise ChainError(f"{shown} is not an image (tensors must be [C, H, W] uint8, arrays [H, W, C] uint8)")


def _kind_of_bytes(content: bytes) -> str:
    """Return the extension of an image, by its first bytes; empty if the bytes are not an image."""
    for start, kind in _STARTS.items():
        if content.startswith(start):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    if content[4:8] == b"ftyp":
        return _kind_of_brands(content[8 : int.from_bytes(content[:4], "big")])
    if content[:2] == b"BM" and int.from_bytes(content[2:6], "little") == len(content):
        return "bmp"
    return "ppm" if _NETPBM.match(content) else ""


def _kind_of_brands(content: bytes) -> str:
    """Return the extension of a file of ISO's container format by its brands; empty if it is not an image."""
    brands = {content[start : start + 4] for start in range(0, len(content), 4)}
    if brands & {b"avif", b"avis"}:
        return "avif"
    return "heic" if brands & {b"heic", b"heix", b"hevc", b"mif1"} else ""


def as_tar_key(key: str) -> str:
    """Return the key of a sample in the form that webdataset can hold: a path whose file name has no dot.

    The extension of a file is removed. Other dots and all backslashes become underscores; slashes stay.

    >>> as_tar_key("heron/0001.jpg"), as_tar_key("photos.tar/0001.v2.jpg"), as_tar_key("/data/1.5")
    ('heron/0001', 'photos.tar/0001_v2', 'data/1_5')
    """
    folder, _, name = _SUFFIX.sub("", key).replace("\\", "_").rpartition("/")
    parts = [part for part in folder.split("/") if part not in ("", ".")]
    return check_tar_key("/".join([*parts, name.replace(".", "_")]), key)


def check_tar_key(key: str, shown: str | None = None) -> str:
    """Return `key`, or raise if webdataset cannot hold it; the error shows `shown` instead, if that is given."""
    if not isinstance(key, str):
        raise TypeError(f"`key` must return a string, but returned {type(key).__name__}. Convert it: `str(...)`.")
    folder, _, name = key.rpartition("/")
    bad = "has no name" if not name else "leads out of its folder" if ".." in folder.split("/") else ""
    bad = bad or ("has a dot in its file name, where webdataset would split it" if "." in name else "")
    bad = bad or ("lies in `__meta__/`, which readers of shards skip" if key.startswith("__meta__/") else "")
    bad = bad or ("holds control characters" if _CONTROL.search(key) else "is absolute" if key.startswith("/") else "")
    if bad:
        raise DataError(
            f"Key {key if shown is None else shown!r} cannot be used in a tar: it {bad}. "
            "Pass other keys: `key=lambda sample: ...`."
        )
    return key


def duplicate_error(key: str, where: str) -> DataError:
    """Return the error for a key that two samples have."""
    return DataError(
        f"Two samples have the key {key!r}, in {where}: keys must be unique. For a chain that repeats samples "
        "(`.oversample()`, `.repeat_until()`), pass keys by position: `key=lambda sample: f'{sample.ordinal:09}'`."
    )


def make_or_leave_out(
    fetch: Callable[[], Sample],
    make: Callable[[Sample], Made],
    *,
    position: int,
    handler: Any,
    is_indexed: bool = True,
) -> Made | None:
    """Return the result of `make` for a sample, or None if the chain's `on_error` leaves the sample out.

    Args:
        fetch: A function that returns the sample. It may raise.
        make: A function that is called with the sample. It may raise.
        position: Names the sample in the log if it cannot be fetched.
        handler: The chain's error handler (see `Chain.error_handler`), or None.
        is_indexed: Whether the quarantine lists the position, too, because other samples may have the key.
    """
    sample = None
    try:
        sample = fetch()
        return make(sample)
    except Exception as error:
        if handler is None or not handler.tolerates(error):
            raise
        key = f"position {position}" if sample is None else sample.key
        place = () if sample is None or not is_indexed else position_of(sample)
        handler.write_down(key, f"{type(error).__name__}: {error}", position=place, once=True)
        _log.warning("Sample %r is left out: %s: %s", key, type(error).__name__, masked(str(error)))
        return None


def prefetched(pipe: Any, positions: NDArray[Any]) -> Iterator[int]:
    """Yield positions. An indexed source prefetches them two blocks ahead."""
    stop = 0
    for number, position in enumerate(positions.tolist()):
        if number % _AHEAD == 0 and stop < len(positions) and isinstance(pipe, MapPipe):
            block = positions[stop : number + 2 * _AHEAD]
            stop += len(block)
            pipe.prefetch(Order.of_next(block))
        yield position


class TarSample(NamedTuple):
    """The bytes of a sample in a tar."""

    key: str
    members: list[tuple[str, bytes, bytes]]

    @property
    def num_bytes(self) -> int:
        """The number of bytes that it takes in a tar."""
        return sum(len(header) + len(content) + -len(content) % _BLOCK for _, header, content in self.members)


def as_tar_sample(key: str, members: Iterable[tuple[str, bytes]]) -> TarSample:
    """Return the bytes of a sample in a tar, from the extension and content of each member."""
    return TarSample(key, [(name, _header(f"{key}.{name}", len(content)), content) for name, content in members])


def _header(name: str, size: int) -> bytes:
    """Return what tarfile makes of a name and a size, which takes it 20 times as long where both are plain."""
    if size > _LARGEST or len(name) > _LONGEST or not name.isascii():
        return _by_tarfile(name, size)
    letters = name.encode()
    digits = b"%011o" % size
    total = b"%06o\0 " % (_PLAIN_SUM + sum(letters) + sum(digits))
    return b"".join((letters.ljust(100, b"\0"), _PLAIN[100:124], digits, _PLAIN[135:148], total, _PLAIN[156:]))


def _by_tarfile(name: str, size: int) -> bytes:
    info = TarInfo(name)
    info.size = size
    info.mode = _MODE
    return info.tobuf(PAX_FORMAT, "utf-8", "surrogateescape")


_PLAIN = _by_tarfile("", 0)
_PLAIN_SUM = sum(_PLAIN[:124]) + sum(_PLAIN[135:148]) + 8 * ord(" ") + sum(_PLAIN[156:])


class TarShard:
    """A tar that grows sample by sample, and its index, for which nothing has to be read again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.builder = IndexBuilder()  # of the index of the complete tar
        self.keys: dict[str, None] = {}
        self.num_bytes = 0

    def chunks(self, samples: Iterable[TarSample]) -> Iterator[bytes]:
        """Yield the bytes of the tar, including the end mark.

        Raises:
            DataError: Two samples have the same key.
        """
        for key, members in samples:
            if key in self.keys:
                raise duplicate_error(key, f"shard {self._url!r}")
            self.keys[key] = None
            group: Group = []
            for extension, header, content in members:
                offset = self.num_bytes + len(header)
                size = len(content)
                group.append((Member(key, extension, f"{key}.{extension}", offset, size), content))
                self.num_bytes = offset + size + -size % _BLOCK
                yield header
                yield content
                yield bytes(-size % _BLOCK)
            add_sample(self.builder, group)
        self.num_bytes += len(END_MARK)
        yield END_MARK
