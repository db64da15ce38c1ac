"""Paths and URLs as text: expand them, compare them, and find their distinguishing parts."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import braceexpand

from kdpipes.core.errors import check_type, must_be

_NO_SHELL = (
    "`pipe:` would run a shell command; give the URL itself, or read it with webdataset: "
    "`kdp.from_webdataset(wds.WebDataset(...))`."
)
TAR_SUFFIX = r"\.(?:tar(?:\.(?:gz|bz2|xz|zst))?|tgz|taz|tbz2?|txz|tzst)"  # a regular expression
_TAR = re.compile(f"{TAR_SUFFIX}$", re.I)
_QUERY = re.compile(r"\?(?=[\w.~%-]+=)")
_CONTAINERS = frozenset({"abfs", "abfss", "az", "adl", "wasb", "wasbs"})  # URLs with container@account
_SIGNED = re.compile(
    r"(x-(amz|goog|oss|cos|obs|tos|bce)-|response-|q-(sign|ak|key-time|header-list|url-param-list|signature)"
    r"|(aws)?accesskeyid$|(oss|google)access(key)?id$|signature$|expires$|policy$|key-pair-id$|hdn(ea|ts)$"
    r"|.*(token|secret|passw|credential|signature)|(api|auth|access)[-_]?key$|auth$)",
    re.I,
)
_SAS = re.compile(r"s(ig|[etpvrs]|rt|ip|pr|dd|aoid|uoid|cid|koid|ktid|kt|ke|ks|kv|es)=")


def is_local(url: str) -> bool:
    """Return whether `url` is a local path. Local names may contain "::" ("12::30.jpg")."""
    return "://" not in url


def check_roots(local_root: Any, global_root: Any) -> None:
    """Raise unless the roots of copies are a local folder and a path or URL."""
    if not isinstance(local_root, str | os.PathLike) or not is_local(os.fspath(local_root)):
        raise TypeError(must_be("local_root", "a local folder", local_root))
    check_type("global_root", global_root, str | os.PathLike, "a path or an fsspec URL")


def local_folder(folder: Any, hint: str) -> str:
    """Return the path of a folder; raise if it is no path, or with a hint if it is a URL."""
    check_type("folder", folder, str | os.PathLike, "a path")
    path: str = os.fspath(folder).removeprefix("file://")
    if not is_local(path):
        raise ValueError(must_be("folder", "a local folder", path, hint))
    return path


def split_chain(url: str) -> tuple[str, str, str]:
    """Return the first part of a chained URL, the mark "::" and the rest; for other URLs, the last two are empty.

    >>> split_chain("zip://birds::file:///b.zip"), split_chain("std::vector/1.jpg")
    (('zip://birds', '::', 'file:///b.zip'), ('std::vector/1.jpg', '', ''))
    """
    return (url, "", "") if is_local(url) else url.partition("::")


def expand_urls(urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, param: str = "urls") -> list[str]:
    """Return the URLs with brace ranges expanded, in webdataset's notation: "birds-{000..127}.tar".

    Errors refer to the parameter `param`.

    >>> expand_urls("birds-{08..10}.tar")
    ['birds-08.tar', 'birds-09.tar', 'birds-10.tar']
    """
    given = [urls] if isinstance(urls, str | os.PathLike) else urls
    if not isinstance(given, Sequence) or not all(isinstance(url, str | os.PathLike) for url in given):
        raise TypeError(must_be(param, "a path or URL, or a sequence of them", urls))
    if not given:
        raise ValueError(must_be(param, "at least one path or URL", urls))
    texts = [os.path.expanduser(os.fspath(url).removeprefix("file://")) for url in given]  # noqa: PTH111
    for text in texts:
        if text.startswith("pipe:"):
            raise ValueError(must_be(param, "paths or fsspec URLs", text, _NO_SHELL))
    texts = [part for text in texts for part in _joined_by_webdataset(text)]
    expanded = [url for text in texts for url in (braceexpand.braceexpand(text) if "{" in text else [text])]
    twice = next((url for url, number in Counter(map(identity_of, expanded)).items() if number > 1), None)
    if twice is not None:
        raise ValueError(must_be(param, "unique", twice, "To repeat samples, use `.repeat_until`."))
    return expanded


def _joined_by_webdataset(text: str) -> list[str]:
    """Return the paths of tars joined in webdataset's notation, "a.tar::b.tar". Other names may contain "::"."""
    parts = text.split("::")
    is_joined = is_local(text) and all(_TAR.search(part) for part in parts) and not os.path.exists(text)  # noqa: PTH110
    return parts if is_joined else [text]


