"""No cache returns a value after a change of what it depends on: a label, a name, a row, a file, a function."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp

_clock = iter(range(10**9, 2 * 10**9))  # unlike `itertools.count`, it has a hash on Python 3.14


@dataclass(frozen=True)
class Data:
    """Three rows of a data set in a folder."""

    folder: Path
    labels: Sequence[int] = (0, 1, 1)
    names: Sequence[str] = ("cat", "dog")
    texts: Sequence[str] = ("one", "two", "six")
    contents: Sequence[bytes] = (b"1.0", b"2.0", b"3.0")
    keys: Sequence[str] = ("a", "b", "c")
    scale: int = 1

    def rows(self) -> list[dict[str, Any]]:
        classes = [self.names[label] for label in self.labels]
        columns = self.keys, self.labels, classes, self.texts, self.contents
        names = "key", "number", "class", "text", "content"
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def table(self) -> dict[str, Any]:
        return {name: [row[name] for row in self.rows()] for name in ("key", "number", "class", "text")}

    def files(self) -> list[str]:
        """Write a file for each row, and return the paths."""
        return [self._written(f"{key}.bin", content) for key, content in zip(self.keys, self.contents, strict=True)]

    def images(self) -> str:
        """Write a file for each row into the folder of its class, and return the root."""
        root = self.folder / "-".join(self.names)
        for row in self.rows():
            (root / row["class"]).mkdir(parents=True, exist_ok=True)
            self._written(f"{root.name}/{row['class']}/{row['key']}.jpg", row["content"])
        return str(root)

    def tar(self, classes: Sequence[str] = ("0", "1")) -> str:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for row in self.rows():
                label = classes[row["number"]].encode()
                members = {"bin": row["content"], "txt": row["text"].encode(), "cls": label}
                for suffix, content in members.items():
                    info = tarfile.TarInfo(f"{row['key']}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        return self._written(f"birds-{classes[0]}.tar", out.getvalue())

    def records(self) -> Path:
        folder = self.folder / f"records {next(_clock)}"
        kdp.write_records(kdp.from_table(self.table(), key="key", label="class"), folder, num_parts=1)
        return folder

    def _written(self, name: str, content: bytes) -> str:
        path = self.folder / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            os.utime(path, ns=(next(_clock), next(_clock)))  # so that the date differs from that of any other version
        return str(path)


class Rows(kdp.SampleSource):
    """A source that a user has written."""

    def __init__(self, data: Data) -> None:
        self.rows = data.rows()
        self.names = list(data.names)

    def __len__(self) -> int:
        return len(self.rows)

    def key_of(self, index: int) -> str:
        return str(self.rows[index]["key"])

    def getitem_x(self, index: int) -> Any:
        return self.rows[index]["text"]

    def getitem_y(self, index: int) -> Any:
        return self.rows[index]["number"], self.names


class OwnPipe(kdp.MapPipe):
    """A pipe whose samples hold what its class and attributes do not show."""

    traits = kdp.Traits(role="source")

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __len__(self) -> int:
        return len(held[self.folder])

    def fetch(self, index: int) -> kdp.Sample:
        row = held[self.folder][index]
        return kdp.Sample({"x": row["text"], "y": row["number"], "class": row["class"]}, key=row["key"], index=index)


held: dict[str, list[dict[str, Any]]] = {}


def own_pipe(data: Data) -> Any:
    held[str(data.folder)] = data.rows()
    return OwnPipe(data.folder)


def read_id(name: str) -> str:
    return name.upper()


class Opened(IterDataPipe[Any]):
    """Opens files, as stock pipes do."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __iter__(self) -> Any:
        return ((path, io.BytesIO(Path(path).read_bytes())) for path in self.paths)


def webdataset(data: Data) -> Any:
    wds = pytest.importorskip("webdataset")
    return kdp.from_webdataset(wds.WebDataset(data.tar(), shardshuffle=False, nodesplitter=None))


def ids(data: Data, **options: Any) -> Any:
    return kdp.from_ids(list(data.keys), [data.names[label] for label in data.labels], **options)


def texts_of(data: Data) -> Any:
    return kdp.from_table({"key": data.keys, "text": data.texts, "number": data.labels}, key="key")


