"""S3 through obstore: one request for one read, in forked processes too, with the options that s3fs users have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.storage import object_store
from kdpipes.storage.files import read_url, reader_of, version_of
from kdpipes.storage.remote import Span, read_range
from tests.processes import in_child
from tests.proxy import Proxy, slow_proxy

pytest.importorskip("obstore")  # which is there for Python 3.11 and newer


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The store behind a proxy that counts requests."""
    options = fsspec.config.conf["s3"]
    with slow_proxy(options["endpoint_url"]) as proxy:
        monkeypatch.setitem(fsspec.config.conf, "s3", {**options, "endpoint_url": proxy.url})
        yield proxy


def test_a_read_is_one_request(s3: str, proxy: Proxy) -> None:
    fsspec.filesystem("s3").pipe(f"{s3}/a.bin", b"heron")
    num_before = len(proxy.requests())
    assert read_url(f"{s3}/a.bin") == b"heron"
    assert read_range(Span(f"{s3}/a.bin", 1, 3)) == b"er"
    assert [request.split()[0] for request in proxy.requests()[num_before:]] == ["GET", "GET"]
    assert version_of(f"{s3}/a.bin").size == 5


def test_versions_are_those_of_listings(s3: str) -> None:
    files = fsspec.filesystem("s3")
    files.pipe(f"{s3}/birds/a.bin", b"heron")
    files.invalidate_cache()
    alone = version_of(f"{s3}/birds/a.bin")
    files.ls(f"{s3}/birds")
    assert version_of(f"{s3}/birds/a.bin") == alone
    assert alone.tag.startswith("tag:")


def test_a_forked_process_reads_what_its_parent_was_reading(s3: str) -> None:
    fsspec.filesystem("s3").pipe(f"{s3}/a.bin", b"heron")
    assert read_url(f"{s3}/a.bin") == b"heron"

    def read() -> None:
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(read_url, [f"{s3}/a.bin"] * 20)) == {b"heron"}
        assert object_store._library() is not None
        assert in_child(lambda: read_url(f"{s3}/a.bin")) == 0

    assert in_child(read) == 0
    assert read_url(f"{s3}/a.bin") == b"heron"


def test_threads_that_begin_together_share_one_client(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("s3").pipe(f"{s3}/a.bin", b"heron")
    fsspec.filesystem("s3").clear_instance_cache()
    made: list[Any] = []
    new_client = object_store._new_client
    monkeypatch.setattr(object_store, "_new_client", lambda *given: made.append(given) or new_client(*given))
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(read_url, [f"{s3}/a.bin"] * 64))
    assert len(made) == 1


