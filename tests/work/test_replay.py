"""`replay`: from the key and the recorded ctx of a sample, the very sample again, whatever the chain is made of."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.delivery import collate, split_ctx
from tests.work.replaying import (
    Shift,
    assert_replayed,
    both_flavours,
    delivered,
    plus_random,
    plus_rng,
    told,
    travelled,
)

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


# Operations on images, of Pillow's or tensors.


def rolled(image: Any, by: int) -> Any:
    return ImageChops.offset(image, by, 0) if isinstance(image, Image.Image) else image.roll(by, -1)


def by_rng(image: Any, rng: np.random.Generator) -> Any:
    return rolled(image, int(rng.integers(12)))


def by_random(image: Any) -> Any:
    return rolled(image, random.randrange(12))


def by_numpy(image: Any) -> Any:
    return rolled(image, int(np.random.randint(12)))


def by_torch(image: Any) -> Any:
    return rolled(image, int(torch.randint(12, ())))


def by_ctx(image: Any, ctx: dict[str, Any]) -> Any:
    ctx["noted"] = [*ctx.get("noted", []), random.randrange(12), random.random()][:2]
    return rolled(image, ctx["noted"][0])


def by_both(image: Any, ctx: dict[str, Any], rng: np.random.Generator) -> Any:
    ctx["size"] = {"of": list(np.asarray(image).shape)}
    return rolled(image, int(rng.integers(12)))


def always_by_two(image: Any) -> Any:
    return rolled(image, 2)


class Roll:
    """A user's own transform, in two steps."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"by": int(rng.integers(12)), "why": ["because", None], "share": rng.random()}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        return rolled(value, params["by"])


EITHER: dict[str, Callable[[], Any]] = {
    "crop": lambda: kdp.RandomResizedCrop((9, 11)),
    "flip": lambda: kdp.HorizontalFlip(),
    "jitter": lambda: kdp.ColorJitter(0.5, 0.5, (0.5, 2), 0.2),
    "resize": lambda: kdp.Resize(10, interpolation="bicubic"),
    "center": lambda: kdp.CenterCrop(10),
    "roll": Roll,
    "rng": lambda: by_rng,
    "random": lambda: by_random,
    "numpy": lambda: by_numpy,
    "torch": lambda: by_torch,
    "ctx": lambda: by_ctx,
    "both": lambda: by_both,
    "two": lambda: always_by_two,
    "lambda": lambda: lambda image: rolled(image, 1),
}
PILLOWS: dict[str, Callable[[], Any]] = {
    "a_flip": lambda: A.HorizontalFlip(),
    "a_noise": lambda: A.GaussNoise(p=0.9),
    "a_compose": lambda: A.Compose([A.RandomCrop(8, 9), A.OneOf([A.RandomGamma(p=1), A.GaussNoise(p=1)], p=0.9)]),
}
on_images = st.lists(st.sampled_from([*EITHER, *PILLOWS]), max_size=4)
on_tensors = st.lists(st.sampled_from([*EITHER]), max_size=3)


def made(names: list[str]) -> list[Any]:
    return [{**EITHER, **PILLOWS}[name]() for name in names]


def photos(kind: str, number: int, *, of: str = "a") -> list[Any]:
    pixels = np.random.default_rng(len(of)).integers(0, 256, (number, 13, 16, 3), dtype=np.uint8)
    images = [Image.fromarray(image) for image in pixels]
    tensors = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in pixels]
    return [(f"{of}/{n}", (images if kind == "images" else tensors)[n], n % 2) for n in range(number)]


def keyed(items: list[Any], *, is_stream: bool) -> Any:
    wrap = IterableWrapper if is_stream else SequenceWrapper
    fields = {"x": lambda item: item[1], "y": lambda item: item[2]}
    return wrap(items).to_samples(key=lambda item: item[0], fields=fields)


def planned(source: Any, plan: list[str], *, kind: str, is_stream: bool) -> Any:
    for step in plan:
        if step == "repeat":
            source = source.repeat_until(repetitions=2)
        elif step == "oversample":
            source = source.oversample(class_counts={0: 1, 1: 2}) if is_stream else source.oversample()
        elif step == "mix":
            other = keyed(photos(kind, 3, of="other"), is_stream=is_stream)
            source = source.mix([other], weights=[1, 1], seed=1)
        else:
            source = source.shuffle(buffer_size=3) if is_stream else source.permute(seed=3)
    return source


