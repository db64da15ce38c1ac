"""What a notebook's user sees: pictures of chains, completion, help, and nothing left behind by an interrupt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.filterwarnings("ignore")  # jupyter's own

TIMEOUT_S = 100
CHILDREN = """
import multiprocessing, psutil
alive = [child for child in psutil.Process().children(recursive=True) if child.status() != "zombie"]
print(len(multiprocessing.active_children()), [" ".join(child.cmdline()) for child in alive])
"""
PIPES = """
class Doubled(kdp.SampleSource):
    def __len__(self):
        return 6
    def getitem_x(self, index, ctx=None):
        return 2 * index

@kdp.sample_pipe("notebook_shift")
def notebook_shift(sample, *, by):
    sample["x"] = sample["x"] + by
    return sample

pipe = Doubled().notebook_shift(by=1).transform("x", lambda x: x * 10).select("x").deal(batch_size=2, shuffle=True)
with kdp.Loader(pipe, num_workers=2) as loader:
    print(sorted(x for batch in loader for (x,) in batch))
"""
ENDLESS = """
endless = Doubled().select("x").deal(batch_size=2)
rounds = 1 if "was_interrupted" in globals() else 10**9
was_interrupted = True
with kdp.Loader(endless, num_workers=2) as loader:
    for number in range(rounds):
        for batch in loader:
            pass
        if not number:
            print("running", flush=True)
print("done")
"""
STANDING = """
standing = kdp.Loader(endless, num_workers=2)
for number in range(10**9):
    for batch in standing:
        pass
    if not number:
        print("running", flush=True)
"""
FORGOTTEN = """
import threading

def stuck(x):
    if x == 6:
        threading.Event().wait()
    return x

forgotten = kdp.Loader(Doubled().transform("x", stuck).select("x").deal(batch_size=2), num_workers=2)
for batch in forgotten:
    print("running", flush=True)
"""


class Kernel:
    """A kernel, one cell at a time."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self.client = manager, client

    def run(self, code: str, *, interrupted_at: str | None = None) -> dict[str, Any]:
        """Return what a cell has shown: `text`, `html`, `svg`, `error`; interrupt it once it has printed a word."""
        shown: dict[str, Any] = {"text": "", "html": "", "svg": "", "error": ""}

        def hear(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown["text"] += content["text"]
                if interrupted_at is not None and interrupted_at in content["text"]:
                    self._manager.interrupt_kernel()
            elif message["msg_type"] in {"execute_result", "display_data"}:
                for name, kind in (("text", "text/plain"), ("html", "text/html"), ("svg", "image/svg+xml")):
                    shown[name] += content["data"].get(kind, "")
            elif message["msg_type"] == "error":
                shown["error"] = content["ename"]

        self.client.execute_interactive(code, timeout=TIMEOUT_S, output_hook=hear)
        return shown


def was_interrupted(shown: dict[str, Any]) -> bool:
    """Return whether a cell ended with KeyboardInterrupt.

    About one interrupt in 400 hits an instruction that has no line number. IPython cannot format such a traceback
    and prints it as text, without an error message.
    """
    return "KeyboardInterrupt" in (shown["error"] or shown["text"])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    manager, client = start_new_kernel(cwd=str(tmp_path_factory.mktemp("notebook")))
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_chain_is_drawn_and_a_stock_pipe_is_left_alone(kernel: Kernel, photo_folder: Path) -> None:
    started = kernel.run(f"import kdpipes as kdp\nphotos = kdp.image_folder({str(photo_folder)!r})")
    assert started["text"] == started["error"] == ""
    drawn = kernel.run("len(photos)\nphotos.filter_classes(valid=['cat'])")
    assert "<b>filter_classes</b>(valid=[&#39;cat&#39;])" in drawn["html"]
    assert "160 samples" in drawn["html"]
    assert "40 samples" in drawn["html"]
    assert drawn["text"].startswith("image_folder(")
    ended = kernel.run("kdp.from_dataset([(1, 0)]).deal(batch_size=1).shuffle()")
    assert ended["html"] == ""
    assert "<img" in kernel.run("photos.decode_images().peek(2)")["html"]
    assert kernel.run("kdp.plot_classes(photos)")["svg"].startswith("<svg")


def test_tab_completes_the_pipes_that_a_chain_can_take(kernel: Kernel) -> None:
    kernel.run("import kdpipes as kdp\none = kdp.from_dataset([(1, 0)])\nbatches = one.deal(batch_size=1)")

    def completed(code: str) -> str:
        return " ".join(kernel.client.complete(code, reply=True, timeout=TIMEOUT_S)["content"]["matches"])

    assert "filter_classes" in completed("one.filter_")
    assert "collate_samples" in completed("batches.collate_s")
    assert "to_device" in completed("batches.to_d")
    assert "to_device" not in completed("one.to_d")


def test_help_shows_the_arguments_and_the_docstring(kernel: Kernel) -> None:
    kernel.run("import kdpipes as kdp\none = kdp.from_dataset([(1, 0)])\nbatches = one.deal(batch_size=1)")

    def inspected(code: str) -> str:
        return str(kernel.client.inspect(code, reply=True, timeout=TIMEOUT_S)["content"]["data"]["text/plain"])

    for code, argument, words in (
        ("one.deal", "global_batch_size", "functional name: ``deal``"),
        ("batches.collate_samples", "pad", "functional name: ``collate_samples``"),
        ("batches.shuffle", "buffer_size", "Shuffle the input DataPipe"),
        ("kdp.open_shards", "class_names", "webdataset tars"),
    ):
        shown = inspected(code)
        assert argument in shown.split("Docstring")[0]
        assert words in shown


def test_a_cell_runs_twice_with_its_lambdas_and_classes(kernel: Kernel) -> None:
    kernel.run("import kdpipes as kdp")
    for _ in range(2):
        shown = kernel.run(PIPES)
        assert (shown["error"], shown["text"]) == ("", "[10, 30, 50, 70, 90, 110]\n")


@pytest.mark.parametrize("cell", [ENDLESS, STANDING])
def test_an_interrupted_cell_leaves_no_process_and_runs_again(kernel: Kernel, cell: str) -> None:
    kernel.run("import kdpipes as kdp")
    kernel.run(PIPES)
    assert was_interrupted(kernel.run(cell, interrupted_at="running"))
    if cell == STANDING:  # its loader lives on, and can be iterated
        again = kernel.run("print(len(list(standing)))\nstanding.close()")
        assert (again["error"], again["text"]) == ("", "3\n")
    assert kernel.run(CHILDREN)["text"] == "0 []\n"
    assert kernel.run(ENDLESS)["text"].endswith("done\n")
    assert kernel.run(CHILDREN)["text"] == "0 []\n"


def test_an_interrupted_deleted_loader_leaves_no_process(kernel: Kernel) -> None:
    kernel.run("import kdpipes as kdp")
    kernel.run(PIPES)
    assert was_interrupted(kernel.run(FORGOTTEN, interrupted_at="running"))
    kernel.run("1 + 1")
    kernel.run("del forgotten")
    assert kernel.run(CHILDREN)["text"] == "0 []\n", "though IPython keeps the traceback, which holds the loader"
