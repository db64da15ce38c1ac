"""A folder of class folders: listed late, read late, and rejected in words."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from PIL import Image

import kdpipes as kdp
from kdpipes.demo import PHOTO_CLASSES
from kdpipes.sources import _file_reader
from kdpipes.write.copy import copy_to_local
from tests.faulty_storage import Fault, faulty_storage


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    """Four files that only look like images, in two class folders."""
    for name in ("stork/2.png", "heron/10.jpg", "heron/2.JPG", "heron/old/1.jpg", "notes.txt", "heron/.x.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def test_photos_come_sorted_by_class_with_key_bytes_and_number(photo_folder: Path) -> None:
    pipe = kdp.image_folder(photo_folder)
    files = sorted(path.relative_to(photo_folder) for path in photo_folder.glob("*/*.jpg"))
    assert [sample.key for sample in pipe] == [path.as_posix() for path in files]
    assert pipe.class_names() == PHOTO_CLASSES
    assert pipe.column("y").tolist() == [PHOTO_CLASSES.index(path.parts[0]) for path in files]
    assert pipe[3]["x"] == (photo_folder / files[3]).read_bytes()
    assert (type(pipe[-1]["y"]), pipe[-1]["y"], pipe[-1].index) == (int, 7, 159)
    assert np.asarray(pipe.decode_images("x")[0]["x"]).shape[2] == 3


def test_deeper_folders_belong_to_their_class_files_to_none(birds: Path) -> None:
    expected = [("heron/10.jpg", 0), ("heron/2.JPG", 0), ("heron/old/1.jpg", 0), ("stork/2.png", 1)]
    for root in (birds, str(birds), f"{birds}/"):
        assert [(sample.key, sample["y"]) for sample in kdp.image_folder(root)] == expected


def test_urls_are_read_as_paths_are(birds: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/birds/{path.relative_to(birds)}": path.read_bytes() for path in birds.glob("*/[0-9]*")})
    memory.pipe("/birds/heron/old/1.jpg", b"heron/old/1.jpg")
    try:
        pipe = kdp.image_folder("memory://birds")
        assert [(s.key, s["x"], s["y"]) for s in pipe] == [(s.key, s["x"], s["y"]) for s in kdp.image_folder(birds)]
    finally:
        memory.rm("/birds", recursive=True)


def test_a_folder_is_listed_when_needed_and_then_never_again(birds: Path) -> None:
    pipe = kdp.image_folder(birds)
    (birds / "stork/3.png").write_bytes(b"")
    assert len(pipe) == 5
    shutil.rmtree(birds)
    twin = pickle.loads(pickle.dumps(pipe))
    assert (len(twin), twin[4].key, twin[4]["y"], twin.column("y").tolist()) == (5, "stork/3.png", 1, [0, 0, 0, 1, 1])
    with pytest.raises(FileNotFoundError, match=r"There is no file '.*/stork/3\.png'\.") as caught:
        twin[4]["x"]
    assert caught.value.__notes__ == ["kdpipes: while reading field 'x' of sample 'stork/3.png' (ordinal 4)"]


def test_plans_read_labels_and_open_no_file(birds: Path) -> None:
    source = kdp.image_folder(birds)
    assert len(source) == 4
    shutil.rmtree(birds)
    chain = source.filter_classes(valid=["heron", "stork"]).oversample()
    assert [(sample.key, sample["y"]) for sample in chain[3:]] == [("stork/2.png", 1)] * 3


def test_a_root_that_is_no_folder_is_rejected_at_once(birds: Path) -> None:
    for root in (birds / "gulls", birds / "stork/2.png"):
        with pytest.raises(FileNotFoundError, match=rf"^`root` must be a folder that exists, but is '{root}' instead"):
            kdp.image_folder(root)
    with pytest.raises(FileNotFoundError, match=r"^There is no folder 'memory://gulls'\.$"):
        len(kdp.image_folder("memory://gulls"))
    with pytest.raises(TypeError, match="`root` must be a path or a URL, but is 3 instead"):
        kdp.image_folder(3)  # type: ignore[arg-type]


def test_a_folder_without_class_folders_of_images_is_rejected(birds: Path) -> None:
    (birds / "0.jpg").write_bytes(b"")
    with pytest.raises(kdp.DataError, match=r"^Image '0\.jpg' is in '.*' itself, .* `FileLister\(root\)\.to_samples"):
        len(kdp.image_folder(birds))
    (birds / "empty").mkdir()
    with pytest.raises(kdp.DataError, match=r"^There are no images in '.*/empty': no file has the suffix of an image"):
        len(kdp.image_folder(birds / "empty"))


def test_bytes_that_are_no_image_are_an_error_with_the_sample(birds: Path) -> None:
    sample = kdp.image_folder(birds).decode_images("x")[1]
    with pytest.raises(kdp.DataError, match="11 bytes are not an image that Pillow can identify") as caught:
        sample["x"]
    assert caught.value.__notes__ == ["kdpipes: while decoding field 'x' of sample 'heron/2.JPG' (ordinal 1)"]


ODD = (
    "__MACOSX/a/._1.jpg",
    "lost+found/x",
    "@eaDir/1.jpg/t.jpg",
    "a/@eaDir/1.jpg",
    "Thumbs.db",
    "a/Thumbs.db",
    "README",
)


@pytest.fixture(params=["path", "file", "zip", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Sequence[str]], str]]:
    """A function that writes files to one of several kinds of folders and returns its path or URL."""

    def write(names: Sequence[str]) -> str:
        for name in names:
            path = tmp_path / "d" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        if request.param == "zip":
            with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
                for name in names:
                    archive.write(tmp_path / "d" / name, f"d/{name}")
            return f"zip://d::file://{tmp_path}/d.zip"
        if request.param == "memory":
            fsspec.filesystem("memory").put(str(tmp_path / "d"), "/odd/d", recursive=True)
            return "memory://odd/d"
        return f"{tmp_path}/d" if request.param == "path" else f"file://{tmp_path}/d"

    yield write
    memory = fsspec.filesystem("memory")
    if memory.exists("/odd"):
        memory.rm("/odd", recursive=True)


def test_classes_are_the_folders_with_images_wherever_they_lie(place: Callable[[Sequence[str]], str]) -> None:
    root = place(["a/1.jpg", "c/1.JPG", "annotations/1.xml", "b/readme.txt", "b/deep/notes"])
    pipe = kdp.image_folder(root)
    with pytest.warns(UserWarning, match="image_folder") as caught:
        assert (pipe.class_names(), pipe.column("y").tolist()) == (("a", "c"), [0, 1])
    assert len(caught) == 1
    words = (
        r"leaves out 3 files without the suffix of an image \(.*1 without a suffix.*\): 'annotations/1.xml', "
        r"'b/deep/notes', 'b/readme.txt'; and 2 folders without images: 'annotations', 'b'\. "
        r"Give images one of the suffixes \..*\.jpg.* `kdp\.from_ids`"
    )
    assert re.search(words, str(caught[0].message))


def test_files_of_operating_systems_are_left_out_silently(place: Callable[[Sequence[str]], str]) -> None:
    pipe = kdp.image_folder(place(["a/1.jpg", "c/1.jpg", *ODD]))
    assert ([sample.key for sample in pipe], pipe.class_names()) == (["a/1.jpg", "c/1.jpg"], ("a", "c"))


def test_an_empty_folder_is_no_class_unless_it_is_named(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "c/1.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    with pytest.warns(UserWarning, match=r"leaves out 1 folder without images: 'b'\. Pass `cl") as caught:
        assert kdp.image_folder(tmp_path).column("y").tolist() == [0, 1]
    assert caught[0].filename == __file__
    pipe = kdp.image_folder(tmp_path, class_names=["a", "b", "c"])
    assert (pipe.class_names(), pipe.column("y").tolist()) == (("a", "b", "c"), [0, 2])


def test_linked_class_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "all" / "a").mkdir(parents=True)
    (tmp_path / "all" / "a" / "1.jpg").write_bytes(b"")
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "b").symlink_to(tmp_path / "all" / "a")
    for root in (f"{tmp_path}/some", f"file://{tmp_path}/some"):
        assert [sample.key for sample in kdp.image_folder(root)] == ["b/1.jpg"]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "TGA", "PCX", "SGI"])
def test_every_suffix_of_a_format_is_read_and_decoded(kind: str, tmp_path: Path) -> None:
    Image.init()
    suffixes = [suffix for suffix, name in Image.registered_extensions().items() if name == kind and suffix != ".pfm"]
    (tmp_path / "a").mkdir()
    for suffix in suffixes:
        Image.new("RGB", (8, 8), (200, 0, 0)).save(tmp_path / "a" / f"1{suffix.upper()}", kind)
    pipe = kdp.image_folder(tmp_path).decode_images("x")
    assert [np.asarray(sample["x"]).shape for sample in pipe] == [(8, 8, 3)] * len(suffixes)


@pytest.mark.parametrize("suffix", [".eps", ".ps", ".pdf", ".wmf", ".mpg", ".h5"])
def test_suffixes_of_formats_without_pixels_are_left_out(suffix: str, tmp_path: Path) -> None:
    for name in ("1.jpg", f"1{suffix}"):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(b"")
    with pytest.warns(UserWarning, match=rf"leaves out 1 file .* \(1 \{suffix}\): 'a/1\{suffix}'"):
        assert len(kdp.image_folder(tmp_path)) == 1


def test_suffixes_of_plugins_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    monkeypatch.setattr(Image, "ID", list(Image.ID))
    monkeypatch.setattr(Image, "EXTENSION", dict(Image.EXTENSION))
    Image.register_open("RAWX", lambda file, name: None, lambda prefix: False)  # type: ignore[arg-type, return-value]
    Image.register_extension("RAWX", ".rawx")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.rawx").write_bytes(b"")
    assert kdp.image_folder(tmp_path)[0].key == "a/1.rawx"


def test_classes_may_be_given_so_that_two_folders_agree(tmp_path: Path) -> None:
    (tmp_path / "stork").mkdir()
    (tmp_path / "stork" / "1.jpg").write_bytes(b"")
    pipe = kdp.image_folder(tmp_path, class_names=["heron", "stork"])
    assert (pipe.class_names(), pipe.column("y").tolist()) == (("heron", "stork"), [1])
    with pytest.raises(kdp.DataError, match=r"'stork' in .* is not among the `class_names` gull"):
        len(kdp.image_folder(tmp_path, class_names=["gull"]))


def test_a_link_that_leads_back_is_not_followed_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"")
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    assert len(kdp.image_folder(tmp_path)) == 1


def test_a_folder_inside_an_archive_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("birds/heron/1.jpg", b"pixels")
    pipe = kdp.image_folder(f"zip://birds::file://{tmp_path}/b.zip")
    assert (pipe[0].key, pipe[0]["x"]) == ("heron/1.jpg", b"pixels")


def test_a_folder_of_splits_is_no_folder_of_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "heron").mkdir(parents=True)
        (tmp_path / split / "heron" / "1.jpg").write_bytes(b"1")
    with pytest.warns(UserWarning, match=r"are train, val, which look like splits.*kdp\.image_folder\(.*train"):
        len(kdp.image_folder(tmp_path))
    assert len(kdp.image_folder(tmp_path, class_names=["train", "val"])) == 2
    assert kdp.image_folder(tmp_path / "train").class_names() == ("heron",)


@pytest.mark.parametrize("source", ["image_folder", "from_ids"])
def test_local_files_are_loaded_ahead_of_need(photo_folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str]] = []
    read = _file_reader.read_url
    monkeypatch.setattr(_file_reader.Threads, "submit", lambda self, action: action())
    monkeypatch.setattr(_file_reader, "_load", lambda paths: log.extend(("load", path) for path in paths))
    monkeypatch.setattr(_file_reader, "read_url", lambda url: (log.append(("read", url)), read(url))[1])
    files = [str(path) for path in photo_folder.glob("*/*.jpg")][:40]
    pipe = kdp.image_folder(photo_folder)[:40] if source == "image_folder" else kdp.from_ids(files, load="{id}")
    assert len(list(pipe.permute(1).select("x").deal(batch_size=8, shuffle=True))) == 5
    loaded, done = ([path for kind, path in log if kind == which] for which in ("load", "read"))
    assert len(set(loaded)) == 40
    assert sorted(loaded) == sorted(done)
    for path in done:
        assert log.index(("load", path)) < log.index(("read", path))


def test_loading_ahead_leaves_errors_and_descriptors_alone(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = list[int](), list[int]()
    system = SimpleNamespace(**vars(os))
    system.open = lambda *given: (opened.append(os.open(*given)), opened[-1])[1]
    system.close = lambda descriptor: (closed.append(descriptor), os.close(descriptor))[1]
    monkeypatch.setattr(_file_reader, "os", system)
    _file_reader._load([str(birds / "stork/2.png"), str(birds / "missing.png"), str(birds / "heron/2.JPG")])
    assert len(opened) == (2 if hasattr(os, "posix_fadvise") else 0)
    assert opened == closed


def test_without_readahead_files_are_read_all_the_same(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert len(list(kdp.image_folder(birds).select("x").deal(batch_size=1))) == 4
    _file_reader._load([str(birds / "stork/2.png")])


def test_workers_load_ahead_after_the_main_process_has(birds: Path) -> None:
    pipe = kdp.image_folder(birds).select("x key").deal(batch_size=1)
    expected = list(pipe)
    with kdp.Loader(pipe, num_workers=2, start_method="fork") as loader:
        assert list(loader) == expected


@pytest.mark.parametrize("is_prefetched", [True, False])
def test_files_that_arrive_cut_are_read_again(photo_folder: Path, tmp_path: Path, is_prefetched: bool) -> None:
    local = {sample.key: bytes(sample["x"]) for sample in kdp.image_folder(photo_folder)}
    with faulty_storage(
        str(photo_folder), faults=[Fault("truncate", paths="*/*[02468].jpg", on="whole", times=1)]
    ) as storage:
        cached = kdp.image_folder("faulty://").cache_on_disk(tmp_path / "files")
        for _ in range(2):
            if is_prefetched:
                batches = list(cached.select("key x").deal(batch_size=8))
                assert {key: bytes(x) for batch in batches for key, x in batch} == local
            else:
                assert {sample.key: bytes(sample["x"]) for sample in cached} == local
    assert storage.stats().faults["truncate"] > 0


def test_a_file_that_stays_cut_is_an_error_and_never_kept(photo_folder: Path, tmp_path: Path) -> None:
    path = min(path.relative_to(photo_folder) for path in photo_folder.rglob("*.jpg"))
    with faulty_storage(str(photo_folder), faults=[Fault("truncate", paths=str(path))]):
        cached = kdp.image_folder("faulty://").cache_on_disk(tmp_path / "files")
        with pytest.raises(kdp.DataError, match=rf"{path}' cannot be read: its listing says \d+ bytes, and \d+ came"):
            cached[0]["x"]
    with faulty_storage(str(photo_folder)):
        again = kdp.image_folder("faulty://").cache_on_disk(tmp_path / "files")
        assert bytes(again[0]["x"]) == (photo_folder / path).read_bytes()


@pytest.mark.parametrize("batch_size", [1, 64])
def test_names_with_double_colons_are_local_in_every_source(
    batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a::b" / "std::vector"
    folder.mkdir(parents=True)
    for number in range(2):
        Image.new("RGB", (4, 4)).save(folder / f"12::{number}.png")
    kdp.write_shards(kdp.image_folder("a::b"), "run::%06d.tar", max_samples=1)
    names = [f"12::{number}.png" for number in range(2)]
    sources = {
        "x": [
            kdp.image_folder("a::b"),
            kdp.image_folder(f"file://{tmp_path}/a::b"),
            kdp.from_ids(names, load="a::b/std::vector/{id}"),
            kdp.from_table({"path": names}, path="path", root=str(folder)),
        ],
        "png": [
            kdp.open_shards("run::{000000..000001}.tar"),
            kdp.stream_shards("run::*.tar"),
            kdp.stream_shards(["run::000000.tar", "run::000001.tar"]),
        ],
    }
    for field, pipes in sources.items():
        for pipe in pipes:
            batches = pipe.decode_images(field).select(field).deal(batch_size=batch_size).collate_samples()
            assert sum(len(batch) for (batch,) in batches) == 2
    local = copy_to_local("a::b", tmp_path / "copy").path
    assert [sample.key for sample in kdp.image_folder(local)] == [f"std::vector/{name}" for name in names]
    assert kdp.index_shards("run::*.tar").num_samples == [1, 1]