chains = st.fixed_dictionaries(
    {
        "is_stream": st.booleans(),
        "kind": st.sampled_from(["images", "tensors"]),
        "plan": st.lists(st.sampled_from(["repeat", "oversample", "permute", "mix"]), max_size=2, unique=True),
        "unrecorded": st.lists(st.sampled_from([*EITHER]), max_size=2),
        "images": on_images,
        "tensors": st.none() | on_tensors,
        "views": st.none() | st.lists(on_tensors, min_size=1, max_size=3),
    }
)


def built(spec: Any) -> Any:
    """Return the pipe that a drawn description names, before `deal`."""
    kind, is_stream = spec["kind"], spec["is_stream"]
    pipe = planned(keyed(photos(kind, 4), is_stream=is_stream), spec["plan"], kind=kind, is_stream=is_stream)
    if spec["unrecorded"]:
        pipe = pipe.transform("x", *made(spec["unrecorded"]))
    names = [name for name in spec["images"] if kind == "images" or name in EITHER]
    pipe = pipe.record_ctx().transform("x", always_by_two, *made(names))
    if spec["tensors"] is not None:
        pipe = pipe.transform("x", kdp.ToTensor(), *made(spec["tensors"]))
        pipe = pipe.transform("x", kdp.Normalize([0.5], [0.25]))
    last = [[*made([n for n in recipe if n != "jitter"]), kdp.CenterCrop(8)] for recipe in spec["views"] or []]
    pipe = pipe.transform("x", kdp.Resize((9, 9)), kdp.CenterCrop(8))
    pipe = pipe.transform("x", views=[*last, []]) if last else pipe
    pipe = pipe.add_field("z", lambda sample, rng: rng.random() + sample["y"])
    return pipe.select("key x z y", return_ctx=True)


@settings(max_examples=60)
@given(spec=chains, seed=st.sampled_from([0, 1, (1 << 63) - 1]))
def test_every_sample_of_every_chain_is_made_again(spec: Any, seed: int) -> None:
    pipe = built(spec)
    dealt = pipe.deal(batch_size=3, seed=seed)
    for batch in [batch for _ in range(2) for batch in dealt]:
        assert_replayed(dealt, batch)
        ctxs = [ctx for _, ctx in batch]
        assert split_ctx(collate(ctxs)) == ctxs


SERVICES: dict[str, Callable[[], dict[str, Any]]] = {
    "inline": lambda: {"num_workers": 0},
    "1 worker": lambda: {"num_workers": 1},
    "2 workers": lambda: {"num_workers": 2},
    "2 threads": lambda: {"reading_service": kdp.ThreadReadingService(2)},
}


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("is_stream", [False, True], ids=["indexed", "stream"])
@pytest.mark.parametrize("kind", ["images", "tensors"])
def test_a_sample_is_made_again_from_the_ctx_of_its_batch(service: str, is_stream: bool, kind: str) -> None:
    spec = {
        "is_stream": is_stream,
        "kind": kind,
        "plan": ["repeat", "permute"],
        "unrecorded": ["rng"],
        "images": ["crop", "a_compose", "a_noise", "jitter", "roll", "random", "crop", "both", "flip"],
        "tensors": ["crop", "numpy", "torch", "ctx"],
        "views": [["crop", "random"], ["roll", "flip", "rng", "roll"]],
    }
    dealt = built(spec).deal(batch_size=3, seed=9)
    num_samples = 0
    with kdp.Loader(dealt.collate_samples(), **SERVICES[service]()) as loader:
        for _ in range(2):
            for (keys, x, z, y), ctx in loader:
                for place, (key, sample_ctx) in enumerate(zip(keys, split_ctx(ctx), strict=True)):
                    (_, again, z_again, y_again), ctx_again = kdp.replay(key, travelled(sample_ctx), dealt)
                    assert told(again) == told(tuple(view[place] for view in x))
                    assert (z_again, y_again) == (z[place].item(), y[place].item())
                    assert ctx_again == sample_ctx
                    num_samples += 1
    assert num_samples == 16


@both_flavours
def test_a_sample_as_the_source_gives_it_is_made_again(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift(), plus_random, Shift()).select("key x", return_ctx=True)
    raw = {sample.key: sample for sample in make()}
    for (key, x), ctx in delivered(pipe.deal(batch_size=4, seed=3)):
        for sample in (raw[key], raw[key].fork(), raw[key].fork(key="another"), pickle.loads(pickle.dumps(raw[key]))):
            assert kdp.replay(sample, travelled(ctx), pipe) == ((sample.key, x), ctx)
            assert dict(sample) == {"x": int(key), "y": int(key) % 2}, "it stays as it is"
            assert sample.ctx == {}


