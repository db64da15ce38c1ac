"""Attacks on data that the soak runs between its cases: damage, other versions, hostile bytes, several threads.

Each attack reads data undisturbed, disturbs it, and reads it again in a forked process. That process must deliver equal
batches or raise a `DataError`, in a minute and in 500 MB.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kdpipes as kdp
from kdpipes.cache.folder import METADATA, _checksum
from kdpipes.demo import write_photo_folder, write_photo_shards
from tests.faulty_storage import Fault, faulty_storage
from tests.http_server import Served, serving, tar
from tests.resuming import digest

PATIENCE_S = 60
MAX_MB = 500
NO_TAIL = 12 << 10  # bytes of zeros that may stand at the end of a sound tar
Attack = Callable[[random.Random, Path], str]


def compared(expected: list[Any], batches: Iterable[Any]) -> str:
    """Return whether batches are "equal", or end in an "error" and are equal up to it; else what is wrong."""
    place = 0
    try:
        for place, batch in enumerate(batches, 1):
            if place > len(expected) or digest(batch) != expected[place - 1]:
                return f"batch {place - 1} differs"
    except kdp.DataError:
        return "error"
    return "equal" if place == len(expected) else f"{place} of {len(expected)} batches came"


def digests(batches: Iterable[Any]) -> list[Any]:
    return [digest(batch) for batch in batches]


def loader_of(draw: random.Random, chain: Any) -> Any:
    """Return a loader with a random service."""
    services = [lambda: None, lambda: kdp.ThreadReadingService(2), lambda: kdp.ProcessReadingService(2)]
    return kdp.Loader(chain, reading_service=draw.choice(services)())


def shards_of(draw: random.Random, urls: Any) -> Any:
    """Return a random chain that reads shards."""
    if draw.random() < 0.5:
        return kdp.open_shards(urls).select("key jpg cls").deal(batch_size=16, shuffle=True, seed=draw.randrange(99))
    return kdp.stream_shards(urls).select("key jpg cls").deal(batch_size=16, split=kdp.lanes(draw.choice([1, 4])))


def replaced_shards(draw: random.Random, folder: Path) -> str:
    """Replace remote shards by others of the same size while they are read: no sample is made of both."""
    moment, is_indexed = draw.randint(1, 8), draw.random() < 0.5
    with serving() as has:
        has.files = {f"/{name}.tar": tar("A", 300) for name in "ab"}
        has.tag_of = lambda _, content: f'"{hashlib.md5(content).hexdigest()}"'

        def replace(has: Served, request: str) -> None:
            if request.startswith("GET") and request.endswith(".tar") and len(has.asked) >= moment:
                has.files.update({f"/{name}.tar": tar("B", 300) for name in "ab"})

        urls = [f"{has.url}/{name}.tar" for name in "ab"]
        if is_indexed:
            len(kdp.open_shards(urls))  # keeps the indexes of the first version
        has.asked.clear()
        has.before = replace
        chain: Any = kdp.open_shards(urls) if is_indexed else kdp.stream_shards(urls)
        letters: dict[str, set[bytes]] = {}
        try:
            with kdp.Loader(chain.select("key jpg").deal(batch_size=4)) as loader:
                for key, content in (sample for batch in loader for sample in batch):
                    if len(set(content)) != 1:
                        return f"sample {key!r} holds bytes of two versions"
                    letters.setdefault(key.rpartition("/")[0], set()).add(content[:1])
        except kdp.DataError:
            return "error"
    return "equal" if all(len(seen) == 1 for seen in letters.values()) else "one shard is read in two versions"


def zeros_at_the_end(draw: random.Random, folder: Path) -> str:
    """Put zeros in place of the end of a shard, as a crash leaves it."""
    urls = write_photo_shards(folder / "shards")
    seed = draw.random()
    expected = digests(shards_of(random.Random(seed), urls))
    path = draw.choice(sorted((folder / "shards").glob("*.tar")))
    content = path.read_bytes()
    begin = draw.randrange(len(content) - NO_TAIL)
    path.write_bytes(content[:begin] + bytes(len(content) - begin))
    if draw.random() < 0.5:
        Path(f"{path}.index").unlink(missing_ok=True)
    with loader_of(draw, shards_of(random.Random(seed), urls)) as loader:
        return compared(expected, loader)


def cut_files(draw: random.Random, folder: Path) -> str:
    """Let remote files arrive cut, and cache them: two epochs."""
    write_photo_folder(folder / "photos")

    def chain(root: str) -> Any:
        source = kdp.image_folder(root)
        return (
            (source.cache_on_disk(folder / "cache") if "faulty" in root else source).select("x y").deal(batch_size=16)
        )

    expected = digests(chain(str(folder / "photos")))
    fault = Fault("truncate", probability=draw.choice([0.05, 0.2]), times=draw.choice([1, 3]))
    with (
        faulty_storage(str(folder / "photos"), faults=[fault], seed=draw.randrange(99)),
        loader_of(draw, chain("faulty://")) as loader,
    ):
        found = [compared(expected, loader) for _ in range(2)]
    return next((one for one in found if one not in ("equal", "error")), max(found))


@contextmanager
def endless_indexes(folder: Path) -> Iterator[str]:
    """Serve the shards of a folder, and beside each an index without an end."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            is_index = self.path.endswith(".index")
            path = folder / self.path.lstrip("/")
            if not is_index and not path.exists():
                return self.send_error(404)
            content = b"" if is_index else path.read_bytes()
            begin, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            part = content[int(begin or 0) : int(end or len(content)) + 1]
            self.send_response(206 if begin and not is_index else 200)
            headers = {"ETag": '"a"', "Accept-Ranges": "bytes"}
            if is_index and self.command == "GET":
                headers["Transfer-Encoding"] = "chunked"
            else:
                headers["Content-Length"] = str(10_240 if is_index else len(part))
            if begin and not is_index:
                headers["Content-Range"] = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                while is_index and self.command == "GET":
                    self.wfile.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                if self.command == "GET":
                    self.wfile.write(part)
            except OSError:
                self.close_connection = True

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def endless_index(draw: random.Random, folder: Path) -> str:
    """Serve shards whose indexes have no end."""
    urls = write_photo_shards(folder / "shards")
    seed = draw.random()
    expected = digests(shards_of(random.Random(seed), urls))
    with endless_indexes(folder / "shards") as url:
        return compared(expected, shards_of(random.Random(seed), f"{url}/{Path(urls).name}"))


