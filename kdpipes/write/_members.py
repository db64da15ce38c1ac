"""What becomes of a sample's fields in a tar: the extension and the bytes of each."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image

from kdpipes.core.callback import Callback
from kdpipes.core.errors import ChainError, add_note, check_callable, closest, must_be
from kdpipes.core.sample import Sample
from kdpipes.storage.decoding import decode_array

__all__ = ["MemberEncoder", "check_encoding", "check_extension"]

_JPEG_QUALITY = 95
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP", "tif": "TIFF", "ppm": "PPM", "gif": "GIF"}
_OPTIONS: dict[str, dict[str, Any]] = {"jpg": {"quality": _JPEG_QUALITY}, "webp": {"lossless": True}}
_SAME = {"jpeg": "jpg", "tiff": "tif", "pgm": "ppm"}
_MODES = {"jpg": ("1", "L", "RGB", "CMYK", "RGBA", "LA"), "webp": ("1", "L", "RGB", "RGBA", "LA")}
_IMAGES = frozenset({*_FORMATS, *_SAME, "pbm", "pnm", "img", "image"})
_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_TEXTS = frozenset({"txt", "text", "transcript"})
_JSON = frozenset({"json", "jsn"})
_TENSORS = frozenset({"pth", "pt"})
_MARKUP = frozenset({"html", "htm", *_JSON})  # as which a string stands for itself
_EXTENSION = re.compile(r"[^\s./\\\x00-\x1f][^\s/\\\x00-\x1f]*(?<!\.)")
_NETPBM = re.compile(rb"P[56]\s")
_ANONYMOUS = frozenset({"x", "y"})  # names that say nothing of the kind


@runtime_checkable
class _Picture(Protocol):
    """An image of kdpipes' own, or one like it."""

    def to_pil(self) -> Image.Image: ...


