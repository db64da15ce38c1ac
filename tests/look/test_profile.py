"""`profile`: where the time goes, told by a clock that only planted work moves."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.chain import Chain
from kdpipes.demo import write_photo_shards
from kdpipes.loader import profile as loader_profile
from kdpipes.loader.worker import Producer
from kdpipes.look.profile import Profile
from kdpipes.work import EncodedImage
from tests.look.clocks import Clock
from tests.torchdata_parts import MultiProcessingReadingService

NUM = 12


def source(clock: Clock, seconds: float = 0.0) -> Any:
    class Slow(kdp.SampleSource):
        def __len__(self) -> int:
            return NUM

        def getitem_x(self, index: int) -> bytes:
            clock.spend(seconds)
            return bytes(index)

        def getitem_y(self, index: int) -> int:
            return index % 2

    return Slow()


def spends(clock: Clock, seconds: float) -> Callable[[Any], Any]:
    def work(value: Any) -> Any:
        clock.spend(seconds)
        return value

    return work


def shares(profile: Profile) -> dict[str, float]:
    return {pipe.pipe: round(pipe.share, 6) for pipe in profile.pipes if pipe.share > 1e-9}


def run(pipe: Any, epochs: int = 1, **how: Any) -> Profile:
    with kdp.Loader(pipe, profile=True, **how) as loader:
        for _ in range(epochs):
            for _ in loader:
                pass
        return kdp.profile(loader)


@pytest.mark.parametrize("workers", ["none", "thread", "process"])
@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
def test_the_share_of_each_pipe_is_its_own_time(clock: Clock, workers: str) -> None:
    pipe = source(clock, 0.001).transform("x", spends(clock, 0.006)).add_field("z", lambda s: clock.spend(0.003))
    chain = pipe.filter_classes(valid=[0, 1]).select("x z").deal(batch_size=4)
    how: dict[str, Any] = {"none": {}, "thread": {"reading_service": kdp.ThreadReadingService(1)}}.get(workers, {})
    if workers == "process":
        how = {"num_workers": 1, "start_method": "fork"}
    told = run(chain, epochs=2, **how)
    assert shares(told) == {"Slow": 0.1, "transform": 0.6, "add_field": 0.3}
    assert [pipe.pipe for pipe in told.pipes][:6] == [
        "Slow",
        "transform",
        "add_field",
        "filter_classes",
        "select",
        "deal",
    ]
    assert [round(pipe.calls) for pipe in told.pipes][:5] == [2 * NUM] * 5
    assert (told.num_batches, told.num_samples, told.num_workers) == (6, 2 * NUM, int(workers != "none"))
    assert told.work_s == pytest.approx(2 * NUM * 0.01)


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
def test_a_stream_and_stock_pipes_are_measured_as_well(clock: Clock) -> None:
    numbers = IterableWrapper(range(NUM)).map(spends(clock, 0.002)).shuffle(buffer_size=4)
    stream = numbers.to_samples(fields="x").transform("x", spends(clock, 0.005)).select("x").deal(batch_size=3)
    told = run(stream.map(spends(clock, 0.003)), epochs=2)
    by_kind = [(pipe.pipe, round(pipe.seconds, 6)) for pipe in told.pipes if pipe.seconds > 1e-9]
    assert by_kind == [("map", 0.002 * 2 * NUM), ("transform", 0.005 * 2 * NUM), ("map", 0.003 * 8)]


def test_decoding_counts_for_decode_images_for_any_reader(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gull").mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / "gull" / f"{number}.png")
    plain = EncodedImage.to_pil
    monkeypatch.setattr(EncodedImage, "to_pil", lambda image: (clock.spend(0.004), plain(image))[1])
    photos = kdp.image_folder(tmp_path).decode_images("x").transform("x", spends(clock, 0.001))
    told = run(photos.select("x").deal(batch_size=2))
    assert shares(told) == {"decode_images": 0.8, "transform": 0.2}
    sizes = {pipe.pipe: pipe.num_bytes for pipe in told.pipes}
    assert sizes["decode_images"] == 4 * 8 * 8 * 3
    assert 0 < sizes["image_folder"] == sum(path.stat().st_size for path in tmp_path.rglob("*.png"))


def test_the_callables_of_a_transform_are_told_apart(clock: Clock) -> None:
    def blur(x: Any) -> Any:
        clock.spend(0.003)
        return x

    told = run(source(clock).transform("x", blur, spends(clock, 0.001)).select("x").deal(batch_size=4))
    (transform,) = [pipe for pipe in told.pipes if pipe.pipe == "transform"]
    steps = {step.what: round(step.seconds, 6) for step in transform.steps}
    assert steps == {"applying 'blur' to field 'x'": 0.036, "applying 'work' to field 'x'": 0.012}
    assert re.search(r"\n  applying 'blur' to field 'x' +75.0% +36.0 ms", str(told))


def test_a_cache_reports_hits_and_misses_count_for_the_maker(clock: Clock) -> None:
    chain = source(clock).transform("x", spends(clock, 0.01)).cache_in_memory().select("x").deal(batch_size=4)
    told = run(chain, epochs=3)
    (cache,) = [pipe for pipe in told.pipes if pipe.kind == "cache"]
    assert (cache.hits, cache.misses) == (2 * NUM, NUM)
    assert shares(told) == {"transform": 1.0}
    assert f"{2 * NUM} of {3 * NUM}" in str(told)
    again = kdp.profile(chain, seconds=1.0, step=lambda batch: clock.spend(2.0))
    assert [(pipe.hits, pipe.misses) for pipe in again.pipes if pipe.kind == "cache"] == [(8, 0)], "since it began"


def test_who_waits_for_whom(clock: Clock) -> None:
    chain = source(clock).transform("x", spends(clock, 0.01)).select("x").deal(batch_size=4)
    fast = kdp.profile(chain, seconds=0.1)
    assert (fast.bound, fast.wait_share, fast.consumer_s) == ("chain", 1.0, 0.0)
    slow = kdp.profile(chain, seconds=1.5, step=lambda batch: clock.spend(0.36))
    assert slow.bound == "consumer"
    assert slow.wait_share == pytest.approx(0.04 / 0.4, abs=0.05)
    workers = dataclasses.replace(slow, num_workers=2, loop_s=10.0, wait_s=1.0, work_s=10.0, idle_s=10.0)
    assert workers.bound == "consumer"
    assert "the 2 workers for 50% of theirs: the consumer is the bottleneck." in str(workers)
    assert dataclasses.replace(workers, wait_s=6.0).bound == "chain"


def test_pipes_after_the_workers_are_measured_in_the_main(clock: Clock) -> None:
    told = run(source(clock).select("y").deal(batch_size=4).collate_samples().to_device("cpu"), num_workers=1)
    assert [(pipe.pipe, pipe.is_main) for pipe in told.pipes][-3:] == [
        ("collate_samples", False),
        ("(sending)", False),
        ("to_device", True),
    ]
    assert [pipe.calls for pipe in told.pipes if pipe.is_main] == [3]


def test_what_is_not_measured_is_reckoned_from_what_is(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_profile, "_CALL_S", 10.0)  # so that it is never worth it
    chain = source(clock, 0.002).transform("x", spends(clock, 0.006)).select("x").deal(batch_size=1)
    told = run(chain, epochs=2)
    assert shares(told) == {"Slow": 0.25, "transform": 0.75}
    assert told.work_s == pytest.approx(2 * NUM * 0.008)
    (lane,) = told.workers
    assert len(lane.batches) == 1, "the first"
    assert lane.num_items == 2 * NUM
    assert sum(pipe.seconds for pipe in told.pipes) == pytest.approx(told.work_s)


def crops(folder: Path) -> Any:
    photos = kdp.image_folder(folder).permute(seed=1).take_percent(to_percent=0.1).decode_images("x").record_ctx()
    chosen = photos.transform("x", kdp.RandomResizedCrop(16), lambda x: x).select("x y key", return_ctx=True)
    batches: Any = chosen.deal(batch_size=4, shuffle=True, seed=3).collate_samples()
    return batches.mixup(num_classes=8).mixup(num_classes=8)


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
def test_measuring_changes_no_batch(photo_folder: Path) -> None:
    def batches(**how: Any) -> list[Any]:
        with kdp.Loader(crops(photo_folder), **how) as loader:
            return [batch for _ in range(2) for batch in loader]

    plain = batches()
    assert len(plain) == 8
    services: list[dict[str, Any]] = [{}, {"reading_service": kdp.ThreadReadingService(2)}, {"num_workers": 2}]
    for how in services:
        for one, other in zip(plain, batches(profile=True, **how), strict=True):
            (images, labels, keys), ctx = one
            assert torch.equal(images, other[0][0])
            assert torch.equal(labels, other[0][1])
            assert (keys, str(ctx)) == (other[0][2], str(other[1]))


@pytest.mark.filterwarnings("ignore:1 of 2 workers have nothing to do:UserWarning")
@pytest.mark.parametrize("service", [None, kdp.ThreadReadingService(2)], ids=["inline", "threads"])
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_batches": 5}, {"split": kdp.lanes(1)}, {"split": "samples"}], ids=str)
def test_measuring_changes_no_batch_of_lanes(service: Any, is_shuffled: bool, options: Any, tmp_path: Path) -> None:
    shards = kdp.stream_shards(write_photo_shards(tmp_path)).rename_fields(y="cls")
    shuffled = shards.shuffle(buffer_size=20) if is_shuffled else shards
    chain = shuffled.select("key y").deal(batch_size=16, shuffle="shards", **options)

    def delivered(profile: bool) -> list[Any]:
        with kdp.Loader(chain, reading_service=service, profile=profile) as loader:
            return [list(loader) for _ in range(2)]

    expected = delivered(profile=False)
    assert delivered(profile=True) == expected
    assert options.get("num_batches") or sorted(key for batch in expected[0] for key, _ in batch) == sorted(
        sample.key for sample in shards
    )


def test_without_profile_nothing_is_measured_or_changed(clock: Clock) -> None:
    stock = IterableWrapper(range(NUM)).shuffle()
    chain = stock.to_samples(fields="x").transform("x", spends(clock, 1)).select("x").deal(batch_size=3)
    indexed = source(clock).transform("x", spends(clock, 1)).select("x").deal(batch_size=3)
    for pipe in (chain, indexed):
        pipe.peek(1)  # a source of one's own notes the names of its fields when it is first read
        before = [(type(upstream), set(vars(upstream))) for upstream in Chain.of(pipe).pipes]
        for profile in (False, True):
            with kdp.Loader(pipe, profile=profile) as loader:
                assert next(iter(loader))
                producer = loader.reading_service._workers[0].producer
                assert (type(producer) is Producer) is not profile
                assert [(type(upstream), set(vars(upstream))) for upstream in Chain.of(pipe).pipes] == before
                inner = [(type(upstream), set(vars(upstream))) for upstream in Chain.of(producer._chain).pipes]
                is_same = [kind for kind, _ in inner] == [kind for kind, _ in before] and not any(
                    {"fetch", "iterate", "samples"} & names for _, names in inner
                )
                assert is_same is not profile


def test_measuring_opens_nothing_that_is_not_read(clock: Clock) -> None:
    class Closed(kdp.SampleSource):
        def __len__(self) -> int:
            return 4

        def getitem_x(self, index: int) -> Any:
            raise AssertionError("x was opened")

    with kdp.Loader(Closed().deal(batch_size=2), profile=True) as loader:
        assert [[sample.key for sample in batch] for batch in loader] == [["0", "1"], ["2", "3"]]
    assert [finding.code for finding in kdp.doctor(Closed(), measure=False).findings] == ["no-deal"]


def test_a_service_of_the_users_is_not_changed() -> None:
    service = kdp.ThreadReadingService(1)
    with kdp.Loader(kdp.from_dataset([(1, 0)]).deal(batch_size=1), reading_service=service, profile=True) as loader:
        assert len(list(loader)) == 1
        assert (service.is_profiled, loader.reading_service.is_profiled) == (False, True)


def test_a_trace_is_what_chrome_and_perfetto_read(clock: Clock, tmp_path: Path) -> None:
    chain = source(clock, 0.001).transform("x", spends(clock, 0.002)).select("x").deal(batch_size=4)
    path = run(chain, num_workers=1, start_method="fork").to_trace(tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    work = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert {event["name"] for event in named} == {"process_name", "thread_name"}
    assert all({"name", "cat", "ts", "dur", "pid", "tid"} <= set(event) for event in work)
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in work)
    assert [event["name"] for event in work if event["cat"] == "batch"] == ["batch 0", "batch 1", "batch 2"]
    steps = [event for event in work if event["name"] == "applying 'work' to field 'x'"]
    assert [round(event["dur"]) for event in steps] == [2000] * NUM
    batch = next(event for event in work if event["name"] == "batch 0")
    inside = [step for step in steps if batch["ts"] <= step["ts"] < batch["ts"] + batch["dur"]]
    assert len(inside) == 4


def test_a_profile_shows_as_text_html_picture_and_plain_data(clock: Clock, tmp_path: Path) -> None:
    told = run(source(clock, 0.001).transform("x", spends(clock, 0.003)).select("x").deal(batch_size=4))
    lines = str(told).splitlines()
    assert lines[0].split() == ["pipe", "share", "time", "made", "per", "s", "size", "cached"]
    assert lines[2].split()[:4] == ["transform", "75.0%", "36.0", "ms"]
    assert lines[-1] == "No workers: 100% of the loop made batches, the rest was the consumer's."
    assert re.search(
        "<td[^>]*left[^>]*>transform</td><td[^>]*right[^>]*>75.0%</td><td[^>]*><div[^>]*><div[^>]*width:75.0%",
        told._repr_html_(),
    )
    assert "<td>" not in told._repr_html_(), "what shows it may set cells as it likes"
    assert {line.index("%") for line in lines[1:4]} == {lines[0].index("share") + 4}
    assert repr(told) == str(told), "and not all that it holds"
    picture = told.plot()
    root = ElementTree.fromstring(picture._repr_svg_())
    background, *bars = [float(bar.get("width", "0")) for bar in root if bar.tag.endswith("rect")]
    assert background > max(bars)
    assert bars[1] == max(bars) == pytest.approx(3 * bars[0], rel=0.01)
    picture.save(tmp_path / "profile.svg")
    assert (tmp_path / "profile.svg").read_text() == picture.svg
    plain = json.loads(json.dumps(told.to_dict()))
    assert plain["pipes"][1]["share"] == pytest.approx(0.75)
    assert plain["bound"] == "chain"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_longer_than_the_run_leaves_no_worker_unheard(clock: Clock, num_workers: int) -> None:
    chain = source(clock).transform("x", spends(clock, 0.01)).select("x").deal(batch_size=2)
    told = kdp.profile(chain, seconds=0.1, num_workers=num_workers, step=lambda batch: clock.spend(2.0))
    assert told.num_workers == num_workers == len({lane.worker for lane in told.workers if num_workers})
    assert told.num_batches == 2 * max(num_workers, 1)
    assert shares(told)["transform"] == 1.0
    assert told.bound == "consumer"


def test_a_chain_is_run_for_some_seconds_epoch_after_epoch(clock: Clock) -> None:
    indexed = source(clock, 0.01).select("x")
    told = kdp.profile(indexed, seconds=0.5)
    assert told.num_samples >= 4 * NUM
    assert [pipe.pipe for pipe in told.pipes] == ["Slow", "select", "(deal)"], "which is not the chain's own"
    assert told.names == ("(deal)", "select", "Slow")


def test_bad_arguments_are_rejected() -> None:
    chain = kdp.from_dataset([(1, 0)]).deal(batch_size=1)
    with kdp.Loader(chain) as loader, pytest.raises(ValueError, match="profile=True"):
        kdp.profile(loader)
    with pytest.raises(TypeError, match="`profile=True` needs one of kdpipes' reading services"):
        kdp.Loader(chain, reading_service=MultiProcessingReadingService(1), profile=True)
    with pytest.raises(TypeError, match="`profile` must be True or False, but is 1 instead"):
        kdp.Loader(chain, profile=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`seconds` must be a number above 0, but is 0 instead"):
        kdp.profile(chain, seconds=0)
    with pytest.raises(TypeError, match="`step` must be a callable"):
        kdp.profile(chain, step=3)  # type: ignore[arg-type]
    with pytest.raises(kdp.ChainError, match="yields no batch"):
        kdp.profile(kdp.from_dataset([]).deal(batch_size=1), seconds=0.1)


def test_what_is_read_at_once_is_measured_as_such(photo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_profile, "_SHARE", 1e9)  # every batch is measured
    photos = kdp.image_folder(photo_folder).decode_images("x").transform("x", kdp.Resize((8, 8)))
    photos = photos.transform_batch("x", lambda images: [np.asarray(image) for image in images]).select("x y")
    chain = photos.deal(batch_size=32).collate_samples()
    with kdp.Loader(chain, profile=True) as loader:
        for _ in loader:
            pass
        told = kdp.profile(loader)
    made = {each.pipe: each.calls for each in told.pipes}
    for name in ("image_folder", "decode_images", "transform", "transform_batch", "select"):
        assert made[name] == 160
    steps = {step.what for each in told.pipes for step in each.steps}
    assert steps >= {"reading field 'x'", "applying 'resize' to field 'x'", "applying 'lambda' to field 'x'"}
    sizes = {each.pipe: each.num_bytes for each in told.pipes}
    assert sizes["transform"] == sizes["transform_batch"] == 160 * 3 * 64
    assert sizes["decode_images"] >= 160 * 3 * 64
