"""The batches of an epoch, bit for bit, are a function of chain, seed and epoch: in every loader, for any workers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps

import kdpipes as kdp
from kdpipes.demo import PHOTO_CLASSES
from tests.torchdata_parts import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    SeedGenerator,
    set_graph_random_seed,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

VALID = ("cat", "grass", "rocket")
Epochs = list[list[str]]


def with_global_noise(image: Any) -> np.ndarray:
    """A user's transform that knows nothing of kdpipes, and draws from every global generator."""
    return np.asarray(image) * random.random() + np.random.rand() + torch.rand(()).item()


def crops(source: Any) -> Any:
    augmented = source.decode_images("x").record_ctx()
    augmented = augmented.transform("x", kdp.RandomResizedCrop(16), kdp.HorizontalFlip(), with_global_noise)
    return augmented.select("x y key ordinal", return_ctx=True)


def from_folder(folder: Path, urls: str, **cut: Any) -> Any:
    plan = kdp.image_folder(folder).filter_classes(valid=VALID).oversample().repeat_until(min_size=150)
    return crops(plan).deal(**cut, shuffle=True, seed=5).collate_samples()


def from_shards(folder: Path, urls: str, **cut: Any) -> Any:
    source = kdp.open_shards(urls, class_names=PHOTO_CLASSES).rename_fields(x="jpg", y="cls")
    plan = source.filter_classes(valid=VALID).oversample(mode="exact")
    return crops(plan).deal(shuffle=kdp.by_shard(window=70), seed=5, **cut).collate_samples()


def from_stream(folder: Path, urls: str, **cut: Any) -> Any:
    source = kdp.stream_shards(urls, class_names=PHOTO_CLASSES).rename_fields(x="jpg", y="cls")
    plan = source.filter_classes(valid=VALID).oversample(class_counts={1: 40, 4: 8, 7: 24}).repeat_until(min_size=150)
    return crops(plan.shuffle(buffer_size=40)).deal(**cut, shuffle="shards", seed=5).collate_samples()


def from_records(folder: Path, urls: str, **cut: Any) -> Any:
    records = folder.with_name("records")
    kdp.write_records(kdp.image_folder(folder), records, num_parts=18)  # the first time
    plan = kdp.open_records(records).filter_classes(valid=VALID).oversample(mode="exact")
    return crops(plan).deal(shuffle=kdp.by_shard(window=50), seed=5, **cut).collate_samples()


Chain = Callable[..., Any]
CHAINS: list[Chain] = [from_folder, from_shards, from_stream, from_records]
every_chain = pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)


def fingerprint(batch: Any) -> str:
    (x, y, keys, ordinals), ctx = batch
    digest = hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes() + ordinals.numpy().tobytes())
    recorded = {name: {param: values.tolist() for param, values in entry.items()} for name, entry in ctx.items()}
    digest.update(repr((keys, recorded)).encode())
    return digest.hexdigest()


def two_epochs(loader: Any) -> Epochs:
    return [[fingerprint(batch) for batch in loader] for _ in range(2)]


@pytest.fixture(scope="module")
def expected(photo_folder: Path, photo_shards: str) -> dict[str, Epochs]:
    return {chain.__name__: two_epochs(chain(photo_folder, photo_shards, batch_size=16)) for chain in CHAINS}


@every_chain
def test_epochs_differ_and_hold_no_batch_twice(chain: Chain, expected: dict[str, Epochs]) -> None:
    first, second = expected[chain.__name__]
    assert len(first) == len(second) >= 8
    assert len({*first, *second}) == len(first) + len(second)


def _loader(pipe: Any, num_workers: int) -> Any:
    return kdp.Loader(pipe, num_workers=num_workers)


def _dataloader2(pipe: Any, num_workers: int) -> Any:
    service = MultiProcessingReadingService(num_workers) if num_workers else InProcessReadingService()
    return DataLoader2(pipe, reading_service=service)


def _dataloader(pipe: Any, num_workers: int) -> Any:
    return DataLoader(pipe, batch_size=None, num_workers=num_workers)


def _dataloader_persistent(pipe: Any, num_workers: int) -> Any:
    return DataLoader(pipe, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0)


LOADERS = [_loader, _dataloader2, _dataloader, _dataloader_persistent]
NUMBERS = [  # each loader alone and with workers, the first with every number of them
    *((_loader, number) for number in range(4)),
    *((_dataloader2, number) for number in (0, 1, 3)),
    *((_dataloader, number) for number in (0, 2)),
    *((_dataloader_persistent, number) for number in (1, 3)),
]


