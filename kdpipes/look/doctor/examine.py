"""`kdp.doctor`: all checks of a chain, the measurement, and the report."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdpipes.core.chain import Chain
from kdpipes.core.errors import check_count
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.torch_pipes import MapDataPipe
from kdpipes.delivery.skipping import unrecorded
from kdpipes.loader.autotune import available_cores
from kdpipes.loader.loader import Loader, check_shares
from kdpipes.loader.services import ThreadReadingService
from kdpipes.look.batch import BATCH_SIZE, chain_in
from kdpipes.look.doctor import data as _data  # noqa: F401  # which registers its rules, as does the next one
from kdpipes.look.doctor import order as _order  # noqa: F401
from kdpipes.look.doctor.advice import Advice, advice, bound_of, kinds_text, shares_by_kind
from kdpipes.look.doctor.rules import RULES, Facts, Finding
from kdpipes.look.doctor.work import decoders_of
from kdpipes.look.profile import Profile, profile
from kdpipes.look.rendering import render
from kdpipes.look.shuffle_quality import ShuffleQuality, shuffle_quality
from kdpipes.work.jpeg import find_decoders

_SEVERITIES = ("error", "warning", "hint")
_NOTHING: Any = object()


@dataclass(frozen=True, repr=False)
class Report:
    """What is wrong with a chain, its bottleneck, and what to change: prints as text, shows as HTML in notebooks.

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
        sentences, changes = [kinds_text(self.profile), self._bound_text()], [str(one) for one in self.advice]
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
        suggested = tuple(advice(nodes, measured, facts))
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
        once.setdefault((finding.code, finding.pipe), finding)
    return tuple(sorted(once.values(), key=lambda finding: _SEVERITIES.index(finding.severity)))


def _tried(chain: Chain, facts: Facts) -> list[Finding]:
    """Return what is found when the first batch is made, twice."""
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
    redrawn = (one.redrawn_by() for one in chain.of_type(MapPipe))
    if drawing := chain.random_name() or next((name for name in redrawn if name), None):
        why = f"{why} In torch's DataLoader, `{drawing}` draws the same in every epoch."
        fix = f"{fix} With a DataLoader, call `chain.set_epoch(epoch)` before each epoch."
    what = f"The chain has no `deal` yet: it is looked at in batches of {BATCH_SIZE}."
    return Finding("no-deal", "hint", pipe, what, why, fix)
