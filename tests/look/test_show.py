"""A chain as nodes, as text and as HTML: names, arguments, stages, lengths, classes, and nothing else happens."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import FileLister, IterableWrapper

import kdpipes as kdp
from kdpipes.core.registry import called_directly
from kdpipes.look.show import chain_html, views_of

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
LABELS = [0, 0, 0, 1, 2]


def birds() -> Any:
    return kdp.from_ids(list("abcde"), LABELS, load=str.upper, class_names=["heron", "stork", "gull"])


def stages(pipe: Any) -> list[tuple[str, str]]:
    return [(node.stage, node.name) for node in views_of(pipe, find_out=True)]


def html(pipe: Any) -> str:
    return str(pipe._repr_html_())


class Balanced(HTMLParser):
    """Checks that every element ends where it should; collects the text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(document)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open += [] if tag in {"img", "br"} else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_every_source_that_is_called_directly_has_its_name() -> None:
    found = {
        value: name
        for name in kdp.__all__
        if isinstance(value := getattr(kdp, name), type)
        and issubclass(value, IterDataPipe | MapDataPipe)
        and value.__name__ != name
    }
    assert called_directly == found


def test_a_chain_is_written_as_it_is_called() -> None:
    pipe = birds().filter_classes(valid=["heron", 1]).select("x y", return_ctx=True).deal(batch_size=2, shuffle=True)
    start = "from_ids(['a', 'b', 'c', 'd', 'e'], [0, 0, 0, 1, 2], load=upper, class_names=['heron', 'stork', 'gull'])"
    parts = [start, "filter_classes(valid=['heron', 1])", "select('x y', return_ctx=True)"]
    assert repr(pipe) == str(pipe) == "\n  → ".join([*parts, "deal(batch_size=2, shuffle=True)"])
    assert len(pipe) == 2
    assert repr(pipe).endswith("[4 samples, 2 batches]")
    assert repr(kdp.from_dataset([(1, 0)]).deal(1)) == "from_dataset([(1, 0)]) → deal(1)  [1 sample, 1 batch]"


def test_a_slice_of_selected_samples_keeps_what_select_was_given() -> None:
    sliced = kdp.from_dataset([(1, 0), (2, 0)]).select("x key")[:1]
    assert repr(sliced) == "from_dataset([(1, 0), (2, 0)]) → subset(range(0, 1)) → select('x key')"


def test_other_sources_stand_among_the_arguments() -> None:
    one, other = kdp.from_dataset([(1, 0)]), kdp.from_dataset([(2, 0)]).permute(3)
    assert repr(one.mix(other, weights=[2, 1])) == (
        "from_dataset([(1, 0)]) → mix(from_dataset([(2, 0)]) → permute(3), weights=[2, 1])"
    )
    assert repr(kdp.concat(one, other).decode_images()) == (
        "concat(from_dataset([(1, 0)]), from_dataset([(2, 0)]) → permute(3)) → decode_images()"
    )
    zipped = IterableWrapper([1]).map(len).zip(IterableWrapper([2])).to_samples(fields="x y")
    assert repr(zipped).split(" → ")[1:3] == ["map(fn=len)", "zip(IterableWrapper(iterable=[2]))"]


def test_deep_chains_are_no_trouble() -> None:
    pipe = kdp.from_dataset([(1, 0)])
    for _ in range(250):
        pipe = pipe.record_ctx()
    assert len(repr(pipe).splitlines()) == html(pipe).count("<b>") == 251


def test_each_pipe_has_its_stage() -> None:
    pipe = birds().filter_classes(valid=[0]).cache_in_memory().transform("x", str.lower).select("x")
    dealt = pipe.deal(batch_size=2).shuffle().collate_samples().to_device("cpu")
    assert [stage for stage, _ in stages(dealt)] == [
        *("source", "plan", "cache", "work", "work"),
        *["delivery"] * 4,
    ]
    listed = FileLister(".").map(str).to_samples().map(dict)
    assert [stage for stage, _ in stages(listed)] == ["source"] * 4 + ["work"]
    assert stages(listed)[1:4] == [("source", "list_files"), ("source", "map"), ("source", "to_samples")]
    streamed = kdp.stream_shards("a.tar").rename_fields(y="cls").shuffle().filter_classes(valid=[1])
    assert [stage for stage, _ in stages(streamed)] == ["source", "work", "plan", "plan"]


def test_lengths_and_classes_of_small_plans_are_found_out() -> None:
    nodes = views_of(birds().oversample(mode="exact").repeat_until(min_size=10).deal(batch_size=4), find_out=True)
    assert [node.length for node in nodes] == [5, 9, 18, 5]
    assert nodes[0].classes == {"heron": 3, "stork": 1, "gull": 1}
    assert nodes[1].classes == {"heron": 3, "stork": 3, "gull": 3}
    assert nodes[3].classes is None


def test_a_plan_that_cannot_be_made_is_shown_with_its_error() -> None:
    pipe = birds().filter_classes(valid=["<eagle>"]).deal(batch_size=2)
    assert "&lt;eagle&gt;" in html(pipe)
    assert "must be among the classes heron, stork, gull" in html(pipe)
    assert "deal(batch_size=2)" in repr(pipe)


