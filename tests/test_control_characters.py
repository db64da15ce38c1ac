"""Control characters of data reach no terminal and no page: a walk over commands, views, errors, logs and warnings."""

from __future__ import annotations

import io
import logging
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes import cli
from kdpipes.cli import main
from kdpipes.core.messages import logger, warn
from kdpipes.core.secrets import printable

# A terminal's title, a color, C1's form of it, a bell, a return to the line's start, and reversals of the direction.
EVIL = "\x1b]0;owned\x07\x1b[8m\x9b31m\r\u202eevil\u2066\u200f"
HOSTILE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def hostile_tar(folder: Path) -> str:
    """Return the path of a tar whose name, keys and members hold control characters."""
    path = folder / f"a{EVIL.replace('/', '')}.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in ((f"1{EVIL}.cls", b"1"), (f"1{EVIL}.x{EVIL}", b"1"), (f"1{EVIL}.txt", EVIL.encode())):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return str(path)


def hostile_folder(folder: Path) -> Path:
    """Return a folder of images whose classes and files are named with control characters; one is damaged."""
    for number in range(3):
        place = folder / "images" / f"class{number}{EVIL}"
        place.mkdir(parents=True)
        (place / f"{number}{EVIL}.png").write_bytes(b"no image")
    return folder / "images"


def fails(x: Any) -> Any:
    raise ValueError(f"bad {EVIL}")


def samples() -> Any:
    items = [(f"text {EVIL}", number % 2) for number in range(4)]
    return kdp.from_dataset(items, class_names=[f"zero{EVIL}", f"one{EVIL}"])


def text_of(shown: Any) -> str:
    html = shown._repr_html_() if hasattr(shown, "_repr_html_") else ""
    svg = shown.svg if hasattr(shown, "svg") else ""
    return "\n".join([repr(shown), str(shown), html, str(svg)])


