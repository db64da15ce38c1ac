"""Plain webdataset tars: read sequentially, or indexed for reading members by position."""

from __future__ import annotations

import lzma
import math
import os
import re
import stat
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from fsspec.compression import compr

from kdpipes.core.errors import DataError, FieldError
from kdpipes.core.messages import warn
from kdpipes.storage.access import NoRangesError
from kdpipes.storage.decoding import INTEGER, NUMBERS, ColumnBuilder
from kdpipes.storage.files import crc32, naming, read_url
from kdpipes.storage.readers import Version, read_span
from kdpipes.storage.remote import BrokenStreamError, RemoteStream, Span, read_range
from kdpipes.storage.shard_index import IndexBuilder, MemberRow, Places, ShardIndex
from kdpipes.storage.tar_headers import (
    LONGEST_END,
    FileBytes,
    ForwardBytes,
    NoTarError,
    StreamBytes,
    UnreadableTarError,
    read_entries,
    truncated,
)
from kdpipes.storage.urls import is_local

_LONGEST_NUMBER = 18  # digits that fit in 64 bits
_UNREADABLE = (EOFError, OSError, lzma.LZMAError, zlib.error)
_HEADER = 512
_SIZE_IN_HEADER = slice(124, 136)
_NUM_PROBES = 3
MAX_MEMBER_BYTES = 1 << 31
_HEAD = 10  # bytes that identify a compressed file; a member of a plain tar may be named "BZh"
_COMPRESSIONS = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
_PACKAGES = {"zstd": "zstandard"}
_SKIPPED = ("__meta__/", "__MACOSX/")  # metadata of webdataset and of macOS
_KINDS = {"link": "link", "sparse": "sparse file"}
_SORTED = "`tar --sort=name --hard-dereference --dereference -cf NEW.tar -C FOLDER .`"


class Member(NamedTuple):
    """One file in a shard."""

    key: str
    field: str
    name: str
    offset: int
    size: int


Content = tuple[Member, Any]  # a member and its bytes, or None if they were not read
Group = list[Content]  # the members of one sample


def read_members(
    url: str, open_stream: Callable[[str], RemoteStream] = RemoteStream, max_member_bytes: int = MAX_MEMBER_BYTES
) -> Generator[Group, None, None]:
    """Yield the members of each sample of a tar with their contents, sequentially.

    Compressed tars are recognized by their first bytes. Remote ones are decompressed locally, so that reading can
    resume after an interrupted request. `max_member_bytes` limits the size of members, because a small compressed file
    can hold very large ones.

    Raises:
        FileNotFoundError: The tar does not exist.
        DataError: The file is truncated, damaged, or not a tar, or two members of a sample have the same extension.
    """
    raw: Any
    file: Any
    with (
        _opened(url, open_stream) as raw,
        _unpacked(url, raw) as file,
    ):
        has_positions = is_local(url) and file is raw and stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        source = FileBytes(file.fileno()) if has_positions else StreamBytes(file)
        with _naming(url, source, "a tar"):
            yield from _grouped(url, _members(url, source, lambda _: True, max_member_bytes))


def _opened(url: str, open_stream: Callable[[str], RemoteStream] = RemoteStream) -> Any:
    """Open a tar for sequential reading."""
    if not is_local(url):
        return open_stream(url)
    with naming(url):
        return open(url, "rb")  # noqa: PTH123 - the caller closes it


def _unpacked(url: str, raw: Any) -> Any:
    """Return a context with the bytes of a tar that was just opened: the file itself, or its decompressed contents."""
    compression = compression_of(url, raw)
    if compression is None:
        return nullcontext(raw)
    if compression not in compr:
        package = _PACKAGES.get(compression, "fsspec")
        raise DataError(
            f"{url!r} is compressed by {compression}, which this Python cannot read: `pip install {package}`."
        )
    return compr[compression](raw, mode="r")


