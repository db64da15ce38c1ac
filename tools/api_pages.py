"""The pages of the API reference: which names stand where. mkdocstrings renders their docstrings."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
from collections.abc import Callable, Iterator
from typing import Any

import click

import kdpipes as kdp
from kdpipes.cli import _kdpipes as commands
from kdpipes.core.registry import registered

PAGES = {
    "sources": "Sources",
    "plan": "Plan",
    "work": "Work",
    "cache": "Caches",
    "delivery": "Delivery",
    "write": "Writing",
    "look": "Looking",
    "rest": "Samples, pipes of your own, errors",
    "testing": "Testing",
}
MORE_MODULES = {
    "work": ("kdpipes.work",),
    "cache": ("kdpipes.cache",),
    "delivery": ("kdpipes.delivery",),
    "write": ("kdpipes.write",),
    "look": ("kdpipes.look",),
    "testing": ("kdpipes.testing", "kdpipes.demo"),
}


def page_of(value: Any) -> str:
    """Return the name of the API page of a public object: its stage."""
    part = value.__module__.partition(".")[2].partition(".")[0]
    part = "delivery" if part == "loader" else part  # one page for batches and what loads them
    return part if part in PAGES else "rest"


def pipes() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return kdpipes' pipes by functional name and flavor."""
    found: dict[str, dict[str, Callable[..., Any]]] = {}
    for (name, flavor), pipe in sorted(registered().items()):
        if pipe.__module__.split(".")[0] == "kdpipes":
            found.setdefault(name, {})[flavor] = pipe
    return found


def functional_name(value: Any) -> str | None:
    """Return the functional name that a docstring states."""
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    match = re.search(r"\(functional name: ``(\w+)``\)", paragraph)
    return match.group(1) if match else None


def signature_of(name: str, value: Any, *, skip: int = 0) -> str:
    """Return `name(...)` without annotations, which the descriptions of the arguments give in words."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return f"{name}{inspect.Signature(plain[skip:])}"


def docstring_of(value: Any, *, members: bool = False) -> str:
    """Return the directive for which mkdocstrings puts in the docstring of an object, and of its public methods."""
    lines = [f"::: {value.__module__}.{value.__qualname__}"]
    if members and isinstance(value, type):
        own = [name for name, member in vars(value).items() if not name.startswith("_") and _is_described(member)]
        lines += ["    options:", f"      members: {own}"]
    return "\n".join(lines)


def _is_described(member: Any) -> bool:
    inner = member.fget if isinstance(member, property) else member
    inner = inner.__func__ if isinstance(inner, staticmethod | classmethod) else inner
    return inspect.isfunction(inner) and bool(inner.__doc__)


def understood(docstring: str) -> str:
    """Return a docstring with the section names that griffe knows, short notes in bold, and no `source_datapipe`.

    A pipe is called as a method of its source, so that `source_datapipe` is not an argument that a reader can pass.
    """
    text = re.sub(r"(?m)^Example:$", "Examples:", docstring)
    text = re.sub(r"(?m)^(Length|Memory|Workers|Seed|Source|Mixing|Yields): ", r"**\1:** ", text)
    text = re.sub(r"(?m)^ {4}source_datapipe: .*\n(?: {5,}.*\n)*", "", text)
    text = re.sub(r"(?m)^Args:\n(?=\S|\n|\Z)", "", text)
    return text.replace("  # doctest: +SKIP", "")


def pipe_text(name: str, flavors: dict[str, Callable[..., Any]], classes: list[str]) -> str:
    """Return the entry of one pipe, on indexed sources and on streams."""
    words = {"map": "indexed sources", "iter": "streams"}
    is_of_batches = set(flavors) == {"iter"} and page_of(flavors["iter"]) == "delivery"
    by_docstring: dict[str, dict[str, list[str]]] = {}
    for flavor in ("map", "iter"):
        if flavor in flavors:
            signature = signature_of("." + name, flavors[flavor], skip=1)
            told = by_docstring.setdefault(inspect.getdoc(flavors[flavor]) or "", {})
            told.setdefault(signature, []).append(flavor)
    parts = [f"## `.{name}()` {{: #{name} }}"]
    for told in by_docstring.values():
        for signature, where in told.items():
            on = "batches, after `.deal()`" if is_of_batches else " and ".join(words[each] for each in where)
            parts += [f"*On {on}.*", f"```text\n{signature}\n```"]
        parts.append(docstring_of(flavors[next(iter(told.values()))[0]]))
    if classes:
        parts.append("Classes: " + ", ".join(f"`kdp.{each}`" for each in classes) + ".")
    return "\n\n".join(parts)


def public_text(name: str, value: Any, module: str = "kdp") -> str:
    """Return the entry of a class or function."""
    shown = f"{module}.{name}"
    signature = shown if isinstance(value, type) and issubclass(value, Exception) else signature_of(shown, value)
    return f"## `{shown}` {{: #{name} }}\n\n```text\n{signature}\n```\n\n{docstring_of(value, members=True)}"


def page_text(page: str) -> str:
    """Return the API page of a stage: its pipes first, then its other names."""
    parts = [f"# API: {PAGES[page]}"]
    public = {name: getattr(kdp, name) for name in kdp.__all__ if page_of(getattr(kdp, name)) == page}
    for name, flavors in pipes().items():
        if page_of(next(iter(flavors.values()))) == page or any(functional_name(v) == name for v in public.values()):
            classes = [each for each, value in public.items() if functional_name(value) == name]
            parts.append(pipe_text(name, flavors, classes))
    parts += [public_text(name, value) for name, value in public.items() if functional_name(value) is None]
    for module in MORE_MODULES.get(page, ()):
        found = importlib.import_module(module)
        parts += [
            public_text(name, getattr(found, name), module) for name in found.__all__ if callable(getattr(found, name))
        ]
    return "\n\n".join(parts) + "\n"


def index_text(pages: dict[str, str]) -> str:
    """Return the list of all names, with links."""
    lines = ["# API", "", "`help(kdp.NAME)` and `help(pipe.NAME)` print the same texts.", ""]
    for page, text in pages.items():
        lines += [f"## [{PAGES[page]}]({page}.md)", "", "| name | what it is |", "|---|---|"]
        entries = re.findall(r"^## `([^`]+)` \{: #(\w+) \}(.*?)^::: ([\w.]+)", text, re.MULTILINE | re.DOTALL)
        lines += [f"| [`{name}`]({page}.md#{anchor}) | {summary_of(path)} |" for name, anchor, _, path in entries]
        lines.append("")
    return "\n".join([*lines, "## [Commands](commands.md)", ""])


def summary_of(path: str) -> str:
    """Return the first sentence of the docstring of an object, without its functional name."""
    docstring = inspect.getdoc(pydoc.locate(path)) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s", re.sub(r" \(functional name: ``\w+``\)", "", paragraph))[0]
    return sentence.replace("|", "\\|")


def command_texts(command: click.Command, path: str) -> Iterator[str]:
    """Yield the help of a command and of its subcommands."""
    with click.Context(command, info_name=path, terminal_width=100, max_content_width=100) as context:
        yield f"## `{path}`\n\n```text\n{command.get_help(context)}\n```"
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                yield from command_texts(command.get_command(context, name), f"{path} {name}")


def api_pages() -> dict[str, str]:
    """Return the generated pages by their paths below docs/."""
    pages = {page: page_text(page) for page in PAGES}
    found = {"api/index.md": index_text(pages)} | {f"api/{page}.md": text for page, text in pages.items()}
    found["api/commands.md"] = "\n\n".join(["# API: Commands", *command_texts(commands, "kdpipes")]) + "\n"
    return found
