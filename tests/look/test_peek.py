"""`peek`: the first samples, on all kinds of chains, without moving anything."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.look.peek import summary

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
ITEMS = [(float(number), number % 3) for number in range(10)]


def jitter(x: float, rng: np.random.Generator) -> float:
    return x + float(rng.random())


def indexed() -> Any:
    return kdp.from_dataset(ITEMS).transform("x", jitter).select("x y")


def stream() -> Any:
    return IterableWrapper(ITEMS, deepcopy=False).to_samples(fields="x y").transform("x", jitter).select("x y")


CHAINS = {
    "indexed, dealt": lambda: indexed().deal(batch_size=4, shuffle=True, seed=3),
    "indexed, collated": lambda: indexed().deal(batch_size=4, shuffle=True, seed=3).collate_samples(),
    "stream": stream,
    "stream, dealt": lambda: stream().shuffle(buffer_size=5).deal(batch_size=4, seed=3),
    "stream, collated": lambda: stream().deal(batch_size=4, seed=3).collate_samples().to_device("cpu"),
    "stock at the end": lambda: indexed().deal(batch_size=4, shuffle=True, seed=3).map(len),
    "prefetched": lambda: stream().deal(batch_size=4, seed=3).prefetch(2),
}


def epochs(pipe: Any, num_workers: int) -> str:
    with kdp.Loader(pipe, num_workers=num_workers) as loader:
        return str([list(loader) for _ in range(2)])


@pytest.mark.parametrize("name", CHAINS)
def test_loaders_made_later_begin_where_they_would_have(name: str) -> None:
    untouched, pipe = CHAINS[name](), CHAINS[name]()
    num_threads = threading.active_count()
    for n in (1, 3, 9):
        assert pipe.peek(n).items
    assert threading.active_count() == num_threads
    assert epochs(pipe, 0) == epochs(untouched, 0)
    pipe.peek(2)
    if name != "stream":
        assert epochs(pipe, 2) == epochs(CHAINS[name](), 2)


@pytest.mark.parametrize("name", CHAINS)
def test_the_items_are_those_that_come_next(name: str) -> None:
    pipe = CHAINS[name]()
    first = pipe.peek(2).items
    if "collated" in name:
        assert str(first) == str([next(iter(CHAINS[name]()))])
    elif "dealt" in name or name == "prefetched":
        assert first == next(iter(CHAINS[name]()))[:2]
    else:
        assert first == [item for item, _ in zip(CHAINS[name](), range(2), strict=False)]
    running = iter(pipe)
    next(running)
    pipe.peek(2)
    assert str(list(running)) == str(list(CHAINS[name]())[1:]), "an epoch that runs goes on"


def test_samples_are_counted_after_deal_up_to_a_short_source() -> None:
    dealt = indexed().deal(batch_size=4)
    assert [len(dealt.peek(n)) for n in (1, 4, 6, 99)] == [1, 4, 6, 10]
    collated = dealt.collate_samples()
    assert [len(collated.peek(n)) for n in (1, 99)] == [1, 1]
    assert [len(kdp.from_dataset(ITEMS[:2]).peek(5)), len(kdp.from_dataset([]).peek())] == [2, 0]
    assert repr(kdp.from_dataset([]).peek()) == "nothing: the chain is empty"
    assert list(SequenceWrapper([1, 2, 3]).peek(2)) == [1, 2]
    assert list(IterableWrapper([1, 2, 3]).peek(2)) == [1, 2]
    for n, error in ((0, ValueError), ("3", TypeError)):
        with pytest.raises(error, match="`n` must be an integer of at least 1"):
            dealt.peek(n)


def test_only_the_samples_that_are_shown_are_loaded() -> None:
    loads: list[str] = []

    def load(id: str) -> str:
        loads.append(id)
        return id

    source = kdp.from_ids(list("abcdefgh"), load=load)
    source.peek(2)
    assert loads == ["a", "b"]
    loads.clear()
    source.select("x").deal(batch_size=3).peek(1)
    assert loads == ["a", "b", "c"]


def test_shards_elsewhere_are_not_read_ahead(photo_shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    shards = kdp.open_shards(photo_shards)
    monkeypatch.setattr(shards, "_is_remote", True)
    monkeypatch.setattr(type(shards), "prefetch", lambda _, order: told.append(order))
    dealt = shards.select("key").deal(batch_size=2, shuffle="shards")
    dealt.peek(1)
    assert told == []
    next(iter(dealt))
    assert told


def test_the_global_generators_stay_where_they_are() -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    def draws(x: float) -> float:
        return x + random.random() + np.random.random() + float(torch.rand(()))

    before = state()
    IterableWrapper([1.0, 2.0]).map(draws).shuffle().peek(2)
    kdp.from_dataset(ITEMS).transform("x", draws).peek(2)
    assert state() == before


def test_an_error_of_a_sample_is_raised_and_moves_nothing() -> None:
    pipe = kdp.from_dataset([(1, 0), (0, 1)]).transform("x", lambda x: 1 / x).select("x").deal(batch_size=1)
    with pytest.raises(ZeroDivisionError):
        pipe.peek(2)
    assert pipe.next_epoch() == 0


def test_text_says_what_there_is() -> None:
    pixels = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2)
    pipe = kdp.from_dataset([(pixels, 1)], class_names=["heron", "stork"]).record_ctx()
    assert repr(pipe.transform("x", kdp.HorizontalFlip(p=1)).peek()) == (
        "  0  key  '0'\n"
        "     x    tensor uint8 [3, 2, 2], 0 … 11\n"
        "     y    1 (stork)\n"
        "     ctx  {horizontal_flip: {flipped: True}}"
    )
    assert repr(pipe.select("x y").deal(batch_size=1).collate_samples().peek()) == (
        "  0  x  tensor uint8 [1, 3, 2, 2], 0 … 11\n     y  tensor int64 [1], 1 … 1"
    )
    assert repr(IterableWrapper([("https://me:pw1@host", 2)]).peek()) == "  0  [0]  'https://***@host'\n     [1]  2"


def test_html_has_the_images_and_escapes_the_rest(photo_folder: Path) -> None:
    photos: Any = kdp.image_folder(photo_folder)
    for pipe in (photos, photos.decode_images(), photos.decode_images().transform("x", kdp.ToTensor())):
        assert pipe.peek(2)._repr_html_().count("<img src=") == 2
    views = photos.decode_images().transform("x", views=[[kdp.CenterCrop(8)], [kdp.CenterCrop(9)]]).select("x y")
    assert views.peek(2)._repr_html_().count("<img src=") == 4
    collated = photos.decode_images().transform("x", kdp.CenterCrop(8)).select("x y").deal(batch_size=5)
    assert collated.collate_samples().peek(3)._repr_html_().count("<img src=") == 3
    shown = kdp.from_dataset([("<script>", 0)], "<x> y").peek()._repr_html_()
    assert "<script>" not in shown
    assert "&lt;x&gt;" in shown
    tiny = kdp.from_dataset([(Image.new("RGB", (8, 6)), 0)]).peek()._repr_html_()
    assert 'width="48" height="36"' in tiny, "large enough to be seen"
    damaged = kdp.from_dataset([(b"\xff\xd8\xff", 0)]).peek()._repr_html_()
    assert "<img" not in damaged


def test_values_are_summed_up() -> None:
    assert summary(np.array([[1.5, -2.0]], np.float32)) == "array float32 [1, 2], -2 … 1.5"
    assert summary(torch.tensor([True, False])) == "tensor bool [2], 50% True"
    assert summary(torch.zeros(0, 3)) == "tensor float32 [0, 3]"
    assert summary(torch.tensor(3)) == "tensor int64 []: 3"
    assert summary(np.array(["a"])) == "array <U1 [1]"
    assert summary([1, "a", None]) == "[1, 'a', None]"
    assert summary(list(range(9))) == "list of 9: int"
    assert summary(Image.new("L", (4, 3))) == "image L 4x3"
    assert summary({"a": b"xy", "b": torch.ones(1)}) == "{a: 2 bytes, b: tensor float32 [1], 1 … 1}"


def test_a_failing_sample_is_skipped_and_not_quarantined(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    ones = kdp.from_dataset([(n, 0) for n in range(4)]).transform("x", lambda x: 1 // x)
    chain = ones.on_error("quarantine", path=path).select("x").deal(batch_size=2)
    assert chain.peek(3).items == [(1,), (0,), (0,)]
    assert not path.exists()
    assert sum(map(len, chain)) == 3
    assert path.exists(), "what runs does"
