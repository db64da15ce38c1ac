"""The ways to load the corpus: kdpipes, its peers, each with the least code that its own documentation asks for.

A contender is opened with the corpus' folder, the number of workers and the batch size; it is a context manager, and
each pass over what it gives is an epoch of pairs, uint8 [B, 3, 224, 224] and classes. A module here imports its library
at the top: where that is missing, only its contenders are.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BASELINE", "CONTENDERS", "KDPIPES", "Contender"]


class Contender(NamedTuple):
    """A row of the table: where it is opened (`module:function`), what is installed for it, or why it is not run."""

    name: str
    opener: str
    distributions: tuple[str, ...] = ()
    remark: str = ""
    absent: str = ""


BASELINE = "torch DataLoader, Pillow"
KDPIPES = "kdpipes open_shards"

CONTENDERS = [
    Contender(KDPIPES, "with_kdpipes:indexed", ("kdpipes",), "tars, defaults"),
    Contender("kdpipes image_folder", "with_kdpipes:folder", ("kdpipes",), "files, defaults"),
    Contender("kdpipes stream_shards", "with_kdpipes:streamed", ("kdpipes",), "tars, defaults"),
    Contender("kdpipes open_shards, Pillow only", "with_kdpipes:by_pillow_only", ("kdpipes", "pillow"), "tars"),
    Contender("kdpipes, decoded images in memory", "with_kdpipes:in_memory", ("kdpipes",), "tars; second epoch"),
    Contender(BASELINE, "with_torch:by_pillow", ("torch", "pillow"), "files"),
    Contender("torch DataLoader, simplejpeg", "with_torch:by_simplejpeg", ("torch", "simplejpeg"), "files"),
    Contender("webdataset", "with_webdataset:web_loader", ("webdataset",), "tars; Pillow"),
    Contender("LitData", "with_litdata:streaming", ("litdata",), "its chunks; Pillow"),
    Contender("SPDL", "with_spdl:pipeline", ("spdl",), "files; FFmpeg, threads"),
    Contender("torchdata DataLoader2, in batches", "with_torchdata:in_batches", ("torchdata",), "tars; Pillow"),
    Contender("torchdata DataLoader2, by item", "with_torchdata:by_item", ("torchdata",), "tars; Pillow"),
    Contender("KappaData", "with_kappadata:mode_wrapper", ("kappadata",), "files; Pillow"),
    Contender("FFCV", "with_ffcv:loader", ("ffcv",), "its file of the same JPEGs; threads"),
    Contender("Hugging Face datasets", "with_datasets:with_transform", ("datasets",), "files; Pillow"),
    Contender("Grain", "with_grain:dataset", ("grain",), "files; Pillow"),
    Contender(
        "MosaicML Streaming", "", absent="it insists on transformers, torchvision (with CUDA) and NumPy below 2.2"
    ),
]