def compression_of(url: str, file: Any) -> str | None:
    """Return the compression of a tar that was just opened, judged by its first bytes; None for a plain tar."""
    with _naming(url, StreamBytes(file), "a tar"):
        head = bytes(file.peek(_HEAD)[:_HEAD])
    return _compression_in(head)


def _compression_in(head: bytes) -> str | None:
    return next((name for name, pattern in _COMPRESSIONS.items() if pattern.match(head)), None)


def is_compressed(url: str, version: Version) -> bool:
    """Return whether a tar is compressed, judged by its first bytes. A remote tar takes one small request."""
    size = version.size if 0 <= version.size < _HEAD else _HEAD
    return size > 0 and _compression_in(_Parts(url).read(0, size)) is not None


def _split(name: str) -> tuple[str, str]:
    """Return the key and field of a member like webdataset's `base_plus_ext`. The field is empty for non-members.

    Hidden files are not part of a sample: macOS packs `._NAME`, its metadata of a file, before each `NAME`.
    """
    folder, slash, file = name.rpartition("/")
    stem, _, field = file.partition(".")
    if not stem or name.startswith(_SKIPPED):
        return name, ""
    return folder + slash + stem, field


def _members(
    url: str, source: ForwardBytes, is_wanted: Callable[[str], bool], max_bytes: float = math.inf
) -> Iterator[Content]:
    """Yield the members that belong to samples, with the contents of wanted fields and of numbers; None for others."""
    longest: dict[str, float] = {}  # the size up to which contents are needed, by field
    for name, offset, size, kind in read_entries(source):
        key, field = _split(name)
        if not field or kind == "other":
            continue
        if kind != "file":
            raise DataError(
                f"Member {name!r} of shard {url!r} is a {_KINDS[kind]}, whose content is not stored in one piece "
                f"there. Extract the shard (`tar -xf`) and pack the files: {_SORTED}."
            )
        field = field.lower()
        if field not in longest:
            is_number = field.rsplit(".", 1)[-1] in NUMBERS
            longest[field] = math.inf if is_wanted(field) else _LONGEST_NUMBER if is_number else -1
        member = Member(key, field, name, offset, size)
        if size > longest[field]:
            yield member, None
            continue
        if size > max_bytes:
            raise DataError(
                f"Member {name!r} of shard {url!r} at offset {offset} has {size:,} bytes; "
                f"`stream_shards(max_member_bytes=)` allows {max_bytes:,}."
            )
        try:
            content = source.take(offset, size)
        except BrokenStreamError as error:
            raise UnreadableTarError(f"{error} (in member {name!r} at offset {offset})") from error
        except _UNREADABLE as error:
            raise DataError(f"Shard {url!r} is truncated in member {name!r} at offset {offset}: {error}.") from error
        if len(content) < size:
            raise truncated(name, offset, size, len(content))
        yield member, content


@contextmanager
def _naming(url: str, source: ForwardBytes, what: str) -> Iterator[None]:
    """Replace errors with errors that name the shard and the offset."""
    try:
        yield
    except (UnreadableTarError, BrokenStreamError) as error:
        is_cut = isinstance(error, UnreadableTarError) and not is_local(url)
        retry = " Its storage may have cut it: if it is whole there, read it again." if is_cut else ""
        raise DataError(f"Shard {url!r} {error}.{retry}") from error
    except (NoTarError, *_UNREADABLE) as error:
        if isinstance(error, NoTarError) or source.position == 0:
            raise DataError(f"{url!r} cannot be read as {what}: {error}.") from error
        raise DataError(f"Shard {url!r} cannot be read from offset {source.position} on: {error}.") from error


def _grouped(url: str, members: Iterable[Content]) -> Iterator[Group]:
    """Yield the members of one sample at a time.

    Raises:
        DataError: The members of a sample are not adjacent.
    """
    seen: set[str] = set()
    for group in _runs(url, members):
        key, _, name, offset, _ = group[0][0]
        if key in seen:
            raise DataError(
                f"Shard {url!r} has members of sample {key!r} in two places: the second is {name!r} at offset "
                f"{offset}. Streams need the members of a sample next to each other: sort them ({_SORTED}), or read "
                "the shard with `kdp.open_shards`, whose index joins them."
            )
        seen.add(key)
        yield group


