"""`transform("image mask", ...)`: images, masks, boxes and points, transformed together by one draw."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.fingerprint import fingerprint
from kdpipes.work.decode import EncodedImage
from tests.hashes import fingerprints
from tests.pictures import file_of

WIDTH, HEIGHT = 60, 40
NAMES = "image mask boxes points label"


def rows(number: int) -> np.ndarray[Any, Any]:
    """An image whose green and blue are its rows and columns, so that pixels say where they come from."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([np.full_like(x, number), y, x], axis=-1).astype(np.uint8)


def item(number: int) -> Any:
    pixels = rows(number)
    boxes = np.array([[10, 5, 30, 25], [2 * number, 0, 2 * number + 8, 40]], np.float32)
    points = (boxes[:, :2] + boxes[:, 2:]) / 2
    return Image.fromarray(pixels), pixels[..., 1].copy(), boxes, points, np.array([3, 4 + number])


def indexed(fields: str = NAMES) -> Any:
    return kdp.from_dataset([item(number) for number in range(8)], fields)


def stream(fields: str = NAMES) -> Any:
    return IterableWrapper([item(number) for number in range(8)]).to_samples(fields=fields)


BOTH = pytest.mark.parametrize("make", [indexed, stream])


def as_rgb(image: Any) -> Any:
    return np.asarray(image if isinstance(image, Image.Image) else image.permute(1, 2, 0))


@BOTH
def test_all_fields_follow_one_draw(make: Any) -> None:
    crop = kdp.RandomResizedCrop((20, 24), interpolation="nearest")
    chain = make().record_ctx().transform(NAMES, crop, kdp.HorizontalFlip()).select(NAMES, return_ctx=True)
    seen = set()
    for number, ((image, mask, boxes, points, label), ctx) in enumerate(chain):
        pixels = as_rgb(image)
        assert (pixels[..., 1] == mask).all()
        assert set(ctx) == {"random_resized_crop", "horizontal_flip"}
        region, flipped = ctx["random_resized_crop"], ctx["horizontal_flip"]["flipped"]
        scale = np.array([24 / region["width"], 20 / region["height"]])
        expected = (item(number)[3] - [region["left"], region["top"]]) * scale
        expected[:, 0] = 24 - expected[:, 0] if flipped else expected[:, 0]
        assert np.allclose(points, expected, atol=1e-4)
        assert (boxes >= 0).all()
        assert (boxes <= [24, 20, 24, 20]).all()
        assert (boxes[:, 2:] >= boxes[:, :2]).all()
        assert (boxes.dtype, boxes.shape, points.dtype, label[1]) == (np.float32, (2, 4), np.float32, 4 + number)
        seen.add(flipped)
    assert seen == {True, False}


def test_an_image_draws_what_it_would_draw_alone() -> None:
    transforms = kdp.RandomResizedCrop(16), kdp.HorizontalFlip()
    joint, alone = (indexed().transform(fields, *transforms) for fields in ("image mask", "image"))
    for one, other in zip(joint, alone, strict=True):
        assert np.array_equal(as_rgb(one["image"]), as_rgb(other["image"]))


def test_boxes_of_pixels_stay_with_them() -> None:
    box = [12, 8, 30, 20]
    pixels = np.zeros((HEIGHT, WIDTH), np.uint8)
    pixels[8:20, 12:30] = 255
    transforms = kdp.HorizontalFlip(p=1), kdp.CenterCrop((30, 70)), kdp.Resize((20, 30)), kdp.CenterCrop(10)
    source = kdp.from_dataset([(Image.fromarray(pixels), pixels, box, [box[:2], box[2:]])], "image mask boxes points")
    for transform in transforms:
        sample = source.transform("image mask boxes points", transform, kinds={"image": "image"})
        with pytest.raises(kdp.DataError, match=r"'boxes' must be numbers \[N, 4\]"):
            sample[0]["boxes"]
        negative = source.add_field("boxes", lambda sample: [[30, 8, 12, 20]]).transform("image boxes", transform)
        with pytest.raises(kdp.DataError, match=r"^Box 0 .*: \[30, 8, 12, 20\]\. .*`kinds=\{\"NAME\": \"xywh\"\}`"):
            negative[0]["boxes"]
    source = kdp.from_dataset([(Image.fromarray(pixels), pixels, [box], [box[:2], box[2:]])], "image mask boxes points")
    for transform in transforms:
        sample = source.transform("image mask boxes points", transform)[0]
        ((left, top, right, bottom),) = sample["boxes"].round().astype(int).tolist()
        found = np.argwhere(sample["mask"] == 255)
        assert [*found.min(axis=0), *found.max(axis=0) + 1] == [top, left, bottom, right]
        assert sample["boxes"].dtype == sample["points"].dtype == np.float32
        assert np.array_equal(as_rgb(sample["image"]) == 255, sample["mask"] == 255) or type(transform) is kdp.Resize


