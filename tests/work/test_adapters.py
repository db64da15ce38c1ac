"""Transforms of albumentations and torchvision: drawn like kdpipes' own, recorded, and done again from the record."""

from __future__ import annotations

import copy
import json
import pickle
import random
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import albumentations as A
import cloudpickle
import cv2
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from PIL import Image
from torch import nn

import kdpipes as kdp
from kdpipes.core.fingerprint import fingerprint
from kdpipes.core.randomness import seeded_globals
from kdpipes.work.adapters import adapted
from tests.hashes import fingerprints

BY_PARAMS: dict[str, Callable[[], Any]] = {
    "affine": lambda: A.Affine(rotate=(-30, 30), shear=(-5, 5), p=0.9),
    "brightness": lambda: A.RandomBrightnessContrast(p=0.9),
    "channel_dropout": lambda: A.ChannelDropout(p=0.9),
    "channel_shuffle": lambda: A.ChannelShuffle(p=0.9),
    "clahe": lambda: A.CLAHE(p=0.9),
    "coarse_dropout": lambda: A.CoarseDropout(fill="random", p=0.9),
    "color_jitter": lambda: A.ColorJitter(p=0.9),
    "compression": lambda: A.ImageCompression(quality_range=(20, 80), p=0.9),
    "crop": lambda: A.RandomCrop(40, 48),
    "d4": lambda: A.D4(),
    "flip": lambda: A.HorizontalFlip(p=0.5),
    "gaussian_blur": lambda: A.GaussianBlur(p=0.9),
    "grid_shuffle": lambda: A.RandomGridShuffle(p=0.9),
    "hue": lambda: A.HueSaturationValue(p=0.9),
    "iso_noise": lambda: A.ISONoise(p=0.9),
    "perspective": lambda: A.Perspective(p=0.9),
    "rain": lambda: A.RandomRain(p=0.9),
    "resized_crop": lambda: A.RandomResizedCrop((40, 48)),
    "rotate": lambda: A.SafeRotate(p=0.9),
    "shadow": lambda: A.RandomShadow(p=0.9),
    "shot_noise": lambda: A.ShotNoise(p=0.9),
    "superpixels": lambda: A.Superpixels(p=0.9),
    "tone_curve": lambda: A.RandomToneCurve(p=0.9),
}
BY_SEED: dict[str, Callable[[], Any]] = {
    "elastic": lambda: A.ElasticTransform(p=0.9),
    "fog": lambda: A.RandomFog(p=0.9),
    "gauss_noise": lambda: A.GaussNoise(p=0.9),
    "glass_blur": lambda: A.GlassBlur(p=0.9),
    "grid_distortion": lambda: A.GridDistortion(p=0.9),
    "pixel_dropout": lambda: A.PixelDropout(p=0.9),
    "spatter": lambda: A.Spatter(p=0.9),
}
NESTED: dict[str, Callable[[], Any]] = {
    "flat": lambda: A.Compose([A.RandomCrop(40, 48), A.HorizontalFlip(), A.GaussNoise(), A.CoarseDropout(p=0.5)]),
    "sometimes": lambda: A.Compose([A.Transpose(p=0.5), A.ElasticTransform(p=0.5)], p=0.5),
    "one_of": lambda: A.OneOf([A.Blur(), A.GaussNoise(), A.HueSaturationValue()], p=0.8),
    "some_of": lambda: A.SomeOf([A.VerticalFlip(), A.GaussNoise(), A.RandomGamma(p=1)], n=5, replace=True),
    "random_order": lambda: A.RandomOrder([A.VerticalFlip(), A.Rotate(p=1), A.RandomGamma(p=1)], n=3),
    "one_or_other": lambda: A.OneOrOther(A.Solarize(), A.Sequential([A.Posterize(), A.Rotate()], p=1)),
    "channels": lambda: A.Compose([A.SelectiveChannelTransform([A.GaussNoise(p=1), A.Blur()], [0, 2]), A.Transpose()]),
    "replay": lambda: A.ReplayCompose([A.RandomCrop(40, 48), A.OneOf([A.HorizontalFlip(), A.VerticalFlip()], p=1)]),
    "seeded": lambda: A.Compose([A.Rotate(p=1)], seed=7, save_applied_params=True),
    "deep": lambda: A.Compose(
        [
            A.OneOf(
                [
                    A.Sequential([A.HorizontalFlip(), A.SomeOf([A.Blur(), A.RandomGamma()], n=2)], p=0.5),
                    A.Compose([A.OneOf([A.GridDistortion(), A.OpticalDistortion()], p=1), A.ToGray(p=0.5)]),
                ],
                p=0.9,
            ),
            A.RandomResizedCrop((40, 48)),
        ]
    ),
    "normalized": lambda: A.Compose([A.HorizontalFlip(), A.Normalize(), ToTensorV2()]),
    "single": lambda: A.Compose([A.RandomScale(p=1)]),
    "nothing": lambda: A.Compose([]),
}
ALBUMENTATIONS = {**BY_PARAMS, **BY_SEED, **NESTED}