def _runs(url: str, members: Iterable[Content]) -> Iterator[Group]:
    """Yield consecutive members with the same key, as webdataset groups them."""
    for key, run in groupby(members, lambda content: content[0].key):
        group: Group = []
        fields: set[str] = set()
        for member, content in run:
            if member.field in fields:
                raise _repeated(url, member.field, key, member.offset)
            fields.add(member.field)
            group.append((member, content))
        yield group


def _repeated(url: str, field: str, key: str, offset: int) -> DataError:
    return DataError(
        f"Shard {url!r} has two members for field {field!r} of sample {key!r}: the second is at offset {offset}. "
        "Write the shard again with one file of each extension per key."
    )


def index_shard(
    url: str,
    version: Version,
    *,
    with_checksums: bool = False,
    columns: Sequence[str] = (),
    checksum: Any = None,
) -> ShardIndex:
    """Read the headers of a plain tar, and return the index of its members.

    The members of a sample need not be adjacent; samples are in the order of their first members. In local files, only
    headers, integers such as classes, and the members needed for columns are read. Remote files are read completely.

    Args:
        url: A path or URL.
        version: The version of the tar.
        with_checksums: Whether to read all contents and store their CRC-32.
        columns: The names of the columns to store, such as "json.width".
        checksum: A hash object of hashlib for a remote tar, which is updated with all bytes of the tar.

    Raises:
        DataError: The file is truncated, damaged, compressed, or not a tar, or a column cannot be stored.
        FieldError: No sample has a value of a column.
    """
    builder = IndexBuilder()
    kept = ColumnBuilder(url, columns)
    is_here = is_local(url)
    numbers: dict[str, int] = {}  # sample numbers by key
    file: Any
    with _opened(url) as file:
        if compression_of(url, file) is not None:
            raise DataError(
                f"{url!r} cannot be read as a plain tar: it is compressed. Compressed tars have no positions: read "
                "them with `kdp.stream_shards`."
            )
        source = FileBytes(file.fileno()) if is_here else StreamBytes(file, checksum)
        with _naming(url, source, "a plain tar"):
            is_whole = with_checksums or not is_here
            for group in _runs(url, _members(url, source, lambda field: is_whole or kept.needs(field))):
                key = group[0][0].key
                number = numbers.setdefault(key, len(numbers))
                add_sample(builder, group, number)
                if columns:
                    kept.add(key, {member.field: each for member, each in group if each is not None}, number)
    repeated = builder.repeated()
    if repeated is not None:
        raise _repeated(url, *repeated)
    return replace(builder.index(version), columns=kept.columns())


