"""Read tar shards in order, from local files and remote storage."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kdpipes.core.arithmetic import Permutation
from kdpipes.core.column import Column
from kdpipes.core.errors import (
    REPLACE_FILE,
    DataError,
    add_note,
    check_choice,
    check_class_names,
    check_count,
    check_flag,
)
from kdpipes.core.iter_pipe import IterPipe, tolerance
from kdpipes.core.labels import number_fields
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Sample
from kdpipes.core.shared import Shared
from kdpipes.storage.access import DEFAULT_S, NUM_TRIES, Access, using
from kdpipes.storage.catalog import IndexRecorder
from kdpipes.storage.decoding import decode_member
from kdpipes.storage.files import crc32, file_stamp, forget_listings, matching_urls, version_of
from kdpipes.storage.filesystems import check_filesystems
from kdpipes.storage.index_home import Seen, current_index, names_beside
from kdpipes.storage.remote import RemoteStream, Span, StreamsAhead, read_range
from kdpipes.storage.tar import MAX_MEMBER_BYTES, DottedKeys, Group, Member, compression_of, is_compressed, read_members
from kdpipes.storage.urls import expand_urls, identity_of, is_local, relative_names


@called_as("stream_shards")
class ShardStreamerIterDataPipe(IterPipe):
    """Reads the samples of webdataset tars in order (`kdp.stream_shards(urls)`).

    Fields, keys and decoding are those of `kdp.open_shards`; tars compressed by gzip, bz2, xz or zstd are read as well,
    whatever their names. As in webdataset, neighboring members with the same key form a sample.

    Remote shards are prefetched. After a failed request, reading resumes at the same offset, with growing delays. A
    shard that cannot be read to its end is an error. With `.on_error("skip")` or `"quarantine"`, `deal` gets all
    samples before that place that are known to be complete. The rest of the shard is skipped and recorded as a single
    entry under the name of the shard, and reading continues with the next shard. A quarantined shard is read again in
    later epochs, because the samples before the damage are valid. It is an error if no shard yields a sample. If a
    sample lacks a member that an earlier sample had, only that sample is damaged.

    Args:
        urls: Paths or fsspec URLs, with brace ranges, `"s3://bucket/birds-{000..127}.tar"`, or globs, `"birds-*.tar"`.
            `pipe:` is rejected: `kdp.from_webdataset(wds.WebDataset(...))` reads that.
        class_names: The names of the classes 0, 1, ...; by default, for local shards, those that `kdp.write_shards` has
            stored in `NAME-shards.json`, if all shards are finished and have not changed since.
        verify: Whether to check members against the checksums of the shard's index when they are read. True requires an
            index with checksums (`kdpipes index`) next to each shard or in the local cache; "auto" uses such an index
            if it exists, for local shards; False uses none. A checksum of 100 KB takes about 50 microseconds.
            Compressed shards have their own checksums.
        max_member_bytes: The maximum size of a member; a larger member is an error of its shard. A small compressed
            shard can hold members that do not fit into memory.
        timeout_s: How long remote storage may take to respond to a request, in seconds, plus 1 s for each 256 KiB of a
            large one; a second timeout is an error. None waits without limit.
        decode: Whether to decode texts, JSON, arrays and tensors; False returns their bytes. Numbers are always
            decoded.
        storage_options: The arguments of fsspec's file system, such as `{"key": ..., "secret": ...}` or
            `{"anon": True}` for S3, for all URLs. Workers get them; no `repr`, state, fingerprint or error contains
            them.
        hedge_s: The seconds after which a read without a response is requested a second time; the first one counts.

    Length: unknown.

    Memory: One sample and 1 MiB of the shard. For remote shards, up to 56 MiB: 48 MiB of the current shard and 8 MiB of
        the next one.

    Raises:
        FileNotFoundError: A shard is missing. For local shards, this is raised before the first sample of the epoch.
        DataError: A shard is truncated, not a tar, cannot be reached or changes while it is read, or a member does not
            match the index; the error names the shard, the member and the offset.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        class_names: Sequence[str] | None = None,
        verify: bool | Literal["auto"] = "auto",
        max_member_bytes: int = MAX_MEMBER_BYTES,
        timeout_s: float | None = DEFAULT_S,
        decode: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        hedge_s: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("verify", verify, (True, False, "auto"))
        self._verify: bool | Literal["auto"] = verify
        self._max_member_bytes = check_count("max_member_bytes", max_member_bytes)
        self._urls = Shared(expand_urls(urls))
        self._has_looked = False
        self._class_names = self.given_names = check_class_names(class_names)
        self._has_names = self._class_names is not None  # whether `_class_names` is final, even if it is None
        check_filesystems("urls", self._urls.value)
        self._access = Access(timeout_s, storage_options, hedge_s)
        self._decode = check_flag("decode", decode)
        self._part = (0, 1)
        self._order_key: bytes | None = None
        self._start = (0, 0, 0)
        self._seen: frozenset[str] = frozenset()  # fields seen so far
        self._dotted = DottedKeys()
        self.cursor = self._start
        self._ahead: StreamsAhead | None = None  # the streams that `start_reading` has opened
        self.num_lost = 0  # number of shards whose rest was skipped in this epoch
        self._stamps: dict[str, str] = {}  # versions of the shards; those of remote shards are reused in later epochs

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self._found())

    def num_indexed(self) -> int | None:
        """Return the number of samples according to the indexes; None if shards are remote or lack an index."""
        urls = self._found()
        if not all(map(is_local, urls)):
            return None
        indexes = [current_index(url, version_of(url)).index for url in urls]
        return None if None in indexes else sum(len(index.keys) for index in indexes if index is not None)

    def read_part(self, part: int, num_parts: int) -> None:
        """Read only every `num_parts`-th shard, starting with shard `part`."""
        self._part = part, num_parts

    def order_by(self, key: bytes | None) -> None:
        """Shuffle the shards by a key from the next iteration on; None restores their original order."""
        self._order_key = key

    def seek(self, cursor: tuple[int, int, int]) -> None:
        """Start the next iteration after the sample at which `cursor` was taken."""
        self._start = cursor

    def place(self) -> Any:
        """Return data that identifies the next iteration: its shards and their versions; None if it is shuffled."""
        if self._order_key is not None or self._start != (0, 0, 0):
            return None
        part, num_parts = self._part
        urls = self._found()
        try:
            stamps = [file_stamp(url) if is_local(url) else self._stamp_of(url) for url in urls[part::num_parts]]
        except FileNotFoundError:  # iterating raises a better error
            return None
        return relative_names(urls), part, num_parts, stamps, "decoded" if self._decode else "bytes"

    def fingerprint(self) -> Any:
        return relative_names(self._found()), self.class_names(), self._decode

    def samples(self) -> Iterator[Sample]:
        urls = self._found()
        part = self._part[0]
        self._stamps = {url: stamp for url, stamp in self._stamps.items() if not is_local(url)}
        self.num_lost = 0
        self.cursor = first, skipped, index = self._start
        self._start = (0, 0, 0)
        is_from_start = (first, skipped) == (0, 0)
        own = self._own()
        if tolerance() is None:
            due = urls if part == 0 else [url for url, _ in own[first:]]
            missing = next((url for url in due if is_local(url) and not Path(url).exists()), None)
            if missing is not None:  # checking remote shards would cost one request each
                raise FileNotFoundError(f"There is no file {missing!r}.")
        lost: list[Exception] = []
        ahead = self._ahead or self._streams_ahead(own[first:])
        self._ahead = None
        with closing(ahead) as streams:
            for shard, (url, name) in enumerate(own[first:], first):
                known: dict[int, int] = {}
                with closing(_up_to_damage(self._groups(url, streams, known), lost)) as groups:
                    for place, group in enumerate(groups, 1):
                        fields = [member.field for member, _ in group]
                        self._seen = self._seen if self._seen.issuperset(fields) else self._seen.union(fields)
                        self._dotted.see(f"{name}/{group[0][0].key}", fields)
                        if place > skipped:
                            index += 1
                            self.cursor = shard, place, index
                            yield self._sample(url, name, group, known, index - 1)
                if len(lost) > self.num_lost:
                    tolerated = tolerance()
                    if tolerated is None or not tolerated.gives_up(name, index, lost[-1]):
                        raise lost[-1]
                    self.num_lost += 1
                skipped = 0
        if is_from_start:
            self._dotted.end()
        if lost and index == 0 and self._part[1] == 1:
            add_note(lost[-1], f"kdpipes: none of the {len(own)} shards could be read")
            raise lost[-1]

    def start_reading(self) -> None:
        """Start to read the first remote shard of the next iteration, so that lanes read in parallel."""
        own = self._own()[self._start[0] :]
        self._ahead = self._streams_ahead(own)
        if own:
            self._ahead.begin(own[0][0])

    def stop_reading(self) -> None:
        """Close the streams opened by `start_reading`, unless an iteration uses them."""
        ahead = self._ahead
        self._ahead = None
        if ahead is not None:
            ahead.close()

    def _own(self) -> list[tuple[str, str]]:
        """Return the URLs and names of this part's shards, in the order of the epoch."""
        urls, (part, num_parts) = self._found(), self._part
        order = np.arange(len(urls))
        if self._order_key is not None:
            order = Permutation(len(urls), key=self._order_key)[order]
        names = relative_names(urls)
        return [(urls[shard], names[shard]) for shard in order[part::num_parts].tolist()]

    def _streams_ahead(self, own: Sequence[tuple[str, str]]) -> StreamsAhead:
        with using(self._access):
            return StreamsAhead([url for url, _ in own])

    def class_names(self) -> tuple[str, ...] | None:
        urls = [] if self._has_names else self._found()
        if urls and all(map(is_local, urls)):  # the sizes of remote shards would cost one request each
            with suppress(FileNotFoundError):  # iterating reports a missing shard
                self._class_names = names_beside(urls, lambda: {url: Seen(version_of(url).size) for url in urls})
        self._has_names = True
        return self._class_names

    def _groups(self, url: str, streams: StreamsAhead, known: dict[int, int]) -> Generator[Group, None, None]:
        """Yield the members of each sample of a shard. To verify members, first store their checksums in `known`."""
        if self._verify is True or (self._verify == "auto" and is_local(url)):
            known.update(self._checksums(url))
        recorder = IndexRecorder(url)

        def open_stream(url: str) -> RemoteStream:
            stream = streams.open(url)
            if not known and compression_of(url, stream) is None:
                recorder.begin(stream.version)
            return stream

        with closing(read_members(url, open_stream, self._max_member_bytes)) as groups:
            for group in groups:
                other = next((member for member, _ in group if known and member.offset not in known), None)
                if other is not None:
                    raise DataError(
                        f"Shard {url!r} does not match its index, which has no member {other.name!r} at offset "
                        f"{other.offset}. Index it again: `kdpipes index`."
                    )
                recorder.add(group)
                yield group
        recorder.end()

    def _checksums(self, url: str) -> dict[int, int]:
        """Return the checksums of a shard's members by offset; empty without an index with checksums."""
        version = version_of(url)
        index = current_index(url, version).index
        found = None if index is None else index.checksums()
        if found is None and self._verify is True and not is_compressed(url, version):
            raise DataError(
                f"Shard {url!r} cannot be verified: it has no index with checksums. `kdpipes index` makes one."
            )
        return found or {}

    def _sample(self, url: str, name: str, group: Group, known: dict[int, int], index: int) -> Sample:
        fields: dict[str, Any] = {
            member.field: self._member(url, member, content, known.get(member.offset)) for member, content in group
        }
        number_fields(fields, self.given_names)
        first = group[0][0]
        sample = Sample(fields, key=f"{name}/{first.key}", index=index, version=lambda: self._stamp_of(url))
        if len(fields) < len(self._seen):
            sample.lack(self._seen - fields.keys(), f"{url!r} at offset {first.offset}")
        return sample

    def _member(self, url: str, member: Member, content: bytes, checksum: int | None) -> Column:
        def load(sample: Sample) -> Any:
            what = f"Member {member.field!r} of sample {sample.key!r} in {url!r} at offset {member.offset}"
            sound = content
            if checksum is not None and crc32(content) != checksum:
                with using(self._access):
                    sound = _read_again(url, member, checksum, what)
            try:
                return decode_member(member.field, sound, decode=self._decode)
            except ValueError as error:
                raise DataError(f"{what} cannot be decoded: {error}. {REPLACE_FILE}") from error

        return Column(load, what=f"decoding member {member.field!r}")

    def value_fingerprint(self) -> Any:
        """Return the data that identifies values in caches, in addition to the versions of the shards."""
        return () if self._decode else "bytes"

    def _stamp_of(self, url: str) -> str:
        """Return text that identifies the version of a shard in this epoch."""
        if url not in self._stamps:
            with using(self._access):
                self._stamps[url] = file_stamp(url) if is_local(url) else f"{identity_of(url)} {version_of(url)}"
        return self._stamps[url]

    def _found(self) -> list[str]:
        """Return the URLs of the shards with globs expanded. Globs are matched once for all copies of the pipe."""
        urls = self._urls.value
        with using(self._access):
            if not self._has_looked:
                forget_listings(urls)
                self._has_looked = True
            found = matching_urls(urls)
        if found != urls:
            urls[:] = found
        return urls


def _up_to_damage(groups: Iterator[Group], lost: list[Exception]) -> Generator[Group, None, None]:
    """Yield the readable groups of a shard. If an error ends the shard early, append it to `lost`."""
    try:
        yield from groups
    except Exception as error:
        lost.append(error)


def _read_again(url: str, member: Member, checksum: int, what: str) -> bytes:
    """Read a damaged member of a remote shard again, because it may have been damaged in transit."""
    for _ in range(0 if is_local(url) else NUM_TRIES):
        content = bytes(read_range(Span(url, member.offset, member.offset + member.size)))
        if crc32(content) == checksum:
            return content
    raise DataError(
        f"{what} is damaged, or has been replaced: its checksum differs from the one in the index. If it has been "
        "replaced, index the shard again: `kdpipes index`."
    )
