"""The file systems of URLs: each is looked up once in a process, as that takes longer than it seems."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import fsspec
from fsspec.spec import AbstractFileSystem

from kdpipes.core.errors import must_be
from kdpipes.core.masked import masked
from kdpipes.storage.private_hosts import guarded_client

__all__ = ["check_filesystem", "filesystem_of", "not_installed"]

_MANY = 4_096  # URLs
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
_HTTP = ("http", "https")


class _Known(NamedTuple):
    """A file system, and what it was found by."""

    filesystem: Any
    process: int
    settings: dict[str, Any]

    def holds(self, settings: dict[str, Any]) -> bool:
        """Return whether fsspec would say the same now."""
        kind = type(self.filesystem)
        is_kept = not kind.cachable or kind._cache.get(self.filesystem._fs_token) is self.filesystem
        return is_kept and self.process == os.getpid() and self.settings == settings


_shared: dict[str, _Known] = {}
_own = threading.local()


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path there, as `fsspec.core.url_to_fs` does, but sooner the next time.

    Threads share those that are made for that, which are the asynchronous ones; each has its own of others, one for all
    URLs of a protocol, unless URLs say more than where a file is (`sftp://user@host/`). What is set in
    `fsspec.config.conf`, and `clear_instance_cache()`, hold from the next call on.
    """
    found: tuple[Any, str]
    if "::" in url:
        found = fsspec.core.url_to_fs(url, **{name: _guard(name) for name in _HTTP if f"{name}://" in url})
        return found
    protocol = fsspec.core.split_protocol(url)[0] or "file"
    settings = fsspec.config.conf.get(protocol) or {}
    mine: dict[str, _Known] = _own.__dict__
    of_all = f"{protocol}://"
    for table in (mine, _shared):
        known = table.get(of_all) or table.get(url)
        if known is not None and known.holds(settings):
            return known.filesystem, known.filesystem._strip_protocol(url)
    filesystem, _ = found = fsspec.core.url_to_fs(url, **_guard(protocol))
    table = _shared if getattr(filesystem, "async_impl", False) else mine
    if len(table) >= _MANY:
        table.clear()
    table[of_all if _is_one_for_all(filesystem) else url] = _Known(filesystem, os.getpid(), dict(settings))
    return found


def _guard(protocol: str) -> dict[str, Any]:
    """Return the options that keep HTTP out of private networks, unless the user has configured `get_client`."""
    is_users = "get_client" in fsspec.config.conf.get(protocol, {})
    return {"get_client": guarded_client} if protocol in _HTTP and not is_users else {}


def check_filesystem(param: str, url: str) -> None:
    """Raise if fsspec does not know a protocol of `url`, or its package is not installed. No connection is made.

    Raises:
        ImportError: The package is missing.
        ValueError: fsspec does not know the protocol.
    """
    for part in url.split("::"):
        protocol = fsspec.core.split_protocol(f"{part}://" if "::" in url and part.isalnum() else part)[0] or "file"
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise not_installed(url, error) from error
        except ValueError as error:
            raise ValueError(must_be(param, "a path, or a URL of a protocol that fsspec knows", url)) from error


def not_installed(url: str, error: ImportError) -> ImportError:
    """Return the error for a URL whose file system is not installed, with the command that installs it."""
    protocols = (fsspec.core.split_protocol(part)[0] for part in url.split("::"))
    extra = next((_EXTRAS[protocol] for protocol in protocols if protocol in _EXTRAS), None)
    hint = "" if extra is None else f' `pip install "kdpipes[{extra}]"`.'
    return ImportError(f"{masked(url)!r} needs a file system that is not installed: {str(error).rstrip('.')}.{hint}")


def _is_one_for_all(filesystem: Any) -> bool:
    return type(filesystem)._get_kwargs_from_urls is AbstractFileSystem._get_kwargs_from_urls
