"""`transform(views=[...])`: several recipes for one field, each drawn and recorded for itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from PIL import Image

import kdpipes as kdp
from kdpipes.delivery import split_ctx
from kdpipes.work import EncodedImage
from tests.pictures import file_of
from tests.work.replaying import Shift, both_flavours, indexed, plus_random, plus_rng, stream

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


def photo(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8))


PHOTOS = [(photo(number), number % 2) for number in range(5)]


def noted(x: int, ctx: dict[str, Any], rng: np.random.Generator) -> int:
    ctx["noted"] = int(rng.integers(1 << 40))
    return x + int(ctx["noted"])


@both_flavours
def test_a_field_becomes_one_value_for_each_recipe(make: Any) -> None:
    pipe = make().transform("x", lambda x: x + 1).transform("x", views=[[lambda x: 10 * x, str], [], [str]])
    for _ in range(2):
        assert list(pipe.select("x y")) == [((str(10 * n + 10), n + 1, str(n + 1)), n % 2) for n in range(6)]


@both_flavours
def test_one_recipe_gives_a_tuple_of_one(make: Any) -> None:
    assert list(make().transform("x", views=[[]]).select("x")) == [((n,),) for n in range(6)]


@both_flavours
@pytest.mark.parametrize("step", [Shift(), plus_rng, plus_random, noted], ids=["steps", "rng", "random", "ctx"])
def test_each_view_draws_for_itself(make: Any, step: Any) -> None:
    views = make().record_ctx().transform("x", views=[[step], [step, step], [step]])
    dealt, summed = (pipe.select("x").deal(batch_size=2, seed=1) for pipe in (views, views.transform("x", sum)))
    epochs = [[x for batch in dealt for (x,) in batch] for _ in range(2)]
    drawn = {end - n for epoch in epochs for n, (first, _, last) in enumerate(epoch) for end in (first, last)}
    assert len(drawn) == 24
    assert [[x for batch in summed for (x,) in batch] for _ in range(2)] == [[*map(sum, epoch)] for epoch in epochs]


@both_flavours
def test_the_ctx_has_one_entry_for_each_view_with_operations(make: Any) -> None:
    recipes = [[Shift(), Shift(), noted], [], [noted], [lambda x: x + 1]]
    pipe = make().record_ctx().transform("x", Shift()).transform("x", views=recipes).select("x", return_ctx=True)
    for _ in range(2):
        for n, ((x,), ctx) in enumerate(pipe):
            assert list(ctx)[:4] == ["shift", "view_1", "draw", "view_3"]
            assert not ctx.get("view_4"), "nothing to record"
            assert list(ctx["view_1"]) == ["shift", "shift_2", "noted"]
            first, base = ctx["view_1"], n + ctx["shift"]["by"]
            total = first["shift"]["by"] + first["shift_2"]["by"] + first["noted"]
            assert x == (base + total, base, base + ctx["view_3"]["noted"], base + 1)
            assert json.loads(json.dumps(ctx)) == ctx


@both_flavours
def test_views_of_another_field_have_names_of_their_own(make: Any) -> None:
    pipe = make().record_ctx().transform("x", views=[[Shift()], [Shift()]]).transform("y", views=[[Shift()]])
    (x, y), ctx = next(iter(pipe.select("x y", return_ctx=True)))
    assert list(ctx) == ["view_1", "view_2", "view_1_2"]
    assert (*x, *y) == tuple(ctx[name]["shift"]["by"] for name in ctx)


class View_1(Shift):
    """An operation of a view's name."""


@both_flavours
def test_an_operation_of_a_views_name_keeps_its_entry(make: Any) -> None:
    pipe = make().record_ctx().transform("x", View_1()).transform("x", views=[[View_1()], [Shift()]])
    for n, ((x,), ctx) in enumerate(pipe.select("x", return_ctx=True)):
        base = n + ctx["view_1"]["by"]
        assert x == (base + ctx["view_1_2"]["view_1"]["by"], base + ctx["view_2"]["shift"]["by"])


@both_flavours
def test_nothing_is_recorded_without_record_ctx(make: Any) -> None:
    pipe = make().transform("x", views=[[Shift(), noted], []]).select("x", return_ctx=True)
    plain = list(pipe)
    assert [ctx for _, ctx in plain] == [{}] * 6
    recorded = make().record_ctx().transform("x", views=[[Shift(), noted], []]).select("x", return_ctx=True)
    assert [x for x, _ in plain] == [x for x, _ in recorded], "and recording changes no value"


