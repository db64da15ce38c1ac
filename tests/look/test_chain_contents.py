"""What chains give, compared with what they then give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.look.contents import look_at_chain


def chain_of(photo_folder: Path) -> Any:
    return (
        kdp.image_folder(photo_folder)
        .filter_classes(valid=["cat", "rocket"])
        .decode_images("x")
        .record_ctx()
        .transform("x", kdp.RandomResizedCrop(16), kdp.ToTensor())
        .select("x y")
    )


def test_a_chain_is_told_with_its_length_classes_and_batches(photo_folder: Path) -> None:
    chain = chain_of(photo_folder)
    found = look_at_chain(chain.deal(batch_size=10, shuffle=True).collate_samples(), num_samples=2)
    assert (found.kind, found.num_samples, found.num_batches) == ("chain", 64, 7)
    assert found.classes is not None
    assert [(one.label, one.name, one.num_samples) for one in found.classes] == [(1, "cat", 40), (7, "rocket", 24)]
    first, *others = found.pipes
    assert first == "image_folder", "as `doctor` and `repr` call it"
    assert " ".join(others) == "filter_classes decode_images record_ctx transform select deal collate_samples"
    x, y = found.fields
    assert (x.type, x.num_samples, x.num_bytes) == ("Tensor float32 [3, 16, 16]", 2, 2 * 3 * 16 * 16 * 4)
    assert (y.type, y.num_bytes) == ("int", None)
    assert found.samples[1].fields["y"]["value"] == chain[1][1]


def test_a_chain_without_deal_and_one_without_samples_are_told(photo_folder: Path, letters: Any) -> None:
    assert look_at_chain(chain_of(photo_folder)).num_samples == 64
    found = look_at_chain(letters.subset([]))
    assert (found.num_samples, found.samples, found.fields, found.classes) == (0, [], [], None)


def test_a_stream_has_no_length_but_first_samples(photo_shards: str) -> None:
    stream = kdp.stream_shards(photo_shards).rename_fields(x="jpg", y="cls").decode_images("x")
    for chain in (stream, stream.deal(batch_size=5), stream.select("x").deal(batch_size=5).collate_samples()):
        found = look_at_chain(chain, num_samples=1)
        assert (found.num_samples, found.classes) == (None, None)
        assert found.samples[0].key == "photos-000.tar/000000"
        assert found.samples[0].fields["x"]["type"].startswith("EncodedImage ")
    next(iter(stream))
    assert len(list(stream)) == 160, "a look leaves nothing behind"


def test_stock_pipes_are_told_by_their_classes() -> None:
    found = look_at_chain(IterableWrapper([1, 2]))
    assert (found.num_samples, found.samples, found.pipes) == (2, [], ["IterableWrapper"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"abc", {"type": "bytes", "bytes": 3}),
        ("é", {"type": "str", "bytes": 2}),
        (0.5, {"type": "float", "value": 0.5}),
        (float("nan"), {"type": "float", "value": "nan"}),
        (np.zeros((2, 3), dtype=np.uint8), {"type": "ndarray uint8 [2, 3]", "bytes": 6}),
        ([1, 2], {"type": "list"}),
    ],
    ids=str,
)
def test_values_are_told_by_type_and_size(value: Any, expected: dict[str, Any]) -> None:
    found = look_at_chain(kdp.from_dataset([(value, 1)], "x y"))
    assert found.samples[0].fields["x"] == expected


def test_fields_of_several_types_and_without_labels_are_told() -> None:
    found = look_at_chain(kdp.from_dataset([(b"a", 0.5), ("b", 1.5)], "x score"))
    assert [field.type for field in found.fields] == ["float", "bytes, and 1 other"]
    assert found.classes is None


def test_classes_are_not_read_where_that_is_not_wanted() -> None:
    read = []

    class Slow(kdp.SampleSource):
        def __len__(self) -> int:
            return 5

        def getitem_y(self, index: int) -> int:
            read.append(index)
            return index % 2

    assert look_at_chain(Slow(), num_samples=1, scan=False).classes is None
    assert read == [0]
    assert look_at_chain(Slow(), num_samples=0).classes is not None


def test_samples_that_on_error_skips_are_not_quarantined(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    ones = kdp.from_dataset([(n, 0) for n in range(4)]).transform("x", lambda x: 1 // x)
    chain = ones.on_error("quarantine", path=path)
    assert [sample.key for sample in look_at_chain(chain, num_samples=2).samples] == ["1", "2"]
    assert not path.exists()
    with pytest.raises(ZeroDivisionError):
        look_at_chain(ones)


def test_a_shard_that_on_error_leaves_out_is_left_out(photo_shards: str, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.tar")
    path = tmp_path / "bad.txt"
    stream = kdp.stream_shards([gone, photo_shards])
    (seen,) = look_at_chain(stream.on_error("quarantine", path=path), num_samples=1).samples
    assert seen.fields
    assert not path.exists()
