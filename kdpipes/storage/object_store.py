"""Readers of objects in S3, Google Cloud Storage and Azure through obstore, behind fsspec's own file systems.

The file system finds credentials, lists and writes. It also reads if obstore lacks a required option. With 50 ms per
request, 64 threads read 900 to 1,000 ranges of 107 KB per second from S3 through obstore, at 0.3 to 0.5 ms of CPU each.
Through s3fs, they read 175 per second at 2.2 ms each.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kdpipes.core.processes import ForkLock
from kdpipes.core.secrets import masked
from kdpipes.storage.access import NoRangesError, SilenceError, current_access
from kdpipes.storage.filesystems import FsspecReader
from kdpipes.storage.readers import WHOLE, Response, Stat, Wanted, stat_in

_WITHOUT_EFFECT = {  # options without effect on reads through obstore
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "loop", "asynchronous"),
    *("default_block_size", "default_cache_type", "default_fill_cache", "max_concurrency", "batch_size"),
}
_S3_OPTIONS = {
    *("anon", "key", "secret", "token", "profile", "endpoint_url", "client_kwargs", "requester_pays"),
    *("config_kwargs", "cache_regions", "fixed_upload_size"),
}
_GCS_OPTIONS = {
    *("token", "endpoint_url", "project", "access", "consistency", "cache_timeout", "secure_serialize"),
    *("check_connection", "requests_timeout", "timeout", "block_size", "default_location"),
}
_AZURE_OPTIONS = {
    *("account_name", "account_key", "connection_string", "sas_token", "client_id", "client_secret", "tenant_id"),
    *("anon", "account_host", "blocksize", "assume_container_exists", "timeout", "connection_timeout", "read_timeout"),
}
_AZURE_SCOPE = "https://storage.azure.com/.default"
_TUNING = {"retries", "connect_timeout", "read_timeout", "max_pool_connections", "tcp_keepalive"}  # of `config_kwargs`
_STATIC = ("env", "shared-credentials-file", "config-file", "explicit")  # kinds of credentials that do not expire
_LEASE = timedelta(minutes=5)  # after this time, botocore is asked for new credentials; it renews them 10 minutes early
_LARGEST_S = 64.0  # extra time for the body of a large response, beyond the time limit
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_WHOLE = re.compile(r"non-partial response|NotPartial", re.I)
_TIMEOUT = re.compile(r"TimedOut|kind: Timeout|operation timed out")
_REASON = re.compile(r'message: "([^"]*)"')
Result = TypeVar("Result")


@dataclass
class ObjectReader(FsspecReader):
    """An object that is read through obstore, or through its file system if obstore lacks a required option.

    Contents are views of obstore's memory. A copy of 8 MiB would cost more than the request, because each new page is a
    page fault (1.1 s of CPU per GB without the copy, 2.9 s with it).
    """

    kind: str

    def stat(self) -> Stat:
        """Return the metadata of the object, from a listing if available."""
        # In storage other than S3, ETags in listings differ from those that obstore returns.
        is_listed = self.path.rpartition("/")[0] in self.filesystem.dircache
        stat = self._attempt(self._head) if self.kind == "s3" and not is_listed else None
        return stat or super().stat()

    def read(self, wanted: Wanted = WHOLE) -> Response:
        """Make one request."""
        response = self._attempt(partial(self._get, wanted=wanted))
        return response or super().read(wanted)

    def _attempt(self, action: Callable[[Any, Any, str], Result]) -> Result | None:
        """Return the result of a function of obstore's module, a client and a key; None if obstore cannot do it.

        Raises:
            FileNotFoundError: The object does not exist.
            PermissionError: The storage has rejected the request.
            SilenceError: The storage did not respond in time.
            OSError: The request failed for another reason.
        """
        bucket, _, key = self.path.partition("/")
        client = self.client() if key and "?" not in key else None
        library = _library()
        if library is None or client is None:
            return None
        exceptions = library.functions.exceptions
        try:
            return action(library.functions, client, key)
        except exceptions.BaseError as error:
            text = str(error)
            if isinstance(error, exceptions.InvalidPathError):
                return None
            timeout = current_access().timeout_s
            if "301 Moved" in text or "PermanentRedirect" in text or "AuthorizationHeaderMalformed" in text:
                # The bucket is in another region of S3. s3fs finds out which one.
                self.filesystem.__dict__["_kdpipes_clients"][os.getpid(), bucket, timeout] = None
                return None
            if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
                raise PermissionError(_reason_of(text)) from None
            if _TIMEOUT.search(text):
                raise SilenceError(self.url, timeout or math.inf) from None
            raise OSError(_reason_of(text)) from None
        except FileNotFoundError as error:
            raise FileNotFoundError(_reason_of(str(error))) from None

    def client(self) -> Any:
        """Return obstore's client for the bucket; None if obstore is not installed or lacks an option."""
        clients = self.filesystem.__dict__.setdefault("_kdpipes_clients", {})
        bucket = self.path.partition("/")[0]
        timeout = current_access().timeout_s
        # Clients belong to a process. Without the lock, 64 threads would create 64 clients in 20 s of CPU.
        name = os.getpid(), bucket, timeout
        if name not in clients:
            library = _library()
            with _loading.lock:
                if name not in clients and library is not None:
                    clients[name] = _new_client(library, self.kind, self.filesystem, bucket, timeout)
        return clients.setdefault(name, None)

    def _head(self, library: Any, client: Any, key: str) -> Stat | None:
        try:
            entry = library.head(client, key)
        except FileNotFoundError:
            return None  # it may be a folder
        return stat_in({"size": entry["size"], "ETag": entry["e_tag"], "LastModified": entry["last_modified"]})

    def _get(self, library: Any, client: Any, key: str, wanted: Wanted) -> Response:
        options = None if wanted.stop is None else {"range": (wanted.start, wanted.stop)}
        try:
            result = library.get(client, key, options=options)
        except library.exceptions.GenericError as error:
            if "416 Range" in str(error):
                return Response(b"")
            if _WHOLE.search(str(error)):
                raise NoRangesError(f"{wanted.most} bytes were requested, and the response is the whole file") from None
            raise
        if wanted.stop is None:
            wanted.check_length(result.meta["size"])
        kind = "tag" if self.kind == "s3" else self.kind
        return Response(memoryview(result.bytes()), f"{kind}:{tag}" if (tag := result.meta["e_tag"]) else "")


