"""`kdp.doctor`: all checks of a chain, the measurement, and the report."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kdpipes.core.chain import Chain, Node
from kdpipes.core.errors import check_count
from kdpipes.core.map_pipe import MapPipe, redrawing_name
from kdpipes.core.secrets import safe_text
from kdpipes.core.torch_pipes import MapDataPipe
from kdpipes.delivery.skipping import unrecorded
from kdpipes.loader.autotune import available_cores
from kdpipes.loader.loader import Loader, check_shares
from kdpipes.loader.services import ThreadReadingService
from kdpipes.look.batch import BATCH_SIZE, chain_in
from kdpipes.look.doctor import data as _data  # noqa: F401  # which registers its rules, as does the next one
from kdpipes.look.doctor import order as _order  # noqa: F401
from kdpipes.look.doctor.rules import RULES, Facts, Finding, num_different
from kdpipes.look.doctor.work import decoders_of
from kdpipes.look.profile import SENDING, Kind, PipeTime, Profile, profile
from kdpipes.look.rendering import render
from kdpipes.look.shuffle_quality import ShuffleQuality, shuffle_quality
from kdpipes.work.decode import ImageDecoder
from kdpipes.work.jpeg import find_decoders

_SEVERITIES = ("error", "warning", "hint")
_NOTHING: Any = object()
_NAMES: dict[Kind, str] = {"plan": "the plan", "cache": "the cache", "device": "the device"}  # others as they are
_HARDLY = 0.0005  # the share below which nothing is reported
_FASTER = 2.0  # times as fast as Pillow are the others with the shipped photos, at the least
_WORTH_IT = 1.1
_SEEDING_S = 40e-6  # measured for one call, without making the sample's key
_BETWEEN = ("rename_fields", "record_ctx", "select")  # neither draw nor take time
_PART = 0.5  # of the free shared memory is what a cache takes by default
_LITTLE = 0.05  # the share of the work that a cache must save to be considered


@dataclass(frozen=True, repr=False)
class Report:
    """The mistakes in a chain, its bottleneck, and advice. Prints as text, and as HTML in notebooks.

    Args:
        findings: What is wrong, or could be better, the worst first.
        profile: Where the time goes; None if that was not measured.
        bound: The bottleneck: "storage", "decoding", "transforms", "transfer", "the consumer", ...
        advice: The changes that would help, the best one first, each alone.
        decoders: What decodes the JPEGs of `decode_images`, and in which version.
        shuffle: How well the chain shuffles; None if it does not, or if that was not measured.
    """

    findings: tuple[Finding, ...]
    profile: Profile | None = None
    bound: str | None = None
    advice: tuple[Advice, ...] = ()
    decoders: tuple[str, ...] = ()
    shuffle: ShuffleQuality | None = None

    @property
    def is_clean(self) -> bool:
        """Whether the chain has no errors or warnings. There may still be hints."""
        return all(finding.severity == "hint" for finding in self.findings)

    def __repr__(self) -> str:
        lines = [str(finding) for finding in self.findings] or ["Nothing is wrong with the chain."]
        lines += [self._decoders_text()] if self.decoders else []
        if self.profile is not None:
            lines += ["", str(self.profile), kinds_text(self.profile), self._bound_text()]
            lines += [f"  {one}" for one in self.advice]
        lines += [str(self.shuffle)] if self.shuffle is not None else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        decoders = self._decoders_text() if self.decoders else ""
        if self.profile is None:
            return render("report", self.findings, decoders, "", [], [])
        sentences = [kinds_text(self.profile), self._bound_text()]
        changes = [str(one) for one in self.advice]
        shown = render("report", self.findings, decoders, self.profile._repr_html_(), sentences, changes)
        return shown + (self.shuffle._repr_html_() if self.shuffle is not None else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, fit for JSON; `shares` are those of the chain's time by kind of work."""
        return {
            "is_clean": self.is_clean,
            "findings": [finding._asdict() for finding in self.findings],
            "decoders": list(self.decoders),
            "bound": self.bound,
            "shares": None if self.profile is None else shares_by_kind(self.profile),
            "advice": [one._asdict() for one in self.advice],
            "shuffle": None if self.shuffle is None else self.shuffle.to_dict(),
            "profile": None if self.profile is None else self.profile.to_dict(),
        }

    def _decoders_text(self) -> str:
        return f"JPEGs are decoded by {' and '.join(self.decoders)}."

    def _bound_text(self) -> str:
        if self.bound == "the consumer":
            return "The bottleneck is the consumer: no change of the chain would help."
        best = " Changes that would help, each on its own:" if self.advice else ""
        return f"The bottleneck is {self.bound}.{best}"


