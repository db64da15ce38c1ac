"""Receipts of streams: batches by their numbers, samples by their keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

import kdpipes as kdp
from kdpipes.delivery.lanes import hash_of_sample
from kdpipes.loader.receipt import StreamSamples
from kdpipes.testing import verify_receipts
from kdpipes.testing.checks import as_rank
from tests.loader.test_receipt import run

NOT_KNOWN = "How many samples the stream has is not known."


def write(folder: Path, names: str, size: int) -> list[str]:
    folder.mkdir()
    for name in names:
        with webdataset.TarWriter(str(folder / f"{name}.tar")) as writer:
            for sample in range(size):
                writer.write({"__key__": f"{name}{sample}", "cls": sample % 3})
    return [str(folder / f"{name}.tar") for name in names]


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """9 shards of 6 samples."""
    return write(tmp_path / "shards", "abcdefghi", 6)


def index(urls: list[str]) -> None:
    for url in urls:
        kdp.index_shards(url)


def chain(urls: list[str], **options: Any) -> Any:
    stream = kdp.stream_shards(urls).shuffle(buffer_size=5).to_samples().select("key")
    cut = {"global_batch_size": 4, "shuffle": "shards", "split": kdp.lanes(4, max_ranks=4)}
    return stream.deal(**(cut | options))


@pytest.mark.parametrize("split", ["auto", "samples"])
@pytest.mark.filterwarnings("ignore:.* workers have nothing to do:UserWarning")
def test_ranks_with_killed_workers_deliver_each_sample_once(urls: list[str], split: str) -> None:
    options: dict[str, Any] = {} if split == "auto" else {"split": split, "uneven": "pad"}
    receipts = [run(chain(urls, **options), rank, 4, num_workers=2, kill=True) for rank in range(4)]
    verdict = verify_receipts(receipts)
    assert verdict == (True, 54, 0, (0,), (), ("No sample came twice.", NOT_KNOWN))
    assert str(verdict).startswith("Every batch of epoch 0 was delivered exactly once: 54 samples.\nNo sample")
    assert [receipt["order"] for receipt in receipts] == [run(chain(urls, **options), n, 4)["order"] for n in range(4)]
    whole = run(chain(urls, **options), num_workers=1)
    assert sum(int(receipt["digest"][:16], 16) for receipt in receipts) % 2**64 == int(whole["digest"][:16], 16)
    (text,) = verify_receipts(receipts[:3]).problems
    assert text == "Epoch 0: batches from 0 on of rank 3 of 4: not delivered."
    (text, *_) = verify_receipts([*receipts, receipts[1]]).problems
    assert text.endswith("of rank 1 of 4: delivered 2 times.")


def test_samples_that_came_twice_are_found(urls: list[str]) -> None:
    receipts = [run(chain(urls), rank, 2) for rank in range(2)]
    swapped = {**receipts[1], "keys": receipts[0]["keys"]}
    assert verify_receipts([receipts[0], swapped]).problems == (
        f"Epoch 0: {receipts[0]['num_samples']} samples came more than once, or have the keys of others: keys must be "
        "unique.",
    )


def test_the_parts_of_a_resumed_epoch_fit_together(urls: list[str]) -> None:
    with as_rank(0, 1), kdp.Loader(chain(urls), num_workers=1) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state, first = loader.state_dict(), loader.receipt()
        next(batches)
    assert (first["batches"], first["num_samples"]) == ([0, 5], 20)
    rest = []
    for rank in range(2):
        with as_rank(rank, 2), kdp.Loader(chain(urls)) as loader:
            loader.load_state_dict(state)
            list(loader)
            rest.append(loader.receipt())
    assert verify_receipts([first, *rest]).is_complete
    assert verify_receipts([first, rest[0]]).problems == ("Epoch 0: batches from 5 on of rank 1 of 2: not delivered.",)
    problems = verify_receipts(rest).problems
    assert problems == tuple(f"Epoch 0: batches 0 to 4 of rank {rank} of 2: not delivered." for rank in range(2))
    assert verify_receipts([first]).problems == ("Epoch 0: batches from 5 on: not delivered.",)


def test_a_state_of_an_earlier_batch_begins_a_new_receipt(urls: list[str]) -> None:
    with kdp.Loader(chain(urls)) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state, first = loader.state_dict(), loader.receipt()
        next(batches)
        loader.load_state_dict(state)
        list(loader)
        second = loader.receipt()
        assert (second["batches"], second["num_samples"]) == ([3, None], 54 - 12)
        assert verify_receipts([first, second]).is_complete
        list(loader)
        assert loader.receipt()["epoch"] == 1
        assert verify_receipts([loader.receipt()]).num_samples == 54


def test_indexes_tell_how_many_samples_there_must_be(urls: list[str]) -> None:
    index(urls)
    verdict = verify_receipts([run(chain(urls), rank, 2) for rank in range(2)])
    assert str(verdict) == "Every sample of epoch 0 was delivered exactly once: 54 samples."
    padded = [run(chain(urls, uneven="pad"), rank, 2) for rank in range(2)]
    assert verify_receipts(padded).is_complete
    assert sum(receipt["num_padding"] for receipt in padded) > 0
    assert verify_receipts([run(chain(urls, uneven="drop"))]).unknown[-1] == NOT_KNOWN
    chosen = kdp.stream_shards(urls).rename_fields(y="cls").filter_classes(invalid=[2]).select("key")
    verdict = verify_receipts([run(chosen.deal(batch_size=4))])
    assert verdict == (True, 36, 0, (0,), (), ("No sample came twice.", NOT_KNOWN))


def test_skipped_samples_and_lost_shards_are_counted(urls: list[str]) -> None:
    def reject(sample: Any) -> int:
        if sample.key.endswith("3"):
            raise ValueError("bad")
        return 0

    def skipping() -> Any:
        stream = kdp.stream_shards(urls, verify=False).on_error("skip", max_share=1.0).add_field("bad", reject)
        return stream.select("key bad").deal(global_batch_size=8, uneven="pad", split=kdp.lanes(2))

    index(urls)
    receipts = [run(skipping(), rank, 2, num_workers=1) for rank in range(2)]
    assert verify_receipts(receipts)[:3] == (True, 45, 9)
    os.truncate(urls[2], 4500)
    os.utime(urls[2])
    lost = run(skipping())
    assert lost["skipped"]["num_shards"] == 1
    assert (
        verify_receipts([lost | {"planned": receipts[0]["planned"]}])
        .problems[0]
        .endswith(
            "samples were delivered or skipped, but the stream has 54. The rest of 1 damaged shards was left out."
        )
    )


def test_epochs_of_a_number_of_batches_are_counted(urls: list[str]) -> None:
    pipe = chain(urls, num_batches=5)
    receipts = [run(pipe, rank, 2, num_workers=1) for rank in range(2)]
    verdict = verify_receipts(receipts)
    assert verdict[:2] == (True, 20)
    assert verdict.unknown == ("The chain may give a sample more than once, so samples were not compared.",)
    assert [receipt["batches"] for receipt in receipts] == [[0, 5]] * 2
    fewer = receipts[1] | {"num_samples": 9}
    assert verify_receipts([receipts[0], fewer]).problems == (
        "Epoch 0: 19 samples were delivered or skipped, but the stream has 20.",
    )


def test_streams_that_repeat_samples_are_not_compared(urls: list[str]) -> None:
    stream = kdp.stream_shards(urls)
    for repeated in (stream.repeat_until(repetitions=2), stream.mix(kdp.stream_shards(urls), stop="all")):
        verdict = verify_receipts([run(repeated.select("key").deal(batch_size=4))])
        assert verdict.is_complete
        assert verdict.unknown[0].startswith("The chain may give a sample more than once")


def test_a_long_epoch_keeps_a_share_of_the_hashes() -> None:
    given = StreamSamples()
    keys = np.frombuffer(b"".join(hash_of_sample(str(n)) for n in range(200_000)), "<u8")
    for start in range(0, len(keys), 100):
        given.add(keys[start : start + 100].tobytes())
    assert (given.num_samples, given.share) == (200_000, 4)
    assert 45_000 < given.num_kept < 55_000
    assert len(given.hashes()) < 750_000
