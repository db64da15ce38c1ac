"""Drawn chains: boxes apart, and lines that cross none of them, nor lie on each other."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.look.figures import layout_of

Box = tuple[float, float, float, float]
Points = list[tuple[float, float]]


def short(number: int = 0) -> Any:
    return kdp.from_dataset([(number, 0)])


def long(number: int, length: int) -> Any:
    pipe = short(number)
    for seed in range(length):
        pipe = pipe.permute(seed=seed)
    return pipe


def nested() -> Any:
    return long(0, 3).mix([long(1, 1), short(2).mix([long(3, 5), short(4)])]).decode_images("x")


def forked() -> Any:
    one, two, three = IterableWrapper(range(3)).fork(3)
    return one.map(str).map(str).map(str).zip(two, three.map(str)).to_samples(fields="x y z")


CHAINS = {
    "last is long": lambda: short().mix([short(1), long(2, 4)]).deal(batch_size=1),
    "first is long": lambda: long(0, 4).mix([short(1), short(2)]),
    "middle is long": lambda: kdp.concat(short(), long(1, 6), long(2, 2)).permute(seed=0),
    "nested": nested,
    "forked": forked,
}


def drawn(pipe: Any) -> tuple[list[Box], list[Points]]:
    """Return the boxes of a drawn chain, and points of its lines."""
    root = ElementTree.fromstring(kdp.draw(pipe).svg)
    frames = [group[0].attrib for group in root if group.tag.endswith("}g")]
    boxes = [(float(box["x"]), float(box["y"]), float(box["width"]), float(box["height"])) for box in frames]
    paths = [path.attrib["d"] for path in root if path.tag.endswith("path") and path.attrib["fill"] == "none"]
    return boxes, [points_of(path) for path in paths]


def points_of(path: str) -> Points:
    points: Points = []
    for letter, said in re.findall("([MCL])([^MCL]+)", path):
        numbers = [float(number) for number in said.split()]
        ends = list(zip(numbers[::2], numbers[1::2], strict=True))
        if letter == "M":
            points = ends
            continue
        knots = [points[-1], *(ends if letter == "C" else [points[-1], ends[-1], ends[-1]])]
        for step in range(1, 21):
            t = step / 20
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
            points.append(
                (
                    sum(weight * x for weight, (x, _) in zip(weights, knots, strict=True)),
                    sum(weight * y for weight, (_, y) in zip(weights, knots, strict=True)),
                )
            )
    return points


@pytest.mark.parametrize("name", list(CHAINS))
def test_no_line_runs_behind_a_box_and_ends_do_not_meet(name: str) -> None:
    boxes, lines = drawn(CHAINS[name]())
    assert len(lines) >= len(boxes) - 1
    for points in lines:
        for left, top, width, height in boxes:
            assert not [(x, y) for x, y in points if left < x < left + width and top < y < top + height]
    assert len({points[-1] for points in lines}) == len(lines)
    for one, other in ((one, other) for one in boxes for other in boxes if one is not other):
        assert abs(one[0] - other[0]) >= one[2] or abs(one[1] - other[1]) >= one[3]


def test_branches_end_side_by_side_right_above_what_joins_them() -> None:
    boxes, lines = drawn(short().mix([short(1), long(2, 4)]))
    *_, join = boxes
    above = sorted(box[1] for box in boxes if box is not join)[-3:]
    assert len(set(above)) == 1
    assert all(points[-1][1] - points[0][1] < join[3] for points in lines), "none passes a row"


chains = st.integers(1, 12).flatmap(
    lambda size: st.tuples(*(st.sets(st.integers(0, max(at - 1, 0)), max_size=min(at, 3)) for at in range(size)))
)


@settings(max_examples=100, deadline=None, database=None)
@given(chains)
def test_readers_take_each_slot_of_a_row_once(reads: tuple[set[int], ...]) -> None:
    used = set().union(*reads)
    ends = [at for at in range(len(reads)) if at not in used]
    sources = [*map(tuple, map(sorted, reads)), tuple(ends)]
    places, lines = layout_of(sources)
    rows: dict[int, list[float]] = {}
    for column, row in places:
        rows.setdefault(row, []).append(column)
    read = []
    for target, ends in enumerate(lines):
        assert ends == sorted(ends, key=lambda line: line[-2][0]), "from the left"
        for line in ends:
            read.append((places.index(line[0]), target))
            assert line[-1] == places[target]
            assert [row for _, row in line] == list(range(line[0][1], line[-1][1] + 1))
            for column, row in line[1:-1]:
                rows[row].append(column)
    for columns in rows.values():
        apart = sorted(columns)
        assert all(after - before >= 1 - 1e-9 for before, after in pairwise(apart))
    assert sorted(read) == sorted((source, target) for target, above in enumerate(sources) for source in above)


def test_a_chain_without_branches_is_one_column() -> None:
    assert layout_of([(), (0,), (1,)])[0] == [(0.0, 0), (0.0, 1), (0.0, 2)]
    assert layout_of([()])[0] == [(0.0, 0)]


def test_a_graph_is_exported_for_graphviz(tmp_path: Path) -> None:
    path = tmp_path / "chain.dot"
    kdp.draw(short().mix(short(1)).select("x").deal(batch_size=1)).save(path)
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("digraph chain {", "}")
    assert [line.strip() for line in lines if "->" in line] == ["n0 -> n2;", "n1 -> n2;", "n2 -> n3;", "n3 -> n4;"]
    assert r"label=\"deal(batch_size=1)\n2 batches\"".replace('\\"', '"') in lines[-3]
    with pytest.raises(ValueError, match=r"ends with \.svg or \.dot"):
        kdp.draw(short()).save("chain.png")
