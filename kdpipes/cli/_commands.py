"""Commands made from functions: their signatures give the options, and their docstrings the help.

Importing a command imports nothing heavy, so that help appears at once. Functions import the library when they run.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from kdpipes.core.errors import KdpipesError, closest
from kdpipes.core.secrets import masked, safe_text

INTERRUPTED = 130  # 128 plus the number of the signal, as shells do
_CLEAR = (
    KdpipesError,
    ValueError,
    TypeError,
    IndexError,
    ImportError,
    OSError,
    RuntimeError,
)  # these texts need no class name
_STATUS = (
    "Exit status: 0 if all went well; 1 after an error, printed in one line on stderr; 2 for wrong usage; "
    f"{INTERRUPTED} after Ctrl-C."
)
_ARGS = re.compile(r"\n\nArgs:\n(?P<entries>(?: +.*\n?)+)")
_NAMED = re.compile(r"`(\w+)(?:=([^`]*))?`")
_WRONG_USAGE = re.compile(r"`(--[\w-]+|[A-Z]+)[^`]*`.* must be ")
_TABLE = re.compile(r"\S {2,}\S")
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


Function = TypeVar("Function", bound=Callable[..., Any])


class Answer(NamedTuple):
    """The output of a command: plain data for `--json`, text for people, and an exit status."""

    data: Any
    text: str | Iterable[str]
    status: int = 0


def wants_json() -> bool:
    """Return whether the command that runs was called with `--json`."""
    return click.get_current_context().get_parameter_source("as_json") is ParameterSource.COMMANDLINE


def say(text: str, *, err: bool = False) -> None:
    """Print text for people without secrets and control characters.

    On a terminal, long lines are wrapped. Lines of tables, and those for other programs, stay whole.
    """
    width = shutil.get_terminal_size().columns
    for line in safe_text(text).split("\n"):
        shown = line
        if sys.stdout.isatty() and not _TABLE.search(line):
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            shown = textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        click.echo(shown, err=err)


def read_json(path: str, content: str) -> Any:
    """Return what is in a JSON file; errors show how to write it from `content`, such as `loader.receipt()`."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path!r} cannot be read: {why}. Write it: `json.dump({content}, file)`.") from error


def spoken(reword: Callable[[str], str] = str, **words: str) -> Callable[[Function], Function]:
    """Set what errors of a command call the parameters of library functions: `root="SOURCE"`.

    `reword` is applied to the text of an error before that.
    """

    def decorate(function: Function) -> Function:
        vars(function).update(spoken=words, reword=reword)
        return function

    return decorate


def command(function: Callable[..., Answer]) -> click.Command:
    """Make a command of a function that returns an `Answer`. Errors name options in place of parameters.

    Positional parameters become arguments, those that are keyword-only become options: numbers, text, flags, a choice
    for `Literal`, several values for `tuple`. `Annotated[str, "NAME"]` names the value in the help. The docstring's
    "Args" describe the options, and its "JSON" the form of `--json`.
    """
    text = inspect.getdoc(function) or ""
    described = _ARGS.search(text)
    about = dict(_ENTRY.findall(described["entries"])) if described else {}
    hints = get_type_hints(function, include_extras=True)
    parameters = [_parameter(one, hints[one.name], about) for one in inspect.signature(function).parameters.values()]
    form = "Print JSON, of the form above, for scripts."
    words: dict[str, str] = {}  # as the command line shows them: `--max-samples` or SOURCE
    for one in parameters:
        is_option = isinstance(one, click.Option)
        words[str(one.name)] = one.opts[0] if is_option else one.metavar or str(one.name).upper()
    parameters.append(click.Option(["--json", "as_json"], is_flag=True, expose_value=False, help=form))
    name = function.__name__.rstrip("_")
    made = _Command(name, callback=function, params=parameters, help=help_text(_ARGS.sub("\n", text)))
    made.words = {**words, **vars(function).get("spoken", {})}
    made.reword = vars(function).get("reword", str)
    return made


def help_text(text: str) -> str:
    """Return a docstring as click takes it: \b keeps the lines of a paragraph as they are."""
    return re.sub(r"\n+(Examples|JSON):", "\n\n\b\n\\1:", inspect.cleandoc(text))


