"""What `import kdpipes` gives: names, docstrings, methods, and nothing that a user did not ask for."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.core.registry import registered
from kdpipes.core.stock import NAMES_OF_TORCHDATA
from tests.torchdata_parts import needs_torchdata

OURS = {
    place: definition for place, definition in registered().items() if definition.__module__.split(".")[0] == "kdpipes"
}

ORIGINALS = """
import json, warnings
warnings.simplefilter("ignore")
import torchdata.dataloader2, torchdata.datapipes
from torch.utils.data import IterDataPipe, MapDataPipe
bases = (MapDataPipe, IterDataPipe)
before = [(base, dict(base.functions), set(dir(base))) for base in bases]
import kdpipes
print(json.dumps({
    "replaced": [name for base, old, _ in before for name in old if base.functions[name] is not old[name]],
    "hidden": [name for base, old, names in before for name in set(base.functions) - set(old) if name in names],
    "added": [sorted(set(base.functions) - set(old)) for base, old, _ in before],
}))
"""

QUIET = """
import sys
before = set(sys.modules)
import kdpipes
heavy = {"matplotlib", "IPython", "sklearn", "skimage", "pandas", "scipy", "torchvision", "pytest", "redis"}
print(sorted(heavy & (set(sys.modules) - before)))
"""


IMPORTED = """
import gc, sys
import torch, torch.utils.data
before = set(sys.modules)
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
import kdpipes
found = sorted(set(sys.modules) - before)
print({"modules": found, "was_collected": 2 in collections, "collects": gc.isenabled()})
"""
ON_USE = [  # what few chains need
    "PIL.ImageDraw",
    "html",
    "jinja2",
    "kdpipes.cache.file_store",
    "kdpipes.cache.lmdb_store",
    "kdpipes.cache.warm_up",
    "kdpipes.loader.loader",
    "kdpipes.loader.processes",
    "kdpipes.look.batch",
    "kdpipes.look.doctor",
    "kdpipes.look.pictures",
    "kdpipes.storage.tar",
    "kdpipes.write.copy",
    "kdpipes.write.jobs",
    "lmdb",
    "obstore",
    "torchdata",
    "webdataset",
]


def python(*arguments: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_all_is_sorted_and_complete() -> None:
    assert kdp.__all__ == sorted(set(kdp.__all__))
    bound = {
        name: value for name, value in vars(kdp).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(bound) <= set(kdp.__all__)


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    for name in kdp.__all__:
        public = getattr(kdp, name)
        inherited = {base.__doc__ for base in public.__mro__[1:]} if isinstance(public, type) else set()
        assert public.__doc__, name
        assert public.__doc__ not in inherited, name
        assert public.__doc__[0].isupper(), name
        assert public.__doc__.split("\n\n")[0].rstrip().endswith((".", ":", "`).")), name


def test_every_pipe_names_itself_in_its_first_paragraph() -> None:
    assert len(OURS) >= 24
    for (name, _), pipe in OURS.items():
        paragraph = " ".join(inspect.getdoc(pipe).split("\n\n")[0].split())
        assert paragraph.endswith(f"(functional name: ``{name}``)."), (name, paragraph)


def test_the_first_parameter_of_every_pipe_is_the_source() -> None:
    for (name, flavour), pipe in OURS.items():
        first = next(iter(inspect.signature(pipe).parameters.values()))
        assert first.name == "source_datapipe", name
        assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        documented = inspect.getdoc(pipe) or ""
        missing = [
            parameter
            for parameter in list(inspect.signature(pipe).parameters)[1:]
            if f"\n    {parameter}: " not in documented
        ]
        assert not missing, (name, flavour, missing)


HUGGING_FACE = """
import json, sys
from kdpipes.core.stock import load_torchdata
HuggingFaceHubReader = load_torchdata().HuggingFaceHubReader
before = "datasets" in sys.modules
import datasets
datasets.load_dataset = lambda path, streaming: [path, [{"n": 1}, {"n": 2}]]
print(json.dumps([before, *HuggingFaceHubReader("csv")]))
"""


def test_pipe_classes_carry_their_flavour_and_are_not_public() -> None:
    classes = {pipe for pipe in OURS.values() if isinstance(pipe, type)}
    assert len(classes) >= 12
    for pipe in classes:
        assert pipe.__name__ not in kdp.__all__, "users call the method"
        assert pipe.__name__.endswith(("MapDataPipe", "IterDataPipe"))


@needs_torchdata
def test_no_name_of_torch_or_torchdata_is_replaced_or_hidden() -> None:
    found: dict[str, Any] = json.loads(python("-c", ORIGINALS)[0])
    assert found["replaced"] == found["hidden"] == []
    added_map, added_iter = found["added"]
    assert {(name, "map") for name in added_map} | {(name, "iter") for name in added_iter} == set(OURS)


def test_importing_prints_no_warning_and_imports_nothing_heavy() -> None:
    assert python("-W", "error", "-c", QUIET) == ("[]\n", "")


def test_importing_is_quick() -> None:
    out, _ = python("-c", IMPORTED)
    found = ast.literal_eval(out)
    assert not set(ON_USE) & set(found["modules"])
    assert not found["was_collected"]
    assert found["collects"]


def test_importing_leaves_the_garbage_collector_off_if_it_was() -> None:
    assert python("-c", "import gc; gc.disable(); import kdpipes; print(gc.isenabled())") == ("False\n", "")


@needs_torchdata
def test_torchdatas_hugging_face_reader_imports_datasets_on_use() -> None:
    out, _ = python("-c", HUGGING_FACE)
    assert json.loads(out) == [False, "csv", [{"n": 1}, {"n": 2}]]


def test_a_misspelt_name_is_an_error_with_the_closest() -> None:
    with pytest.raises(AttributeError, match=r"`kdpipes` has no attribute 'open_shard'\. Did you mean 'open_shards'\?"):
        kdp.open_shard  # noqa: B018
    assert not hasattr(kdp, "nothing_like_it")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: kdp.open_shards("a.tar", storage_option={}),
            r"`kdp\.open_shards`: got an unexpected .*`kdp\.open_shards\(urls, ",
        ),
        (lambda: kdp.image_folder("a", class_name=["b"]), r"argument 'class_name'\. Did you mean 'class_names'\?"),
        (lambda: kdp.from_ids(), r"`kdp\.from_ids`: missing a required argument: 'ids'"),
        (lambda: kdp.stream_shards("a.tar", nonsense=1), r"`kdp\.stream_shards`: .*'nonsense'"),
        (lambda: kdp.Loader("photos"), r"A chain begins with a source, like `kdp\.image_folder\(path\)`"),
        (lambda: kdp.Loader([(1, 0)]), r"`kdp\.from_dataset\(dataset\)` begins a chain"),
        (lambda: kdp.from_dataset([1], "x").deal(1, drop_last=True), r"'drop_last'\. Write `uneven=\"drop\"`\."),
        (lambda: kdp.from_dataset([1], "x").shuffle(buffer_size=9), r"`\.shuffle`: .* with `\.deal\(shuffle=True\)`"),
        (
            lambda: kdp.from_dataset([1], "x").deal(1, batchsize=2),
            r"'batchsize'\. Did you mean 'batch_size'\? The call is",
        ),
        (lambda: kdp.from_dataset([1], "x").select(["x", "y"]), r"Write `\.select\('x y'\)`"),
        (lambda: kdp.from_dataset([1], "x").deal(1, num_workers=2), r"`kdp\.Loader\(chain, num_workers=\.\.\.\)`"),
    ],
)
def test_errors_about_arguments_are_in_the_words_of_the_call(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_importing_it_leaves_out_what_few_chains_need() -> None:
    program = "import sys, kdpipes; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    unwanted = {"torchdata", "webdataset", "obstore", "s3fs", "botocore", "pyarrow", "datasets", "redis", "jinja2"}
    assert not unwanted & set(loaded)
    assert not [name for name in loaded if name.startswith(("kdpipes.look.doctor", "kdpipes.loader.processes"))]


@needs_torchdata
def test_torchdatas_pipe_names_are_those_it_registers() -> None:
    program = """
