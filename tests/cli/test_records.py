"""`kdpipes records`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdpipes as kdp


def test_a_folder_becomes_records_and_is_found_again(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    number = len(kdp.image_folder(photo_folder))
    for found in ("", ", 2 of them found"):
        said = run("records", photo_folder, tmp_path / "records", "--num-parts", "2")
        assert (said.status, said.err) == (0, "")
        assert said.out.startswith(f"{tmp_path / 'records'}: {number} samples, ")
        assert said.out.endswith(f" bytes, in 2 parts{found}.\n")
    assert len(kdp.open_records(tmp_path / "records")) == number


def test_options_are_those_of_the_function(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    kdp.write_records(kdp.image_folder(photo_folder), tmp_path / "a", num_parts=3, seed=5)
    told = run("records", photo_folder, tmp_path / "b", "--num-parts", 3, "--seed", 5, "--json").json()
    keys = [kdp.open_records(tmp_path / name).column("key").tolist() for name in ("a", "b")]
    assert keys[0] == keys[1]
    assert (told["path"], told["num_parts"], told["num_written"]) == (str(tmp_path / "b"), 3, 3)
    run("records", photo_folder, tmp_path / "c", "--no-shuffle")
    photos = kdp.image_folder(photo_folder).column("key")
    assert kdp.open_records(tmp_path / "c").column("key").tolist() == photos.tolist() != keys[0]


def test_a_list_of_paths_and_labels_becomes_records(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    paths = sorted(photo_folder.rglob("*.jpg"))[:3]
    (tmp_path / "list.txt").write_text("".join(f"{path} {place}\n" for place, path in enumerate(paths)))
    assert run("records", tmp_path / "list.txt", tmp_path / "records", "--no-shuffle").status == 0
    samples = list(kdp.open_records(tmp_path / "records"))
    assert [(sample["x"], sample["y"]) for sample in samples] == [
        (path.read_bytes(), place) for place, path in enumerate(paths)
    ]
