"""What trainers read and call of a loader, as of torch's DataLoader: `dataset`, the samplers, and their epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.delivery.test_chain_state import values

workers = pytest.mark.parametrize("num_workers", [0, 2])


def chain(*, has_length: bool = True) -> Any:
    items = [(number, 0) for number in range(18)]
    source = kdp.from_dataset(items) if has_length else IterableWrapper(iter(items)).to_samples(fields="x y")
    drawn = source.transform("x", lambda x, rng: x * 1000 + int(rng.integers(1000)))
    return drawn.select("x").deal(batch_size=4, shuffle=has_length, seed=1).collate_samples()


def epochs(number: int) -> list[list[list[int]]]:
    pipe = chain()
    return [values(pipe) for _ in range(number)]


@workers
def test_a_loader_has_the_parts_of_torchs_loader(num_workers: int) -> None:
    with kdp.Loader(chain(), num_workers=num_workers) as loader:
        assert (loader.batch_size, loader.drop_last, len(loader.dataset)) == (4, False, 18)
        assert isinstance(loader.sampler, SequentialSampler)
        assert isinstance(loader.batch_sampler, BatchSampler)
        assert list(loader.batch_sampler) == [[0], [1], [2], [3], [4]]
        assert (len(loader.batch_sampler), loader.batch_sampler.batch_size) == (5, 4)


def test_batches_by_length_have_no_batch_size() -> None:
    lengths = kdp.from_dataset([(1, 0), (3, 0), (2, 0)])
    with kdp.Loader(lengths.deal(uneven="drop", batching=kdp.by_length("x", max_tokens=3))) as loader:
        assert (loader.batch_size, loader.batch_sampler.batch_size, loader.drop_last) == (None, None, True)


@workers
def test_an_epoch_set_after_iter_takes_effect(num_workers: int) -> None:
    expected = epochs(3)
    with kdp.Loader(chain(), num_workers=num_workers) as loader:
        for epoch in (2, 0, 1):
            batches = iter(loader)
            loader.sampler.set_epoch(epoch)
            assert values(batches) == expected[epoch]


@workers
def test_the_epoch_that_has_begun_may_be_set_again(num_workers: int) -> None:
    expected = epochs(2)
    with kdp.Loader(chain(), num_workers=num_workers) as loader:
        batches = iter(loader)
        next(batches)
        loader.set_epoch(1)
        next(batches := iter(loader))
        state = loader.state_dict()
        loader.load_state_dict(state)
        rest = iter(loader)
        loader.sampler.set_epoch(1)  # as Lightning does after it has loaded a state
        assert values(rest) == expected[1][1:]


@workers
def test_accelerate_skips_the_first_batches(num_workers: int) -> None:
    expected = epochs(4)
    with kdp.Loader(chain(), num_workers=num_workers) as loader:
        assert values(skip_first_batches(loader, 3)) == expected[0][3:]
        assert values(loader) == expected[1]
        skipped = skip_first_batches(loader, 2)
        skipped.batch_sampler.batch_sampler.set_epoch(3)  # as transformers' Trainer does
        assert values(skipped) == expected[3][2:]
        assert list(skip_first_batches(loader, 5)) == []


def test_skipping_batches_loads_none_of_them(tmp_path: Path) -> None:
    def note(x: int) -> int:
        with (tmp_path / "loaded").open("a") as file:
            file.write(f"{x}\n")
        return x

    pipe = kdp.from_dataset([(number, 0) for number in range(8)]).transform("x", note).select("x").deal(batch_size=2)
    with kdp.Loader(pipe) as loader:
        assert len(list(skip_first_batches(loader, 3))) == 1
    assert (tmp_path / "loaded").read_text().split() == ["6", "7"]


def test_batches_are_skipped_after_pipes_that_split_them() -> None:
    pipe = chain().map(lambda batch: batch[0].tolist()).unbatch()
    expected = list(pipe)
    with kdp.Loader(chain().map(lambda batch: batch[0].tolist()).unbatch()) as loader:
        assert list(skip_first_batches(loader, 6)) == expected[6:]


def test_batches_of_a_stream_without_length_are_skipped() -> None:
    expected = values(chain(has_length=False))
    with kdp.Loader(chain(has_length=False)) as loader:
        assert values(skip_first_batches(loader, 2)) == expected[2:]
        with pytest.raises(TypeError):
            len(loader.dataset)


def test_a_loader_is_not_read_in_workers_of_another() -> None:
    with kdp.Loader(chain()) as loader:
        again = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=1)
        with pytest.raises(RuntimeError, match="has its own workers: read its `dataset` with `num_workers=0`"):
            list(again)


@pytest.mark.parametrize("ways", ["prepare prepare", "prepare_data_loader", "register_for_checkpointing prepare"])
def test_accelerate_saves_and_loads_the_state(ways: str, tmp_path: Path) -> None:
    for is_resumed in (False, True):
        with kdp.Loader(chain(), num_workers=int(is_resumed) * 2) as loader:
            accelerator = Accelerator(cpu=True)
            for way in ways.split():
                assert getattr(accelerator, way)(loader) in (loader, None)
            if is_resumed:
                accelerator.load_state(str(tmp_path))
                assert values(loader) == epochs(2)[1][1:]
            else:
                loader.set_epoch(1)
                next(iter(loader))
                accelerator.save_state(str(tmp_path))
