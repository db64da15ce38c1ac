"""`transform`: callables on one field, with reproducible randomness wherever they draw from."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core import randomness
from kdpipes.core.randomness import seeded_globals
from tests.work.replaying import Shift

ITEMS = [(n, n % 2) for n in range(4)]


def indexed(items: list[Any] = ITEMS) -> Any:
    return kdp.from_dataset(list(items))


def stream(items: list[Any] = ITEMS) -> Any:
    return IterableWrapper(list(items)).to_samples(fields="x y")


FLAVOURS = pytest.mark.parametrize("make", [indexed, stream])


def from_rng(x: int, rng: np.random.Generator) -> tuple[int, int]:
    return x, int(rng.integers(1 << 60))


def from_random(x: int) -> tuple[int, int]:
    return x, random.getrandbits(60)


def from_numpy(x: int) -> tuple[int, int]:
    return x, int(np.random.randint(1 << 60))


def from_torch(x: int) -> tuple[int, int]:
    return x, int(torch.randint(1 << 60, ()))


def global_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


def test_callables_are_applied_in_order_to_one_field() -> None:
    for make in (indexed, stream):
        pipe = make().transform("x", lambda x: x + 1, functools.partial(pow, 2)).transform("x", str).select("x y")
        assert [list(pipe) for _ in range(2)] == [[("2", 0), ("4", 1), ("8", 0), ("16", 1)]] * 2


@pytest.mark.parametrize("function", [from_rng, from_random, from_numpy, from_torch])
def test_randomness_follows_seed_epoch_and_ordinal_alone(function: Any) -> None:
    def draws(source: Any, seed: int) -> list[Any]:
        dealt = source.transform("x", function).select("x").deal(batch_size=3, seed=seed)
        return [item for _ in range(2) for batch in dealt for (item,) in batch]

    states = global_states()
    first = draws(indexed(), 0)
    assert draws(stream(), 0) == first, "on a stream as on an index"
    assert [x for x, _ in first] == [0, 1, 2, 3] * 2
    assert len({number for _, number in first + draws(indexed(), 1)}) == 16
    assert global_states() == states
    with seeded_globals(b"elsewhere"):
        assert draws(indexed(), 0) == first


class Forgetful:
    """A transform in two steps that forgets to return."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {}

    def apply(self, value: Any, params: dict[str, Any]) -> None:
        return None


@FLAVOURS
def test_a_transform_that_returns_none_is_an_error(make: Any) -> None:
    for transform, name in ((lambda x: None, "lambda"), (Forgetful(), "forgetful"), (from_nothing, "from_nothing")):
        pipe = make().transform("x", transform).select("x").deal(batch_size=2)
        with pytest.raises(TypeError, match=rf"`{name}` must return the new value, but returned None\.") as error:
            list(pipe)
        assert f"kdpipes: while applying '{name}' to field 'x' of sample '0' (ordinal 0)" in error.value.__notes__
    missing = make([(None, 0)]).transform("x", lambda x: None if x is None else x + 1, from_nothing)
    assert list(missing.select("x")) == [(None,)], "a sample without a value stays one"


def from_nothing(x: Any, rng: np.random.Generator) -> None:
    rng.random()


