"""Commands about chains and their runs: `demo`, `doctor`, `find`, `replay` and `verify`."""

from __future__ import annotations

import contextlib
import sys

from kdpipes.cli._chain_of import chain_of, list_chains
from kdpipes.cli._commands import Answer, command, read_json, wants_json


@command
def demo(*, output: str = "kdpipes-demo", num_workers: int = 2, num_epochs: int = 2) -> Answer:
    """Run the main job on the shipped photos.

    Writes 160 photos as an image folder and as tar shards, runs one chain on both (a class filter, oversampling,
    recorded random crops, shuffled batches), and draws a batch: each photo, and the result.

    Args:
        output: Folder for photos and picture.
        num_workers: Worker processes.
        num_epochs: Epochs.

    Examples:
      kdpipes demo
      kdpipes demo --output try --num-workers 0 --num-epochs 1
      kdpipes demo --output try --num-epochs 1 --json

    JSON:
      {"path": "kdpipes-demo/batch.png"}
      path: the picture. What the demo reports goes to stderr.
    """
    from kdpipes.demo import run_demo

    with contextlib.redirect_stdout(sys.stderr) if wants_json() else contextlib.nullcontext():
        picture = run_demo(output, num_workers=num_workers, num_epochs=num_epochs)
    return Answer({"path": str(picture)}, [])


@command
def doctor(chain: str, *, num_workers: int = 2, seconds: float = 5.0, measure: bool = True) -> Answer:
    """Report what is wrong with a chain, what bounds it, and what would help most.

    Inspects the chain, makes its first batch twice, and runs it for some seconds. If something is wrong, the exit
    status is 1; hints do not count.

    CHAIN is module:name or file.py:name, a pipe or a function that makes it. The module is run. If only a file or a
    module is named, its chains are listed.

    Args:
        num_workers: Workers that the chain is to run with.
        seconds: How long to measure.
        measure: Run the chain.

    Examples:
      kdpipes doctor train.py:chain --seconds 1
      kdpipes doctor train.py
      kdpipes doctor train:chain --no-measure
      kdpipes doctor train:chain --no-measure --json

    JSON:
      chains        if only a file is named: its chains; nothing else then
      is_clean      false if something is wrong
      findings      [{"code", "severity", "pipe", "what", "why", "fix"}]
      decoders      what decodes JPEGs, and in which version
      bound         "storage", "decoding", "transfer", ..., or null
      shares        of the time, by kind of work, or null
      advice        the changes that would help, the best one first
      shuffle       how well the chain shuffles, or null
      profile       where the time goes, or null
    """
    from kdpipes.look.doctor.examine import doctor

    if ":" not in chain:
        return list_chains(chain)
    report = doctor(chain_of(chain), num_workers=num_workers, seconds=seconds, measure=measure)
    return Answer(report.to_dict(), str(report), 0 if report.is_clean else 1)


@command
def replay(
    chain: str, *, seed: int | None = None, epoch: int = 0, batch: int = 0, field: str = "x", out: str = "grid.png"
) -> Answer:
    """Draw any batch of any epoch.

    The picture shows the original of each sample beside the result. No other batch is made.

    CHAIN is module:name or file.py:name, a pipe or a function that makes it. The module is run.

    Args:
        seed: The seed of the epoch.  [default: that of the chain's deal]
        epoch: The number of the epoch.
        batch: The number of the batch.
        field: Field of images.
        out: Picture to write.

    Examples:
      kdpipes replay train.py:chain
      kdpipes replay train:chain --epoch 3 --batch 1 --out third.png
      kdpipes replay train:chain --json

    JSON:
      {"path": "grid.png", "epoch": 0, "batch": 0}
    """
    from kdpipes.look.batch import replay_grid

    replay_grid(chain_of(chain), seed=seed, epoch=epoch, batch=batch, field=field).save(out)
    return Answer({"path": out, "epoch": epoch, "batch": batch}, f"Batch {batch} of epoch {epoch}: {out}")


@command
def find(
    chain: str,
    *,
    epoch: int | None = None,
    num_epochs: int = 1,
    batch: int | None = None,
    step: int | None = None,
    key: str | None = None,
    state: str | None = None,
    num_ranks: int | None = None,
) -> Answer:
    """Name the samples of a batch, or the batches that have a sample.

    Nothing needs to have been recorded during the run. CHAIN is module:name or
    file.py:name, a pipe or a function that makes it. The module is run.

    Args:
        epoch: First epoch to look at.  [default: that of the state, or 0]
        num_epochs: Number of epochs to look at.
        batch: Number of the batch in the epoch.
        step: Number of the batch since the start of the run.
        key: Key of a sample.
        state: JSON file of a state of the loader.
        num_ranks: Ranks of the run.  [default: that of the state, or 1]

    Examples:
      kdpipes find train.py:chain --step 34120
      kdpipes find train:chain --key cat/0012.jpg --num-epochs 10
      kdpipes find train:chain --state state.json --json

    JSON:
      {"samples": [{"epoch": 0, "batch": 3, "rank": 0, "ordinal": 6,
                    "position": 1, "key": "1", "label": 1,
                    "is_padding": false}]}
    """
    from kdpipes.core.errors import check_count
    from kdpipes.loader.find import find

    loaded = None if state is None else read_json(state, "loader.state_dict()")
    check_count("num_epochs", num_epochs)
    is_default = epoch is None and num_epochs == 1
    epochs = None if is_default else range(epoch or 0, (epoch or 0) + num_epochs)
    found = find(chain_of(chain), loaded, batch, epoch=epochs, step=step, key=key, num_ranks=num_ranks)
    samples = [sample._asdict() for sample in found.samples]
    return Answer({"samples": samples}, str(found))


@command
def verify(receipts: tuple[str, ...]) -> Answer:
    """Check that loaders delivered an epoch exactly once.

    RECEIPTS are JSON files of what `receipt()` of a Loader returned, or of lists of that: of all ranks, and of all
    parts of an epoch that was resumed. If a batch is missing or came twice, the exit status is 1.

    Examples:
      kdpipes verify receipt-0.json receipt-1.json
      kdpipes verify receipt-0.json receipt-1.json --json

    JSON:
      {"is_complete": true, "num_samples": 160, "num_skipped": 0,
       "epochs": [0], "problems": [], "unknown": []}
      problems      one sentence for each gap, and for each batch that came twice
      unknown       what receipts of a stream cannot show, such as how many
                    samples it has
    """
    from kdpipes.loader.receipt import verify_receipts

    found = []
    for path in receipts:
        content = read_json(path, "loader.receipt()")
        found += content if isinstance(content, list) else [content]
    verdict = verify_receipts(found)
    return Answer(verdict._asdict(), str(verdict), 0 if verdict.is_complete else 1)
