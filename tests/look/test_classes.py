"""`plot_classes`: a figure as SVG."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

SVG = "{http://www.w3.org/2000/svg}"


def birds(labels: list[int] | None = None) -> Any:
    labels = [0, 0, 0, 1] if labels is None else labels
    return kdp.from_ids(list(range(len(labels))), labels, load=str, class_names=["heron", "<stork>", "gull"])


def texts(figure: Any) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(figure.svg).iter(f"{SVG}text")]


def bars(figure: Any) -> list[str]:
    """Return the names and counts of a plot of classes, from top to bottom."""
    return [text for text in texts(figure) if ":" not in text]


def test_each_class_has_a_bar_before_and_after_the_plan() -> None:
    figure = kdp.plot_classes(birds().oversample(mode="exact").select("x y").deal(batch_size=2))
    assert bars(figure) == ["heron", "3", "3", "<stork>", "1", "3", "gull", "0", "0"]
    assert texts(figure)[:2] == ["source: 4 samples", "after the plan: 6 samples"]
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="10"', figure.svg)]
    assert widths[0] == widths[1] == widths[3] == pytest.approx(3 * widths[2], rel=0.01)


def test_without_a_plan_there_is_one_bar_each() -> None:
    assert bars(kdp.plot_classes(birds().decode_images("x"))) == ["heron", "3", "<stork>", "1", "gull", "0"]


def test_before_are_all_sources_each_once() -> None:
    one, other = birds(), birds([2, 2])
    joined = kdp.concat(one.filter_classes(valid=[1]), other, one)
    assert bars(kdp.plot_classes(joined)) == ["heron", "3", "3", "<stork>", "1", "2", "gull", "2", "2"]


def test_labels_that_are_named_y_behind_a_plan_pipe_are_found(photo_shards: str) -> None:
    shards = kdp.open_shards(photo_shards).permute(1).rename_fields(x="jpg", y="cls").few_shot(2)
    assert texts(kdp.plot_classes(shards))[:2] == ["source: 160 samples", "after the plan: 16 samples"]


def test_classes_that_are_renamed_stand_by_their_names() -> None:
    mapped = birds().map_classes({"heron": "bird", "<stork>": "bird", "gull": "sea"})
    assert bars(kdp.plot_classes(mapped)) == [
        *("heron", "3", "0", "<stork>", "1", "0", "gull", "0", "0", "bird", "0", "4", "sea", "0", "0"),
    ]


def test_of_many_classes_the_largest_are_shown() -> None:
    labels = [number for number in range(30) for _ in range(number + 1)]
    figure = kdp.plot_classes(kdp.from_ids(labels, labels, load=str), max_classes=3)
    assert bars(figure) == ["27", "28", "28", "29", "29", "30", "and 27 classes more, with fewer samples"]


def test_streams_are_rejected_and_nothing_but_labels_is_read() -> None:
    with pytest.raises(kdp.ChainError, match="`plot_classes` needs an indexed "):
        kdp.plot_classes(IterableWrapper([(1, 0)]).to_samples(fields="x y"))

    def load(id: int) -> None:
        raise AssertionError(id)

    assert kdp.plot_classes(kdp.from_ids([1, 2], [0, 0], load=load)).svg


def test_a_figure_is_saved_as_a_file_of_its_own(tmp_path: Path) -> None:
    figure = kdp.plot_classes(birds())
    figure.save(tmp_path / "classes.svg")
    assert (tmp_path / "classes.svg").read_text(encoding="utf-8") == figure.svg == figure._repr_svg_()
    assert ElementTree.parse(tmp_path / "classes.svg").getroot().tag == f"{SVG}svg"
    with pytest.raises(ValueError, match=r"`path` must be a path that ends with \.svg"):
        figure.save(tmp_path / "classes.png")


def test_names_that_are_no_utf_8_or_xml_are_written_out(tmp_path: Path) -> None:
    chain = kdp.from_ids([0, 1], [0, 1], load=str, class_names=["a\udcff", "b\x1bc"])
    figure = kdp.plot_classes(chain)
    figure.save(tmp_path / "classes.svg")
    ElementTree.parse(tmp_path / "classes.svg")
    assert bars(figure) == ["a\\udcff", "1", "b\\x1bc", "1"]