def _parameter(parameter: inspect.Parameter, kind: Any, about: dict[str, str]) -> click.Parameter:
    metavar = None
    default = parameter.default
    kind = _without_none(kind)  # which Python 3.10 adds if the default is None
    if get_origin(kind) is Annotated:
        kind, metavar = get_args(kind)
    kind = _without_none(kind)
    is_many = get_origin(kind) is tuple
    kind = get_args(kind)[0] if is_many else kind
    value: Any = click.Choice(get_args(kind)) if get_origin(kind) is Literal else kind
    if parameter.kind is not parameter.KEYWORD_ONLY:
        is_required = default is parameter.empty
        return click.Argument(
            [parameter.name], type=value, nargs=-1 if is_many else 1, required=is_required, metavar=metavar
        )
    option = f"--{parameter.name.replace('_', '-')}"
    return click.Option(
        [f"{option}/--no-{option[2:]}" if default is True else option, parameter.name],
        type=value,
        is_flag=True if kind is bool else None,
        multiple=is_many,
        default=default,
        show_default=not (default is None or default is False or default == ()),
        metavar=metavar,
        help=re.sub(r"\n +", " ", about[parameter.name]),
    )


def _without_none(kind: Any) -> Any:
    return next((one for one in get_args(kind) if type(None) in get_args(kind)), kind)


class _Suggesting(click.Command):
    """A command whose help ends with the exit statuses, and which suggests the closest option for a wrong one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"]}
        super().__init__(*args, **{"epilog": _STATUS, "context_settings": settings, **kwargs})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for parameter in self.get_params(ctx) for name in parameter.opts if name.startswith("-")]
            ctx.fail(f"There is no option {error.option_name!r}.{closest(error.option_name, known)}")
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # so that the usage is shown
            raise


class _Command(_Suggesting):
    """A command that prints an `Answer`. All of kdpipes is imported before it runs, but not for its help."""

    words: Mapping[str, str]  # what the command line calls parameters
    reword: Callable[[str], str]

    def invoke(self, ctx: click.Context) -> int:
        package = sys.modules["kdpipes"]
        if "__all__" not in vars(package) and package.__spec__ is not None and package.__spec__.loader is not None:
            package.__spec__.loader.exec_module(package)  # it registers the pipes: see kdpipes_command.py
        with _short_warnings(ctx), self._naming_options(ctx):
            answer: Answer = super().invoke(ctx)
            lines = [answer.text] if isinstance(answer.text, str) else list(answer.text)
        if wants_json():
            click.echo(json.dumps(_masked(answer.data), indent=2))  # in ASCII: names in data need not be UTF-8
        else:
            for line in lines:
                say(line)
        return answer.status

    @contextmanager
    def _naming_options(self, ctx: click.Context) -> Iterator[None]:
        """Make errors name options instead of Python's arguments; a wrong value of one is wrong usage."""
        try:
            yield
        except Exception as error:
            error.args = tuple(self._with_options(one) if isinstance(one, str) else one for one in error.args)
            is_usage = isinstance(error, ValueError | TypeError) and not isinstance(error, KdpipesError)
            if is_usage and _WRONG_USAGE.match(str(error)):
                ctx.fail(line_of(error))
            raise

    def _with_options(self, text: str) -> str:
        def as_option(found: re.Match[str]) -> str:
            word = self.words.get(found[1])
            return found[0] if word is None else f"`{word} {found[2]}`" if found[2] else f"`{word}`"

        return _NAMED.sub(as_option, self.reword(text))


@contextmanager
def _short_warnings(ctx: click.Context) -> Iterator[None]:
    """Print warnings as errors are printed, without the file and line of Python code."""

    def show(message: Warning | str, *_: Any) -> None:
        say(f"{ctx.command_path}: {message}", err=True)

    before, warnings.showwarning = warnings.showwarning, show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = before


class Commands(_Suggesting, click.Group):
    """A group of commands. Errors end a command with one line on stderr. For a wrong name, the closest is suggested."""

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
            click.echo(f"{ctx.command_path} {ctx.invoked_subcommand}: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            say(f"{ctx.command_path} {ctx.invoked_subcommand}: {line_of(error)}", err=True)
            if ctx.params.get("traceback"):
                say(traceback.format_exc(), err=True)
            ctx.exit(1)


def line_of(error: BaseException) -> str:
    """Return the first line of an error; `--traceback` shows the rest, such as a worker's traceback."""
    text = f"{error.strerror}: {error.filename!r}" if isinstance(error, OSError) and error.filename else str(error)
    first = next((line for line in text.splitlines() if line.strip()), "")
    if first and isinstance(error, _CLEAR):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _masked(data: Any) -> Any:
    """Return plain data with the secrets in URLs masked."""
    if isinstance(data, dict):
        return {name: _masked(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_masked(value) for value in data]
    return masked(data) if isinstance(data, str) and "://" in data else data
