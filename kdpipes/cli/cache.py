"""`kdpipes cache`: `ls`, `verify` and `clear`."""

from __future__ import annotations

from kdpipes.cli._commands import Answer, Commands, command, help_text, say


@command
def ls(places: tuple[str, ...] = ()) -> Answer:
    """List what caches hold.

    PLACES are folders, URLs, or name=NAME; without any, all named caches in memory are listed, and the local cache of
    the indexes of remote shards. A cache is complete after `.warm_up()`; then `kdp.open_cache` opens it without its
    source.

    Examples:
      kdpipes cache ls
      kdpipes cache ls cache/birds --json

    JSON: a list of
      {"place": "cache/birds", "layout": "lmdb", "entries": 320,
       "bytes": 812345, "num_samples": 160}
      layout        "lmdb" or "files"; "indexes" for the local cache of indexes
      num_samples   how many the cache is complete for; null if it is not
    """
    from kdpipes.cache.open_cache import look_at_cache, named_caches
    from kdpipes.core.messages import counted

    found = [look_at_cache(place) for place in places or named_caches()]
    lines = []
    for one in found:
        samples = ", not complete" * (one.layout != "indexes")
        if one.num_samples is not None:
            samples = f", complete for {counted(one.num_samples, 'sample')}"
        lines.append(
            f"{one.place}: {counted(one.entries, 'entry')}, {counted(one.bytes, 'byte')}, {one.layout}{samples}"
        )
    nothing = "There are no named caches in memory. For a cache on disk, name its folder: kdpipes cache ls FOLDER"
    return Answer([one._asdict() for one in found], lines or nothing)


@command
def verify(places: tuple[str, ...]) -> Answer:
    """Read all entries, count the damaged ones, and repair the list of samples.

    A cache has two copies of that list; other entries are replaced when a chain with the source reads them. PLACES are
    folders, URLs, or name=NAME for caches in memory. If anything stays damaged, the exit status is 1.

    Examples:
      kdpipes cache verify cache/birds
      kdpipes cache verify name=birds cache/birds --json

    JSON: a list of
      {"place": "cache/birds", "entries": 320, "damaged": 0, "healed": 0}
      healed: how many of the damaged entries were repaired.
    """
    from kdpipes.cache.open_cache import check_cache
    from kdpipes.core.messages import counted

    checked = [(place, check_cache(place)) for place in places]
    lines = []
    for place, found in checked:
        healed = f", {found.healed} of them healed" if found.healed else ""
        lines.append(f"{place}: {counted(found.entries, 'entry')}, {found.damaged} damaged{healed}")
    total = sum(found.damaged - found.healed for _, found in checked)
    if total:
        text = f"{counted(total, 'damaged entry')}. A chain that reads them with their source heals them."
        say(f"kdpipes cache: {text}", err=True)
    return Answer([{"place": place, **found._asdict()} for place, found in checked], lines, 1 if total else 0)


@command
def clear(places: tuple[str, ...]) -> Answer:
    """Remove caches, with their folders.

    PLACES are folders, URLs, or name=NAME for caches in memory. A folder without a cache is left alone. The local cache
    of the indexes of remote shards, whose folder `kdpipes cache ls` shows, is made again when it is needed.

    Examples:
      kdpipes cache clear cache/birds
      kdpipes cache clear name=birds --json

    JSON: a list of
      {"place": "cache/birds"}
    """
    from kdpipes.cache.open_cache import clear_cache

    removed: list[str] = []
    try:
        for place in places:
            clear_cache(place)
            removed.append(place)
    except Exception:
        for place in removed:  # caches that are gone are reported even if a later one fails
            say(f"{place}: removed")
        raise
    return Answer([{"place": place} for place in removed], [f"{place}: removed" for place in removed])


_HELP = """List, verify and clear caches.

    Name a cache by its folder or URL, or by name=NAME if it is a named one in memory.

    Examples:
      kdpipes cache ls
      kdpipes cache ls name=birds
      kdpipes cache verify cache/birds
      kdpipes cache clear cache/birds
    """
cache = Commands("cache", help=help_text(_HELP), commands=[ls, verify, clear])