@both_flavours
def test_parts_of_the_ctx_are_selected_by_their_path(make: Any) -> None:
    pipe = make(PHOTOS).record_ctx().transform("x", views=[[kdp.RandomResizedCrop(8)], [kdp.RandomResizedCrop(6)]])
    names = "ctx.view_2 ctx.view_1.random_resized_crop x ctx.view_1.random_resized_crop.top"
    dealt = pipe.select(names, return_ctx=True).deal(batch_size=3)
    for _ in range(2):
        for (second, crop, x, top), ctx in (item for batch in dealt for item in batch):
            assert (crop, second, top) == (ctx["view_1"]["random_resized_crop"], ctx["view_2"], crop["top"])
            assert [view.size for view in x] == [(8, 8), (6, 6)]
    alone = pipe.select("ctx.view_1.random_resized_crop y")
    whole = pipe.select("x", return_ctx=True)
    assert [crop for crop, _ in alone] == [ctx["view_1"]["random_resized_crop"] for _, ctx in whole]
    (crops, _), *_ = pipe.select("ctx.view_1.random_resized_crop y").deal(batch_size=5).collate_samples()
    assert crops["top"].shape == (5,)


@both_flavours
def test_an_unrecorded_part_is_an_error_that_names_the_others(make: Any) -> None:
    pipe = make(PHOTOS).record_ctx().transform("x", views=[[kdp.RandomResizedCrop(8)], []])
    for name, message in {
        "ctx.view_2": "has no field 'view_2'",
        "ctx.view_3.crop": "has no field 'view_3'",
        "ctx.view_1.crop": "has no field 'crop'; it has 'random_resized_crop'",
        "ctx.view_1.random_resized_crop.top.a": "has no field 'a'",
    }.items():
        with pytest.raises(kdp.FieldError, match=message):
            list(pipe.select(name))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@both_flavours
def test_views_are_collated_to_a_tuple_of_batches_and_made_again(make: Any, num_workers: int) -> None:
    views = [[kdp.RandomResizedCrop(8), A.GaussNoise(p=1), kdp.ToTensor()], [A.RandomCrop(6, 7)], [kdp.CenterCrop(5)]]
    pipe = make(PHOTOS).record_ctx().transform("x", views=views).select("x y key", return_ctx=True)
    dealt = pipe.deal(batch_size=2, seed=2)
    with kdp.Loader(dealt.collate_samples(), num_workers=num_workers) as loader:
        for _ in range(2):
            sizes = []
            for (x, y, keys), ctx in loader:
                assert isinstance(x, tuple)
                assert [list(view.shape[1:]) for view in x] == [[3, 8, 8], [3, 6, 7], [3, 5, 5]]
                assert [view.dtype for view in x] == [torch.float32, torch.uint8, torch.uint8]
                sizes.append(len(y))
                for place, (key, sample_ctx) in enumerate(zip(keys, split_ctx(ctx), strict=True)):
                    ((first, second, third), _, _), again = kdp.replay(key, json.loads(json.dumps(sample_ctx)), pipe)
                    assert torch.equal(first, x[0][place])
                    for image, batch in ((second, x[1]), (third, x[2])):
                        assert np.array_equal(np.asarray(image).transpose(2, 0, 1), batch[place].numpy())
                    assert again == sample_ctx
            assert sizes == [2, 2, 1]


def test_the_views_are_the_same_for_any_number_of_workers() -> None:
    views = [[Shift(), plus_random], [plus_rng], []]
    dealt = indexed().repeat_until(repetitions=3).transform("x", views=views).select("x").deal(batch_size=2, seed=2)
    expected = [list(dealt) for _ in range(2)]
    assert expected[0] != expected[1]
    for service in ({"num_workers": 1}, {"num_workers": 2}, {"reading_service": kdp.ThreadReadingService(3)}):
        with kdp.Loader(dealt, **service) as loader:
            loader.set_epoch(0)
            assert [list(loader) for _ in range(2)] == expected


def test_ragged_views_are_padded_like_their_field() -> None:
    views: list[list[Callable[..., Any]]] = [[lambda x: np.arange(x + 1)], [lambda x: np.arange(2 * x + 1)]]
    dealt = indexed().transform("x", views=views).select("x").deal(batch_size=3)
    (first, second), = next(iter(dealt.collate_samples(pad={"x": -1})))  # fmt: skip
    assert first.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert second.shape == (3, 5)
    with pytest.raises(kdp.DataError, match=r"Field 'x\[0\]' has different shapes"):
        next(iter(dealt.collate_samples()))


