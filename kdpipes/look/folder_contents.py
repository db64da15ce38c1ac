"""What is in a folder: records, shards, images in a folder for each class, or other files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from kdpipes.cache.metadata import layout_in
from kdpipes.core.masked import masked
from kdpipes.core.progress import shown_if_slow
from kdpipes.look.contents import Contents, FieldSeen, SampleSeen, classes_seen
from kdpipes.look.record_contents import look_at_records
from kdpipes.look.shard_contents import look_at_shards
from kdpipes.plan.class_counts import class_counts
from kdpipes.sources.image_folder import IMAGE_SUFFIXES, ImageFolderMapDataPipe
from kdpipes.storage.files import list_files, list_versions, version_of
from kdpipes.storage.record_folder import read_header
from kdpipes.storage.urls import is_local, join_url

__all__ = ["TAR_SUFFIXES", "look_at_folder"]

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def look_at_folder(root: str, *, num_samples: int = 3, scan: bool = True) -> Contents:
    """Return what is in a folder, of which no image is opened: records or shards, if there are any, or else its files.

    Args:
        root: A path or an fsspec URL.
        num_samples: How many of the first samples are listed.
        scan: Whether to read shards that have no fresh index.

    Raises:
        FileNotFoundError: There is no such folder, or nothing in it.
        ValueError: It holds a cache.
        DataError: A shard, or the index of records, cannot be read.
    """
    if layout_in(root) is not None:
        raise ValueError(masked(f"{root!r} holds a cache: `kdpipes cache ls {root}` shows what is in it."))
    header = read_header(Path(root)) if is_local(root) else None
    if header is not None:
        return look_at_records(Path(root), header, num_samples=num_samples)
    sizes = _sizes_in(root)
    if not sizes:
        raise FileNotFoundError(f"There is no file in {masked(root)!r}.")
    tars = [path for path in sizes if path.lower().endswith(TAR_SUFFIXES)]
    if tars:
        return look_at_shards([join_url(root, path) for path in tars], num_samples=num_samples, scan=scan)
    images = {path: size for path, size in sizes.items() if path.lower().endswith(IMAGE_SUFFIXES)}
    if images and all("/" in path for path in images):
        return _look_at_images(root, images, num_samples)
    return _look_at_files(sizes, num_samples)


def _sizes_in(root: str) -> dict[str, int]:
    """Return the size of each file below a folder, sorted by its path there."""
    paths = list_files(root, ("",))
    if is_local(root):
        counted = shown_if_slow(paths, len(paths), "reading sizes", "files")
        return {path: version_of(join_url(root, path)).size for path in counted}
    versions = list_versions(root)
    return {path: versions[path].size for path in paths if path in versions}


def _look_at_images(root: str, sizes: Mapping[str, int], num_samples: int) -> Contents:
    folder = ImageFolderMapDataPipe(root)
    paths = sorted(sizes, key=lambda path: path.split("/", 1))  # as the pipe has them
    numbers = {name: number for number, name in enumerate(folder.class_names())}
    samples = [
        SampleSeen(path, {"x": {"bytes": sizes[path]}, "y": {"value": numbers[path.split("/", 1)[0]]}})
        for path in paths[:num_samples]
    ]
    classes = classes_seen(class_counts(folder), folder.class_names())
    fields = [FieldSeen.of("x", list(sizes.values())), FieldSeen("y", len(sizes))]
    return Contents("images", len(sizes), sum(sizes.values()), fields, classes, samples)


def _look_at_files(sizes: Mapping[str, int], num_samples: int) -> Contents:
    by_suffix = defaultdict[str, list[int]](list)
    for path, size in sizes.items():
        by_suffix[PurePosixPath(path).suffix.lower() or "without suffix"].append(size)
    fields = [FieldSeen.of(suffix, each) for suffix, each in sorted(by_suffix.items())]
    samples = [SampleSeen(path, {"file": {"bytes": size}}) for path, size in list(sizes.items())[:num_samples]]
    return Contents("files", len(sizes), sum(sizes.values()), fields, None, samples)