def remote_reader(url: str, filesystem: Any, path: str) -> FsspecReader:
    """Return the reader of a remote file: through obstore if it supports the storage."""
    kind = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    if kind not in _STORES or filesystem.asynchronous:
        return FsspecReader(url, filesystem, path)
    return ObjectReader(url, filesystem, path, kind)


def _reason_of(text: str) -> str:
    """Return the server's or the system's description of an error, without the request, which may hold credentials."""
    message = _MESSAGE.search(text)
    if message is not None:
        return message[1]
    first, _, source = text.partition("\n\nDebug source:")
    reason = _REASON.search(source)
    return masked(first if reason is None else f"{first}: {reason[1]}")  # URLs contain Azure's signatures


class _Library(NamedTuple):
    functions: Any
    stores: Any


# The library of each process in this line of forks. Dropping one would close what others use.
_loaded: dict[int, _Library | None] = {}


def _library() -> _Library | None:
    """Return the library for this process; None if it cannot be used here.

    The threads of its runtime do not survive a fork, so requests would wait forever. A process forked from a parent
    that has used the library therefore loads a copy, which starts its own threads (9 ms and 15 MB).
    """
    process = os.getpid()
    if process not in _loaded:
        with _loading.lock:  # otherwise, each thread would load a copy
            if process not in _loaded:
                _loaded[process] = _copied_library() if any(_loaded.values()) else _imported_library()
    return _loaded[process]


_loading = ForkLock()


def _imported_library() -> _Library | None:
    with suppress(ImportError):
        return _Library(*map(importlib.import_module, ("obstore._obstore", "obstore._store")))
    return None


def _copied_library() -> _Library | None:
    # The dynamic linker loads a file name only once, so the copy needs a name of its own.
    original = sys.modules["obstore._obstore"]
    try:
        descriptor = os.memfd_create("obstore")
        try:
            with open(str(original.__file__), "rb") as file:  # noqa: PTH123
                size = os.fstat(file.fileno()).st_size
                place = 0
                while place < size:
                    place += os.sendfile(descriptor, file.fileno(), place, size - place)
            path = f"/proc/self/fd/{descriptor}"
            loader = importlib.machinery.ExtensionFileLoader("obstore._obstore", path)
            spec = importlib.machinery.ModuleSpec("obstore._obstore", loader, origin=path)
            copy = importlib.util.module_from_spec(spec)
            loader.exec_module(copy)
        finally:
            os.close(descriptor)
    except (AttributeError, OSError, ImportError):  # the system does not support this, or does not run such files
        return None
    return _Library(copy, sys.modules["obstore._store"])  # loading a copy has stored its own module there


class _Client(NamedTuple):
    """The obstore client of a bucket. The provider returns credentials, which may expire."""

    config: dict[str, Any]
    provider: Callable[[], dict[str, Any]] | None = None


def _new_client(library: Any, kind: str, filesystem: Any, bucket: str, timeout: float | None) -> Any:
    """Return a client for a bucket with the options of a file system; None if obstore does not support an option."""
    options = {name: value for name, value in filesystem.storage_options.items() if value}
    store, known, read = _STORES[kind]
    if filesystem.storage_args or not options.keys() <= known | _WITHOUT_EFFECT:
        return None
    access = read(filesystem, options, bucket)
    if access is None:
        return None
    is_plain = any(str(access.config.get(name, "")).startswith("http:") for name in ("endpoint", "base_url"))
    client_options = {"allow_http": is_plain, "timeout": timedelta(days=1)}
    if timeout is not None:
        limit = timedelta(seconds=timeout)
        client_options |= {"read_timeout": limit, "connect_timeout": limit}
        client_options["timeout"] = limit + timedelta(seconds=_LARGEST_S)
    if kind == "s3" and (bundle := os.environ.get("AWS_CA_BUNDLE")) and not is_plain:
        client_options["root_certificate"] = Path(bundle).read_bytes()
    try:
        client = getattr(library.stores, store)(
            bucket,
            config=access.config,
            client_options=client_options,
            retry_config={"max_retries": 0},  # the retry policy is in `retries`
            credential_provider=access.provider,
        )
    except library.functions.exceptions.BaseError:  # for example, a credentials file of an unsupported kind
        return None
    # Clients are never freed: in a forked process, this would close connections in the parent's event queue.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    return client


