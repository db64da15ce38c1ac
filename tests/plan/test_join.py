"""`join`: fields of another source by key; what is missing, what is ambiguous, and what stays lazy."""

from __future__ import annotations

import io
import json
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdpipes as kdp
from kdpipes.core.map_pipe import shard_numbers_of


def keyed(keys: list[str], field: str) -> kdp.MapPipe:
    values = kdp.from_dataset([f"{field} of {key}" for key in keys], field)
    return values.to_samples(key=lambda sample: keys[sample.index])


@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True),
    st.lists(st.sampled_from("abcdefgh"), unique=True),
    st.sampled_from(["inner", "left"]),
)
def test_it_is_a_loop_over_a_dictionary(left: list[str], right: list[str], how: Any) -> None:
    if how == "inner" and left and right and not set(left) & set(right):
        with pytest.raises(kdp.DataError, match="finds no common key: those of the source are like"):
            len(keyed(left, "x").join(keyed(right, "caption"), fields="caption"))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joined = keyed(left, "x").join(keyed(right, "caption"), how=how, fields="caption")
        found = [(sample.key, sample["x"], sample["caption"]) for sample in joined] if len(joined) else []
    expected = [
        (key, f"x of {key}", f"caption of {key}" if key in right else None)
        for key in left
        if key in right or how == "left"
    ]
    if right or how == "inner":
        assert found == expected


def shards(folder: Path, stem: str, extension: str, keys: list[str]) -> str:
    for number in range(2):
        with tarfile.open(folder / f"{stem}-{number}.tar", "w") as archive:
            for key in keys[number::2]:
                content = json.dumps({"of": key}).encode()
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return str(folder / f"{stem}-{{0..1}}.tar")


def test_shards_join_shards_whose_samples_lie_elsewhere(tmp_path: Path) -> None:
    images = kdp.open_shards(shards(tmp_path, "images", "json", ["a", "b", "c", "d"])).rename_fields(x="json")
    latents = kdp.open_shards(shards(tmp_path, "latents", "json", ["d", "c", "b", "a"])).rename_fields(latent="json")
    joined = images.join(latents)
    assert [sample["x"] == sample["latent"] for sample in joined] == [True] * 4
    assert shard_numbers_of(joined) is not None
    batches = joined.select("x latent").deal(batch_size=2, shuffle="shards", seed=1)
    with kdp.Loader(batches, num_workers=2) as loader:
        assert all(x == latent for batch in loader for x, latent in batch)


def test_missing_keys_are_counted_and_named() -> None:
    images, captions = keyed(list("abcdefgh"), "x"), keyed(["b"], "caption")
    with pytest.warns(UserWarning, match=r"leaves out 7 of 8 samples.*: 'a', 'c', 'd', 'e', 'f', \.\.\."):
        assert len(images.join(captions)) == 1


def test_a_key_that_occurs_twice_is_an_error() -> None:
    with pytest.raises(kdp.DataError, match=r"but its keys 'b/1\.txt' and 'b/1\.json' both match"):
        len(keyed(["b/1.jpg"], "x").join(keyed(["b/1.txt", "b/1.json"], "caption")))


def test_on_says_what_of_a_key_counts() -> None:
    images, captions = keyed(["left/1.jpg", "left/2.jpg"], "x"), keyed(["right/2.txt", "right/1.txt"], "caption")
    joined = images.join(captions, on=lambda key: key.split("/")[1].split(".")[0])
    assert joined.column("caption").tolist() == ["caption of right/1.txt", "caption of right/2.txt"]


def test_fields_of_the_same_name_are_an_error_with_a_hint() -> None:
    one, other = kdp.from_dataset([1, 2], "x"), kdp.from_dataset([3, 4], "x")
    with pytest.raises(kdp.ChainError, match=r"have a field 'x'.*rename_fields\(other_x='x'\)"):
        one.join(other)
    with pytest.raises(kdp.FieldError, match="has no field 'z'"):
        one.join(other, fields="z")


