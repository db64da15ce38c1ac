"""`replay`: from the key and the recorded ctx of a sample, the very sample again, whatever the chain is made of."""

from __future__ import annotations

import json
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
from torchdata.datapipes.iter import IterableWrapper
from torchdata.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes._draw import seeded_globals

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")

NUMBERS = [(n, n % 2) for n in range(6)]


def indexed(items: Any = NUMBERS) -> Any:
    return kdp.from_dataset(list(items))


def stream(items: Any = NUMBERS) -> Any:
    return IterableWrapper(list(items)).to_samples(fields="x y")


both_flavours = pytest.mark.parametrize("make", [indexed, stream])


def told(value: Any) -> Any:
    """Return every byte, type and shape of a value, to compare."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Image.Image):
        return "image", value.mode, value.size, value.tobytes()
    if isinstance(value, dict):
        return {name: told(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [told(part) for part in value]
    return type(value).__name__, value


def travelled(ctx: Any) -> Any:
    """Return a ctx as a file of JSON gives it back."""
    return json.loads(json.dumps(ctx))


def delivered(batches: Any, epochs: int = 2) -> list[Any]:
    return [item for _ in range(epochs) for batch in batches for item in batch]


def assert_replayed(pipe: Any, items: list[Any]) -> None:
    """Replay items `((key, ...), ctx)`, and compare them with what was delivered."""
    assert items
    for (key, *rest), ctx in items:
        before = told(ctx)
        again = kdp.replay(key, travelled(ctx), pipe)
        assert told(again) == told(((key, *rest), ctx)), (key, ctx)
        assert told(ctx) == before


def assert_replayed_or_refused(item: Any, replay: Callable[[], Any]) -> None:
    """Accept the very item or an error of the chain's, and nothing in between."""
    try:
        again = replay()
    except kdp.ChainError:
        return
    assert told(again) == told(item)


def is_refused(build: Callable[[], Any]) -> bool:
    try:
        build()
    except (kdp.ChainError, ValueError):
        return True
    return False


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


class Shift:
    """Adds a recorded number."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"by": int(rng.integers(1, 1 << 40))}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        return value + params["by"]


def plus_random(x: float) -> float:
    return x + random.random()


def plus_rng(x: float, rng: np.random.Generator) -> float:
    return x + rng.random()


@kdp.sample_pipe("replay_test_read_x")
def read_x(sample: kdp.Sample) -> kdp.Sample:
    """A user's pipe that reads a field as the sample passes."""
    sample["x"]
    return sample


@kdp.sample_pipe("replay_test_read_y")
def read_y(sample: kdp.Sample) -> kdp.Sample:
    """Likewise."""
    sample["y"]
    return sample


