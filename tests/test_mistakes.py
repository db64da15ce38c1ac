"""Mistakes that newcomers make: the error says what to write."""

from __future__ import annotations

import io
import tarfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.look import image_grid

ITEMS = [(number, number % 2) for number in range(8)]


def source() -> Any:
    return kdp.from_dataset(ITEMS)


def dealt() -> Any:
    return source().select("x").deal(batch_size=4)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a share without a name": (lambda: source().take_percent(0.5), TypeError, "`to_percent=0.5` takes the first half"),
    "one unnamed argument": (lambda: source().cache_on_disk("a", "b"), TypeError, r"arguments\. Name the argument\."),
    "a function for collate_samples": (
        lambda: source().select("x").deal(batch_size=4).collate_samples(len),
        TypeError,
        r"`\.collate\(function\)`",
    ),
    "filter": (lambda: source().filter(len), AttributeError, r"use `\.filter_samples\(columns=\.\.\., keep="),
    "batch, then deal": (lambda: source().batch(2).deal(batch_size=4), kdp.ChainError, r"Remove `\.batch\(\)`"),
    "a stream in batches, then deal": (
        lambda: IterableWrapper(ITEMS).to_samples(fields="x y").select("x").batch(2).deal(batch_size=4),
        kdp.ChainError,
        r"Remove `\.batch\(\)`",
    ),
    "batch in a loader": (
        lambda: kdp.Loader(source().batch(2)),
        kdp.ChainError,
        r"End it with `\.deal\(batch_size=\.\.\.\)` in place of `\.batch\(\)`",
    ),
    "a DataLoader that shuffles batches": (
        lambda: DataLoader(dealt(), batch_size=None, shuffle=True),  # type: ignore[arg-type]
        ValueError,
        r"use `deal\(shuffle=True\)`",
    ),
    "a stream in split": (
        lambda: kdp.split(IterableWrapper(ITEMS).to_samples(fields="x y"), a=0.5, b=0.5),  # type: ignore[arg-type]
        kdp.ChainError,
        r"`kdp\.open_shards` is indexed\.$",
    ),
    "a field as an attribute": (lambda: source()[0].x, AttributeError, r'Fields are items: `sample\["x"\]`'),
    "another attribute": (lambda: source()[0].z, AttributeError, "has no attribute 'z'.$"),
    "a sample by position": (lambda: source()[0][0], TypeError, r'`\.select\("x y"\)` makes tuples'),
    "pandas' name": (lambda: kdp.from_csv, AttributeError, r"`kdp\.from_table\("),
    "torchvision's name": (
        lambda: kdp.RandAugment,
        AttributeError,
        r"torchvision's transforms work, too: `\.transform",
    ),
    "torchvision's name of a flip": (lambda: kdp.RandomHorizontalFlip, AttributeError, "'HorizontalFlip'.*v2"),
    "a rename in the wrong direction": (
        lambda: source().rename_fields(x="image"),
        kdp.FieldError,
        r'new name first: `\.rename_fields\(new="old"\)`',
    ),
    "an entry of a stream": (
        lambda: list(IterableWrapper([({"width": 1}, 1)]).to_samples(fields="json y").select("json.width")),
        kdp.FieldError,
        r"`\.add_field\('width', lambda sample: sample\['json'\]\['width'\]\)`",
    ),
    "dictionaries without names": (
        lambda: kdp.from_dataset([{"image": 1, "label": 0}]).select("image label"),
        kdp.FieldError,
        r'name their keys: `kdp\.from_dataset\(dataset, "image label"\)`',
    ),
    "names of a rename in a dictionary": (
        lambda: source().rename_fields({"x": "image"}),  # type: ignore[call-arg]
        TypeError,
        r'`\.rename_fields\(new="old"\)`',
    ),
    "a transform without a field": (
        lambda: source().transform(len),  # type: ignore[arg-type]
        TypeError,
        r'`\.transform\("image mask", function\)`',
    ),
    "packing": (lambda: source().deal(pack=True), TypeError, "Write `batching=kdp.packed"),
    "take": (lambda: source().take(3), AttributeError, r"`chain\[:100\]` takes"),
    "folds": (lambda: kdp.folds, AttributeError, r"`kdp\.split\(chain, folds=5\)`"),
    "Scikit-learn's folds": (lambda: kdp.StratifiedKFold, AttributeError, r"`kdp\.split\(chain, folds=5\)`"),
    "torchvision's classes": (lambda: source().classes, AttributeError, r"`chain\.class_names\(\)`"),
    "height, width": (lambda: kdp.Resize(224, 224), TypeError, r"The call is `Resize\(size, \*"),  # type: ignore[call-arg]
    "a batch by position": (lambda: kdp.Loader(dealt())[0], TypeError, r"`next\(iter\(loader\)\)`"),
    "the length of a stream": (
        lambda: len(kdp.stream_shards("a.tar")),
        TypeError,
        r"`kdp\.open_shards` opens shards as an indexed source",
    ),
    "the name of a dataset": (lambda: kdp.from_dataset("cifar10"), TypeError, "Load it first"),
    "samples without labels": (lambda: kdp.from_ids(["a"]).oversample()[0], kdp.FieldError, "pass `labels=`"),
    "a range of shards": (lambda: len(kdp.open_shards("a-{0-3}.tar")), FileNotFoundError, r"\{000\.\.015\}"),
    "buckets": (lambda: source().deal(batch_size=2, bucket=[1, 2]), TypeError, "Write `batching=kdp.by_length"),
    "classes as the first argument of mixup": (
        lambda: list(source().select("x y").deal(batch_size=2).collate_samples().mixup(8, image="x")),
        (ValueError, TypeError),
        "is `alpha`|floats",
    ),
    "encoded images in a grid": (
        lambda: image_grid([b"\xff\xd8\xff"]),
        kdp.DataError,
        r"^The image cannot be read: its",
    ),
    "weights of a mix": (
        lambda: source().mix([source()], weights=[1]),
        ValueError,
        "`weights` must be 2 numbers, one for each source, the first one included",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_what_to_write(name: str) -> None:
    make, kind, match = MISTAKES[name]
    with pytest.raises(kind, match=match):
        make()


@pytest.mark.parametrize("make", [lambda: kdp.HorizontalFlp, lambda: source().oversampel])
def test_a_suggestion_comes_once(make: Callable[[], Any]) -> None:
    with pytest.raises(AttributeError) as caught:
        make()
    assert "".join(traceback.format_exception_only(caught.value)).count("Did you mean") == 1


def test_a_missing_member_says_how_to_leave_it_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.txt", "1.cls", "2.cls"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(kdp.DataError, match=r'`\.on_error\("skip"\)`, before `\.select\(\)` and `\.deal\(\)`'):
        kdp.open_shards(str(tmp_path / "a.tar"))[1]["txt"]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: source().filter_classes(valid=[]), r"filter_classes\(valid=\[\]\)` keeps none of 8 samples"),
        (lambda: kdp.Loader(dealt().map(lambda batch: None)), "may lack its `return`"),
    ],
)
def test_chains_that_make_nothing_warn(make: Callable[[], Any], match: str) -> None:
    with pytest.warns(UserWarning, match=match):
        assert set(make()) <= {None}