@pytest.mark.parametrize(("kind", "share"), [("xywh", 0), ("cxcywh", 0.5)])
def test_boxes_with_a_width_stay_in_their_form(kind: Any, share: float, v2: Any) -> None:
    def of_corners(boxes: Any) -> Any:
        sizes = boxes[:, 2:] - boxes[:, :2]
        return np.concatenate([boxes[:, :2] + share * sizes, sizes], axis=1)

    made = indexed().record_ctx().add_field("bbox", lambda sample: of_corners(sample["boxes"]))
    composed = A.Compose([A.HorizontalFlip()], bbox_params=A.BboxParams("pascal_voc"))
    for transform in (kdp.RandomResizedCrop(24), kdp.HorizontalFlip(), composed, v2.RandomHorizontalFlip()):
        chain = made.transform("image boxes bbox", transform, kinds={"bbox": kind})
        for sample in chain:
            assert sample["boxes"].min() >= 0
            assert np.allclose(sample["bbox"], of_corners(sample["boxes"]), atol=1e-4)
            assert np.array_equal(kdp.replay(sample.key, sample.ctx, chain)["bbox"], sample["bbox"])
        negative = made.add_field("bbox", lambda sample: [[1, 2, 3, 4], [9, 9, 5, -3]])
        with pytest.raises(kdp.DataError, match=r"^Box 1 .*: \[9, 9, 5, -3\]\. .*correct this box") as error:
            negative.transform("image bbox", transform, kinds={"bbox": kind})[2]["bbox"]
        assert "sample '2'" in error.value.__notes__[0]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "uint16", "uint32", "int64", "float32"])
def test_masks_keep_their_kind_and_dtype(dtype: str) -> None:
    values = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 251 * 257 % 2**16).astype(dtype)
    masks = {
        "array": values,
        "channels": np.stack([values, values], axis=-1),
        "tensor": torch.from_numpy(values.astype(np.int32 if dtype.startswith("uint") else dtype)),
    }
    masks["instances"] = torch.stack([masks["tensor"]] * 3)
    masks |= {"picture": Image.fromarray(values)} if dtype in {"uint8", "uint16", "float32"} else {}
    for mask in masks.values():
        source = kdp.from_dataset([(Image.new("RGB", (WIDTH, HEIGHT)), mask)], "image mask")
        for transform in (kdp.RandomResizedCrop(12), kdp.CenterCrop(50), kdp.Resize(9), kdp.HorizontalFlip(p=1)):
            made = source.transform("image mask", transform)[0]["mask"]
            assert type(made) is type(mask)
            assert str(np.asarray(made).dtype) == str(np.asarray(mask).dtype)
            assert np.isin(np.asarray(made), [*values.reshape(-1).tolist(), 0]).all()


def test_tensors_and_whole_numbers_keep_their_dtype() -> None:
    boxes = torch.tensor([[1, 2, 11, 12]])
    source = kdp.from_dataset([(torch.zeros(3, 20, 20), boxes, np.zeros((0, 2)), [])], "image boxes points bbox")
    sample = source.transform("image boxes points bbox", kdp.Resize((10, 15)))[0]
    assert torch.equal(sample["boxes"], torch.tensor([[1, 1, 8, 6]]))
    assert (sample["points"].shape, sample["bbox"].shape) == ((0, 2), (0, 4))
    assert torch.equal(boxes, torch.tensor([[1, 2, 11, 12]])), "what came in stays as it is"


