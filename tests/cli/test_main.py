"""The command line as a whole: help, mistakes, exit statuses, and what is not imported for them."""

from __future__ import annotations

import errno
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest

import kdpipes as kdp
from kdpipes import cli
from kdpipes.cli import COMMANDS, main

IMPORTED = """
import json
from kdpipes_command import main
for words in json.loads({words!r}):
    sys.argv = ["kdpipes", *words]
    assert main() == (0 if "--help" in words or "--version" in words else 2), words
print(json.dumps(sorted({{"torch", "numpy", "fsspec", "tqdm"}} & set(sys.modules))))
"""

STOCK = """
from torch.utils.data.datapipes.map import SequenceWrapper
import kdpipes


def chain():
    return SequenceWrapper([("a", 1), ("b", 0)]).to_samples(fields="x y").deal(batch_size=2)
"""


def commands() -> dict[str, click.Command]:
    """Return every command by its words: "cache ls"."""
    context = click.Context(cli._kdpipes)
    found: dict[str, click.Command] = {}
    for name in cli._kdpipes.list_commands(context):
        command = cli._kdpipes.get_command(context, name)
        assert command is not None
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {sub}": command.commands[sub] for sub in command.commands}
    return found


def test_every_command_is_listed_with_a_sentence(run: Any) -> None:
    said = run("--help")
    assert (said.status, said.err) == (0, "")
    for name in COMMANDS:
        line = next(line for line in said.out.splitlines() if line.split()[:1] == [name])
        assert line.endswith("."), "nothing is cut off"
        assert cli._kdpipes.get_command(click.Context(cli._kdpipes), name).name == name
    assert list(COMMANDS) == sorted(COMMANDS) == sorted(set(COMMANDS))


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_has_examples_options_and_the_exit_statuses(name: str, run: Any) -> None:
    said = run(*name.split(), "--help")
    assert (said.status, said.err) == (0, "")
    assert run(*name.split(), "-h") == said
    assert max(map(len, said.out.splitlines())) <= 80
    assert said.out.startswith(f"Usage: kdpipes {name} [OPTIONS]")
    assert f"Examples:\n    kdpipes {name}" in said.out
    assert "Exit status: 0 if all went well; 1 after an error" in said.out
    for parameter in commands()[name].params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name
    assert ("--json" in said.out) == ("\n  JSON:" in said.out), "the form is documented"


def test_long_lines_are_wrapped_to_the_terminal(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    words = ("doctor", tmp_path / "none.py")
    assert len(run(*words).err.splitlines()) == 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    lines = run(*words).err.splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 40 or " " not in line.strip() for line in lines)


def test_warnings_are_told_without_lines_of_python(tmp_path: Path, script: Any) -> None:
    (tmp_path / "warns.py").write_text("import warnings\nwarnings.warn('take care')\n", encoding="utf-8")
    code = (
        "import warnings\nwarnings.simplefilter('always')\nfrom kdpipes.cli import main\nmain(['doctor', 'warns.py'])"
    )
    assert script(code).err.splitlines()[0] == "kdpipes doctor: take care"


def test_the_version_is_told(run: Any) -> None:
    assert run("--version") == (0, f"kdpipes {kdp.__version__}\n", "")
    assert kdp.__version__ == version("kdpipes")


def test_what_is_missing_or_unknown_ends_with_the_usage(run: Any) -> None:
    for words in ([], ["replay"], ["index"], ["cache"], ["cache", "verify"], ["copy", "a"], ["demo", "--num-epochs"]):
        said = run(*words)
        assert (said.status, said.out) == (2, "")
        assert "Usage: kdpipes" in said.err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("idnex a.tar", "'index'"),
        ("cache veryfi", "'verify'"),
        ("index --no-checksum a.tar", "'--no-checksums'"),
        ("replay a:b --epoc 1", "'--epoch'"),
        ("--versio", "'--version'"),
    ],
)
def test_a_typo_is_told_what_was_meant(words: str, meant: str, run: Any) -> None:
    said = run(*words.split())
    assert (said.status, said.out) == (2, "")
    assert f"Did you mean {meant}?" in said.err
    assert "Did you mean" not in run("zzz").err


def test_help_and_mistakes_import_nothing_heavy(script: Any) -> None:
    words = [["--help"], ["--version"], ["idnex"], ["index"], *([*name.split(), "--help"] for name in commands())]
    said = script(IMPORTED.format(words=json.dumps(words)))
    assert said.status == 0, said.err
    assert said.out.splitlines()[-1] == "[]"


def test_the_script_registers_the_pipes_before_a_chain_is_made(script: Any, tmp_path: Any) -> None:
    (tmp_path / "stock.py").write_text(STOCK, encoding="utf-8")
    code = "from kdpipes_command import main\nsys.argv = ['kdpipes', 'doctor', 'stock.py:chain', '--no-measure']\n"
    said = script(code + "sys.exit(main())")
    assert said == (0, "Nothing is wrong with the chain.\n", "")


BROKEN = """
import kdpipes


class TwoLines(Exception):
    pass


def lines():
    raise TwoLines("the first line\\nand a second one")


def silent():
    raise EOFError


def wrong():
    raise ValueError("what is wrong")
"""


def test_an_error_is_one_line_with_its_class_where_needed(run: Any, tmp_path: Any) -> None:
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    told = {"lines": "TwoLines: the first line", "silent": "EOFError", "wrong": "what is wrong"}
    for name, line in told.items():
        said = run("doctor", f"{tmp_path / 'broken.py'}:{name}").mistake()
        assert said.endswith(f"broken.py:{name} cannot be run: {line} (`kdpipes --traceback` shows where)\n")


def test_the_traceback_is_shown_to_who_asks_for_it(run: Any, tmp_path: Any) -> None:
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    said = run("--traceback", "doctor", f"{tmp_path / 'broken.py'}:lines")
    assert said.status == 1
    assert " shows where)\nTraceback (most recent call last):\n" in said.err
    assert 'raise TwoLines("the first line' in said.err
    assert "and a second one" in said.err


def test_a_reader_that_leaves_ends_the_command_without_a_word(monkeypatch: Any, capsys: Any, tmp_path: Any) -> None:
    def broken(data: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    (tmp_path / "a.txt").touch()
    monkeypatch.setattr("kdpipes.cli._commands._masked", broken)
    for name in ("stdout", "stderr"):  # which click replaces
        monkeypatch.setattr(sys, name, getattr(sys, name))
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path), "--json"])
    assert ended.value.code == 1
    assert capsys.readouterr() == ("", "")


def test_status_and_text_are_those_of_this_process_arguments(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["kdpipes", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("kdpipes ")


def test_every_command_has_a_json_form() -> None:
    each = {name: command for name, command in commands().items() if not isinstance(command, click.Group)}
    lacking = [name for name, command in each.items() if not any("--json" in one.opts for one in command.params)]
    assert lacking == []
