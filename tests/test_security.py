"""The page on security: each of its sentences has a test, here or elsewhere."""

from __future__ import annotations

import ast
import io
import os
import pickle
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.cache.shared_folder import SharedFolder
from kdpipes.core.shared import PackedStrings
from kdpipes.storage.catalog import make_index
from kdpipes.storage.files import version_of
from kdpipes.storage.shard_index import Places, ShardIndex
from kdpipes.storage.tar import index_shard
from kdpipes.write import copy_to_local
from tests.faulty_storage import faulty_storage

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "security.md"
RELIABILITY = ROOT / "docs" / "reliability.md"

# By file: the beginning of each sentence of the page, and the test that shows it.
PROOFS = {
    "cli/test_doctor.py": {
        "Commands that take a chain": "test_a_good_chain_ends_well",
    },
    "test_control_characters.py": {
        "Control characters in data": "test_views_are_clean",
    },
    "test_security.py": {
        "Workers and the main process": "test_nothing_listens_while_workers_run",
        "Pickles are read only where": "test_pickles_are_read_in_few_places",
        "Nothing in data is executed": "test_nothing_in_data_is_executed",
        "An index contains no file": "test_a_hostile_index_reads_no_other_file",
        "The checksum of an index": "test_the_checksum_of_an_index_proves_no_author",
        "A state is plain data": "test_a_state_is_read_without_pickles",
        "Folders in shared memory have": "test_files_have_the_modes_that_the_page_says",
        "Databases of caches have": "test_files_have_the_modes_that_the_page_says",
        "Copies of remote data below": "test_files_have_the_modes_that_the_page_says",
        "Shards, indexes, records": "test_files_have_the_modes_that_the_page_says",
    },
    "sources/test_stream_shards.py": {
        "`pipe:` URLs, which would": "test_urls_that_would_run_a_command_are_rejected_at_once",
        "A member of a stream takes": "test_a_member_that_is_too_large_is_an_error_that_names_it",
        "`stream_shards(verify=True)`": "test_members_that_come_damaged_are_read_again",
    },
    "storage/test_tar_headers.py": {
        "Sizes in tar headers": "test_a_size_that_nothing_holds_is_an_error",
    },
    "storage/test_tar.py": {
        "Links in tars are errors": "test_a_link_is_rejected",
        "Zeros inside a tar": "test_zeros_in_place_of_members_are_an_error",
        "More than 11 KiB of zeros": "test_more_zeros_than_end_a_tar_are_an_error",
    },
    "storage/test_images.py": {
        "Images are opened only if": "test_formats_without_a_decoder_are_not_opened",
        "PostScript files (EPS) are": "test_postscript_is_never_run",
    },
    "work/test_jpeg.py": {
        "Images above Pillow's limit": "test_a_bomb_is_rejected_as_pillow_rejects_it",
    },
    "write/test_copy_to_local_zips.py": {
        "A zip is unpacked only": "test_a_zip_that_reaches_out_of_the_folder_is_rejected",
        "A zip that claims to hold": "test_a_zip_that_would_fill_the_disk_is_rejected",
    },
    "storage/test_responses.py": {
        "If the index of a remote shard is much": "test_an_index_that_is_too_large_is_no_index",
        "A remote file that is read whole": "test_a_file_without_an_end_is_an_error",
    },
    "storage/test_decoding.py": {
        "A `.npy` file whose header": "test_hostile_npy_files_are_errors_of_the_data",
        "A `.pth` file is an error": "test_pth_files_that_grow_in_memory_are_errors",
    },
    "storage/test_index_home.py": {
        "The local cache of indexes": "test_the_local_cache_of_indexes_keeps_to_its_limit",
    },
    "cache/test_contents.py": {
        "Wrong entries in the METADATA": "test_wrong_entries_of_metadata_are_an_error",
    },
    "storage/test_filesystems_private_hosts.py": {
        "HTTP redirects are not": "test_a_redirect_leads_to_no_network_that_is_more_private",
        "HTTP requests never go": "test_no_notation_of_an_address_gets_around_the_check",
        "Lists of files on web pages": "test_a_listing_leads_to_no_other_host",
        "`KDPIPES_ALLOW_PRIVATE_HOSTS=1`": "test_a_redirect_leads_to_no_network_that_is_more_private",
    },
    "work/test_decode_images.py": {
        "`decode_images` opens a file": "test_a_value_that_is_no_encoded_image_is_an_error",
    },
    "sources/test_from_table.py": {
        "Rows of a remote table cannot name a local": "test_rows_of_a_remote_table_name_no_local_file",
        "Rows of a remote table cannot name a host": "test_rows_of_a_remote_table_reach_no_private_host",
    },
    "storage/test_odd_systems.py": {
        "An index that is damaged": "test_an_index_of_another_version_is_made_anew",
    },
    "cache/test_store_contract.py": {
        "Entries are plain data": "test_an_entry_of_a_pickle_is_a_miss_with_a_warning",
        "Checksums of entries are bound": "test_entries_that_were_swapped_are_loaded_again",
    },
    "storage/test_codec.py": {
        "An entry that would decode": "test_an_entry_that_reads_its_bytes_twice_is_damaged",
        "`allow_pickle=True`": "test_pickles_are_written_and_read_only_on_request",
    },
    "cache/test_redis_store.py": {
        "Redis entries have a maximum": "test_entries_that_are_too_long_are_neither_kept_nor_read",
        "A redis server that cannot be": "test_a_missing_server_is_a_clear_error_without_the_password",
    },
    "cache/test_cache_on_disk.py": {
        "The size of a database": "test_a_cut_database_is_an_error_at_the_next_epoch",
    },
    "delivery/test_checkpoint_errors.py": {
        "Loading anything that is not": "test_garbage_is_rejected_and_changes_nothing",
    },
    "cache/test_lmdb_store.py": {
        "A folder in shared memory that": "test_a_folder_that_is_open_to_others_is_not_taken",
    },
    "storage/test_files_atomic.py": {
        "Files appear complete": "test_an_error_leaves_what_was_there_and_no_draft",
    },
    "test_secrets.py": {
        "Users, passwords, signatures": "test_nothing_of_a_signed_url_is_written_or_shown",
        "Errors, their causes": "test_errors_warnings_and_logs_hold_no_secret",
    },
    "test_webdataset.py": {
        "`kdp.from_webdataset(...)`": "test_a_pipe_url_is_left_to_webdataset",
    },
}
GUARANTEES = {  # by file: the beginning of each event on the page on reliability, and the test that shows it
    "delivery/test_faults.py": {
        "a worker is killed": "test_workers_killed_at_any_moment_change_nothing",
        "`num_deaths` workers die": "test_a_sample_that_always_kills_is_named_and_left_out",
        "`max_worker_deaths` workers": "test_the_number_of_successive_deaths_can_be_chosen",
        "Ctrl-C": "test_ctrl_c_ends_the_workers_and_the_iterator_continues",
    },
    "sources/test_stream_shards.py": {"a request to storage": "test_members_that_come_damaged_are_read_again"},
    "storage/test_responses.py": {"a remote shard or file": "test_a_stream_joins_no_two_versions"},
    "storage/test_index_home.py": {
        "a corrected shard": "test_a_shard_that_has_changed_since_is_indexed_again",
        "the labels of shards": "test_a_run_after_another_one_sees_new_labels",
    },
    "sources/test_image_folder.py": {"a remote image": "test_a_file_that_stays_cut_is_an_error_and_never_kept"},
    "storage/test_tar.py": {"the end of a shard": "test_more_zeros_than_end_a_tar_are_an_error"},
    "delivery/test_lifetimes.py": {
        "the main process is killed": "test_workers_end_with_their_parent_though_a_child_lives_on",
        "a forked child": "test_a_forked_child_cannot_go_on_with_an_iterator",
    },
    "test_resume.py": {"a state is loaded": "test_a_run_with_changing_workers_equals_one_process"},
    "delivery/test_absurd_states.py": {
        "a state is damaged": "test_absurd_entries_are_errors_or_epochs_at_once",
    },
    "delivery/test_torchdata_services.py": {"several threads": "test_threads_share_one_iterator"},
    "delivery/test_ranks_apart.py": {"the ranks of a process": "test_another_epoch_is_an_error_on_all_ranks"},
    "test_growth.py": {"thousands of epochs": "test_epochs_and_skips_leave_nothing"},
}
READS_PICKLES = {  # of users' own chains and callables, and what their processes send each other
    *("callback.py", "dataloader2.py", "jobs.py", "shared.py", "buffers.py", "channel.py", "processes.py"),
    *("checks.py", "stores.py"),
    "codec.py",  # with `allow_pickle=True` alone
}
RUNS_CODE = {"_chain_of.py", "folder_watcher.py"}  # the file of the user; itself


