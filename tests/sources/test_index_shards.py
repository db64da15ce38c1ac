"""`index_shards(columns=)`: plans read no member, and give what they give without the columns."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.cli import main
from kdpipes.storage.decoding import values_of
from kdpipes.storage.shard_index import ShardIndex
from tests.proxy import Proxy, counted_s3

pytestmark = pytest.mark.usefixtures("cache")
NUM_SHARDS = 20
BIRDS = ["heron", "stork", "gull"]


def tar(shard: int, *, num_bytes: int = 100, **more: Any) -> bytes:
    """Return a shard of four samples with JSON members."""
    file = io.BytesIO()
    with TarWriter(file) as writer:
        for index in range(4):
            number = 4 * shard + index
            entries = {"label": BIRDS[number % 3], "width": 10 * number, "size": {"ratio": number / 2}, **more}
            row = {"jpg": bytes([shard]) * num_bytes, "json": json.dumps(entries).encode(), "cls": number % 5}
            writer.write({"__key__": f"{index:02}", **row})
    return file.getvalue()


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that counts requests to a store with shards."""
    with counted_s3({f"{s3}/birds-{shard:03}.tar": tar(shard) for shard in range(NUM_SHARDS)}, monkeypatch) as proxy:
        yield proxy


def urls_in(s3: str) -> str:
    return f"{s3}/birds-{{000..{NUM_SHARDS - 1:03}}}.tar"


def local(folder: Path, *shards: bytes) -> str:
    for number, content in enumerate(shards):
        (folder / f"birds-{number}.tar").write_bytes(content)
    return str(folder / f"birds-{{0..{len(shards) - 1}}}.tar")


def index_beside(path: Path) -> ShardIndex:
    return ShardIndex.from_bytes(Path(f"{path}.index").read_bytes(), "")