def test_colours_change_in_images_alone() -> None:
    transforms = kdp.ColorJitter(0.4, 0.4), kdp.ToTensor(), kdp.Normalize([0.5], [0.5])
    for number, sample in enumerate(indexed().transform(NAMES, *transforms)):
        _, mask, boxes, *_ = item(number)
        assert sample["image"].dtype == torch.float32
        assert np.array_equal(sample["mask"], mask)
        assert np.array_equal(sample["boxes"], boxes)


def encoded(number: int) -> bytes:
    return file_of(Image.fromarray(rows(number)).resize((640, 480)), "JPEG")


def test_only_the_region_of_an_encoded_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[tuple[int, int]] = []
    original = EncodedImage.region

    def region(self: Any, top: int, left: int, height: int, width: int, **how: Any) -> Any:
        regions.append((height, width))
        return original(self, top, left, height, width, **how)

    monkeypatch.setattr(EncodedImage, "region", region)
    source = kdp.from_dataset([(encoded(1), np.zeros((480, 640), np.uint8), 0)], "image mask y")
    pipe = source.decode_images("image").record_ctx()
    pipe = pipe.transform("image mask", kdp.RandomResizedCrop(32, scale=(0.1, 0.3)))
    sample = pipe[0]
    assert sample["y"] == 0
    assert not regions
    assert sample["mask"].shape == (32, 32)
    crop = sample.ctx["random_resized_crop"]
    assert regions == [(crop["height"], crop["width"])]
    assert sample["image"].size == (32, 32)
    assert len(regions) == 1, "the fields are made together, once"


def shifted(image: Any, mask: Any, rng: np.random.Generator, ctx: dict[str, Any]) -> Any:
    by = ctx["by"] = int(rng.integers(1, 30))
    return np.roll(np.asarray(image), by, axis=1), np.roll(mask, by, axis=1)


def rolled(image: Any, mask: Any) -> Any:
    by = random.randrange(30)
    return np.roll(np.asarray(image), by, axis=1), np.roll(mask, by, axis=1)


@BOTH
def test_a_callable_gets_all_fields_and_returns_as_many(make: Any) -> None:
    for function in (shifted, rolled):
        chain = make().record_ctx().transform("image mask", function).select("key image mask", return_ctx=True)
        for (key, image, mask), ctx in chain:
            assert (image[..., 1] == mask).all()
            ((_, again, _), _) = kdp.replay(key, ctx, chain)
            assert np.array_equal(again, image)


def test_wrong_results_of_a_callable_are_errors() -> None:
    for function, said in (
        (lambda image, mask: image, "`lambda` must return a tuple of 2 values, for fields 'image', 'mask', but"),
        (lambda image, mask: (image,), "but returned 1."),
        (lambda image, mask: None, "but returned NoneType."),
        (lambda image, mask: (image, None), "`lambda` must return the new value, but returned None."),
    ):
        with pytest.raises(TypeError, match="(?s)" + said.replace(".", r"\.")) as error:
            indexed().transform("image mask", function)[2]["mask"]
        assert "applying 'lambda' to fields 'image', 'mask' of sample '2'" in error.value.__notes__[0]


CHAINS: dict[str, Callable[[], Any]] = {
    "kdpipes": lambda: (kdp.RandomResizedCrop(24), kdp.HorizontalFlip(), kdp.ColorJitter(0.2)),
    "albumentations": lambda: (
        A.Compose(
            [A.RandomResizedCrop((24, 24)), A.OneOf([A.HorizontalFlip(), A.VerticalFlip()]), A.GaussNoise()],
            bbox_params=A.BboxParams("pascal_voc", label_fields=["label"], min_area=4),
            keypoint_params=A.KeypointParams("xy", remove_invisible=False),
        ),
    ),
    "sometimes": lambda: (
        A.Compose(
            [A.HorizontalFlip(p=0.3), A.RandomCrop(20, 20, p=0.5)],
            bbox_params=A.BboxParams("pascal_voc", label_fields=["label"], min_area=150),
            keypoint_params=A.KeypointParams("xy"),
            p=0.5,
        ),
    ),
}
V2: dict[str, Callable[[Any], Any]] = {
    "crop": lambda v2: (v2.RandomResizedCrop(24), v2.RandomHorizontalFlip()),
    "composed": lambda v2: (
        v2.Compose([v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), v2.Resize((24, 24)), v2.SanitizeBoundingBoxes()]),
    ),
    "tensors": lambda v2: (
        v2.Compose([v2.ToImage(), v2.RandomPhotometricDistort(), v2.RandomAffine(20), v2.ToDtype(torch.float32)]),
    ),
    "auto": lambda v2: (v2.RandomApply([v2.ElasticTransform()], p=0.5), v2.GaussianNoise(), v2.RandomRotation(30)),
}


