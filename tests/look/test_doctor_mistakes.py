"""`doctor` finds each mistake that would spoil training without a message, and leaves sound chains alone."""

from __future__ import annotations

import ast
import random
import re
import sqlite3
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.chain import Chain
from kdpipes.demo import write_photo_shards
from kdpipes.look.doctor.data import turned_photos, wide_pixels
from kdpipes.look.doctor.rules import Facts
from kdpipes.work.decode import ImageDecoder
from tests.faulty_storage import faulty_storage
from tests.look.test_doctor import jitter
from tests.pictures import file_of

STOCK = "ignore:(Lambda|Local) function is not supported:UserWarning"


def numbers() -> Any:
    return kdp.from_dataset([(number, number % 4) for number in range(64)])


def findings(pipe: Any) -> list[Any]:
    return list(kdp.doctor(pipe, measure=False, num_workers=0).findings)


def found(pipe: Any) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in findings(pipe)]


def test_the_documentation_names_every_finding() -> None:
    root = Path(kdp.__file__).parent
    modules = map(ast.parse, (path.read_text() for path in (root / "look/doctor").glob("*.py")))
    constants = [node.value for module in modules for node in ast.walk(module) if isinstance(node, ast.Constant)]
    codes = {text for text in constants if isinstance(text, str) and re.fullmatch("[a-z]+(-[a-z]+)+", text)}
    page = (root.parent / "docs/looking.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == codes | {"empty", "unpicklable"}


# Ranks and epochs


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the variables that torchrun sets."""

    def set_to(rank: str | None, num_ranks: str | None) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", num_ranks)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.filterwarnings("ignore:The environment has")
@pytest.mark.parametrize("named", [("1", None), ("0", None), (None, "2"), ("2", "2"), ("one", "2")])
def test_an_environment_that_names_no_rank_is_found(ranks: Any, named: tuple[str | None, str | None]) -> None:
    ranks(*named)
    (finding,) = findings(numbers().select("x").deal(batch_size=8))
    assert (finding.code, finding.severity) == ("unclear-rank", "warning")
    assert "number of ranks" in finding.what
    assert found(numbers().select("x").deal(batch_size=8, ranks=1)) == []


@pytest.mark.parametrize("named", [(None, None), ("0", "1"), (None, "1"), ("1", "2")])
def test_an_environment_that_names_a_rank_is_fine(ranks: Any, named: tuple[str | None, str | None]) -> None:
    ranks(*named)
    assert found(numbers().select("x").deal(batch_size=8)) == []


def test_all_batches_for_each_rank_are_found(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = numbers().select("x").deal(batch_size=8, ranks=1)
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    assert found(chain) == []
    ranks("1", "2")
    assert found(chain) == [("same-batches", "warning")]
    assert found(numbers().select("x").deal(batch_size=8)) == []
    monkeypatch.setitem(sys.modules, "accelerate", torch)  # anything: it may be what hands the batches out
    assert found(chain) == []


def test_equal_epochs_of_an_indexed_chain_are_named() -> None:
    for chain, name in (
        (numbers().transform("x", jitter), "`jitter`"),
        (numbers().sample_weighted({0: 1, 1: 2, 2: 1, 3: 1}), "`sample_weighted`"),
    ):
        (finding,) = findings(chain.select("x"))
        assert (finding.code, finding.severity) == ("no-deal", "hint")
        assert f"{name} draws the same in every epoch" in finding.why
        assert "chain.set_epoch(epoch)" in finding.fix
    frozen = numbers().transform("x", jitter).cache_in_memory(freeze_randomness=True)
    for chain in (numbers(), frozen):
        (finding,) = [one for one in findings(chain.select("x")) if one.code == "no-deal"]
        assert "epoch" not in finding.why


# Random numbers


def half(item: Any) -> bool:
    return random.random() < 0.5


def nearly_all(item: Any) -> bool:
    return torch.rand(()).item() >= 0


def seeds_itself(item: Any) -> bool:
    random.seed(item[0])
    return random.random() < 2


@pytest.mark.parametrize("draws", [half, nearly_all])
def test_unseeded_numbers_of_a_stock_pipe_are_found(draws: Any) -> None:
    items = [(number, 0) for number in range(64)]
    chain = IterableWrapper(items).filter(draws).to_samples(fields="x y").map(tuple).to_samples(fields="x y")
    (finding,) = findings(chain.select("x").deal(batch_size=8))
    assert (finding.code, finding.severity, finding.pipe) == ("unrecorded-randomness", "warning", "filter")
    assert "`.filter()`" in finding.fix


def test_numbers_that_a_function_seeds_itself_are_fine() -> None:
    chain = IterableWrapper([(number, 0) for number in range(64)]).filter(seeds_itself).to_samples(fields="x y")
    assert found(chain.select("x").deal(batch_size=8)) == []


def rotated(image: Any, rng: np.random.Generator) -> Any:
    return image.rotate(int(rng.integers(90)))


def pairs(fields: str = "image mask") -> Any:
    return kdp.from_dataset([(Image.new("RGB", (9, 9)), Image.new("L", (9, 9)))] * 8, fields)


def ends(chain: Any, fields: str = "image mask") -> Any:
    return chain.select(fields).deal(batch_size=2)


def test_an_image_and_a_mask_that_draw_apart_are_found() -> None:
    crop, colors = kdp.RandomResizedCrop(4), kdp.ColorJitter(0.1)
    for chain in (
        pairs().transform("image", crop).transform("mask", crop),
        pairs().transform("image", colors, crop).transform("mask", crop),
        pairs().transform("image", rotated).transform("mask", rotated),
    ):
        (finding,) = findings(ends(chain))
        assert (finding.code, finding.severity, finding.pipe) == ("drawn-apart", "warning", "transform")
        assert "two transforms" in finding.what
        assert '`.transform("image mask", ...)`' in finding.fix
    for chain in (pairs().transform("image mask", crop), pairs().transform("image", colors)):
        assert found(ends(chain)) == []


def test_a_mask_that_stays_as_its_image_moves_is_found() -> None:
    A = pytest.importorskip("albumentations")
    crop, small = kdp.RandomResizedCrop(4), kdp.Resize((4, 4))
    for chain in (
        pairs().transform("image", crop).transform("mask", small),
        pairs().transform("image mask", small).transform("image", kdp.HorizontalFlip()),
        pairs().transform("image", A.Compose([A.RandomBrightnessContrast(), A.HorizontalFlip()])),
        pairs().transform("image", views=[[crop], [small]]),
    ):
        (finding,) = findings(ends(chain))
        assert (finding.code, finding.severity, finding.pipe) == ("drawn-apart", "warning", "transform")
        assert "moves the pixels of field 'image' at random, and field 'mask' stays" in finding.what


def test_images_that_move_without_belonging_fields_are_fine() -> None:
    A = pytest.importorskip("albumentations")
    crop = kdp.RandomResizedCrop(4)
    both = pairs().transform("image mask", kdp.Resize((4, 4)))
    assert found(ends(both.transform("image", A.Compose([A.CenterCrop(4, 4), A.RGBShift()])))) == []
    assert found(ends(pairs().transform("image", crop), "image")) == [], "the mask is not selected"
    assert found(ends(pairs("image other").transform("image", crop), "image other")) == []
    assert found(ends(pairs().record_ctx().transform("image", crop), "image mask ctx")) == [], "its ctx tells how"
    stream = IterableWrapper([(Image.new("RGB", (9, 9)), 0)] * 8).to_samples(fields="image y").shuffle()
    for source in (pairs("image other"), stream.transform("y", abs)):
        made = source.transform("image", crop).add_field("mask", lambda sample: 1)
        assert found(ends(made)) == [], "it is made of what was cropped"


# Labels and data


def test_labels_that_are_text_are_found() -> None:
    text = kdp.from_dataset([(number, "ab"[number % 2]) for number in range(16)])
    for chain in (
        text.select("x y").deal(batch_size=4),
        text.select("x y").deal(batch_size=4).collate_samples(),
        text.select("x labels=y", as_dict=True).deal(batch_size=4).collate_samples(),
        text.select("y", bare=True).deal(batch_size=4).collate_samples(),
        text.record_ctx().select("x y", return_ctx=True).deal(batch_size=4).collate_samples(),
        text.rename_fields(label="y").select("label").deal(batch_size=4),
    ):
        (finding,) = findings(chain)
        assert (finding.code, finding.severity, finding.pipe) == ("text-labels", "warning", "select")
        assert ".map_classes({'a': 0, 'b': 1}, class_names=[...])" in finding.fix


def lengths(batch: Any) -> Any:
    return torch.tensor([len(label) for label in batch[1]])


@pytest.mark.filterwarnings(STOCK)
def test_labels_that_are_numbers_and_captions_are_fine() -> None:
    text = [(number, "ab"[number % 2]) for number in range(16)]
    named = kdp.from_dataset(text, class_names=["a", "b"])
    mapped = kdp.from_dataset(text).map_classes({"a": 0, "b": 1}, class_names=["a", "b"])
    captions = kdp.from_dataset([(number, f"number {number}") for number in range(16)])
    for source in (named, mapped, captions):
        assert found(source.select("x y").deal(batch_size=4).collate_samples()) == []
    encoded = kdp.from_dataset(text).select("x y").deal(batch_size=4).collate_samples().map(lengths)
    assert found(encoded) == []
    assert found(kdp.from_dataset(text).select("x").deal(batch_size=4)) == []


def test_numbered_classes_without_names_are_found() -> None:
    pets = kdp.from_dataset([(0, n % 2) for n in range(8)], class_names=["cat", "dog"])
    (finding,) = findings(pets.map_classes({"cat": 3, "dog": 0}).select("y").deal(batch_size=4))
    assert (finding.code, finding.severity, finding.pipe) == ("unnamed-classes", "hint", "map_classes")
    assert "`class_names=[...]`" in finding.fix
    for chain in (
        pets.map_classes({"cat": 1, "dog": 0}, class_names=["dog", "cat"]),
        pets.map_classes({"cat": "animal"}, unmapped="drop"),
        numbers().map_classes({0: 1}, unmapped="drop"),
    ):
        assert found(chain.select("y").deal(batch_size=4)) == []


def nothing(item: Any) -> None:
    return None


@pytest.mark.filterwarnings(STOCK)
@pytest.mark.filterwarnings("ignore:The chain yields None")
def test_functions_that_return_none_are_found() -> None:
    batches = numbers().select("x").deal(batch_size=4)
    (finding,) = findings(batches.map(nothing))
    assert (finding.code, finding.severity, finding.pipe) == ("nothing-made", "error", "map")
    assert found(numbers().select("x").map(nothing).deal(batch_size=4)) == [("nothing-made", "error")]
    empty = numbers().add_field("z", nothing).select("x z").deal(batch_size=4)
    for chain in (empty, empty.collate_samples()):
        (finding,) = findings(chain)
        assert (finding.code, finding.severity, finding.pipe) == ("nothing-made", "warning", "add_field")
        assert "Field 'z' is None" in finding.what
    lost = numbers().transform("x", nothing).select("x").deal(batch_size=4)
    (finding,) = findings(lost)
    assert (finding.code, finding.severity) == ("cannot-load", "error")
    assert "`nothing` must return the new value, but returned None" in finding.what
    some = numbers().add_field("z", lambda sample: sample["x"] or None).select("x z").deal(batch_size=4)
    unlabeled = kdp.from_dataset([(number, None) for number in range(8)]).select("x y").deal(batch_size=4)
    assert found(some) == found(unlabeled) == []


def noise(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 255, (4, 4, 3)).astype(np.uint8)


def blank(image: Any) -> Any:
    return torch.zeros(3, 4, 4)


def test_a_transform_that_gives_one_image_for_all_is_found() -> None:
    images = kdp.from_dataset([noise(number) for number in range(16)], "x")
    for chain in (images.transform("x", blank), images.transform("x", blank, kdp.Normalize([0.5], [0.5]))):
        for end in (chain.select("x").deal(batch_size=8), chain.select("x").deal(batch_size=8).collate_samples()):
            (finding,) = findings(end)
            assert (finding.code, finding.severity, finding.pipe) == ("equal-images", "warning", "transform")
    vectors = kdp.from_dataset([np.arange(3) + number for number in range(16)], "x")
    constant = vectors.transform("x", lambda x: np.zeros(3)).select("x").deal(batch_size=8)
    assert found(constant) == found(constant.collate_samples()) == [("equal-images", "warning")]
    assert found(vectors.transform("x", lambda x: float(x.sum() > 0)).select("x").deal(batch_size=8)) == []
    equal = kdp.from_dataset([noise(0)] * 16, "x")
    for chain in (images.transform("x", kdp.ToTensor()), equal.transform("x", blank), images):
        assert found(chain.select("x").deal(batch_size=8).collate_samples()) == []
    masks = kdp.from_dataset([noise(number) for number in range(16)], "mask").transform("mask", blank)
    assert found(masks.select("mask").deal(batch_size=8)) == [], "small crops of masks may well be empty"


def image_files(images: Sequence[Any], kind: str = "PNG", **options: Any) -> list[bytes]:
    files = []
    for image in images:
        files.append(file_of(image, kind, **options))
    return files


def images(files: list[bytes], field: str = "x", **options: Any) -> Any:
    return kdp.from_dataset(files, field).decode_images(field, **options).select(field).deal(batch_size=2)


def test_images_that_their_mode_cannot_hold_are_found() -> None:
    photos = [Image.new("RGB", (4, 4))] * 7
    for wide, kept in ((np.uint16([[3]]), "I;16"), (np.float32([[0.5]]), "F")):
        files = [*image_files(photos, "TIFF"), *image_files([Image.fromarray(wide)], "TIFF")]
        (finding,) = findings(images(files))
        assert (finding.code, finding.severity, finding.pipe) == ("wide-pixels", "warning", "decode_images")
        assert f'mode="{kept}"' in finding.fix
        assert found(images(files[-1:], mode=kept)) == []
    assert found(images(image_files(photos))) == []


def test_masks_that_are_decoded_to_colours_are_found() -> None:
    mask = Image.new("P", (4, 4), 2)
    mask.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
    files = image_files([mask] * 2)
    for mode in ("RGB", "L"):
        (finding,) = findings(images(files, "mask", mode=mode))
        assert (finding.code, finding.severity, finding.pipe) == ("mask-as-colors", "warning", "decode_images")
        assert '`.decode_images("mask", mode="P")`' in finding.fix
    assert found(images(files, "mask")) == found(images(files, "mask", mode="P")) == []
    assert found(images(files, "x")) == [], "a photo with a palette is shown by its colors"
    assert found(images(image_files([Image.new("RGB", (4, 4))]), "mask", mode="RGB")) == []


def test_photos_that_lie_on_their_side_are_found() -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    files = image_files([Image.new("RGB", (4, 2))] * 2, "JPEG", exif=tags)
    (finding,) = findings(images(files))
    assert (finding.code, finding.severity, finding.pipe) == ("turned-photos", "hint", "decode_images")
    assert '`.decode_images("x", exif=True)`' in finding.fix
    upright = image_files([Image.new("RGB", (4, 2))] * 2, "JPEG")
    for chain in (images(files, exif=True), images(upright)):
        assert findings(chain) == []


def test_headers_of_few_images_are_read_from_all_over_the_source() -> None:
    class Files(kdp.SampleSource):
        read: list[int] = []

        def __len__(self) -> int:
            return 1000

        def getitem_x(self, index: int) -> bytes:
            self.read.append(index)
            return b"no image"

    chain = kdp.from_dataset(Files()).decode_images("x")
    facts = Facts(num_workers=0, num_cpus=1, shm_free=None, fast_decoders=())
    assert list(wide_pixels(Chain.of(chain), facts)) == list(turned_photos(Chain.of(chain), facts)) == []
    assert isinstance(chain.operation, ImageDecoder)
    assert len(Files.read) == 16
    assert {0, 999} <= set(Files.read)


def write_tar(path: Path, names: list[str]) -> str:
    with tarfile.open(path, "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return str(path)


@pytest.mark.filterwarnings("ignore:Sample .* looks like:UserWarning")
@pytest.mark.parametrize("read", [kdp.open_shards, kdp.stream_shards])
def test_samples_that_dots_have_merged_are_found(tmp_path: Path, read: Any) -> None:
    merged = [f"img.{number}.{end}" for number in range(6) for end in ("jpg", "txt")]
    plain = [name.replace(".", "_", 1) for name in merged]
    for names, codes in ((merged, [("merged-samples", "warning")]), (plain, [])):
        chain = read(write_tar(tmp_path / f"{len(codes)}.tar", names)).select("key").deal(batch_size=2)
        assert found(chain) == codes
        assert all("write the shards" in each.fix.lower() for each in findings(chain))


@pytest.mark.parametrize("shuffles", [False, True])
def test_mistakes_in_streams_are_found(shuffles: bool) -> None:
    mask = Image.new("P", (4, 4), 2)
    mask.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
    items = [(mask, content, "ab"[number % 2]) for number, content in enumerate(image_files([mask] * 8))]
    stream = IterableWrapper(items).to_samples(fields="image mask y", class_names=["a", "b"])

    def shuffled(chain: Any) -> Any:
        return chain.shuffle() if shuffles else chain

    wrong = shuffled(shuffled(stream.map_classes({"a": 0, "b": 1})).decode_images("mask", mode="RGB"))
    wrong = shuffled(wrong.transform("image", kdp.RandomResizedCrop(4)).add_field("label", named))
    codes = {code for code, _ in found(wrong.select("image mask label").deal(batch_size=4))}
    assert codes == {"mask-as-colors", "drawn-apart", "unnamed-classes", "text-labels"}
    right = shuffled(shuffled(stream).decode_images("mask", mode="P"))
    right = shuffled(right.transform("image mask", kdp.RandomResizedCrop(4)))
    assert found(right.select("image mask y").deal(batch_size=4)) == []


def named(sample: Any) -> str:
    return "ab"[sample["y"]]


# Caches and errors


@pytest.mark.filterwarnings("ignore:Functions upstream of a cache read:UserWarning")
def test_a_cache_that_cannot_follow_a_function_is_found(tmp_path: Path) -> None:
    database = sqlite3.connect(":memory:")
    namespace: dict[str, Any] = {"database": database, "__name__": "__main__"}
    exec("def looked_up(x):\n    return x if database else 0", namespace)
    work = numbers().transform("x", namespace["looked_up"])
    chains = [work.cache_on_disk(tmp_path / name, **given) for name, given in (("a", {}), ("b", {"version": 1}))]
    codes = [found(chain.select("x").deal(batch_size=8)) for chain in (*chains, work.cache_in_memory())]
    database.close()
    assert [("unhashed-globals", "warning") in each for each in codes] == [True, False, False]
    plain = numbers().transform("x", float).cache_on_disk(tmp_path / "c")
    assert found(plain.select("x").deal(batch_size=8)) == []


def test_any_number_of_errors_is_found() -> None:
    def chain(**limits: Any) -> Any:
        return numbers().transform("x", float).on_error("skip", **limits).select("x").deal(batch_size=8)

    (finding,) = findings(chain(max_share=1))
    assert (finding.code, finding.severity, finding.pipe) == ("unlimited-errors", "hint", "on_error")
    for limits in ({}, {"max_share": 0.5}, {"max_share": 1, "max_samples": 9}):
        assert found(chain(**limits)) == []


def test_a_cache_that_freezes_augmentation_is_found() -> None:
    chain = numbers().transform("x", jitter)
    frozen = chain.cache_in_memory(freeze_randomness=True).select("x").deal(batch_size=8, shuffle=True)
    (finding,) = findings(frozen)
    assert (finding.code, finding.severity, finding.pipe) == ("frozen-augmentation", "hint", "cache_in_memory")
    assert "put the cache before `jitter`" in finding.fix
    plain = numbers().transform("x", float).cache_in_memory(freeze_randomness=True)
    assert found(plain.select("x").deal(batch_size=8)) == [], "nothing is random"


def large(x: int) -> bytes:
    return bytes(100_000)


@pytest.mark.filterwarnings("ignore:The cache in .*it is full:UserWarning")
def test_a_cache_that_holds_nothing_is_found() -> None:
    for chain in (numbers().cache_in_memory(), numbers().transform("x", large).cache_in_memory(max_bytes=65536)):
        (finding,) = findings(chain.select("x").deal(batch_size=8))
        assert (finding.code, finding.severity, finding.pipe) == ("empty-cache", "warning", "cache_in_memory")
        assert "before it" in finding.fix
    assert found(numbers().transform("x", float).cache_in_memory().select("x").deal(batch_size=8)) == []


def test_remote_shards_that_are_read_twice_are_found(tmp_path: Path) -> None:
    expected = {"auto": [("unindexed-shards", "hint")], "shards": [], "members": [("unindexed-shards", "hint")]}
    with faulty_storage(str(tmp_path)):
        for fetch, codes in expected.items():
            write_photo_shards(tmp_path / fetch)
            urls = f"faulty://{fetch}/photos-{{000..003}}.tar"
            assert found(kdp.open_shards(urls, fetch=fetch).select("key").deal(batch_size=8)) == codes
            assert found(kdp.open_shards(urls, fetch=fetch).select("key").deal(batch_size=8)) == [], "now it has one"
    local = kdp.open_shards(write_photo_shards(tmp_path / "local"))
    assert found(local.select("key").deal(batch_size=8)) == []


def test_a_shuffle_that_leaves_neighbours_together_is_found(tmp_path: Path) -> None:
    source = kdp.from_dataset([str(number) for number in range(1024)], "txt")
    kdp.write_shards(source, f"{tmp_path}/n-%06d.tar", max_samples=64)
    shards = kdp.open_shards(f"{tmp_path}/n-*.tar").select("key")
    (finding,) = findings(shards.deal(batch_size=8, shuffle=kdp.by_shard(window=8)))
    assert (finding.code, finding.severity, finding.pipe) == ("weak-shuffle", "warning", "deal")
    for whole in (
        shards.deal(batch_size=8, shuffle=True),
        shards.deal(batch_size=8, shuffle=kdp.by_shard(window=1024)),
    ):
        assert found(whole) == []


def label_of(sample: Any) -> int:
    return int(sample["cls"]) % 2


def test_labels_computed_from_a_remote_source_are_found(photo_shards: str) -> None:
    with faulty_storage(str(Path(photo_shards).parent)):
        remote = kdp.open_shards("faulty://photos-{000..003}.tar")
        local = kdp.open_shards(photo_shards)
        chains = [source.add_field("y", label_of).filter_classes(valid=[0, 1]) for source in (remote, local)]
        plain = remote.rename_fields(y="cls").oversample()
        len(remote)  # makes the index, whose lack is a finding of its own
        codes = [found(chain.select("key").deal(batch_size=8)) for chain in (*chains, plain)]
    assert codes == [[("computed-labels", "warning")], [], []]