SOURCES: dict[str, Callable[[Data], Any]] = {
    "from_ids": lambda data: ids(data, load=read_id, class_names=data.names),
    "from_ids, a dictionary": lambda data: kdp.from_ids(
        list(data.keys), dict(zip(data.keys, data.labels, strict=True)), load=read_id
    ),
    "from_ids, files": lambda data: (
        data.files() and ids(data, load=f"{data.folder}/{{id}}.bin", class_names=data.names)
    ),
    "from_table": lambda data: kdp.from_table(data.table(), label="class", class_names=data.names),
    "from_table, keys": lambda data: kdp.from_table(data.table(), key="key", label="number"),
    "from_table, files": lambda data: kdp.from_table(
        {**data.table(), "file": data.files()}, path="file", label="class", class_names=data.names
    ),
    "from_table, one file": lambda data: kdp.from_table(
        {**data.table(), "file": [data.files()[0]] * len(data.keys)}, path="file", label="class", class_names=data.names
    ),
    "image_folder": lambda data: kdp.image_folder(data.images(), class_names=data.names),
    "from_dataset": lambda data: kdp.from_dataset(
        [(row["text"], row["class"]) for row in data.rows()], class_names=data.names
    ),
    "from_dataset, labels": lambda data: kdp.from_dataset(
        list(data.texts), "x", labels=[data.names[label] for label in data.labels], class_names=data.names
    ),
    "SampleSource": Rows,
    "a pipe of a user": own_pipe,
    "to_samples": lambda data: SequenceWrapper(data.rows()).to_samples(
        key=lambda row: row["key"], label=lambda row: row["class"], class_names=data.names
    ),
    "to_samples, one key": lambda data: SequenceWrapper(data.rows()).to_samples(key=lambda row: "same"),
    "to_samples, a stream": lambda data: IterableWrapper(data.rows()).to_samples(
        key=lambda row: row["key"], fields={"x": lambda row: row["text"], "y": lambda row: row["number"]}
    ),
    "to_samples, paths": lambda data: IterableWrapper(data.files()).to_samples(key=lambda path: "a", label=len),
    "to_samples, open files": lambda data: Opened(data.files()).to_samples(),  # type: ignore[attr-defined]
    "open_shards": lambda data: kdp.open_shards(data.tar(), class_names=data.names),
    "stream_shards": lambda data: kdp.stream_shards(data.tar(), class_names=data.names),
    "open_shards, names": lambda data: kdp.open_shards(data.tar(("cat", "dog")), class_names=data.names),
    "stream_shards, names": lambda data: kdp.stream_shards(data.tar(("cat", "dog")), class_names=data.names),
    "from_webdataset": webdataset,
    "open_records": lambda data: kdp.open_records(data.records()),
    "map_classes": lambda data: kdp.from_table(data.table(), key="key", label="number").map_classes(
        {0: data.scale, 1: 5}
    ),
    "map_classes by name": lambda data: kdp.from_table(
        data.table(), key="key", label="class", class_names=data.names
    ).map_classes({"cat": "pet", "dog": "beast"}),
    "map_classes, a stream": lambda data: (
        IterableWrapper(data.rows())
        .to_samples(key=lambda row: row["key"], label=lambda row: row["number"])
        .map_classes({0: data.scale, 1: 5})
    ),
    "join": lambda data: kdp.from_ids(list(data.keys), load=read_id).join(texts_of(data)),
    "join, work in the other": lambda data: kdp.from_ids(list(data.keys), load=read_id).join(
        texts_of(data).transform("text", lambda text: (text, data.scale))
    ),
    "concat": lambda data: kdp.concat(texts_of(data), texts_of(replace(data, texts=data.texts[::-1]))),
    "concat, names of the other": lambda data: kdp.concat(
        kdp.from_ids(["d"], [0], load=read_id, class_names=data.names),
        kdp.from_dataset([(row["text"], ("cat", "dog")[row["number"]]) for row in data.rows()]),
    ),
    "mix": lambda data: texts_of(data).mix(
        kdp.concat(texts_of(replace(data, labels=[7 + label for label in data.labels])), texts_of(data)), stop="all"
    ),
    "rename_fields": lambda data: texts_of(data).rename_fields(x="text", y="number"),
    "transform": lambda data: texts_of(data).transform("text", lambda text: text * data.scale),
    "add_field": lambda data: texts_of(data).add_field("w", lambda sample: sample["text"] * data.scale),
}
CHANGES: dict[str, dict[str, Any]] = {
    "a label": {"labels": (0, 1, 0)},
    "names": {"names": ("dog", "cat")},
    "a text": {"texts": ("one", "too", "six")},
    "a file": {"contents": (b"1.0", b"2.5", b"3.0")},
    "the order of rows": {
        "labels": (1, 1, 0),
        "texts": ("two", "six", "one"),
        "keys": ("b", "c", "a"),
        "contents": (b"2.0", b"3.0", b"1.0"),
    },
    "the order of labels": {"labels": (1, 1, 0)},
    "a row": {"labels": (1, 1), "texts": ("two", "six"), "keys": ("b", "c"), "contents": (b"2.0", b"3.0")},
    "a value of a closure": {"scale": 3},
}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def summary(sample: Any) -> str:
    """Return all that is known of a sample."""
    return repr([sample.key, sample.index, *((name, plain(sample[name])) for name in sorted(sample))])


def fields_of(pipe: Any) -> list[dict[str, Any]]:
    return [dict(sample) for sample in pipe]


