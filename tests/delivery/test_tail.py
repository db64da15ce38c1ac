"""Work pipes at the end of a stream: working on the samples of a batch together changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.delivery import deal_stream as dealing
from kdpipes.delivery.deal_stream import tail_of
from kdpipes.demo import write_photo_shards
from kdpipes.testing import check_resumable
from tests.pictures import file_of

SIZE = 60
ITEMS = [(number, number % 3) for number in range(SIZE)]


@pytest.fixture
def tars(tmp_path: Path) -> list[str]:
    return write_photo_shards(tmp_path / "shards")


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of samples that were worked on together."""
    numbers: list[int] = []
    make = dealing.items_at_once

    def counted(blocks: Any, *args: Any) -> Any:
        items = make(blocks, *args)
        numbers.extend(map(len, blocks))
        return items

    monkeypatch.setattr(dealing, "items_at_once", counted)
    return numbers


def jittered(x: Any, rng: np.random.Generator) -> Any:
    return x, int(rng.integers(1000))


def rejecting(x: int, rng: np.random.Generator) -> int:
    if x == 33:
        raise ValueError("odd")
    return x


def stream() -> Any:
    return IterableWrapper(ITEMS).to_samples(fields="x y", key=str)


def work(pipe: Any) -> Any:
    return pipe.transform("x", jittered, jittered).select("x y key ordinal is_padding")


STREAMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: work(stream()).deal(batch_size=16),
    "padded": lambda: work(stream()).deal(batch_size=16, uneven="pad"),
    "dropped": lambda: work(stream()).deal(batch_size=16, uneven="drop"),
    "shuffled": lambda: work(stream().shuffle(buffer_size=20)).deal(batch_size=16, seed=3),
    "filtered": lambda: work(stream().filter_classes(valid=[0, 2])).deal(batch_size=16),
    "oversampled": lambda: work(stream().repeat_until(repetitions=2)).deal(batch_size=16),
    "endless": lambda: work(stream()).deal(batch_size=16, num_batches=3),
    "skipping": lambda: work(stream().transform("x", rejecting).on_error("skip")).deal(batch_size=16),
    "cached": lambda: work(stream().transform("x", str).cache_in_memory()).deal(batch_size=16),
    "recording": lambda: work(stream().record_ctx()).deal(batch_size=16),
    "functions": lambda: work(stream().add_field("z", lambda sample: sample["x"] + 1)).deal(batch_size=16),
}


@pytest.mark.parametrize("name", STREAMS)
def test_batches_are_those_of_single_samples(name: str, num_read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def epochs() -> list[str]:
        chain = STREAMS[name]()
        return [repr(list(chain)) for _ in range(3)]

    found = epochs()
    assert sum(num_read) > SIZE
    monkeypatch.setattr("kdpipes.delivery.deal_stream.tail_of", lambda source: [])
    assert found == epochs()


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": "shards", "split": kdp.lanes(4)}, {"num_batches": 5}], ids=["0", "1", "2"]
)
def test_batches_of_shards_are_those_of_single_samples(
    options: Any, tars: list[str], num_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def epochs() -> list[Any]:
        source = kdp.stream_shards(tars).rename_fields(x="jpg", y="cls").shuffle(buffer_size=20)
        images = source.decode_images("x").transform("x", kdp.RandomResizedCrop(16), kdp.HorizontalFlip())
        chain = images.select("x y key").deal(batch_size=20, **options).collate_samples()
        return [(x.numpy().tobytes(), y.tolist(), key) for _ in range(2) for x, y, key in chain]

    found = epochs()
    assert sum(num_read) > 100
    monkeypatch.setattr("kdpipes.delivery.deal_stream.tail_of", lambda source: [])
    assert found == epochs()


def test_samples_with_other_members_are_worked_on_alone(tmp_path: Path, num_read: list[int]) -> None:
    def png(value: int) -> bytes:
        return file_of(Image.new("RGB", (4, 4), (value, 0, 0)))

    with TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(16):
            both = {"a.png": png(2 * number), "b.png": png(2 * number + 1)}
            writer.write({"__key__": f"{number}", **(both if number % 2 else {"b.png": both["b.png"]})})
    images = kdp.stream_shards(str(tmp_path / "a.tar")).rename_fields(x="a.png;b.png").decode_images("x")
    chain = images.transform("x", kdp.ToTensor()).select("x", bare=True).deal(batch_size=16).collate_samples()
    (batch,) = chain
    expected = [2 * number + (number + 1) % 2 for number in range(16)]
    assert (batch[:, 0, 0, 0] * 255).round().to(torch.int64).tolist() == expected
    assert sum(num_read) < 16


def test_a_profiled_stream_has_no_tail() -> None:
    chain = work(stream())
    assert [pipe.name for pipe in tail_of(chain)] == ["transform", "select"]
    vars(chain.source)["samples"] = chain.source.samples
    assert not tail_of(chain)
    assert not tail_of(stream().select("x")), "nothing to work on"
    assert not tail_of(stream().transform("x", str)), "the samples are delivered"


def test_streams_resume_within_an_epoch(tars: list[str]) -> None:
    images = kdp.stream_shards(tars).rename_fields(x="jpg").decode_images("x").transform("x", kdp.RandomResizedCrop(16))
    check_resumable(images.select("x key").deal(batch_size=16).collate_samples())