MODULE = "torchvision.transforms.v2"


@pytest.fixture(params=["0.21", "0.20"])
def v2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for `torchvision.transforms.v2`; before version 0.21, the two methods had private names."""
    source = Path(__file__).with_name("standin_v2.py").read_text(encoding="utf-8")
    if request.param == "0.20":
        source = source.replace("make_params(", "_get_params(").replace(" transform(self", " _transform(self")
        source = source.replace("self.transform(inpt", "self._transform(inpt")
    for name in ("torchvision", "torchvision.transforms", MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    exec(source, vars(sys.modules[MODULE]))
    return sys.modules[MODULE]


def turned(image: Image.Image) -> Image.Image:
    return image.rotate(random.uniform(0, 90) + np.random.rand() + torch.rand(()).item())


def own(v2: Any) -> Any:
    class OfTheirOwn(v2.Transform):  # type: ignore[misc]
        """A user's class, which draws where it likes."""

        def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
            return turned(inpt)

        _transform = transform

    return OfTheirOwn()


def deep(v2: Any) -> Any:
    return v2.Compose(
        [
            v2.RandomApply(nn.ModuleList([v2.ColorJitter(), v2.RandAugment()]), p=0.7),
            v2.RandomChoice([v2.RandomHorizontalFlip(), v2.Compose([v2.ElasticTransform(), v2.Lambda(turned)])]),
            v2.RandomOrder([turned, v2.RandomHorizontalFlip(), v2.RandomResizedCrop(32), own(v2)]),
        ]
    )


V2: dict[str, Callable[[Any], Any]] = {
    "flip": lambda v2: v2.RandomHorizontalFlip(),
    "crop": lambda v2: v2.RandomResizedCrop(32),
    "jitter": lambda v2: v2.ColorJitter(),
    "elastic": lambda v2: v2.ElasticTransform(),
    "noise": lambda v2: v2.GaussianNoise(),
    "auto": lambda v2: v2.RandAugment(),
    "own": own,
    "flat": lambda v2: v2.Compose(
        [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.GaussianNoise(), v2.ToImage()]
    ),
    "deep": deep,
}


def pixels_of(value: Any) -> tuple[str, str, Any]:
    array = np.asarray(value)
    return type(value).__name__, str(array.dtype), array.tolist()


def photos(folder: Path, transform: Any, *, num: int = 12) -> Any:
    return kdp.image_folder(folder)[::13][:num].decode_images().record_ctx().transform("x", transform)


def batches_of(pipe: Any, *, num_epochs: int = 2, **workers: Any) -> list[str]:
    """Return what the batches of some epochs are, image by image."""
    with kdp.Loader(
        pipe.select("key x", return_ctx=True).deal(batch_size=3, shuffle=True, seed=3), **workers
    ) as loader:
        return [
            json.dumps([key, pixels_of(x), ctx])
            for _ in range(num_epochs)
            for batch in loader
            for (key, x), ctx in batch
        ]


def assert_repeats(folder: Path, make: Callable[[], Any]) -> list[dict[str, Any]]:
    """Check that what is recorded, alone, makes the same of the image again; return all steps."""
    pipe, again = photos(folder, make()), adapted(make())
    sources = {sample.key: sample["x"] for sample in kdp.image_folder(folder).decode_images()}
    steps = []
    for epoch in range(2):
        for (batch,) in pipe.select("key x", return_ctx=True).deal(batch_size=1, seed=epoch):
            ((key, x), ctx) = batch
            (recorded,) = json.loads(json.dumps(ctx)).values()
            assert recorded == next(iter(ctx.values())), "plain data"
            assert pixels_of(again.apply(sources[key], recorded)) == pixels_of(x)
            steps += recorded["steps"]
    return steps


@pytest.mark.parametrize("name", ALBUMENTATIONS)
def test_albumentations_is_replayed_bit_for_bit_from_json(name: str, photo_folder: Path) -> None:
    steps = assert_repeats(photo_folder, ALBUMENTATIONS[name])
    if name not in NESTED:
        assert {"params" in step for step in steps} == {name in BY_PARAMS}
    assert bool(steps) == (name != "nothing")


