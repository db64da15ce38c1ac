"""`kdpipes pack`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.write.shards import write_shards


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


def test_shards_without_a_limit_are_rejected_in_one_line(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    told = run("pack", photo_folder, tmp_path / "p-%03d.tar").wrong_usage()
    assert "Pass the size of a shard, such as `--max-samples 1000`." in told
    assert "`--max-samples` or `--max-bytes` must be given" in told


def broken(photo_folder: Path, place: Path) -> Path:
    """Return a copy of some photos, of which one is none."""
    for name in ("cat", "rocket"):
        shutil.copytree(photo_folder / name, place / name)
    (place / "cat" / "0000.jpg").write_bytes(b"no image")
    return place


def test_files_that_are_no_images_are_skipped_on_request(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    photos, shards = broken(photo_folder, tmp_path / "photos"), tmp_path / "s" / "p-%02d.tar"
    number = len(kdp.image_folder(photos))
    told = run("pack", photos, shards, "--max-samples", 5).mistake()
    assert "`--extension x=jpg`" in told
    assert "leave it out: `--on-error skip`" in told
    said = run("pack", photos, shards, "--max-samples", 5, "--on-error", "skip")
    assert (said.status, said.out.endswith("; left out 1 sample.\n")) == (0, True)
    listed = tmp_path / "bad.jsonl"
    again = ("--on-error", "quarantine", "--quarantine", listed)
    told = run("pack", photos, tmp_path / "t" / "p-%02d.tar", "--max-samples", 5, *again, "--json").json()
    assert (told["num_samples"], told["num_left_out"]) == (number - 1, 1)
    assert "0000" in listed.read_text(encoding="utf-8")
    assert contents(tmp_path / "s") == contents(tmp_path / "t") != {}


def test_image_files_are_written_byte_by_byte_with_on_error(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    for name, options in {"a": (), "b": ("--on-error", "skip")}.items():
        assert run("pack", photo_folder, tmp_path / name / "p-%02d.tar", "--max-samples", 90, *options).status == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != {}


def test_fields_are_written_and_called_as_options_say(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    words = ("--max-samples", 200, "--encode", "x=png", "--extension", "y=label.cls", "--extension", "x=image.png")
    assert run("pack", photo_folder, tmp_path / "p-%02d.tar", *words).status == 0
    first = kdp.open_shards(str(tmp_path / "p-00.tar"))[0]
    assert sorted(first) == ["image.png", "label.cls"]
    assert bytes(first["image.png"]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--encode x", "`--encode` must be FIELD=FORMAT, but is 'x' instead."),
        ("--encode x=pgn", "Did you mean 'png'?"),
        ("--encode x=png --encode x=jpg", "`--encode` must be given once for each field, but is 'x=jpg' instead."),
        ("--extension x=a/b", "`--extension x=` must be an extension, like"),
        ("--extension z=png", "SOURCE has no field 'z'; it has 'x', 'y'."),
        ("--encode y=png", "`--encode y=FORMAT`"),
        ("--extension x=cls", "Choose another: `--extension"),
        ("--on-error quarantine", "`--quarantine FILE` must be given with `--on-error quarantine`, and only then."),
        ("--on-error quarantine --quarantine none/bad.jsonl", "`--quarantine` must be a file in an existing folder"),
        ("--shuffle -1", "`--shuffle` must be an integer of at least 0"),
        ("--max-bytes 0", "`--max-bytes` must be an integer of at least 1"),
    ],
)
def test_mistakes_are_told_by_the_names_of_options(
    photo_folder: Path, tmp_path: Path, run: Any, words: str, told: str
) -> None:
    answer = run("pack", photo_folder, tmp_path / "p-%03d.tar", "--max-samples", 200, *words.split())
    assert answer.status == (1 if "SOURCE" in told or "Choose" in told or "existing" in told or "y=" in told else 2)
    said = answer.err
    assert told in said
    assert "={" not in said
    assert "a function" not in said


def test_another_job_is_rejected_by_the_names_of_options(photo_folder: Path, tmp_path: Path, run: Any) -> None:
    shards = tmp_path / "p-%03d.tar"
    assert run("pack", photo_folder, shards, "--max-samples", 90).status == 0
    told = run("pack", photo_folder, shards, "--max-samples", 80, "--extension", "y=class").mistake()
    assert "`--max-samples` was 90, and is 80" in told
    assert "`--encode`, `--extension`" in told