@lru_cache(maxsize=4096)
def identity_of(url: str) -> str:
    """Return a URL without user, password, signature and expiry, so that it is equal for all users and at all times.

    Keys, caches, fingerprints and states use it. Query parameters that may select the file are preserved.

    >>> identity_of("https://ada:pw@host/a.tar?X-Amz-Signature=1f&X-Amz-Expires=60&versionId=3")
    'https://host/a.tar?versionId=3'
    """
    return "::".join(map(_identity_of_part, url.split("::"))) if "://" in url else url


def _identity_of_part(url: str) -> str:
    protocol, mark, rest = url.partition("://")
    if not mark:
        return url
    path, query = [*_QUERY.split(rest, 1), ""][:2]
    if protocol in ("http", "https"):
        path, query = path.partition("#")[0], query.partition("#")[0]
    host, slash, path = path.partition("/")
    user, _, place = host.rpartition("@")
    host = host if protocol in _CONTAINERS and ":" not in user else place
    kept = [entry for entry in query.split("&") if entry and not _SIGNED.match(entry.partition("=")[0])]
    # Azure's other names are too common to drop otherwise.
    if any(entry.startswith("sig=") for entry in kept):
        kept = [entry for entry in kept if not _SAS.match(entry)]
    return f"{protocol}://{host}{slash}{path}{'?' if kept else ''}{'&'.join(kept)}"


def path_of(url: str) -> str:
    """Return the identity of a URL without its query, so that it ends with the suffix of the file.

    >>> path_of("https://host/a.tar.gz?versionId=3"), path_of("photos/what?.tar")
    ('https://host/a.tar.gz', 'photos/what?.tar')
    """
    return _QUERY.split(identity_of(url), 1)[0] if "://" in url else url


def join_url(root: str, path: str) -> str:
    """Return the URL of a file below `root`, even if `root` is inside another file: "zip://birds::file:///b.zip".

    >>> join_url("zip://birds::file:///b.zip", "heron/1.jpg")
    'zip://birds/heron/1.jpg::file:///b.zip'
    >>> join_url("memory://", "heron/1.jpg")
    'memory://heron/1.jpg'
    >>> join_url("std::vector/", "1.jpg")
    'std::vector/1.jpg'
    """
    # Image folders join a path for each sample, so this avoids calling `split_chain`.
    if "://" not in root:
        return f"{root.rstrip('/')}/{path}"
    folder, separator, rest = root.partition("::")
    folder = folder if folder.endswith("://") else f"{folder.rstrip('/')}/"
    return f"{folder}{path}{separator}{rest}"


def folder_of(url: str) -> str:
    """Return the folder of a file. `join_url` appends other files to it.

    >>> folder_of("s3://birds/a/0.csv"), folder_of("0.csv"), folder_of("memory://0.csv")
    ('s3://birds/a', '', 'memory://')
    >>> folder_of("zip://a/0.csv::file:///b.zip"), folder_of("https://host/0.csv?from=a/b")
    ('zip://a::file:///b.zip', 'https://host')
    """
    first, separator, rest = split_chain(url)
    path = url if is_local(url) else _QUERY.split(first, 1)[0]
    folder = path.rpartition("/")[0] or ("/" if path.startswith("/") else "")
    return f"{folder}/{separator}{rest}" if folder.endswith(":/") else f"{folder}{separator}{rest}"


def relative_names(urls: Sequence[str]) -> list[str]:
    """Return the distinguishing parts of the URLs: file names, and the folders that not all URLs share.

    >>> relative_names(["s3://birds/0.tar", "s3://birds/1.tar"])
    ['0.tar', '1.tar']
    >>> relative_names(["s3://birds/a/0.tar", "s3://birds/b/0.tar"])
    ['a/0.tar', 'b/0.tar']
    """
    paths = [path_of(url) for url in urls]
    urls = paths if len(set(paths)) == len(urls) else [identity_of(url) for url in urls]
    names = [url.rsplit("/", 1)[-1] for url in urls]
    if len(set(names)) == len(urls):
        return names
    folders = [url.split("/")[:-1] for url in urls]
    different = (place for place, parts in enumerate(zip(*folders, strict=False)) if len(set(parts)) > 1)
    shared = next(different, min(map(len, folders)))
    return ["/".join(url.split("/")[shared:]) for url in urls]
