"""Passwords and signatures in URLs: used for reading, and neither shown nor written anywhere."""

from __future__ import annotations

import gzip
import io
import json
import logging
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.cli import main
from kdpipes.core.errors import as_cause, must_be
from kdpipes.storage.urls import expand_urls, identity_of, path_of, relative_names
from kdpipes.write import copy_to_local
from kdpipes.write.localize import FileLocalizer
from tests.http_server import Served, serving, tar

SECRETS = ("HUNTER2", "1FA9B3")  # a password, a signature
SIGNED = "X-Amz-Signature=1FA9B3&X-Amz-Expires=60&X-Amz-Credential=1FA9B3"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server of two shards that takes signed requests alone; the local cache lies in `tmp_path`."""
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "local"))
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    with serving() as has:
        has.files = {f"/birds-{n}.tar": tar("ab"[n]) for n in range(2)}
        has.headers["ETag"] = '"1"'
        has.required = SIGNED
        yield has


def signed(served: Served, query: str = SIGNED) -> str:
    return f"{served.url.replace('://', '://ada:HUNTER2@')}/birds-{{0..1}}.tar?{query}"


def written(folder: Path) -> list[str]:
    """Return the files below a folder whose names or contents hold a secret."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert found
    return [
        str(path)
        for path in found
        if any(secret.encode() in path.read_bytes() or secret in str(path) for secret in SECRETS)
    ]


def chain(url: str, folder: Path) -> Any:
    return kdp.open_shards(url, fetch="shards", cache_dir=folder / "shards").cache_on_disk(folder / "cache")


def dealt(pipe: Any) -> Any:
    return pipe.select("key jpg").deal(batch_size=4, shuffle=True)


@pytest.mark.parametrize(
    ("url", "identity"),
    [
        ("https://ada:pw@host/a.tar", "https://host/a.tar"),
        ("https://token@host:80/a.tar#part", "https://host:80/a.tar"),
        ("https://host/a.tar?X-Goog-Signature=1f&X-Goog-Date=2", "https://host/a.tar"),
        ("https://host/a.tar?AWSAccessKeyId=A&Signature=b&Expires=3", "https://host/a.tar"),
        ("https://cdn/a.tar?Policy=a&Signature=b&Key-Pair-Id=c", "https://cdn/a.tar"),
        ("https://x.blob/a.tar?sv=2&st=1&se=3&sr=b&sp=r&sig=ab%3D", "https://x.blob/a.tar"),
        ("https://host/get?file=1&access_token=t&sr=2", "https://host/get?file=1&sr=2"),
        ("s3://bucket/a.tar?versionId=3", "s3://bucket/a.tar?versionId=3"),
        ("abfs://box@account.dfs/a.tar", "abfs://box@account.dfs/a.tar"),
        ("zip://x/1.jpg::https://ada:pw@host/b.zip?token=t", "zip://x/1.jpg::https://host/b.zip"),
        ("s3://bucket/a@b/what?.tar", "s3://bucket/a@b/what?.tar"),
        ("photos/a?token=3.tar", "photos/a?token=3.tar"),
    ],
)
def test_identity_has_no_credentials_and_keeps_the_rest(url: str, identity: str) -> None:
    assert identity_of(url) == identity == identity_of(identity)


def test_names_are_paths_unless_only_queries_differ() -> None:
    assert relative_names([f"https://h/{n}.tar?sig=a&x=1" for n in range(2)]) == ["0.tar", "1.tar"]
    assert relative_names([f"https://h/get?file={n}&token=t" for n in range(2)]) == ["get?file=0", "get?file=1"]
    assert path_of("https://h/a.tar.gz?versionId=3") == "https://h/a.tar.gz"


def test_the_same_file_signed_twice_is_one_file() -> None:
    with pytest.raises(ValueError, match=r"unique, but is 'https://host/a\.tar' instead"):
        expand_urls(["https://host/a.tar?Signature=1", "https://host/a.tar?Signature=2"])


def test_nothing_of_a_signed_url_is_written_or_shown(served: Served, tmp_path: Path) -> None:
    pipe = chain(signed(served), tmp_path)
    with kdp.Loader(dealt(pipe)) as loader:
        batches = [batch for _, batch in zip(range(2), loader, strict=False)]
        state = loader.state_dict()
    pipe.warm_up()
    kdp.write_shards(pipe, str(tmp_path / "out" / "b-%d.tar"), max_samples=7)
    kdp.write_records(pipe, tmp_path / "records", num_parts=2)
    for name in ("birds-0.tar", "birds-1.tar"):
        FileLocalizer(tmp_path / "files")(signed(served).replace("birds-{0..1}.tar", name))
    shown = [repr(pipe), pipe[0].key, repr(pipe[0]), json.dumps(state), repr(batches), repr(pickle.dumps(pipe[3].key))]
    shown += [sample.key for sample in kdp.stream_shards(signed(served))]
    shown += [repr(kdp.from_ids([signed(served)])), kdp.from_ids([signed(served)]).column("key")[0]]
    assert not [text for text in shown if any(secret in text for secret in SECRETS)]
    assert pipe[3].key == "birds-0.tar/3"
    assert written(tmp_path) == []


