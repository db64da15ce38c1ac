"""`kdpipes index`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs

from kdpipes.core import messages
from kdpipes.demo import write_photo_shards
from kdpipes.storage.shard_index import ShardIndex

INTERRUPTED = """
import threading
import time
from kdpipes.cli import main
from tests.faulty_storage import Fault, faulty_storage


first = threading.Lock()


def interrupt(seconds):
    if first.acquire(blocking=False):  # several threads wait for storage: one press of Ctrl-C is enough
        os.killpg(0, signal.SIGINT)
    time.sleep(seconds)


with faulty_storage({folder!r}, faults=[Fault("latency", seconds=600, paths="*.tar", on="range")], sleep=interrupt):
    sys.exit(main(["index", "faulty://photos-{{000..003}}.tar"]))
"""


@pytest.fixture
def urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Four shards without indexes, as a brace range."""
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    return write_photo_shards(tmp_path / "shards")


def index_beside(path: str | Path) -> ShardIndex:
    return ShardIndex.from_bytes(Path(f"{path}.index").read_bytes(), "")


def test_shards_are_indexed(urls: str, tmp_path: Path, run: Any) -> None:
    for arguments, has_checksums in (["--no-checksums"], False), ([], True):
        assert run("index", urls, *arguments) == (0, "Indexed 160 samples in 4 shards.\n", "")
        index = index_beside(tmp_path / "shards" / "photos-000.tar")
        assert (index.fields["jpg"].checksums is not None) == has_checksums


def test_several_urls_and_globs_are_indexed_together(urls: str, tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "shards"
    said = run("index", folder / "photos-000.tar", f"{folder}/photos-00[12].tar")
    assert said.out == "Indexed 120 samples in 3 shards.\n"
    assert sorted(path.name for path in folder.glob("*.index")) == [f"photos-00{n}.tar.index" for n in range(3)]


def test_json_tells_what_the_indexes_hold(urls: str, tmp_path: Path, run: Any) -> None:
    told = run("index", urls, "--json").json()
    assert (told["num_samples"], told["num_shards"]) == (160, 4)
    assert [Path(shard["url"]).name for shard in told["shards"]] == [f"photos-00{n}.tar" for n in range(4)]
    for shard in told["shards"]:
        index = index_beside(shard["url"])
        assert shard == {"url": shard["url"], "num_samples": len(index.keys), "num_bytes": index.version.size}


def test_a_bar_on_stderr_shows_what_takes_long(urls: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "DELAY_S", 0.0)
    said = run("index", urls, "--json")
    assert "indexing" in said.err
    assert json.loads(said.out)["num_samples"] == 160


def test_what_is_missing_or_no_tar_is_told_in_one_line(tmp_path: Path, run: Any) -> None:
    (tmp_path / "none.tar").write_bytes(b"text" * 300)
    assert run("index", tmp_path / "none-*.tar").mistake().startswith("kdpipes index: No file matches")
    assert run("index", tmp_path / "a.tar").mistake().startswith("kdpipes index: There is no file")
    assert "cannot be read as a plain tar" in run("index", tmp_path / "none.tar", "--json").mistake()
    assert "`pipe:` would run a shell command" in run("index", "pipe:cat a.tar").wrong_usage()


def test_ctrl_c_while_storage_is_slow_ends_it_at_once(urls: str, tmp_path: Path, script: Any) -> None:
    said = script(INTERRUPTED.format(folder=str(Path(urls).parent)))
    assert said == (130, "", "kdpipes index: interrupted\n")
    assert not list((tmp_path / "shards").glob("*.index"))


def test_a_tar_replaced_by_another_client_is_indexed_again(urls: str, s3: str, tmp_path: Path, run: Any) -> None:
    photos = [Path(urls).parent / f"photos-00{n}.tar" for n in range(2)]
    one_of_another_size = Path(write_photo_shards(tmp_path / "few", num_shards=20)).parent / "photos-000.tar"
    other = s3fs.S3FileSystem(skip_instance_cache=True)
    other.put(str(photos[0]), f"{s3}/a.tar")
    assert run("index", f"{s3}/*.tar", "--json").json()["num_samples"] == 40
    fsspec.filesystem("s3").ls(s3)  # which is kept
    other.put(str(one_of_another_size), f"{s3}/a.tar")
    other.put(str(photos[1]), f"{s3}/b.tar")
    for pattern in (f"{s3}/*.tar", f"{s3}/{{a,b}}.tar"):
        told = run("index", pattern, "--json").json()
        sizes = [path.stat().st_size for path in (one_of_another_size, photos[1])]
        assert [(shard["num_samples"], shard["num_bytes"]) for shard in told["shards"]] == [
            (8, sizes[0]),
            (40, sizes[1]),
        ]
    index = ShardIndex.from_bytes(other.cat_file(f"{s3}/a.tar.index"), "")
    assert (len(index.keys), index.version.size) == (8, sizes[0])
