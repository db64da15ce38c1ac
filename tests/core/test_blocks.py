"""Samples that are made together are those that are made one by one."""

import gc
import os
import signal
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.delivery import deal as dealing
from kdpipes.testing import check_elastic, check_exactly_once, check_resumable

SIZE = 50


class Counted:
    """A dataset that counts how items are read."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, str]:
        self.read.append(index)
        return index, f"text {index}"


class Batched(Counted):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, str]]:
        self.read.append(indices)
        return [(index, f"text {index}") for index in indices]


class Collating(Counted):
    """A dataset for a DataLoader whose `collate_fn` expects batches."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor(indices), "texts"


class Getters:
    def __len__(self) -> int:
        return SIZE

    def getitem_x(self, index: int) -> int:
        return index

    def getitem_y(self, index: int) -> str:
        return f"text {index}"


class Keyed(Getters, kdp.SampleSource):
    def key_of(self, index: int) -> str:
        return str(OTHER[0])


ITEMS: list[Any] = [(number, f"text {number}") for number in range(SIZE)]
SOURCES: dict[str, Any] = {
    "a list": lambda: kdp.from_dataset(ITEMS),
    "dictionaries": lambda: kdp.from_dataset([{"x": x, "y": y} for x, y in ITEMS]),
    "an array": lambda: kdp.from_dataset(np.arange(2 * SIZE).reshape(SIZE, 2), "x"),
    "tensors": lambda: kdp.from_dataset(TensorDataset(torch.arange(SIZE), torch.arange(2 * SIZE).reshape(-1, 2))),
    "labels": lambda: kdp.from_dataset(ITEMS, labels=["a", "b"] * (SIZE // 2)),
    "a dataset": lambda: kdp.from_dataset(Counted()),
    "__getitems__": lambda: kdp.from_dataset(Batched()),
    "a batch for DataLoader": lambda: kdp.from_dataset(Collating()),
    "a subset": lambda: kdp.from_dataset(Subset(Batched(), range(3, SIZE))),
    "getters": lambda: kdp.from_dataset(Getters()),
    "keys": Keyed,
    "lists": lambda: kdp.from_dataset([[x, y] for x, y in ITEMS]),
    "odd items": lambda: kdp.from_dataset([{"x": 1, "y": 2}, *ITEMS[1:]]),
}


def jittered(x: Any, rng: np.random.Generator) -> Any:
    return x, int(rng.integers(1000))


def changes(pipe: Any) -> Any:
    return pipe.permute(3).transform("x", jittered, jittered).rename_fields(z="x").take_percent(to_percent=0.9)


def plain(items: Any) -> str:
    return repr([[tuple(item) for item in batch] for batch in items])


def in_batches(build: Any, size: int, num_epochs: int = 2) -> list[str]:
    """Return the items of some epochs, made in batches of a size."""
    pipe = build().deal(batch_size=size, shuffle=True)
    return [repr(item) for _ in range(num_epochs) for batch in pipe for item in batch]


@pytest.fixture
def made_at_once(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says how many samples were made together since the last call."""
    numbers: list[int] = []
    make = dealing.items_at_once

    def counted(blocks: Any, *args: Any) -> Any:
        items = make(blocks, *args)
        numbers.extend(len(block) for block in blocks if len(block) > 1)
        return items

    monkeypatch.setattr(dealing, "items_at_once", counted)

    def take() -> int:
        total = sum(numbers)
        numbers.clear()
        return total

    return take


@pytest.mark.parametrize("mode", ["x", "z key index ordinal is_padding"])
@pytest.mark.parametrize("name", SOURCES)
def test_the_batches_are_those_of_single_samples(name: str, mode: str) -> None:
    def build() -> Any:
        source = SOURCES[name]()
        return (source if mode == "x" else changes(source)).select(mode)

    alone = in_batches(build, 1)
    for size in (3, 16, 300):
        assert in_batches(build, size) == alone


@pytest.mark.parametrize("name", SOURCES)
def test_a_batch_is_made_together(name: str, made_at_once: Any) -> None:
    pipe = SOURCES[name]().select("x").deal(batch_size=10)
    list(pipe)
    assert made_at_once() == (47 if name == "a subset" else SIZE)


def test_items_are_not_read_for_known_labels() -> None:
    dataset = Counted()
    pipe = kdp.from_dataset(dataset, labels=list(range(SIZE))).select("y", bare=True).deal(batch_size=10)
    assert [y for batch in pipe for y in batch] == list(range(SIZE))
    assert not dataset.read


def test_getitems_of_a_dataset_is_called_with_lists() -> None:
    dataset = Batched()
    list(kdp.from_dataset(dataset).select("x y").deal(batch_size=25))
    assert all(isinstance(read, list) for read in dataset.read)
    assert sum(map(len, dataset.read)) == SIZE


def test_eager_functions_get_samples_one_by_one(made_at_once: Any) -> None:
    list(kdp.from_dataset(ITEMS).doctest_block_eager().select("x").deal(batch_size=10))
    assert made_at_once() == 0


@kdp.sample_pipe("doctest_block_eager")
def eager(sample: kdp.Sample) -> kdp.Sample:
    sample["x"] += 1
    return sample


def recorded(x: int, ctx: dict[str, Any]) -> int:
    ctx["seen"] = x
    return x


def reading_twice(x: int) -> Any:
    return OTHER[0], OTHER[x // 2]


OTHER = changes(kdp.from_dataset(ITEMS)).select("z")
RECORDING: dict[str, Any] = {
    "ctx": lambda pipe: pipe.record_ctx().transform("x", jittered).select("x", return_ctx=True),
    "an entry": lambda pipe: pipe.record_ctx().transform("x", recorded).select("y ctx.seen"),
    "a function of the ctx": lambda pipe: pipe.transform("x", recorded).select("x ctx"),
    "a field": lambda pipe: pipe.record_ctx().add_field("z", lambda sample, rng: rng.random()).select("ctx z"),
    "another chain": lambda pipe: (
        pipe.record_ctx().transform("x", reading_twice).transform("x", views=[[repr], [jittered]])
    ).select("ctx.view_1 x ctx"),
    "global draws": lambda pipe: pipe.record_ctx().transform("x", lambda x: np.random.random()).select("x ctx"),
    "a frozen cache": lambda pipe: (
        pipe.record_ctx().transform("x", jittered).cache_in_memory(freeze_randomness=True).select("x ctx")
    ),
}


@pytest.mark.parametrize("name", RECORDING)
def test_a_ctx_is_that_of_single_samples(name: str) -> None:
    def build() -> Any:
        return RECORDING[name](kdp.from_dataset(ITEMS).permute(2))

    alone = in_batches(build, 1)
    for size in (4, 64):
        assert in_batches(build, size) == alone


def named_alike(x: Any) -> Any:
    return f"{x}!"


named_alike.__name__ = "jittered"  # so that the random function downstream is the second of its name
CACHES: dict[str, Any] = {
    "in memory": lambda pipe, folder: pipe.cache_in_memory(),
    "on disk": lambda pipe, folder: pipe.cache_on_disk(folder / "cache"),
    "frozen": lambda pipe, folder: pipe.transform("x", jittered).cache_in_memory(freeze_randomness=True),
    "mixed": lambda pipe, folder: pipe.mix([kdp.from_dataset(ITEMS)], weights=[0.5, 0.5]).cache_in_memory(),
    "recording": lambda pipe, folder: pipe.record_ctx().cache_in_memory(),
}


@pytest.mark.parametrize("name", CACHES)
def test_fields_after_a_cache_are_those_of_single_samples(name: str, tmp_path: Path) -> None:
    def build(folder: Path) -> Any:
        cached = CACHES[name](kdp.from_dataset(ITEMS).permute(1).transform("x", named_alike), folder)
        return cached.transform("x", jittered).subset(range(1, 50)).select("x y key index ordinal")

    alone = in_batches(lambda: build(tmp_path / "1"), 1, num_epochs=3)
    for size in (4, 64):
        assert in_batches(lambda size=size: build(tmp_path / str(size)), size, num_epochs=3) == alone


def test_a_damaged_entry_is_healed_while_many_are_read(made_at_once: Any, tmp_path: Path) -> None:
    cached = kdp.from_dataset(ITEMS).transform("x", named_alike).cache_on_disk(tmp_path, layout="files")
    dealt = cached.select("x y").deal(batch_size=25)
    expected = plain(dealt)
    (entry,) = (path for path in tmp_path.rglob("*") if path.is_file() and b"33!" in path.read_bytes())
    entry.write_bytes(entry.read_bytes().replace(b"33!", b"34!"))
    made_at_once()
    again = kdp.from_dataset(ITEMS).transform("x", named_alike).cache_on_disk(tmp_path, layout="files")
    assert plain(again.select("x y").deal(batch_size=25)) == expected
    assert made_at_once() == SIZE
    assert again.stats().healed == 1


@pytest.mark.parametrize("size", [4, 16, 300])
def test_bad_samples_are_left_out_and_called_once(size: int) -> None:
    called, noted = list[int](), list[int]()

    def reject(x: int, rng: np.random.Generator) -> int:
        called.append(x)
        if x in (33, 35):
            raise ValueError("odd")
        return x

    source = kdp.from_dataset(ITEMS).transform("x", lambda x, rng: noted.append(x) or x).transform("x", reject)
    pipe = source.on_error("skip").select("x", bare=True).deal(batch_size=size)
    with kdp.Loader(pipe) as loader:
        assert [x for batch in loader for x in batch] == [x for x in range(SIZE) if x not in (33, 35)]
        assert [skip["key"] for skip in loader.skipped] == ["33", "35"]
    assert sorted(called) == sorted(noted) == list(range(SIZE))


@pytest.mark.parametrize("size", [4, 16, 300])
def test_the_first_sample_that_fails_is_named(size: int) -> None:
    def reject(name: str, bad: int, x: Any) -> Any:
        if x == bad:
            raise ValueError(f"{name} is odd")
        return x

    source = kdp.from_dataset([(number, number) for number in range(SIZE)])
    for x, y, expected in ((33, 35, "x"), (35, 33, "y"), (33, 33, "x")):
        pipe = source.transform("x", partial(reject, "x", x)).transform("y", partial(reject, "y", y)).select("x y")
        with pytest.raises(ValueError, match=f"{expected} is odd") as caught:
            list(pipe.deal(batch_size=size))
        assert any("of sample '33'" in note for note in caught.value.__notes__)


def test_samples_in_quarantine_are_not_tried(made_at_once: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"key": "7", "error": "odd"}\n')
    pipe = kdp.from_dataset(ITEMS).on_error("quarantine", path=tmp_path / "bad.jsonl").select("x", bare=True)
    assert [x for batch in pipe.deal(batch_size=16) for x in batch] == [x for x in range(SIZE) if x != 7]
    assert made_at_once() == 0


def test_bytes_of_files_are_not_held_for_a_whole_batch() -> None:
    alive: list[int] = []

    class Bytes:
        num_alive = 0

        def __init__(self) -> None:
            Bytes.num_alive += 1
            alive.append(Bytes.num_alive)

        def __del__(self) -> None:
            Bytes.num_alive -= 1

    class Files(kdp.SampleSource):
        def __len__(self) -> int:
            return SIZE

        def getitem_x(self, index: int) -> Bytes:
            return Bytes()

    pipe = Files().transform("x", lambda x: 1).transform("x", lambda x: x + 1).select("x")
    assert list(pipe.deal(batch_size=SIZE)) == [[(2,)] * SIZE]
    assert max(alive) <= 17
    assert Bytes.num_alive == 0


def rejecting(y: str) -> str:
    if "3" in y:
        raise ValueError("odd")
    return y


def test_a_batch_leaves_no_circles_of_references() -> None:
    class Held:
        pass

    held = []

    def hold(x: int) -> Held:
        made = Held()
        held.append(weakref.ref(made))
        return made

    pipe = kdp.from_dataset(ITEMS).transform("x", hold).add_field("z", lambda sample: 1).select("x z")
    gc.disable()
    try:
        for _ in pipe.deal(batch_size=16):
            pass
        pipe[0], pipe.source[1]["x"]
        for chain in (kdp.from_dataset(ITEMS), IterableWrapper(ITEMS).to_samples(fields="x y", key=str)):
            failing = chain.transform("x", hold).transform("y", rejecting).on_error("skip", max_share=1.0).select("x y")
            for _ in failing.deal(batch_size=16):
                pass
        assert sum(each() is not None for each in held) <= 16  # of the last batch
        del _
        assert all(each() is None for each in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("is_dataset", [False, True])
def test_a_worker_that_dies_names_the_sample(is_dataset: bool) -> None:
    def die(x: int) -> int:
        if x == 33:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    class Deadly(Counted):
        def __getitem__(self, index: int) -> tuple[int, str]:
            return die(index), ""

    source = kdp.from_dataset(Deadly()) if is_dataset else kdp.from_dataset(ITEMS).transform("x", die)
    with (
        kdp.Loader(source.select("x").deal(batch_size=20), num_workers=1) as loader,
        pytest.raises(kdp.WorkerError, match="of sample '33'"),
    ):
        list(loader)


def test_the_order_is_elastic_and_resumable() -> None:
    chain = changes(kdp.from_dataset(Batched())).select("z key").deal(global_batch_size=12, uneven="pad")
    for check in (check_elastic, check_resumable, check_exactly_once):
        check(chain)


def test_a_hugging_face_dataset_is_read_at_once(made_at_once: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": [x for x, _ in ITEMS], "y": [y for _, y in ITEMS]})
    pipe = kdp.from_dataset(dataset, "x y").select("x y").deal(batch_size=10)
    assert [item for batch in pipe for item in batch] == ITEMS
    assert made_at_once() == SIZE


def images(kind: str, photo_folder: Path, photo_shards: str) -> Any:
    if kind == "image_folder":
        return kdp.image_folder(photo_folder)
    if kind == "from_ids":
        paths = sorted(map(str, photo_folder.rglob("*.jpg")))
        return kdp.from_ids(paths, labels=[path.split("/")[-2] for path in paths])
    return kdp.open_shards(photo_shards).rename_fields(x="jpg", y="cls")


def cropped(pipe: Any) -> Any:
    pipe = pipe.permute(5).decode_images("x").transform("x", kdp.RandomResizedCrop(32), kdp.HorizontalFlip())
    return pipe.transform("x", kdp.ToTensor(), kdp.HorizontalFlip()).select("x y key index ordinal is_padding")


@pytest.mark.parametrize("kind", ["image_folder", "from_ids", "open_shards"])
def test_images_are_those_of_single_samples(kind: str, photo_folder: Path, photo_shards: str) -> None:
    def items(size: int) -> Any:
        pipe = cropped(images(kind, photo_folder, photo_shards)).deal(batch_size=size, shuffle=True)
        return [item for _ in range(2) for batch in pipe for item in batch]

    for one, other in zip(items(1), items(32), strict=True):
        assert torch.equal(one[0], other[0])
        assert str(one[1:]) == str(other[1:])


def test_images_that_no_transform_decodes_keep_their_names(tmp_path: Path, photo_folder: Path) -> None:
    (tmp_path / "cat").mkdir()
    for number in range(20):
        content = next(photo_folder.rglob("*.jpg")).read_bytes()
        (tmp_path / "cat" / f"{number:02}.jpg").write_bytes(content[:2000] if number == 15 else content)
    pipe = kdp.image_folder(tmp_path).decode_images("x").select("x y").deal(batch_size=20)
    ((image, _),) = [item for batch in pipe for item in batch][15:16]
    with pytest.raises(kdp.DataError, match=r"cat/15\.jpg"):
        image.to_pil()


def test_a_broken_image_is_left_out(tmp_path: Path, photo_folder: Path) -> None:
    (tmp_path / "cat").mkdir()
    for number in range(20):
        content = next(photo_folder.rglob("*.jpg")).read_bytes()
        (tmp_path / "cat" / f"{number:02}.jpg").write_bytes(b"no image" if number == 15 else content)
    pipe = kdp.image_folder(tmp_path).decode_images("x").transform("x", kdp.Resize((8, 8)))
    with pytest.raises(kdp.DataError, match=r"cat/15\.jpg"):
        list(pipe.select("x").deal(batch_size=20))
    with kdp.Loader(pipe.on_error("skip").select("x y").deal(batch_size=20)) as loader:
        assert [len(batch) for batch in loader] == [19]
        assert [skip["key"] for skip in loader.skipped] == ["cat/15.jpg"]


def test_samples_without_a_member_are_errors_that_name_them(tmp_path: Path) -> None:
    samples = [{"x": "text", "y": 0} for number in range(20)]
    kdp.write_shards(kdp.from_dataset(samples), str(tmp_path / "a-%06d.tar"), max_samples=20)
    samples = [{"y": 0} for number in range(20)]
    kdp.write_shards(kdp.from_dataset(samples, "y"), str(tmp_path / "b-%06d.tar"), max_samples=20)
    pipe = kdp.open_shards(str(tmp_path / "*.tar"))
    with pytest.raises(kdp.DataError, match=r"'b-000000\.tar/0' .*has no member"):
        list(pipe.select("txt").deal(batch_size=20))
    assert sum(map(len, pipe.on_error("skip", max_share=0.9).select("txt").deal(batch_size=20))) == 20


def one_by_one(pipe: Any) -> list[Any]:
    return [pipe[number] for number in range(len(pipe))]


@pytest.mark.parametrize(
    "make",
    [
        lambda pipe: pipe.select("a=x b=x", as_dict=True),
        lambda pipe: pipe.select("x x y x"),
        lambda pipe: pipe.rename_fields(a="x", b="x").transform("b", abs).select("a b y"),
        lambda pipe: pipe.rename_fields(a="x", b="x", c="y").select("c b a b"),
        lambda pipe: pipe.select("key key index index ordinal ordinal"),
    ],
)
def test_a_field_that_is_read_several_times_has_one_value(make: Any) -> None:
    pipe = make(kdp.from_dataset(ITEMS).transform("x", lambda x: 100 * x))
    assert next(iter(pipe.deal(batch_size=SIZE))) == one_by_one(pipe)


@pytest.mark.parametrize("name", ["key", "index", "ordinal", "is_padding"])
@pytest.mark.parametrize(
    "make",
    [
        lambda pipe, name: pipe.select(f"x {name}"),
        lambda pipe, name: pipe.rename_fields(own=name).select(f"own {name}"),
        lambda pipe, name: pipe.rename_fields(own=name).transform("x", abs).permute(1).select(f"own x {name}"),
        lambda pipe, name: pipe.rename_fields(**{name: "x", "own": name}).select(f"own {name}"),
        lambda pipe, name: pipe.rename_fields(own=name).rename_fields(**{name: "own"}).select(f"x {name}"),
        lambda pipe, name: pipe.transform(name, str.upper).select(f"x {name}"),
    ],
)
def test_a_field_named_like_a_property_of_samples_can_be_renamed(make: Any, name: str) -> None:
    pipe = make(kdp.from_dataset(ITEMS, f"x {name}"), name)
    assert next(iter(pipe.deal(batch_size=SIZE))) == one_by_one(pipe)
