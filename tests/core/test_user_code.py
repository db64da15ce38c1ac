"""Users' code is told from libraries by where its modules are, and by what packages say that they have installed."""

from __future__ import annotations

import importlib
import site
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.core.fingerprint import hash_value
from kdpipes.core.user_code import is_users_module, library_of

CODE = "NUMBER = 2\ndef double(x):\n    return x * NUMBER\n"
NAME = "birds_of_test_user_code"
Import = Callable[..., types.ModuleType]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Return a function that imports a module from a folder on `sys.path`."""

    def from_folder(folder: str, file: str, *, recorded: str | None = None) -> types.ModuleType:
        path = tmp_path / folder / file
        path.parent.mkdir(parents=True)
        path.write_text(CODE)
        if recorded is not None:
            info = tmp_path / folder / "birds-1.5.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.5\n")
            (info / "RECORD").write_text(f"{recorded},sha256=abc,9\nbirds-1.5.dist-info/RECORD,,\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for loaded in [name.split(".")[0], name]:
            monkeypatch.delitem(sys.modules, loaded, raising=False)
        return importlib.import_module(name)

    return from_folder


@pytest.mark.parametrize(
    ("folder", "file", "recorded"),
    [
        ("venv/lib/python3.11/site-packages", f"{NAME}.py", None),
        ("usr/lib/python3/dist-packages", f"{NAME}/__init__.py", None),
        ("target", f"{NAME}.py", f"{NAME}.py"),
        ("target", f"{NAME}/__init__.py", f"{NAME}/__init__.py"),
        ("target", f"{NAME}/spaced/part.py", f"{NAME}/spaced/part.py"),  # a namespace package
    ],
)
def test_installed_modules_are_libraries(imported: Import, folder: str, file: str, recorded: str | None) -> None:
    module = imported(folder, file, recorded=recorded)
    assert not is_users_module(module.__name__)
    assert library_of(module.double) == (module.__name__, "double", "")


@pytest.mark.parametrize(
    ("folder", "recorded"),
    [
        ("project", None),
        ("project", "other.py"),  # a library was installed into the project's folder
        (f"python{sys.version_info.major}.{sys.version_info.minor}-mine", None),
    ],
)
def test_other_modules_are_the_users(imported: Import, folder: str, recorded: str | None) -> None:
    assert is_users_module(imported(folder, f"{NAME}.py", recorded=recorded).__name__)


def test_packages_that_are_installed_in_place_are_the_users(imported: Import, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "birds.pth").write_text(f"{tmp_path / 'src'}\n")
    module = imported("src", f"{NAME}/__init__.py")
    before = list(sys.path)
    site.addsitedir(str(installed))
    sys.path[:] = before
    assert is_users_module(module.__name__)


@pytest.mark.parametrize("name", ["builtins", "_thread", "time", "json.decoder", "numpy", "torch.ops", "torch._C._x"])
def test_parts_of_python_and_torch_need_no_file(name: str) -> None:
    assert not is_users_module(name)


def test_modules_without_a_file_are_the_users() -> None:
    assert is_users_module("__main__")
    assert is_users_module("a_module_made_by_hand")


def test_a_library_has_the_version_of_its_package(imported: Import) -> None:
    module = imported("target", "birds.py", recorded="birds.py")
    assert library_of(module.double) == ("birds", "double", "1.5")


class _Broken:
    """Raises an error wherever it is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Expected a namespace")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("Expected a namespace")


def _dead_proxy() -> Any:
    class Short: ...

    return weakref.proxy(Short())


class _BrokenMapping(dict[str, Any]):
    def items(self) -> Any:
        raise OSError("The table is closed")


@pytest.mark.parametrize("make", [_Broken, _dead_proxy, lambda: _BrokenMapping(a=object())])
@pytest.mark.parametrize("follows_globals", [False, True])
def test_errors_while_hashing_make_a_value_unhashed(make: Callable[[], Any], follows_globals: bool) -> None:
    held = make()

    def add(x: int) -> int:
        return x if held is None else x + 1

    number, unhashed = hash_value(add, globals=follows_globals)
    assert len(number) == 20
    assert ["`held` of" in name for name in unhashed] == [True]


def test_a_cache_warns_of_a_value_that_cannot_be_looked_at(tmp_path: Path) -> None:
    held = _Broken()
    pipe = kdp.from_dataset([(1, 0)]).transform("x", lambda x: x + (held is not None))
    with pytest.warns(UserWarning, match=r"`held` of .* \(_Broken\).*Pass `version=`"):
        assert pipe.cache_on_disk(tmp_path)[0]["x"] == 2
