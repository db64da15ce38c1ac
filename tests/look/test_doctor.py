"""`doctor`: it finds each planted mistake, raises no false alarm, and says what would help."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.chain import Chain
from kdpipes.look.doctor import examine
from kdpipes.work import EncodedImage, jpeg
from tests.look.clocks import Clock

ROOT = Path(__file__).parent.parent.parent
STOCK = "ignore:(Lambda|Local) function is not supported:UserWarning"


def jitter(x: int, rng: np.random.Generator) -> int:
    return x + int(rng.integers(1000))


def inverse(x: int) -> float:
    return 1 / x


def double(x: Any) -> Any:
    return x


def numbers(size: int = 64) -> Any:
    """Sixty-four numbers of four classes, sorted by class."""
    return kdp.from_dataset([(number, number * 4 // size) for number in range(size)])


def found(pipe: Any, **how: Any) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in kdp.doctor(pipe, measure=False, **how).findings]


def test_a_sound_chain_is_clean() -> None:
    report = kdp.doctor(numbers().transform("x", jitter).select("x y").deal(batch_size=8, shuffle=True), measure=False)
    assert (report.findings, report.is_clean, report.profile) == ((), True, None)
    assert str(report) == "Nothing is wrong with the chain."
    assert "Nothing is wrong" in report._repr_html_()


def test_an_indexed_chain_without_deal_is_reported(clock: Clock) -> None:
    chain = numbers().transform("x", lambda x: clock.spend(0.01, x)).select("x y")
    report = kdp.doctor(chain, num_workers=0, seconds=0.5)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.pipe) == ("no-deal", "hint", "select")
    assert "no `deal` yet" in finding.what
    assert ".deal(batch_size=...)" in finding.fix
    assert report.is_clean
    assert "Nothing is wrong" not in str(report)
    assert report.profile is not None
    assert [pipe.pipe for pipe in report.profile.pipes] == ["from_dataset", "transform", "select", "(deal)"]
    broken = kdp.doctor(numbers().transform("x", inverse).select("x"), measure=False)
    assert [(finding.code, finding.pipe) for finding in broken.findings] == [
        ("cannot-load", "select"),
        ("no-deal", "select"),
    ]


@pytest.mark.parametrize("mode", [{"mode": "x y", "return_ctx": True}, {"mode": "x ctx"}])
def test_a_ctx_that_nothing_records_is_found(mode: dict[str, Any]) -> None:
    def chain(source: Any) -> Any:
        return source.transform("x", jitter).add_field("z", len).select(**mode).deal(batch_size=8, shuffle=True)

    (finding,) = kdp.doctor(chain(numbers()), measure=False).findings
    assert (finding.code, finding.severity, finding.pipe) == ("unrecorded-ctx", "warning", "select")
    assert "`jitter`" in finding.why
    assert finding.fix == "Put `.record_ctx()` right before `.transform()`."
    assert found(chain(numbers().record_ctx())) == []
    late = numbers().transform("x", jitter).record_ctx().select(**mode).deal(batch_size=8, shuffle=True)
    assert found(late) == [("unrecorded-ctx", "warning")]
    partly = numbers().transform("x", jitter).record_ctx().transform("x", jitter)
    assert found(partly.select(**mode).deal(batch_size=8, shuffle=True)) == [], "as somebody may want it"


def test_a_ctx_that_no_transform_would_fill_is_left_alone() -> None:
    plain = numbers().transform("x", double)
    assert found(plain.select("x", return_ctx=True).deal(batch_size=8)) == []
    assert found(numbers().transform("x", jitter).select("x").deal(batch_size=8, shuffle=True)) == []
    noted = numbers().add_field("z", lambda sample, ctx: ctx.setdefault("z", 1)).select("z", return_ctx=True)
    assert found(noted.deal(batch_size=8)) == [("unrecorded-ctx", "warning")]


def test_a_shuffle_of_batches_is_found() -> None:
    assert found(numbers().select("x").deal(batch_size=8).shuffle()) == [("shuffle-after-batch", "error")]
    assert found(numbers().select("x").deal(batch_size=8).unbatch().shuffle()) == []
    stock = IterableWrapper(range(8)).sharding_filter().batch(2)
    assert found(stock.shuffle(), num_workers=0) == [("shuffled-in-parts", "warning")], "batches may be shuffled"


def test_a_shuffle_behind_the_sharding_is_found() -> None:
    chain = IterableWrapper(range(4))
    assert found(chain.sharding_filter().shuffle()) == [("shuffled-in-parts", "warning")]
    assert found(chain.shuffle().sharding_filter()) == []


def test_work_before_the_sharding_is_found() -> None:
    chain = IterableWrapper(range(4)).shuffle()
    assert found(chain.map(double).sharding_filter()) == [("sharded-late", "warning")]
    assert found(chain.sharding_filter().map(double)) == []


class Half(kdp.PlanPipe):
    """A random half of the samples, drawn with a seed or without."""

    goes_by = "number"

    def __init__(self, source: Any, seed: int | None) -> None:
        super().__init__(source)
        self.seed = seed

    def plan(self, epoch: int) -> Any:
        return np.random.default_rng(self.seed).permutation(len(self.source))[: len(self.source) // 2]


def test_a_plan_that_differs_between_processes_is_found() -> None:
    assert found(Half(numbers(), seed=None).select("x").deal(batch_size=2)) == [("unseeded-plan", "error")]
    assert found(Half(numbers(), seed=1).select("x").deal(batch_size=2)) == []


def test_parts_that_do_not_pickle_are_found_by_name() -> None:
    lock = threading.Lock()

    def locked(x: int) -> int:
        with lock:
            return x

    chain = numbers().transform("x", locked).select("x").deal(batch_size=8)
    (finding,) = kdp.doctor(chain, measure=False).findings
    assert (finding.code, finding.pipe) == ("unpicklable", "transform")
    assert "cannot be pickled (TypeError: cannot pickle '_thread.lock' object)" in finding.what


def test_a_generator_that_a_callable_holds_is_found() -> None:
    rng = np.random.default_rng(0)

    def noisy(x: int) -> float:
        return x + float(rng.normal())

    chain = numbers().transform("x", noisy).select("x").deal(batch_size=8)
    (finding,) = kdp.doctor(chain, measure=False).findings
    assert (finding.code, finding.pipe) == ("unrecorded-randomness", "transform")
    assert "`noisy` holds a random generator" in finding.what


class Noisy:
    def __call__(self, x: int) -> float:
        return x + float(np.random.default_rng().normal())


@pytest.mark.filterwarnings(STOCK)
def test_randomness_that_nothing_repeats_is_found() -> None:
    chain = numbers().transform("x", Noisy()).select("x").deal(batch_size=8)
    assert found(chain) == [("unrecorded-randomness", "warning")]
    mapped = numbers().select("x").deal(batch_size=8).map(lambda batch: (batch, np.random.default_rng().normal()))
    assert found(mapped) == [("unrecorded-randomness", "warning")]
    assert found(numbers().transform("x", lambda x: x + np.random.rand()).select("x").deal(batch_size=8)) == []


@pytest.fixture
def large_photos(tmp_path: Path) -> Path:
    """Two JPEGs of 480 x 480 pixels, in two classes."""
    for name in ("gull", "heron"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (480, 480)).save(tmp_path / name / "0.jpg")
    return tmp_path


def test_pixels_at_their_full_size_are_found(large_photos: Path) -> None:
    photos = kdp.image_folder(large_photos).decode_images("x")
    assert found(photos.select("x y").deal(batch_size=2).collate_samples()) == [("full-size-pixels", "warning")]
    assert found(photos.transform("x", double).select("x").deal(batch_size=2)) == [("full-size-pixels", "warning")]
    assert found(photos.transform("x", kdp.Resize(64)).select("x").deal(batch_size=2).collate_samples()) == []
    assert found(photos.select("x y").deal(batch_size=2).collate_samples(), num_workers=0) == []


def test_floating_point_pixels_are_found(large_photos: Path) -> None:
    small = kdp.image_folder(large_photos).decode_images("x").transform("x", kdp.CenterCrop(256))
    as_float = small.transform("x", kdp.ToTensor()).select("x").deal(batch_size=2).collate_samples()
    assert found(as_float) == [("float-pixels", "hint")]
    assert kdp.doctor(as_float, measure=False).is_clean
    assert found(small.select("x").deal(batch_size=2).collate_samples()) == []


def test_too_little_shared_memory_is_found(large_photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    chain = kdp.image_folder(large_photos).decode_images("x").transform("x", kdp.CenterCrop(256)).select("x")
    for free, codes in ((64 << 10, [("small-shared-memory", "warning")]), (64 << 20, [])):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(free))
        assert found(chain.deal(batch_size=2).collate_samples()) == codes


def test_training_on_one_class_after_the_other_is_found() -> None:
    chain = numbers().transform("x", jitter)
    assert found(chain.select("x y").deal(batch_size=8)) == [("sorted-batches", "warning")]
    assert found(chain.permute(seed=0).select("x y").deal(batch_size=8)) == []
    assert found(numbers().select("x y").deal(batch_size=8)) == [], "validation needs no shuffle"


def test_a_chain_that_the_loader_rejects_is_found() -> None:
    (finding,) = kdp.doctor(IterableWrapper(range(4))).findings
    assert (finding.code, finding.severity, finding.pipe) == ("cannot-load", "error", "IterableWrapper")
    assert "Each of the 2 workers would deliver every sample" in finding.what
    assert found(IterableWrapper(range(4)), num_workers=1) == []
    assert found(IterableWrapper(range(4)).sharding_filter().sharding_filter()) == [("cannot-load", "error")]


def test_a_chain_that_cannot_run_is_found() -> None:
    def broken(x: int) -> int:
        raise ZeroDivisionError("by nothing")

    report = kdp.doctor(numbers().transform("x", broken).select("x").deal(batch_size=8))
    (finding,) = report.findings
    assert (finding.code, finding.severity, report.profile) == ("cannot-load", "error", None)
    assert "ZeroDivisionError: by nothing" in finding.what
    assert "sample '0'" in finding.why
    assert found(kdp.from_dataset([]).select("x").deal(batch_size=1)) == [("empty", "error")]


def statements_of_readme() -> Iterator[str]:
    """Yield what makes the chains of the README, without what runs them, and without what shows an error."""
    blocks = re.findall(r"```python\n(.*?)```(?:\n```text\n(\w*Error)?)?", (ROOT / "README.md").read_text(), re.DOTALL)
    for code in (code for code, error in blocks if not error):
        for statement in ast.parse(code).body:
            text = ast.get_source_segment(code, statement) or ""
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                text = ast.unparse(statement)
            is_run = isinstance(statement, ast.With) or "print(" in text or "DataLoader" in text or "replay(" in text
            if not is_run:
                yield text


def test_there_is_no_false_alarm_on_the_chains_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "readme"}
    for text in statements_of_readme():
        exec(text, names)
    pipes = {name: value for name, value in names.items() if isinstance(value, IterDataPipe | MapDataPipe)}
    chains = {name: pipe for name, pipe in pipes.items() if isinstance(pipe, MapDataPipe) or Chain.of(pipe).deal}
    assert set(chains) >= {"photos", "chain", "stream"}
    indexed = [("no-deal", "hint")]
    expected = {name: indexed if isinstance(chain, MapDataPipe) else [] for name, chain in chains.items()}
    assert {name: found(chain) for name, chain in chains.items()} == expected


@pytest.fixture
def clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all that measures; and a machine of four processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    return clock


def slow_photos(clock: Clock, read_s: float, decode_s: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return sixteen images of 4 by 4 pixels that take so long to read and to decode."""
    content = b"no image"
    monkeypatch.setattr(EncodedImage, "size", (4, 4))
    pixels = Image.new("RGB", (4, 4))
    for name in ("to_pil", "decoded"):
        monkeypatch.setattr(EncodedImage, name, lambda image: clock.spend(decode_s, pixels))

    class Photos(kdp.SampleSource):
        def __len__(self) -> int:
            return 16

        def getitem_x(self, index: int) -> bytes:
            return clock.spend(read_s, content)

    return Photos()


