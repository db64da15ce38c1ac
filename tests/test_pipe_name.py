"""What pipes are called by in errors: as they were written."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.pickling import dumps
from kdpipes.core.registry import called_directly, pipe_name, registered, short_name, shown_name


def photos() -> Any:
    return kdp.from_dataset([(1, 0), (2, 1)])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (photos, "from_dataset"),
        (lambda: photos().decode_images("x"), "decode_images"),
        (lambda: photos().permute(0), "permute"),
        (lambda: photos()[:1], "subset"),
        (lambda: photos().deal(1), "deal"),
        (lambda: IterableWrapper([1]).to_samples(fields="x"), "to_samples"),
        (lambda: photos().deal(1).collate_samples().to_device("cpu"), "to_device"),
    ],
)
def test_a_missing_method_is_an_error_that_names_the_pipe(make: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"^`{name}` has no pipe or attribute 'selct'\.") as caught:
        make().selct("x y")
    assert str(caught.value).endswith(" Did you mean 'select'?")


def test_a_method_of_a_pipe_upstream_is_told_where_it_is() -> None:
    chain = photos().cache_in_memory().select("x").deal(1)
    told = r"^`deal` has no pipe .* 'warm_up'\. `cache_in_memory` upstream has it: keep"
    with pytest.raises(AttributeError, match=told) as caught:
        chain.warm_up()
    assert not hasattr(chain, "warm_up")
    sent = pickle.loads(pickle.dumps(caught.value))
    assert str(sent) == "`deal` has no pipe or attribute 'warm_up'.", "what is sent from a worker holds no chain"
    lonely = photos().select("x")
    with pytest.raises(AttributeError, match=r"'warm_up'\.$"):
        lonely.warm_up()


def test_users_pipes_are_named_by_class_stock_pipes_by_torch() -> None:
    class BirdReaderMapDataPipe(kdp.MapPipe):
        def __init__(self) -> None:
            self._name = "of the data"

    assert pipe_name(BirdReaderMapDataPipe()) == "BirdReader"
    assert pipe_name(IterableWrapper([1])) == "IterableWrapper"
    assert pipe_name(IterableWrapper([1]).map(str)) == "map"
    assert pipe_name(5) == "int", "errors name what is no pipe as well"


def test_what_states_call_each_pipe_is_shown_as_it_is_written() -> None:
    ours = {kind: name for (name, _), kind in registered().items() if isinstance(kind, type)}
    ours = {kind: name for kind, name in ours.items() if kind.__module__.startswith("kdpipes.")}
    assert len(ours) > 20
    for kind, name in {**ours, **called_directly}.items():
        assert shown_name(short_name(kind)) == name
    assert shown_name("BirdReaderMap") == "BirdReaderMap"


def test_states_keep_the_names_of_pipes_that_they_were_saved_by() -> None:
    pipe = photos().permute(0).select("x").deal(batch_size=1)
    with kdp.Loader(pipe) as loader:
        entries = loader.state_dict()["pipes"]
    assert [entry.rpartition(":")[0] for entry in entries] == ["DealerMap", "select", "PermuterMap", "DatasetReaderMap"]


def test_a_class_that_travels_by_value_keeps_its_functional_name() -> None:
    def define() -> type:
        @kdp.functional_pipe("by_value_noise", flavour="iter")
        class Noise(kdp.BatchPipe):
            def process(self, batch: Any, rng: Any) -> Any:
                return float(rng.random())

        return Noise

    chain = define()(photos().select("x").deal(1))
    sent = dumps(chain)
    code = f"import cloudpickle; print(list(cloudpickle.loads({sent!r})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(list(chain))