EITHER: dict[str, Callable[[], Any]] = {
    "crop": lambda: kdp.RandomResizedCrop((9, 11)),
    "flip": lambda: kdp.HorizontalFlip(),
    "jitter": lambda: kdp.ColorJitter(0.5, 0.5, (0.5, 2), 0.2),
    "resize": lambda: kdp.Resize(10, interpolation="bicubic"),
    "centre": lambda: kdp.CenterCrop(10),
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
        assert kdp.split_ctx(kdp.collate(ctxs)) == ctxs


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
                for place, (key, sample_ctx) in enumerate(zip(keys, kdp.split_ctx(ctx), strict=True)):
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
def test_a_sample_that_was_not_selected_is_made_again_as_a_sample(make: Any) -> None:
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


def test_what_replaying_draws_leaves_the_global_generators_alone() -> None:
    pipe = indexed().record_ctx().transform("x", plus_random).select("x", return_ctx=True)
    _, ctx = pipe[3]
    with seeded_globals(b"a"):
        expected = random.random(), np.random.rand(), torch.rand(()).item()
    with seeded_globals(b"a"):
        kdp.replay("3", ctx, pipe)
        assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


@both_flavours
def test_what_follows_deal_is_left_out(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift()).select("key x y", return_ctx=True).deal(batch_size=3)
    mixed = pipe.collate_samples().mixup(num_classes=2)
    for (key, *rest), ctx in delivered(pipe):
        for end in (pipe.map(list), mixed, mixed.unbatch()):
            assert kdp.replay(key, ctx, end) == ((key, *rest), ctx)


@both_flavours
def test_the_ctx_of_a_batch_is_refused_with_the_way_out(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift()).select("key x", return_ctx=True).deal(batch_size=3)
    _, ctx = next(iter(pipe.collate_samples()))
    for key in ("0", next(iter(make()))):
        with pytest.raises(TypeError, match=r"`ctx` is that of a batch. `kdp.split_ctx\(ctx\)` makes those of its"):
            kdp.replay(key, ctx, pipe)


@both_flavours
@pytest.mark.parametrize("function", [plus_rng, plus_random, Shift()], ids=["rng", "random", "two steps"])
def test_a_draw_of_which_the_ctx_knows_nothing_is_refused(make: Any, function: Any) -> None:
    for pipe in (make().transform("x", function), make().transform("x", function).record_ctx()):
        selected = pipe.select("key x", return_ctx=True)
        for (key, _), ctx in delivered(selected.deal(batch_size=3)):
            assert ctx == {}
            with pytest.raises(kdp.ChainError, match=r"nothing in the ctx says which. Put `.record_ctx\(\)` before"):
                kdp.replay(key, ctx, selected)


@both_flavours
def test_a_key_that_is_not_there_is_an_error(make: Any) -> None:
    pipe = make().record_ctx().select("x")
    with pytest.raises(kdp.DataError, match="has no sample of key '17'"):
        kdp.replay("17", {}, pipe)
    with pytest.raises(kdp.DataError, match="has no sample of key '0'"):
        kdp.replay("0", {}, make([]).record_ctx().select("x"))


def test_what_is_no_key_no_ctx_and_no_chain_is_refused() -> None:
    pipe = indexed().record_ctx().transform("x", Shift())
    sample = pipe[0]
    with pytest.raises(kdp.ChainError, match="as its source gives it: this one has been worked on"):
        kdp.replay(sample, {}, pipe)
    with pytest.raises(TypeError, match="`sample_or_key` must be a sample or its key, but is 0"):
        kdp.replay(0, {}, pipe)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`ctx` must be what a sample has recorded, a dictionary"):
        kdp.replay("0", None, pipe)  # type: ignore[arg-type]
    for chain in (IterableWrapper([1]), IterableWrapper([1]).zip(IterableWrapper([2])), 5, None, "x"):
        with pytest.raises(kdp.ChainError, match="is no pipe of samples"):
            kdp.replay("0", {}, chain)


def test_a_sample_of_one_of_several_sources_is_refused() -> None:
    pipe = kdp.concat(indexed(), indexed()).record_ctx().select("x")
    with pytest.raises(kdp.ChainError, match="has several sources: give the key of a sample in its place"):
        kdp.replay(indexed()[0], {}, pipe)


def test_samples_behind_bad_ones_of_a_stream_are_made_again() -> None:
    pipe = stream([(0, 0), (1, 0), (0, 1), (3, 1)]).record_ctx().transform("x", lambda x: 6 / x, Shift())
    items = delivered(pipe.on_error("skip").select("key x", return_ctx=True).deal(batch_size=2))
    assert [key for (key, _), _ in items] == ["1", "3"] * 2
    assert_replayed(pipe.select("key x", return_ctx=True), items)


@both_flavours
def test_random_getters_of_a_source_are_drawn_again(make: Any) -> None:
    class Source(kdp.SampleSource):
        def __len__(self) -> int:
            return 6

        def getitem_x(self, index: int, rng: Any) -> float:
            return index + float(rng.random())

        def getitem_y(self, index: int, ctx: Any) -> float:
            ctx["y"] = random.random()
            return float(ctx["y"])

    for source in (Source(), kdp.from_dataset(Source())):
        pipe = source.repeat_until(repetitions=2).record_ctx().transform("x", Shift())
        selected = pipe.select("key x y", return_ctx=True)
        dealt = selected.deal(batch_size=5, shuffle=True, seed=2)
        assert_replayed(dealt, delivered(dealt))


def test_own_two_step_transforms_that_are_read_early_in_a_stream_are_made_again() -> None:
    pipe = stream().shuffle().record_ctx().transform("x", Shift()).replay_test_read_x().transform("x", Shift())
    dealt = pipe.select("key x", return_ctx=True).deal(batch_size=4, seed=5)
    assert_replayed(dealt, delivered(dealt))


def test_seeds_of_early_draws_of_shards_of_workers_own_are_recorded(photo_shards: str) -> None:
    source = kdp.stream_shards(photo_shards).rename_fields(x="cls").record_ctx()
    pipe = source.transform("x", plus_rng).replay_test_read_x().select("key x", return_ctx=True)
    with kdp.Loader(pipe.deal(batch_size=40, split="shards", seed=1), num_workers=2) as loader:
        for _ in range(2):
            items = [item for batch in loader for item in batch]
            assert len({ctx["early_draws"]["plus_rng"]["seed"] for _, ctx in items}) == 2
            for fields, ctx in items[::20]:
                assert kdp.replay(fields[0], travelled(ctx), pipe)[0] == fields


class Noisy(torch.utils.data.Dataset[Any]):
    """A dataset with random transforms of its own."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[float, int]:
        return index + random.random() + np.random.rand() + torch.rand(()).item(), index % 2


def test_random_transforms_of_a_dataset_are_drawn_again_or_refused() -> None:
    pipe = kdp.from_dataset(Noisy()).record_ctx().transform("x", Shift()).select("key x", return_ctx=True)
    for item in delivered(pipe.deal(batch_size=4, shuffle=True)):
        assert_replayed_or_refused(item, lambda item=item: kdp.replay(item[0][0], item[1], pipe))  # type: ignore[misc]


def test_random_transforms_of_a_dataset_are_drawn_again_where_the_draw_is_recorded() -> None:
    pipe = kdp.from_dataset(Noisy()).record_ctx().transform("x", plus_rng).select("key x", return_ctx=True)
    assert_replayed(pipe, delivered(pipe.deal(batch_size=4, shuffle=True)))


@pytest.mark.parametrize("seed", [1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_largest_seeds_are_collated(seed: int, num_workers: int) -> None:
    pipe = indexed().record_ctx().transform("x", plus_rng).select("key x", return_ctx=True)
    dealt = pipe.deal(batch_size=4, seed=seed)
    with kdp.Loader(dealt.collate_samples(), num_workers=num_workers) as loader:
        for _ in range(2):
            for (keys, x), ctx in loader:
                for key, value, sample_ctx in zip(keys, x.tolist(), kdp.split_ctx(ctx), strict=True):
                    assert kdp.replay(key, travelled(sample_ctx), dealt) == ((key, value), sample_ctx)


@pytest.mark.parametrize("function", [plus_rng, plus_random])
def test_callables_that_are_read_early_in_a_stream_are_made_again_with_their_ctx(function: Any) -> None:
    pipe = stream().shuffle().record_ctx().transform("x", function).replay_test_read_x()
    dealt = pipe.select("key x", return_ctx=True).deal(batch_size=4, seed=5)
    assert_replayed(dealt, delivered(dealt))


@pytest.mark.parametrize("function", [plus_rng, plus_random])
def test_callables_that_are_read_early_in_a_stream_give_the_same_values(function: Any) -> None:
    pipe = stream().shuffle().record_ctx().transform("x", function).replay_test_read_x().transform("y", function)
    dealt = pipe.select("key x y", return_ctx=True).deal(batch_size=4, seed=5)
    for item, ctx in delivered(dealt):
        assert kdp.replay(item[0], travelled(ctx), dealt)[0] == item


@pytest.mark.parametrize("function", [plus_rng, Shift()], ids=["rng", "two steps"])
def test_fields_that_a_stock_filter_reads_are_made_again(function: Any) -> None:
    pipe = stream().record_ctx().transform("x", function).filter(lambda sample: sample["x"] >= 0)
    dealt = pipe.transform("y", Shift()).select("key x", return_ctx=True).deal(batch_size=4, seed=5)
    assert_replayed(dealt, delivered(dealt))


def test_replaying_is_no_epoch() -> None:
    def chain() -> Any:
        pipe = stream().record_ctx().transform("x", plus_rng).filter(lambda sample: sample["x"] >= 0)
        return pipe.select("key x", return_ctx=True)

    expected, pipe = chain(), chain()
    assert list(pipe) == list(expected)
    kdp.replay("0", {"draw": {"seed": 0, "epoch": 0, "ordinal": 0}}, pipe)
    assert list(pipe) == list(expected)


def test_samples_that_a_stream_repeats_have_early_draws_of_their_own() -> None:
    early = stream().record_ctx().transform("x", plus_rng).replay_test_read_x()
    pipe = early.oversample(class_counts={0: 1, 1: 3}).transform("y", plus_rng).replay_test_read_y()
    dealt = pipe.select("key x y", return_ctx=True).deal(batch_size=20)
    for item, ctx in delivered(dealt):
        assert kdp.replay(item[0], travelled(ctx), dealt)[0] == item


class Draw(Shift):
    """A user's own, of the name that `draw` has in the ctx."""


@both_flavours
@pytest.mark.parametrize("others", [(), (plus_rng,)], ids=["alone", "with a draw"])
def test_an_operation_may_be_called_draw(make: Any, others: Any) -> None:
    def chain() -> Any:
        return make().record_ctx().transform("x", Draw(), *others).select("key x", return_ctx=True)

    if not is_refused(chain):
        assert_replayed(chain(), delivered(chain().deal(batch_size=4)))


def note_draw(x: int, ctx: Any) -> int:
    ctx["draw"] = 5
    return x


def note_early_draws(x: int, ctx: Any) -> int:
    ctx["early_draws"] = 5
    return x


@both_flavours
@pytest.mark.parametrize("note", [note_draw, note_early_draws])
def test_a_user_may_write_an_entry_draw_or_is_told(make: Any, note: Any) -> None:
    pipe = make().record_ctx().transform("x", note, Shift()).select("key x", return_ctx=True)
    for item in delivered(pipe.deal(batch_size=4)):
        assert_replayed_or_refused(item, lambda item=item: kdp.replay(item[0][0], item[1], pipe))  # type: ignore[misc]


class Shift_2(Shift):
    """A name that the second `Shift` has already."""


@both_flavours
def test_no_two_operations_share_an_entry(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift(), Shift(), Shift_2()).select("key x", return_ctx=True)
    for (key, x), ctx in delivered(pipe.deal(batch_size=4)):
        assert x == int(key) + sum(entry["by"] for entry in ctx.values())
        assert len({entry["by"] for entry in ctx.values()}) == 3


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


def test_a_raw_sample_can_be_replayed_again_under_another_draw() -> None:
    class Source(kdp.SampleSource):
        def __len__(self) -> int:
            return 4

        def getitem_x(self, index: int, rng: Any) -> float:
            return index + float(rng.random())

    pipe = Source().record_ctx().transform("x", Shift()).select("key x", return_ctx=True)
    raw = [Source()[index] for index in range(4)]
    for (key, x), ctx in delivered(pipe.deal(batch_size=3)):
        assert kdp.replay(raw[int(key)], ctx, pipe) == ((key, x), ctx)


def add_100(sample: kdp.Sample) -> kdp.Sample:
    sample["x"] = sample["x"] + 100
    return sample


def test_a_stock_map_of_samples_is_done_to_a_raw_sample_or_refused() -> None:
    pipe = stream().map(add_100).record_ctx().transform("x", Shift()).select("key x", return_ctx=True)
    raw = {sample.key: sample for sample in stream()}
    for item in delivered(pipe.deal(batch_size=3)):
        assert_replayed_or_refused(item, lambda item=item: kdp.replay(raw[item[0][0]], item[1], pipe))  # type: ignore[misc]


def negated(item: Any) -> Any:
    (key, x), ctx = item
    return (key, -x), ctx


@both_flavours
def test_a_stock_map_before_deal_is_done_or_refused(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift()).select("key x", return_ctx=True).map(negated)
    for item in delivered(pipe.deal(batch_size=3)):
        assert_replayed_or_refused(item, lambda item=item: kdp.replay(item[0][0], item[1], pipe))  # type: ignore[misc]


OTHERS = [(100 + number, 1) for number in range(6)]
CLASHES: dict[str, Callable[[], Any]] = {
    "concat": lambda: kdp.concat(indexed(), indexed(OTHERS)),
    "mix": lambda: indexed().mix([indexed(OTHERS)], weights=[1, 1], seed=0),
}


@pytest.mark.parametrize("clash", CLASHES)
def test_keys_that_two_sources_share_are_told_apart_or_refused(clash: str) -> None:
    pipe = CLASHES[clash]().record_ctx().transform("x", Shift()).select("key x", return_ctx=True)
    for item in delivered(pipe.deal(batch_size=3)):
        assert_replayed_or_refused(item, lambda item=item: kdp.replay(item[0][0], item[1], pipe))  # type: ignore[misc]


@pytest.mark.parametrize("make", [indexed, stream])
def test_samples_can_be_replayed_while_the_chain_is_iterated(make: Any) -> None:
    dealt = make().record_ctx().transform("x", Shift()).select("key x", return_ctx=True).deal(batch_size=2)
    for _ in range(2):
        numbers = []
        for batch in dealt:
            assert_replayed(dealt, batch)
            numbers += [key for (key, _), _ in batch]
        assert numbers == [str(number) for number in range(6)]


def test_a_bad_sample_elsewhere_is_in_nobodys_way() -> None:
    pipe = indexed([(1, 0), (2, 0), (0, 0)]).record_ctx().transform("x", lambda x: 1 / x).replay_test_read_x()
    dealt = pipe.transform("x", Shift()).on_error("skip").select("key x", return_ctx=True).deal(batch_size=2)
    items = delivered(dealt)
    assert len(items) == 4
    assert_replayed(dealt, items)


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
    assert kdp.split_ctx(kdp.collate(EXACT[name], ragged=True)) == EXACT[name]