def is_index_of(index: ShardIndex, url: str) -> bool:
    """Return whether an index describes a tar.

    For a local tar, all headers, classes and columns are compared, which takes 10 us per member. For a remote one, only
    the sizes and classes of a few samples are compared.
    """
    if is_local(url):
        try:
            made = index_shard(url, index.version, columns=list(index.columns))
        except (DataError, FieldError):
            return False
        return _without_checksums(made) == _without_checksums(index)
    last = len(index.keys) - 1
    probed = sorted({last * part // _NUM_PROBES for part in range(_NUM_PROBES + 1)}) if last >= 0 else []
    labels = [places for places in index.fields.values() if places.values is not None]
    shard = _Parts(url)
    return all(_is_there(shard, places, sample) for places in labels or index.fields.values() for sample in probed)


def _without_checksums(index: ShardIndex) -> bytes:
    fields = {name: replace(places, checksums=None) for name, places in index.fields.items()}
    return replace(index, fields=fields).to_bytes()


def ends_early(index: ShardIndex, url: str) -> bool:
    """Return whether an index stops at more zeros than end a tar, because it was made from a damaged shard."""
    end = max((int((places.offsets + places.sizes).max(initial=0)) for places in index.fields.values()), default=0)
    start = end + -end % _HEADER
    stop = index.version.size
    # The next block is not empty if it belongs to a member outside of any sample.
    return stop - start > LONGEST_END and not _Parts(url).read(start, start + _HEADER).strip(b"\0")


class _Parts:
    """Reads parts of a shard. If the server sends the whole file instead, the file is requested only once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._whole = b""

    def read(self, start: int, stop: int) -> bytes:
        if is_local(self._url):
            return read_span(self._url, start, stop - start)
        if not self._whole:
            try:
                return bytes(read_range(Span(self._url, start, stop)))
            except NoRangesError:
                self._whole = read_url(self._url)
        return self._whole[start:stop]


def _is_there(shard: _Parts, places: Places, sample: int) -> bool:
    offset = int(places.offsets[sample])
    size = int(places.sizes[sample])
    if offset < 0:
        return True
    start = offset - _HEADER
    stop = offset + (0 if places.values is None else size)
    content = shard.read(start, stop)
    digits = content[_SIZE_IN_HEADER].strip(b" \0")
    is_plain = digits.isdigit()  # sizes above 8 GiB have another notation
    if len(content) < stop - start or (is_plain and int(digits, 8) != size):
        return False
    text = _text(content[_HEADER:])
    return places.values is None or bool(INTEGER.fullmatch(text) and int(text) == places.values[sample])


def add_sample(builder: IndexBuilder, group: Group, number: int | None = None) -> None:
    """Add members to an index, each with its content if that was read.

    Args:
        builder: The index.
        group: Members of one sample.
        number: The number of the sample; None adds a new one.
    """
    rows: list[MemberRow] = []
    for (_, field, _, offset, size), content in group:
        checksum = value = None
        if content is not None:
            checksum = crc32(content)
            is_number = size <= _LONGEST_NUMBER and field.rsplit(".", 1)[-1] in NUMBERS
            if is_number and INTEGER.fullmatch(text := _text(content)):
                value = int(text)
        rows.append((field, offset, size, checksum, value))
    builder.add(group[0][0].key, rows, number)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace").strip()


class DottedKeys:
    """Warns once about samples that were merged because their keys contain dots.

    A key ends at the first dot, so `img.7.jpg` and `img.8.jpg` are members `7.jpg` and `8.jpg` of one sample. This is
    intended for the frames of a clip or the cameras of a scene. Those are recognized because other samples have members
    of the same names, or because the sample has a member without such a name.
    """

    def __init__(self, *, warns: bool = True) -> None:
        self.message: str | None = None  # the text of the warning
        self._warns = warns
        self._is_decided = False
        self._first: tuple[str, dict[str, set[str]]] | None = None

    def see(self, key: str, fields: Iterable[str]) -> None:
        """Check a sample and its fields."""
        if self._is_decided or not all("." in field for field in fields):
            return
        parts = defaultdict(set)
        for field in fields:
            stem, _, extension = field.rpartition(".")
            parts[stem].add(extension)
        extensions = list(parts.values())
        is_numbered = all(any(map(str.isdigit, stem)) for stem in parts)
        if len(parts) < 2 or not is_numbered or any(found != extensions[0] for found in extensions):
            return
        if self._first is None:
            self._first = key, dict(parts)
        elif parts.keys().isdisjoint(self._first[1]):
            self._warn()
        else:
            self._is_decided = True

    def end(self) -> None:
        """Finish: a single suspect counts as merged if each of its parts has several members."""
        if (
            not self._is_decided
            and self._first is not None
            and all(len(found) > 1 for found in self._first[1].values())
        ):
            self._warn()

    def _warn(self) -> None:
        assert self._first is not None
        self._is_decided = True
        key, parts = self._first
        shown = ", ".join(repr(f"{stem}.{max(found)}") for stem, found in list(parts.items())[:2])
        self.message = (
            f"Sample {key!r} looks like {len(parts)} samples that were merged: it has members {shown}, ... A key "
            "ends at the first dot of a file's name, as in webdataset: write the shards with keys without dots."
        )
        if self._warns:
            warn(self.message)