@every_chain
@pytest.mark.parametrize(("make_loader", "num_workers"), NUMBERS, ids=lambda it: getattr(it, "__name__", str(it)))
def test_the_batches_are_the_same_in_every_loader(
    chain: Chain, make_loader: Any, num_workers: int, expected: dict[str, Epochs], photo_folder: Path, photo_shards: str
) -> None:
    loader = make_loader(chain(photo_folder, photo_shards, batch_size=16), num_workers)
    assert two_epochs(loader) == expected[chain.__name__]
    if isinstance(loader, DataLoader2):
        loader.shutdown()


@pytest.mark.parametrize("make_loader", [_loader, _dataloader])
def test_workers_that_are_not_forked_give_the_same_batches(
    make_loader: Any, expected: dict[str, Epochs], photo_folder: Path, photo_shards: str
) -> None:
    pipe = from_shards(photo_folder, photo_shards, batch_size=16)
    if make_loader is _loader:
        with kdp.Loader(pipe, num_workers=2, start_method="spawn") as loader:
            assert two_epochs(loader) == expected["from_shards"]
    else:
        fresh = DataLoader(pipe, batch_size=None, num_workers=2, multiprocessing_context="forkserver")
        assert two_epochs(fresh) == expected["from_shards"]


@every_chain
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_the_same_global_batches(
    chain: Chain, num_ranks: int, expected: dict[str, Epochs], photo_folder: Path, photo_shards: str
) -> None:
    parts = []
    for rank in range(num_ranks):
        pipe = chain(photo_folder, photo_shards, global_batch_size=16)
        torch.utils.data.graph_settings.apply_sharding(pipe, num_ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        parts.append(list(pipe))
    assert len({len(part) for part in parts}) == 1
    joined = [fingerprint(_joined([part[number] for part in parts])) for number in range(len(parts[0]))]
    assert joined == expected[chain.__name__][0]


def _joined(parts: list[Any]) -> Any:
    def join(values: list[Any]) -> Any:
        if isinstance(values[0], torch.Tensor):
            return torch.cat(values)
        if isinstance(values[0], dict):
            return {name: join([value[name] for value in values]) for name in values[0]}
        return [entry for value in values for entry in value]

    fields = tuple(join(list(column)) for column in zip(*(part[0] for part in parts), strict=True))
    return fields, join([part[1] for part in parts])


def test_the_seeds_of_a_loader_do_not_change_the_order(
    expected: dict[str, Epochs], photo_folder: Path, photo_shards: str
) -> None:
    for seed in (1, 2):
        pipe = from_stream(photo_folder, photo_shards, batch_size=16)
        set_graph_random_seed(pipe, SeedGenerator(seed))
        assert two_epochs(pipe) == expected["from_stream"]
        assert traverse_dps(pipe)


@every_chain
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make_loader", LOADERS, ids=lambda make: make.__name__[1:])
def test_an_epoch_broken_off_is_followed_by_the_next_one(
    chain: Chain, make_loader: Any, num_workers: int, expected: dict[str, Epochs], photo_folder: Path, photo_shards: str
) -> None:
    loader = make_loader(chain(photo_folder, photo_shards, batch_size=16), num_workers)
    assert fingerprint(next(iter(loader))) == expected[chain.__name__][0][0]
    assert [fingerprint(batch) for batch in loader] == expected[chain.__name__][1]
    if isinstance(loader, DataLoader2):
        loader.shutdown()
    else:
        del loader


def test_training_and_validation_live_side_by_side(
    expected: dict[str, Epochs], photo_folder: Path, photo_shards: str
) -> None:
    training = kdp.Loader(from_folder(photo_folder, photo_shards, batch_size=16), num_workers=2)
    validation = kdp.Loader(from_shards(photo_folder, photo_shards, batch_size=16), num_workers=1)
    with training, validation:
        seen = []
        for epoch in range(2):
            for number, batch in enumerate(training):
                seen.append(fingerprint(batch))
                if number == 4:
                    assert [fingerprint(batch) for batch in validation] == expected["from_shards"][epoch]
    assert seen == [batch for epoch in expected["from_folder"] for batch in epoch]


def test_another_seed_gives_another_order_of_the_same_samples() -> None:
    def keys(seed: int) -> list[str]:
        pipe = kdp.from_dataset([(n, 0) for n in range(100)]).select("key").deal(batch_size=7, shuffle=True, seed=seed)
        return [key for batch in pipe for (key,) in batch]

    assert keys(1) != keys(2)
    assert sorted(keys(1)) == sorted(keys(2)) == sorted(map(str, range(100)))
