"""How entries of a cache of files may be compressed, and which packages that takes."""

from __future__ import annotations

import io
import zlib

from fsspec.compression import compr

from kdpipes.errors import check_choice

__all__ = ["check_compression", "compressed", "decompressed"]

_PACKAGES = {"lz4": "lz4", "snappy": "python-snappy", "zstd": "zstandard"}


def check_compression(compression: str | None) -> None:
    """Refuse a compression that is not known, or whose package is not installed.

    Raises:
        ImportError: The package is missing.
        ValueError: There is no such compression.
    """
    known = [None, "zlib", *sorted({*filter(None, compr), *_PACKAGES} - {"zip"})]
    check_choice("compression", compression, known)
    if compression in _PACKAGES and compression not in compr:
        package = _PACKAGES[compression]
        raise ImportError(f"Compression {compression!r} needs {package}: `pip install {package}`.")


def compressed(content: bytes, compression: str | None) -> bytes:
    """Return an entry as its file has it."""
    if compression is None:
        return content
    if compression == "zlib":
        return zlib.compress(content, 1)
    target = _Target()
    with compr[compression](target, mode="wb") as file:
        file.write(content)
    return target.getvalue()


def decompressed(content: bytes, compression: str | None) -> bytes:
    """Return an entry of what its file has."""
    if compression is None:
        return content
    if compression == "zlib":
        return zlib.decompress(content)
    with compr[compression](io.BytesIO(content), mode="rb") as file:
        return bytes(file.read())


class _Target(io.BytesIO):
    """Bytes that can be read when they have been closed, as some compressions do."""

    def close(self) -> None:
        """Stay open."""
