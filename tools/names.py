"""Write what follows from the table of names, `kdpipes/_names.py`, and from the documentation.

    python tools/names.py            writes typing stubs, the README's table of pipes, and pages for programs

These are kdpipes/_fluent.pyi, kdpipes/__init__.pyi, README.md, docs/coding_agents.md and docs/llms.txt.

The stubs repeat the signatures of the code, so that type checkers and editors know the methods of a chain. torch's own
stubs give every DataPipe any attribute at all.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from api_pages import page_of, signature_of  # noqa: E402
from torch.utils.data import IterDataPipe, MapDataPipe  # noqa: E402

import kdpipes as kdp  # noqa: E402
from kdpipes._names import PIPES, PUBLIC  # noqa: E402
from kdpipes.core.iter_pipe import IterPipe  # noqa: E402
from kdpipes.core.map_pipe import MapPipe  # noqa: E402
from kdpipes.core.registry import registered  # noqa: E402
from kdpipes.core.stock import load_torchdata  # noqa: E402
from kdpipes.delivery.dealer import Resumable  # noqa: E402

_HEAD = '''"""The chain as type checkers and editors see it: `make names` writes it. Never imported at run time."""

from __future__ import annotations

'''
_CHAIN = """
# torch's stubs give every DataPipe any attribute at all. `Never` takes that back, so that pyright reports a misspelled
# pipe, and one of the other flavour; mypy does not look at the parameter. So torchdata's own pipes are listed by name.
_StockPipe = Callable[..., Any]
"""
_ANY_ATTRIBUTE = "    def __getattr__(self, no_such_pipe: Never) -> Any: ...  # type: ignore[misc]"
_CHAINS: dict[str, tuple[str, Any, tuple[type, ...], str]] = {  # by flavour: class, base, what has its methods, text
    "map": ("MapChain", MapDataPipe, (MapPipe,), "What can follow an indexed pipe of samples."),
    "iter": ("IterChain", IterDataPipe, (IterPipe, Resumable), "What can follow a stream."),
}


class Annotations:
    """Annotations of several modules as texts for one module, and the imports that they need."""

    def __init__(self) -> None:
        self.imports = {
            "from collections.abc import Callable, Iterator",
            "from typing import Any",
            "from torch.utils.data import IterDataPipe, MapDataPipe",
            "from typing_extensions import Never",
        }

    def text(self, annotation: str, module: str) -> str:
        """Return an annotation of a module with the meaning of its aliases, and note the imports of other names."""
        tree = ast.parse(annotation, mode="eval")
        return ast.unparse(_Meanings(module, self.imports).visit(tree))


class _Meanings(ast.NodeTransformer):
    def __init__(self, module: str, imports: set[str]) -> None:
        self._module = module
        self._imports = imports

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if hasattr(builtins, node.id):
            return node
        for statement in ast.walk(ast.parse(Path(sys.modules[self._module].__file__ or "").read_text("utf-8"))):
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("kdpipes."):
                if node.id in {alias.name for alias in statement.names}:
                    import_module(str(statement.module))
                    return _Meanings(str(statement.module), self._imports).visit_Name(node)
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                if node.id in {alias.asname or alias.name for alias in statement.names}:
                    statement.names = [alias for alias in statement.names if node.id in (alias.name, alias.asname)]
                    self._imports.add(ast.unparse(statement))
                    return node
            elif isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id:
                meaning: ast.AST = self.visit(statement.value)
                return meaning
        self._imports.add(f"from {self._module} import {node.id}")
        return node


def method(name: str, function: Callable[..., Any], annotations: Annotations, *, returns: str | None = None) -> str:
    """Return the stub of a method, from the signature of a function whose first parameter is left out."""
    signature = inspect.signature(function)
    module = (function.__init__ if isinstance(function, type) else function).__module__  # type: ignore[misc]
    if returns is None:
        returns = annotations.text(str(signature.return_annotation), module)
    texts = ["self"]
    has_star = False
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            texts.append("*")
            has_star = True
        has_star = has_star or parameter.kind is parameter.VAR_POSITIONAL
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        kind = annotations.text(parameter.annotation, module)
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        texts.append(f"{stars}{parameter.name}: {kind}{default}")
    return f"    def {name}({', '.join(texts)}) -> {returns}: ..."


def stock_pipes(base: Any) -> list[str]:
    """Return the names of torch's and torchdata's pipes that torch's own stubs do not declare."""
    load_torchdata()
    tree = ast.parse(Path(inspect.getfile(base)).with_suffix(".pyi").read_text(encoding="utf-8"))
    of_torch = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base.__name__).body
    declared = {node.name for node in of_torch if isinstance(node, ast.FunctionDef)}
    stock = {name for name, function in base.functions.items() if _is_stock(function) and not name.startswith("_")}
    return sorted(stock - declared)