@pytest.mark.parametrize("name", V2)
def test_what_v2_did_is_done_again_bit_for_bit_from_json(name: str, photo_folder: Path, v2: Any) -> None:
    steps = assert_repeats(photo_folder, lambda: V2[name](v2))
    kinds = {"params" in step for step in steps}
    by_params = {
        "flip": True,
        "crop": True,
        "jitter": True,
        "elastic": False,
        "noise": False,
        "auto": False,
        "own": False,
    }
    assert kinds == ({by_params[name]} if name in by_params else {True, False})


@pytest.mark.parametrize("name", ["crop", "flip", "elastic", "gauss_noise", "flat", "deep", "some_of", "channels"])
def test_workers_and_objects_make_equal_images_epochs_differ(name: str, photo_folder: Path) -> None:
    make = ALBUMENTATIONS[name]
    first = batches_of(photos(photo_folder, make()))
    assert set(first[:12]).isdisjoint(first[12:]) if name != "flip" else set(first[:12]) != set(first[12:])
    for num_workers in (1, 2):
        assert batches_of(photos(photo_folder, make()), num_workers=num_workers) == first
    used = make()
    with seeded_globals(b"elsewhere"):
        cv2.setRNGSeed(5)
        [used(image=np.zeros((64, 64, 3), np.uint8)) for _ in range(5)]
        assert batches_of(photos(photo_folder, used), num_epochs=1) == first[:12]


@pytest.mark.parametrize("name", V2)
def test_workers_make_the_same_images_with_v2(name: str, photo_folder: Path, v2: Any) -> None:
    first = batches_of(photos(photo_folder, V2[name](v2), num=6))
    assert batches_of(photos(photo_folder, V2[name](v2), num=6), num_workers=2) == first


def test_spawned_workers_and_threads_make_the_same_images(photo_folder: Path) -> None:
    first = batches_of(photos(photo_folder, NESTED["deep"]()), num_epochs=1)
    assert (
        batches_of(photos(photo_folder, NESTED["deep"]()), num_epochs=1, num_workers=2, start_method="forkserver")
        == first
    )
    service = kdp.ThreadReadingService(3)
    noisy = A.Compose([A.GaussNoise(p=1), NESTED["deep"]()])
    assert batches_of(photos(photo_folder, noisy), reading_service=service) == batches_of(photos(photo_folder, noisy))


def test_a_sample_is_the_same_whatever_was_read_before_it(photo_folder: Path) -> None:
    pipe = photos(photo_folder, NESTED["deep"]())
    alone = pixels_of(pipe[7]["x"])
    [sample["x"] for sample in pipe]
    assert pixels_of(pipe[7]["x"]) == alone
    unrecorded = kdp.image_folder(photo_folder)[::13].decode_images().transform("x", NESTED["deep"]())
    assert pixels_of(unrecorded[7]["x"]) == alone, "recording changes no value"


def test_the_users_object_and_global_generators_are_restored(photo_folder: Path, v2: Any) -> None:
    def states() -> Any:
        leaf = ours.transforms[0]
        own = leaf.random_generator.bit_generator.state, leaf.py_random.getstate(), dict(leaf.params)
        numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return own, numbers, cloudpickle.dumps(theirs), list(vars(leaf))

    ours, theirs = A.Compose([A.Rotate(p=1), A.GaussNoise(p=1)]), V2["deep"](v2)
    before = states()
    for transform in (ours, theirs):
        pipe = photos(photo_folder, transform)
        _, (x, ctx) = pipe[0]["x"], pipe.select("x", return_ctx=True)[1]
        adapted(transform).apply(kdp.image_folder(photo_folder).decode_images()[0]["x"], *ctx.values())
        assert isinstance(x[0], Image.Image)
    assert states() == before


def test_an_array_that_is_transformed_stays_as_it_is() -> None:
    array = np.full((32, 32, 3), 100, np.uint8)
    pipe = kdp.from_dataset([(array, 0)] * 8).transform("x", A.CoarseDropout(p=1), A.PixelDropout(p=1))
    assert all(np.asarray(sample["x"]).min() == 0 for sample in pipe)
    assert (array == 100).all()