def _s3_client(filesystem: Any, options: dict[str, Any], bucket: str) -> _Client | None:
    """Return the configuration for S3, found where botocore finds it."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    client_kwargs = options.get("client_kwargs", {})
    config_kwargs = options.get("config_kwargs", {})
    if not (client_kwargs.keys() <= {"endpoint_url", "region_name"} and config_kwargs.keys() <= _TUNING):
        return None
    if bucket.startswith("arn:") or bucket.endswith("--x-s3"):
        return None
    endpoint = options.get("endpoint_url") or client_kwargs.get("endpoint_url")
    session = Session(profile=options.get("profile"))
    region = client_kwargs.get("region_name") or session.get_config_variable("region")
    if endpoint is None:
        client = session.create_client("s3", region_name=region, config=Config(signature_version=UNSIGNED))
        endpoint = client.meta.endpoint_url
        region = client.meta.region_name
    config = {"endpoint": endpoint, "region": "us-east-1" if region in (None, "aws-global") else region}
    if options.get("requester_pays"):
        config["request_payer"] = True
    if options.get("anon"):
        return _Client({**config, "skip_signature": True})
    if "key" in options or "secret" in options:
        given = {"access_key_id": options.get("key"), "secret_access_key": options.get("secret")}
        given["session_token"] = options.get("token")
        return _Client({**config, **{name: value for name, value in given.items() if value is not None}})
    credentials = session.get_credentials()
    if credentials is None:
        return None  # s3fs reports this

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        expires = None if credentials.method in _STATIC else datetime.now(timezone.utc) + _LEASE
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires,
        }

    return _Client(config, provide)


def _gcs_client(filesystem: Any, options: dict[str, Any], bucket: str) -> _Client | None:
    """Return the configuration for Google Cloud Storage, as gcsfs finds it."""
    if os.environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or os.environ.get("GOOGLE_API_USE_CLIENT_CERTIFICATE"):
        return None
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST", "")
    config = {}
    if endpoint not in ("", "default"):
        config["base_url"] = endpoint if "://" in endpoint else f"http://{endpoint}"
    credentials = filesystem.credentials
    if credentials.credentials is None:
        return _Client({**config, "skip_signature": True})

    def provide() -> dict[str, Any]:
        credentials.maybe_refresh()  # this refreshes within five minutes of the token's expiry, and not earlier
        return {"token": credentials.credentials.token, "expires_at": datetime.now(timezone.utc) + _LEASE}

    return _Client(config, provide)


def _azure_client(filesystem: Any, options: dict[str, Any], bucket: str) -> _Client | None:
    """Return the configuration for Azure, as adlfs finds it: a connection string, a token, a key or a signature."""
    account = filesystem.account_name
    key = filesystem.account_key
    signature = filesystem.sas_token
    endpoint = f"https://{options.get('account_host') or f'{account}.blob.core.windows.net'}"
    tokens = filesystem.sync_credential
    if filesystem.connection_string:
        parts = dict(part.split("=", 1) for part in filesystem.connection_string.split(";") if "=" in part)
        if "AccountName" not in parts:
            return None
        account = parts["AccountName"]
        key = parts.get("AccountKey")
        signature = parts.get("SharedAccessSignature")
        suffix = parts.get("EndpointSuffix", "core.windows.net")
        scheme = parts.get("DefaultEndpointsProtocol", "https")
        endpoint = parts.get("BlobEndpoint") or f"{scheme}://{account}.blob.{suffix}"
        tokens = None
    elif filesystem.credential is not None and tokens is None:
        return None  # the user's own object, which is asynchronous
    elif tokens is not None:
        key = None
    config = {"account_name": account, "endpoint": endpoint.rstrip("/")}
    # A provider takes precedence over the variables `AZURE_*`, which obstore reads as well.
    if tokens is not None:

        def provide() -> dict[str, Any]:
            token = tokens.get_token(_AZURE_SCOPE)
            return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, timezone.utc)}

        return _Client(config, provide)
    if key:
        return _Client(config, lambda: {"access_key": key, "expires_at": None})
    if signature:
        return _Client(config, lambda: {"sas_token": signature.removeprefix("?"), "expires_at": None})
    return _Client({**config, "skip_signature": True})


_STORES: dict[str, tuple[str, set[str], Callable[[Any, dict[str, Any], str], _Client | None]]] = {
    "s3": ("S3Store", _S3_OPTIONS, _s3_client),
    "gs": ("GCSStore", _GCS_OPTIONS, _gcs_client),
    "abfs": ("AzureStore", _AZURE_OPTIONS, _azure_client),
}
