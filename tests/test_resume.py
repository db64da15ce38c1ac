"""A run that is broken off anywhere goes on where it was: on other workers, on other ranks, whatever the chain is."""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset import TarWriter

import kdpipes as kdp
from tests.pictures import file_of
from tests.resuming import (
    FORKED,
    FRESH,
    digest,
    digests,
    every_service,
    inline,
    jitter,
    number_chain,
    of_rank,
    resumed_everywhere,
    states_of,
    threads,
    travelled,
    without_seed,
)

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


CLASSES = ("heron", "stork", "gull")


@pytest.fixture(scope="module")
def number_epochs() -> dict[tuple[int, int], list[list[str]]]:
    """Three epochs of each rank of 1, 2 and 4, made without a loader."""
    made = {}
    for num_ranks in (1, 2, 4):
        for rank in range(num_ranks):
            pipe = of_rank(number_chain(), num_ranks, rank)
            made[num_ranks, rank] = [digests(pipe) for _ in range(3)]
    return made


@pytest.fixture(scope="module")
def number_states() -> list[Any]:
    return [without_seed(state) for state in states_of(kdp.Loader(number_chain()))]


@every_service
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_numbers_have_one_order_and_resume_from_each_state(
    service: Any, num_ranks: int, number_epochs: Any, number_states: list[Any]
) -> None:
    rank = num_ranks - 1
    expected = number_epochs[num_ranks, rank]
    with kdp.Loader(of_rank(number_chain(), num_ranks, rank), reading_service=service()) as loader:
        assert [without_seed(state) for state in states_of(loader)] == number_states
        assert digests(loader) == expected[1]
        resumed_everywhere(loader, number_states, expected)


def test_spawned_workers_have_that_order_and_those_states(number_epochs: Any, number_states: list[Any]) -> None:
    with kdp.Loader(of_rank(number_chain(), 2, 0), reading_service=FRESH()) as loader:
        assert [without_seed(state) for state in states_of(loader)] == number_states
        resumed_everywhere(loader, number_states, number_epochs[2, 0])


def _tiny_image(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (10 + number % 3, 12, 3), dtype=np.uint8)
    return file_of(pixels)


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 tiny images in three classes of unequal size, as a folder and as two tars."""
    root = tmp_path_factory.mktemp("birds")
    labels = [0] * 8 + [1] * 4 + [2] * 3
    for number, label in enumerate(labels):
        path = root / "folder" / CLASSES[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_tiny_image(number))
    for shard in range(2):
        with TarWriter(str(root / f"birds-{shard}.tar")) as writer:
            for number in range(shard, len(labels), 2):
                writer.write({"__key__": str(number), "png": _tiny_image(number), "cls": str(labels[number])})
    return root


def _crops(plan: Any) -> Any:
    augmented = plan.decode_images("x").record_ctx().transform("x", kdp.RandomResizedCrop(6), kdp.HorizontalFlip())
    return augmented.transform("x", np.asarray).select("x y key ordinal is_padding", return_ctx=True)


def folder_chain(birds: Path, **cut: Any) -> Any:
    plan = kdp.image_folder(birds / "folder").filter_classes(valid=["gull", "heron"]).oversample()
    return _crops(plan.repeat_until(min_size=37)).deal(**cut, shuffle=True, seed=2)


def shard_chain(birds: Path, **cut: Any) -> Any:
    source = kdp.open_shards(str(birds / "birds-{0..1}.tar"), class_names=CLASSES).rename_fields(x="png", y="cls")
    plan = source.filter_classes(valid=["gull", "heron"]).oversample().repeat_until(min_size=37)
    return _crops(plan).deal(**cut, shuffle=True, seed=2)


def record_chain(birds: Path, **cut: Any) -> Any:
    kdp.write_records(kdp.image_folder(birds / "folder"), birds / "records")  # the first time
    plan = kdp.open_records(birds / "records").filter_classes(valid=["gull", "heron"]).oversample()
    return _crops(plan.repeat_until(min_size=37)).deal(shuffle=kdp.by_shard(window=12), seed=2, **cut)


def stream_chain(birds: Path, **cut: Any) -> Any:
    source = kdp.stream_shards(str(birds / "birds-{0..1}.tar"), class_names=CLASSES).rename_fields(x="png", y="cls")
    plan = source.filter_classes(valid=["gull", "heron"]).repeat_until(min_size=37)
    return _crops(plan.shuffle(buffer_size=9)).deal(**cut, seed=2)


def stock_stream_chain(birds: Path, **cut: Any) -> Any:
    source = IterableWrapper(range(42)).shuffle().to_samples(fields="x").transform("x", jitter)
    return source.select("x ordinal").deal(**cut, seed=2)


CHAINS = [folder_chain, shard_chain, record_chain, stream_chain, stock_stream_chain]
every_chain = pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
SETUPS = [
    (inline, 1),
    (threads(3), 2),
    (FORKED[1], 1),
    (FORKED[2], 2),
    (threads(2), 4),
    (inline, 4),
    (FORKED[3], 1),
    (threads(1), 1),
]


@every_chain
@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_a_run_with_changing_workers_equals_one_process(chain: Any, uneven: Any, birds: Path) -> None:
    pipe = chain(birds, global_batch_size=12, uneven=uneven)
    expected = [digest(item) for _ in range(2) for batch in pipe for item in batch]
    num_batches = 2 * (3 if uneven == "drop" else 4)
    found, state = [], None
    for service, num_ranks in islice(cycle(SETUPS), num_batches):
        states = []
        for rank in range(num_ranks):
            pipe = of_rank(chain(birds, global_batch_size=12, uneven=uneven), num_ranks, rank)
            with kdp.Loader(pipe, reading_service=service()) as loader:
                if state is not None:
                    loader.load_state_dict(travelled(state))
                batch = next((batch for _ in range(2) for batch in loader), None)  # of the next epoch after the last
                found += [digest(item) for item in batch]
                states.append(loader.state_dict())
        assert len({json.dumps(without_seed(state)) for state in states}) == 1
        state = states[-1]
    assert found == expected


@every_chain
@pytest.mark.parametrize("service", [inline, FORKED[2], threads(2)], ids=lambda make: make.__name__)
def test_images_and_streams_go_on_from_every_batch(chain: Any, service: Any, birds: Path) -> None:
    pipe = chain(birds, batch_size=6)
    epochs = [digests(pipe) for _ in range(3)]
    states = states_of(kdp.Loader(chain(birds, batch_size=6), reading_service=threads(3)()))
    with kdp.Loader(chain(birds, batch_size=6), reading_service=service()) as loader:
        resumed_everywhere(loader, states, epochs)
