"""Copy files to a local folder when they are first read."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdpipes.core.errors import ChainError
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.pipe import a_datapipe
from kdpipes.core.registry import register
from kdpipes.core.secrets import masked
from kdpipes.storage.access import Access, using
from kdpipes.storage.files import reader_of, version_of
from kdpipes.storage.urls import check_roots, identity_of, is_local, split_chain


class FileLocalizer(Fingerprinted):
    """Returns the local path for the path or URL of a file, which is copied at its first use.

    `.localize_files()` calls it for each item. As the function of a field, it copies nothing if only labels are read:
    `.to_samples(label=..., fields={"x": FileLocalizer("local")})`. A file appears when it is complete, and is
    verified by its size. An existing file is used, even if the source has changed. Processes and threads share one
    copy.

    Args:
        local_root: The folder for the files.
        global_root: The folder of the sources, below which paths are kept. By default, the whole path is kept.
        storage_options: The arguments of fsspec's file system, such as `{"key": ..., "secret": ...}`, for the files.
            Workers get them; no `repr`, state, fingerprint or error contains them.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: The file cannot be read.
        OSError: The local file cannot be written, for example because the disk is full; the error states how much space
            is needed.

    Example:
        >>> path = sorted(Path("data/birds/train/heron").iterdir())[0]
        >>> FileLocalizer("local", "data/birds")(path).startswith("local/train/heron/")
        True
    """

    is_random = False  # otherwise generators would be seeded for each path

    def __init__(
        self,
        local_root: str | os.PathLike[str],
        global_root: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_roots(local_root, "" if global_root is None else global_root)
        self._access = Access(storage_options=storage_options)
        self._root = str(Path(local_root).expanduser())
        self._global_root = None if global_root is None else _plain(os.fspath(global_root))

    def __call__(self, path: str | os.PathLike[str]) -> str:
        """Return the path of the local file."""
        if not isinstance(path, str | os.PathLike):
            raise ChainError(
                f"`.localize_files()` takes paths and URLs, but got {type(path).__name__}. Put it behind a lister of "
                "files; in samples, it is a field: `.to_samples(fields={'x': kdpipes.write.FileLocalizer(...)})`."
            )
        url = _plain(os.fspath(path))
        target = Path(self._root, self._relative(url))
        if not target.exists():
            with using(self._access):
                self._copy(url, target)
        return str(target)

    def fingerprint(self) -> Any:
        return self._root, self._global_root

    def _relative(self, url: str) -> str:
        from kdpipes.write.copy import is_inside  # on use: few chains copy files

        first, _, rest = split_chain(identity_of(url))
        if self._global_root is None:
            name = "" if rest else first.rpartition("://")[2].lstrip("/")
        else:
            root, _, root_rest = split_chain(identity_of(self._global_root))
            prefix = root if root.endswith("/") else f"{root}/"
            name = first.removeprefix(prefix) if first.startswith(prefix) and rest == root_rest else ""
        if name and not name.endswith("/") and is_inside(name):
            return name
        if self._global_root is None:
            hint = "Pass `global_root=`, the folder or URL that contains all files."
            raise ValueError(f"Cannot derive a local file name from {masked(url)!r}. {hint}")
        raise ValueError(
            f"{masked(url)!r} is not a file below `global_root`, {masked(self._global_root)!r}. Pass a `global_root` "
            "that contains it."
        )

    def _copy(self, url: str, target: Path) -> None:
        from kdpipes.write.copy import PARTIAL, SourceFile, copy_file, locked_once, state_of

        version = version_of(url)
        file = SourceFile("", url, reader_of(url), *version)
        root = Path(self._root)
        if state_of(root, root) == "missing":  # the marker says that the folder is not a complete copy
            root.mkdir(parents=True, exist_ok=True)
            (root / PARTIAL).write_text("kdpipes copies single files to here, as they are needed.\n", encoding="utf-8")
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked_once(target.with_name(f".{target.name}.lock")):
            if not target.exists():  # unless another process has copied it meanwhile
                copy_file(file, target, target.with_name(f".{target.name}.part"))  # replaces that of a killed one


def _plain(url: str) -> str:
    """Return a path or URL in the one way in which it is compared."""
    url = url if split_chain(url)[1] else url.removeprefix("file://")
    return posixpath.normpath(Path(url).expanduser().as_posix()) if is_local(url) else url


def localize_files(
    source_datapipe: Any,
    local_root: str | os.PathLike[str],
    *,
    global_root: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Copies files, given as paths or URLs, to a local folder once (functional name: ``localize_files``).

    The pipe yields local paths. The worker that needs a file first copies it, under its path below `global_root`. The
    file appears when it is complete, is verified by its size, and is used from then on, even if the source changes.
    Processes and threads share one copy. `kdpipes.write.copy_to_local` copies everything in advance.

    Args:
        source_datapipe: Any indexed pipe or stream of paths, like `FSSpecFileLister("s3://birds")`.
        local_root: The folder for the files.
        global_root: The folder that contains all paths. By default, the whole path is kept, without the protocol.
        storage_options: The arguments of fsspec's file system, such as `{"key": ..., "secret": ...}`, for the files.
            Workers get them; no `repr`, state, fingerprint or error contains them.

    Length: The length of the source, if it has one.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: The file cannot be read.
        OSError: The local file cannot be written, for example because the disk is full; the error states how much space
            is needed.

    Example:
        >>> from torch.utils.data.datapipes.iter import FileLister
        >>> pipe = FileLister("data/birds", recursive=True).localize_files("local", global_root="data/birds")
        >>> all(path.startswith("local/") for path in pipe)
        True
    """
    source = a_datapipe(source_datapipe)
    return source.map(FileLocalizer(local_root, global_root, storage_options=storage_options))


register("localize_files", localize_files, flavour="map")
register("localize_files", localize_files, flavour="iter")
