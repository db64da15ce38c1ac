"""Read images from a folder with one subfolder per class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.column import Column, filled
from kdpipes.core.errors import DataError, check_class_names, check_type, must_be
from kdpipes.core.labels import number_labels
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import counted, warn
from kdpipes.core.order import Order
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Block, Rows, Sample
from kdpipes.core.shared import PackedStrings, Shared
from kdpipes.core.traits import Traits
from kdpipes.sources._file_reader import FileReader
from kdpipes.storage.access import Access, using
from kdpipes.storage.decoding import image_suffixes
from kdpipes.storage.files import file_stamp, is_hidden, list_files, list_versions
from kdpipes.storage.filesystems import check_filesystems
from kdpipes.storage.urls import identity_of, is_local, join_url

_NUM_NAMED = 3  # maximum number of files or folders named in a warning
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval"}


class _Listing(NamedTuple):
    paths: PackedStrings
    labels: NDArray[np.int32]
    class_names: tuple[str, ...]
    sizes: NDArray[np.int64] | None = None  # known for remote files, as are the tags
    tags: PackedStrings | None = None


@called_as("image_folder")
class ImageFolderMapDataPipe(MapPipe):
    """Reads images from one folder per class: `root/heron/0001.jpg` (`kdp.image_folder(root)`).

    Field `x` holds the encoded bytes, `y` the class number: the position of the folder's name in sorted order. Samples
    are sorted by class, then by path. Their key is the path relative to `root`. The folder is listed when it is first
    used, once for all workers.

    Files are images if their suffix is one of the formats that `decode_images` reads, including those of Pillow's
    plugins. A warning counts and names other files and folders without images. Such folders are not classes, so that a
    dataset has the same classes on any storage. Hidden files, and those of operating systems (`__MACOSX/`,
    `Thumbs.db`), are ignored.

    Args:
        root: A path or an fsspec URL. Images may be in subfolders of a class folder.
        class_names: The names of the classes 0, 1, ...; by default, the sorted names of the folders with images. Pass
            the names of the training folder for validation, so that both agree. Images in folders with other names are
            an error.
        storage_options: The arguments of fsspec's file system, such as `{"key": ..., "secret": ...}` or
            `{"anon": True}` for S3. Workers get them; no `repr`, state, fingerprint or error contains them.
        hedge_s: The seconds after which a read without a response is requested a second time; the first one counts.

    Memory: the length of the paths and 12 bytes for each image, shared by all workers.

    Raises:
        FileNotFoundError: The folder does not exist.
        DataError: The folder contains no images, or images that are not in a class folder.

    Example:
        >>> birds = kdp.image_folder("data/birds/train")  # doctest: +SKIP
        >>> birds.class_names()  # doctest: +SKIP
        ('heron', 'stork')
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        class_names: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        hedge_s: float | None = None,
    ) -> None:
        check_type("root", root, str | os.PathLike, "a path or a URL")
        self._root = os.path.expanduser(os.fspath(root).removeprefix("file://"))  # noqa: PTH111
        if is_local(self._root) and not os.path.isdir(self._root):  # noqa: PTH112
            raise FileNotFoundError(must_be("root", "a folder that exists", self._root))
        check_filesystems("root", [self._root])
        self._class_names = check_class_names(class_names)
        self._listing: Shared[_Listing] | None = None
        self._files = FileReader(Access(storage_options=storage_options, hedge_s=hedge_s))

    def fingerprint(self) -> Any:
        listing = self._listed()
        return listing.paths, listing.labels, listing.class_names

    def __len__(self) -> int:
        return len(self._listed().labels)

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        listing = self._listed()
        positions = rows.positions.tolist()
        files: list[tuple[str, int]] = []

        def load(sample: Sample) -> bytes:
            if not files:
                files.extend(self._files_at(positions))
            return self._files.read(*files[sample.number])

        fields = {"x": Column(load, what="reading field 'x'"), "y": filled(listing.labels[rows.positions].tolist())}
        return (Block(fields, rows, key=listing.paths.__getitem__, version=self._version_of),)

    def value_fingerprint(self) -> Any:
        """Return an empty tuple, because the versions of the files identify the values."""
        return ()

    def prepare_for_workers(self) -> None:
        """List the folder before workers start, for caches."""
        self._listed()

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        is_remote = not is_local(self._root)
        return Traits(role="source", is_remote=is_remote, reads_files=not is_remote)

    def prefetch(self, order: Order) -> None:
        self._files.prefetch(order, self._files_at)

    def _files_at(self, positions: list[int]) -> list[tuple[str, int]]:
        """Return the URL and the size of the files at some positions. Unknown sizes are -1."""
        listing = self._listed()
        urls = [join_url(self._root, listing.paths[position]) for position in positions]
        sizes = [-1] * len(urls) if listing.sizes is None else listing.sizes[positions].tolist()
        return list(zip(urls, sizes, strict=True))

    def _version_of(self, index: int) -> str:
        listing = self._listed()
        if listing.sizes is None or listing.tags is None:
            return file_stamp(join_url(self._root, listing.paths[index]))
        return f"{join_url(identity_of(self._root), listing.paths[index])} {listing.sizes[index]} {listing.tags[index]}"

    def has_quick_length(self, *, may_plan: bool) -> bool:
        return self._listing is not None

    def has_column(self, name: str) -> bool:
        return name == "y" and self._listing is not None

    def read_column(self, name: str) -> NDArray[Any]:
        return self._listed().labels if name == "y" else super().read_column(name)

    def class_names(self) -> tuple[str, ...]:
        return self._listed().class_names

    def field_names(self) -> frozenset[str]:
        return frozenset({"x", "y"})

    def _listed(self) -> _Listing:
        if self._listing is None:
            with using(self._files.access):
                self._listing = Shared(_list(self._root, self._class_names))
        return self._listing.value


