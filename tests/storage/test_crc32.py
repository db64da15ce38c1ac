"""Checksums: those of zlib, also by the faster library."""

from __future__ import annotations

import subprocess
import sys
import zlib

import numpy as np
import pytest

from kdpipes.storage import files


@pytest.mark.parametrize("size", [0, 1, 15, 64, 5_000, 100_003])
def test_checksums_are_those_of_zlib(size: int) -> None:
    array = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)
    content = array.tobytes()
    for buffer in (content, bytearray(content), memoryview(content), memoryview(content)[size // 3 :], array):
        assert files.crc32(buffer) == zlib.crc32(buffer)
        assert files.crc32(buffer, 0x89ABCDEF) == zlib.crc32(buffer, 0x89ABCDEF)


def test_zlib_computes_them_without_zlib_ng() -> None:
    assert files.crc32 is not zlib.crc32, "zlib-ng is installed for the tests"
    script = "import sys, zlib; sys.modules['zlib_ng.zlib_ng'] = None; from kdpipes.storage import files\n"
    subprocess.run([sys.executable, "-c", f"{script}assert files.crc32 is zlib.crc32"], check=True)
