"""`collate_samples`: what each kind of value becomes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.delivery.collate_samples import collate
from tests.pictures import file_of


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    return file_of(Image.new(mode, (width, height), 7))


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1, 2], torch.int64, [1, 2]),
        ([1, 2.5], torch.float64, [1.0, 2.5]),
        ([True, False], torch.bool, [True, False]),
        ([np.float32(1), np.float32(2)], torch.float32, [1.0, 2.0]),
        ([[1, 2], [3, 4]], torch.int64, [[1, 2], [3, 4]]),
        ([np.array([1, 2], np.int16), np.array([3, 4], np.int16)], torch.int16, [[1, 2], [3, 4]]),
        ([torch.tensor([1.0]), torch.tensor([2.0])], torch.float32, [[1.0], [2.0]]),
        ([np.array(3), np.array(4)], torch.int64, [3, 4]),
    ],
)
def test_numbers_and_arrays_become_tensors(values: list[Any], dtype: torch.dtype, expected: list[Any]) -> None:
    batch = collate(values)
    assert batch.dtype == dtype
    assert batch.tolist() == expected


@pytest.mark.parametrize(
    "values", [["a", "b"], [b"a", b"b"], [None, None], [1, "a"], [np.array(["a"])], [["a"], ["b"]]]
)
def test_what_is_no_number_stays_a_list(values: list[Any]) -> None:
    assert collate(values) == values


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_images_become_channels_first(mode: str, channels: int) -> None:
    batch = collate([Image.new(mode, (4, 2))] * 3)
    assert batch.shape == (3, channels, 2, 4)
    assert batch.dtype == torch.uint8


def test_encoded_images_are_decoded_in_full() -> None:
    pipe = kdp.from_dataset([(png(4, 2), 0), (png(4, 2, "L"), 1)]).decode_images("x").select("x y").deal(batch_size=2)
    x, y = next(iter(pipe.collate_samples()))
    assert x.shape == (2, 3, 2, 4)
    assert x.unique().tolist() == [0, 7]
    assert y.tolist() == [0, 1]


def test_dictionaries_collate_by_entry_and_what_lacks_is_none() -> None:
    batch = collate([{"crop": {"top": 1}, "flip": True}, {"crop": {"top": 2}}])
    assert batch["crop"]["top"].tolist() == [1, 2]
    assert batch["flip"] == [True, None]


def test_tuples_become_tuples_of_batches() -> None:
    class Pair(NamedTuple):
        left: int
        right: str

    left, right = collate([Pair(1, "a"), Pair(2, "b")])
    assert (left.tolist(), right) == ([1, 2], ["a", "b"])
    with pytest.raises(kdp.DataError, match="tuples of different lengths"):
        collate([(1,), (1, 2)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_several_views_of_a_sample_become_several_batches(num_workers: int) -> None:
    pipe = kdp.from_dataset([(np.full(3, number), number) for number in range(4)]).transform("x", views)
    with kdp.Loader(pipe.select("x y").deal(batch_size=2).collate_samples(), num_workers=num_workers) as loader:
        (image, array, tensor, number), y = list(loader)[1]
    assert (image.shape, image.dtype) == ((2, 1, 2, 4), torch.uint8)
    assert array.tolist() == [[2, 2, 2], [3, 3, 3]]
    assert tensor.tolist() == [[2.0], [3.0]]
    assert number.tolist() == y.tolist() == [2, 3]


def views(x: Any) -> tuple[Any, ...]:
    number = int(x[0])
    return Image.new("L", (4, 2), number), x, torch.tensor([float(number)]), number


def test_views_are_padded_each_to_its_own_largest() -> None:
    items = [((np.zeros(2), np.zeros(1)), 0), ((np.zeros(3), np.zeros(1)), 1)]
    pipe = kdp.from_dataset(items).select("x y").deal(batch_size=2)
    (one, other), _ = next(iter(pipe.collate_samples(pad={"x": 0})))
    assert (one.shape, other.shape) == ((2, 3), (2, 1))
    with pytest.raises(kdp.DataError, match=r"Field 'x\[0\]' has different shapes"):
        next(iter(pipe.collate_samples()))


@pytest.mark.parametrize(
    ("values", "expected"), [([(1, 2), (3, 4)], ([1, 3], [2, 4])), ([[1, 2], [3, 4]], [[1, 2], [3, 4]])]
)
def test_a_tuple_of_numbers_is_several_batches_and_a_list_is_one(values: Any, expected: Any) -> None:
    batch = collate(values)
    assert (tuple(part.tolist() for part in batch) if isinstance(batch, tuple) else batch.tolist()) == expected


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_ragged_fields_are_padded_on_request(make: Any) -> None:
    source = kdp.from_dataset([(make([1, 2, 3]), 0), (make([4]), 1)]).select("x y").deal(batch_size=2)
    x, _ = next(iter(source.collate_samples(pad={"x": -1})))
    assert x.tolist() == [[1, 2, 3], [4, -1, -1]]
    assert x.dtype == torch.int64
    with pytest.raises(kdp.DataError, match=r"Field 'x' has different shapes.*\[1\], \[3\].*pad=\{\"x\": 0\}"):
        next(iter(source.collate_samples()))


def test_padding_cannot_mend_different_numbers_of_dimensions() -> None:
    with pytest.raises(kdp.DataError, match="different shapes") as caught:
        collate([np.zeros(2), np.zeros((2, 2))], name="x", pad=0)
    assert "pad=" not in str(caught.value)


def test_the_ctx_keeps_its_place() -> None:
    pipe = kdp.from_dataset([(1, 0), (2, 1)]).record_ctx().transform("x", with_ctx).select("x", return_ctx=True)
    (x,), ctx = next(iter(pipe.deal(batch_size=2).collate_samples()))
    assert x.tolist() == [2, 3]
    assert ctx["added"].tolist() == [1, 1]


def with_ctx(x: int, ctx: dict[str, Any]) -> int:
    ctx["added"] = 1
    return x + 1


def test_samples_without_select_become_a_dictionary_of_fields() -> None:
    batch = next(iter(kdp.from_dataset([(1, "a"), (2, "b")]).deal(batch_size=2).collate_samples()))
    assert batch["x"].tolist() == [1, 2]
    assert batch["y"] == ["a", "b"]


def test_a_batch_is_writable_and_no_view_of_the_source() -> None:
    arrays = [np.zeros(2), np.zeros(2)]
    collate(arrays)[0, 0] = 5
    assert arrays[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda pipe: pipe.collate_samples(pad={"z": 0}), ValueError, "`pad` must be for the fields x, y, but is 'z'"),
        (lambda pipe: pipe.collate_samples(pad=0), TypeError, "`pad` must be values by field name"),
    ],
)
def test_bad_arguments_are_rejected(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build(kdp.from_dataset([(1, 2)]).select("x y").deal(batch_size=1))


def test_items_that_are_no_batches_are_rejected() -> None:
    with pytest.raises(kdp.ChainError, match=r"takes lists, but got int.*deal"):
        next(iter(IterableWrapper([1]).collate_samples()))


@pytest.mark.parametrize(
    ("values", "pad", "expected"),
    [
        ([[1, 2], [0.5]], 0, [[1.0, 2.0], [0.5, 0.0]]),
        ([[], [1, 2]], 0, [[0, 0], [1, 2]]),
        ([[1, 2], []], -1, [[1, 2], [-1, -1]]),
        ([np.zeros(1, np.float32), torch.ones(2)], 0.5, [[0.0, 0.5], [1.0, 1.0]]),
    ],
)
def test_padding_keeps_a_dtype_that_holds_all_values(values: list[Any], pad: float, expected: list[Any]) -> None:
    batch = collate(values, pad=pad)
    assert batch.tolist() == expected
    assert batch.dtype == collate(values[::-1], pad=pad).dtype


@pytest.mark.parametrize(("dtype", "pad"), [(np.uint8, -1), (np.int64, 0.5)])
def test_a_pad_that_the_dtype_cannot_hold_is_rejected(dtype: Any, pad: float) -> None:
    with pytest.raises(kdp.DataError, match=rf"cannot represent the `pad` value {pad}"):
        collate([np.zeros(1, dtype), np.zeros(2, dtype)], name="x", pad=pad)


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
def test_a_stock_pipe_behind_select_makes_items_of_its_own() -> None:
    pipe = kdp.from_dataset([(1, 2), (3, 4)]).select("x", return_ctx=True).map(lambda item: item[0])
    (x,) = next(iter(pipe.deal(batch_size=2).collate_samples()))
    assert x.tolist() == [1, 3]


def test_fields_of_only_some_samples_are_none_in_others() -> None:
    stream = IterableWrapper([{"x": 1}, {"x": 2, "z": "b"}]).to_samples().deal(batch_size=2)
    batch = next(iter(stream.collate_samples()))
    assert (batch["x"].tolist(), batch["z"]) == ([1, 2], [None, "b"])


def test_collating_before_deal_says_so() -> None:
    with pytest.raises(AttributeError, match=r"but `select` is indexed\. Put `\.deal\(batch_size=\.\.\.\)`"):
        kdp.from_dataset([(1, 2)]).select("x y").collate_samples()


def test_a_pad_for_what_has_no_shape_is_rejected() -> None:
    with pytest.raises(kdp.DataError, match=r"Field 'x' contains values of type list, which `pad` cannot pad"):
        collate([[[1], [2]], [[3]]], name="x", pad=0)


def test_a_pad_for_bytes_says_how_to_make_arrays() -> None:
    with pytest.raises(kdp.DataError, match=r"`\.transform\('x', lambda content: np\.frombuffer\(content, np\.uint8\)"):
        collate([b"ab", b"c"], name="x", pad=0)


LAST = torch.channels_last


def photos(size: tuple[int, int] = (9, 5)) -> Any:
    items = [
        Image.fromarray(np.full((*size, 3), number, np.uint8) + np.arange(3, dtype=np.uint8)) for number in range(7)
    ]
    return kdp.from_dataset(items, "x").select("x", bare=True).deal(batch_size=4)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_channels_last_changes_only_the_strides(num_workers: int) -> None:
    for size in ((9, 5), (224, 224)):  # small batches are part of the message, others are in shared memory
        expected = list(photos(size).collate_samples())
        with kdp.Loader(photos(size).collate_samples(memory_format="channels_last"), num_workers) as loader:
            for _ in range(2):
                for batch, other in zip(loader, expected, strict=True):
                    assert torch.equal(batch, other)
                    assert batch.is_contiguous(memory_format=LAST)
                    assert not batch.is_contiguous()


def test_channels_last_applies_to_tensors_not_arrays_or_labels() -> None:
    item = torch.arange(24.0).reshape(2, 3, 4), np.zeros((2, 3, 4)), 1, torch.zeros(3, 4)
    pipe = kdp.from_dataset([item] * 3, "x array y mask").select("x array y mask").deal(batch_size=3)
    x, array, y, mask = next(iter(pipe.collate_samples(memory_format="channels_last")))
    assert x.is_contiguous(memory_format=LAST)
    assert not x.is_contiguous()
    assert all(values.is_contiguous() for values in (array, y, mask))
    assert torch.equal(x, torch.stack([item[0]] * 3))


def test_channels_last_with_padding_views_and_odd_values() -> None:
    ragged = [torch.ones(3, 4, 5), torch.ones(3, 6, 2)]
    assert collate(ragged, pad=0, channels_last=True).stride() == torch.empty(2, 3, 6, 5, memory_format=LAST).stride()
    views = collate([(torch.ones(3, 4, 5), torch.ones(3, 2, 2))] * 2, channels_last=True)
    assert all(view.is_contiguous(memory_format=LAST) for view in views)
    mixed = [torch.ones(3, 4, 5), torch.ones(3, 4, 5, dtype=torch.float64)]
    assert collate(mixed, channels_last=True).is_contiguous(memory_format=LAST)
    assert collate([torch.ones(1, 4, 5)] * 2, channels_last=True).shape == (2, 1, 4, 5)
    assert collate([torch.ones(3, 0, 5)] * 2, channels_last=True).shape == (2, 3, 0, 5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_mixed_images_stay_channels_last(num_workers: int) -> None:
    def mixed(**more: Any) -> Any:
        items = [(torch.rand(3, 64, 64), number % 2) for number in range(8)]
        torch.manual_seed(0)
        pipe = kdp.from_dataset(items).select("x y").deal(batch_size=4).collate_samples(**more)
        return pipe.mixup(num_classes=2).cutmix(num_classes=2)

    torch.manual_seed(0)
    expected = list(mixed())
    torch.manual_seed(0)
    with kdp.Loader(mixed(memory_format="channels_last"), num_workers) as loader:
        for (x, y), (other_x, other_y) in zip(loader, expected, strict=True):
            assert torch.equal(x, other_x)
            assert torch.equal(y, other_y)
            assert x.is_contiguous(memory_format=LAST)


def test_another_memory_format_is_rejected() -> None:
    with pytest.raises(ValueError, match="`memory_format` must be"):
        photos().collate_samples(memory_format="channels_first")


LARGE = 2**63 + 1


def collated(values: list[Any], **options: Any) -> Any:
    pipe = kdp.from_dataset([(value,) for value in values], "x").select("x").deal(batch_size=9)
    (batch,) = next(iter(pipe.collate_samples(**options)))
    return batch


@pytest.mark.parametrize(
    "values",
    [
        [np.uint64(LARGE), np.int64(1)],
        [[LARGE, 1], [2, 3]],
        [[1, 2], [LARGE, 2]],
        [np.array([LARGE], dtype=np.uint64), np.array([1])],
    ],
    ids=str,
)
def test_integers_from_two_to_the_63_stay_integers(values: list[Any]) -> None:
    batch = collated(values)
    assert batch.dtype == torch.uint64
    assert batch.tolist() == [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


def test_integers_of_python_that_int64_does_not_hold_stay_a_list() -> None:
    for values in ([LARGE, 1], [LARGE, LARGE], [LARGE, -1], [2**70, 1], [[LARGE], [-1]], [[LARGE, -1], [1, 1]]):
        assert collated(values) == values
    assert collated([LARGE, 0.5]).dtype == torch.float64


def test_large_integers_of_different_lengths_are_padded() -> None:
    assert collated([[LARGE], [1, 2]], pad={"x": 0}).tolist() == [[LARGE, 0], [1, 2]]


def test_columns_keep_large_integers() -> None:
    assert kdp.from_dataset([(LARGE,), (1,)], "x").column("x").tolist() == [LARGE, 1]
    assert kdp.from_dataset([(LARGE,), (-1,)], "x").column("x").tolist() == [LARGE, -1]