def _is_stock(function: Any) -> bool:
    """Return whether a registered function makes a pipe of torch or torchdata."""
    is_of_class = isinstance(function, functools.partial) and function.args and isinstance(function.args[0], type)
    return bool(is_of_class) and function.args[0].__module__.startswith("torch")


def own_methods(kind: Any, bases: tuple[type, ...]) -> list[str]:
    """Return the names of the methods for users that a class of pipes adds to those of `bases`."""
    inherited = {name for base in bases for owner in base.__mro__ for name in vars(owner).get("for_users", ())}
    return [
        name
        for owner in reversed(getattr(kind, "__mro__", ()))
        for name in vars(owner).get("for_users", ())
        if name not in inherited
    ]


def chain_class(flavour: str, pipes: dict[str, Any], annotations: Annotations) -> str:
    """Return the stubs of the class of a flavour, and of the classes of pipes with methods of their own."""
    chain, base, owners, text = _CHAINS[flavour]
    lines = [f"class {chain}({base.__name__}[Any]):", f'    """{text}"""', ""]
    lines += [f"    {name}: _StockPipe" for name in stock_pipes(base)]
    lines += [_ANY_ATTRIBUTE, "    def __len__(self) -> int: ..."]
    lines += ["    def __iter__(self) -> Iterator[Any]: ..."] if flavour == "iter" else []
    of_chain = {name: owner for owner in owners for name in own_methods(owner, ())}
    lines += [method(name, getattr(owner, name), annotations) for name, owner in of_chain.items()]
    special: dict[str, list[str]] = {}
    for name, pipe in pipes.items():
        kind = pipe_class(pipe, flavour)
        if kind is None:
            lines.append(method(name, pipe, annotations))
            continue
        made_by, _, of_made, _ = next(row for row in _CHAINS.values() if issubclass(kind, row[1]))
        extra = own_methods(kind, (*of_made, Resumable))
        returns = kind.__name__.replace("DataPipe", "Chain") if extra else made_by
        if extra:
            special[returns] = [
                f"\nclass {returns}({made_by}):",
                f'    """What can follow a `{kind.__name__}`, and what it can do itself."""\n',
            ]
            special[returns] += [method(other, getattr(kind, other), annotations) for other in extra]
        lines.append(method(name, pipe, annotations, returns=returns))
    return "\n".join([*lines, *(line for stub in special.values() for line in stub)]) + "\n"


def pipe_class(pipe: Any, flavour: str) -> Any:
    """Return the class of the pipe that a call makes; None for a function that makes something else."""
    made = pipe if isinstance(pipe, type) else inspect.signature(pipe).return_annotation
    if isinstance(made, type):
        return made
    return _CHAINS[flavour][1] if made == "Any" else None  # a composition of pipes


def fluent_stub() -> str:
    """Return the text of `_fluent.pyi`."""
    annotations = Annotations()
    classes = []
    ours = {key: pipe for key, pipe in registered().items() if pipe.__module__.startswith("kdpipes.")}
    for flavour in _CHAINS:
        pipes = {pipe.name: ours[pipe.name, flavour] for pipe in PIPES if (pipe.name, flavour) in ours}
        classes.append(chain_class(flavour, pipes, annotations))
    return _HEAD + "\n".join([*sorted(annotations.imports), _CHAIN, *classes])


def package_stub() -> str:
    """Return the text of `__init__.pyi`."""
    lines = [f"from kdpipes.{module} import {member} as {name}" for name, (module, member) in PUBLIC.items()]
    names = ", ".join(f'"{name}"' for name in PUBLIC)
    head = '"""The names of the package, for type checkers and editors: `make names` writes it."""\n\n'
    lines.insert(0, "from kdpipes._version import __version__ as __version__")
    return head + "\n".join([*lines, "", f"__all__ = [{names}]"])


def readme() -> str:
    """Return the README with the table of pipes."""
    rows = ["| pipe | what it does |", "|---|---|"]
    for stage in dict.fromkeys(pipe.stage for pipe in PIPES):
        rows.append(f"| **{stage}** | |")
        rows += [f"| [`{pipe.call}`](docs/{pipe.docs}) | {pipe.text} |" for pipe in PIPES if pipe.stage == stage]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\| pipe \| what it does \|\n(?:\|.*\n)+", lambda _: "\n".join(rows) + "\n", text)


