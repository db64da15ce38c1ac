"""Records: whole parts only, the same bytes for the same input, gone on with after a kill, and no other's folder."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from PIL import Image

import kdpipes as kdp
from kdpipes.storage import records
from kdpipes.storage.codec import decode
from kdpipes.storage.records import HEADER
from kdpipes.work import EncodedImage
from kdpipes.write import records as module
from tests.processes import in_child

SIZES = [10, 3_000, 5_000, 100_000]  # bytes: within a page, near its half, in pages of their own

SCRIPT = """
import sys
import kdpipes as kdp
from kdpipes.storage import records
records._AT_ONCE = 50_000
encode = lambda n: {"x": bytes([n]) * [10, 3_000, 5_000, 100_000][n % 4], "y": n % 3}
kdp.write_records(range(60), sys.argv[1], num_parts=3, encode=encode)
"""


class Birds(kdp.SampleSource):
    """Samples of very different sizes."""

    def __len__(self) -> int:
        return 40

    def getitem_x(self, index: int) -> np.ndarray:
        return np.full(SIZES[index % 4], index, dtype=np.uint8)

    def getitem_y(self, index: int) -> int:
        return index % 3

    def class_names(self) -> tuple[str, ...]:
        return ("heron", "stork", "gull")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {sample.key: (bytes(sample["x"]), sample["y"]) for sample in kdp.open_records(folder)}


def killed_at(function: Any, number: int) -> Any:
    """Return `function`, at the call of which with this number the process is killed."""
    calls = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        calls[0] += 1
        return function(*args, **kwargs)

    return call


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """What an uninterrupted run writes."""
    kdp.write_records(Birds(), tmp_path / "whole", num_parts=3)
    return contents(tmp_path / "whole")


def test_all_samples_come_back_from_parts_of_similar_size(tmp_path: Path) -> None:
    result = kdp.write_records(Birds(), tmp_path / "new" / "records", num_parts=3)
    assert result[1:4] == (40, 3, 3)
    assert result.num_bytes == sum(path.stat().st_size for path in result.path.glob("*.mdb"))
    assert read(result.path) == {sample.key: (bytes(sample["x"]), sample["y"]) for sample in Birds()}
    records = kdp.open_records(result.path)
    assert sorted(np.bincount(records.shard_numbers()).tolist()) == [13, 13, 14]
    assert records.class_names() == ("heron", "stork", "gull")
    assert {path.suffix for path in result.path.iterdir()} == {".mdb", ".index", ".json"}


def test_samples_are_shuffled_over_parts_by_seed_or_in_order(tmp_path: Path) -> None:
    orders = []
    for number, options in enumerate([{"shuffle": False}, {}, {"seed": 1}]):
        kdp.write_records(Birds(), tmp_path / str(number), **options)
        orders.append(kdp.open_records(tmp_path / str(number)).column("key").tolist())
    assert orders[0] == [str(number) for number in range(40)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(sorted(order, key=int) == orders[0] for order in orders)


def test_any_workers_and_any_executor_write_the_same_bytes(tmp_path: Path, whole: dict[str, bytes]) -> None:
    kdp.write_records(Birds(), tmp_path / "processes", num_parts=3, num_workers=2)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        kdp.write_records(Birds(), tmp_path / "threads", num_parts=3, executor=threads)
    assert contents(tmp_path / "processes") == contents(tmp_path / "threads") == whole


def test_bytes_depend_on_nothing_that_memory_held_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = {**os.environ, "MALLOC_PERTURB_": "165", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "noise")], env=noise, check=True)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "here")])
    monkeypatch.setattr(records, "_AT_ONCE", records._AT_ONCE)  # which the script changes
    exec(compile(SCRIPT, "<string>", "exec"), {"__name__": "__main__"})
    assert contents(tmp_path / "noise") == contents(tmp_path / "here")
    with lmdb.open(str(tmp_path / "here/part-00000.mdb"), subdir=False, readonly=True, lock=False) as env:
        assert env.info()["last_txnid"] >= 3


def test_a_part_is_an_lmdb_file_that_others_read_by_number(tmp_path: Path, whole: dict[str, bytes]) -> None:
    path = tmp_path / "whole" / "part-00001.mdb"
    first = kdp.open_records(tmp_path / "whole")[13]
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as transaction:
        assert transaction.stat()["entries"] == 13
        content = transaction.get(bytes(8))
    length = int.from_bytes(content[8:16], "little")
    assert decode(content[:length]) == [0, first.key, ["x", "y"]]


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_is_killed_between_files_is_gone_on_with(
    number: int, num_workers: int, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    folder = tmp_path / "killed"

    def work() -> None:
        Path.replace = killed_at(Path.replace, number)  # type: ignore[method-assign]  # of a process that ends here
        kdp.write_records(Birds(), folder, num_parts=3)

    assert in_child(work) == -signal.SIGKILL
    finished = {path: path.stat().st_ino for path in folder.glob("*.index")}
    num_finished = max(number - 1, 0) // 2  # the header comes first, then each part and its index
    assert len(finished) == num_finished
    result = kdp.write_records(Birds(), folder, num_parts=3, num_workers=num_workers)
    assert result.num_written == 3 - num_finished
    assert contents(folder) == whole
    assert {path: path.stat().st_ino for path in finished} == finished


@pytest.mark.parametrize("number", [0, 1, 40, 90, 119])
def test_a_run_that_is_killed_within_a_part_is_gone_on_with(
    number: int, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    folder = tmp_path / "killed"

    def work() -> None:
        records.encode = killed_at(records.encode, number)
        records._AT_ONCE = 1
        kdp.write_records(Birds(), folder, num_parts=3)

    assert in_child(work) == -signal.SIGKILL
    drafts = [path for path in folder.iterdir() if path.name.endswith(".part")]
    assert len(drafts) == 1
    with pytest.raises(kdp.DataError, match=r"not complete: 'part-0000\d\.mdb' of 3 parts is missing.*goes on"):
        len(kdp.open_records(folder))
    done = {path: path.read_bytes() for path in folder.glob("*.index")}
    kdp.write_records(Birds(), folder, num_parts=3)
    assert {path: path.read_bytes() for path in done} == done
    assert read(folder) == read(tmp_path / "whole")
    assert contents(folder).keys() == whole.keys()


def test_complete_records_are_not_written_again_when_read_only(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "write_part", None)
    assert kdp.write_records(Birds(), tmp_path / "whole", num_parts=3).num_written == 0
    assert contents(tmp_path / "whole") == whole


def test_an_error_leaves_the_parts_before_it_and_no_draft(tmp_path: Path) -> None:
    chain = Birds().transform("x", lambda x: 1 / 0 if x[0] == 39 else x)
    with pytest.raises(ZeroDivisionError):
        kdp.write_records(chain, tmp_path / "r", shuffle=False)
    names = sorted(path.name for path in (tmp_path / "r").iterdir())
    assert names == sorted([HEADER, *(f"part-0000{n}.mdb{end}" for n in range(3) for end in ("", ".index"))])


@pytest.mark.parametrize(
    "other",
    [
        lambda folder: kdp.write_records(Birds().filter_classes(valid=[0, 1]), folder, num_parts=3),
        lambda folder: kdp.write_records(Birds(), folder, num_parts=2),
        lambda folder: kdp.write_records(Birds(), folder, num_parts=3, seed=1),
        lambda folder: kdp.write_records(Birds(), folder, num_parts=3, encode=dict),
        lambda folder: kdp.write_records(Birds(), folder, num_parts=3, class_names=["a", "b", "c"]),
        lambda folder: kdp.write_records(Birds().transform("x", np.negative), folder, num_parts=3),
    ],
)
def test_the_records_of_another_input_are_rejected_and_kept(
    other: Callable[[Path], Any], tmp_path: Path, whole: dict[str, bytes]
) -> None:
    with pytest.raises(kdp.DataError, match=r"written from a different input: .* Choose another folder, or delete"):
        other(tmp_path / "whole")
    assert contents(tmp_path / "whole") == whole


def test_a_failed_input_does_not_block_the_mended_one(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("path label")
    with pytest.raises(kdp.DataError, match="Each item must be a path and a class number"):
        kdp.write_records(tmp_path / "list.txt", tmp_path / "r", num_parts=1)
    kdp.write_records(Birds(), tmp_path / "whole", num_parts=3)
    assert kdp.write_records(Birds(), tmp_path / "r", num_parts=3).num_written == 3
    assert contents(tmp_path / "r") == contents(tmp_path / "whole")


def test_a_folder_that_another_run_writes_into_is_not_taken(tmp_path: Path) -> None:
    (begun, begin), (due, go_on) = os.pipe(), os.pipe()

    def slowly(n: int) -> dict[str, int]:
        if not n:
            os.write(begin, b"-")
            os.read(due, 1)
        return {"y": n}

    child = os.fork()
    if not child:
        signal.alarm(30)
        os._exit(kdp.write_records(range(4), tmp_path / "r", num_parts=1, shuffle=False, encode=slowly).num_written)
    os.read(begun, 1)
    threading.Timer(0.2, os.write, (go_on, b"-")).start()  # while the other waits, or before: it is rejected
    with pytest.raises(kdp.DataError, match="written from a different input"):
        kdp.write_records(Birds(), tmp_path / "r", num_parts=3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert [sample["y"] for sample in kdp.open_records(tmp_path / "r")] == [0, 1, 2, 3]
    for end in (begun, begin, due, go_on):
        os.close(end)


def test_an_interrupt_leaves_no_drafts_of_workers(tmp_path: Path) -> None:
    def interrupt(n: int) -> dict[str, int]:
        if n == 7:
            os.kill(os.getppid(), signal.SIGINT)
            threading.Event().wait()
        return {"y": n}

    with pytest.raises(KeyboardInterrupt):
        kdp.write_records(range(8), tmp_path / "r", num_parts=2, shuffle=False, encode=interrupt, num_workers=2)
    assert {path.name for path in (tmp_path / "r").iterdir()} <= {HEADER, "part-00000.mdb", "part-00000.mdb.index"}


def test_a_folder_of_something_else_is_rejected_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("done")
    with pytest.raises(kdp.DataError, match=r"no kdpipes records \(it contains 'thesis\.txt'\)\. Choose an empty"):
        kdp.write_records(Birds(), tmp_path)
    with pytest.raises(NotADirectoryError, match=r"is a file\. Pass a folder"):
        kdp.write_records(Birds(), tmp_path / "thesis.txt")
    assert contents(tmp_path) == {"thesis.txt": b"done"}


def test_a_process_that_was_slower_to_make_the_header_goes_on(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(draft: Path, path: Path) -> None:
        monkeypatch.undo()
        path.write_bytes(whole[HEADER])  # by the other, which then removes all drafts
        draft.unlink()
        os.link(draft, path)

    monkeypatch.setattr(os, "link", link)
    assert kdp.write_records(Birds(), tmp_path / "r", num_parts=3).num_written == 3
    assert contents(tmp_path / "r") == whole


def test_two_processes_share_the_work(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "shared"
    children = []
    for _ in range(2):
        child = os.fork()
        if not child:
            signal.alarm(30)
            os._exit(kdp.write_records(Birds(), folder, num_parts=3).num_written)
        children.append(child)
    written = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(written) == [0, 3]
    assert contents(folder) == whole


def photos(folder: Path) -> list[Path]:
    paths = [folder / f"{number} bird.png" for number in range(5)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(path)
    return paths


def test_a_data_list_of_paths_and_labels_needs_no_function(tmp_path: Path) -> None:
    paths = photos(tmp_path)
    (tmp_path / "list.txt").write_text("".join(f"{path} {number % 2}\n" for number, path in enumerate(paths)) + "\n")
    (tmp_path / "list.csv").write_text("".join(f'"{path}", {number % 2}\r\n' for number, path in enumerate(paths)))
    (tmp_path / "list.csv-headed.csv").write_text("path,label\n" + (tmp_path / "list.csv").read_text())
    for name in ("list.txt", "list.csv", "list.csv-headed.csv"):
        kdp.write_records(tmp_path / name, tmp_path / name[5:], class_names=["heron", "stork"])
        found = {sample.key: (sample["x"], sample["y"]) for sample in kdp.open_records(tmp_path / name[5:])}
        assert found == {str(path): (path.read_bytes(), number % 2) for number, path in enumerate(paths)}
    assert kdp.open_records(tmp_path / "txt").class_names() == ("heron", "stork")


def test_an_own_function_makes_records_of_lines_and_items(tmp_path: Path) -> None:
    paths = photos(tmp_path)
    (tmp_path / "list.txt").write_text("\n".join(f"{n};{path};größe" for n, path in enumerate(paths)), "utf-8")
    (tmp_path / "list.csv").write_text("\n".join(f"{n},{path},größe" for n, path in enumerate(paths)), "utf-8")

    def raw(cells: list[str]) -> dict[str, Any]:
        return {"key": cells[0], "x": np.asarray(Image.open(cells[1])), "size": cells[2], "y": int(cells[0])}

    kdp.write_records(str(tmp_path / "list.txt"), tmp_path / "a", encode=lambda line: raw(line.split(";")))
    kdp.write_records(tmp_path / "list.csv", tmp_path / "b", encode=raw)
    kdp.write_records([[str(n), path, "größe"] for n, path in enumerate(paths)], tmp_path / "c", encode=raw)
    for name in "abc":
        records = kdp.open_records(tmp_path / name)
        assert sorted(records.column("key")) == list("01234")
        for sample in records:
            assert (sample["x"][2, 3].tolist(), sample["size"]) == ([int(sample.key), 0, 0], "größe")
    assert contents(tmp_path / "a")["part-00002.mdb"] == contents(tmp_path / "c")["part-00002.mdb"]


def test_random_functions_are_drawn_by_position_in_any_worker(tmp_path: Path) -> None:
    def noisy(sample: Any) -> dict[str, Any]:
        return {"x": np.random.rand(3), "own": sample["x"], "z": random.random()}

    chain = Birds().transform("x", lambda x, rng: rng.random(4))
    for number in (0, 2):
        kdp.write_records(chain, tmp_path / str(number), encode=noisy, num_workers=number)
    assert contents(tmp_path / "0") == contents(tmp_path / "2")
    records = kdp.open_records(tmp_path / "0")
    assert len({sample["z"] for sample in records}) == 40
    for sample in records:
        assert (sample["own"] == chain[int(sample.key)]["x"]).all()


def test_images_stay_encoded_or_are_kept_as_pixels(photo_folder: Path, tmp_path: Path) -> None:
    images = kdp.image_folder(photo_folder)[:10].decode_images("x")
    kdp.write_records(images, tmp_path / "encoded")
    kdp.write_records(images.transform("x", kdp.Resize((32, 32))), tmp_path / "pixels")
    expected = {sample.key: sample for sample in images}
    for sample in kdp.open_records(tmp_path / "encoded"):
        assert isinstance(sample["x"], EncodedImage)
        assert sample["x"].content == expected[sample.key]["x"].content
    resized = {sample.key: np.asarray(sample["x"]) for sample in images.transform("x", kdp.Resize((32, 32)))}
    for sample in kdp.open_records(tmp_path / "pixels").decode_images("x"):
        assert (np.asarray(sample["x"]) == resized[sample.key]).all()


def test_what_on_error_leaves_out_is_left_out_everywhere(tmp_path: Path) -> None:
    def unless_third(x: Any) -> Any:
        if x[0] % 3 == 0:
            raise ValueError("torn")
        return x

    chain = Birds().transform("x", unless_third)
    with pytest.raises(ValueError, match="torn"):
        kdp.write_records(chain, tmp_path / "raised")
    result = kdp.write_records(chain.on_error("skip"), tmp_path / "skipped")
    assert result.num_samples == 26
    path = tmp_path / "quarantine"
    kdp.write_records(chain.on_error("quarantine", path=path), tmp_path / "noted", num_workers=2)
    noted = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert sorted(noted, key=int) == [str(number) for number in range(0, 40, 3)]
    records = [kdp.open_records(folder) for folder in (tmp_path / "noted", result.path)]
    assert records[0].column("key").tolist() == records[1].column("key").tolist()


@pytest.mark.parametrize("size", [0, 1, 2])
def test_there_may_be_fewer_samples_than_parts(size: int, tmp_path: Path) -> None:
    kdp.write_records(Birds()[:size], tmp_path / "few", num_parts=3)
    records = kdp.open_records(tmp_path / "few")
    assert (len(records), sorted(sample["y"] for sample in records)) == (size, list(range(size)))


def test_mistakes_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    wrong: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (TypeError, "`encode` must be a function from an item to its fields", [1, 2], {}),
        (TypeError, "`encode` must be a callable", Birds(), {"encode": 3}),
        (TypeError, "`source` must be an indexed chain", 3, {}),
        (ValueError, r"`source` must be a local \.txt or \.csv file", "list.json", {}),
        (FileNotFoundError, "list.txt", tmp_path / "list.txt", {}),
        (ValueError, "`num_parts` must be an integer of at least 1", Birds(), {"num_parts": 0}),
        (TypeError, "`shuffle` must be True or False", Birds(), {"shuffle": 1}),
        (TypeError, "`executor` must be", Birds(), {"executor": 2}),
        (kdp.ChainError, r"`kdp\.write_records` takes samples", Birds().select("x"), {}),
        (kdp.ChainError, "is a stream", Birds().deal(batch_size=2), {}),
    ]
    for kind, text, source, options in wrong:
        with pytest.raises(kind, match=text):
            kdp.write_records(source, folder, **options)
    with pytest.raises(ValueError, match=r"`folder` must be a local folder, but is 's3://b'"):
        kdp.write_records(Birds(), "s3://b")
    assert not folder.exists()


def test_what_cannot_be_kept_or_encoded_names_the_sample(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"Field 'x' of sample '\d+': A value of type `complex` cannot be kept"
    ) as caught:
        kdp.write_records(Birds().transform("x", lambda x: 1j), tmp_path / "a")
    assert "allow_pickle" not in str(caught.value)
    with pytest.raises(TypeError, match=r"`encode` must return a dictionary of fields, but returned int for 7"):
        kdp.write_records([7], tmp_path / "b", encode=int)
    (tmp_path / "list.txt").write_text("no_label.jpg")
    with pytest.raises(kdp.DataError, match=r"a path and a class number, but is 'no_label\.jpg'") as noted:
        kdp.write_records(tmp_path / "list.txt", tmp_path / "c")
    assert "item 0 of" in noted.value.__notes__[0]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_make_room", lambda env, batch: None)
    with pytest.raises(OSError, match=r"part-00000\.mdb.* cannot be written: .*MDB_MAP_FULL"):
        kdp.write_records(range(9), tmp_path / "r", encode=lambda n: {"x": bytes(1_000_000)})
    assert [path.name for path in (tmp_path / "r").iterdir()] == [HEADER]


def test_complete_records_in_a_read_only_folder_are_found(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r"
    kdp.write_records(Birds(), folder, num_parts=3)

    def reject(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError("the folder cannot be written")

    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    monkeypatch.setattr(module, "locked_once", reject)
    assert kdp.write_records(Birds(), folder, num_parts=3).num_written == 0
    assert contents(folder) == whole
    with pytest.raises(PermissionError):
        kdp.write_records(Birds(), tmp_path / "other", num_parts=3)