class MemberEncoder:
    """Turns a sample into members of a tar: extensions and bytes.

    Args:
        fields: Which fields; None is all.
        encode: By field, how: a function that returns bytes, or an extension.
        extensions: By field, the extension, where it is not to follow from the field's name and kind.
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
        """Return the extension and the content of each member, sorted by extension; a field that is None has none.

        Raises:
            ChainError: A field cannot be written, or two would have the same extension.
        """
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
                    f"Two fields of sample {sample.key!r} would be member {extension!r}, {field!r} is one of them: "
                    "name others, `extensions={" + f"{field!r}: ...}}`."
                )
            members[extension] = content
        if not members:
            raise ChainError(f"Sample {sample.key!r} has no field to be written.")
        return sorted(members.items())

    def fingerprint(self) -> Any:
        return self._fields, sorted(self._encode.items()), sorted(self._extensions.items())

    def _member(self, field: str, value: Any, key: str) -> tuple[str, bytes]:
        kind, content = self._content(field, value)
        extension = self._extensions.get(field) or _extension(field, kind)
        if extension is None:
            raise ChainError(
                f"Field {field!r} of sample {key!r} holds bytes of an unknown kind. Name their extension: "
                "`extensions={" + f"{field!r}: 'npz'}}`; or, if it is an image file that is broken, leave it out: "
                f'`.decode_images({field!r}).on_error("skip")`.'
            )
        if not _EXTENSION.fullmatch(extension):
            raise ChainError(
                f"The name of field {field!r} is no extension. Give it one: `extensions={{{field!r}: 'txt'}}`."
            )
        return extension.lower(), content

    def _content(self, field: str, value: Any) -> tuple[str, bytes]:
        """Return the kind of a field's member, and its bytes."""
        how = self._encode.get(field)
        if how is not None and not isinstance(how, str):
            content = _as_bytes(how(value))
            return _kind_of_bytes(content), content
        try:
            return (how, _encoded(value, how)) if how is not None else _by_type(field, value)
        except (TypeError, ValueError, OSError) as error:
            if f"Field {field!r}" in str(error):
                raise
            as_what = "" if how is None else f" as {how!r}"
            raise ChainError(
                f"Field {field!r} cannot be written{as_what}: {str(error).rstrip('.')}. Say how it is to be written: "
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
    """Refuse what is no extension."""
    if not isinstance(extension, str) or not _EXTENSION.fullmatch(extension.removeprefix(".")):
        raise ValueError(must_be(param, 'an extension, like "jpg"', extension))


def _extension(field: str, kind: str) -> str | None:
    """Return the extension of a field: its name, if that tells the kind; else the kind is added, if there is one."""
    if _tells(field.rsplit(".", 1)[-1].lower(), kind):
        return field
    if field in _ANONYMOUS:
        return kind or None
    return f"{field}.{kind}" if kind else field


def _tells(suffix: str, kind: str) -> bool:
    is_image = kind in _FORMATS or kind in _SAME
    if is_image and (suffix in ("img", "image") or _SAME.get(suffix, suffix) == _SAME.get(kind, kind)):
        return True
    return suffix == kind or any(suffix in family and kind in family for family in (_NUMBERS, _TEXTS, _JSON, _TENSORS))


def _by_type(field: str, value: Any) -> tuple[str, bytes]:
    """Return the kind and the content of a value that nobody has said how to write."""
    suffix = field.rsplit(".", 1)[-1].lower()
    content = getattr(value, "content", value)
    if isinstance(content, bytes | bytearray | memoryview):
        content = bytes(content)
        return (suffix if suffix in _IMAGES else _kind_of_bytes(content)), content
    if suffix in _TENSORS:
        return "pth", _encoded(value, "pth")
    if isinstance(value, str):
        is_name = suffix in _NUMBERS or field == "y"
        kind = "cls" if is_name else suffix if suffix in _MARKUP else "txt"
        return kind, value.encode("utf-8", "surrogateescape")
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and suffix not in _JSON:
        return "cls", str(int(value)).encode()
    if isinstance(value, Mapping | list | tuple | float | bool | int | np.bool_ | np.floating | np.integer):
        return "json", _encoded(value, "json")
    if isinstance(value, torch.Tensor | np.ndarray):
        is_label = value.ndim == 0
        return _by_type(field, value.item()) if is_label else ("npy", _encoded(value, "npy"))
    raise ChainError(
        f"Field {field!r} holds {type(value).__name__}, which has no encoding of its own. Say how it is written: "
        "`encode={" + f"{field!r}: 'png'}}`, or a function that returns bytes."
    )


def _encoded(value: Any, kind: str) -> bytes:
    """Return a value in a format that the user has chosen, or that is the only one for its type."""
    if kind in _FORMATS or kind in _SAME:
        return _image_bytes(value, _SAME.get(kind, kind))
    if kind == "npy":
        file = io.BytesIO()
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        if array.dtype == object:
            raise ChainError("An array of objects is not written: only pickle could.")
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
    """Return what JSON knows for a value of NumPy's or torch's."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    raise ChainError(f"JSON does not know {type(value).__name__}: `encode=` takes a function that returns bytes.")


def _image_bytes(value: Any, kind: str) -> bytes:
    """Return an image in a format; one that has it already keeps its bytes."""
    content = getattr(value, "content", value)
    if isinstance(content, bytes) and _kind_of_bytes(content) == kind:
        return content
    file = io.BytesIO()
    image = _as_pil(value)
    if image.mode not in _MODES.get(kind, (image.mode,)):
        raise ChainError(f"an image of mode {image.mode!r} would lose values")
    image = image.convert("RGB") if kind == "jpg" and image.mode in ("RGBA", "LA") else image
    image.save(file, _FORMATS[kind], **_OPTIONS.get(kind, {}))
    return file.getvalue()


def _as_pil(value: Any) -> Image.Image:
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, _Picture):
        return value.to_pil()
    if isinstance(value, bytes):
        return Image.open(io.BytesIO(value))
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
        value = value.transpose(1, 2, 0) if value.ndim == 3 else value
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        return Image.fromarray(np.ascontiguousarray(value[..., 0] if value.shape[2:] == (1,) else value))
    shown = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
    raise ChainError(f"{shown} is no image: tensors are [C, H, W] uint8, arrays [H, W, C] uint8.")


def _as_bytes(content: Any) -> bytes:
    if not isinstance(content, bytes | bytearray | memoryview):
        raise TypeError(f"A function of `encode` must return bytes, but returned {type(content).__name__}.")
    return bytes(content)


def _kind_of_bytes(content: bytes) -> str:
    """Return the extension for an image, by its first bytes; nothing for what is none."""
    if content.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if content.startswith((b"II*\0", b"MM\0*")):
        return "tif"
    if content[:2] == b"BM" and int.from_bytes(content[2:6], "little") == len(content):
        return "bmp"
    return "ppm" if _NETPBM.match(content) else ""