def needs_tensor(name: str) -> bool:
    return name == "auto"


@pytest.fixture(scope="session")
def v2() -> Any:
    return torchvision_v2()


def torchvision_v2() -> Any:
    """torchvision's own v2; its wheels for CUDA lack their C++ operators beside a CPU torch, but not what is drawn."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # only now: defining operators that the library brings as well would abort the process
        for name in ("nms", "qnms"):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision.transforms import v2

    return v2


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def told(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [told(part) for part in value]
    array = np.asarray(value)
    return type(value).__name__, str(array.dtype), array.shape, array.tobytes()


def epochs(chain: Any, **how: Any) -> Iterator[Any]:
    with kdp.Loader(chain.deal(batch_size=3, shuffle=True, seed=3), **how) as loader:
        yield from (told([x for x, _ in batch]) for _ in range(2) for batch in loader)


def assert_repeatable(make: Callable[[], Any]) -> None:
    """The same for all workers, replays and pickles; masks follow images."""
    chain = make()
    expected = list(epochs(chain))
    assert list(epochs(chain, num_workers=2)) == expected
    with kdp.Loader(chain.deal(batch_size=3, seed=5)) as loader:
        items = [item for _ in range(2) for batch in loader for item in batch]
    for item, ctx in items:
        assert told(kdp.replay(item[0], ctx, chain)[0]) == told(item)
    assert told(pickle.loads(pickle.dumps(chain))[3][0]) == told(chain[3][0])
    assert fingerprints(make()) == fingerprints(chain)


@pytest.mark.parametrize("name", CHAINS)
def test_joint_transforms_repeat_and_replay(name: str) -> None:
    def make() -> Any:
        made = indexed().record_ctx().transform(NAMES, *CHAINS[name]())
        return made.select(f"key {NAMES}", return_ctx=True)

    assert_repeatable(make)
    for (_, _, mask, boxes, points, label), ctx in make():
        assert mask.dtype == np.uint8
        assert (boxes.dtype, points.dtype, label.dtype) == (np.float32, np.float32, np.int64)
        assert len(boxes) == len(label) if name != "kdpipes" else len(boxes) == 2
        assert len(ctx) == len(CHAINS[name]())


@pytest.mark.parametrize("name", V2)
def test_v2_gets_all_fields_in_one_call(name: str, v2: Any) -> None:
    if not hasattr(pytest.importorskip("torchvision.tv_tensors"), "KeyPoints"):
        with pytest.raises(ImportError, match=r"Points need torchvision 0\.23"):
            indexed().transform(NAMES, *V2[name](v2)).select(NAMES)[0]
        return

    def make() -> Any:
        transforms = (kdp.ToTensor(), *V2[name](v2)) if needs_tensor(name) else V2[name](v2)
        made = indexed().record_ctx().transform(NAMES, *transforms)
        return made.select(f"key {NAMES}", return_ctx=True)

    assert_repeatable(make)
    for (_, _, mask, boxes, points, label), _ in make():
        assert (type(mask), mask.dtype) == (np.ndarray, np.uint8)
        assert (boxes.dtype, points.shape, label.dtype) == (np.float32, (2, 2), np.int64)
        assert len(boxes) == len(label)


@pytest.mark.parametrize("name", ["crop", "tensors", "auto"])
def test_torchvisions_own_v2_repeats_on_one_field(name: str, v2: Any) -> None:
    def make() -> Any:
        transforms = (kdp.ToTensor(), *V2[name](v2)) if needs_tensor(name) else V2[name](v2)
        return indexed().record_ctx().transform("image", *transforms).select("key image", return_ctx=True)

    assert_repeatable(make)


def test_v2_keeps_the_dtype_of_tensors(v2: Any) -> None:
    boxes, mask = torch.tensor([[2, 2, 12, 12]]), torch.ones((HEIGHT, WIDTH), dtype=torch.int64)
    source = kdp.from_dataset([(item(0)[0], mask, boxes, [7])], "image mask boxes labels")
    sample = source.transform("image mask boxes labels", v2.RandomHorizontalFlip(1.0))[0]
    assert torch.equal(sample["boxes"], torch.tensor([[WIDTH - 12, 2, WIDTH - 2, 12]]))
    assert torch.equal(sample["mask"], mask)
    assert [type(sample[name]) for name in ("mask", "boxes", "labels")] == [torch.Tensor, torch.Tensor, list]


def test_masks_follow_images_in_other_libraries(v2: Any) -> None:
    compositions = [
        A.Compose([A.RandomCrop(20, 24), A.HorizontalFlip(), A.D4()]),
        A.HorizontalFlip(p=1),
        v2.Compose([v2.RandomCrop((20, 24)), v2.RandomHorizontalFlip()]),
    ]
    for transform in compositions:
        for sample in indexed().transform("image mask", transform):
            assert (as_rgb(sample["image"])[..., 1] == sample["mask"]).all()
    two = kdp.from_dataset([(*item(n)[:2], *item(n)[:2]) for n in range(8)], "left mask right masks")
    for transform in compositions:
        for sample in two.transform("left mask right masks", transform):
            left, right = as_rgb(sample["left"]), as_rgb(sample["right"])
            assert (left == right).all()
            assert (left[..., 1] == sample["masks"]).all()


def test_views_are_of_all_fields() -> None:
    crop = kdp.RandomResizedCrop(16, interpolation="nearest")
    pipe = indexed().record_ctx().transform("image mask", views=[[crop], [crop, kdp.HorizontalFlip()]])
    for (images, masks), ctx in pipe.select("image mask", return_ctx=True):
        assert len(images) == len(masks) == 2
        assert all((as_rgb(image)[..., 1] == mask).all() for image, mask in zip(images, masks, strict=True))
        assert not np.array_equal(*masks)
        assert {name: set(entry) for name, entry in ctx.items()} == {
            "view_1": {"random_resized_crop"},
            "view_2": {"random_resized_crop", "horizontal_flip"},
        }


def test_kinds_decide_over_names() -> None:
    source = kdp.from_dataset([(Image.new("L", (20, 10)), np.arange(200).reshape(10, 20), 1)], "x target y")
    kinds: Any = {"target": "mask"}
    sample = source.transform("x target y", kdp.Resize((5, 10)), kinds=kinds)[0]
    assert (sample["target"].shape, sample["y"]) == ((5, 10), 1)
    alone = source.transform("target", kdp.Resize((5, 10)), kdp.HorizontalFlip(p=1), lambda mask: mask, kinds=kinds)
    assert np.array_equal(alone[0]["target"], sample["target"][:, ::-1])


class Own:
    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"by": 1}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        return value


class OwnOfAll(Own):
    def apply_to(self, kind: str, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        return kind, size, params["by"]


def test_a_transform_of_ones_own_says_what_becomes_of_masks() -> None:
    sample = indexed().transform("image mask label", OwnOfAll())[0]
    assert sample["mask"] == ("mask", (WIDTH, HEIGHT), 1)
    assert indexed().transform("image label", Own())[0]["label"][0] == 3
    with pytest.raises(TypeError, match=r"`transforms\[0\]` must be a transform of fields .*`apply_to\(kind"):
        indexed().transform("image mask", Own())


BBOX = A.BboxParams("pascal_voc", label_fields=[])
REJECTED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "no such field": (kdp.FieldError, "no field 'maks'", lambda: indexed().transform("image maks", Own())),
    "the same twice": (ValueError, "must be names that differ", lambda: indexed().transform("mask mask", Own())),
    "kind": (
        ValueError,
        r"`kinds\['mask'\]` must be one of",
        lambda: indexed().transform("mask", abs, kinds={"mask": "m"}),
    ),
    "kinds": (TypeError, "`kinds` must be", lambda: indexed().transform("mask", shifted, kinds=["mask"])),
    "unnamed": (
        ValueError,
        "`kinds` must be for the field",
        lambda: indexed().transform("mask", shifted, kinds={"masks": "mask"}),
    ),
    "boxes alone": (
        ValueError,
        "a function of all fields.*Name the image, too",
        lambda: indexed().transform("boxes label", kdp.Resize(3)),
    ),
    "no processor": (ValueError, "bbox_params", lambda: indexed().transform("image boxes", A.HorizontalFlip())),
    "no boxes": (
        ValueError,
        "without `bbox_params`",
        lambda: indexed().transform("image mask", A.Compose([A.D4()], bbox_params=BBOX)),
    ),
    "format": (
        ValueError,
        "'pascal_voc', but is 'coco'",
        lambda: indexed().transform(
            "image boxes", A.Compose([A.D4()], bbox_params=A.BboxParams("coco", label_fields=[]))
        ),
    ),
    "labels": (
        ValueError,
        "`label_fields` must be among the other fields",
        lambda: indexed().transform(
            "image boxes", A.Compose([A.D4()], bbox_params=A.BboxParams("pascal_voc", label_fields=["label"]))
        ),
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_makes_no_sense_is_an_error_when_built(name: str) -> None:
    error, said, make = REJECTED[name]
    with pytest.raises(error, match="(?s)" + said):
        make()


def test_images_and_masks_of_different_sizes_are_an_error(v2: Any) -> None:
    source = kdp.from_dataset([(Image.new("RGB", (9, 8)), np.zeros((8, 8), np.uint8))], "image mask")
    said = "must have the same size, but 'image' is 9 x 8, and 'mask' is 8 x 8"
    for transform in (kdp.HorizontalFlip(), A.HorizontalFlip(), v2.RandomHorizontalFlip()):
        with pytest.raises(kdp.DataError, match=said) as error:
            source.transform("image mask", transform)[0]["mask"]
        assert "sample '0'" in error.value.__notes__[0]


def test_caches_keep_what_a_joint_transform_has_made() -> None:
    cached = indexed().transform("image mask boxes", kdp.Resize((8, 8))).cache_in_memory(name="test_joint")
    for _ in range(2):
        assert [sample["mask"].shape for sample in cached] == [(8, 8)] * 8
        assert (
            cached[1]["boxes"].tolist() == indexed().transform("image boxes", kdp.Resize((8, 8)))[1]["boxes"].tolist()
        )
    with pytest.raises(kdp.ChainError, match="random_resized_crop"):
        indexed().transform("image mask", kdp.RandomResizedCrop(8)).cache_in_memory()


def test_kinds_are_part_of_what_a_transform_is() -> None:
    def made(fields: str, **how: Any) -> str:
        return fingerprint(kdp.from_dataset([item(0)], NAMES).transform(fields, kdp.Resize(8), **how))

    known = [made("image"), made("image mask"), made("image mask", kinds={"mask": "image"}), made("mask image")]
    assert len(set(known)) == 4
    assert made("image mask", kinds={"mask": "mask"}) == known[1]


def test_an_image_in_a_field_of_labels_is_an_error() -> None:
    picture = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    pipe = kdp.from_dataset([(picture, picture.convert("P"))], "image label")
    with pytest.raises(TypeError, match=r"Field 'label' .* holds an image.*kinds=\{'label': \"mask\"\}"):
        pipe.transform("image label", kdp.CenterCrop(4))[0]["image"]
    image, label = pipe.transform("image label", kdp.CenterCrop(4), kinds={"label": "mask"}).select("image label")[0]
    assert image.size == label.size == (4, 4)


def test_albumentations_keeps_masks_of_class_numbers() -> None:
    numbers = np.arange(64, dtype=np.uint8).reshape(8, 8)
    mask = Image.fromarray(numbers)
    mask.putpalette([255, 0, 0] * 256)
    pipe = kdp.from_dataset([(Image.fromarray(np.zeros((8, 8, 3), np.uint8)), mask)], "image mask")
    made = pipe.transform("image mask", A.CenterCrop(4, 4))[0]["mask"]
    assert made.mode == "P"
    assert np.array_equal(np.asarray(made), numbers[2:6, 2:6])
