"""`kdpipes cache`: `ls`, `verify` and `clear`."""

from __future__ import annotations

import click

from kdpipes.cli._commands import Commands, json_option, say_json

__all__ = ["command"]


@click.group("cache", cls=Commands)
def command() -> None:
    """List, verify and clear caches.

    A cache is named by its folder, its URL, or, if it is one in memory that was given a name, by name=NAME.

    \b
    Examples:
      kdpipes cache ls
      kdpipes cache ls name=birds
      kdpipes cache verify cache/birds
      kdpipes cache clear cache/birds
    """


@command.command("ls")
@click.argument("places", nargs=-1)
@json_option
def list_caches(places: tuple[str, ...], as_json: bool) -> None:
    """Say what caches hold.

    PLACES are folders, URLs, or name=NAME for caches in memory; without any, all of those are listed. A cache is
    complete when `.warm_up()` has made a list of its samples; then `kdp.open_cache` opens it without its source.

    \b
    Examples:
      kdpipes cache ls
      kdpipes cache ls cache/birds --json

    \b
    JSON: a list of
      {"place": "cache/birds", "layout": "lmdb", "entries": 320, "bytes": 812345, "num_samples": 160}
      layout: "lmdb" or "files". num_samples: how many the cache is complete for; null if it is not.
    """
    from kdpipes.cache.admin import look_at_cache, named_caches

    found = (look_at_cache(place) for place in places or named_caches())
    if as_json:
        say_json([each._asdict() for each in found])
        return
    if not places and not named_caches():
        click.echo("There are no named caches in memory. For a cache on disk, name its folder: kdpipes cache ls FOLDER")
    for each in found:
        state = "not complete" if each.num_samples is None else f"complete for {_counted(each.num_samples, 'sample')}"
        size = f"{_counted(each.entries, 'entry', 'entries')}, {each.bytes:,} bytes"
        click.echo(f"{each.place}: {size}, {each.layout}, {state}")


@command.command("verify")
@click.argument("places", nargs=-1, required=True)
@json_option
def verify_caches(places: tuple[str, ...], as_json: bool) -> None:
    """Read all entries, count those that are damaged, and repair the list of samples.

    A cache has two copies of that list; other entries need the chain with the source. PLACES are folders, URLs, or
    name=NAME for caches in memory. If anything stays damaged, the exit status is 1.

    \b
    Examples:
      kdpipes cache verify cache/birds
      kdpipes cache verify name=birds cache/birds --json

    \b
    JSON: a list of
      {"place": "cache/birds", "entries": 320, "damaged": 0, "healed": 0}
      healed: how many of the damaged entries were repaired.
    """
    from kdpipes.cache.admin import check_cache
    from kdpipes.core.errors import DataError

    checked, total = [], 0
    for place in places:
        found = check_cache(place)
        total += found.damaged - found.healed
        checked.append({"place": place, **found._asdict()})
        if not as_json:
            healed = f", {found.healed} of them healed" if found.healed else ""
            click.echo(f"{place}: {_counted(found.entries, 'entry', 'entries')}, {found.damaged} damaged{healed}")
    if as_json:
        say_json(checked)
    if total:
        many = f"{total:,} entries are damaged. A chain that reads them with their source heals them."
        told = many if total > 1 else "1 entry is damaged. A chain that reads it with its source heals it."
        raise DataError(told)


@command.command("clear")
@click.argument("places", nargs=-1, required=True)
def clear_caches(places: tuple[str, ...]) -> None:
    """Remove caches, with their folders.

    PLACES are folders, URLs, or name=NAME for caches in memory. A folder without a cache is left alone.

    \b
    Examples:
      kdpipes cache clear cache/birds
      kdpipes cache clear name=birds
    """
    from kdpipes.cache.admin import clear_cache

    for place in places:
        clear_cache(place)
        click.echo(f"{place}: removed")


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