def made_of(value: Any) -> Any:
    return "made of", plain(value)


def chains(pipe: Any) -> list[Any]:
    """Return chains whose fields depend on all of a sample, on one field each, or are those of the source."""
    each = pipe
    for name in sorted(set().union(*(sample.keys() for sample in fields_of(pipe)))):
        each = each.transform(name, made_of)
    return [pipe.add_field("z", summary), each, pipe]


def check(before: Data, after: Data, source: str, cached: Callable[[Any], Any]) -> None:
    for data in (before, after, before):
        for chain in chains(SOURCES[source](data)):
            expected = fields_of(chain)
            assert fields_of(cached(chain)) == expected
            assert fields_of(cached(chain)) == expected  # the second time from the cache


def check_changes(source: str, folder: Path, cached: Callable[[Any], Any]) -> None:
    before = Data(folder)
    for change in CHANGES.values():
        check(before, replace(before, **change), source, cached)


@pytest.mark.parametrize("source", SOURCES)
def test_a_change_is_never_missed_in_memory(source: str, tmp_path: Path) -> None:
    name = f"stale-{os.getpid()}"
    first = kdp.from_dataset([(1, 0)]).cache_in_memory(name=name, max_bytes=10_000_000)  # keeps the cache
    check_changes(source, tmp_path, lambda chain: chain.cache_in_memory(name=name))
    assert first[0]["x"] == 1


@pytest.mark.parametrize("layout", ["lmdb", "files"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_change_is_never_missed_on_disk(source: str, layout: Any, tmp_path: Path) -> None:
    check_changes(source, tmp_path, lambda chain: chain.cache_on_disk(tmp_path / "cache", layout=layout))


@pytest.mark.parametrize("source", SOURCES)
def test_a_change_is_never_missed_in_redis(source: str, tmp_path: Path, redis_server: Any, namespace: str) -> None:
    check_changes(source, tmp_path, lambda chain: chain.cache_in_redis(redis_server.url, namespace=namespace))


def counted(cached: Any) -> tuple[int, int]:
    """Read all fields of a cached chain; return the number of hits and of misses."""
    fields_of(cached)
    stats = cached.stats()
    return stats.hits, stats.misses


def test_files_are_shared_whatever_their_labels_are(tmp_path: Path) -> None:
    data = Data(tmp_path)
    files = data.files()
    tables = [{"file": files, "label": labels, "note": note} for labels, note in (("aab", "xyz"), ("bba", "zyx"))]
    tables = [{name: list(values) for name, values in table.items()} for table in tables]
    pipes = [kdp.from_table(table, path="file", label="label").transform("x", made_of) for table in tables]
    assert [counted(pipe.cache_on_disk(tmp_path / "cache")) for pipe in pipes] == [(0, 3), (3, 0)]
    assert counted(pipes[0].map_classes({"a": "b", "b": "b"}).cache_on_disk(tmp_path / "cache")) == (3, 0)


def test_rows_of_one_file_share_what_is_made_of_it(tmp_path: Path) -> None:
    (file, *_) = Data(tmp_path).files()
    pipe = kdp.from_table({"file": [file] * 3, "box": [1, 2, 3]}, path="file").transform("x", made_of)
    assert counted(pipe.cache_in_memory()) == (2, 1)
    boxes = pipe.add_field("area", lambda sample: sample["box"] ** 2).cache_in_memory()
    assert [sample["area"] for sample in boxes] == [1, 4, 9]


def test_a_corrected_label_costs_only_its_own_entries(tmp_path: Path) -> None:
    def chain(labels: Sequence[int]) -> Any:
        pipe = kdp.from_ids(["a", "b", "c"], labels, load=read_id)
        return pipe.add_field("z", summary).cache_on_disk(tmp_path)

    assert counted(chain([0, 1, 2])) == (0, 6)
    assert counted(chain([0, 1, 3])) == (5, 1)


def test_functions_that_read_the_position_follow_it(tmp_path: Path) -> None:
    def chain(keys: str) -> Any:
        pipe = kdp.from_table({"key": list(keys)}, key="key")
        return pipe.add_field("place", lambda sample: sample.index).cache_on_disk(tmp_path)

    for keys in ("abc", "cab", "cab", "xab"):
        assert [sample["place"] for sample in chain(keys)] == [0, 1, 2]
    assert counted(chain("xab")) == (3, 0)


def test_a_field_that_cannot_be_hashed_is_warned_of(tmp_path: Path) -> None:
    pipe = SequenceWrapper([{"x": (n for n in range(3))}], deepcopy=False).to_samples(key=lambda item: "a")
    with pytest.warns(UserWarning, match=r"generator.*Pass `version=`"):
        assert pipe.add_field("z", lambda sample: 1).cache_on_disk(tmp_path)[0]["z"] == 1
