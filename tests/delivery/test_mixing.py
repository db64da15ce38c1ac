"""What `mixup` and `cutmix` share: the same batches everywhere, labels that sum to one, and a ctx that suffices."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, graph_settings
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

import kdpipes as kdp
from tests.torchdata_parts import DataLoader2, InProcessReadingService, MultiProcessingReadingService

IMAGES = np.random.default_rng(0).integers(0, 256, (23, 3, 5, 9), dtype=np.uint8)
METHODS = ["mixup", "cutmix"]
both = pytest.mark.parametrize("method", METHODS)


class Photos(kdp.SampleSource):
    """Non-square images of three classes, one sample of each seven unlabeled."""

    def __len__(self) -> int:
        return len(IMAGES)

    def getitem_x(self, index: int) -> Any:
        return IMAGES[index]

    def getitem_y(self, index: int) -> int:
        return -1 if index % 7 == 6 else index % 3


def batches(*, shuffle: bool = True, seed: int = 3, **cut: int) -> Any:
    plain = Photos().record_ctx().select("x y", return_ctx=True)
    return plain.deal(**(cut or {"batch_size": 4}), shuffle=shuffle, seed=seed).collate_samples()


def mixing(source: Any, method: str, **arguments: Any) -> Any:
    return getattr(source, method)(**({"num_classes": 3} | arguments))


def collated(items: list[Any], size: int = 4) -> Any:
    return kdp.from_dataset(items).select("x y").deal(batch_size=size).collate_samples()


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_equal(one[name], other[name]) for name in one)
    return len(one) == len(other) and all(is_equal(a, b) for a, b in zip(one, other, strict=True))


def own_services() -> list[Any]:
    return [kdp.ProcessReadingService(1), kdp.ProcessReadingService(2), *map(kdp.ThreadReadingService, (1, 2, 3))]


@both
def test_any_number_of_workers_gives_the_same_batches(method: str) -> None:
    expected = [list(pipe) for pipe in [mixing(batches(), method)] for _ in range(2)]
    for service in [None, *own_services()]:
        with kdp.Loader(mixing(batches(), method), reading_service=service) as loader:
            assert is_equal([list(loader), list(loader)], expected)


@both
def test_the_loaders_of_torch_give_the_same_batches(method: str) -> None:
    expected = list(mixing(batches(), method))
    assert is_equal(list(DataLoader(mixing(batches(), method), batch_size=None, num_workers=2)), expected)
    for service in (None, InProcessReadingService(), MultiProcessingReadingService(2)):
        loader = DataLoader2(mixing(batches(), method), reading_service=service)
        assert is_equal(list(loader), expected)
        loader.shutdown()


@both
def test_epochs_seeds_and_batches_draw_anew(method: str) -> None:
    pipe = mixing(batches(shuffle=False, batch_size=5), method)
    drawn = [ctx[method]["weight"].tolist() for _ in range(2) for _, ctx in pipe]
    drawn += [ctx[method]["weight"].tolist() for _, ctx in mixing(batches(seed=4, batch_size=5), method)]
    assert len({tuple(weights) for weights in drawn}) == 15


@both
def test_a_resumed_loader_goes_on_with_the_very_next_batch(method: str) -> None:
    with kdp.Loader(mixing(batches(), method), num_workers=2) as loader:
        list(loader)
        running = iter(loader)
        next(running), next(running)
        state = loader.state_dict()
        rest = list(running)
    for service in [None, *own_services()]:
        with kdp.Loader(mixing(batches(), method), reading_service=service) as loader:
            loader.load_state_dict(state)
            assert is_equal(list(loader), rest)


@both
def test_a_state_of_another_mix_is_rejected(method: str) -> None:
    state = kdp.Loader(mixing(batches(), method)).state_dict()
    with pytest.raises(ValueError, match=f"of `{method}` have changed"):
        kdp.Loader(mixing(batches(), method, alpha=0.7)).load_state_dict(state)


@both
def test_streams_mix_the_same_for_any_number_of_workers(method: str) -> None:
    def stream() -> Any:
        items = [{"x": IMAGES[number], "y": number % 3} for number in range(20)]
        samples = IterableWrapper(items, deepcopy=False).shuffle(buffer_size=7).to_samples().select("x y")
        return mixing(samples.deal(batch_size=3, seed=1).collate_samples(), method)

    expected = list(stream())
    for number in (1, 2):
        with kdp.Loader(stream(), num_workers=number) as loader:
            assert is_equal(list(loader), expected)


@both
def test_the_ctx_is_enough_to_mix_the_batch_again(method: str) -> None:
    pipe = mixing(mixing(batches(), method), method, alpha=0.6)
    for ((x, y), ctx), ((mixed, shares), recorded) in zip(batches(), pipe, strict=True):
        assert not ctx
        assert list(recorded) == [method, f"{method}_2"]
        assert not torch.equal(recorded[method]["weight"], recorded[f"{method}_2"]["weight"])
        for name in recorded:
            x, y = pipe.apply(x, y, recorded[name])
        assert is_equal([x, y], [mixed, shares])


@both
def test_parameters_are_plain_tensors_with_one_per_sample(method: str) -> None:
    for (x, y), ctx in mixing(batches(), method):
        assert (x.dtype, y.dtype) == (torch.uint8, torch.float32)
        assert {value.shape for value in ctx[method].values()} == {(len(x),)}
        dtypes = {name: value.dtype for name, value in ctx[method].items()}
        assert dtypes.pop("weight") == torch.float64
        assert set(dtypes.values()) == {torch.int64}
        assert sorted(ctx[method]["partner"].tolist()) == list(range(len(x)))


@both
def test_labels_sum_to_one_except_for_unlabelled_samples(method: str) -> None:
    for ((_, classes), _), ((_, y), ctx) in zip(batches(), mixing(batches(), method), strict=True):
        weight, partner = ctx[method]["weight"].numpy(), ctx[method]["partner"].numpy()
        known = (classes >= 0).numpy().astype(np.float64)
        np.testing.assert_allclose(y.sum(dim=1), weight * known + (1 - weight) * known[partner], rtol=1e-6)
        assert y.min() >= 0


@both
def test_labels_that_are_shares_are_mixed_as_they_are(method: str) -> None:
    rows = np.random.default_rng(1).dirichlet(np.ones(4), 6)
    pipe = kdp.from_dataset([(IMAGES[number], rows[number]) for number in range(6)]).record_ctx()
    batch = pipe.select("x y", return_ctx=True).deal(batch_size=6).collate_samples()
    (_, y), ctx = next(iter(mixing(batch, method, num_classes=None)))
    weight = ctx[method]["weight"].numpy()[:, None]
    assert y.dtype == torch.float64
    np.testing.assert_array_equal(y, weight * rows + (1 - weight) * rows[ctx[method]["partner"]])


@both
def test_one_sample_alone_is_its_own_partner(method: str) -> None:
    ((x, y), ctx) = next(iter(mixing(batches(batch_size=1), method)))
    ((plain, classes), _) = next(iter(batches(batch_size=1)))
    assert ctx[method]["partner"].tolist() == [0]
    assert is_equal(x, plain)
    assert y.tolist() == [[float(number == classes) for number in range(3)]]


@both
def test_a_batch_that_is_not_mixed_says_so(method: str) -> None:
    for ((plain, classes), _), ((x, y), ctx) in zip(batches(), mixing(batches(), method, p=0), strict=True):
        assert is_equal(x, plain)
        assert y.argmax(dim=1)[classes >= 0].tolist() == classes[classes >= 0].tolist()
        assert ctx[method]["weight"].tolist() == [1.0] * len(x)
        assert ctx[method]["partner"].tolist() == list(range(len(x)))


@both
def test_p_is_the_share_of_batches_that_are_mixed(method: str) -> None:
    plain = collated([(IMAGES[number % 23], 0) for number in range(400)], size=2)
    always = [x for x, _ in mixing(plain, method)]
    half = [x for x, _ in mixing(collated([(IMAGES[number % 23], 0) for number in range(400)], 2), method, p=0.5)]
    changed = [not torch.equal(x, before) for x, (before, _) in zip(half, plain, strict=True)]
    could = sum(not torch.equal(x, before) for x, (before, _) in zip(always, plain, strict=True))
    assert 0.35 * could < sum(changed) < 0.65 * could
    assert all(torch.equal(x, y) for x, y, is_mixed in zip(half, always, changed, strict=True) if is_mixed)


@both
def test_the_incoming_batch_stays_as_it_is(method: str) -> None:
    for ((x, y), ctx), ((plain, classes), _) in zip(batches(), batches(), strict=True):
        pipe = mixing(batches(), method)
        params = pipe.draw(x, np.random.default_rng(0))
        kept = {name: value.clone() for name, value in params.items()}
        pipe.apply(x, y, params)
        assert is_equal([x, y, params], [plain, classes, kept])
        assert not ctx


@both
def test_ranks_mix_within_their_own_part(method: str) -> None:
    for rank in (0, 1):
        pipe, plain = (
            graph_settings.apply_sharding(chain, 2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            for chain in (mixing(batches(global_batch_size=8, seed=1), method), batches(global_batch_size=8, seed=1))
        )
        for ((x, y), ctx), (own, _) in zip(pipe, plain, strict=True):
            assert is_equal([x, y], mixing(batches(), method).apply(*own, ctx[method]))


@both
def test_dictionaries_are_mixed_by_their_names(method: str) -> None:
    items = [{"image": IMAGES[number], "label": number % 3, "name": f"n{number}"} for number in range(4)]
    stream = IterableWrapper(items, deepcopy=False).to_samples().deal(batch_size=4).collate_samples()
    batch = next(iter(mixing(stream, method, image="image", label="label")))
    assert (batch["image"].shape, batch["label"].shape) == ((4, 3, 5, 9), (4, 3))
    assert batch["name"] == ["n0", "n1", "n2", "n3"]
    with pytest.raises(kdp.FieldError, match=r"The batch has no field 'x'; it has 'image', 'label', 'name'"):
        next(iter(mixing(stream, method)))


@both
def test_other_fields_keep_their_places(method: str) -> None:
    pipe = Photos().select("key y x index").deal(batch_size=3).collate_samples()
    key, y, x, index = next(iter(mixing(pipe, method)))
    assert (key, index.tolist()) == (["0", "1", "2"], [0, 1, 2])
    assert (x.shape, y.shape) == ((3, 3, 5, 9), (3, 3))


def test_both_may_stand_in_one_chain() -> None:
    pipe = batches().mixup(num_classes=3).cutmix()
    for (_, y), ctx in pipe:
        assert list(ctx) == ["mixup", "cutmix"]
        assert y.shape[1] == 3


@both
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"alpha": 0}, ValueError, "`alpha` must be a number above 0, but is 0 instead"),
        ({"alpha": float("nan")}, ValueError, "`alpha` must be a number above 0"),
        ({"alpha": float("inf")}, ValueError, "`alpha` must be a number above 0"),
        ({"alpha": "0.2"}, TypeError, "`alpha` must be a number above 0"),
        ({"p": 1.5}, ValueError, "`p` must be a probability, from 0 to 1, but is 1.5"),
        ({"p": True}, TypeError, "`p` must be a probability"),
        ({"num_classes": 0}, ValueError, "`num_classes` must be an integer of at least 1"),
        ({"num_classes": 2.0}, TypeError, "`num_classes` must be an integer"),
        ({"image": 0}, TypeError, "`image` must be the name of a field"),
        ({"image": "X"}, ValueError, "`image` must be among the fields x, y, but is 'X'"),
        ({"label": "yy"}, ValueError, "`label` must be among the fields x, y, but is 'yy' .*Did you mean 'y'"),
        ({"label": "mask"}, ValueError, r'Select it: `\.select\("x y mask"\)`; or name another: `label=...`'),
        ({"classes": 3}, TypeError, "num_classes"),
    ],
)
def test_bad_arguments_are_rejected(method: str, arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        mixing(batches(), method, **arguments)


@both
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Photos().select("x y"), "is indexed. Put `.deal(batch_size=...).collate_samples()` before it."),
        (
            lambda: Photos().select("x y").deal(batch_size=2),
            "mixes tensors, but `.deal()` gives lists. Put `.collate_samples()` before it.",
        ),
        (lambda: IterableWrapper([1]), "but there is no `.deal()` upstream."),
        (lambda: IterableWrapper([1]).map(abs), "but there is no `.deal()` upstream."),
        (
            lambda: batches().prefetch(2),
            "PrefetcherIterDataPipe may hold batches back or change their number. Put it right after",
        ),
        (lambda: batches().shuffle(), "ShufflerIterDataPipe may hold batches back"),
        (lambda: batches().batch(2), "BatcherIterDataPipe may hold batches back"),
        (lambda: batches().to_device("cpu"), "DeviceMoverIterDataPipe may hold batches back"),
        (lambda: batches().map(len).zip(batches()).map(len), "ZipperIterDataPipe may hold batches back"),
    ],
)
def test_chains_with_indistinguishable_batches_are_an_error(method: str, build: Any, words: str) -> None:
    kind = AttributeError if "is indexed" in words else kdp.ChainError  # an indexed chain has no such pipe
    with pytest.raises(kind, match=rf"`\.{method}\(\)` .*{re.escape(words)}"):
        mixing(build(), method)


def as_dictionary(batch: Any) -> Any:
    (x, y), _ = batch
    return {"x": x, "y": y}


@both
def test_a_stock_map_may_change_the_form_if_names_are_known(method: str) -> None:
    for mapped, ((x, y), _) in zip(
        mixing(batches().map(as_dictionary), method), mixing(batches(), method), strict=True
    ):
        assert is_equal(mapped, {"x": x, "y": y})
    with pytest.raises(kdp.ChainError, match=r"does not know where 'x' is in a batch of type tuple\. Put it right"):
        next(iter(mixing(batches().map(tuple), method)))


@both
@pytest.mark.parametrize(
    ("y", "num_classes", "error", "words"),
    [
        (3, 3, kdp.DataError, "must be from 0 to 2, or -1 for unlabeled samples, but one is 3"),
        (-2, 3, kdp.DataError, "must be from 0 to 2, or -1 for unlabeled samples, but one is -2"),
        (1, None, ValueError, "`num_classes` must be given if labels are class numbers"),
        (1.0, 3, kdp.DataError, r"must be class numbers `\[B\]` or floats `\[B, C\]`, but are torch.float64 \[2\]"),
        ([0, 1], 2, kdp.DataError, r"must be class numbers `\[B\]` or floats .* torch.int64 \[2, 2\]"),
        ([0.0, 1.0], 3, ValueError, "`num_classes` must be 2, as many as the labels have, but is 3"),
        ("cat", 3, kdp.DataError, r"Field 'y' must be a tensor `\[B, \.\.\.\]`, but is list"),
    ],
)
def test_labels_that_are_none_are_rejected(
    method: str, y: Any, num_classes: int | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        next(iter(mixing(collated([(IMAGES[0], y)] * 2), method, num_classes=num_classes)))


@both
def test_images_that_are_no_batch_are_rejected(method: str) -> None:
    with pytest.raises(kdp.DataError, match=r"Field 'x' must be a tensor `\[B, \.\.\.\]`, but is tuple"):
        next(iter(mixing(collated([((IMAGES[0], IMAGES[1]), 0)] * 2), method)))
    with pytest.raises(kdp.DataError, match="A batch has 2 images, but 1 labels"):
        next(iter(mixing(batches(batch_size=2).map(halved), method)))


def halved(batch: Any) -> Any:
    (x, y), _ = batch
    return {"x": x, "y": y[:1]}


@both
def test_an_entry_of_the_ctx_is_not_overwritten(method: str) -> None:
    def mark(x: Any, ctx: dict[str, Any]) -> Any:
        ctx[method] = 1
        return x

    pipe = Photos().record_ctx().transform("x", mark).select("x y", return_ctx=True)
    with pytest.raises(kdp.ChainError, match=f"The ctx already has an entry '{method}'"):
        next(iter(mixing(pipe.deal(batch_size=2).collate_samples(), method)))


@both
def test_the_loader_names_it_and_knows_its_length(method: str) -> None:
    with kdp.Loader(mixing(mixing(batches(), method), method)) as loader:
        assert f"collate_samples → {method} → {method};" in repr(loader)
        assert len(loader) == 6