def test_a_field_is_loaded_when_it_is_read_and_no_earlier() -> None:
    class Latents(kdp.SampleSource):
        def __len__(self) -> int:
            return 3

        def getitem_latent(self, index: int) -> Any:
            raise AssertionError("a latent was loaded")

        def getitem_length(self, index: int) -> int:
            return index

    joined = kdp.from_dataset(["a", "b", "c"], "x").join(Latents())
    assert (joined[1]["x"], joined[1]["length"]) == ("b", 1)
    assert joined.column("length").tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match="a latent was loaded"):
        joined[1]["latent"]


def test_plans_follow_and_both_sources_draw_the_same_crop() -> None:
    def crop(x: Any, rng: np.random.Generator) -> Any:
        return (x, int(rng.integers(1000)))

    images, masks = kdp.from_dataset(list("abcd"), "x", labels=[0, 1, 0, 1]), kdp.from_dataset(list("ABCD"), "mask")
    joined = images.join(masks).filter_classes(valid=[1]).transform("x", crop).select("x mask")
    assert [(x[0], mask) for x, mask in joined] == [("b", "B"), ("d", "D")]
    cropped = (
        kdp.from_dataset(list("abcd"), "x")
        .transform("x", crop)
        .join(kdp.from_dataset(list("ABCD"), "mask").transform("mask", crop))
    )
    batches = list(cropped.select("x mask").deal(batch_size=4, shuffle=True))
    assert all(x[1] == mask[1] and x[0].upper() == mask[0] for x, mask in batches[0])


def shout(text: Any) -> str:
    return str(text).upper()


@pytest.mark.parametrize("cut", [lambda pipe: pipe, lambda pipe: kdp.concat(pipe, pipe), lambda pipe: pipe[::-1]])
def test_a_cache_keeps_the_fields_of_both_sources(tmp_path: Path, cut: Any) -> None:
    def chain(caption: Any = str) -> Any:
        captions = kdp.from_dataset(["a heron", "a stork"], "caption").transform("caption", caption)
        images = kdp.from_dataset(["image 0", "image 1", "image 2"], "x").transform("x", shout)
        joined = cut(images.join(captions, how="left")).transform("caption", str)
        return joined.cache_on_disk(tmp_path / "cache", version=1)

    expected = [(sample["x"], sample["caption"]) for sample in chain()]
    assert ("IMAGE 1", "a stork") in expected
    first = chain()
    assert [(sample["x"], sample["caption"]) for sample in first] == expected
    assert (first.stats().hits > 0, first.stats().misses) == (True, 0)
    changed = chain(shout)
    assert ("IMAGE 1", "A STORK") in [(sample["x"], sample["caption"]) for sample in changed]
    assert changed.stats().misses > 0


def test_a_cache_notices_another_partner(tmp_path: Path) -> None:
    for name, found in [("a", "photo of a"), ("b", "photo of b"), ("a", "photo of a")]:
        other = keyed(["a", "b"], "photo")
        joined = keyed(["c"], "x").join(other, on=lambda key, name=name: name if key == "c" else key)
        cached = joined.transform("photo", str).cache_on_disk(tmp_path / "cache", version=1)
        assert [sample["photo"] for sample in cached] == [found]


@pytest.mark.parametrize("step", [lambda other: other, lambda other: other.transform("w", abs)])
def test_a_cache_reads_the_partner_and_not_its_neighbor(step: Any) -> None:
    for weights in ([20, 10], [21, 11]):
        other = step(kdp.from_table({"id": ["b", "a"], "w": weights}, key="id", columns=["w"]))
        pipe = kdp.from_ids(["a", "b"], load=str).join(other).add_field("z", lambda sample: sample["w"])
        assert [sample["z"] for sample in pipe.cache_in_memory()] == weights[::-1]
