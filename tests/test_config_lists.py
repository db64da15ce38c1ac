"""Arguments from configuration libraries: lists and mappings that know their parent count as lists and dictionaries."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import kdpipes as kdp
from kdpipes.core.call_text import shown_value
from kdpipes.core.fingerprint import fingerprint
from kdpipes.demo import write_photo_shards
from kdpipes.storage.decoding import check_columns
from kdpipes.storage.urls import expand_urls


class ConfigList(Sequence[Any]):
    """A list like OmegaConf's: no `list`, and its arguments refer to the configuration that holds it."""

    def __init__(self, content: list[Any], parent: Any) -> None:
        self._content, self._parent = content, parent

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, index: Any) -> Any:
        return self._content[index]


class ConfigDict(Mapping[Any, Any]):
    """A dictionary like OmegaConf's."""

    def __init__(self, content: Any = None, parent: Any = None) -> None:
        self._content, self._parent = content, parent

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, name: Any) -> Any:
        return self._content[name]

    def __iter__(self) -> Any:
        return iter(self._content)


def configured(value: Any) -> Any:
    """Return a list or dictionary, and those in it, as entries of a configuration."""
    parent = ConfigDict()
    made: Any = value
    if isinstance(value, list):
        made = ConfigList([configured(entry) for entry in value], parent)
    elif isinstance(value, dict):
        made = ConfigDict({name: configured(entry) for name, entry in value.items()}, parent)
    parent._content = {"entry": made}
    return made


def pairs() -> Any:
    return kdp.from_dataset([(number, number % 3) for number in range(12)])


def images() -> Any:
    return kdp.from_dataset([(torch.arange(300, dtype=torch.uint8).reshape(3, 10, 10), 0)] * 2)


CHAINS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "filter_classes": ([0, 2], lambda given: pairs().filter_classes(valid=given)),
    "filter_classes of a stream": ([1], lambda given: streamed().filter_classes(invalid=given)),
    "map_classes": ({0: 1, 1: 0, 2: 0}, lambda given: pairs().map_classes(given)),
    "class_names of map_classes": (
        ["a", "b"],
        lambda given: pairs().map_classes({0: 0, 1: 1, 2: 1}, class_names=given),
    ),
    "class_names": (["a", "b", "c"], lambda given: kdp.from_dataset([(0, 2), (1, 0)], class_names=given)),
    "labels": (["b", "a"], lambda given: kdp.from_dataset(["k", "l"], "x", labels=given)),
    "sample_weighted": ([0.5] * 12, lambda given: pairs().sample_weighted(given)),
    "subset": ([3, 1], lambda given: pairs().subset(given)),
    "index": ([3, 1], lambda given: pairs()[given]),
    "filter_samples": (["y"], lambda given: pairs().filter_samples(columns=given, keep=lambda y: y > 0)),
    "weights of mix": ([0.5, 0.5], lambda given: pairs().mix(pairs(), weights=given)),
    "Resize": ([4, 5], lambda given: images().transform("x", kdp.Resize(given))),
    "CenterCrop": ([4, 5], lambda given: images().transform("x", kdp.CenterCrop(given))),
    "RandomResizedCrop": ([0.5, 0.7], lambda given: images().transform("x", kdp.RandomResizedCrop(4, scale=given))),
    "ColorJitter": ([0.5, 0.7], lambda given: images().transform("x", kdp.ColorJitter(brightness=given))),
    "Normalize": (
        [0.5, 0.5, 0.5],
        lambda given: images().transform("x", kdp.ToTensor(), kdp.Normalize(given, given)),
    ),
    "kinds": ({"y": "other"}, lambda given: images().transform("x y", kdp.HorizontalFlip(), kinds=given)),
}


def streamed() -> Any:
    return pairs().to_iter_datapipe().to_samples()


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_the_same_with_configured_arguments(name: str) -> None:
    plain, chain = CHAINS[name]
    made, expected = chain(configured(plain)), chain(plain)
    assert [repr(sample["x"]) for sample in made] == [repr(sample["x"]) for sample in expected]
    assert fingerprint(made) == fingerprint(expected)
    assert len(repr(made)) < 500


def test_views_may_come_from_a_configuration() -> None:
    pipe = images().transform("x", views=configured([[kdp.Resize(4)], [kdp.Resize(5)]]))
    assert [tuple(view.shape) for view in pipe[0]["x"]] == [(3, 4, 4), (3, 5, 5)]


def test_ids_may_come_from_a_configuration() -> None:
    assert [sample["x"] for sample in kdp.from_ids(configured(["k", "l"]), configured([0, 1]), str)] == ["k", "l"]


def test_a_librarys_list_is_shown_as_a_list() -> None:
    assert shown_value(UserList([1, 2])) == "[1, 2]"


def test_shards_may_come_from_a_configuration(tmp_path: Any) -> None:
    urls = expand_urls(write_photo_shards(tmp_path))
    made = kdp.open_shards(configured(urls))
    assert made.column("key").tolist() == kdp.open_shards(urls).column("key").tolist()
    assert next(iter(kdp.stream_shards(configured(urls)))).key == made[0].key
    assert check_columns(configured(["cls", "jpg"])) == ("cls", "jpg")
