"""`replay` rejects what it cannot make again: with the way out, and never with another sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.work.replaying import (
    Shift,
    assert_replayed,
    assert_replayed_or_rejected,
    both_flavours,
    delivered,
    indexed,
    plus_random,
    plus_rng,
    stream,
)

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


def is_rejected(build: Callable[[], Any]) -> bool:
    try:
        build()
    except (kdp.ChainError, ValueError):
        return True
    return False


@both_flavours
def test_the_ctx_of_a_batch_is_rejected_with_the_way_out(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift()).select("key x", return_ctx=True).deal(batch_size=3)
    _, ctx = next(iter(pipe.collate_samples()))
    for key in ("0", next(iter(make()))):
        with pytest.raises(TypeError, match=r"is that of a batch. Use `kdpipes.delivery.split_ctx\(ctx\)`"):
            kdp.replay(key, ctx, pipe)


@both_flavours
@pytest.mark.parametrize("function", [plus_rng, plus_random, Shift()], ids=["rng", "random", "two steps"])
def test_a_draw_of_which_the_ctx_knows_nothing_is_rejected(make: Any, function: Any) -> None:
    for pipe in (make().transform("x", function), make().transform("x", function).record_ctx()):
        selected = pipe.select("key x", return_ctx=True)
        for (key, _), ctx in delivered(selected.deal(batch_size=3)):
            assert ctx == {}
            with pytest.raises(
                kdp.ChainError, match=r"but the ctx does not contain them. Put `.record_ctx\(\)` before"
            ):
                kdp.replay(key, ctx, selected)


@both_flavours
def test_a_key_that_is_not_there_is_an_error(make: Any) -> None:
    pipe = make().record_ctx().select("x")
    with pytest.raises(kdp.DataError, match="has no sample with key '17'"):
        kdp.replay("17", {}, pipe)
    with pytest.raises(kdp.DataError, match="has no sample with key '0'"):
        kdp.replay("0", {}, make([]).record_ctx().select("x"))


def test_what_is_no_key_no_ctx_and_no_chain_is_rejected() -> None:
    pipe = indexed().record_ctx().transform("x", Shift())
    sample = pipe[0]
    with pytest.raises(kdp.ChainError, match="as its source makes it, but this one has been changed"):
        kdp.replay(sample, {}, pipe)
    with pytest.raises(TypeError, match="`sample_or_key` must be a sample or its key, but is 0"):
        kdp.replay(0, {}, pipe)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`ctx` must be the ctx of a sample, a dictionary"):
        kdp.replay("0", None, pipe)  # type: ignore[arg-type]
    for chain in (IterableWrapper([1]), IterableWrapper([1]).zip(IterableWrapper([2])), 5, None, "x"):
        with pytest.raises(kdp.ChainError, match="is not a pipe of samples"):
            kdp.replay("0", {}, chain)


def test_a_sample_of_one_of_several_sources_is_rejected() -> None:
    pipe = kdp.concat(indexed(), indexed()).record_ctx().select("x")
    with pytest.raises(kdp.ChainError, match=r"has several sources\. Pass the key of a sample instead"):
        kdp.replay(indexed()[0], {}, pipe)


class Draw(Shift):
    """A user's own, of the name that `draw` has in the ctx."""


@both_flavours
@pytest.mark.parametrize("others", [(), (plus_rng,)], ids=["alone", "with a draw"])
def test_an_operation_may_be_called_draw(make: Any, others: Any) -> None:
    def chain() -> Any:
        return make().record_ctx().transform("x", Draw(), *others).select("key x", return_ctx=True)

    if not is_rejected(chain):
        assert_replayed(chain(), delivered(chain().deal(batch_size=4)))


def note_draw(x: int, ctx: Any) -> int:
    ctx["draw"] = 5
    return x


def note_early_draws(x: int, ctx: Any) -> int:
    ctx["early_draws"] = 5
    return x


@both_flavours
@pytest.mark.parametrize("note", [note_draw, note_early_draws])
def test_a_user_may_write_an_entry_draw_or_is_told(make: Any, note: Any) -> None:
    pipe = make().record_ctx().transform("x", note, Shift()).select("key x", return_ctx=True)
    for item in delivered(pipe.deal(batch_size=4)):
        assert_replayed_or_rejected(item, lambda item=item: kdp.replay(item[0][0], item[1], pipe))  # type: ignore[misc]


class Shift_2(Shift):
    """A name that the second `Shift` has already."""


@both_flavours
def test_no_two_operations_share_an_entry(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift(), Shift(), Shift_2()).select("key x", return_ctx=True)
    for (key, x), ctx in delivered(pipe.deal(batch_size=4)):
        assert x == int(key) + sum(entry["by"] for entry in ctx.values())
        assert len({entry["by"] for entry in ctx.values()}) == 3


def add_100(sample: kdp.Sample) -> kdp.Sample:
    sample["x"] = sample["x"] + 100
    return sample


def test_a_stock_map_of_samples_is_replayed_or_an_error() -> None:
    pipe = stream().map(add_100).record_ctx().transform("x", Shift()).select("key x", return_ctx=True)
    raw = {sample.key: sample for sample in stream()}
    for item in delivered(pipe.deal(batch_size=3)):
        assert_replayed_or_rejected(item, lambda item=item: kdp.replay(raw[item[0][0]], item[1], pipe))  # type: ignore[misc]


def negated(item: Any) -> Any:
    (key, x), ctx = item
    return (key, -x), ctx


@both_flavours
def test_a_stock_map_before_deal_is_done_or_rejected(make: Any) -> None:
    pipe = make().record_ctx().transform("x", Shift()).select("key x", return_ctx=True).map(negated)
    for item in delivered(pipe.deal(batch_size=3)):
        assert_replayed_or_rejected(item, lambda item=item: kdp.replay(item[0][0], item[1], pipe))  # type: ignore[misc]


OTHERS = [(100 + number, 1) for number in range(6)]
CLASHES: dict[str, Callable[[], Any]] = {
    "concat": lambda: kdp.concat(indexed(), indexed(OTHERS)),
    "mix": lambda: indexed().mix([indexed(OTHERS)], weights=[1, 1], seed=0),
}


@pytest.mark.parametrize("clash", CLASHES)
def test_keys_that_two_sources_share_are_told_apart_or_rejected(clash: str) -> None:
    pipe = CLASHES[clash]().record_ctx().transform("x", Shift()).select("key x", return_ctx=True)
    for item in delivered(pipe.deal(batch_size=3)):
        assert_replayed_or_rejected(item, lambda item=item: kdp.replay(item[0][0], item[1], pipe))  # type: ignore[misc]