def doctor(
    source_datapipe: Any,
    *,
    num_workers: int = 2,
    seconds: float = 5.0,
    step: Callable[[Any], Any] | None = None,
    measure: bool = True,
) -> Report:
    """Return what is wrong with a chain, its bottleneck, and the one change that would help most.

    The doctor inspects the chain, makes its first batch twice, and, unless it has found an error, runs the chain for a
    few seconds. Without `step`, the consumer is never the bottleneck, because nothing is done with the batches. Samples
    that `on_error` skips are not put into quarantine.

    Args:
        source_datapipe: The chain, or a loader of it. An indexed chain without `deal` runs in batches of 16.
        num_workers: The number of workers: processes, or threads on Windows.
        seconds: How long to measure, in seconds.
        step: A function that is called with each batch, like a training step.
        measure: Whether to run the chain; otherwise, it is inspected, and its first batch is made twice.

    Example:
        >>> pipe = kdp.from_dataset([(n, 0) for n in range(8)]).select("x").deal(batch_size=4)
        >>> print(kdp.doctor(pipe, measure=False))
        Nothing is wrong with the chain.
    """
    source_datapipe = chain_in(source_datapipe, "kdp.doctor")
    is_undealt = isinstance(source_datapipe, MapDataPipe)
    shared = Path("/dev/shm")
    facts = Facts(
        num_workers=check_count("num_workers", num_workers, minimum=0),
        num_cpus=available_cores(),
        shm_free=shutil.disk_usage(shared).free if shared.is_dir() else None,
        fast_decoders=tuple(find_decoders()),
        is_undealt=is_undealt,
    )
    chain = source_datapipe.deal(batch_size=BATCH_SIZE) if is_undealt else source_datapipe
    service: dict[str, Any] = {"num_workers": num_workers}
    if num_workers and os.name != "posix":
        service = {"reading_service": ThreadReadingService(num_workers)}
    with unrecorded(chain):
        nodes = Chain.of(chain)
        findings = _examined(nodes, facts)
        if not measure or any(finding.severity == "error" for finding in findings):
            return Report(findings, decoders=decoders_of(nodes))
        measured = profile(source_datapipe, seconds, step=step, **service)
        suggested = tuple(advice_for(nodes, measured, facts))
    deal = None if is_undealt or nodes.deal is None else nodes.deal.pipe
    is_measurable = deal is not None and deal.is_shuffled and isinstance(deal.source, MapPipe) and len(deal.source) > 1
    shuffle = shuffle_quality(chain) if is_measurable else None
    return Report(findings, measured, bound_of(measured), suggested, decoders_of(nodes), shuffle)


def _examined(chain: Chain, facts: Facts) -> tuple[Finding, ...]:
    """Return what all rules find, the worst first, of each kind and pipe once."""
    findings = [finding for rule in RULES if not rule.runs_chain for finding in rule.findings(chain, facts)]
    if not any(finding.severity == "error" for finding in findings):
        findings += _tried(chain, facts)
    if facts.is_undealt:
        own = chain.end.upstream[0].name
        findings = [finding._replace(pipe=own) if finding.pipe == "deal" else finding for finding in findings]
        findings.append(_undealt(chain, own))
    once: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        what, why, fix = map(safe_text, finding[-3:])
        clean = finding._replace(pipe=safe_text(finding.pipe), what=what, why=why, fix=fix)
        once.setdefault((finding.code, finding.pipe), clean)
    return tuple(sorted(once.values(), key=lambda finding: _SEVERITIES.index(finding.severity)))


def _tried(chain: Chain, facts: Facts) -> list[Finding]:
    """Make the first batch twice, and return the findings."""
    end = chain.end.name
    try:
        check_shares(chain.end.pipe, facts.num_workers)
        first, once = _first_batch(chain)
        second, twice = _first_batch(chain)
    except Exception as error:  # a user's code may raise anything: it is what is looked for
        what = f"The first batch cannot be made: {type(error).__name__}: {error}".split("\n")[0]
        why = " ".join(getattr(error, "__notes__", [])) or "No loader can run the chain."
        fix = 'Fix what it names, or leave such samples out: `.on_error("skip")`.'
        return [Finding("cannot-load", "error", end, what, why, fix)]
    if first is _NOTHING:
        fix = "Look at the plan: `len(pipe)` after each filter."
        return [Finding("empty", "error", end, "The chain gives no batch.", "An epoch ends before it begins.", fix)]
    facts = replace(facts, batch=first, batch_again=second, generators=(once, twice))
    return [finding for rule in RULES if rule.runs_chain for finding in rule.findings(chain, facts)]


