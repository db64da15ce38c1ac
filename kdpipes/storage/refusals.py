"""What storage elsewhere refuses, as against what is missing or fails: in words that say what to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kdpipes.storage.private_hosts import PrivateHostError

__all__ = ["is_refused", "reason_of", "what_went_wrong"]

_URL = re.compile(r"\S+://\S+")
_STATUSES = (401, 403, 407)
_CLASSES = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")  # of botocore
_OF_S3 = (
    "Are there credentials (`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or `AWS_PROFILE`; for a public bucket "
    """`FSSPEC_S3='{{"anon": true}}'`), may they read this, and is the endpoint right (`AWS_ENDPOINT_URL`)?"""
)
_OF_GS = (
    "Are there credentials (`GOOGLE_APPLICATION_CREDENTIALS`; for a public bucket "
    """`FSSPEC_GS='{{"token": "anon"}}'`), and may they read this?"""
)
_OF_HTTP = (
    "Does it need a name or a token? They are set as fsspec has it: "
    """`fsspec.config.conf["{0}"] = {{"client_kwargs": {{"headers": {{"Authorization": "..."}}}}}}`."""
)
_OF_ALL = 'Are there credentials, and may they read this? They are set as fsspec has it: `fsspec.config.conf["{0}"]`.'
_HINTS = {"s3": _OF_S3, "s3a": _OF_S3, "gs": _OF_GS, "gcs": _OF_GS, "http": _OF_HTTP, "https": _OF_HTTP}


def is_refused(error: BaseException) -> bool:
    """Return whether storage has refused a request, for whose sake asking again is of no use."""
    return any(_says_so(one) for one in _with_causes(error))


def what_went_wrong(url: str, error: BaseException) -> str:
    """Return what an error says, and what to look at if storage has refused a request; without a full stop."""
    refusal = next((one for one in _with_causes(error) if _says_so(one)), None)
    if refusal is None:
        return reason_of(error)
    if isinstance(refusal, PrivateHostError):
        return str(refusal)
    protocol = url.rpartition("::")[2].partition("://")[0]
    hint = _HINTS.get(protocol, _OF_ALL).format(protocol)
    return f"it is refused ({str(refusal) or type(refusal).__name__}). {hint}".rstrip(".")


def reason_of(error: BaseException) -> str:
    """Return the text of an error; if that is only a URL, the text of its cause, such as a refused connection."""
    texts = [str(one) or type(one).__name__ for one in _with_causes(error)]
    return next((text for text in texts if not _URL.fullmatch(text)), texts[0])


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__


def _says_so(error: BaseException) -> bool:
    status = getattr(error, "status", None) or getattr(error, "code", None)  # of aiohttp; of gcsfs
    return isinstance(error, PermissionError) or status in _STATUSES or type(error).__name__ in _CLASSES