@pytest.mark.parametrize("source", ["environment", "profile", "default profile"])
def test_credentials_and_endpoints_are_found_where_aws_has_them(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    fsspec.filesystem("s3").pipe(f"{s3}/a.bin", b"heron")
    options = fsspec.config.conf["s3"]
    place = {"region": "eu-north-1", "endpoint_url": options["endpoint_url"]}
    secrets = {"aws_access_key_id": options["key"], "aws_secret_access_key": options["secret"]}
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    if source == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL", place["endpoint_url"])
        monkeypatch.setenv("AWS_DEFAULT_REGION", place["region"])
        for name, value in secrets.items():
            monkeypatch.setenv(name.upper(), value)
    else:
        name = "birds" if source == "profile" else "default"
        header = "profile birds" if source == "profile" else "default"
        (tmp_path / "config").write_text("\n".join([f"[{header}]", *(f"{k} = {v}" for k, v in place.items())]))
        (tmp_path / "credentials").write_text("\n".join([f"[{name}]", *(f"{k} = {v}" for k, v in secrets.items())]))
    given = {"profile": "birds"} if source == "profile" else {}
    monkeypatch.setitem(fsspec.config.conf, "s3", given)
    assert reader_of(f"{s3}/a.bin").client() is not None  # type: ignore[attr-defined]
    assert read_url(f"{s3}/a.bin") == b"heron"


@pytest.mark.parametrize(
    "options", [{"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, {"client_kwargs": {"verify": False}}]
)
def test_options_that_obstore_lacks_are_left_to_s3fs(
    s3: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    fsspec.filesystem("s3").pipe(f"{s3}/a.bin", b"heron")
    monkeypatch.setitem(fsspec.config.conf, "s3", {**fsspec.config.conf["s3"], **options})
    assert reader_of(f"{s3}/a.bin").client() is None  # type: ignore[attr-defined]
    assert read_url(f"{s3}/a.bin") == b"heron"


def test_without_obstore_s3fs_reads(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdpipes.storage.object_store._library", lambda: None)
    fsspec.filesystem("s3").pipe(f"{s3}/a.bin", b"heron")
    fsspec.filesystem("s3").clear_instance_cache()
    assert reader_of(f"{s3}/a.bin").client() is None  # type: ignore[attr-defined]
    assert read_url(f"{s3}/a.bin") == b"heron"
    fsspec.filesystem("s3").clear_instance_cache()


def test_an_error_has_no_part_of_the_credentials(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**fsspec.config.conf["s3"], "secret": "heron-and-stork"}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    with pytest.raises(DataError, match="rejected") as caught:
        read_url(f"{s3}/a.bin")
    error: BaseException | None = caught.value
    while error is not None:
        assert options["key"] not in str(error)
        assert "heron-and" not in str(error)
        error = error.__cause__ or error.__context__


def test_requests_are_repeated_by_one_policy(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("kdpipes.storage.access.time.sleep", waits.append)
    nobody = {**fsspec.config.conf["s3"], "endpoint_url": "http://127.0.0.1:1"}
    monkeypatch.setitem(fsspec.config.conf, "s3", nobody)
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1"):
        read_url(f"{s3}/a.bin")
    assert len(waits) == 5


def test_image_folders_are_listed_once_and_read_ahead(s3: str, photo_folder: Path, proxy: Proxy) -> None:
    files = fsspec.filesystem("s3")
    files.put(f"{photo_folder}/", f"{s3}/photos/", recursive=True)
    files.invalidate_cache()
    num_before = len(proxy.requests())
    folder = kdp.image_folder(f"{s3}/photos")
    with kdp.Loader(folder.select("x key").deal(batch_size=16, shuffle=True)) as loader:
        samples = [sample for batch in loader for sample in batch]
    assert {key: content for content, key in samples} == {
        str(path.relative_to(photo_folder)): path.read_bytes() for path in photo_folder.glob("*/*.jpg")
    }
    requests = proxy.requests()[num_before:]
    assert len([request for request in requests if "list-type" in request]) == 1 + len(folder.class_names())
    assert len(requests) == 1 + len(folder.class_names()) + len(samples)


def test_files_of_ids_are_read_once_each(s3: str, photo_folder: Path, proxy: Proxy) -> None:
    fsspec.filesystem("s3").put(f"{photo_folder}/", f"{s3}/photos/", recursive=True)
    names = sorted(str(path.relative_to(photo_folder))[:-4] for path in photo_folder.glob("*/*.jpg"))
    num_before = len(proxy.requests())
    chain = kdp.from_ids(names, load=f"{s3}/photos/{{id}}.jpg").select("x key").deal(batch_size=16, shuffle=True)
    with kdp.Loader(chain) as loader:
        samples = [sample for batch in loader for sample in batch]
    assert all(content == (photo_folder / f"{key}.jpg").read_bytes() for content, key in samples)
    assert len(proxy.requests()) - num_before == len(names)


def test_labels_alone_read_no_more_than_the_first_files(s3: str, photo_folder: Path, proxy: Proxy) -> None:
    fsspec.filesystem("s3").put(f"{photo_folder}/", f"{s3}/photos/", recursive=True)
    num_before = len(proxy.requests())
    folder = kdp.image_folder(f"{s3}/photos")
    for index in range(0, len(folder), 7):
        assert folder[index]["y"] >= 0
    assert not [request for request in proxy.requests()[num_before:] if ".jpg" in request]
    assert os.getpid() in object_store._loaded
