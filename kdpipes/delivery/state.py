"""The state of a loader or a dealt chain: which epoch and batch of which chain comes next, as small plain data."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, must_be
from kdpipes.core.messages import warn
from kdpipes.core.registry import shown_name
from kdpipes.core.stock import is_of_torchdata
from kdpipes.delivery.clock import Position
from kdpipes.delivery.lanes import Cursor, Cursors
from kdpipes.delivery.layout import ranks_now

_VERSION = 2  # 2: other hashes of the chain
_MAX_EPOCHS = 10**9  # more means damage; so does a count that JSON numbers cannot represent exactly
_MAX_COUNT = 2**53
_MAX_LANES = 2**16
_MAX_PLACE = 2**32  # for shards and samples in a shard, which workers send as 32-bit numbers


@runtime_checkable
class Counting(Protocol):
    """A pipe that counts its epochs."""

    def set_epoch(self, epoch: int) -> None: ...
    def next_epoch(self) -> int: ...


def main_part(pipe: Any, *, has_workers: bool) -> tuple[list[Any], Any]:
    """Return the pipes at the end of a chain that run in the main process, last one first, and the part for workers.

    All pipes downstream of one that must not be copied to workers run in the main process.

    Raises:
        ChainError: Such a pipe is a source, or on a branch. Without workers, everything runs in the main process.
    """
    path = Chain.of(pipe).path()
    nodes = list(reversed(Chain.of(pipe)))
    places = {id(node.pipe): place for place, node in enumerate(path[:-1])}
    bound = [node for node in nodes if node.stays_in_main_process]
    stray = next((node for node in bound if id(node.pipe) not in places), None)
    if stray is not None:
        if not has_workers:
            return [], pipe
        raise ChainError(
            f"`{stray.name}` must run in the main process, so it must be at the end of the chain: kdpipes' reading "
            "services run sources and branches in workers. torchdata's MultiProcessingReadingService runs such chains."
        )
    number = max((places[id(node.pipe)] + 1 for node in bound), default=0)
    ends = [node.pipe for node in path[:number]]
    part = path[number].pipe
    if Chain.of(part).resumable_deal() is not None:  # `deal` makes the ranks' batches equal
        ends = [end for end in ends if not is_of_torchdata(end, "FullSync")]
    return ends, part


class Checkpointer:
    """Makes and reads the states of one chain.

    Args:
        chain: What runs in the workers.
        num_workers: The number of workers; without `deal`, the numbers of items depend on it.
        pipes: The chain's fingerprints, if they are known.
        is_part: Whether the states may be those of one worker of torch's loaders. Its last batch does not end the
            epoch, which it would leave while others are still in it.
    """

    def __init__(self, chain: Any, num_workers: int, pipes: list[str] | None = None, *, is_part: bool = False) -> None:
        self._chain = chain
        self._is_part = is_part
        self._num_workers = num_workers
        self._known_pipes = pipes

    @functools.cached_property
    def pipes(self) -> list[str]:
        """The chain's fingerprints: to be read before iterating changes what users' callables hold."""
        return Chain.of(self._chain).fingerprints() if self._known_pipes is None else self._known_pipes

    @functools.cached_property
    def _deal(self) -> Any:
        return Chain.of(self._chain).resumable_deal()

    def first_position(self) -> Position:
        """Return where the chain's next iteration begins: where a loaded state stands, or at the start of an epoch."""
        dealer = self._deal
        if dealer is not None and dealer.clock.is_resumed:
            return self._past_end(dealer.clock.position)
        return Position(self.next_epoch())

    def next_epoch(self) -> int:
        """Return the number that the chain itself gives its next iteration."""
        counting = (pipe for pipe in Chain.of(self._chain).pipes if isinstance(pipe, Counting))
        return next((pipe.next_epoch() for pipe in counting), 0)

    def num_batches(self) -> int | None:
        """Return the number of batches of an epoch, where they are numbered and known."""
        dealer = self._deal
        if dealer is None:
            return None
        try:
            return len(dealer)
        except TypeError:
            return None

    def state_at(self, position: Position, sizes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the state at a position: plain data, well under 2 KB.

        Args:
            position: Where the loader stands.
            sizes: The sizes that the position was counted with; by default, the current ones.
        """
        position = self._past_end(position)
        state: dict[str, Any] = {"version": _VERSION, "epoch": position.epoch, "batch": position.number}
        if position.offset:
            state["offset"] = position.offset
        if position.cursors:
            state["cursors"] = [[lane, *cursor] for lane, cursor in position.cursors]
        return {**state, **(self.sizes() if sizes is None else sizes), "pipes": list(self.pipes)}

    def _past_end(self, position: Position) -> Position:
        """Return the start of the next epoch for a position after the last batch of a known number."""
        may_be_at_end = bool(position.number) and not position.offset and not self._is_part
        is_at_end = may_be_at_end and position.number == self.num_batches()
        if not is_at_end:
            return position
        return Position(position.epoch + 1, cursors=position.cursors if self._deal.clock.continues else ())

    def sizes(self) -> dict[str, Any]:
        """Return the numbers on which the order depends, with the current ranks."""
        dealer = self._deal
        if dealer is None:
            return {"num_workers": self._num_workers, "num_ranks": ranks_now().num_ranks}
        sizes: dict[str, Any] = dealer.sizes()
        return sizes

    def position_in(self, state: Any, *, strict: bool) -> Position:
        """Return the position that a state names, or reject a state that does not fit the chain.

        Raises:
            ValueError: It is not a state, or belongs to another version, other batches or another chain; or one of its
                entries has a wrong type or is out of range.
        """
        difference = check_state(state, self.pipes, strict=strict)
        self._reject_other_numbers(state)
        if difference:
            warn(f"The state does not fit the chain: {difference}")
        epoch = _count_in(state, "epoch", _MAX_EPOCHS)
        batch = _count_in(state, "batch", _MAX_COUNT)
        offset = _count_in({"offset": 0, **state}, "offset", _MAX_COUNT)
        position = Position(epoch, batch, offset, self._cursors_in(state))
        num_batches = self.num_batches()
        if num_batches is not None and batch > num_batches:
            if not difference:
                _reject_entry("batch", f"at most {num_batches}, the number of batches in an epoch", batch)
            return Position(epoch + 1)  # another chain, of fewer batches
        return self._past_end(position)

    def _cursors_in(self, state: Mapping[str, Any]) -> Cursors:
        """Return the cursors of the lanes of a stream in a state."""
        entries = state.get("cursors", [])
        if not isinstance(entries, list | tuple) or any(
            not isinstance(entry, list | tuple) or len(entry) != 5 for entry in entries
        ):
            _reject_entry("cursors", "lists of five integers each", entries)
        dealer = self._deal
        num_lanes = _MAX_LANES if dealer is not None and dealer.has_lanes else 1
        limits = (num_lanes, _MAX_PLACE, _MAX_PLACE, _MAX_COUNT, _MAX_COUNT)
        cursors: dict[int, Cursor] = {}
        for entry in entries:
            lane, *cursor = (
                _count_in({"cursors": value}, "cursors", limit) for value, limit in zip(entry, limits, strict=True)
            )
            cursors[lane] = Cursor(*cursor)
        return tuple(sorted(cursors.items()))

    def _reject_other_numbers(self, state: Mapping[str, Any]) -> None:
        now = self.sizes()
        limits = ("max_tokens", "global_max_tokens", "batch_sizes", "batch_size", "global_batch_size")
        names = ("batching", "field", *limits)
        then_cut, now_cut = ({name: of[name] for name in names if name in of} for of in (state, now))
        if then_cut != now_cut and "batching" in {*then_cut, *now_cut}:
            was, is_now = (", ".join(f"{name}={value!r}" for name, value in cut.items()) for cut in (then_cut, now_cut))
            raise ValueError(f"The state was taken with {was}, but this loader has {is_now}. Use the same.")
        size = state.get("global_batch_size")
        if size != now.get("global_batch_size"):
            raise ValueError(
                f"The state counts global batches of {size} samples, but this loader's have "
                f"{now.get('global_batch_size')}. Deal with the same batch size: `deal(batch_size={size})` on one "
                f"rank, or `deal(global_batch_size={size})` for all ranks together."
            )
        then = state.get("pieces", 1)
        pieces = now.get("pieces", 1)
        if then != pieces:
            raise ValueError(
                f"The state was saved when each global batch was made from {then} lanes, but this loader uses "
                f"{pieces}. Without `max_ranks`, this is the number of ranks. Use "
                f"`deal(global_batch_size={size}, split=kdp.lanes(max_ranks={then}))`, which does not depend on the "
                "number of ranks."
            )
        for name in ("num_workers", "num_ranks"):
            if name in now and now[name] != state.get(name):
                what = name.removeprefix("num_")
                raise ValueError(
                    f"The state was taken with {state.get(name)} {what}, but this loader has {now[name]}. Use as many: "
                    "the batches of this chain depend on them. This is so with `kdp.by_length(max_tokens=...)` "
                    "(but not `global_max_tokens`), without `deal`, and with pipes after it that hold items back."
                )


def check_state(state: Any, pipes: list[str], *, strict: bool = True) -> str:
    """Return how a state differs from a chain with the fingerprints `pipes`; an empty text if it fits.

    Raises:
        ValueError: It is not a state, or one of another version; or it differs, and `strict` is True.
    """
    try:
        repr(state)  # the errors below show its entries
    except RecursionError:
        raise ValueError(must_be("state_dict", "what `state_dict()` of a Loader returns", state)) from None
    is_state = isinstance(state, Mapping) and {"version", "epoch", "batch", "pipes"} <= set(state)
    if is_state and state["version"] != _VERSION:
        raise ValueError(
            f"The state has version {state['version']!r}, not {_VERSION}. Resume with the kdpipes that saved it."
        )
    then = state["pipes"] if is_state else None
    if not isinstance(then, list | tuple) or not all(isinstance(entry, str) for entry in then):
        raise ValueError(must_be("state_dict", "what `state_dict()` of a Loader returns", state))
    difference = _difference(list(then), pipes)
    if difference and strict:
        hint = (
            "Make the chain as it was when the state was saved. If you changed it on purpose, "
            "`load_state_dict(state, strict=False)` resumes at the same batch of the changed chain."
        )
        raise ValueError(f"The state does not fit the chain: {difference} {hint}")
    return difference


def state_of(chain: Any) -> dict[str, Any]:
    """Return the state of a dealt chain: see `Resumable.state_dict`."""
    dealer = dealer_before(chain)
    return _checkpointer(dealer).state_at(dealer.clock.position)


def load_state(chain: Any, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load the state of a dealt chain: see `Resumable.load_state_dict`."""
    dealer = dealer_before(chain)
    dealer.clock.resume_at(_checkpointer(dealer).position_in(state, strict=strict))


def dealer_before(chain: Any) -> Any:
    """Return the `deal` of a chain whose later pipes make one item of each batch."""
    last = Chain.of(chain).one_to_one_path()[-1]
    if last.traits.role == "deal":
        return last.pipe
    raise ChainError(
        f"The chain has no state, because `{last.name}` after `.deal()` may hold batches back or change their "
        "number. Remove it, or use `kdp.Loader(chain)`, which has a state."
    )


def _checkpointer(dealer: Any) -> Checkpointer:
    made = Checkpointer(dealer, dealer.sharding().num_workers, dealer.known_pipes, is_part=True)
    dealer.known_pipes = made.pipes
    return made


def seed_in(state: Mapping[str, Any]) -> int:
    """Return the seed that a state names."""
    return _count_in({"seed": None, **state}, "seed", 1 << 64)


def _count_in(state: Mapping[str, Any], name: str, limit: int) -> int:
    """Return an entry of a state that is an integer from 0 up to `limit`."""
    value = state[name]
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= operator.index(value) < limit:
        _reject_entry(name, f"an integer from 0 to {limit - 1}", value)
    return operator.index(value)


def _reject_entry(name: str, rule: str, value: Any) -> NoReturn:
    hint = "Load a state that `state_dict()` returned, unchanged."
    raise ValueError(must_be(f"state_dict[{name!r}]", rule, value, hint))


def _difference(then: list[str], now: list[str]) -> str:
    names_then, names_now = [[entry.rpartition(":")[0] for entry in entries] for entries in (then, now)]
    if names_then != names_now:
        # Fingerprints name the last pipe first.
        then_shown, now_shown = (" → ".join(map(shown_name, reversed(names))) for names in (names_then, names_now))
        return f"it was taken from {then_shown}, but this chain is {now_shown}."
    for name, was, is_now in reversed(list(zip(names_now, then, now, strict=True))):  # the cause is upstream
        if was != is_now:
            return f"the arguments, the code or the data of `{shown_name(name)}` have changed."
    return ""
