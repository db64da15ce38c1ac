"""A server of HTTP on this machine, whose responses tests choose."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from webdataset import TarWriter


class Served:
    """What a server has, and how it responds.

    Args:
        files: Contents by path, without the query.
        headers: Sent along with every response.
        rejected: The status for paths that it rejects.
        redirects: Where paths lead that begin with the given ones.
        required: What the query of each request must have; others are rejected.
        has_ranges: Whether it gives parts of files; others get all of them.
        tag_of: The ETag of a content, for a method; empty for none.
        shift: How many bytes later than requested parts begin.
        before: Called with each request, before its response.
        asked: The requests, with their queries.
        authorizations: The header `Authorization` of each request, empty where it is missing.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.rejected: dict[str, int] = {}
        self.redirects: dict[str, str] = {}
        self.required = ""
        self.has_ranges = True
        self.tag_of: Callable[[str, bytes], str] = lambda method, content: ""
        self.shift = 0
        self.before: Callable[[Served, str], object] = lambda has, request: None
        self.asked: list[str] = []
        self.authorizations: list[str] = []
        self.url = ""


@contextmanager
def serving() -> Iterator[Served]:
    """Serve until the end."""
    has = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            has.asked.append(self.path)
            has.before(has, f"{self.command} {self.path}")
            has.authorizations.append(self.headers.get("Authorization", ""))
            path, _, query = self.path.partition("?")
            content = has.files.get(path, has.files.get(unquote(path)))
            for begin, target in has.redirects.items():
                if path.startswith(begin):
                    return self._send(302, b"", Location=target)
            if has.required not in query:
                return self._send(403, b"")
            if path in has.rejected or content is None:
                return self._send(has.rejected.get(path, 404), b"")
            tag = has.tag_of(self.command, content)
            tags = {"ETag": tag} if tag else {}
            if "Range" not in self.headers or not has.has_ranges:
                return self._send(200, content, **tags)
            start, stop = (int(place) + has.shift for place in self.headers["Range"].removeprefix("bytes=").split("-"))
            part = content[start : stop + 1]
            place = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
            return self._send(206, part, **tags, **{"Content-Range": place})

        do_HEAD = do_GET

        def _send(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {**has.headers, **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        has.url = f"http://127.0.0.1:{server.server_port}"
        yield has
        server.shutdown()


def tar(letter: str, number: int = 10) -> bytes:
    """Return a tar of photos; of another letter, it has the same size."""
    file = io.BytesIO()
    with TarWriter(file, mtime=0) as writer:
        for n in range(number):
            writer.write({"__key__": f"{n}", "jpg": letter.encode() * 3_000, "cls": n % 2})
    return file.getvalue()
