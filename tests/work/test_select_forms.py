"""Dictionaries and bare values of `select` in all that reads items and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kdpipes as kdp
from kdpipes.demo import write_photo_folder


class Shift:
    """Adds a recorded number."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"by": int(rng.integers(1, 100))}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        return value + params["by"]


def numbers(**options: Any) -> Any:
    rows = [(torch.full((n + 1,), float(n)), n % 3) for n in range(10)]
    return kdp.from_dataset(rows).record_ctx().transform("x", Shift()).select(**options)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("photos")
    write_photo_folder(folder)
    return kdp.image_folder(folder).decode_images("x").record_ctx().transform("x", kdp.RandomResizedCrop(16))


def test_dictionaries_become_a_dictionary_of_batches() -> None:
    tuples = numbers(mode="x y").deal(batch_size=4).collate_samples(pad={"x": -1})
    named = numbers(mode="values=x labels=y", as_dict=True).deal(batch_size=4).collate_samples(pad={"values": -1})
    for (x, y), batch in zip(tuples, named, strict=True):
        assert list(batch) == ["values", "labels"]
        assert torch.equal(batch["values"], x)
        assert torch.equal(batch["labels"], y)
    with pytest.raises(kdp.DataError, match=r"Field 'values' has different shapes.*pad=\{\"values\": 0\}"):
        next(iter(numbers(mode="values=x", as_dict=True).deal(batch_size=4).collate_samples()))
    with pytest.raises(ValueError, match="`pad` must be for the fields values, but is 'x' instead"):
        numbers(mode="values=x", as_dict=True).deal(batch_size=4).collate_samples(pad={"x": 0})


def test_bare_values_become_one_batch() -> None:
    pipe = numbers(mode="x", bare=True).deal(batch_size=4)
    (x,) = next(iter(numbers(mode="x").deal(batch_size=4).collate_samples(pad={"x": -1})))
    assert torch.equal(next(iter(pipe.collate_samples(pad={"x": -1}))), x)
    with pytest.raises(kdp.DataError, match="Field 'x' has different shapes"):
        next(iter(pipe.collate_samples()))


@pytest.mark.parametrize("options", [{"mode": "x y", "as_dict": True}, {"mode": "y", "bare": True}])
def test_the_ctx_follows_in_a_pair(options: Any) -> None:
    chain = numbers(**options, return_ctx=True).deal(batch_size=4)
    fields, ctx = next(iter(chain.collate_samples(pad={"x" if "as_dict" in options else "y": 0})))
    assert isinstance(fields, dict if "as_dict" in options else torch.Tensor)
    if "as_dict" in options:
        assert ctx["shift"]["by"].shape == (4,)
        assert fields["x"][:, 0].tolist() == [n + by for n, by in enumerate(ctx["shift"]["by"].tolist())]


def test_torchs_own_collation_takes_dictionaries() -> None:
    chain = kdp.from_dataset([(1, 0), (2, 1)]).select("a=x b=y", as_dict=True)
    (batch,) = torch.utils.data.DataLoader(chain, batch_size=2)
    assert {name: value.tolist() for name, value in batch.items()} == {"a": [1, 2], "b": [0, 1]}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{"mode": "values=x labels=y", "as_dict": True}, {"mode": "x", "bare": True}])
def test_batches_are_the_same_in_workers_and_rebuilt(options: Any, num_workers: int) -> None:
    pad = {"values" if "as_dict" in options else "x": 0}

    def chain() -> Any:
        dealt = numbers(**options, return_ctx=True).deal(batch_size=4, shuffle=True, seed=1)
        return dealt.collate_samples(pad=pad)

    here = [str(batch) for batch in chain()]
    with kdp.Loader(chain(), num_workers=num_workers) as loader:
        assert [str(batch) for batch in loader] == here
        state = loader.state_dict()
    assert str(kdp.find(chain(), state, 1, epoch=0).load()) == here[1]


def test_batches_of_dictionaries_are_mixed(photos: Any) -> None:
    def mixed(**options: Any) -> Any:
        chain = photos.transform("x", kdp.ToTensor()).select(**options, return_ctx=True).deal(batch_size=6, seed=2)
        return chain.collate_samples()

    (x, y), ctx = next(iter(mixed(mode="x y").mixup(num_classes=8).cutmix()))
    chain = mixed(mode="image=x label=y", as_dict=True)
    chain = chain.mixup(num_classes=8, image="image", label="label").cutmix(image="image", label="label")
    batch, same = next(iter(chain.to_device("cpu")))
    assert torch.equal(batch["image"], x)
    assert torch.equal(batch["label"], y)
    assert str(same) == str(ctx)
    with pytest.raises(ValueError, match="`image` must be among the fields image, label, but is 'x' instead"):
        mixed(mode="image=x label=y", as_dict=True).mixup(num_classes=8)


def test_bare_batches_have_no_labels_to_mix(photos: Any) -> None:
    with pytest.raises(ValueError, match="`label` must be among the fields x, but is 'y' instead"):
        photos.select("x", bare=True).deal(batch_size=6).collate_samples().mixup(num_classes=8)


@pytest.mark.parametrize("is_collated", [True, False])
def test_pictures_of_batches_show_all_forms(photos: Any, is_collated: bool) -> None:
    def picture(**options: Any) -> bytes:
        chain = photos.select(**options).deal(batch_size=4, shuffle=True, seed=3)
        chain = chain.collate_samples() if is_collated else chain
        return kdp.show_batch(next(iter(chain)), chain, tile=32).tobytes()

    tuples = picture(mode="x y")
    assert picture(mode="pixel_values=x labels=y", as_dict=True) == tuples
    assert picture(mode="x y", as_dict=True, return_ctx=True) == tuples
    assert picture(mode="x", bare=True) == picture(mode="x") == picture(mode="x", bare=True, return_ctx=True)


def test_pairs_of_dictionary_and_ctx_are_known_without_the_chain(photos: Any) -> None:
    batch = next(iter(photos.select("x y", return_ctx=True, as_dict=True).deal(batch_size=4).collate_samples()))
    assert isinstance(kdp.show_batch(batch), Image.Image)


def test_replay_gives_the_form_of_the_chain(photos: Any) -> None:
    for options, image in (({"as_dict": True}, lambda item: item["x"]), ({"bare": True}, lambda item: item)):
        chain = photos.select("x", return_ctx=True, **options)
        item, ctx = chain[7]
        again, _ = kdp.replay(photos.column("key")[7], ctx, chain)
        assert image(again).tobytes() == image(item).tobytes()


def test_a_look_at_a_chain_names_the_fields(photos: Any) -> None:
    assert "pixel_values" in repr(photos.select("pixel_values=x labels=y", as_dict=True).peek(2))
    assert "x" in repr(photos.select("x", bare=True).deal(batch_size=2).collate_samples().peek(1))
    chain = photos.select("pixel_values=x", as_dict=True, return_ctx=True).deal(batch_size=2).collate_samples()
    shown = repr(chain.peek(1))
    assert "pixel_values" in shown
    assert "ctx" in shown