_AGENTS = """# For coding agents

Which calls exist, with which arguments? This page is written from the signatures and docstrings of this version, for
programs that write code, and for searches. `llms.txt`, beside this page, lists the other pages.

- A chain is a source, then pipes for plan, work and delivery, in this order. It ends with `.deal(batch_size=...)`,
  mostly followed by `.collate_samples()`. `kdp.Loader(chain, num_workers=n)` runs it; each `for` over one Loader is the
  next epoch.
- Choose samples (`filter_classes`, `oversample`, `kdp.split`) before `decode_images`: plan pipes read no images.
- `select("x y")` names the fields of a batch, and comes last before `deal`. Nothing else is loaded.
- Any callable is a transform. Random ones need no seed of their own: `deal(seed=)` and the epoch decide.
- Without fork (macOS, Python 3.14), make loaders under `if __name__ == "__main__":`.
- Save `loader.state_dict()`; `loader.load_state_dict(state)` resumes at the next batch, with any number of workers.
- Wrong arguments are errors that list what is allowed. `print(chain.peek(3))` shows samples, and
  `print(kdp.doctor(chain))` finds mistakes.

"""


def coding_agents() -> str:
    """Return the page for programs that write code: all calls, and an example of the README."""
    readme_text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n.*?```\n```text\n.*?```\n", readme_text, re.DOTALL)[0]
    parts = [_AGENTS, example]
    ours = {key: pipe for key, pipe in registered().items() if pipe.__module__.startswith("kdpipes.")}
    for stage in dict.fromkeys(pipe.stage for pipe in PIPES):
        parts.append(f"\n## Pipes: {stage}\n\n")
        for pipe in (pipe for pipe in PIPES if pipe.stage == stage):
            calls = {signature_of(f".{pipe.name}", ours[key], skip=1): key[1] for key in ours if key[0] == pipe.name}
            kinds = {"map": " on indexed sources", "iter": " on streams"} if len(calls) > 1 else {}
            shown = "; ".join(f"`{call}`{kinds.get(kind, '')}" for call, kind in calls.items())
            parts.append(f"- {shown}: [{pipe.text}]({pipe.docs})\n")
    for page in ("sources", "plan", "work", "cache", "delivery", "write", "look", "rest"):
        names = [name for name in kdp.__all__ if name[0] != "_" and page_of(getattr(kdp, name)) == page]
        parts.append(f"\n## Functions and classes: {page}\n\n" if names else "")
        for name in names:
            sentence = " ".join((inspect.getdoc(getattr(kdp, name)) or "").partition("\n\n")[0].split())
            parts.append(f"- `{signature_of(f'kdp.{name}', getattr(kdp, name))}`: {sentence}\n")
    return "".join(parts)


def llms() -> str:
    """Return the list of pages, with their titles and first paragraphs, in the format of llms.txt."""
    summary = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    lines = ["# kdpipes", "", f"> {summary}", ""]
    for entry in (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].splitlines():
        title, _, page = entry.strip().removeprefix("- ").partition(":")
        if not page:
            lines += ["", f"## {title}", ""]
        elif not page.startswith(" api/"):
            is_written_here = page == " coding_agents.md"
            text = _AGENTS if is_written_here else (ROOT / "docs" / page.strip()).read_text(encoding="utf-8")
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.split("\n\n")[1].split()))
            lines.append(f"- [{title}]({page.strip().replace('.md', '.html')}): {plain}")
    return "\n".join(lines).partition("\n\n## API")[0] + "\n"


def formatted(text: str) -> str:
    """Return a stub in the layout of the repository."""
    for action in (["check", "--fix", "--select=I"], ["format"]):
        command = [sys.executable, "-m", "ruff", *action, "--quiet", "--stdin-filename", "kdpipes/stub.pyi", "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def outputs() -> dict[str, str]:
    """Return the files and their contents."""
    return {
        "kdpipes/_fluent.pyi": formatted(fluent_stub()),
        "kdpipes/__init__.pyi": formatted(package_stub()),
        "README.md": readme(),
        "docs/coding_agents.md": coding_agents(),
        "docs/llms.txt": llms(),
    }


if __name__ == "__main__":
    for path, text in outputs().items():
        (ROOT / path).write_text(text, encoding="utf-8")
