"""The command line: `kdpipes demo`, `index`, `copy`, `replay` and `cache`; or `python -m kdpipes`."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe
from tqdm import tqdm

from kdpipes.cache.looking import check_cache, clear_cache, look_at_cache, named_caches
from kdpipes.demo import run_demo
from kdpipes.errors import DataError, KdpipesError
from kdpipes.look.replay_grid import replay_grid
from kdpipes.storage.catalog import make_index
from kdpipes.storage.files import expand_urls, matching_urls
from kdpipes.write.copy_to_local import copy_to_local

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kdpipes", description="From image folders and tar shards to batches.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run the main job on the shipped photos")
    demo.add_argument("--output", default="kdpipes-demo", help="folder for photos and picture (default: %(default)s)")
    demo.add_argument("--num-workers", type=int, default=2, help="worker processes (default: %(default)s)")
    demo.add_argument("--num-epochs", type=int, default=2, help="epochs (default: %(default)s)")
    index = commands.add_parser(
        "index",
        help="index tar shards, so that they open at once",
        description="Write NAME.tar.index beside each shard: where its members lie, their classes and checksums.",
    )
    index.add_argument("urls", nargs="+", help="paths or URLs of plain tars, with brace ranges or globs")
    index.add_argument("--no-checksums", action="store_true", help="do not read contents of local shards: much faster")
    copy = commands.add_parser(
        "copy",
        help="copy a data set to a local disk, unless it is there",
        description="Copy a folder, a zip or a folder of zips. A complete copy is used; a broken one is completed.",
    )
    copy.add_argument(
        "global_root", metavar="GLOBAL", help="path or URL of the data set; train.zip may stand for train"
    )
    copy.add_argument("local_root", metavar="LOCAL", help="folder for it")
    copy.add_argument("--relative-path", metavar="P", help="copy only this folder of both")
    copy.add_argument("--num-workers", type=int, default=8, help="files at a time (default: %(default)s)")
    replay = commands.add_parser(
        "replay",
        help="draw any batch of any epoch",
        description="Draw one batch of a chain, originals with their recorded crops beside what became of them.",
    )
    replay.add_argument("chain", help="module:name or file.py:name, a pipe or a function that makes it")
    replay.add_argument("--seed", type=int, help="seed of the epoch (default: that of the chain's deal)")
    replay.add_argument("--epoch", type=int, default=0, help="number of the epoch (default: %(default)s)")
    replay.add_argument("--batch", type=int, default=0, help="number of the batch (default: %(default)s)")
    replay.add_argument("--field", default="x", help="field of images (default: %(default)s)")
    replay.add_argument("--out", default="grid.png", help="picture to write (default: %(default)s)")
    cache = commands.add_parser("cache", help="list, verify and clear caches", description="Look after caches.")
    actions = cache.add_subparsers(dest="action", required=True)
    place = "folder, URL, or name=NAME for a cache in memory"
    ls = actions.add_parser("ls", help="say what caches hold")
    ls.add_argument("places", nargs="*", help=f"{place} (default: all of those with names)")
    verify = actions.add_parser("verify", help="read all entries, and count those that are damaged")
    verify.add_argument("places", nargs="+", help=place)
    clear = actions.add_parser("clear", help="remove caches, with their folders")
    clear.add_argument("places", nargs="+", help=place)
    return parser


def _chain_of(place: str) -> Any:
    """Return the pipe that `module:name` or `file.py:name` names, or makes."""
    module, _, name = place.partition(":")
    if not name:
        raise ValueError(f"The chain must be named as module:name or file.py:name, but is {place!r} instead.")
    folder = Path(module).parent if module.endswith(".py") else Path.cwd()
    sys.path.insert(0, str(folder))
    try:
        names = runpy.run_path(module) if module.endswith(".py") else vars(importlib.import_module(module))
    finally:
        sys.path.remove(str(folder))
    if name not in names:
        raise ValueError(f"{module} has no {name!r}.")
    found = names[name]
    chain = found if isinstance(found, IterDataPipe | MapDataPipe) else found() if callable(found) else None
    if not isinstance(chain, IterDataPipe | MapDataPipe):
        raise ValueError(f"{place} is no chain, and no function that returns one.")
    return chain


def _replay(given: argparse.Namespace) -> None:
    picture = replay_grid(
        _chain_of(given.chain), seed=given.seed, epoch=given.epoch, batch=given.batch, field=given.field
    )
    picture.save(given.out)
    print(f"Batch {given.batch} of epoch {given.epoch}: {given.out}")


def _index(given: argparse.Namespace) -> None:
    urls = matching_urls(expand_urls(given.urls))
    num_samples = 0
    for url in tqdm(urls, "indexing", unit=" shards", disable=None):
        num_samples += len(make_index(url, with_checksums=not given.no_checksums).keys)
    print(f"{num_samples} samples in {len(urls)} shards are indexed.")


def _copy(given: argparse.Namespace) -> None:
    result = copy_to_local(
        given.global_root, given.local_root, relative_path=given.relative_path, num_workers=given.num_workers
    )
    done = f"{result.num_files} files, {result.num_bytes} bytes, are copied" if result.was_copied else "nothing to do"
    print(f"{result.path}: {done}.")


def _cache(given: argparse.Namespace) -> None:
    {"ls": _list_caches, "verify": _verify_caches, "clear": _clear_caches}[given.action](given.places)


def _list_caches(places: Sequence[str]) -> None:
    for place in places or named_caches():
        found = look_at_cache(place)
        is_complete = "" if found.num_samples is None else f", complete for {found.num_samples} samples"
        print(f"{place}: {found.entries} entries, {found.bytes:,} bytes, {found.layout}{is_complete}")


def _verify_caches(places: Sequence[str]) -> None:
    total = 0
    for place in places:
        number, num_damaged = check_cache(place)
        print(f"{place}: {number} entries, {num_damaged} damaged")
        total += num_damaged
    if total:
        raise DataError(f"{total} entries are damaged. A chain that reads them with their source heals them.")


def _clear_caches(places: Sequence[str]) -> None:
    for place in places:
        clear_cache(place)
        print(f"{place}: removed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    given = _parser().parse_args(arguments)
    if given.command == "demo":
        run_demo(given.output, num_workers=given.num_workers, num_epochs=given.num_epochs)
        return 0
    try:
        {"copy": _copy, "index": _index, "replay": _replay, "cache": _cache}[given.command](given)
    except (KdpipesError, ValueError, TypeError, IndexError, ImportError, OSError) as error:
        print(f"kdpipes {given.command}: {error}", file=sys.stderr)
        return 1
    return 0