def _first_batch(chain: Chain) -> tuple[Any, Any]:
    """Return the first batch, and the states of the global generators after it."""
    with Loader(chain.end.pipe) as loader:
        loader.seed(0)
        batch = next(iter(loader), _NOTHING)
    return batch, (random.getstate(), np.random.get_state(), torch.get_rng_state())


def _undealt(chain: Chain, pipe: str) -> Finding:
    why = "`kdp.Loader` raises an error for an indexed chain, because nothing decides what a batch is."
    fix = "End it with `.deal(batch_size=...)`; to train, `.deal(batch_size=..., shuffle=True, seed=0)`."
    redrawn = (redrawing_name(one) for one in chain.of_type(MapPipe))
    if drawing := chain.random_name() or next((name for name in redrawn if name), None):
        why = f"{why} In torch's DataLoader, `{drawing}` draws the same in every epoch."
        fix = f"{fix} With a DataLoader, call `chain.set_epoch(epoch)` before each epoch."
    what = f"The chain has no `deal` yet: it is looked at in batches of {BATCH_SIZE}."
    return Finding("no-deal", "hint", pipe, what, why, fix)


# Advice


class Advice(NamedTuple):
    """One change, and its largest possible gain.

    Args:
        change: What to do.
        gain: The samples per second, as a multiple of those now.
        why: The figures on which it is based.
    """

    change: str
    gain: float
    why: str

    def __str__(self) -> str:
        return f"{self.gain:.1f} times as fast: {self.change} ({self.why})"


def _gain(profile: Profile, left: float, *, has_workers: bool) -> float:
    """Return the speedup of the loop if only a share `left` of its waiting remains."""
    wait_s = profile.wait_s * max(left, 0.01)
    consumer_s = profile.consumer_s
    loop_s = max(wait_s, consumer_s) if has_workers else wait_s + consumer_s
    return profile.loop_s / loop_s if loop_s else 1.0


def _gain_without(profile: Profile, share: float) -> float:
    """Return the speedup of the loop without a share of the work."""
    return _gain(profile, 1 - share, has_workers=profile.num_workers > 0)


def shares_by_kind(profile: Profile) -> dict[Kind, float]:
    """Return the shares of the pipes, summed up by the kind of their work, the largest first."""
    shares: dict[Kind, float] = {}
    for pipe in profile.pipes:
        shares[pipe.kind] = shares.get(pipe.kind, 0.0) + pipe.share
    return dict(sorted(shares.items(), key=lambda entry: -entry[1]))


def _times(chain: Chain, profile: Profile) -> list[tuple[Node, PipeTime]]:
    """Return the pipes with their times, the source first; nothing if the loader has added pipes of its own."""
    times = [one for one in profile.pipes if one.pipe != SENDING]
    return list(zip(chain, times, strict=True)) if len(chain) == len(times) else []


def bound_of(profile: Profile) -> str:
    """Return the bottleneck: the consumer, or the kind of work that takes most of the chain's time."""
    if profile.bound == "consumer":
        return "the consumer"
    kind: Kind = next(iter(shares_by_kind(profile)), "plan")
    return _NAMES.get(kind, kind)


def kinds_text(profile: Profile) -> str:
    """Return the shares of each kind of work in the chain's time, with the pipes that do it."""
    parts = []
    for kind, share in shares_by_kind(profile).items():
        names = [pipe.pipe for pipe in profile.pipes if pipe.kind == kind and pipe.share >= _HARDLY]
        if share >= _HARDLY:
            parts.append(f"{_NAMES.get(kind, kind)} {share:.1%} ({', '.join(dict.fromkeys(names))})")
    busy = profile.consumer_s / profile.loop_s if profile.loop_s else 0.0
    return f"By kind of work: {', '.join(parts) or 'nothing'}. The consumer was busy for {busy:.0%} of the loop."


