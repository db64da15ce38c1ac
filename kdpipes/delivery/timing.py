"""What has been measured of a chain in all of its workers, brought together."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchdata.datapipes.iter import FullSync

from kdpipes.core.chain import Chain
from kdpipes.delivery.behind_deal import dealer_of
from kdpipes.delivery.checkpoint import main_part
from kdpipes.delivery.lane_profile import SENDING

__all__ = ["Lane", "Measured", "Row", "measured"]


class Row(NamedTuple):
    """The work of one pipe.

    Args:
        place: Of the pipe among `Measured.pipes`; None is the way from a worker to the main process.
        what: What it does, where that is measured for itself: "applying 'resize' to field 'x'".
        seconds: Without what pipes upstream take.
        calls: How often it was called.
        num_bytes: The size of what it has made, as far as that is known.
    """

    place: int | None
    what: str
    seconds: float
    calls: float
    num_bytes: float


class Lane(NamedTuple):
    """What one worker has said of itself.

    Args:
        worker: Its number.
        process: Its process's.
        num_items: How many it has made.
        work_s: How long it has worked for them.
        idle_s: How long it has waited until they were wanted.
        events: Pieces of work, for a trace: place, what, start and end.
        batches: Those that were measured: number, start and end.
    """

    worker: int
    process: int
    num_items: int
    work_s: float
    idle_s: float
    events: list[tuple[int | None, str, float, float]]
    batches: list[tuple[int, float, float]]


class Measured(NamedTuple):
    """What has been measured of a chain.

    Args:
        pipes: All pipes, the last one first.
        num_main: How many of them run in the main process, behind the workers.
        rows: The work of the workers' pipes, all workers together.
        main_rows: That of the main process's pipes.
        lanes: The workers.
        num_batches: How many items the loop was given.
        num_samples: How many samples those had, where `deal` counts them.
        busy_s: How long the loop ran.
        wait_s: How long of that it waited for the workers, or made the items itself.
        has_workers: Whether there are workers.
        num_workers: How many work for the loop; 1 where it makes the items itself.
    """

    pipes: list[Any]
    num_main: int
    rows: list[Row]
    main_rows: list[Row]
    lanes: list[Lane]
    num_batches: int
    num_samples: int
    busy_s: float
    wait_s: float
    has_workers: bool
    num_workers: int


def measured(chain: Any, service: Any) -> Measured:
    """Return what a reading service has measured.

    Args:
        chain: All of the loader's chain.
        service: One of kdpipes', which measures.
    """
    ends, part = main_part(chain, has_workers=service.has_workers)
    if dealer_of(part) is not None:
        ends = [pipe for pipe in ends if not isinstance(pipe, FullSync)]
    tally, num_main = service.tally, len(ends)
    told = sorted(tally.times.values(), key=lambda one: (one["worker"], one["id"]))
    return Measured(
        pipes=[*ends, *Chain.of(part).pipes],
        num_main=num_main,
        rows=_summed([(_shifted(place, num_main), *rest) for one in told for place, *rest in one["rows"]]),
        main_rows=_main_rows(service.main_probes, num_main),
        lanes=[_lane(one, num_main) for one in told],
        num_batches=tally.num_items,
        num_samples=tally.num_samples,
        busy_s=tally.busy_s,
        wait_s=tally.wait_s,
        has_workers=service.has_workers,
        num_workers=service.num_workers,
    )


def _shifted(place: int, num_main: int) -> int | None:
    return None if place == SENDING else place + num_main


def _summed(rows: list[Any]) -> list[Row]:
    total: dict[tuple[Any, str], Row] = {}
    for place, what, *numbers in rows:
        before = total.get((place, what), Row(place, what, 0.0, 0.0, 0.0))
        total[place, what] = Row(place, what, *(a + b for a, b in zip(before[2:], numbers, strict=True)))
    return list(total.values())


def _main_rows(probes: Any, num_main: int) -> list[Row]:
    if probes is None:
        return []
    so_far = probes.meters.totals()
    found = [Row(*probes.nodes[node], *row) for node, row in so_far.items() if node >= 0]
    return [row for row in found if row.place is not None and row.place < num_main]


def _lane(told: dict[str, Any], num_main: int) -> Lane:
    events = [(_shifted(place, num_main), *rest) for place, *rest in told["events"]]
    return Lane(
        told["worker"], told["process"], told["items"], told["work_s"], told["idle_s"], events, list(told["batches"])
    )
