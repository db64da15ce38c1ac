"""Commands that are imported when they are called, print text or JSON, and end with a status."""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from kdpipes.core.errors import KdpipesError, closest, masked

__all__ = ["INTERRUPTED", "Answer", "Command", "Commands", "wants_json"]

INTERRUPTED = 130  # 128 plus the number of the signal, as shells do
_EXPLAINED = (
    KdpipesError,
    ValueError,
    TypeError,
    IndexError,
    ImportError,
    OSError,
)  # their texts are clear without the class
_STATUS = (
    "Exit status: 0 if all went well; 1 after an error, printed in one line on stderr; 2 for wrong usage; "
    f"{INTERRUPTED} after Ctrl-C."
)


class Answer(NamedTuple):
    """What a command prints: plain data for `--json`, and text for people; and its exit status."""

    data: Any
    text: str | Iterable[str]
    status: int = 0


def wants_json() -> bool:
    """Return whether the command that runs was called with `--json`."""
    return click.get_current_context().get_parameter_source("as_json") is ParameterSource.COMMANDLINE


class _Suggesting(click.Command):
    """A command whose help ends with the exit statuses, and which suggests the closest option for a wrong one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"epilog": _STATUS, **kwargs})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for parameter in self.get_params(ctx) for name in parameter.opts if name.startswith("-")]
            ctx.fail(f"There is no option {error.option_name!r}.{closest(error.option_name, known)}")
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # so that the usage is shown
            raise


class Command(_Suggesting):
    """A command that runs once all of kdpipes is imported, and not for its help.

    If its help documents a JSON form, it has an option `--json`, and returns an `Answer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "JSON:" in (self.help or ""):
            text = "Print JSON, of the form above, for scripts."
            self.params.append(click.Option(["--json", "as_json"], is_flag=True, expose_value=False, help=text))

    def invoke(self, ctx: click.Context) -> Any:
        _ = importlib.import_module("kdpipes").__all__  # registers the pipes: see kdpipes_command.py
        answer = super().invoke(ctx)
        if not isinstance(answer, Answer):
            return answer
        if wants_json():
            click.echo(json.dumps(_masked(answer.data), indent=2))  # in ASCII: names in data need not be UTF-8
        else:
            for line in [answer.text] if isinstance(answer.text, str) else answer.text:
                click.echo(line)
        return answer.status


class Commands(_Suggesting, click.Group):
    """A group of commands.

    Errors end a command with one line on stderr. For an unknown command, the closest one is suggested.

    Args:
        modules: The module of each command, by name. It is imported when needed, and has the command as `command`.
    """

    command_class = Command

    def __init__(self, *args: Any, modules: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = dict(modules or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._modules])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return super().get_command(ctx, cmd_name)
        found: click.Command = importlib.import_module(self._modules[cmd_name]).command
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            ctx.fail(f"There is no command {args[0]!r}; there are {', '.join(names)}.{closest(args[0], names)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.parent is not None:
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            click.echo(f"{_name(ctx)}: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            click.echo(f"{_name(ctx)}: {_line(error)}", err=True)
            if ctx.params.get("traceback"):
                click.echo(traceback.format_exc(), err=True)
            ctx.exit(1)


def _name(ctx: click.Context) -> str:
    return f"{ctx.command_path} {ctx.invoked_subcommand}"


def _line(error: Exception) -> str:
    """Return the first line of an error; `--traceback` shows the rest, such as a worker's traceback."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    if first and isinstance(error, _EXPLAINED):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _masked(data: Any) -> Any:
    """Return plain data with the secrets in URLs masked."""
    if isinstance(data, dict):
        return {name: _masked(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_masked(value) for value in data]
    return masked(data) if isinstance(data, str) and "://" in data else data