def test_entries_are_named_by_class_and_tell_the_steps_in_order(photo_folder: Path, v2: Any) -> None:
    chain = photos(photo_folder, A.HorizontalFlip(p=1)).transform("x", A.HorizontalFlip(p=0), NESTED["random_order"]())
    chain = chain.transform("x", v2.Compose([v2.RandomResizedCrop(32)]), v2.RandomHorizontalFlip(1.0))
    ctx = chain.select("x", return_ctx=True)[0][1]
    assert list(ctx) == ["horizontal_flip", "horizontal_flip_2", "random_order", "compose", "random_horizontal_flip"]
    first = {"transform": "HorizontalFlip", "at": [], "params": {"shape": [96, 128, 3]}, "kinds": {"shape": "tuple"}}
    shape = list(np.asarray(photos(photo_folder, A.NoOp())[0]["x"]).shape)
    assert ctx["horizontal_flip"] == {"steps": [{**first, "params": {"shape": shape}}]}
    assert ctx["horizontal_flip_2"] == {"steps": []}
    assert {step["at"][0] for step in ctx["random_order"]["steps"]} <= {0, 1, 2}
    (crop,) = ctx["compose"]["steps"]
    assert (crop["transform"], crop["at"], crop["kinds"]) == ("RandomResizedCrop", [0], {"size": "tuple"})
    assert set(crop["params"]) == {"top", "left", "size"}
    assert ctx["random_horizontal_flip"]["steps"][0]["params"] == {}
    orders = [
        tuple(step["at"][0] for step in sample.recorded("random_order")["steps"])
        for sample in photos(photo_folder, NESTED["random_order"]())
    ]
    assert len(set(orders)) > 2


def test_ctx_and_images_collate_whatever_was_done(photo_folder: Path) -> None:
    kinds = {"flat": torch.uint8, "normalized": torch.float32}
    for name, dtype in kinds.items():
        cropped = photos(photo_folder, A.RandomResizedCrop((40, 48))).transform("x", ALBUMENTATIONS[name]())
        pipe = cropped.select("x", return_ctx=True).deal(batch_size=6).collate_samples()
        for _ in range(2):
            for (x,), ctx in pipe:
                assert (x.shape, x.dtype) == ((6, 3, 40, 48), dtype)
                assert [len(ctx[entry]["steps"]) for entry in ("random_resized_crop", "compose")] == [6, 6]


def test_images_come_as_arrays_and_go_back_to_pillow() -> None:
    seen = []

    def look(image: Any, **params: Any) -> Any:
        seen.append((type(image), image.shape, image.dtype.name))
        return image

    gray, palette = Image.new("L", (8, 4), 7), Image.new("P", (8, 4))
    transform = A.Lambda(image=look)
    for value, wanted in [
        (gray, "L"),
        (palette, "RGB"),
        (Image.new("RGBA", (8, 4)), "RGB"),
        (np.zeros((4, 8, 3), np.uint8), "RGB"),
        (np.zeros((4, 8), np.uint8), "L"),
    ]:
        result = kdp.from_dataset([(value, 0)]).transform("x", transform)[0]["x"]
        assert (result.mode, result.size) == (wanted, (8, 4))
    assert seen[:2] == [(np.ndarray, (4, 8), "uint8"), (np.ndarray, (4, 8, 3), "uint8")]
    for value in (np.zeros((4, 8, 4), np.uint8), np.zeros((4, 8, 3), np.float32)):
        assert isinstance(kdp.from_dataset([(value, 0)]).transform("x", transform)[0]["x"], np.ndarray)
    with pytest.raises(TypeError, match=r"`Lambda` takes images from `\.decode_images\(\)` .* but got str\."):
        kdp.from_dataset([("photo", 0)]).transform("x", transform)[0]["x"]


class Turn(A.ImageOnlyTransform):
    """A user's own, that draws where it likes, and keeps what it drew."""

    def get_params(self) -> dict[str, Any]:
        self.turn = random.uniform(0, 90) + self.py_random.random()
        return {}

    def apply(self, img: Any, **params: Any) -> Any:
        return np.asarray(Image.fromarray(img).rotate(self.turn + np.random.rand() + cv2.randu(np.zeros(1), 0, 9)[0]))


class Twice(A.BaseCompose):
    """A container of a user's own."""

    def __call__(self, *args: Any, **data: Any) -> Any:
        return self.transforms[0](**self.transforms[0](**data)) if self.py_random.random() < self.p else data


@pytest.mark.parametrize("make", [lambda: Turn(p=0.9), lambda: A.Compose([Twice([Turn(p=0.5), A.Rotate()], p=0.9)])])
def test_classes_of_a_users_own_are_recorded_by_their_seed(make: Callable[[], Any], photo_folder: Path) -> None:
    steps = assert_repeats(photo_folder, make)
    assert {tuple(step) for step in steps} == {("transform", "at", "seed")}
    assert batches_of(photos(photo_folder, make()), num_workers=2) == batches_of(photos(photo_folder, make()))


