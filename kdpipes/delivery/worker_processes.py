"""torchdata's worker processes, made safe against their own death and against Ctrl-C."""

from __future__ import annotations

import pickle
import queue
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import MultiProcessingReadingService
from torchdata.dataloader2.communication.messages import GetNextResponse

from kdpipes._iter_pipe import Streaming
from kdpipes.errors import WorkerError, add_note

__all__ = ["WorkerProcesses"]

_PATIENCE_S = 2.0
_LOOK_AGAIN_S = 0.2


class WorkerProcesses(MultiProcessingReadingService):  # type: ignore[misc]  # torchdata carries no types
    """torchdata's `MultiProcessingReadingService` without its prefetching threads, which cost speed.

    A worker that dies is an error here, not a wait without end; workers leave Ctrl-C to the main process, so that the
    loader can be iterated again after it; and they are ended without asking them first.

    Args:
        num_workers: The number of worker processes.
        multiprocessing_context: How they start: "fork", "spawn", "forkserver"; None is the platform's way.
    """

    _worker_processes: list[Any]
    _worker_datapipes: list[Any]
    _dispatch_process: Any

    def __init__(self, num_workers: int, multiprocessing_context: str | None = None) -> None:
        super().__init__(
            num_workers,
            multiprocessing_context,
            worker_prefetch_cnt=0,
            main_prefetch_cnt=0,
            worker_init_fn=_leave_interrupts,
        )

    def initialize(self, datapipe: Any) -> Any:
        with _without_banner():
            end = super().initialize(_Packer(datapipe))
        for (process, *_), received in zip(self._worker_processes, self._worker_datapipes, strict=True):
            received.protocol.response_queue = _WatchedQueue(received.protocol.response_queue, process)
        return _Unpacker(end)

    def finalize(self) -> None:
        processes = [process for process, *_ in self._worker_processes]
        if self._dispatch_process is not None:
            processes.append(self._dispatch_process[0])
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()
        for _, *queues in self._worker_processes:
            for messages in queues:
                messages.cancel_join_thread()
                messages.close()
        self._worker_processes, self._dispatch_process = [], None


@contextmanager
def _without_banner() -> Iterator[None]:
    """Keep spawned workers, which import torchdata before kdpipes, from printing its banner (see `__init__`)."""
    option = "ignore::UserWarning:torchdata.datapipes"
    sys.warnoptions.append(option)
    try:
        yield
    finally:
        sys.warnoptions.remove(option)


def _leave_interrupts(datapipe: Any, worker_info: Any) -> Any:
    """Let a worker ignore Ctrl-C, which reaches all processes of a terminal or a notebook."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return datapipe


class _Packer(Streaming[Any], IterDataPipe[Any]):
    """Pickles what a worker sends, where a failure can still be told; torchdata does it later, and then hangs."""

    def __init__(self, source_datapipe: Any) -> None:
        self._source = source_datapipe

    def iterate(self) -> Iterator[tuple[bool, bytes]]:
        try:
            for item in self._source:
                yield True, _packed(item)
        except Exception as error:
            yield False, _packed_error(error)


class _Unpacker(Streaming[Any], IterDataPipe[Any]):
    """What workers sent, in the main process: items are yielded, errors raised with their own types."""

    def __init__(self, source_datapipe: Any) -> None:
        self._source = source_datapipe

    def iterate(self) -> Iterator[Any]:
        for is_item, content in self._source:
            if not is_item:
                raise content
            yield content


def _packed(item: Any) -> bytes:
    """Return an item as bytes: tensors by shared memory; by cloudpickle what only a notebook knows."""
    try:
        return bytes(ForkingPickler.dumps(item))
    except Exception as error:
        try:
            payload: bytes = cloudpickle.dumps(item)
        except Exception:
            raise TypeError(f"A batch cannot be sent from a worker process: {error} Return plain data.") from error
        return payload


def _packed_error(error: Exception) -> bytes:
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    add_note(error, f"In a worker process:\n{lines.rstrip()}")
    try:
        payload: bytes = cloudpickle.dumps(error)
        pickle.loads(payload)  # noqa: S301 - made in the line above: an error that cannot be made again is sent as text
    except Exception:
        payload = cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}\n{lines.rstrip()}"))
    return payload


class _WatchedQueue:
    """A queue of a worker's answers that looks after the worker while it is empty, and unpacks what it sent.

    Everything is unpacked, also what a broken-off epoch discards: it holds descriptors of shared memory.
    """

    def __init__(self, messages: Any, process: Any) -> None:
        self._messages = messages
        self._process = process

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while True:
            is_over = self._process.exitcode is not None  # asked before: what came earlier is still in the queue
            try:
                message = self._messages.get(
                    block=block, timeout=_LOOK_AGAIN_S if block and timeout is None else timeout
                )
                return _unpacked(message)
            except queue.Empty:
                if is_over:
                    raise WorkerError(_obituary(self._process)) from None
                if not block or timeout is not None:
                    raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._messages, name)


def _unpacked(message: Any) -> Any:
    if isinstance(message, GetNextResponse):
        is_item, payload = message.value
        message.value = is_item, pickle.loads(payload)  # noqa: S301 - sent by our own worker
    return message


def _obituary(process: Any) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        end = f"ended with status {code} before its work was done"
    else:
        end = f"was ended by signal {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        end += ", as the system does when memory runs out: try fewer workers"
    return f"Worker process {process.pid} {end}. What it printed says more. Iterating again starts new workers."
