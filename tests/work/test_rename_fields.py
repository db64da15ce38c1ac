"""`rename_fields`: new names for fields, nothing loaded."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp


def indexed(items: list[Any], fields: str) -> Any:
    return kdp.from_dataset(items, fields)


def stream(items: list[Any], fields: str) -> Any:
    return IterableWrapper(items).to_samples(fields=fields)


FLAVOURS = pytest.mark.parametrize("make", [indexed, stream])


def epochs(pipe: Any) -> list[list[dict[str, Any]]]:
    return [[dict(sample) for sample in pipe] for _ in range(2)]


TABLE: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"x": "jpg"}, {"x": "a", "cls": 0, "txt": "t"}),
    ({"x": "jpg", "y": "cls"}, {"x": "a", "y": 0, "txt": "t"}),
    ({"x": " png ; jpg", "y": "cls"}, {"x": "a", "y": 0, "txt": "t"}),
    ({"jpg": "txt", "txt": "jpg"}, {"jpg": "t", "txt": "a", "cls": 0}),
    ({"x": "jpg", "original": "jpg"}, {"x": "a", "original": "a", "cls": 0, "txt": "t"}),
]


@FLAVOURS
def test_named_fields_get_new_names_and_the_others_stay(make: Any) -> None:
    for renames, expected in TABLE:
        pipe = make([("a", 0, "t")] * 2, "jpg cls txt").rename_fields(**renames)
        assert epochs(pipe) == [[expected] * 2] * 2
        assert list(pipe.select(" ".join(expected))) == [tuple(expected.values())] * 2


def test_each_sample_gives_the_first_old_name_that_it_has() -> None:
    items = [{".jpg": "a", ".png": "b"}, {".png": "c"}, {".jpeg": "d"}]
    pipe = IterableWrapper(items).to_samples().rename_fields(x="jpg;jpeg;png")
    assert epochs(pipe) == [[{"x": "a", "png": "b"}, {"x": "c"}, {"x": "d"}]] * 2


class Blind(kdp.SampleSource):
    """Labels that can be read, images that cannot."""

    def __len__(self) -> int:
        return 2

    def getitem_jpg(self, index: int) -> Any:
        raise OSError("an image was opened")

    def getitem_cls(self, index: int) -> int:
        return 7 + index


def test_nothing_is_loaded() -> None:
    pipe: Any = Blind().rename_fields(x="jpg", y="cls")
    assert pipe.column("y").tolist() == [7, 8]
    assert pipe.filter_classes(valid=[8])[0].index == 1
    for _ in range(2):
        assert [sorted(sample) for sample in pipe] == [["x", "y"]] * 2
    with pytest.raises(OSError, match="an image was opened"):
        pipe[0]["x"]


def test_a_column_is_read_by_its_old_name_without_samples(only_columns: Any) -> None:
    pipe = only_columns.rename_fields(x="jpg", y="cls")
    assert pipe.column("y").tolist() == ["cls0", "cls1"]
    assert pipe.column("txt").tolist() == ["txt0", "txt1"]
    with pytest.raises(OSError, match="a sample was made"):
        only_columns.rename_fields(x="jpg;png").column("x")


def test_a_name_that_is_not_there_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(
        kdp.FieldError, match=r"The source has no field 'jpgs'; it has 'cls', 'jpg'\. Did you mean 'jpg'"
    ):
        Blind().rename_fields(x="jpgs")
    streamed = stream([("a", 0)], "jpg cls").rename_fields(x="png;webp")
    with pytest.raises(kdp.FieldError, match="Sample '0' has no field 'png;webp'; it has 'cls', 'jpg'"):
        list(streamed)


def test_a_field_is_never_overwritten() -> None:
    for make in (indexed, stream):
        with pytest.raises((ValueError, kdp.FieldError), match="already has a field 'cls'"):
            list(make([("a", 0)], "jpg cls").rename_fields(cls="jpg"))


def test_bad_arguments_are_rejected_when_the_chain_is_built() -> None:
    for make in (indexed, stream):
        with pytest.raises(ValueError, match="`rename_fields` must be given at least one name"):
            make([("a", 0)], "jpg cls").rename_fields()
        with pytest.raises(TypeError, match="`x` must be one or several old names"):
            make([("a", 0)], "jpg cls").rename_fields(x=["jpg", "png"])