def test_what_v2_cannot_record_is_a_callable_as_before(photo_folder: Path, v2: Any) -> None:
    transform = v2.Lambda(turned)
    assert adapted(transform) is transform
    assert adapted(turned) is turned
    pipe = photos(photo_folder, transform)
    assert pipe[0].ctx == {}
    assert batches_of(pipe) == batches_of(photos(photo_folder, v2.Lambda(turned)))


def test_albumentations_before_two_is_rejected() -> None:
    old = type("BasicTransform", (), {"__module__": "albumentations.core.transforms_interface"})
    with pytest.raises(ValueError, match=r"must be a transform from albumentations 2 or later, .* Install"):
        kdp.from_dataset([(0, 0)]).transform("x", old())


REJECTED: list[tuple[Callable[[], Any], str]] = [
    (lambda: A.Compose([A.Rotate()], bbox_params=A.BboxParams("coco", label_fields=[])), "Remove `bbox_params`"),
    (lambda: A.Compose([A.Rotate()], keypoint_params={"format": "xy"}), "Remove `keypoint_params`"),
    (lambda: A.Compose([A.OneOf([A.MaskDropout(), A.Rotate()])]), "`MaskDropout` also takes 'mask'"),
]


@pytest.mark.parametrize(("make", "way_out"), REJECTED)
def test_a_transform_needing_more_is_an_error_with_a_hint(make: Callable[[], Any], way_out: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)`transforms\[1\]` must be a transform of images alone, .*" + way_out):
        kdp.from_dataset([(0, 0)]).transform("x", A.NoOp(), make())
    with pytest.raises(TypeError, match=r"Write `HorizontalFlip\(...\)` to make one"):
        kdp.from_dataset([(0, 0)]).transform("x", A.HorizontalFlip)


def test_steps_of_another_transform_are_rejected() -> None:
    image, flip, crop = Image.new("RGB", (9, 9)), adapted(A.HorizontalFlip(p=1)), adapted(A.RandomCrop(4, 4))
    for params in (crop.draw(image, np.random.default_rng(0)), {"steps": [{"transform": "HorizontalFlip", "at": [1]}]}):
        with pytest.raises(ValueError, match="`params` must be recorded by the same transform"):
            flip.apply(image, params)


SCRIPT = """
import json, pickle, sys
from tests.hashes import fingerprints
pipe = pickle.load(sys.stdin.buffer)
print(json.dumps(fingerprints(pipe)))
"""


@pytest.mark.parametrize("name", ["flip", "deep", "elastic", "seeded"])
def test_a_fingerprint_is_the_same_in_each_process_and_after_use(
    name: str, photo_folder: Path, interpreter: Any
) -> None:
    pipe = photos(photo_folder, ALBUMENTATIONS[name]())
    known = fingerprints(pipe)
    used = ALBUMENTATIONS[name]()
    used(image=np.zeros((64, 64, 3), np.uint8))
    assert fingerprints(photos(photo_folder, used)) == known
    assert fingerprints(pickle.loads(pickle.dumps(pipe))) == known
    [sample["x"] for sample in pipe]
    assert fingerprints(pipe) == known
    status, printed, told = interpreter.run(SCRIPT, stdin=pickle.dumps(pipe))
    assert status == 0, told
    assert json.loads(printed) == known


def test_another_transform_has_another_fingerprint(v2: Any) -> None:
    transforms = [
        *(A.HorizontalFlip(p=p) for p in (0.1, 0.2)),
        *(A.Compose([A.HorizontalFlip(p=p)]) for p in (0.1, 0.2)),
        A.Compose([A.HorizontalFlip(p=0.1)], p=0.5),
        A.Compose([A.OneOf([A.HorizontalFlip(p=0.1)])]),
        A.Lambda(image=turned),
        A.Lambda(image=look_twice),
        *(v2.RandomResizedCrop(size) for size in (8, 9)),
        v2.Compose([v2.RandomResizedCrop(8)]),
        v2.Compose([v2.RandomResizedCrop(9)]),
    ]
    known = [fingerprint(adapted(transform)) for transform in transforms]
    assert len(set(known)) == len(transforms)
    assert [fingerprint(adapted(copy.deepcopy(transform))) for transform in transforms] == known


def look_twice(image: Any, **params: Any) -> Any:
    return image