def advice_for(chain: Chain, profile: Profile, facts: Facts) -> list[Advice]:
    """Return the changes that are worth it, the best one first.

    A change that saves a share s of the work makes the chain 1 / (1 - s) times as fast; n workers in place of w make it
    n / w times as fast; and neither makes it faster than the loop takes batches. Without workers, the loop's own time
    comes on top.
    """
    if profile.bound == "consumer":
        return []
    found = [
        *_workers(profile, facts),
        *_cache(chain, profile, facts),
        *_decoder(chain, profile, facts),
        *_seeding(chain, profile),
    ]
    return sorted((one for one in found if one.gain >= _WORTH_IT), key=lambda one: -one.gain)


def _workers(profile: Profile, facts: Facts) -> Iterator[Advice]:
    now = max(profile.num_workers, 1)
    most = facts.num_cpus
    if most > now:
        why = f"there are {most} processors, and {profile.num_workers} workers"
        yield Advice(f"`num_workers={most}`", _gain(profile, now / most, has_workers=True), why)


def _decoder(chain: Chain, profile: Profile, facts: Facts) -> Iterator[Advice]:
    share = shares_by_kind(profile).get("decoding", 0.0)
    is_chosen = any(decoder.backend == "pillow" for decoder in chain.operations(ImageDecoder))
    if share and (is_chosen or not facts.fast_decoders):
        change = '`decode_images(backend="auto")`' if facts.fast_decoders else "`pip install 'kdpipes[fast]'`"
        why = f"Pillow's decoding takes {share:.0%} of the work; a fast decoder of JPEGs, half of that or less"
        yield Advice(change, _gain_without(profile, share * (1 - 1 / _FASTER)), why)


def _seeding(chain: Chain, profile: Profile) -> Iterator[Advice]:
    """Yield the change for callables that draw from the global generators, which are seeded for each call."""
    each = _times(chain, profile)
    found = [(node.operation.drawing(), measured) for node, measured in each if node.operation is not None]
    names = [name for names, _ in found for name in names]
    total = sum(one.seconds for one in profile.pipes)
    if names and total:
        share = sum(min(_SEEDING_S * len(names) * one.calls, one.seconds) for names, one in found) / total
        parts = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
        change = f"a parameter `rng` for {parts}, to draw from it"
        why = f"the global generators are seeded for each call, which takes {share:.0%} of the work"
        yield Advice(change, _gain_without(profile, share), why)


def _cache(chain: Chain, profile: Profile, facts: Facts) -> Iterator[Advice]:
    """Yield the place where a cache helps most.

    Reading the cache is taken to cost nothing. A cache may stand after each pipe whose results do not change from
    epoch to epoch, but only the last such place, the one after decoding and the one after the source differ much.
    """
    each = _times(chain, profile)
    caches = [number for number, (node, _) in enumerate(each) if node.traits.role == "cache"]
    cache = each[caches[-1]][0] if caches else None
    is_limited = cache is None or cache.name == "cache_in_memory"
    has_decoder = any(one.kind == "decoding" for one in profile.pipes)
    share = 0.0
    best: Advice | None = None
    for node, measured in each[caches[-1] + 1 :] if caches else each:
        if node.traits.random or node.traits.role in ("deal", "batch", "device") or node.traits.gives != "samples":
            break
        share += measured.share
        where = ""
        if measured.kind == "transforms" and node.name not in _BETWEEN:
            if node.operation is None or node.operation.drawing():
                break
            where = "after the last `.transform()` that draws no random numbers"
        elif measured.kind == "decoding":
            where = "after `.decode_images()`"
        elif measured.kind == "storage" and cache is None:
            where = "before `.decode_images()`" if has_decoder else f"after `{node.name}`"
        if where and share >= _LITTLE and (not is_limited or _has_room(node.pipe, measured, facts)):
            change = f"`.cache_in_memory()` {where}" if cache is None else f"move `.{cache.name}()` {where}"
            why = f"all up to there takes {share:.0%} of the work, in every epoch"
            best = Advice(change, _gain_without(profile, share), why)  # later places save more
    if best is not None:
        yield best


def _has_room(pipe: Any, measured: PipeTime, facts: Facts) -> bool:
    num_samples = num_different(pipe)
    if facts.shm_free is None or num_samples is None or not measured.calls:
        return True
    return num_samples * measured.num_bytes / measured.calls <= facts.shm_free * _PART
