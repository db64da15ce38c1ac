"""A real Dask cluster of two processes writes the shards that this process would write."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import kdpipes as kdp
from kdpipes.storage.jobs import run_jobs
from tests.write.shards import tars_in

LIMITS = {"samples": {"max_samples": 30}, "bytes": {"max_bytes": 150_000}}

pytestmark = [  # how Dask's own sockets and files end is its business
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[Executor]:
    """The executor of a cluster."""
    folder = str(tmp_path / "dask")
    options: dict[str, Any] = {"dashboard_address": ":0", "local_directory": folder, "threads_per_worker": 1}
    with LocalCluster(n_workers=2, processes=True, **options) as cluster, Client(cluster) as client:
        yield client.get_executor()


def test_a_cluster_writes_the_same_bytes_and_resumes(photo_folder: Path, tmp_path: Path, dask: Executor) -> None:
    scale = 1
    chain = kdp.image_folder(photo_folder).transform("y", lambda y: y * scale)  # a closure travels, too
    for name, limits in LIMITS.items():
        here, there = tmp_path / name / "here", tmp_path / name / "there"
        kdp.write_shards(chain, here / "train-%06d.tar", **limits)
        for num_found in (0, 3):
            result = kdp.write_shards(chain, there / "train-%06d.tar", **limits, executor=dask)
            assert (result.num_samples, result.num_found) == (160, num_found)
            assert tars_in(there) == tars_in(here)
            for url in result.urls[3:]:
                Path(f"{url}.index").unlink()
    with pytest.raises(ZeroDivisionError) as caught:
        list(run_jobs(lambda job: 1 // (job - 1), range(100), executor=dask, num_workers=2, what="working"))
    assert "kdpipes: while working: 1" in caught.value.__notes__
