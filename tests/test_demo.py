"""The demo and the shipped photos."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import kdpipes as kdp
from kdpipes.demo import PHOTO_CLASSES, run_demo, write_photo_folder, write_photo_shards

COUNTS = {"brick": 24, "cat": 40, "coffee": 30, "galaxies": 12, "grass": 8, "gravel": 6, "retina": 16, "rocket": 24}


def test_the_photos_are_160_in_8_classes(photo_folder: Path) -> None:
    photos = kdp.image_folder(photo_folder)
    assert (len(photos), photos.class_names()) == (160, PHOTO_CLASSES)
    counts = kdp.class_counts(photos.column("y"))
    assert {PHOTO_CLASSES[number]: count for number, count in counts.items()} == COUNTS
    for path in photo_folder.rglob("*.jpg"):
        with Image.open(path) as image:
            assert (image.mode, image.format) == ("RGB", "JPEG")
            assert 80 <= max(np.asarray(image).shape[:2]) <= 128


def test_folder_and_shards_hold_the_same_photos(photo_folder: Path, tmp_path: Path) -> None:
    urls = write_photo_shards(tmp_path, num_shards=3)
    shards = kdp.open_shards(urls)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"photos-00{n}.tar" for n in range(3)]
    in_shards = {(sample["jpg"], sample["cls"]) for sample in shards}
    assert in_shards == {(sample["x"], sample["y"]) for sample in kdp.image_folder(photo_folder)}
    assert len(shards) == len(in_shards) == 160
    with pytest.raises(ValueError, match="`num_shards` must be an integer of at least 1, but is 0"):
        write_photo_shards(tmp_path, num_shards=0)


def test_the_licence_of_every_class_is_stated() -> None:
    text = (files("kdpipes") / "data" / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]
    assert {row[0]: int(row[2]) for row in rows} == COUNTS
    assert [(row[0], int(row[1])) for row in rows] == [(name, label) for label, name in enumerate(PHOTO_CLASSES)]
    assert {row[5] for row in rows} <= {"CC0", "Public domain"}
    assert all(row[4] for row in rows), "each names its author or origin"


def test_the_demo_writes_its_picture_and_can_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = []
    for _ in range(2):
        picture = run_demo(tmp_path / "demo", num_workers=0, num_epochs=1, size=16)
        with Image.open(picture) as image:
            pictures.append(np.asarray(image))
    assert pictures[0].shape == (4 * 126, 8 * 112, 3), "16 photos and 16 crops with captions"
    assert np.array_equal(pictures[0], pictures[1])
    assert len(np.unique(pictures[0].reshape(-1, 3), axis=0)) > 1000
    printed = capsys.readouterr().out
    assert printed.count("image folder: 160 photos -> 320 samples an epoch") == 2
    assert f"each photo and the result, with the recorded crop: {picture}" in printed


def test_existing_photos_stay_and_damaged_ones_are_mended(tmp_path: Path) -> None:
    paths = sorted(write_photo_folder(tmp_path).rglob("*.jpg"))
    before = [path.stat().st_mtime_ns for path in paths]
    content = paths[3].read_bytes()
    paths[3].write_bytes(content[:-1])
    write_photo_folder(tmp_path)
    after = [path.stat().st_mtime_ns for path in paths]
    assert (before[:3], before[4:]) == (after[:3], after[4:])
    assert paths[3].read_bytes() == content