def test_the_globals_are_restored_after_an_error_as_well() -> None:
    states = global_states()
    with pytest.raises(ZeroDivisionError) as error:
        indexed().transform("x", lambda x: 1 // (from_numpy(x)[1] * 0)).select("x")[2]
    assert global_states() == states
    assert error.value.__notes__ == ["kdpipes: while applying 'lambda' to field 'x' of sample '2' (ordinal 2)"]


def test_a_callable_that_fails_on_bytes_gets_a_decode_hint(photo_folder: Any) -> None:
    photos = kdp.image_folder(photo_folder)
    with pytest.raises(AttributeError) as error:
        photos.transform("x", lambda image: image.resize((4, 4))).select("x")[0]
    assert any("put `.decode_images()` before it" in note for note in error.value.__notes__)
    with pytest.raises(AttributeError) as error:
        kdp.from_dataset([b"any"], "x").transform("x", lambda image: image.resize((4, 4))).select("x")[0]
    assert not any("decode_images" in note for note in error.value.__notes__)


def test_two_transforms_of_one_name_draw_different_numbers() -> None:
    pipe = indexed().transform("x", from_rng, from_rng).transform("y", from_rng).select("x y")
    ((_, first), second), (_, third) = pipe[1]
    assert len({first, second, third}) == 3
    alone = indexed().transform("x", from_rng)[1]["x"]
    assert alone[1] == first, "what follows a transform does not change its numbers"


def test_ctx_is_the_samples_after_record_ctx_else_empty() -> None:
    for make in (indexed, stream):

        def note(x: int, ctx: dict[str, Any]) -> int:
            ctx["seen"] = [*ctx.get("seen", []), x]
            return x + 1

        recorded = make().record_ctx().transform("x", note, note).select("x", return_ctx=True)
        assert [list(recorded) for _ in range(2)] == [[((n + 2,), {"seen": [n, n + 1]}) for n in range(4)]] * 2
        plain = make().transform("x", note, note).select("x", return_ctx=True)
        assert list(plain) == [((n + 2,), {}) for n in range(4)]


def test_an_image_arrives_as_pillows_and_only_if_transformed(photo_folder: Any) -> None:
    for make in (indexed, stream):
        content = next(photo_folder.rglob("*.jpg")).read_bytes()
        pipe = (
            make([(content, 0), (b"no image", 1)])
            .decode_images()
            .transform("x", lambda image: (type(image), image.mode))
        )
        assert next(iter(pipe.select("x"))) == ((Image.Image, "RGB"),)
        assert list(pipe.select("y")) == [(0,), (1,)]


class Scale:
    def __call__(self, value: Any) -> Any:
        return 2 * value


def test_a_transform_in_two_steps_is_recorded() -> None:
    for make in (indexed, stream):
        pipe = make().record_ctx().transform("x", Shift()).select("x", return_ctx=True)
        for _ in range(2):
            for n, ((x,), ctx) in enumerate(pipe):
                assert x == n + ctx["shift"]["by"]


class AtOnce(Shift):
    def draw_and_apply(self, value: Any, rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
        params = self.draw(value, rng)
        return params, ("at once", self.apply(value, params))


def test_a_transform_that_draws_and_applies_is_called_once() -> None:
    for make in (indexed, stream):
        pipe = make().record_ctx().transform("x", AtOnce()).select("x", return_ctx=True)
        for _ in range(2):
            for n, ((x,), ctx) in enumerate(pipe):
                assert x == ("at once", n + ctx["at_once"]["by"])


REJECTED: list[tuple[tuple[Any, ...], str]] = [
    ((Shift,), r"`transforms\[0\]` must be a transform, .* Write `Shift\(...\)` to make one"),
    ((Scale(), Scale), r"`transforms\[1\]` must be a callable, .* Write `Scale\(...\)` to make one"),
    (([Scale()],), r"`transforms\[0\]` must be a callable, .* Pass the callables as separate arguments"),
    (("scale",), r"`transforms\[0\]` must be a callable, but is 'scale' instead"),
]


def test_what_is_no_callable_is_rejected_with_the_way_out() -> None:
    for transforms, message in REJECTED:
        for source in (indexed(), stream()):
            with pytest.raises(TypeError, match=message):
                source.transform("x", *transforms)


def test_a_missing_callable_or_field_is_an_error_when_built() -> None:
    with pytest.raises(ValueError, match="`transform` must be given at least one callable"):
        indexed().transform("x")
    with pytest.raises(TypeError, match="`field` must be the name of a field"):
        indexed().transform(Scale())
    with pytest.raises(kdp.FieldError, match="The source has no field 'image'; it has 'x', 'y'"):
        indexed().transform("image", Scale())


def test_a_module_gets_the_ctx_and_generator_of_its_forward() -> None:
    class Crop(torch.nn.Module):
        def forward(self, x: int, ctx: Any = None) -> int:
            ctx["crop_parameters"] = int(torch.randint(100, ()).item())
            return x + int(ctx["crop_parameters"])

    class Shift(torch.nn.Module):
        def forward(self, x: int, rng: Any) -> int:
            return x + int(rng.integers(1 << 40))

    pipe: Any = kdp.from_dataset([(1, 0), (2, 0)]).record_ctx()
    for _ in range(2):
        for (x, index), ctx in pipe.transform("x", Crop()).select("x index", return_ctx=True):
            assert x == index + 1 + ctx["crop_parameters"]
            assert ctx["draw"] == {"seed": 0, "epoch": 0, "ordinal": index}
    assert [x for (x,) in pipe.transform("x", Shift()).select("x")] == [
        x for (x,) in pipe.transform("x", Shift()).select("x")
    ]


def test_a_callable_that_draws_nothing_is_not_seeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Double:
        is_random = False

        def __call__(self, x: int) -> int:
            return 2 * x

    def reject(key: bytes) -> Any:
        raise AssertionError("seeded")

    monkeypatch.setattr(randomness, "seeded_globals", reject)
    pipe = indexed().transform("x", Double()).select("x")
    assert [x for (x,) in pipe] == [0, 2, 4, 6]
    with pytest.raises(AssertionError, match="seeded"):
        pipe = indexed().transform("x", lambda x: x + random.random()).select("x")[0]