@both_flavours
def test_a_sample_that_was_not_selected_is_replayed(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift(), plus_rng).add_field("z", lambda sample: sample["x"] + 1)
    for sample in delivered(pipe.deal(batch_size=4, seed=3)):
        values = dict(sample)
        again = kdp.replay(sample.key, travelled(sample.ctx), pipe)
        assert isinstance(again, kdp.Sample)
        assert (dict(again), again.ctx, again.index) == (values, sample.ctx, sample.index)
        copied = pickle.loads(pickle.dumps(again))
        assert (dict(copied), copied.ctx) == (values, sample.ctx)


@both_flavours
def test_edited_parameters_are_obeyed(make: Any) -> None:
    image = photos("images", 1)[0][1]
    pipe = make([(image, 0), (image, 1)]).record_ctx()
    pipe = pipe.transform("x", kdp.RandomResizedCrop(8), views=None).transform("x", views=[[Roll()], [Roll()]])
    pipe = pipe.select("x", return_ctx=True)
    for _, ctx in delivered(pipe.deal(batch_size=2, seed=1)):
        edited = travelled(ctx)
        edited["random_resized_crop"] = {"top": 1, "left": 2, "height": 8, "width": 8}
        edited["view_1"]["roll"]["by"], edited["view_2"]["roll"]["by"] = 0, 3
        ((first, second),), again = kdp.replay("1", edited, pipe)
        expected = image.crop((2, 1, 10, 9))
        assert first.tobytes() == expected.tobytes()
        assert second.tobytes() == rolled(expected, 3).tobytes()
        assert again == edited


@both_flavours
def test_what_follows_deal_is_left_out(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift()).select("key x y", return_ctx=True).deal(batch_size=3)
    mixed = pipe.collate_samples().mixup(num_classes=2)
    for (key, *rest), ctx in delivered(pipe):
        for end in (pipe.map(list), mixed, mixed.unbatch()):
            assert kdp.replay(key, ctx, end) == ((key, *rest), ctx)


class UsesUp:
    """A transform whose `apply` empties its parameters."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"digits": rng.integers(10, size=3).tolist()}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        while params["digits"]:
            value = 10 * value + params["digits"].pop()
        return value


@both_flavours
def test_a_transform_that_uses_its_parameters_up_is_made_again(make: Any) -> None:
    pipe = make().record_ctx().transform("x", UsesUp()).select("key x", return_ctx=True)
    assert_replayed(pipe, delivered(pipe.deal(batch_size=4)))


@both_flavours
def test_the_given_ctx_and_the_new_one_share_nothing(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift()).select("x", return_ctx=True)
    ctx = {"shift": {"by": 4}}
    _, again = kdp.replay("2", ctx, pipe)
    again["shift"]["by"] = 5
    assert ctx == {"shift": {"by": 4}}


# `split_ctx`, which is `collate` backwards.


EXACT: dict[str, list[Any]] = {
    "numbers": [{"a": 1, "b": 0.5, "c": True}, {"a": -(1 << 62), "b": -0.0, "c": False}],
    "numpy": [{"a": np.int64(3), "b": np.float64(0.5), "c": np.bool_(True)}] * 2,
    "strings": [{"a": "x", "b": {"c": ["y", None]}}, {"a": "", "b": {"c": []}}],
    "some have it": [{"crop": {"top": 1}}, {}, {"crop": {"top": 3}}],
    "tuples": [{"a": (1, "x", 0.5)}, {"a": (2, "y", 1.5)}],
    "deep": [{"view_1": {"crop": {"top": n, "of": [n, n]}}, "steps": [{"at": [n]}, {}]} for n in range(3)],
    "ragged": [{"a": [1]}, {"a": [1, 2]}],
    "large numbers": [{"a": 1 << 64}, {"a": 1}],
    "beside nothing": [{"to_tensor": {}, "crop": {"top": n}} for n in range(2)],
}


@pytest.mark.parametrize("name", EXACT)
def test_split_ctx_gives_back_what_was_collated(name: str) -> None:
    assert split_ctx(collate(EXACT[name], ragged=True)) == EXACT[name]