def test_looking_opens_nothing_and_begins_no_epoch(
    photo_shards: str, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Any] = []

    class Counting(kdp.SampleSource):
        def __len__(self) -> int:
            return 4

        def getitem_x(self, index: int) -> int:
            loads.append(index)
            return index

        def getitem_y(self, index: int) -> int:
            loads.append(index)
            return index % 2

    monkeypatch.setattr("kdpipes.sources.open_shards.open_catalog", lambda *_: loads.append("catalog"))
    monkeypatch.setattr("kdpipes.sources.stream_shards.read_members", lambda *_: loads.append("shard"))
    shuffled = Counting().filter_classes(valid=[1]).select("x").deal(batch_size=2, shuffle=True)
    shards = kdp.open_shards(photo_shards).rename_fields(x="jpg", y="cls").filter_classes(valid=[1]).deal(batch_size=2)
    stream = kdp.stream_shards("s3://nowhere/{0..9}.tar").shuffle().deal(batch_size=2)
    cached = kdp.image_folder(photo_folder).cache_on_disk(tmp_path / "cache").deal(batch_size=2)
    for pipe in (shuffled, shards, stream, cached):
        for _ in range(2):
            assert repr(pipe)
            Balanced(html(pipe))
        assert pipe.next_epoch() == 0
    assert loads == []
    assert not list(tmp_path.rglob("*.*"))
    assert "Lengths are not known yet" in html(shards)


def test_a_large_plan_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdpipes.look.show._FEW", 4)
    pipe = birds().filter_classes(valid=[0])
    assert [node.length for node in views_of(pipe, find_out=True)] == [5, None]
    assert len(pipe) == 3
    assert [node.length for node in views_of(pipe, find_out=True)] == [5, 3]


def test_html_escapes_users_text_and_hides_secrets() -> None:
    named = kdp.from_dataset([(1, 0)], class_names=["<script>alert(1)</script>"]).select("x ctx.<b>")
    assert "<script" not in html(named)
    assert "&lt;script&gt;" in html(named)
    Balanced(html(named))
    secret = kdp.stream_shards("https://me:hunter2@host/a.tar?X-Amz-Signature=1f2e").cache_in_redis("redis://:pw1@host")
    for shown in (html(secret), repr(secret)):
        assert not [word for word in ("hunter2", "1f2e", "pw1") if word in shown]


def test_branches_stand_side_by_side_and_share_once() -> None:
    one, two = IterableWrapper(range(3)).fork(2)
    pipe = one.map(str).zip(two).to_samples(fields="x y")
    words = Balanced(chain_html(pipe)).words
    assert words.count("IterableWrapper") == 1
    assert "Forker, as drawn before" in words
    assert [name for _, name in stages(pipe)] == [
        "IterableWrapper",
        "Forker",
        "Child",
        "map",
        "Child",
        "zip",
        "to_samples",
    ]


def test_completion_offers_what_the_flavour_can_do() -> None:
    indexed, stream = dir(birds()), dir(kdp.stream_shards("a.tar"))
    dealt = dir(birds().deal(batch_size=1))
    assert {"deal", "permute", "peek", "column"} <= set(indexed)
    assert "to_device" not in indexed
    assert {"deal", "shuffle", "peek", "to_device"} <= set(stream)
    assert not {"permute", "subset"} & set(stream)
    assert {"collate_samples", "to_device", "batch"} <= set(dealt)


def test_completion_leaves_out_the_hooks_of_kdpipes_and_torch() -> None:
    class Every(kdp.MapPipe):
        step = 2

        def __len__(self) -> int:
            return 0

        def fetch(self, index: int) -> kdp.Sample:
            raise NotImplementedError

        def chosen_twice(self) -> int:
            return self.step

    pipes = [birds(), birds().cache_in_memory(), birds().select("x").deal(batch_size=1), kdp.stream_shards("a.tar")]
    hooks = {"fetch", "counters", "functions", "set_getstate_hook", "fingerprint", "iterate", "cut", "traits"}
    assert not [hooks & set(dir(pipe)) for pipe in pipes if hooks & set(dir(pipe))]
    assert {"stats", "warm_up", "class_names"} <= set(dir(pipes[1]))
    assert {"state_dict", "set_epoch"} <= set(dir(pipes[2]))
    assert {"step", "chosen_twice"} <= set(dir(Every()))


def test_record_folders_stay_closed_until_classes_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kdp.write_records(birds(), tmp_path / "records", num_parts=1)
    records = kdp.open_records(tmp_path / "records")
    with monkeypatch.context() as patch:
        patch.delattr("kdpipes.sources.open_records.read_records")
        assert repr(records)
        assert [node.length for node in views_of(records.filter_classes(valid=[0]), find_out=True)] == [None, None]
    assert len(records) == 5
    (node,) = views_of(records, find_out=True)
    assert (node.length, node.classes) == (5, {"heron": 3, "stork": 1, "gull": 1})


def test_names_of_classes_that_are_no_utf_8_are_written_out() -> None:
    names = ["a\udcff", "b\x1bc", "gull"]
    pipe = kdp.from_ids(list("abc"), [0, 1, 2], load=str.upper, class_names=names)
    shown = html(pipe)
    assert "a\\udcff: 1, b\\x1bc: 1, gull: 1" in shown
    assert repr(pipe).encode()
    assert shown.encode()
    assert "1 (b\\x1bc)" in repr(pipe.peek(2))
