"""The API as pages of Markdown, one for each stage, from docstrings and from the help of commands."""

from __future__ import annotations

import importlib
import inspect
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
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")
MORE_MODULES = {"testing": ("kdpipes.testing", "kdpipes.demo")}


def page_of(value: Any) -> str:
    """Return the name of the API page that a public name stands on: its stage."""
    part = value.__module__.partition(".")[2].partition(".")[0]
    part = "delivery" if part == "loader" else part  # one page for batches and what loads them
    return part if part in PAGES else "rest"


def pipes() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return kdpipes' pipes by functional name and flavour, without those that only name the way out."""
    found: dict[str, dict[str, Callable[..., Any]]] = {}
    for (name, flavour), pipe in sorted(registered().items()):
        is_ours = pipe.__module__.split(".")[0] == "kdpipes"
        if is_ours and not (pipe.__doc__ or "").startswith("Not where the source is "):
            found.setdefault(name, {})[flavour] = pipe
    return found


def functional_name(value: Any) -> str | None:
    """Return the functional name that a docstring states."""
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    match = re.search(r"\(functional name: ``(\w+)``\)", paragraph)
    return match.group(1) if match else None


def signature_of(name: str, value: Any, *, skip: int = 0) -> str:
    """Return `name(...)` without annotations, which the arguments' descriptions give in words."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return f"{name}{inspect.Signature(plain[skip:])}"


def paragraphs(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections of a docstring: their name, empty for prose, and their lines."""
    name, lines = "", []
    for line in text.splitlines():
        match = re.match(r"(\w+):$", line)
        if match and match.group(1) in SECTIONS:
            yield name, lines
            name, lines = match.group(1), []
        elif name and line and not line.startswith(" "):
            yield name, lines
            name, lines = "", [line]
        else:
            lines.append(line)
    yield name, lines


def entries(lines: list[str]) -> list[str]:
    """Return a section's entries as list items: `name: what`, continued by deeper lines."""
    items: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        if line.startswith("     ") and items:
            items[-1] += " " + line.strip()
        else:
            items.append(re.sub(r"^([\w*]+): ", r"`\1`: ", line.strip()))
    return [f"- {plain(item)}" for item in items if not item.startswith("`source_datapipe`")]


def plain(text: str) -> str:
    """Return text in which nothing but code is marked up."""
    return text.replace("``", "`").replace("**", r"\*\*")


def prose(lines: list[str]) -> str:
    """Return paragraphs, with the short headings of Google style (`Length: ...`) in bold."""
    text = plain("\n".join(line.strip() for line in lines).strip())
    return re.sub(r"(?m)^(Length|Memory|Workers|Seed|Source|Mixing): ", r"**\1:** ", text)


def rendered(docstring: str) -> str:
    """Return a docstring of Google style as Markdown."""
    parts = []
    for name, lines in paragraphs(docstring):
        if name == "Example":
            code = inspect.cleandoc("\n".join(lines)).replace("  # doctest: +SKIP", "")
            parts.append(f"```pycon\n{code}\n```")
        elif name and entries(lines):
            parts.append("\n".join([f"**{name}**", "", *entries(lines)]))
        elif any(lines):
            parts.append(prose(lines))
    return "\n\n".join(parts)


def methods_of(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class of ours defines and describes."""
    for name, member in vars(owner).items():
        inner = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and inspect.isfunction(inner) and inner.__doc__:
            yield name, member


def described(title: str, signature: str, value: Any, *, level: int = 2) -> str:
    """Return the entry of one name: heading, signature, docstring."""
    heading = "#" * level
    return f"{heading} {title}\n\n```text\n{signature}\n```\n\n{rendered(inspect.getdoc(value) or '')}"


def methods_text(name: str, owner: type) -> list[str]:
    """Return the entries of a class's methods."""
    found = []
    for method, member in methods_of(owner):
        title = f"{name}.{method}"
        is_value = isinstance(member, property)
        signature = (
            title if is_value else signature_of(title, member, skip=0 if isinstance(member, staticmethod) else 1)
        )
        found.append(described(f"`{title}`", signature, member, level=3))
    return found


def pipe_text(name: str, flavours: dict[str, Callable[..., Any]], classes: list[str]) -> str:
    """Return the entry of one pipe, on indexed sources and on streams."""
    told: dict[str, list[str]] = {}
    for flavour in ("map", "iter"):
        if flavour in flavours:
            told.setdefault(inspect.getdoc(flavours[flavour]) or "", []).append(flavour)
    words = {"map": "indexed sources", "iter": "streams"}
    parts = [f"## `.{name}()` {{: #{name} }}"]
    for docstring, where in told.items():
        by_signature: dict[str, list[str]] = {}
        for each in where:
            by_signature.setdefault(signature_of("." + name, flavours[each], skip=1), []).append(words[each])
        for signature, sources in by_signature.items():
            parts += [f"*On {' and '.join(sources)}.*", f"```text\n{signature}\n```"]
        parts.append(rendered(docstring))
    if classes:
        parts.append("Classes: " + ", ".join(f"`kdp.{each}`" for each in classes) + ".")
    for each in classes:
        parts += methods_text(each, getattr(kdp, each))
    return "\n\n".join(parts)


def public_text(name: str, value: Any, module: str = "kdp") -> str:
    """Return the entry of a class or function."""
    shown = f"{module}.{name}"
    signature = shown if isinstance(value, type) and issubclass(value, Exception) else signature_of(shown, value)
    parts = [described(f"`{shown}` {{: #{name} }}", signature, value)]
    if isinstance(value, type):
        parts += methods_text(name, value)
    return "\n\n".join(parts)


def page_text(page: str) -> str:
    """Return the API page of a stage: its pipes first, then its other names."""
    parts = [f"# API: {PAGES[page]}"]
    public = {name: getattr(kdp, name) for name in kdp.__all__ if page_of(getattr(kdp, name)) == page}
    for name, flavours in pipes().items():
        if page_of(next(iter(flavours.values()))) == page or any(functional_name(v) == name for v in public.values()):
            classes = [each for each, value in public.items() if functional_name(value) == name]
            parts.append(pipe_text(name, flavours, classes))
    parts += [public_text(name, value) for name, value in public.items() if functional_name(value) is None]
    for module in MORE_MODULES.get(page, ()):
        found = importlib.import_module(module)
        parts += [
            public_text(name, getattr(found, name), module) for name in found.__all__ if callable(getattr(found, name))
        ]
    return "\n\n".join(parts) + "\n"


def index_text(pages: dict[str, str]) -> str:
    """Return the list of all names, with links."""
    lines = ["# API", "", "Generated from docstrings: what `help(kdp.NAME)` and `help(pipe.NAME)` say.", ""]
    for page, text in pages.items():
        anchors = re.findall(r"^## `([^`]+)` \{: #(\w+) \}", text, re.MULTILINE)
        links = ", ".join(f"[`{shown}`]({page}.md#{anchor})" for shown, anchor in anchors)
        lines += [f"- [{PAGES[page]}]({page}.md): {links}"]
    return "\n".join([*lines, "- [Commands](commands.md)", ""])


def command_texts(command: click.Command, path: str) -> Iterator[str]:
    """Yield the help of a command, and of the commands in it."""
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