def damaged_cache(draw: random.Random, folder: Path) -> str:
    """Change the metadata of a cache, with a right checksum, or a byte of an entry."""
    layout = draw.choice(["lmdb", "files"])

    def chain() -> Any:
        return kdp.from_ids(list(map(str, range(40))), [0] * 40, load=lambda name: name.encode() * 200)

    def cached() -> Any:
        return chain().cache_on_disk(folder / "cache", layout=layout)

    expected = digests(chain().select("x y").deal(batch_size=8))
    cached().warm_up(progress=False)
    metadata = folder / "cache" / METADATA
    entries = [path for path in (folder / "cache").rglob("*") if path.is_file() and path.name != METADATA]
    if layout == "files" and draw.random() < 0.5:
        path = draw.choice(entries)
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    else:
        known = json.loads(metadata.read_text())
        del known["checksum"]
        known[draw.choice([*known, "other"])] = draw.choice([None, -1, 0, "x", 10**9, 2**70, [], True, 1.5])
        if draw.random() < 0.3:
            del known[draw.choice(list(known))]
        metadata.write_text(json.dumps({**known, "checksum": _checksum(known)}))
    source = draw.choice([cached, lambda: kdp.open_cache(folder / "cache")])
    with loader_of(draw, source().select("x y").deal(batch_size=8)) as loader:
        return compared(expected, loader)


def threads_on_one_iterator(draw: random.Random, folder: Path) -> str:
    """Request the batches of one iterator from several threads: each comes once, and all threads end."""
    chain = kdp.from_dataset([(number, number % 3) for number in range(120)]).transform("x", float).select("x y")
    chain = chain.deal(batch_size=draw.choice([3, 8]), shuffle=True)
    expected, found = digests(chain), list[Any]()
    chain.set_epoch(0)
    with loader_of(draw, chain) as loader:
        batches = iter(loader)
        threads = [threading.Thread(target=lambda: found.extend(map(digest, batches)), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return "equal" if sorted(found) == sorted(expected) else f"{len(found)} batches came, of {len(expected)}"


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        replaced_shards,
        zeros_at_the_end,
        cut_files,
        endless_index,
        damaged_cache,
        threads_on_one_iterator,
    )
}


def run(name: str, seed: str) -> str:
    """Run an attack in a forked process. Return "equal", "error", or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_S)
            os.environ["KDPIPES_CACHE_DIR"] = f"{folder}/local"
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                text = ATTACKS[name](random.Random(f"{seed}/{name}"), Path(folder))
            except kdp.DataError:  # of a chain that cannot be made
                text = "error"
            except BaseException:
                text = traceback.format_exc()
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
            answer.write_text(f"{grown} MB were needed" if grown > MAX_MB else text)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return answer.read_text() if answer.exists() else f"it ended with status {status}"