def _list(root: str, class_names: tuple[str, ...] | None) -> _Listing:
    versions = {} if is_local(root) else list_versions(root)
    files = list_files(root, ("",), versions)
    suffixes = image_suffixes()
    paths = [path for path in files if path.lower().endswith(suffixes)]
    if not paths:
        raise DataError(
            f"There are no images in {root!r}: no file has the suffix of an image, like .jpg or .png"
            f"{counts_of(files)}. Pass a folder with one folder of images per class."
        )
    loose = next((path for path in paths if "/" not in path), None)
    if loose is not None:
        raise DataError(
            f"Image {loose!r} is in {root!r} itself, not in a class folder. "
            "Move it to one. For images without classes, use `FileLister(root).to_samples()`."
        )
    paths.sort(key=lambda path: path.split("/", 1))
    found = {path.split("/", 1)[0] for path in paths}
    names = class_names or tuple(sorted(found))
    _warn_of_rest(root, sorted(set(files).difference(paths)), _folders_in(root, files).difference(found, names))
    if class_names is None and len(found) > 1 and {name.lower() for name in found} <= _SPLITS:
        warn(
            f"The classes of {root!r} are {', '.join(sorted(found))}, which look like splits of a dataset. Make "
            f"a pipe for each, like `kdp.image_folder({join_url(root, min(found))!r})`; or pass `class_names=`.",
        )
    strangers = sorted(found - set(names))
    if strangers:
        raise DataError(
            f"Folder {strangers[0]!r} in {root!r} is not among the `class_names` {', '.join(names)}. "
            "Add it, move the folder away, or leave out `class_names`."
        )
    folders = [path.split("/", 1)[0] for path in paths]
    labels = number_labels(folders, names, param="root").column.astype(np.int32)
    if is_local(root):
        return _Listing(PackedStrings(paths), labels, names)
    found_versions = [versions[path] for path in paths]
    sizes = np.fromiter((version.size for version in found_versions), dtype=np.int64, count=len(paths))
    return _Listing(PackedStrings(paths), labels, names, sizes, PackedStrings([tag for _, tag in found_versions]))


def _folders_in(root: str, files: Sequence[str]) -> set[str]:
    """Return the names of the folders in `root`. Empty folders are known only for local storage."""
    folders = {path.split("/", 1)[0] for path in files if "/" in path}
    if is_local(root):
        folders.update(path.name for path in Path(root).iterdir() if path.is_dir() and not is_hidden(f"{path.name}/"))
    return folders


def _warn_of_rest(root: str, files: Sequence[str], folders: set[str]) -> None:
    """Warn about files in class folders that are not read, and about folders without images."""
    inside = [path for path in files if "/" in path]  # files beside the folders, such as a README, are usual
    parts = []
    if inside:
        parts.append(
            f"{counted(len(inside), 'file')} without the suffix of an image{counts_of(inside)}: {shown_names(inside)}"
        )
    if folders:
        parts.append(f"{counted(len(folders), 'folder')} without images: {shown_names(sorted(folders))}")
    if parts:
        hint = "Pass `class_names=` to number empty classes as well."
        if inside:
            hint = (
                f"Give images one of the suffixes {', '.join(sorted(image_suffixes()))}, or list them: `kdp.from_ids`."
            )
        warn(f"In {root!r}, `image_folder` leaves out {'; and '.join(parts)}. {hint}")


def counts_of(files: Sequence[str]) -> str:
    """Return the number of files with each of the most frequent suffixes: " (2 .txt, 1 without a suffix)"."""
    counts = Counter(PurePosixPath(path).suffix.lower() or "without a suffix" for path in files)
    shown = ", ".join(f"{number} {suffix}" for suffix, number in counts.most_common(_NUM_NAMED))
    return f" ({shown})" if shown else ""


def shown_names(names: Sequence[str]) -> str:
    """Return the first names as text, followed by an ellipsis if there are more."""
    return ", ".join(map(repr, names[:_NUM_NAMED])) + (", ..." if len(names) > _NUM_NAMED else "")
