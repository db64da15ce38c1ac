"""Pipes that users write: what they declare is enough for caches, states, profiles, views and the doctor."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kdpipes as kdp
from kdpipes.core.chain import Chain
from kdpipes.core.traits import Traits
from tests.torchdata_parts import needs_torchdata

SIZE = 12


class OwnSource(kdp.MapPipe):
    traits = kdp.Traits(role="source")

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def fetch(self, index: int) -> kdp.Sample:
        return kdp.Sample({"n": index, "y": index % 3, "image": index}, key=f"number {index}", index=index)

    def read_column(self, name: str) -> NDArray[Any]:
        return np.arange(self.size) % 3 if name == "y" else super().read_column(name)

    def field_names(self) -> frozenset[str]:
        return frozenset({"n", "y", "image"})


class OwnStream(kdp.IterPipe):  # declares nothing
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def samples(self) -> Iterator[kdp.Sample]:
        for index in range(self.size):
            yield kdp.Sample({"n": index, "y": index % 3, "image": index}, key=f"number {index}", index=index)


@kdp.functional_pipe("own_reverse", flavour="map")
class OwnPlan(kdp.MapPipe):
    """Reverse the order (functional name: ``own_reverse``)."""

    traits = kdp.Traits(role="plan")

    def __init__(self, source_datapipe: kdp.MapPipe) -> None:
        self.source = source_datapipe

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, index: int) -> kdp.Sample:
        return self.source.fetch(len(self) - 1 - index)

    def column(self, name: str) -> NDArray[Any]:
        return self.source.column(name)[::-1]


@kdp.functional_pipe("own_choice", flavour="map")
class OwnChoice(kdp.PlanPipe):
    """Choose half of the samples anew in each epoch (functional name: ``own_choice``)."""

    goes_by = "number"

    def __init__(self, source_datapipe: kdp.MapPipe, *, seed: int) -> None:
        super().__init__(source_datapipe, redraws=True)
        self.seed = seed

    def plan(self, epoch: int) -> NDArray[Any]:
        size = len(self.source)
        return np.random.default_rng((self.seed, epoch)).permutation(size)[: size // 2]


class OwnJoin(kdp.PlanPipe):
    goes_by = "number"

    def __init__(self, one: kdp.MapPipe, other: kdp.MapPipe) -> None:
        super().__init__(one, other)

    def plan(self, epoch: int) -> Any:
        places = np.arange(2 * min(map(len, self.sources)))
        return places % 2, places // 2


@kdp.sample_pipe("own_shift", changes="n", reads="n")
def own_shift(sample: Any, *, by: int) -> Any:
    sample["n"] = sample["n"] + by
    return sample


@kdp.sample_pipe("own_scale")
class OwnScaler(kdp.Operation):
    def __init__(self, *, by: int) -> None:
        self.by = by
        self.traits = kdp.Traits(needs={"n"}, reads={"n"}, changes={"n"})

    def __call__(self, sample: Any) -> Any:
        sample["n"] = sample["n"] * self.by
        return sample


@kdp.sample_pipe("own_noise")
class OwnNoise:  # a plain class
    traits = kdp.Traits(reads={"n"}, changes={"n"})

    def __init__(self, *, strength: float) -> None:
        self.strength = strength

    def __call__(self, sample: Any, rng: np.random.Generator, ctx: dict[str, Any]) -> Any:
        ctx["own_noise"] = self.strength * rng.random()
        sample["n"] = sample["n"] + ctx["own_noise"]
        return sample


@kdp.functional_pipe("own_mix", flavour="iter")
class OwnBatches(kdp.BatchPipe):
    """Shuffle each batch (functional name: ``own_mix``)."""

    def __init__(self, source_datapipe: Any, *, largest: float = 1.0) -> None:
        super().__init__(source_datapipe)
        self.largest = largest

    def process(self, batch: Any, rng: np.random.Generator) -> Any:
        return [(item, self.largest * rng.random()) for item in batch]


def indexed() -> Any:
    source = OwnSource(SIZE).own_shift(by=1).own_scale(by=2).own_reverse().record_ctx().own_noise(strength=0.5)  # type: ignore[attr-defined]
    return source.select("n key", return_ctx=True).deal(batch_size=5, shuffle=True, seed=3).own_mix().own_mix()


def stream() -> Any:
    source = OwnStream(SIZE).own_shift(by=1).own_scale(by=2).record_ctx().own_noise(strength=0.5)  # type: ignore[attr-defined]
    return source.select("n key", return_ctx=True).deal(batch_size=5, seed=3).own_mix().own_mix()


def planned() -> Any:
    """A chain of plan pipes over two sources, one of which chooses half of its samples in each epoch."""
    one = OwnSource(SIZE).own_choice(seed=1).own_shift(by=1)  # type: ignore[attr-defined]
    joined: Any = OwnJoin(one, OwnSource(SIZE).own_scale(by=2)[: SIZE // 2])  # type: ignore[attr-defined]
    source = joined.record_ctx().own_noise(strength=0.5).select("n key", return_ctx=True)
    return source.deal(batch_size=5, shuffle=True, seed=3).own_mix().own_mix()


CHAINS = pytest.mark.parametrize("make", [indexed, planned, stream])
SOURCES = {
    indexed: {"OwnSource": "source", "own_reverse": "plan"},
    planned: {"OwnSource": "source", "own_choice": "plan", "OwnJoin": "plan"},
    stream: {"OwnStream": "source"},
}
SERVICES: list[dict[str, Any]] = [{"num_workers": 2}, {"reading_service": kdp.ThreadReadingService(2)}]


def epochs(chain: Any, **how: Any) -> list[list[Any]]:
    with kdp.Loader(chain, **how) as loader:
        return [list(loader) for _ in range(2)]


# Batches, states and resuming


@CHAINS
def test_batches_do_not_depend_on_workers(make: Callable[[], Any]) -> None:
    expected = epochs(make())
    drawn = [number for epoch in expected for batch in epoch for (_, one), other in batch for number in (one, other)]
    assert len(set(drawn)) == 4 * SIZE  # two pipes, two epochs
    for how in SERVICES:
        assert epochs(make(), **how) == expected


@CHAINS
def test_an_epoch_resumes_after_each_batch(make: Callable[[], Any]) -> None:
    whole = epochs(make())[0]
    for number in range(1, len(whole)):
        with kdp.Loader(make()) as loader:
            batches = iter(loader)
            first = [next(batches) for _ in range(number)]
            state = loader.state_dict()
        with kdp.Loader(make(), num_workers=2) as loader:
            loader.load_state_dict(state)
            assert first + list(loader) == whole


def test_a_state_of_another_chain_is_an_error() -> None:
    def dealt(source: Any, largest: float = 1.0) -> Any:
        return source.select("n").deal(batch_size=5).own_mix(largest=largest)

    source = OwnSource(SIZE)
    with kdp.Loader(dealt(source.own_scale(by=2))) as loader:  # type: ignore[attr-defined]
        next(iter(loader))
        state = loader.state_dict()
    others = [
        dealt(source.own_scale(by=3)),  # type: ignore[attr-defined]
        dealt(source.own_shift(by=2)),  # type: ignore[attr-defined]
        dealt(OwnSource(SIZE + 1).own_scale(by=2)),  # type: ignore[attr-defined]
        dealt(source.own_reverse().own_scale(by=2)),  # type: ignore[attr-defined]
        dealt(source.own_scale(by=2), largest=2.0),  # type: ignore[attr-defined]
    ]
    for other in others:
        with kdp.Loader(other) as loader, pytest.raises(ValueError, match="The state does not fit the chain"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("make", [indexed, stream])  # the two sources of `planned` have equal keys
def test_samples_are_replayed(make: Callable[[], Any]) -> None:
    for batch in epochs(make())[0]:
        for (((n, key), ctx), _), _ in batch:
            assert kdp.replay(key, ctx, Chain.of(make()).deal.pipe.source) == ((n, key), ctx)  # type: ignore[union-attr]


def test_pipes_of_local_classes_are_pickled_and_run_in_workers() -> None:
    class Local(OwnBatches):
        def process(self, batch: Any, rng: np.random.Generator) -> Any:
            return len(batch)

    chain = Local(OwnSource(SIZE).select("n").deal(batch_size=5))
    assert epochs(chain, num_workers=2) == [[5, 5, 2]] * 2
    assert list(pickle.loads(pickle.dumps(indexed()))) == epochs(indexed())[0]


# Caches


def image_of(n: int) -> NDArray[np.int64]:
    return np.full((4, 4), n)


image_of.is_random = False  # type: ignore[attr-defined]


def hits(folder: Path, chain: Any) -> int:
    """Return how many images of a chain are in the cache already."""
    cached = chain.cache_on_disk(folder)
    for sample in cached:
        sample["image"]
    return int(cached.stats().hits)


def images(source: Any) -> Any:
    return source.transform("image", image_of)  # which is only called when the image is read


def test_a_cache_after_own_sources_finds_its_entries_again(tmp_path: Path) -> None:
    assert hits(tmp_path / "map", images(OwnSource(SIZE))) == 0
    assert hits(tmp_path / "map", images(OwnSource(SIZE))) == SIZE
    assert hits(tmp_path / "map", images(OwnSource(SIZE).own_reverse())) == SIZE  # type: ignore[attr-defined]
    assert hits(tmp_path / "map", images(OwnSource(SIZE).own_reverse()[:5])) == 5  # type: ignore[attr-defined]
    assert hits(tmp_path / "map", images(OwnSource(SIZE - 1))) == 0, "another argument of the source"
    assert hits(tmp_path / "iter", images(OwnStream(SIZE))) == 0
    assert hits(tmp_path / "iter", images(OwnStream(SIZE))) == SIZE


def test_a_cache_after_own_work_notices_arguments_and_code(tmp_path: Path) -> None:
    def scaler(sign: int) -> Any:
        class Scaler(kdp.Operation):
            traits = kdp.Traits(reads=frozenset({"n"}), changes=frozenset({"n"}))
            if sign > 0:

                def __call__(self, sample: Any) -> Any:
                    sample["n"] = sample["n"] * 2
                    return sample

            else:

                def __call__(self, sample: Any) -> Any:
                    sample["n"] = sample["n"] * -2
                    return sample

        return Scaler

    source: Any = OwnSource(SIZE)
    for operate in (lambda by: source.own_shift(by=by), lambda by: source.own_scale(by=by)):
        assert hits(tmp_path, images(operate(2))) == 0
        assert hits(tmp_path, images(operate(2))) == SIZE
        assert hits(tmp_path, images(operate(3))) == 0
    for sign in (1, -1):
        kdp.sample_pipe("own_code")(scaler(sign))
        kdp.sample_pipe("own_code")(scaler(sign))  # as a notebook does
        assert hits(tmp_path, images(source.own_code())) == 0
        assert hits(tmp_path, images(source.own_code())) == SIZE


def test_a_cache_depends_on_labels_only_if_work_reads_them(tmp_path: Path) -> None:
    source: Any = OwnSource(SIZE)
    mapped = [source.map_classes({0: 0, 1: 1, 2: 2}), source.map_classes({0: 2, 1: 0, 2: 1})]
    assert [hits(tmp_path, images(one.own_shift(by=1))) for one in mapped] == [0, SIZE]

    @kdp.sample_pipe("own_labelled")
    def own_labelled(sample: Any) -> Any:
        sample["image"] = 10 * sample["image"] + sample["y"]
        return sample

    assert [hits(tmp_path, images(one.own_labelled())) for one in mapped] == [0, 0]
    assert [hits(tmp_path, images(one.own_labelled())) for one in mapped] == [SIZE, SIZE]


def test_a_cache_depends_on_a_plan_only_if_it_changes_fields(tmp_path: Path) -> None:
    class Renumbering(OwnPlan):
        traits = replace(OwnPlan.traits, changes=frozenset({"image"}))

        def __init__(self, source_datapipe: Any, *, by: int) -> None:
            super().__init__(source_datapipe)
            self.by = by

        def fetch(self, index: int) -> kdp.Sample:
            sample = super().fetch(index)
            sample["image"] = sample["image"] + self.by
            return sample

    source = OwnSource(SIZE)
    assert [hits(tmp_path, images(one)) for one in (source, OwnPlan(source))] == [0, SIZE]
    found = [hits(tmp_path, images(Renumbering(source, by=by))) for by in (1, 1, 2)]
    assert found == [0, SIZE, 0]


def test_a_cache_after_a_join_knows_the_source_of_a_sample(tmp_path: Path) -> None:
    shifted = OwnSource(SIZE).own_shift(by=1)  # type: ignore[attr-defined]
    assert hits(tmp_path, images(OwnSource(SIZE))) == 0
    assert hits(tmp_path, images(OwnJoin(OwnSource(SIZE), shifted))) == SIZE
    assert hits(tmp_path, images(OwnJoin(OwnSource(SIZE), shifted))) == 2 * SIZE


def test_a_cache_rejects_own_random_work() -> None:
    source: Any = OwnSource(SIZE)
    with pytest.raises(kdp.ChainError, match="own_noise"):
        source.own_noise(strength=1.0).cache_in_memory()


# Fields, columns and labels


def test_declared_fields_keep_columns_and_check_needs() -> None:
    source: Any = OwnSource(SIZE)
    shifted = source.own_shift(by=1)
    assert shifted.field_names() == {"n", "y", "image"}
    shifted.source.fetch = None  # labels need no samples
    assert shifted.filter_classes(valid=[1]).column("y").tolist() == [1] * 4
    with pytest.raises(kdp.FieldError, match="'n'"):
        source.rename_fields(number="n").own_scale(by=2)


def test_an_own_plan_has_the_columns_of_its_source() -> None:
    chosen: Any = OwnChoice(OwnSource(SIZE), seed=1)
    assert len(chosen) == SIZE // 2
    assert chosen.field_names() == {"n", "y", "image"}
    assert chosen.column("y").tolist() == [sample["y"] for sample in chosen]
    assert Chain.of(OwnJoin(chosen, chosen)).end.is_join


def test_names_of_fields_are_any_set() -> None:
    assert kdp.Traits(changes={"x"}) == kdp.Traits(changes=frozenset({"x"}))
    assert kdp.Traits(role="plan") == kdp.Traits(role="plan", reads=frozenset(), changes=frozenset())
    assert kdp.Traits().changes is None


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"changes": "x"}, TypeError, r"`changes` must be a set of names of fields, like \{\"x\"\}, but is 'x'"),
        ({"reads": ["x"]}, TypeError, "`reads` must be a set"),
        ({"role": "sauce"}, ValueError, "`role` must be one of 'source', .*, but is 'sauce'"),
        ({"gives": "tuples"}, ValueError, "`gives` must be one of"),
    ],
)
def test_traits_that_make_no_sense_are_errors(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kdp.Traits(**given)


def test_a_source_that_declares_nothing_is_a_source() -> None:
    first, *others = Chain.of(stream())
    assert first.traits == Traits(role="source")
    assert {node.traits.role for node in others} == {"work", "deal", "batch"}


# What is wrong with a definition


def test_fields_of_a_class_belong_into_its_traits() -> None:
    with pytest.raises(TypeError, match="`changes` and `reads` are for functions: the class OwnNoise"):
        kdp.sample_pipe("own_other", changes="x")(OwnNoise)


def test_a_work_pipe_cannot_declare_another_role() -> None:
    @kdp.sample_pipe("own_planned")
    class Planned(kdp.Operation):
        traits = kdp.Traits(role="plan")

    with pytest.raises(ValueError, match=r"The traits of `\.own_planned\(\)` must have role \"work\".*'plan'"):
        OwnSource(SIZE).own_planned()  # type: ignore[attr-defined]


@pytest.mark.parametrize("give", [lambda dealt: dealt.source, lambda dealt: dealt.batch(2)])
def test_a_batch_pipe_needs_the_batches_of_deal(give: Callable[[Any], Any]) -> None:
    with pytest.raises(kdp.ChainError, match="`own_mix` takes the batches of `deal`"):
        OwnBatches(give(OwnStream(SIZE).select("n").deal(batch_size=5)))


# What looks at chains


@CHAINS
def test_the_html_view_shows_the_stage_of_each_pipe(make: Callable[[], Any]) -> None:
    text = re.sub(r"<[^>]*>", " ", make()._repr_html_())
    stages, stage = {}, ""
    for shown, name in re.findall(r"(?:(source|plan|work|cache|delivery)\s+)?(\w+)\s*\(", text):
        stages[name] = stage = shown or stage  # the first pipe of a stage names it
    expected = {"own_shift": "work", "own_scale": "work", "own_noise": "work", "own_mix": "delivery"}
    expected |= SOURCES[make]
    assert expected.items() <= stages.items()


@CHAINS
def test_the_profile_has_each_pipe_by_its_kind(make: Callable[[], Any]) -> None:
    kinds = {pipe.pipe: pipe.kind for pipe in kdp.profile(make(), seconds=0.05).pipes}
    expected = {"own_shift": "transforms", "own_scale": "transforms", "own_noise": "transforms", "own_mix": "transfer"}
    expected |= {name: "storage" if stage == "source" else stage for name, stage in SOURCES[make].items()}
    assert expected.items() <= kinds.items()


@CHAINS
def test_the_doctor_finds_nothing_in_chains_of_own_pipes(make: Callable[[], Any]) -> None:
    assert not kdp.doctor(make(), measure=False).findings


def test_the_doctor_finds_mistakes_with_own_pipes() -> None:
    source: Any = OwnSource(SIZE)
    unrecorded = source.own_noise(strength=1.0).select("n", return_ctx=True).deal(batch_size=5)
    [finding] = [one for one in kdp.doctor(unrecorded, measure=False).findings if one.code == "unrecorded-ctx"]
    assert "`.own_noise()`" in finding.what


@needs_torchdata
def test_a_pipe_of_the_other_flavour_is_named() -> None:
    with pytest.raises(AttributeError, match=r"`.bucketbatch\(\)` is a pipe of streams: put it"):
        kdp.from_dataset(["a"], "x").bucketbatch  # noqa: B018


class Forgetful(kdp.IterPipe):  # does not call `super().__init__()`
    def __init__(self, size: int) -> None:
        self.size = size

    def samples(self) -> Iterator[kdp.Sample]:
        yield from (kdp.Sample({"n": index}, key=f"number {index}", index=index) for index in range(self.size))


def test_a_stream_need_not_call_the_init_of_its_base_class() -> None:
    chain = Forgetful(3).select("n", bare=True).deal(batch_size=2)
    assert [list(chain), list(chain)] == [[[0, 1], [2]]] * 2
    assert list(pickle.loads(pickle.dumps(chain))) == [[0, 1], [2]]
    with kdp.Loader(chain, num_workers=1) as loader:
        assert list(loader) == [[0, 1], [2]]


class ForgetfulPlan(kdp.PlanPipe):
    def __init__(self, source_datapipe: kdp.MapPipe) -> None:
        self.kept = source_datapipe

    def plan(self, epoch: int) -> list[int]:
        return [0]


def test_a_plan_pipe_without_the_init_of_its_base_says_so() -> None:
    with pytest.raises(AttributeError, match=r"Call `super\(\).__init__\(\.\.\.\)` in `ForgetfulPlan.__init__`"):
        len(ForgetfulPlan(OwnSource(3)))


def test_a_batch_pipe_without_a_generator_fails_when_defined() -> None:
    with pytest.raises(TypeError, match=r"`Late.process` must take a batch and a random generator"):

        class Late(kdp.BatchPipe):
            def process(self, batch: Any) -> Any:  # type: ignore[override]
                return batch


class Keyless(kdp.MapPipe):
    def __len__(self) -> int:
        return 3

    def fetch(self, index: int) -> kdp.Sample:
        return kdp.Sample({"n": index}, index=index)


def test_a_cache_rejects_samples_without_keys() -> None:
    cached = Keyless().transform("n", lambda n: n + 1).cache_in_memory()
    with pytest.raises(kdp.ChainError, match="identifies samples by their keys, but sample 1 has none"):
        cached[1]["n"]


def test_a_quarantine_rejects_samples_without_keys(tmp_path: Path) -> None:
    chain = Keyless().transform("n", lambda n: 1 // n).on_error("quarantine", path=tmp_path / "bad.jsonl")
    with pytest.raises(kdp.ChainError, match="a sample that failed has none: ZeroDivisionError"):
        next(iter(chain.select("n").deal(batch_size=3)))


@kdp.sample_pipe("own_failing")
def failing(sample: kdp.Sample) -> kdp.Sample:
    raise ValueError("bad")


@pytest.mark.parametrize("source", [OwnSource(3), OwnStream(3)])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_work_pipe_names_the_sample(source: Any, num_workers: int) -> None:
    chain = source.own_failing().select("n").deal(batch_size=2)
    with kdp.Loader(chain, num_workers=num_workers) as loader, pytest.raises(ValueError, match="bad") as caught:
        next(iter(loader))
    assert "kdpipes: while applying 'own_failing' to sample 'number 0' (ordinal 0)" in caught.value.__notes__


class Sized(kdp.PlanPipe):
    """Chooses another number of samples in each epoch."""

    goes_by = "number"

    def __init__(self, source: Any, sizes: tuple[int, int]) -> None:
        super().__init__(source, redraws=True)
        self.sizes = sizes

    def plan(self, epoch: int) -> Any:
        return np.arange(self.sizes[min(epoch, 1)])


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_a_plan_that_changes_its_length_is_an_error(sizes: tuple[int, int]) -> None:
    pipe = Sized(kdp.from_dataset([(n, n) for n in range(4)]), sizes).select("x").deal(batch_size=2)
    with kdp.Loader(pipe) as loader:
        assert sum(map(len, loader)) == sizes[0]
        with pytest.raises(
            ValueError, match=f"return {sizes[0]} positions in every epoch.*returned {sizes[1]} in epoch 1"
        ):
            list(loader)


def planned(made: Any) -> Any:
    class Plan(kdp.PlanPipe):
        def plan(self, epoch: int) -> Any:
            return made

    return Plan(kdp.from_dataset([(n, n) for n in range(4)]))


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (None, "returned None: a `return` may be missing"),
        ((n for n in range(3)), "returned a generator: make it a list"),
        ((np.arange(2),), "a pair of arrays, but returned a tuple of 1"),
    ],
    ids=["none", "generator", "tuple"],
)
def test_what_is_no_plan_is_rejected_in_words(made: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        len(planned(made))


def test_wrong_definitions_are_rejected_in_words() -> None:
    with pytest.raises(ValueError, match="`goes_by` must be one of 'number', 'labels', 'values', but is 'lables'"):
        type("Wrong", (kdp.PlanPipe,), {"goes_by": "lables"})
    with pytest.raises(TypeError, match=r"`Wrong\.fetch` must take a position, .* but is `fetch\(self, index, rng\)`"):
        type("Wrong", (kdp.MapPipe,), {"fetch": lambda self, index, rng: None})


class Dicts(kdp.MapPipe):
    """A source whose samples are dictionaries by mistake."""

    traits = kdp.Traits(role="source")

    def __len__(self) -> int:
        return 2

    def fetch(self, index: int) -> Any:
        return {"x": index}


def test_a_source_that_returns_no_samples_is_named() -> None:
    with pytest.raises(TypeError, match=r"`fetch` of `Dicts` must return a `kdp\.Sample`, but returned dict"):
        Dicts().transform("x", str)[0]


@pytest.mark.parametrize("name", ["", "two words", "x-y", "class"])
def test_a_name_that_cannot_be_called_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="`name` must be a valid name of a method"):
        kdp.sample_pipe(name)(lambda sample: sample)


@pytest.mark.parametrize("name", ["column", "field_names", "traits"])
def test_the_name_of_a_method_of_pipes_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`\.{name}\(\)` is a method of kdpipes' own pipes\. Rename"):
        kdp.functional_pipe(name, flavour="map")(type("Own", (kdp.PlanPipe,), {}))


def test_sample_pipe_needs_its_name() -> None:
    with pytest.raises(TypeError, match=r'`name` must be the functional name.* Write `@kdp\.sample_pipe\("name"\)`'):
        kdp.sample_pipe(lambda sample: sample)  # type: ignore[arg-type]


def test_sample_pipe_takes_fields_as_a_set_too() -> None:
    kdp.sample_pipe("own_set_of_fields", changes={"x"}, reads={"x"})(_raised)
    pipe: Any = kdp.from_dataset([(n, n) for n in range(4)])
    assert pipe.own_set_of_fields().operation.traits.changes == {"x"}


def _raised(sample: kdp.Sample) -> kdp.Sample:
    sample["x"] = sample["x"] + 1
    return sample


@pytest.mark.parametrize("freezes", [False, True])
def test_a_cache_rejects_draws_that_it_cannot_freeze(freezes: bool) -> None:
    @kdp.sample_pipe("own_eager_draws", changes="x", reads="x")
    def own_eager_draws(sample: kdp.Sample, rng: np.random.Generator) -> kdp.Sample:
        sample["x"] = sample["x"] + int(rng.integers(1000))
        return sample

    pipe: Any = kdp.from_dataset([(n, n) for n in range(4)])
    with pytest.raises(kdp.ChainError, match=r"`own_eager_draws` draws random numbers when a sample passes.*transform"):
        pipe.own_eager_draws().add_field("z", len).cache_in_memory(freeze_randomness=freezes)


def test_a_frozen_cache_notices_draws_from_global_generators() -> None:
    @kdp.sample_pipe("own_global_draws", changes="x", reads="x")
    def own_global_draws(sample: kdp.Sample) -> kdp.Sample:
        sample["x"] = sample["x"] + random.randrange(1000)
        return sample

    pipe: Any = kdp.from_dataset([(n, n) for n in range(64)])
    cached = pipe.own_global_draws().add_field("z", lambda sample: sample["x"]).cache_in_memory(freeze_randomness=True)
    with pytest.raises(kdp.ChainError, match=r"`own_global_draws` draws random numbers when a sample passes"):
        list(cached.select("x z").deal(batch_size=32))


class Silent(kdp.BatchPipe):
    """Forgets to return the batch."""

    def process(self, batch: Any, rng: np.random.Generator) -> Any:
        batch[0]


def test_a_batch_pipe_that_returns_nothing_is_an_error() -> None:
    pipe = Silent(kdp.from_dataset([(n, n) for n in range(4)]).select("x").deal(batch_size=2))
    with pytest.raises(TypeError, match="`process` of `Silent` must return the item for a batch, but returned None"):
        list(pipe)
