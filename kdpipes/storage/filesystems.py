"""File systems of fsspec: looked up by URL, kept out of private networks, and read with checks.

fsspec returns only the bytes of a response. The metadata from HTTP servers and S3 (`Content-Range`, `ETag`) is needed
to detect another version of the file, a wrong range, or an endless body.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import socket
import threading
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import sync
from fsspec.spec import AbstractFileSystem

from kdpipes.core.errors import must_be
from kdpipes.core.secrets import masked
from kdpipes.storage.access import PrivateHostError, WrongResponseError, current_access, in_time
from kdpipes.storage.readers import WHOLE, Response, Stat, Wanted, stat_in
from kdpipes.storage.urls import identity_of, is_local, split_chain

_MANY = 4_096  # maximum number of remembered URLs
_EXPECTED = 1 << 23  # assumed size of a whole file, for the time limit
_STEP = 1 << 20  # number of bytes skipped at a time
_PART, _MISSING = 206, 404  # HTTP status codes
_EXTRAS = {
    "gs": "gcs",
    "gcs": "gcs",
    "s3": "s3",
    "s3a": "s3",
    "hf": "hf",
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "azure"),
}
_HTTP = ("http", "https")
_PUBLIC, _PRIVATE, _LOOPBACK, _LINK_LOCAL = range(4)  # how private an address is, from the least to the most
_ALLOWED = "KDPIPES_ALLOW_PRIVATE_HOSTS"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_METADATA = {"100.100.100.200", "fd00:ec2::254"}  # metadata servers of clouds, besides 169.254.169.254


class _Known(NamedTuple):
    filesystem: Any
    process: int
    settings: dict[str, Any]

    def is_current(self, settings: dict[str, Any]) -> bool:
        """Return whether fsspec would still return the same file system."""
        kind = type(self.filesystem)
        is_kept = not kind.cachable or kind._cache.get(self.filesystem._fs_token) is self.filesystem
        return self.process == os.getpid() and self.settings == settings and is_kept


_shared: dict[str, _Known] = {}
_own = threading.local()


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it, like `fsspec.core.url_to_fs`, but faster when repeated.

    The options are those of `current_access`. Asynchronous file systems are shared by threads; other file systems are
    created per thread. One file system serves all URLs of a protocol, unless URLs contain more than the location of a
    file (`sftp://user@host/`). Changes of `fsspec.config.conf` and `clear_instance_cache()` take effect at the next
    call.
    """
    options = current_access().storage_options
    token = current_access().token
    if split_chain(url)[1]:
        guards = {name: _guard(name) | options.get(name, {}) for name in _HTTP if f"{name}://" in url}
        return fsspec.core.url_to_fs(url, **options | guards)  # type: ignore[no-any-return]
    protocol = fsspec.core.split_protocol(url)[0] or "file"
    settings = fsspec.config.conf.get(protocol) or {}
    mine: dict[str, _Known] = _own.__dict__
    of_all = f"{token}{protocol}://"
    of_one = f"{token}{url}"
    for table in (mine, _shared):
        known = table.get(of_all) or table.get(of_one)
        if known is not None and known.is_current(settings):
            return known.filesystem, known.filesystem._strip_protocol(url)
    if "::" in url:  # fsspec would parse it as a chained URL
        return filesystem_of(".")[0], os.path.abspath(url)  # noqa: PTH100 - links stay
    filesystem, path = fsspec.core.url_to_fs(url, **_guard(protocol) | options)
    table = _shared if getattr(filesystem, "async_impl", False) else mine
    if len(table) >= _MANY:
        table.clear()
    # A file system that parses URLs itself may take a user or a host from them, so its entry is stored per URL.
    is_for_all = type(filesystem)._get_kwargs_from_urls is AbstractFileSystem._get_kwargs_from_urls
    name = of_all if is_for_all else of_one
    table[name] = _Known(filesystem, os.getpid(), dict(settings))
    return filesystem, path


# fsspec offers `_parent`, `_strip_protocol` etc. only as private names; `AbstractFileSystem` defines all of them.


def parent_of(filesystem: Any, path: str) -> str:
    """Return the folder of a path, as named in the listings of the file system."""
    return str(filesystem._parent(path))


def check_filesystems(param: str, urls: Iterable[str]) -> None:
    """Raise if fsspec does not know a protocol of `urls`, or its package is not installed, without connecting.

    Raises:
        ImportError: The package is missing.
        ValueError: fsspec does not know the protocol.
    """
    remote = (url for url in urls if not is_local(url))
    by_protocols = {tuple(part.partition("://")[:2] for part in url.split("::")): url for url in remote}
    for parts, url in by_protocols.items():
        for name, mark in parts:
            try:
                fsspec.get_filesystem_class(name if mark or name.isalnum() else "file")
            except ImportError as error:
                raise not_installed(url, error) from error
            except ValueError as error:
                raise ValueError(must_be(param, "a path, or a URL of a protocol that fsspec knows", url)) from error


