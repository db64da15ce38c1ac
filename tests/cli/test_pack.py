"""`kdpipes pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kdpipes as kdp
from kdpipes.write.write_shards import write_shards


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


def test_a_folder_becomes_shards_and_is_found_again(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    names = tmp_path / "shards" / "photos-%06d.tar"
    number = len(kdp.image_folder(photo_folder))
    for found in ("", f", {-(-number // 3)} of them found"):
        said = run("pack", photo_folder, names, "--max-samples", "3")
        assert (said.status, said.err) == (0, "")
        assert said.out.startswith(f"{number} samples, ")
        assert said.out.endswith(f" bytes, in {-(-number // 3)} shards{found}.\n")
    assert len(kdp.open_shards(str(tmp_path / "shards" / "*.tar"))) == number


def test_the_shards_are_those_of_the_function(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    chain = kdp.image_folder(photo_folder).permute(7)
    expected = write_shards(chain, tmp_path / "a" / "p-%03d.tar", max_bytes=100_000)
    told = run(
        "pack", photo_folder, tmp_path / "b" / "p-%03d.tar", "--max-bytes", "100000", "--shuffle", 7, "--json"
    ).json()
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != {}
    assert told["num_samples"] == expected.num_samples
    assert tuple(told["class_names"]) == expected.class_names
    assert [Path(url).name for url in told["urls"]] == [Path(url).name for url in expected.urls]


def test_shards_without_a_limit_are_refused_in_one_line(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    assert "max_samples" in run("pack", photo_folder, tmp_path / "p-%03d.tar").mistake()