VIEWS: dict[str, Callable[[Path], Any]] = {
    "a sample": lambda folder: kdp.open_shards(hostile_tar(folder))[0],
    "a loaded sample": lambda folder: [dict(sample := kdp.open_shards(hostile_tar(folder))[0]), sample][1],
    "peek": lambda folder: kdp.open_shards(hostile_tar(folder)).peek(1),
    "peek of classes": lambda folder: samples().peek(2),
    "peek of batches": lambda folder: samples().select("x y").deal(batch_size=2).peek(2),
    "peek of a dictionary": lambda folder: kdp.from_dataset([({f"a{EVIL}": EVIL}, 0)]).peek(1),
    "a chain": lambda folder: kdp.open_shards(hostile_tar(folder)).transform("txt", fails).select("txt"),
    "a folder": lambda folder: kdp.image_folder(hostile_folder(folder)),
    "a stream": lambda folder: kdp.stream_shards(hostile_tar(folder)).select("txt").deal(batch_size=1),
    "classes": lambda folder: kdp.plot_classes(samples()),
    "a doctor's report": lambda folder: kdp.doctor(
        samples().transform("x", fails).select("x").deal(batch_size=2), measure=False
    ),
    "a profile": lambda folder: kdp.profile(samples().select("y").deal(batch_size=2), seconds=0.01),
    "a loader": lambda folder: kdp.Loader(kdp.open_shards(hostile_tar(folder)).select("txt").deal(batch_size=1)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_clean(name: str, tmp_path: Path) -> None:
    text = text_of(VIEWS[name](tmp_path))
    assert not HOSTILE.search(text), HOSTILE.search(text)


def damaged(folder: Path) -> Any:
    return kdp.image_folder(hostile_folder(folder)).decode_images("x")


ERRORS: dict[str, Callable[[Path], Any]] = {
    "a field that is missing": lambda folder: kdp.open_shards(hostile_tar(folder))[0]["nope"],
    "a field with such a name": lambda folder: kdp.open_shards(hostile_tar(folder))[0][EVIL],
    "a field of a chain": lambda folder: samples().select(f"x {EVIL.replace(' ', '')}"),
    "an image": lambda folder: damaged(folder).select("x")[0],
    "a batch": lambda folder: list(damaged(folder).select("x").deal(batch_size=2)),
    "too many failures": lambda folder: list(
        damaged(folder).on_error("skip", max_share=0.0).select("x").deal(batch_size=2)
    ),
    "a folder": lambda folder: kdp.image_folder(folder / f"none{EVIL}")[0],
    "a shard": lambda folder: kdp.open_shards(str(folder / f"none{EVIL}.tar"))[0],
    "a stream": lambda folder: list(kdp.stream_shards(str(folder / f"none{EVIL}.tar"))),
    "a table": lambda folder: kdp.from_table(str(folder / f"none{EVIL}.csv"))[0],
    "a pipe": lambda folder: getattr(samples(), EVIL),
    "classes": lambda folder: samples().filter_classes(valid=["nope"]).column("y"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_and_notes_are_clean(name: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"[\s\S]") as caught:
        ERRORS[name](tmp_path)
    error: BaseException | None = caught.value
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    assert not HOSTILE.search(text), text


def test_logs_of_skipped_samples_are_clean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain = samples().transform("x", fails).on_error("skip", max_share=1.0).select("x").deal(batch_size=2)
    with pytest.raises(kdp.DataError):
        list(chain)
    assert "bad " in caplog.text
    assert not HOSTILE.search(caplog.text)


def test_every_log_line_and_warning_is_clean(caplog: pytest.LogCaptureFixture) -> None:
    logger("kdpipes.test").warning("one %s", EVIL)
    with pytest.warns(UserWarning, match="two") as caught:
        warn(f"two {EVIL}")
    assert caught[0].filename == __file__
    assert caplog.records[0].levelno == logging.WARNING
    assert not HOSTILE.search(caplog.text + str(caught[0].message))


def test_no_module_logs_or_warns_past_it() -> None:
    package = Path(kdp.__file__).parent
    own = {package / "core" / "messages.py", package / "__init__.py", package / "testing" / "checks.py"}
    for path in set(package.rglob("*.py")) - own:
        found = re.search(r"warnings\.warn\(|logging\.getLogger", path.read_text(encoding="utf-8"))
        assert not found, f"{path}: use `warn` and `logger` of `kdpipes.core.messages`."


def leaves(group: Any, words: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return the words of all commands."""
    commands = getattr(group, "commands", None)
    if commands is None:
        return {words}
    return {each for name, command in commands.items() for each in leaves(command, (*words, name))}


def test_commands_are_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tar, folder = hostile_tar(tmp_path), hostile_folder(tmp_path)
    cache, receipt = str(tmp_path / f"cache{EVIL}"), tmp_path / f"r{EVIL}.json"
    list(kdp.open_shards(tar).cache_on_disk(cache).select("txt"))
    receipt.write_text(f'["{EVIL}"]', encoding="utf-8")
    (tmp_path / "chains.py").write_text(CHAINS, encoding="utf-8")
    lines: dict[tuple[str, ...], list[list[Any]]] = {
        ("cache", "ls"): [[cache], [EVIL]],
        ("cache", "verify"): [[cache], [EVIL]],
        ("cache", "clear"): [[cache], [EVIL]],
        ("copy",): [[folder, tmp_path / f"copy{EVIL}"], [EVIL, "b"]],
        ("demo",): [["--num-epochs", EVIL]],
        ("doctor",): [["chains.py:samples", "--no-measure"], [f"chains.py:{EVIL}"], [EVIL]],
        ("find",): [["chains.py:samples", "--batch", 0], [EVIL, "--batch", 0]],
        ("index",): [[tar], [EVIL]],
        ("inspect",): [[tar], [folder], [EVIL], [f"chains.py:{EVIL}"]],
        ("pack",): [[folder, f"p{EVIL}-%03d.tar", "--max-samples", 1], ["chains.py:fails", "q-%03d.tar"]],
        ("records",): [[folder, f"records{EVIL}"], ["chains.py:fails", "others"]],
        ("replay",): [["chains.py:samples"], ["chains.py:broken"]],
        ("verify",): [[receipt], [EVIL]],
    }
    assert lines.keys() == leaves(cli._kdpipes)
    for words, calls in lines.items():
        for arguments in calls:
            for first in ([], ["--traceback"]):
                main([*first, *words, *map(str, arguments)])
                said = capsys.readouterr()
                assert said.out + said.err, words
                assert not HOSTILE.search(said.out + said.err), (words, said)


CHAINS = f"""
import kdpipes as kdp
EVIL = {EVIL!r}
samples = kdp.from_dataset([(EVIL, 0), (EVIL, 1)], class_names=["a" + EVIL, "b"]).select("x y").deal(batch_size=2)

def refuse(x):
    raise ValueError("refused " + EVIL)

fails = kdp.from_dataset([(EVIL, 0)]).transform("x", refuse)

def broken():
    raise OSError("broken " + EVIL)
"""


def test_other_letters_stay() -> None:
    assert printable("Größe 猫 🐈") == "Größe 猫 🐈"
    assert printable(f"é{EVIL}").startswith(r"é\x1b]0;owned\x07")