def not_installed(url: str, error: ImportError) -> ImportError:
    """Return the error for a URL whose file system is not installed, including the command that installs it."""
    protocols = (fsspec.core.split_protocol(part)[0] for part in url.split("::"))
    extra = next((_EXTRAS[protocol] for protocol in protocols if protocol in _EXTRAS), None)
    hint = "" if extra is None else f' `pip install "kdpipes[{extra}]"`.'
    return ImportError(f"{masked(url)!r} needs a file system that is not installed: {str(error).rstrip('.')}.{hint}")


def _guard(protocol: str) -> dict[str, Any]:
    """Return options that keep HTTP out of private networks, unless the user has configured `get_client`."""
    if protocol not in _HTTP or "get_client" in fsspec.config.conf.get(protocol, {}):
        return {}
    origin = current_access().origin
    return {"get_client": partial(_guarded_client, origin=origin) if origin else _guarded_client}


async def _guarded_client(*, origin: str = "", **kwargs: Any) -> Any:
    """Return fsspec's HTTP client with these checks. A connector in `client_kwargs` is used unchanged.

    `origin` is the URL of the list that names the hosts, or empty if the user names them.
    """
    import aiohttp
    from fsspec.implementations.http import get_client

    async def check(host: str, addresses: list[str]) -> None:
        if origin:
            name = urlsplit(origin).hostname if origin.startswith(("http://", "https://")) else None
            check_hosts(host, addresses, identity_of(origin), await _addresses_of(name) if name else [], verb="names")
        else:
            check_hosts(host, addresses)

    class Resolver(aiohttp.DefaultResolver):  # type: ignore[misc, valid-type]
        async def resolve(self, host: str, *args: Any, **options: Any) -> list[Any]:
            entries: list[Any] = await super().resolve(host, *args, **options)
            await check(host, [entry["host"] for entry in entries])
            return entries

    async def on_start(session: Any, context: Any, params: Any) -> None:
        host = params.url.host or ""
        address = _address_in(host)
        if address is not None:  # the resolver checks names, but never sees literal addresses
            await check(host, [address])

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(on_start)
    trace.on_request_redirect.append(_on_redirect)
    kwargs["trace_configs"] = [*(kwargs.get("trace_configs") or ()), trace]
    if "connector" not in kwargs:
        kwargs["connector"] = aiohttp.TCPConnector(resolver=Resolver())
    return await get_client(**kwargs)


def _address_in(host: str) -> str | None:
    """Return the IP address denoted by a host, in any notation that the system accepts; None for a name.

    >>> _address_in("2852039166"), _address_in("0251.0376.43518"), _address_in("fe80::1%eth0"), _address_in("localhost")
    ('169.254.169.254', '169.254.169.254', 'fe80::1%eth0', None)
    """
    with suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return host
    with suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(host))
    return None


async def _on_redirect(session: Any, context: Any, params: Any) -> None:
    location = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
    target = params.url.join(type(params.url)(location)).host or ""
    try:
        check_hosts(target, await _addresses_of(target), params.url.host, await _addresses_of(params.url.host))
    except PrivateHostError:
        params.response.close()
        raise


def check_hosts(
    host: str,
    addresses: list[str],
    origin: str = "",
    origin_addresses: list[str] | None = None,
    *,
    verb: str = "redirects to",
) -> None:
    """Raise an error if a request must not be sent.

    Link-local addresses are always blocked, because clouds hand out credentials there. A redirect to a private or
    loopback address is allowed only from an address that is at least as private.

    Args:
        host: The host of the request.
        addresses: The addresses of `host`; empty if only a proxy can resolve the name.
        origin: The host that redirects, or the list that names the host; empty if the user names it.
        origin_addresses: The addresses of `origin`.
        verb: The verb for `origin` in the error, such as "redirects to".
    """
    allowed = _LOOPBACK if origin_addresses is None else min(map(_privacy_of, origin_addresses), default=_PUBLIC)
    if max(map(_privacy_of, addresses), default=_PUBLIC) <= min(allowed, _LOOPBACK) or os.environ.get(_ALLOWED) == "1":
        return
    what = f"{origin!r} {verb} {host!r}," if origin else f"{host!r} is"
    raise PrivateHostError(f"{what} an address in a private network; `{_ALLOWED}=1` allows that")


def _privacy_of(address: str) -> int:
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = _embedded_in(ip) or ip
    if ip.is_link_local or str(ip) in _METADATA:
        return _LINK_LOCAL
    if ip.is_loopback or ip.is_unspecified:
        return _LOOPBACK
    return _PUBLIC if ip.is_global else _PRIVATE


def _embedded_in(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address embedded in an IPv6 address, whether mapped, 6to4 or NAT64; otherwise None."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour


async def _addresses_of(host: str) -> list[str]:
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in entries]