PLANS: dict[str, Callable[[Any], Any]] = {
    "filter_samples": lambda pipe: pipe.filter_samples(
        columns=["json.width", "json.size.ratio"], keep=lambda w, r: (w >= 100) & (r < 35)
    ),
    "filter_classes": lambda pipe: pipe.rename_fields(y="json.label").filter_classes(valid=["stork"]),
    "renamed": lambda pipe: pipe.rename_fields(meta="json", x="jpg").filter_samples(
        columns="meta.width", keep=lambda w: w % 20 == 0
    ),
    "split": lambda pipe: kdp.split(pipe, by="json.label", train=0.5, val=0.5).train,
    "after a plan": lambda pipe: pipe.permute(seed=1).filter_samples(
        columns="json.label", keep=lambda label: label == "gull"
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_plans_are_the_same_with_and_without_columns(tmp_path: Path, plan: Callable[[Any], Any]) -> None:
    urls = local(tmp_path, *map(tar, range(6)))
    states: list[Any] = []
    for columns in ((), "json.width,json.size.ratio,json.label"):
        kdp.index_shards(urls, columns=columns)
        chain = plan(kdp.open_shards(urls)).select("key").deal(batch_size=2, shuffle=True, seed=1)
        with kdp.Loader(chain) as loader:
            batches = iter(loader)
            states.append((next(batches), loader.state_dict()["pipes"], list(batches)))
    assert states[0] == states[1]
    assert 0 < len(states[0][2]) < 12


def test_no_member_is_requested_for_columns_of_the_index(s3: str, proxy: Proxy, cache: Path) -> None:
    result = kdp.index_shards(urls_in(s3), columns=["json.label", "json.width"])
    assert (len(result.urls), sum(result.num_samples)) == (NUM_SHARDS, 4 * NUM_SHARDS)
    num_before = len(proxy.requests())
    shards = kdp.open_shards(urls_in(s3), fetch="members")
    storks = shards.rename_fields(y="json.label").filter_classes(valid=["stork"])
    large = storks.filter_samples(columns="json.width", keep=lambda w: w >= 400)
    assert len(large) == len([number for number in range(40, 80) if number % 3 == 1])
    requests = proxy.requests()[num_before:]
    assert len(requests) <= 4
    assert not [request for request in requests if request.endswith(".tar")]


def test_columns_that_are_not_kept_are_read_in_bulk(s3: str, proxy: Proxy) -> None:
    kdp.index_shards(urls_in(s3))
    num_before = len(proxy.requests())
    shards = kdp.open_shards(urls_in(s3), fetch="members")
    assert len(shards.filter_samples(columns=["json.width", "json.label"], keep=lambda w, _: w >= 0)) == 80
    requests = [request for request in proxy.requests()[num_before:] if request.endswith(".tar")]
    assert len([request for request in requests if request.startswith("GET")]) == NUM_SHARDS  # neighbors in one


def test_a_column_is_added_without_reading_large_members(s3: str, proxy: Proxy) -> None:
    url, content = f"{s3}/large.tar", tar(1, num_bytes=1 << 20)
    fsspec.filesystem("s3").pipe(url, content)
    kdp.index_shards(url, columns="json.label")
    num_before = len(proxy.requests())
    kdp.index_shards(url, columns="json.width")
    ranges = [request for request in proxy.requests()[num_before:] if request == f"GET /{url.removeprefix('s3://')}"]
    assert len(ranges) == 4  # one for each JSON member
    index = ShardIndex.from_bytes(fsspec.filesystem("s3").cat_file(f"{url}.index"), "")
    assert [values_of(column).tolist() for column in index.columns.values()] == [
        ["stork", "gull", "heron", "stork"],
        [40, 50, 60, 70],
    ]
    assert kdp.open_shards(url).column("json.width").tolist() == [40, 50, 60, 70]


def test_columns_stay_until_the_shard_changes(tmp_path: Path) -> None:
    urls, path = local(tmp_path, tar(0)), tmp_path / "birds-0.tar"
    for columns, kept in (("json.width", ["json.width"]), ((), ["json.width"]), ("cls", ["json.width", "cls"])):
        kdp.index_shards(urls, columns=columns)
        assert list(index_beside(path).columns) == kept
    path.write_bytes(tar(1, other=True))
    kdp.index_shards(urls)
    assert index_beside(path).columns == {}


def test_damage_of_an_indexed_member_makes_the_index_anew(tmp_path: Path) -> None:

    urls, path = local(tmp_path, tar(3)), tmp_path / "birds-0.tar"
    kdp.index_shards(urls)
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"width": 120', b'"width": 999'))
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    kdp.index_shards(urls, columns="json.width")
    assert kdp.open_shards(urls).column("json.width").tolist() == [999, 130, 140, 150]
    assert kdp.open_shards(urls)[0]["json"]["width"] == 999


def test_a_sample_without_the_value_is_the_same_error(tmp_path: Path) -> None:
    lacking = tar(1).replace(b'"width": 50', b'"wodth": 50')
    urls = local(tmp_path, tar(0), lacking)

    def keep(pipe: Any) -> Any:
        return pipe.filter_samples(columns="json.width", keep=lambda w: w > 1)

    for _ in range(2):
        with pytest.raises(kdp.FieldError, match=r"Column 'json.width': there is no entry 'width'; there is 'label'"):
            len(keep(kdp.open_shards(urls)))
        kdp.index_shards(urls, columns="json.width")


def test_a_misspelt_column_is_an_error_naming_existing_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urls = local(tmp_path, tar(0))
    with pytest.raises(kdp.FieldError, match=r"'json.widht'. It has 'json.label', 'json.size', 'json.width'"):
        kdp.index_shards(urls, columns="json.widht")
    assert main(["index", urls, "--columns", "json.widht"]) == 1
    assert "No sample of shard" in capsys.readouterr().err


def test_the_command_keeps_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urls = local(tmp_path, tar(0), tar(1))
    assert main(["index", urls, "--columns", "json.label,json.width"]) == 0
    assert list(index_beside(tmp_path / "birds-1.tar").columns) == ["json.label", "json.width"]
    assert "Indexed 8 samples in 2 shards." in capsys.readouterr().out


def test_a_field_of_an_entry_is_read_from_the_member(tmp_path: Path) -> None:
    urls = local(tmp_path, tar(0), tar(1))
    kdp.index_shards(urls, columns="json.label")
    renamed = kdp.open_shards(urls).rename_fields(x="jpg", y="json.label")
    assert [sample["y"] for sample in renamed] == renamed.column("y").tolist()
    assert "json" in renamed[0]
    streamed = kdp.stream_shards(urls).rename_fields(x="jpg", y="json.label")
    assert [sample["y"] for sample in streamed] == renamed.column("y").tolist()
    with pytest.raises(kdp.FieldError, match=r"no field 'meta.label'"):
        kdp.open_shards(urls).rename_fields(y="meta.label").column("y")


def test_a_changed_field_hides_the_columns_of_the_index(tmp_path: Path) -> None:
    urls = local(tmp_path, tar(0), tar(1))
    kdp.index_shards(urls, columns="json.width")
    doubled = kdp.open_shards(urls).transform("json", lambda entries: {"width": 2 * entries["width"]})
    assert doubled.column("json.width").tolist() == [20 * number for number in range(8)]