def test_a_url_signed_anew_hits_the_caches_and_fits_its_state(served: Served, tmp_path: Path) -> None:
    with kdp.Loader(dealt(chain(signed(served), tmp_path))) as loader:
        want = list(loader)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = list(batches)
    served.required, served.asked = "X-Amz-Signature=9C&X-Amz-Date=2", []
    renewed = chain(signed(served, served.required).replace("HUNTER2", "OTHER"), tmp_path)
    with kdp.Loader(dealt(renewed)) as loader:
        assert list(loader) == want
        assert (renewed.stats().hits, renewed.stats().misses) == (len(renewed), 0)
        loader.load_state_dict(state)
        assert list(loader) == rest
    uncached = kdp.open_shards(signed(served, served.required), fetch="shards", cache_dir=tmp_path / "shards")
    assert uncached[11]["jpg"] == b"b" * 3_000
    assert len([path for path in served.asked if ".tar?" in path]) == 4, "each shard is asked for its version alone"
    one, other = (kdp.from_ids([f"https://h/1.pt?sig={n}&st={n}"], [0]).select("x").deal(batch_size=1) for n in "ab")
    with kdp.Loader(one) as first, kdp.Loader(other) as second:
        second.load_state_dict(first.state_dict())


def test_a_signed_tar_gz_is_unpacked(served: Served) -> None:
    served.files["/a.tar.gz"] = gzip.compress(tar("a"))
    assert len(list(kdp.stream_shards(f"{served.url}/a.tar.gz?{SIGNED}"))) == 10


def tries(folder: Path) -> dict[str, Callable[[str], Any]]:
    one = kdp.from_dataset([(b"1", 0)], "x y").to_samples(key=lambda sample: "k")
    return {
        "open_shards": lambda url: len(kdp.open_shards(url, timeout_s=5)),
        "stream_shards": lambda url: list(kdp.stream_shards(url, timeout_s=5)),
        "from_ids": lambda url: kdp.from_ids([url])[0]["x"],
        "to_samples": lambda url: [sample["x"] for sample in IterableWrapper([url]).to_samples()],
        "copy_to_local": lambda url: copy_to_local(url, folder / "copy"),
        "FileLocalizer": lambda url: FileLocalizer(folder / "files")(url),
        "below": lambda url: FileLocalizer(folder / "files", "s3://other")(url),
        "open_cache": lambda url: len(kdp.open_cache(url)),
        "image_folder": lambda url: len(kdp.image_folder(url)),
        "open_records": lambda url: kdp.open_records(url),
        "write_shards": lambda url: kdp.write_shards(one, url.replace("a.tar", "a-%d.tar"), max_samples=1),
        "cache_on_disk": lambda url: kdp.from_ids([1], load=str).cache_on_disk(url)[0]["x"],
        "cache_in_redis": lambda url: one.cache_in_redis(url.replace("http:", "rediss"), namespace="n"),
        "pipe": lambda url: kdp.open_shards(f"pipe:curl {url}"),
        "glob": lambda url: len(kdp.open_shards(url.replace("a.tar", "*.tar"))),
    }


def pickled(error: Exception) -> bytes:
    """Pickle an error as a process does that has not imported Dask, whose tblib adds the causes to every error."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {}
    pickler.dump(error)
    return file.getvalue()


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("name", tries(Path()))
@pytest.mark.parametrize("place", ["missing", "forbidden", "rejected port", "broken"])
def test_errors_warnings_and_logs_hold_no_secret(
    name: str, place: str, served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kdpipes")
    served.required = {"forbidden": "other"}.get(place, "")
    served.rejected = {"/a.tar": 500} if place == "broken" else {}
    host = "http://127.0.0.1:1" if place == "rejected port" else served.url
    url = f"{host.replace('://', '://ada:HUNTER2@')}/a.tar?{SIGNED}"
    said = []
    with warnings.catch_warnings(record=True) as warned:
        try:
            tries(tmp_path)[name](url)
        except Exception as error:
            said = ["".join(traceback.format_exception(error)), repr(error), "".join(getattr(error, "__notes__", []))]
            # chains go over processes as text and as pickles
            said += [repr(pickled(error))]
    said += [str(warning.message) for warning in warned] + [caplog.text]
    lines = [line for text in said for line in text.splitlines() if any(secret in line for secret in SECRETS)]
    assert any(said)
    assert not lines, "\n".join(lines)


def test_misspelt_urls_and_options_are_masked() -> None:
    for url in ("rediss//ada:HUNTER2@host", "redis:/ada:HUNTER2@host", "redis:ada:HUNTER2@host/0", ":HUNTER2@host"):
        assert "HUNTER2" not in must_be("url", "a URL", url)
        assert "HUNTER2" not in must_be("urls", "URLs", [url])
    assert must_be("x", "else", "train-%d.tar") == "`x` must be else, but is 'train-%d.tar' instead."
    assert "HUNTER2" not in must_be(
        "storage_options", "else", {"password": "HUNTER2", "client_kwargs": {"token": "HUNTER2"}}
    )


def test_the_cause_of_an_error_stays_unless_it_holds_a_secret() -> None:
    plain = OSError("http://host/a.tar")
    assert as_cause(plain) is plain
    status = type("ClientError", (Exception,), {"status": 403})("http://ada:HUNTER2@host/a.tar")
    plain.__cause__ = status
    found = as_cause(plain)
    assert (type(found), str(found)) == (OSError, "http://host/a.tar")
    assert str(found.__cause__) == "ClientError: http://***@host/a.tar"
    assert getattr(found.__cause__, "status", None) == 403


def test_commands_show_no_secret(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = signed(served)
    commands = [["inspect", url], ["inspect", url, "--json"], ["index", url], ["index", url, "--json"]]
    commands += [["copy", url.replace("birds-{0..1}.tar", "birds"), str(tmp_path / "copy")]]
    for words in commands:
        main(words)
        shown = capsys.readouterr()
        assert shown.out or shown.err
        assert not [text for text in shown if any(secret in text for secret in SECRETS)], words
