"""webdataset, both ways: its shards and pipelines are read here, and shards from here are read there."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from torch.utils.data import DataLoader

import kdpipes as kdp
from kdpipes.work.decode import EncodedImage
from tests.torchdata_parts import DataLoader2, MultiProcessingReadingService

pytestmark = [  # webdataset leaves closing its files to the collector
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]
NUM_SAMPLES = 10
NAMES = ("jpg", "seg.png", "cls", "txt", "json", "npy")


class Exploding:
    """An object whose pickle must not be opened."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("A pickle has been opened.",)


@pytest.fixture(params=["ShardWriter", "TarWriter", "gz"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Shards that webdataset has written: ten samples in folders, one with a name that needs a pax header."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)

    def write(writer: Any) -> None:
        with writer:
            for n in range(NUM_SAMPLES):
                row = {"jpg": pixels + n, "seg.png": pixels, "cls": n % 3, "json": {"n": [n]}, "npy": np.arange(n)}
                key = f"birds/{n:03}" if n != 5 else "birds/" + "long \u00e9" * 30
                writer.write({"__key__": key, **row, "txt": f"Reiher \u00df {n}", "pyd": pickle.dumps(Exploding())})

    if request.param == "ShardWriter":
        write(wds.ShardWriter(str(tmp_path / "birds-%03d.tar"), maxcount=4, verbose=0))
    else:
        write(wds.TarWriter(str(tmp_path / ("birds-000.tar" + ".gz" * (request.param == "gz")))))
    return sorted(map(str, tmp_path.glob("*.tar*")))


def _decoded(name: str, value: Any) -> Any:
    if name in ("jpg", "seg.png"):
        return EncodedImage(value).to_pil().convert("RGB").tobytes()
    return value.tolist() if name == "npy" else value


def _theirs(urls: Any) -> list[tuple[str, dict[str, Any]]]:
    dataset = wds.WebDataset(urls, shardshuffle=False).decode("pil", only=list(NAMES))
    return [
        (sample["__key__"], {name: _plain(name, sample[name]) for name in NAMES if name in sample})
        for sample in dataset
    ]


def _plain(name: str, value: Any) -> Any:
    if name in ("jpg", "seg.png"):
        return value.convert("RGB").tobytes()
    return value.tolist() if name == "npy" else value


def test_shards_that_webdataset_has_written_are_read(shards: list[str]) -> None:
    expected = _theirs(shards)
    assert len(expected) == NUM_SAMPLES
    sources = [kdp.stream_shards, kdp.open_shards] if shards[0].endswith(".tar") else [kdp.stream_shards]
    for source in sources:
        samples: list[Any] = list(source(shards))
        found = [{name: _decoded(name, sample[name]) for name in NAMES} for sample in samples]
        assert [
            (sample.key.split("/", 1)[1], fields) for sample, fields in zip(samples, found, strict=True)
        ] == expected
        assert isinstance(samples[0]["pyd"], bytes)  # and no pickle is opened
        assert {name for name in samples[0] if name not in NAMES} == {"pyd"}


def test_shards_from_here_are_read_by_webdataset(photo_shards: str) -> None:
    found = _theirs(photo_shards)
    ours: list[Any] = list(kdp.stream_shards(photo_shards))
    assert [key for key, _ in found] == [sample.key.split("/")[1] for sample in ours]
    assert [fields["cls"] for _, fields in found] == [sample["cls"] for sample in ours]
    assert found[7][1]["jpg"] == _decoded("jpg", ours[7]["jpg"])
    assert len(found) == 160


def chain(dataset: Any, **deal: Any) -> Any:
    return kdp.from_webdataset(dataset).rename_fields(x="jpg", y="cls").select("key y").deal(batch_size=7, **deal)


def rows(batches: Any) -> list[Any]:
    return [tuple(row) for batch in batches for row in batch]


def test_a_pipeline_of_webdatasets_is_a_source(photo_shards: str) -> None:
    dataset = wds.WebDataset(photo_shards, shardshuffle=False)
    expected = rows(kdp.stream_shards(photo_shards).select("key jpg cls").deal(batch_size=7, split="samples"))
    for pipeline in (dataset.decode(only="cls"), wds.DataPipeline(dataset, wds.decode(only="cls"))):
        assert rows(kdp.from_webdataset(pipeline).select("key jpg cls").deal(batch_size=7)) == expected
    pairs = dataset.decode(only="cls").to_tuple("jpg", "cls")
    assert rows(kdp.from_webdataset(pairs, "x y").select("x y").deal(batch_size=7)) == [row[1:] for row in expected]
    assert rows(kdp.from_webdataset(pairs, "x y").select("key").deal(batch_size=7))[-1] == ("159",)
    names = kdp.from_webdataset(dataset, "cls", class_names=["brick", "cat"])
    assert (names.class_names(), list(next(iter(names)))) == (("brick", "cat"), ["cls"])


LOADERS: dict[str, Callable[[Any], Any]] = {
    "0": lambda pipe: kdp.Loader(pipe),
    "2": lambda pipe: kdp.Loader(pipe, num_workers=2),
    "forkserver": lambda pipe: kdp.Loader(pipe, num_workers=2, start_method="forkserver"),
    "threads": lambda pipe: kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(2)),
    "DataLoader": lambda pipe: DataLoader(pipe, batch_size=None, num_workers=2),
    "DataLoader2": lambda pipe: DataLoader2(pipe, reading_service=MultiProcessingReadingService(2)),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_every_sample_comes_once_in_every_loader(loader: str, photo_shards: str) -> None:
    urls = photo_shards.replace("{000..003}", "{000..002}")  # which two workers cannot share evenly
    dataset = wds.WebDataset(urls, shardshuffle=3, nodesplitter=wds.split_by_node).shuffle(20).decode(only="cls")
    pipe = chain(dataset, seed=3)
    expected = [rows(pipe) for _ in range(2)]
    pipe.set_epoch(0)
    loaded = LOADERS[loader](pipe)
    found = [rows(loaded) for _ in range(2)]
    assert found == expected
    assert sorted(found[0]) == sorted(found[1]) == rows(chain(wds.WebDataset(urls, shardshuffle=False).decode()))
    assert found[0] != found[1]
    if hasattr(loaded, "shutdown"):
        loaded.shutdown()


def test_shuffles_of_webdataset_draw_from_the_seed_of_deal(photo_shards: str) -> None:
    def order(seed: int, dataset: Any) -> list[Any]:
        return rows(chain(dataset, seed=seed))

    def shuffled() -> Any:
        return wds.WebDataset(photo_shards, shardshuffle=4).decode(only="cls").shuffle(40, initial=10, seed=1)

    by_epoch = wds.WebDataset(photo_shards, shardshuffle=4, detshuffle=True).decode(only="cls")
    for dataset in (shuffled(), by_epoch):
        assert order(1, dataset) == order(1, dataset) != order(2, dataset)
    assert order(1, shuffled()) == order(1, shuffled())


def test_ranks_share_the_samples_out(photo_shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # which webdataset reads, and would reject
    keys = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        dataset = wds.WebDataset(photo_shards, shardshuffle=False).decode(only="cls")
        keys.append([key for key, _ in rows(chain(dataset))])
    assert list(map(len, keys)) == [80, 80]
    assert len({*keys[0], *keys[1]}) == 160


def test_a_repeating_pipeline_is_endless_or_has_its_length(photo_shards: str) -> None:
    dataset = wds.WebDataset(photo_shards, shardshuffle=4).decode(only="cls")
    assert len(rows(chain(dataset.compose().with_epoch(200)))) == 200
    assert len(rows(islice(chain(dataset.compose().repeat()), 50))) == 350


def reject(urls: str, **options: Any) -> Any:
    return wds.WebDataset(urls, **{"shardshuffle": False, **options})


REJECTED: dict[str, Callable[[str], Any]] = {
    "Every worker must read the same stream, but `ResampledShards` is seeded": lambda urls: reject(
        urls, resampled=True
    ),
    "`batched` makes batches": lambda urls: reject(urls).batched(4),
    "`rsample` draws anew": lambda urls: reject(urls).rsample(0.5),
    "`halve` may split the shards": lambda urls: reject(urls, nodesplitter=halve),
    "`RandomMix` is seeded": lambda urls: wds.DataPipeline(wds.RandomMix([reject(urls)])),
    "`DataLoader` has workers": lambda urls: wds.WebLoader(reject(urls), batch_size=None),
}


def halve(source: Any) -> Any:
    return islice(source, 0, None, 2)


@pytest.mark.parametrize("words", REJECTED)
def test_what_would_lose_samples_is_rejected_at_once(words: str, photo_shards: str) -> None:
    with pytest.raises(kdp.ChainError, match=words):
        kdp.from_webdataset(REJECTED[words](photo_shards))


def test_other_arguments_are_rejected(photo_shards: str) -> None:
    with pytest.raises(TypeError, match="`dataset` must be a pipeline of webdataset's, but is"):
        kdp.from_webdataset([{"__key__": "a"}])
    with pytest.raises(TypeError, match="`fields` must be names in one string"):
        kdp.from_webdataset(reject(photo_shards), ["jpg"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Read it as a stream"):
        kdp.from_dataset(reject(photo_shards))


def test_a_pipe_url_is_left_to_webdataset(photo_shards: str) -> None:
    url = "pipe:cat " + photo_shards.replace("{000..003}", "002")
    for source in (kdp.stream_shards, kdp.open_shards):
        with pytest.raises(ValueError, match=r"would run a shell command; .* `kdp\.from_webdataset\(wds\.WebDataset"):
            source(url)
    found = kdp.from_webdataset(wds.WebDataset(url, shardshuffle=False)).select("key")
    assert [key for (key,) in found] == [f"photos-002.tar/{n:06}" for n in range(2, 160, 4)]


def test_damage_in_a_pipeline_is_an_error(tmp_path: Path, photo_shards: str) -> None:
    content = Path(photo_shards.replace("{000..003}", "000")).read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[:50_000])
    with pytest.raises(Exception, match=r"cut\.tar"):
        rows(chain(wds.WebDataset(str(tmp_path / "cut.tar"), shardshuffle=False)))


def test_json_and_classes_are_those_of_webdataset(tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "a", "meta.json": {"\u00e9": [1, None, 2.5]}, "cls": -3, "transcript": "\u00fc\n"})
    expected = next(iter(wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode()))
    for source in (kdp.stream_shards, kdp.open_shards):
        sample: Any = next(iter(source(tmp_path / "a.tar")))
        assert json.dumps(dict(sample), sort_keys=True) == json.dumps(
            {name: value for name, value in expected.items() if not name.startswith("__")}, sort_keys=True
        )
