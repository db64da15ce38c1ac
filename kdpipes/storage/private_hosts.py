"""Keep HTTP requests out of private networks, which servers could reach through redirects or host names."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from typing import Any

__all__ = ["PrivateHostError", "check_hosts", "guarded_client"]

_PUBLIC, _PRIVATE, _LOOPBACK, _LINK_LOCAL = range(4)
_ALLOWED = "KDPIPES_ALLOW_PRIVATE_HOSTS"
_METADATA = {"100.100.100.200", "fd00:ec2::254"}  # metadata servers of clouds, besides 169.254.169.254


class PrivateHostError(PermissionError):
    """A request was not sent, because a server outside would have directed it into a private network."""


async def guarded_client(**kwargs: Any) -> Any:
    """Return fsspec's HTTP client with these checks; a connector in `client_kwargs` is used unchanged."""
    import aiohttp
    from fsspec.implementations.http import get_client

    class Resolver(aiohttp.DefaultResolver):  # type: ignore[misc, valid-type]
        async def resolve(self, host: str, *args: Any, **options: Any) -> list[Any]:
            found: list[Any] = await super().resolve(host, *args, **options)
            check_hosts(host, [entry["host"] for entry in found])
            return found

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(_on_start)
    trace.on_request_redirect.append(_on_redirect)
    kwargs["trace_configs"] = [*(kwargs.get("trace_configs") or ()), trace]
    if "connector" not in kwargs:
        kwargs["connector"] = aiohttp.TCPConnector(resolver=Resolver())
    return await get_client(**kwargs)


async def _on_start(session: Any, context: Any, params: Any) -> None:
    if _is_address(params.url.host or ""):  # the resolver does not see addresses
        check_hosts(params.url.host, [params.url.host])


async def _on_redirect(session: Any, context: Any, params: Any) -> None:
    location = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
    target = params.url.join(type(params.url)(location)).host or ""
    try:
        check_hosts(target, await _addresses_of(target), params.url.host, await _addresses_of(params.url.host))
    except PrivateHostError:
        params.response.close()
        raise


def check_hosts(host: str, addresses: list[str], origin: str = "", origin_addresses: list[str] | None = None) -> None:
    """Raise an error if a request must not be sent.

    Requests never go to link-local addresses, where clouds hand out credentials. A redirect may lead to a private or
    loopback address only from an address that is at least as private.

    Args:
        host: The host of the request.
        addresses: The addresses of `host`; empty if only a proxy can resolve it.
        origin: The host that redirects; empty without a redirect.
        origin_addresses: The addresses of `origin`.
    """
    allowed = _LOOPBACK if origin_addresses is None else min(map(_privacy_of, origin_addresses), default=_PUBLIC)
    if max(map(_privacy_of, addresses), default=_PUBLIC) <= min(allowed, _LOOPBACK) or os.environ.get(_ALLOWED) == "1":
        return
    what = f"{origin!r} redirects to {host!r}," if origin else f"{host!r} is"
    raise PrivateHostError(f"{what} an address in a private network; `{_ALLOWED}=1` allows that")


def _privacy_of(address: str) -> int:
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_link_local or str(found) in _METADATA:
        return _LINK_LOCAL
    if found.is_loopback or found.is_unspecified:
        return _LOOPBACK
    return _PUBLIC if found.is_global else _PRIVATE


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


async def _addresses_of(host: str) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]
