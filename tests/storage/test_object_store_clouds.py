"""Google Cloud Storage and Azure through obstore, with the options and credentials of gcsfs and adlfs.

The file systems here have the attributes of gcsfs and adlfs that kdpipes reads, and the storage is a local server.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.storage import object_store
from kdpipes.storage.access import Access, using
from kdpipes.storage.files import read_url, reader_of
from kdpipes.storage.remote import Span, read_range
from tests.http_server import Served, serving

pytest.importorskip("obstore")  # which is there for Python 3.11 and newer

KEY = base64.b64encode(b"heron" * 6).decode()
FAR = 4_000_000_000  # seconds: the year 2096


class GoogleFiles(AbstractFileSystem):  # type: ignore[misc]
    """As gcsfs, as far as kdpipes knows it."""

    protocol = "gs", "gcs"
    asynchronous = False

    def __init__(self, token: str | None = None, **options: Any) -> None:
        super().__init__()
        found = None if token == "anon" else SimpleNamespace(token="expired")
        self.credentials = SimpleNamespace(
            credentials=found, maybe_refresh=lambda: found is None or setattr(found, "token", token)
        )

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return b"by fsspec"[start:end]


class AzureFiles(AbstractFileSystem):  # type: ignore[misc]
    """As adlfs, as far as kdpipes knows it."""

    protocol = "abfs", "az", "abfss"
    asynchronous = False

    def __init__(
        self,
        account_name: str | None = None,
        account_key: str | None = None,
        sas_token: str | None = None,
        connection_string: str | None = None,
        credential: Any = None,
        client_id: str | None = None,
        account_host: str | None = None,
        anon: bool | None = None,
    ) -> None:
        super().__init__()
        self.account_name, self.account_key, self.sas_token = account_name, account_key, sas_token
        self.connection_string, self.credential = connection_string, credential or client_id
        token = SimpleNamespace(token="stork", expires_on=FAR)
        self.sync_credential = SimpleNamespace(get_token=lambda scope: token) if client_id else None

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return b"by fsspec"[start:end]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    classes = {"gs": GoogleFiles, "az": AzureFiles, "abfs": AzureFiles}
    for name, kind in classes.items():
        monkeypatch.setitem(_registry, name, kind)
    for name in ("STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield
    for kind in (GoogleFiles, AzureFiles):
        kind.clear_instance_cache()


@pytest.fixture
def server() -> Iterator[Served]:
    with serving() as server:
        server.headers = {"ETag": '"heron"', "Last-Modified": "Tue, 21 Oct 2025 07:28:00 GMT"}
        server.files = {"/birds/a.jpg": b"heron", "/account/birds/a.jpg": b"heron"}
        yield server


def read(url: str, **options: Any) -> tuple[bytes, bytes]:
    """Return a file and a range of it, as pipes read them."""
    with using(Access(storage_options=options, timeout_s=5)):
        return bytes(read_url(url)), bytes(read_range(Span(url, 1, 3)))


def azure(server: Served, **parts: str) -> dict[str, Any]:
    """Return options with a connection string, the only way to give adlfs an address without TLS."""
    said = {"AccountName": "account", "BlobEndpoint": f"{server.url}/account", **parts}
    return {"connection_string": ";".join(f"{name}={value}" for name, value in said.items())}


@pytest.mark.parametrize("place", ["option", "environment"])
def test_objects_of_google_are_read_without_credentials(
    server: Served, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "environment":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url.removeprefix("http://"))
    given = {"endpoint_url": server.url} if place == "option" else {}
    assert read("gs://birds/a.jpg", token="anon", **given) == (b"heron", b"er")
    assert len(server.asked) == 2
    assert server.authorizations == ["", ""]


def test_objects_of_google_are_read_with_the_token_of_gcsfs(server: Served) -> None:
    assert read("gs://birds/a.jpg", token="heron-1", endpoint_url=server.url) == (b"heron", b"er")
    assert server.authorizations == ["Bearer heron-1"] * 2


def test_blobs_are_read_with_a_key_or_a_signature_or_a_token(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"of another account").decode())
    assert read("az://birds/a.jpg", **azure(server, AccountKey=KEY)) == (b"heron", b"er")
    assert read("abfs://birds/a.jpg", **azure(server, SharedAccessSignature="?sv=2&sig=abc%3D")) == (b"heron", b"er")
    assert read("az://birds/a.jpg", **azure(server)) == (b"heron", b"er")
    assert all(text.startswith("SharedKey account:") for text in server.authorizations[:2])
    assert server.authorizations[2:] == [""] * 4
    assert server.asked[2:] == ["/account/birds/a.jpg?sv=2&sig=abc%3D"] * 2 + ["/account/birds/a.jpg"] * 2


def test_blobs_are_read_with_the_tokens_of_adlfs() -> None:
    files = AzureFiles(account_name="account", client_id="heron")
    found = client_of(files)
    assert found.config == {"account_name": "account", "endpoint": "https://account.blob.core.windows.net"}
    provided = found.provider()
    assert (provided["token"], provided["expires_at"].timestamp()) == ("stork", FAR)
    at_home = AzureFiles(account_name="account", account_key=KEY, account_host="blobs.example.org")
    assert client_of(at_home).config["endpoint"] == "https://blobs.example.org"
    assert client_of(at_home).provider() == {"access_key": KEY, "expires_at": None}


def client_of(files: Any) -> Any:
    return object_store._azure_client(files, files.storage_options, "birds")


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_a_missing_object_is_an_error_by_name(server: Served, kind: str) -> None:
    options = {"token": "anon", "endpoint_url": server.url} if kind == "gs" else azure(server)
    with pytest.raises(FileNotFoundError), using(Access(storage_options=options)):
        read_url(f"{kind}://birds/none.jpg")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://birds/a.jpg", {"token": "anon", "requester_pays": True}),
        ("gs://birds/a.jpg", {"token": "anon", "session_kwargs": {"trust_env": True}}),
        ("az://birds/a.jpg", {"account_name": "account", "credential": object()}),
        ("az://birds/a.jpg", {"connection_string": "UseDevelopmentStorage=true"}),
    ],
    ids=["requester", "session", "credential", "emulator"],
)
def test_what_obstore_cannot_is_read_by_fsspec(url: str, options: dict[str, Any]) -> None:
    with using(Access(storage_options=options)):
        assert reader_of(url).client() is None  # type: ignore[attr-defined]
    assert read(url, **options) == (b"by fsspec", b"y ")


def test_without_obstore_fsspec_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdpipes.storage.object_store._library", lambda: None)
    assert read("gs://birds/a.jpg", token="anon") == (b"by fsspec", b"y ")


@pytest.mark.parametrize("is_away", [False, True])
def test_an_error_has_no_part_of_a_signature(server: Served, monkeypatch: pytest.MonkeyPatch, is_away: bool) -> None:
    monkeypatch.setattr("kdpipes.storage.access.time.sleep", lambda seconds: None)
    server.rejected = {"/account/birds/a.jpg": 403}
    given = {"BlobEndpoint": "http://127.0.0.1:1/account"} if is_away else {}
    options = azure(server, SharedAccessSignature="sv=2&sig=heron-and-stork", **given)
    with pytest.raises(DataError) as caught:
        read("az://birds/a.jpg", **options)
    error: BaseException | None = caught.value
    while error is not None:
        assert "heron-and" not in str(error)
        error = error.__cause__ or error.__context__


def test_a_chain_reads_each_object_once_and_ahead(server: Served) -> None:
    server.files = {f"/birds/{number}.txt": b"%d" % number for number in range(40)}
    options = {"token": "anon", "endpoint_url": server.url}
    names = [str(number) for number in range(40)]
    chain = kdp.from_ids(names, load="gs://birds/{id}.txt", storage_options=options).select("x key")
    with kdp.Loader(chain.deal(batch_size=8, shuffle=True)) as loader:
        samples = [sample for batch in loader for sample in batch]
    assert {key: content for content, key in samples} == {name: name.encode() for name in names}
    assert len(server.asked) == 40