def test_what_stands_before_the_views_is_done_once_for_all() -> None:
    calls: list[int] = []

    def count(x: int) -> int:
        calls.append(x)
        return x

    for make in (indexed, stream):
        pipe = make().transform("x", count).transform("x", views=[[Shift()], [Shift()], []]).select("x")
        for _ in range(2):
            calls.clear()
            list(pipe)
            assert calls == [*range(6)]


def test_decoding_is_each_views_own_and_none_without_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    original = EncodedImage._decoded_by_pillow

    def decode(image: Any, factor: int) -> Any:
        decoded.append(image.name)
        return original(image, factor)

    monkeypatch.setattr(EncodedImage, "_decoded_by_pillow", decode)
    crop = kdp.RandomResizedCrop(8)
    for make in (indexed, stream):
        source = make([(file_of(photo(0)), 0)]).decode_images().transform("x", views=[[crop], [crop], []])
        assert list(source.select("y")) == [(0,)]
        assert decoded == []
        (x,) = next(iter(source.select("x")))
        assert len(decoded) == 2
        assert isinstance(x[2], EncodedImage)
        shared = make([(file_of(photo(0)), 0)]).decode_images().transform("x", lambda image: image)
        decoded.clear()
        list(shared.transform("x", views=[[crop], [crop], []]).select("x"))
        assert len(decoded) == 1
        decoded.clear()


def test_bad_arguments_are_rejected_where_the_chain_is_built() -> None:
    for make in (indexed, stream):
        for views in ((), [], "crop", [Shift()], [Shift], {"a": [Shift()]}, 3, [[Shift()], Shift()], [{Shift()}]):
            with pytest.raises(TypeError, match="`views` must be lists of callables, one list for each view"):
                make().transform("x", views=views)
        for views, message in (
            ([[], [Shift]], r"`views\[1\]\[0\]` must be a transform, .* Write `Shift\(...\)` to make one"),
            ([["flip"]], r"`views\[0\]\[0\]` must be a callable, but is 'flip'"),
            ([[[Shift()]]], r"`views\[0\]\[0\]` must be a callable"),
        ):
            with pytest.raises(TypeError, match=message):
                make().transform("x", views=views)
        for arguments in ({}, {"views": None}):
            with pytest.raises(ValueError, match="must be given at least one callable after the name of the field, or"):
                make().transform("x", **arguments)
        with pytest.raises(ValueError, match="takes either callables or `views`"):
            make().transform("x", Shift(), views=[[Shift()]])
        with pytest.raises(kdp.FieldError, match="has no field 'image'"):
            list(make().transform("image", views=[[Shift()]]))


def test_recipes_may_be_tuples_and_arguments_stay_unchanged() -> None:
    recipes = ([str], (str, len))
    pipe = indexed().transform("x", views=recipes).select("x")
    recipes[0].append(len)
    assert pipe[3] == (("3", 1),)


def test_a_mixture_of_views_is_rejected() -> None:
    pipe = indexed().transform("x", views=[[float], [float]]).select("x y").deal(batch_size=2)
    with pytest.raises(kdp.DataError, match="Field 'x' must be a tensor"):
        next(iter(pipe.collate_samples().mixup(num_classes=2)))


def test_names_may_be_selected_again() -> None:
    pipe = indexed().record_ctx().transform("x", views=[[Shift()], []]).select("x y x ctx.view_1 ctx.view_1")
    dealt = pipe.deal(batch_size=2, seed=4)
    for _ in range(2):
        for first, y, again, one, other in (item for batch in dealt for item in batch):
            assert (first, one, y) == (again, other, first[1] % 2)
    (x, _, x_again, *_) = next(iter(dealt.collate_samples()))
    assert all(torch.equal(one, other) for one, other in zip(x, x_again, strict=True))


@both_flavours
def test_repeated_samples_have_views_of_their_own(make: Any) -> None:
    source = make().record_ctx().transform("x", views=[[Shift()], [Shift()]])
    repeated = source.repeat_until(repetitions=2).select("x", return_ctx=True)
    items = [item for batch in repeated.deal(batch_size=4) for item in batch]
    assert len({by["shift"]["by"] for _, ctx in items for by in ctx.values()}) == 24
    for number, ((x,), ctx) in enumerate(items):
        assert x == tuple(number % 6 + ctx[name]["shift"]["by"] for name in ("view_1", "view_2"))


@both_flavours
def test_the_draw_can_be_selected_alone(make: Any) -> None:
    pipe = make().record_ctx().transform("x", plus_rng).select("ctx.draw y")
    assert [draw["ordinal"] for draw, _ in pipe] == [*range(6)]