def slow(clock: Clock, read_s: float, decode_s: float, work_s: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a chain of images of which each pipe takes so long."""
    photos = slow_photos(clock, read_s, decode_s, monkeypatch).decode_images("x")
    return photos.transform("x", lambda x, rng: clock.spend(work_s, 0)).select("x").deal(batch_size=4)


@pytest.mark.parametrize(
    ("times", "bound", "best", "gain"),
    [
        ((0.001, 0.007, 0.002), "decoding", "`.cache_in_memory()` after `.decode_images()`", 5.0),
        ((0.008, 0.001, 0.001), "storage", "`.cache_in_memory()` after `.decode_images()`", 10.0),
        ((0.001, 0.001, 0.008), "transforms", "`num_workers=4`", 4.0),
    ],
)
def test_it_says_what_bounds_and_what_one_change_would_help_most(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    times: tuple[float, float, float],
    bound: str,
    best: str,
    gain: float,
) -> None:
    report = kdp.doctor(slow(clock, *times, monkeypatch), num_workers=0, seconds=0.5)
    assert (report.findings, report.bound) == ((), bound)
    assert (report.advice[0].change, round(report.advice[0].gain, 6)) == (best, gain)
    assert f"The bottleneck is {bound}. Changes that would help" in str(report)
    assert f"{gain:.1f} times as fast: {best}" in str(report)


def draws(x: Any) -> Any:
    return x + random.random()


def test_callables_that_draw_from_the_global_generators_are_told() -> None:
    def fixed(x: Any) -> Any:
        return x

    fixed.is_random = False  # type: ignore[attr-defined]

    def advice(*functions: Any) -> list[str]:
        chain = numbers(1024)
        for function in functions:
            chain = chain.transform("x", function)
        report = kdp.doctor(chain.select("x y").deal(batch_size=8, shuffle=True), num_workers=0, seconds=1)
        return [str(one) for one in report.advice if "rng" in one.change]

    assert advice(fixed, jitter, double) == [], "nothing is seeded for them"
    (told,) = advice(draws, fixed, double, draws)
    assert "a parameter `rng` for `draws`, to draw from it" in told
    assert advice(lambda x: time.sleep(0.01 * random.random())) == [], "it would not be worth it"


def pixels_of(value: Any) -> Any:
    return np.asarray(value if isinstance(value, np.ndarray | Image.Image) else value.to_pil())


def test_the_advised_cache_comes_after_all_that_draws_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a" / "0.png"
    path.parent.mkdir()
    Image.new("RGB", (16, 16)).save(path)
    photos = kdp.image_folder(tmp_path).repeat_until(min_size=32).decode_images("x")
    after_all = "`.cache_in_memory()` after the last `.transform()` that draws no random numbers"
    after_decoding = "`.cache_in_memory()` after `.decode_images()`"
    for name in ("to_pil", "decoded"):
        monkeypatch.setattr(EncodedImage, name, lambda image: clock.spend(0.004, Image.new("RGB", (16, 16), "white")))
    monkeypatch.setattr(kdp.Resize, "apply", lambda *_: clock.spend(0.004, Image.new("RGB", (8, 8))))
    monkeypatch.setattr(kdp.RandomResizedCrop, "apply", lambda *_: clock.spend(0.002, Image.new("RGB", (4, 4))))
    own = lambda value: clock.spend(0.004, pixels_of(value))  # noqa: E731
    drawing = lambda value: clock.spend(0.002, pixels_of(value) * np.random.rand())  # noqa: E731
    cases = [
        (after_all, 3.0, [kdp.Resize((8, 8)), kdp.RandomResizedCrop(4)]),
        (after_all, 5.0, [own, drawing]),
        (after_decoding, 10 / 6, [drawing, own]),
    ]
    for change, gain, transforms in cases:
        chain = photos.record_ctx().transform("x", transforms[0]).transform("x", transforms[1]).select("x")
        report = kdp.doctor(chain.deal(batch_size=4), num_workers=0, seconds=2)
        (found,) = [one for one in report.advice if "cache" in one.change]
        assert (found.change, found.gain) == (change, pytest.approx(gain, rel=0.05))


def test_a_cache_that_stands_too_early_is_to_be_moved(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    photos = slow_photos(clock, 0.0, 0.004, monkeypatch)
    spend = lambda image, rng: clock.spend(0.006, image)  # noqa: E731
    late = photos.decode_images("x").cache_in_memory()
    crop = kdp.Resize((2, 2))
    monkeypatch.setattr(kdp.Resize, "apply", lambda *_: clock.spend(0.006, Image.new("RGB", (2, 2))))
    after_all = "after the last `.transform()` that draws no random numbers"
    cases = [
        (photos.cache_in_memory().decode_images("x").transform("x", spend), "after `.decode_images()`", 1 / 0.6),
        (photos.cache_on_disk(tmp_path).decode_images("x").transform("x", spend), "after `.decode_images()`", 1 / 0.6),
        (photos.cache_in_memory().decode_images("x").transform("x", crop), after_all, 100.0),
        (late.transform("x", spend), None, 0),
    ]
    for chain, place, gain in cases:
        report = kdp.doctor(chain.select("x").deal(batch_size=4), num_workers=0, seconds=2)
        moves = [one for one in report.advice if "cache" in one.change]
        name = "cache_on_disk" if "cache_on_disk" in repr(chain) else "cache_in_memory"
        assert [one.change for one in moves] == ([] if place is None else [f"move `.{name}()` {place}"])
        assert [one.gain for one in moves] == ([] if place is None else [pytest.approx(gain, rel=0.02)])


def noise(value: Any, rng: np.random.Generator) -> Any:
    return pixels_of(value) * rng.random()


def test_no_cache_of_pixels_is_advised_that_has_no_room(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    photos = slow_photos(clock, 0.004, 0.006, monkeypatch)
    for free, has_room in ((16 * 48 * 2, True), (16 * 48 * 2 - 1, False)):
        monkeypatch.setattr(examine.shutil, "disk_usage", lambda path, free=free: usage(free))
        for source in (photos, photos.permute(seed=0).repeat_until(repetitions=3)):
            chain = source.decode_images("x").transform("x", noise).select("x").deal(batch_size=4)
            report = kdp.doctor(chain, num_workers=0, seconds=0.5)
            changes = [one.change for one in report.advice if "cache" in one.change]
            early = "`.cache_in_memory()` before `.decode_images()`"
            assert changes == ["`.cache_in_memory()` after `.decode_images()`" if has_room else early]


def test_the_sums_that_the_verdict_is_made_of_are_told(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = slow_photos(clock, 0.001, 0.004, monkeypatch).decode_images("x")
    work = photos.transform("x", lambda x: clock.spend(0.003, x)).add_field("z", lambda x: clock.spend(0.002, 0))
    chain = work.select("x z").deal(batch_size=4)
    report = kdp.doctor(chain, num_workers=0, seconds=0.5, step=lambda batch: clock.spend(0.01))
    assert report.bound == "transforms", "though no single pipe takes longer than decoding"
    told = (
        "By kind of work: transforms 50.0% (transform, add_field), decoding 40.0% (decode_images), "
        "storage 10.0% (Photos). The consumer was busy for 17% of the loop."
    )
    assert told in str(report).splitlines()
    assert told in report._repr_html_()


@pytest.mark.filterwarnings(STOCK)
def test_it_says_that_the_way_to_the_loop_bounds(clock: Clock) -> None:
    chain = numbers().select("x").deal(batch_size=8).collate(lambda batch: clock.spend(0.05, 0))
    assert kdp.doctor(chain, num_workers=0, seconds=0.5).bound == "transfer"


def test_where_the_consumer_bounds_nothing_is_advised(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = slow(clock, 0.001, 0.001, 0.001, monkeypatch)
    report = kdp.doctor(chain, num_workers=0, seconds=1.0, step=lambda batch: clock.spend(0.1))
    assert (report.bound, report.advice) == ("the consumer", ())
    assert "no change of the chain would help" in str(report)
    half = kdp.doctor(chain, num_workers=0, seconds=2.0, step=lambda batch: clock.spend(0.006))
    assert half.bound != "the consumer"
    assert half.profile is not None
    most = half.profile.loop_s / half.profile.consumer_s
    assert half.advice[0] == ("`num_workers=4`", pytest.approx(most), half.advice[0].why), "as fast as it is consumed"
    assert half.advice[1:]
    assert all(one.gain < most for one in half.advice[1:])


def test_a_report_is_plain_data_and_html(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "find_decoders", dict)
    report = kdp.doctor(slow(clock, 0.001, 0.007, 0.002, monkeypatch), num_workers=0, seconds=0.5)
    plain = json.loads(json.dumps(report.to_dict()))
    assert (plain["is_clean"], plain["bound"], plain["findings"]) == (True, "decoding", [])
    assert plain["advice"][0]["gain"] == pytest.approx(5.0)
    assert next(iter(plain["shares"])) == "decoding"
    (decoder,) = plain["decoders"]
    assert decoder.split()[0] in jpeg.BACKENDS[1:]
    assert f"JPEGs are decoded by {decoder}." in str(report)
    assert f"<p>JPEGs are decoded by {decoder}.</p>" in report._repr_html_()
    assert sum(plain["shares"].values()) == pytest.approx(1.0)
    assert "<code>pip install &#39;kdpipes[fast]&#39;</code>" in report._repr_html_()
    assert repr(report) == str(report), "and not all that it holds"
    wrong = kdp.doctor(numbers().select("x").deal(batch_size=8).shuffle()).to_dict()
    assert (wrong["is_clean"], wrong["profile"], wrong["findings"][0]["pipe"]) == (False, None, "shuffle")
    assert set(wrong["findings"][0]) == {"code", "severity", "pipe", "what", "why", "fix"}


def test_a_sample_that_the_chain_leaves_out_is_no_error(large_photos: Path) -> None:
    photos = kdp.image_folder(large_photos)
    assert len(photos) == 2
    (large_photos / "gull" / "0.jpg").unlink()
    chain = photos.decode_images("x").transform("x", kdp.Resize(32)).on_error("skip").select("x").deal(batch_size=2)
    assert found(chain) == []


def test_unreadable_labels_do_not_make_a_source_sorted() -> None:
    class Damaged(list[tuple[int, int]]):
        def __getitem__(self, index: Any) -> Any:
            if index in (0, 63):
                raise OSError("damaged")
            return super().__getitem__(index)

    source = kdp.from_dataset(Damaged((n, n // 32) for n in range(64)))
    chain = source.transform("x", jitter).on_error("skip").select("x y").deal(batch_size=8)
    assert found(chain) == [("sorted-batches", "warning")]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_puts_nothing_into_quarantine(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "bad.txt"
    chain = kdp.from_dataset([(n, 0) for n in range(16)]).transform("x", inverse).on_error("quarantine", path=path)
    kdp.doctor(chain.select("x"), num_workers=num_workers, seconds=0.05)
    chain = chain.select("x").deal(batch_size=4)
    kdp.doctor(chain, num_workers=num_workers, seconds=0.05)
    assert not path.exists()
    assert sum(map(len, chain)) == 15
    assert path.exists(), "what runs does"


def test_a_rule_of_a_user_sees_pipes_and_the_batch() -> None:
    chain = kdp.from_dataset([(0.5, 0), (1.5, 1)]).select("x y").deal(batch_size=2)

    @kdp.doctor_rule("own-rule", "warning", needs_batch=True)
    def own_rule(chain: Any) -> Iterator[Any]:
        yield chain.pipes[-1].name, f"{chain.pipes[-1].arguments} {chain.batch}", "Why.", "Fix."

    (finding,) = kdp.doctor(chain, measure=False).findings
    assert finding == ("own-rule", "warning", "deal", "('batch_size=2',) [(0.5, 0), (1.5, 1)]", "Why.", "Fix.")
    kdp.doctor_rule("own-rule", "hint")(lambda chain: ["text"])
    with pytest.raises(TypeError, match=r"rule 'own-rule' must yield \(pipe, what, why, fix\), not 'text'"):
        kdp.doctor(chain, measure=False)
    kdp.doctor_rule("own-rule", "hint")(lambda chain: [])
    assert kdp.doctor(chain, measure=False).findings == ()
    with pytest.raises(ValueError, match="`code` must be a name that no rule of kdpipes has"):
        kdp.doctor_rule("weak-shuffle", "hint")
