"""The one table of names: the pipes of kdpipes, and what the package offers besides.

The import registers the pipes of this table. `make names` writes from it what else depends on names: the types of
chains (`_fluent.pyi`) and of the package (`__init__.pyi`), and the table of pipes in the README.
"""

from __future__ import annotations

from typing import NamedTuple


class Pipe(NamedTuple):
    """A pipe, as the table of the README shows it.

    Args:
        stage: "plan", "work" or "delivery".
        call: The call, with the arguments that matter most.
        docs: The section that describes it, below docs/.
        text: What it does, in a few words.
        modules: The modules that register it, without `kdpipes.` and separated by blanks. By default, the module of its
            name in the folder `stage`.
    """

    stage: str
    call: str
    docs: str
    text: str
    modules: str = ""

    @property
    def name(self) -> str:
        """The functional name."""
        return self.call.partition("(")[0]

    @property
    def homes(self) -> list[str]:
        """The full names of the modules."""
        return [f"kdpipes.{module}" for module in (self.modules or f"{self.stage}.{self.name}").split()]


PIPES = (
    Pipe("plan", "filter_classes(valid=)", "plan.md#choose", "keeps or drops classes, without renumbering"),
    Pipe("plan", "filter_samples(columns=, keep=)", "plan.md#choose", "keeps samples by their columns"),
    Pipe("plan", 'map_classes({"a": "b"})', "plan.md#rename-and-merge-classes", "merges, drops, renumbers"),
    Pipe("plan", 'oversample(mode="exact")', "plan.md#balance", "repeats rare classes until all are equal"),
    Pipe("plan", "sample_weighted(weights)", "plan.md#balance", "draws by the weight of a sample or class"),
    Pipe("plan", "few_shot(shots)", "plan.md#choose", "takes exactly `shots` samples of each class"),
    Pipe("plan", "take_per_class(num_samples=)", "plan.md#choose", "takes at most this many of each class"),
    Pipe("plan", "take_percent(to_percent=0.8)", "plan.md#split", "takes the first 80 %; compare `kdp.split`"),
    Pipe("plan", "subset(indices)", "plan.md#choose", "takes positions; slices do too: `pipe[5:-3:2]`"),
    Pipe("plan", "permute(seed)", "plan.md#split", "shuffles once, the same in every epoch"),
    Pipe("plan", "repeat_until(min_size=)", "plan.md#repeat", "repeats the whole source"),
    Pipe("plan", "mix(others, weights=)", "plan.md#several-sources", "interleaves sources in proportion"),
    Pipe("plan", "join(other, how=)", "plan.md#several-sources", "adds another source's fields, by key"),
    Pipe(
        "work",
        "to_samples(key=, label=)",
        "sources.md#stock-pipes",
        "makes samples from torch's DataPipes",
        "sources.to_samples",
    ),
    Pipe(
        "work",
        "localize_files(local_root)",
        "sources.md#slow-storage",
        "copies files to a local disk",
        "write.localize",
    ),
    Pipe("work", 'rename_fields(x="jpg;png")', "work.md#fields", "renames fields", "work.fields"),
    Pipe("work", "add_field(name, function)", "work.md#fields", "computes one more field", "work.fields"),
    Pipe(
        "work", "decode_images(field)", "work.md#decode", "makes images, decoded when pixels are needed", "work.decode"
    ),
    Pipe("work", "transform(field, *callables)", "work.md#transform", "applies callables, seeded by sample"),
    Pipe("work", "transform_batch(field, function)", "work.md#many-at-once", "calls it once for many values"),
    Pipe(
        "work",
        "record_ctx()",
        "work.md#recorded-augmentation",
        "records random choices, for `kdp.replay`",
        "work.fields",
    ),
    Pipe("work", "cache_in_memory()", "caches.md", "keeps fields in memory, one copy per machine", "cache.cache"),
    Pipe(
        "work", "cache_on_disk(url)", "caches.md#on-disk", "keeps fields for later runs, with checksums", "cache.cache"
    ),
    Pipe("work", "cache_in_redis(url)", "caches.md#in-redis", "keeps fields for other machines", "cache.cache"),
    Pipe("work", "cache(store)", "caches.md#a-store-of-your-own", "keeps fields in a store of your own", "cache.cache"),
    Pipe("work", 'on_error("skip")', "work.md#samples-that-cannot-be-made", "leaves out bad samples"),
    Pipe("work", 'select("x y")', "work.md#fields", "loads these fields and returns them as a tuple", "work.fields"),
    Pipe(
        "delivery",
        "deal(batch_size=)",
        "delivery.md",
        "cuts epochs into batches, for all ranks and workers",
        "delivery.deal delivery.deal_stream",
    ),
    Pipe("delivery", "collate_samples(pad=)", "delivery.md", "stacks tensors; images: `[B, C, H, W]`"),
    Pipe("delivery", "mixup(num_classes=)", "delivery.md#mixed-batches", "blends pairs of images", "delivery.mixing"),
    Pipe(
        "delivery",
        "cutmix(num_classes=)",
        "delivery.md#mixed-batches",
        "pastes boxes between images",
        "delivery.mixing",
    ),
    Pipe("delivery", "to_device(device)", "delivery.md#to-the-device", "copies batches to the GPU, one ahead"),
    Pipe("delivery", "peek(n)", "looking.md#first-samples", "returns the first samples, to print", "look.peek"),
)
PUBLIC = {  # what `kdpipes` offers: the module and the name in it
    "BatchPipe": ("delivery.batch_pipe", "BatchPipe"),
    "CenterCrop": ("work.transforms", "CenterCrop"),
    "ChainError": ("core.errors", "ChainError"),
    "ColorJitter": ("work.transforms", "ColorJitter"),
    "DataError": ("core.errors", "DataError"),
    "FieldError": ("core.errors", "FieldError"),
    "HorizontalFlip": ("work.transforms", "HorizontalFlip"),
    "IterPipe": ("core.iter_pipe", "IterPipe"),
    "KdpipesError": ("core.errors", "KdpipesError"),
    "Loader": ("loader.loader", "Loader"),
    "MapPipe": ("core.map_pipe", "MapPipe"),
    "Normalize": ("work.transforms", "Normalize"),
    "Operation": ("core.operation", "Operation"),
    "PlanPipe": ("core.plan_pipe", "PlanPipe"),
    "ProcessReadingService": ("loader.services", "ProcessReadingService"),
    "RandomResizedCrop": ("work.transforms", "RandomResizedCrop"),
    "Resize": ("work.transforms", "Resize"),
    "Sample": ("core.sample", "Sample"),
    "SampleKey": ("core.randomness", "SampleKey"),
    "SampleSource": ("sources.from_dataset", "SampleSource"),
    "ThreadReadingService": ("loader.services", "ThreadReadingService"),
    "ToTensor": ("work.transforms", "ToTensor"),
    "Traits": ("core.traits", "Traits"),
    "WorkerError": ("core.errors", "WorkerError"),
    "by_class": ("delivery.by_class", "ByClass"),
    "by_length": ("delivery.grouped", "ByLength"),
    "by_shard": ("delivery.by_shard", "ByShard"),
    "by_value": ("delivery.grouped", "ByValue"),
    "class_counts": ("plan.class_counts", "class_counts"),
    "concat": ("plan.concat", "ConcatenatorMapDataPipe"),
    "doctor": ("look.doctor.examine", "doctor"),
    "doctor_rule": ("look.doctor.rules", "doctor_rule"),
    "find": ("loader.find", "find"),
    "from_dataset": ("sources.from_dataset", "DatasetReaderMapDataPipe"),
    "from_ids": ("sources.from_ids", "IdReaderMapDataPipe"),
    "from_table": ("sources.from_table", "TableReaderMapDataPipe"),
    "from_webdataset": ("sources.from_webdataset", "WebDatasetReaderIterDataPipe"),
    "functional_pipe": ("core.registry", "functional_pipe"),
    "image_folder": ("sources.image_folder", "ImageFolderMapDataPipe"),
    "index_shards": ("sources.index_shards", "index_shards"),
    "lanes": ("delivery.lanes", "Lanes"),
    "open_cache": ("cache.open_cache", "CacheReaderMapDataPipe"),
    "open_records": ("sources.open_records", "RecordReaderMapDataPipe"),
    "open_shards": ("sources.open_shards", "ShardReaderMapDataPipe"),
    "own_batches": ("delivery.own_order", "OwnBatches"),
    "own_order": ("delivery.own_order", "OwnOrder"),
    "packed": ("delivery.packed", "Packed"),
    "plot_classes": ("look.figures", "plot_classes"),
    "profile": ("look.profile", "profile"),
    "replay": ("work.replay", "replay"),
    "sample_pipe": ("core.sample_pipe", "sample_pipe"),
    "show_batch": ("look.batch", "show_batch"),
    "split": ("plan.split", "split"),
    "stream_shards": ("sources.stream_shards", "ShardStreamerIterDataPipe"),
    "write_records": ("write.records", "write_records"),
    "write_shards": ("write.shards", "write_shards"),
}