def sentences(page: Path, heading: str) -> list[str]:
    """Return what a page lists: each point, and each row of the table under a heading."""
    text = page.read_text(encoding="utf-8")
    table = text.partition(f"| {heading} |")[2].partition("\n\n")[0]
    rows = [line.strip("| ") for line in table.splitlines()[2:]]
    return [line[2:] for line in text.splitlines() if line.startswith("- ")] + rows


@pytest.mark.parametrize(("page", "heading", "proofs"), [(PAGE, "option", PROOFS), (RELIABILITY, "event", GUARANTEES)])
def test_each_sentence_of_the_page_has_a_test(page: Path, heading: str, proofs: dict[str, dict[str, str]]) -> None:
    found = sentences(page, heading)
    begins = [begin for of_file in proofs.values() for begin in of_file]
    assert [text for text in found if sum(map(text.startswith, begins)) != 1] == []
    assert [begin for begin in begins if not any(text.startswith(begin) for text in found)] == []
    for file, of_file in proofs.items():
        defined = set(re.findall(r"^def (test_\w+)\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.M))
        assert set(of_file.values()) <= defined, file


def calls(names: set[str]) -> set[str]:
    """Return the modules that call some functions."""
    found = set()
    for path in (ROOT / "kdpipes").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                found.add(path.name)
    return found


def test_pickles_are_read_in_few_places() -> None:
    loads = {
        f"{module}.{name}" for module in ("pickle", "cloudpickle", "dill") for name in ("load", "loads", "Unpickler")
    }
    assert calls(loads) == READS_PICKLES
    assert (
        calls({"eval", "exec", "os.system", "os.popen", "runpy.run_path", "subprocess.Popen", "subprocess.run"})
        <= RUNS_CODE
    )
    assert "_chain_of.py" in calls({"runpy.run_path"})


class Trap:
    """What would leave a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_data_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    pickled = pickle.dumps(Trap(trap))
    torch.save(Trap(trap), tmp_path / "0.pt")
    array = io.BytesIO()
    np.save(array, np.array([Trap(trap)], dtype=object), allow_pickle=True)
    contents = {"pkl": pickled, "pickle": pickled, "pyd": pickled, "npy": array.getvalue(), "npz": array.getvalue()}
    contents |= {name: (tmp_path / "0.pt").read_bytes() for name in ("pt", "pth")}
    contents |= {"json": b'{"a": 1}', "py": b"raise SystemExit", "yaml": b"!!python/object/apply:os.abort []"}
    with TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        writer.write({"__key__": "0", **contents})
    kdp.write_shards(kdp.open_shards(tmp_path / "a.tar", decode=False), str(tmp_path / "b-%d.tar"), max_samples=1)
    for source in (kdp.open_shards, kdp.stream_shards):
        for sample in source([tmp_path / "a.tar", tmp_path / "b-0.tar"]):
            for name in sample:
                with suppress(ValueError):  # DataError, or what NumPy says
                    sample[name]
    for name, content in contents.items():
        (tmp_path / f"1.{name}").write_bytes(content)
        with suppress(kdp.DataError):
            kdp.from_ids([1], load=f"{tmp_path}/{{id}}.{name}")[0]["x"]
    assert not trap.exists()
    pickle.loads(pickled)
    assert trap.exists(), "the trap works"


def test_nothing_listens_while_workers_run() -> None:
    chain = kdp.from_dataset(list(range(64)), "x").select("x").deal(batch_size=1).collate_samples()
    before = {inode for pid in [os.getpid(), *map(int, children())] for inode in listeners(pid)}  # of other tests
    with kdp.Loader(chain, num_workers=2) as loader:
        batches = iter(loader)
        next(batches)
        ours = [os.getpid(), *(int(pid) for pid in children())]
        listening = {inode for pid in ours for inode in listeners(pid)} - before
        assert len(ours) > 2
        assert not listening
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            door.listen()
            assert listeners(os.getpid()), "a socket that listens is found"


def children() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += (task / "children").read_text().split()
    return found


def listeners(pid: int) -> set[str]:
    """Return the sockets of a process that listen: of TCP in state 0A, of Unix with the flag 10000."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(link.readlink()))
    found = set()
    for table in ("tcp", "tcp6", "unix"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            listens = parts[3] == "00010000" if table == "unix" else parts[3] == "0A"
            inode = parts[6] if table == "unix" else parts[9]
            found |= {inode} if listens and f"socket:[{inode}]" in own else set()
    return found


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard of three samples."""
    with TarWriter(str(tmp_path / "a.tar"), mtime=0) as writer:
        for n in range(3):
            writer.write({"__key__": f"{n}", "txt": f"heron {n}", "cls": n})
    return tmp_path / "a.tar"


def forge(shard: Path, **changes: Any) -> None:
    """Put an index beside a shard that is not what `kdpipes` makes of it, with the right checksum."""
    index = index_shard(str(shard), version_of(str(shard)), with_checksums=True)
    text = index.fields["txt"]
    fields = {"txt": Places(changes.get("offsets", text.offsets), changes.get("sizes", text.sizes), text.checksums)}
    keys = PackedStrings(changes.get("keys", list(index.keys)))
    fields["cls"] = Places(
        index.fields["cls"].offsets, index.fields["cls"].sizes, None, changes.get("labels", np.arange(3))
    )
    Path(f"{shard}.index").write_bytes(ShardIndex(index.version, keys, fields).to_bytes())


def test_a_hostile_index_reads_no_other_file(shard: Path, tmp_path: Path) -> None:
    make_index(str(shard), with_checksums=True)
    assert str(tmp_path).encode() not in Path(f"{shard}.index").read_bytes()
    (tmp_path / "secret").write_bytes(b"secret" * 9)
    offsets = np.array([-(1 << 40), 1 << 60, 512])
    forge(shard, offsets=offsets, sizes=np.array([100, 1 << 50, 7]), keys=["../secret", f"{tmp_path}/secret", "0"])
    for root in (str(tmp_path), "faulty://"):
        with faulty_storage(str(tmp_path)) as files:
            pipe = kdp.open_shards(f"{root}/a.tar" if root != "faulty://" else "faulty://a.tar")
            for index in range(len(pipe)):
                try:
                    assert b"secret" not in str(pipe[index]["txt"]).encode()
                except (kdp.DataError, KeyError):
                    continue
            assert {request.path for request in files.requests()} <= {"a.tar", "a.tar.index", "a-shards.json"}


def test_the_checksum_of_an_index_proves_no_author(shard: Path) -> None:
    forge(shard, labels=np.array([2, 2, 2]))
    assert kdp.open_shards(shard).column("cls").tolist() == [2, 2, 2], "whoever writes there decides about labels"
    with pytest.raises(kdp.DataError, match="cannot be verified: it has no index with checksums"):
        list(kdp.stream_shards(shard, verify=True))


def test_a_state_is_read_without_pickles(tmp_path: Path) -> None:
    chain = kdp.from_dataset(list(range(8)), "x").select("x").deal(batch_size=2, shuffle=True).collate_samples()
    with kdp.Loader(chain) as loader:
        batches = iter(loader)
        next(batches)
        torch.save(loader.state_dict(), tmp_path / "state.pt")
        rest = [x.tolist() for (x,) in batches]
    with kdp.Loader(chain) as loader:
        loader.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert [x.tolist() for (x,) in loader] == rest


def modes(folder: Path, pattern: str) -> set[str]:
    return {oct(path.stat().st_mode & 0o777) for path in folder.glob(pattern)}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_have_the_modes_that_the_page_says(umask: int, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDPIPES_CACHE_DIR", raising=False)
    folder = shard.parent
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home"))
    before = os.umask(umask)
    try:
        shared = SharedFolder("modes")
        assert oct(Path(shared.path).stat().st_mode & 0o777) == "0o700"
        del shared
        kdp.from_ids([1], load=str).cache_on_disk(folder / "cache")[0]["x"]
        kdp.write_records(kdp.open_shards(shard), folder / "records", num_parts=1)
        kdp.write_shards(kdp.open_shards(shard), str(folder / "out" / "b-%d.tar"), max_samples=9)
        copy_to_local(folder / "out", folder / "copy")
        with faulty_storage(str(folder / "out")):
            list(kdp.open_shards("faulty://b-0.tar", fetch="shards").select("txt").deal(batch_size=1))
    finally:
        os.umask(before)
    assert modes(folder / "cache", "*.mdb") == {"0o600"}
    assert modes(folder / "home" / "kdpipes", "*") == {"0o700"}
    usual = {oct(0o666 & ~umask)}
    assert (
        modes(folder / "out", "*.tar") == modes(folder / "out", "*.index") == modes(folder / "copy", "*.tar") == usual
    )
    assert modes(folder / "records", "*") <= usual | {"0o600"}
