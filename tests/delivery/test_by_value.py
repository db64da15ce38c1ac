"""`kdp.by_value`: batches of samples with equal values of a field, each sample once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdpipes as kdp
from kdpipes.testing import verify_receipts
from tests.resuming import of_rank

SHAPES = ["wide", "tall", "square"]


def chain(values: list[Any], batch_sizes: Any = None, **arguments: Any) -> Any:
    images = kdp.from_dataset([(number, value) for number, value in enumerate(values)], "x shape")
    arguments = {"shuffle": True, "batching": kdp.by_value("shape", batch_sizes), **arguments}
    return images.select("x shape is_padding ordinal").deal(**arguments)


@given(
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=60),
    st.sampled_from([None, {"wide": 2}]),
    st.booleans(),
    st.sampled_from(["keep", "pad", "drop"]),
)
def test_each_sample_comes_once_and_each_batch_has_one_value(
    values: list[str], batch_sizes: Any, shuffle: bool, uneven: str
) -> None:
    batch_sizes = batch_sizes if "wide" in values else None
    batches = list(chain(values, batch_sizes, batch_size=4, shuffle=shuffle, uneven=uneven))
    assert all(len({shape for _, shape, _, _ in batch}) == 1 for batch in batches)
    own = [sample for batch in batches for sample in batch if not sample[2]]
    numbers = [x for x, *_ in own]
    sizes = {shape: (batch_sizes or {}).get(shape, 4) for shape in SHAPES}
    counts = {shape: values.count(shape) for shape in SHAPES}
    if uneven == "drop":
        kept = {shape: count - count % sizes[shape] for shape, count in counts.items()}
        assert {shape: sum(own_shape == shape for _, own_shape, _, _ in own) for shape in SHAPES} == kept
        assert len(set(numbers)) == len(numbers)
    else:
        assert sorted(numbers) == list(range(len(values)))
    if uneven != "keep":
        assert all(len(batch) == sizes[batch[0][1]] for batch in batches)
    assert sorted(ordinal for _, _, _, ordinal in own) == list(range(len(own)))


@pytest.mark.parametrize("uneven", ["pad", "drop"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_global_batches_are_the_same_for_any_number_of_ranks(num_ranks: int, uneven: str) -> None:
    values = [SHAPES[number * number % 3] for number in range(50)]

    def dealt() -> Any:
        return chain(values, {"wide": 8}, global_batch_size=4, uneven=uneven, seed=3)

    parts = [list(of_rank(dealt(), num_ranks, rank)) for rank in range(num_ranks)]
    joined = [[sample for part in batch for sample in part] for batch in zip(*parts, strict=True)]
    assert joined == list(dealt())


def test_epochs_differ_and_resume_with_other_workers() -> None:
    values = [SHAPES[number % 3] for number in range(80)]
    expected = [list(epoch) for pipe in [chain(values, batch_size=8)] for epoch in (list(pipe), list(pipe))]
    assert expected[0] != expected[1]
    with kdp.Loader(chain(values, batch_size=8), reading_service=kdp.ThreadReadingService(2)) as loader:
        assert list(loader) == expected[0]
        assert verify_receipts([loader.receipt()]).is_complete
        running = iter(loader)
        head = [next(running), next(running)]
        state = loader.state_dict()
    with kdp.Loader(chain(values, batch_size=8)) as loader:
        loader.load_state_dict(state)
        assert head + list(loader) == expected[1]
    with kdp.Loader(chain(values, {"wide": 2}, batch_size=8)) as loader, pytest.raises(ValueError, match="batch_sizes"):
        loader.load_state_dict(state)


def test_one_object_deals_several_chains() -> None:
    batching = kdp.by_value("shape")
    short, long = (list(chain(SHAPES * n, batching=batching, batch_size=9)) for n in (1, 2))
    assert (len(short), [len(batch) for batch in long]) == (3, [2, 2, 2])


def test_numbers_and_tuples_are_values_too() -> None:
    sizes = [(1, 2), (2, 1), (1, 2)]
    for values in ([0.5, 2.0, 0.5], [3, 4, 3], sizes):
        batches = list(chain(values, batch_size=2, shuffle=False))
        assert [[x for x, *_ in batch] for batch in batches] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: kdp.by_value(3), TypeError, "`field` must be the name of a field"),  # type: ignore[arg-type]
        (lambda: kdp.by_value("shape", [3]), TypeError, "`batch_sizes` must be a mapping"),  # type: ignore[arg-type]
        (lambda: kdp.by_value("shape", {"wide": 0}), ValueError, "`batch_sizes` must be"),
        (lambda: list(chain(SHAPES, {"long": 2}, batch_size=2)), ValueError, "`batch_sizes` must be for values"),
        (lambda: chain(SHAPES), ValueError, "batch_size"),
        (lambda: chain(SHAPES, batch_size=2, num_batches=3), ValueError, "`num_batches` cannot be used with"),
        (lambda: chain(SHAPES, batch_size=2, batching=kdp.by_value("size")), kdp.FieldError, "size"),
        (
            lambda: list(chain(SHAPES, batch_size=2, batching=kdp.by_value("shape x", of=lambda shape, x: x[:2]))),
            TypeError,
            "`of` must be a function that returns one value for each sample",
        ),
        (lambda: list(chain([["a"], 3], batch_size=2)), kdp.DataError, "'shape' must hold numbers or text"),
        (
            lambda: list(of_rank(chain(SHAPES, global_batch_size=2), 2, 0)),
            ValueError,
            "A global batch has 1 sample for 2 ranks",
        ),
    ],
)
def test_what_it_rejects(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()