import json
from torch.utils.data import IterDataPipe, MapDataPipe
import torch.utils.data.datapipes.iter, torch.utils.data.datapipes.map
before = {*IterDataPipe.functions, *MapDataPipe.functions}
import torchdata.datapipes
print(json.dumps(sorted({*IterDataPipe.functions, *MapDataPipe.functions} - before)))
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert set(json.loads(run.stdout)) == NAMES_OF_TORCHDATA


@needs_torchdata
def test_torchdata_is_imported_when_a_pipe_of_it_is_used() -> None:
    program = """
import sys, threading
import kdpipes as kdp
chain = kdp.from_dataset(list(range(8)), "x").select("x").deal(batch_size=2)
assert list(kdp.Loader(chain)) and "torchdata" not in sys.modules
failed = []

def build():
    try:
        kdp.from_dataset(list(range(8)), "x").select("x").deal(batch_size=2).prefetch(2)
    except Exception as error:
        failed.append(repr(error))

threads = [threading.Thread(target=build) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
assert "torchdata" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["write_shards", "write_records", "split", "Loader", "profile", "doctor"])
def test_functions_that_are_called_like_pipes_say_so(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"It is a function: `kdp\.{name}\(chain, \.\.\.\)`"):
        getattr(kdp.from_dataset([1], "x"), name)
    assert callable(getattr(kdp, name))


@pytest.mark.parametrize(("write", "options"), [(kdp.write_shards, {"max_samples": 1}), (kdp.write_records, {})])
def test_writers_say_where_select_belongs(write: Any, options: Any, tmp_path: Path) -> None:
    chain = kdp.from_dataset([(1, 0)]).select("x y")
    with pytest.raises(
        kdp.ChainError, match=r"`kdp\.write_\w+` takes samples, .* Pass it the chain before `\.select\(\)`"
    ):
        write(chain, str(tmp_path / "a-%06d.tar"), **options)


@pytest.mark.parametrize(
    ("urls", "hint"),
    [
        ("shards", r'Try "shards/%06d\.tar"'),
        ("a-{000..127}.tar", "Braces name shards to read"),
        ("a-%06d.tar.gz", "samples in compressed ones cannot be read by position"),
    ],
)
def test_writers_say_how_to_name_shards(urls: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        kdp.write_shards(kdp.from_dataset([(1, 0)]), urls, max_samples=1)