@dataclass
class FsspecReader:
    """A file read through a file system of fsspec, within the time limit."""

    url: str
    filesystem: Any
    path: str

    @property
    def _is_http(self) -> bool:
        return "http" in self.filesystem.protocol

    @property
    def has_ranges(self) -> bool:
        """Whether the file system reads ranges, as far as that is known without a request."""
        kind = type(self.filesystem)
        return getattr(kind, "async_impl", False) or kind.cat_file is not AbstractFileSystem.cat_file

    def stat(self) -> Stat:
        """Return the metadata of the file, which may come from a listing."""
        info = ask(self.filesystem, "info", self.url, self.path)
        has_ranges = info.get("partial", True) if self._is_http else self.has_ranges
        return stat_in(info)._replace(has_ranges=has_ranges and info["size"] is not None)

    def read(self, wanted: Wanted = WHOLE) -> Response:
        """Make one request.

        Raises:
            NoRangesError: The server returned the whole file in response to a range request.
            TooLargeError: A whole file was requested and is too large.
            WrongResponseError: The response does not contain the requested bytes.
            SilenceError: It takes longer than the time limit.
        """
        num_bytes = _EXPECTED if wanted.stop is None else wanted.most
        kind = type(self.filesystem)
        read = _CHECKED.get(f"{kind.__module__}.{kind.__qualname__}")
        if read is not None:
            call = partial(sync, self.filesystem.loop, read, self.filesystem, self.path, wanted)
            response: Response = in_time(call, self.url, num_bytes, is_on_loop=True)
            return response
        part = {} if wanted.stop is None else {"start": wanted.start, "end": wanted.stop}
        content = ask(self.filesystem, "cat_file", self.url, self.path, num_bytes=num_bytes, **part)
        wanted.check_length(len(content))
        return Response(content)

    def stream(self, start: int = 0) -> IO[bytes]:
        """Open the file at an offset. If it cannot seek, the bytes before `start` are read and skipped."""
        options = {"block_size": 0} if self._is_http else {}  # a single response, without range requests
        file: IO[bytes] = self.filesystem.open(self.path, "rb", **options)
        if start and not self._is_http and file.seekable():
            file.seek(start)
            return file
        missing = start
        while missing:
            part = file.read(min(missing, _STEP))
            if not part:
                file.close()
                raise EOFError(f"it ends at byte {start - missing}")
            missing -= len(part)
        return file


def ask(filesystem: Any, method: str, url: str, *args: Any, num_bytes: int = 0, **kwargs: Any) -> Any:
    """Call a method of a file system, such as "info", within the time limit. Errors name `url`.

    Args:
        filesystem: An fsspec file system.
        method: The name of the method.
        url: The URL of the file.
        args: Positional arguments of the method.
        num_bytes: The size of the response. Large responses are given more time.
        kwargs: Keyword arguments of the method.

    Raises:
        SilenceError: It takes longer than the time limit.
    """
    call = partial(getattr(filesystem, method), *args, **kwargs)
    # fsspec generates the synchronous methods of asynchronous file systems. Only these accept a timeout.
    is_generated = getattr(filesystem, "async_impl", False) and method in vars(filesystem)
    return in_time(call, url, num_bytes, is_on_loop=is_generated)


async def _read_http(filesystem: Any, url: str, wanted: Wanted) -> Response:
    options = dict(filesystem.kwargs)
    headers = {**options.pop("headers", {}), **wanted.range_header, "Accept-Encoding": "identity"}
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(url), headers=headers, **options) as response:
        if response.status == _MISSING:
            raise FileNotFoundError(url)
        response.raise_for_status()
        known = response.headers
        is_part = response.status == _PART
        wanted.check_head(is_part, known.get("Content-Range"), response.content_length)
        content = await _body(response.content.read, wanted)
        expected = None if is_part else known.get("Content-MD5")
        digest = b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode() if expected else None
        if digest != expected:
            raise WrongResponseError(f"the body has the MD5 {digest!r}, but its header says {expected!r}")
    return Response(content, _tag(known.get("ETag") or known.get("Last-Modified")))


async def _read_s3(filesystem: Any, path: str, wanted: Wanted) -> Response:
    bucket, key, version = filesystem.split_path(path)
    options = {**wanted.range_header, **({"VersionId": version} if version else {})}
    response = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **options)
    body = response["Body"]
    try:
        is_part = response["ResponseMetadata"]["HTTPStatusCode"] == _PART
        wanted.check_head(is_part, response.get("ContentRange"), response.get("ContentLength"))
        content = await _body(body.read, wanted)
    finally:
        body.close()
    return Response(content, _tag(response.get("ETag")))


_CHECKED: dict[str, Callable[[Any, str, Wanted], Awaitable[Response]]] = {
    "fsspec.implementations.http.HTTPFileSystem": _read_http,
    "s3fs.core.S3FileSystem": _read_s3,
}


async def _body(read: Callable[[int], Awaitable[bytes]], wanted: Wanted) -> bytes:
    """Return a response body, reading no more bytes than allowed."""
    parts: list[bytes] = []
    length = 0
    while part := await read(wanted.most + 1 - length):
        parts.append(part)
        length += len(part)
        wanted.check_length(length)
    return b"".join(parts)


def _tag(value: str | None) -> str:
    return f"tag:{value}" if value else ""
