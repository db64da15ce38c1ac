"""Move batches to the device for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import get_worker_info

from kdpipes.core.errors import ChainError, check_type, must_be
from kdpipes.core.registry import functional_pipe
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.core.traits import Traits
from kdpipes.delivery.dealer import Resumable


@functional_pipe("to_device", flavour="iter", otherwise="Put `.deal(batch_size=...).collate_samples()` before it.")
class DeviceMoverIterDataPipe(Resumable, IterDataPipe[Any]):
    """Moves the tensors of each batch to a device (functional name: ``to_device``).

    This pipe and all pipes after it run in the main process. For a CUDA device, a thread copies each batch to pinned
    memory and sends it on a separate CUDA stream while the batch before it is used. The stream that is current when the
    batch is returned waits for it. A batch is returned at once, even if the workers have not made the next one. Send
    images as uint8, which take a quarter of the memory of float32, and normalize them on the device:
    `x.float().div_(255)`.

    Args:
        source_datapipe: A stream of batches: tensors in tuples, lists and mappings, which become dictionaries. Objects
            of other classes do not change, even if they contain tensors.
        device: The device: `"cuda"`, `"cuda:1"`, `"cpu"`, or a `torch.device`.

    Length: The length of the source.

    Memory: Two batches on the device.

    Raises:
        ValueError: This machine has no such device. The error is raised when iteration begins, because a chain may be
            built on another machine.
        ChainError: The pipe runs in a worker process of torch's DataLoader.

    Example:
        >>> pipe = kdp.from_dataset([(1, 0), (2, 1)]).select("x y").deal(batch_size=2).collate_samples()
        >>> next(iter(pipe.to_device("cpu")))
        (tensor([1, 2]), tensor([0, 1]))
    """

    traits = Traits(role="device", gives="batches")

    def __init__(self, source_datapipe: IterDataPipe[Any], device: str | torch.device) -> None:
        check_type("source_datapipe", source_datapipe, IterDataPipe, "a stream of batches")
        check_type("device", device, str | torch.device, 'a device like "cuda" or "cuda:1"')
        try:
            self._device = torch.device(device)
        except RuntimeError:
            raise ValueError(must_be("device", 'a device like "cuda" or "cuda:1"', device)) from None
        self.source = source_datapipe

    def __len__(self) -> int:
        return len(self.source)

    def is_replicable(self) -> bool:
        """Return False, so that reading services keep this pipe in the main process."""
        return False

    def iterate(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ChainError(
                "`.to_device()` runs in the main process, but this is a worker of torch's DataLoader. Use "
                "`kdp.Loader`, or move the batches in the loop."
            )
        _check_device(self._device)
        if self._device.type == "cuda":
            return _ahead(iter(self.source), _OnStream(self._device, self.copy))
        # Synchronous, because the memory may be reused for another batch.
        return (_mapped(batch, lambda tensor: tensor.to(self._device)) for batch in self.source)

    def copy(self, send: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
        """Return a batch whose tensors `send` has sent. A method, so that the profiler can measure it."""
        return _mapped(batch, send)


def _check_device(device: torch.device) -> None:
    """Raise ValueError if this machine or this version of torch does not have a device."""
    if device.type == "cuda":
        number = torch.cuda.device_count()
        if (device.index or 0) < number:
            return
        found = f"torch {torch.__version__} finds {number or 'no'} CUDA device{'' if number == 1 else 's'} here"
    else:
        try:
            torch.empty(0, device=device)
            return
        except (AssertionError, NotImplementedError, RuntimeError) as error:  # depending on the device
            found = str(error).partition("\n")[0].rstrip(".")
    hint = f'{found}. `.to_device("cuda" if torch.cuda.is_available() else "cpu")` runs on any machine.'
    raise ValueError(must_be("device", "one that this machine has", str(device), hint))


class _OnStream:
    """Sends batches to a CUDA device on a separate CUDA stream, in a thread of its own.

    `copy(send, batch)` is called in that thread, and returns the batch with `send` applied to its tensors.
    """

    def __init__(
        self, device: torch.device, copy: Callable[[Callable[[torch.Tensor], torch.Tensor], Any], Any]
    ) -> None:
        self._device = device
        self._copy = copy
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kdpipes to_device")

    def __enter__(self) -> _OnStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def send(self, batch: Any) -> Any:
        """Start to send a batch, and return the argument for `receive`."""
        return self._thread.submit(self._sent, batch)

    def receive(self, sent: Any) -> Any:
        """Return a batch that was sent. The current stream waits for this batch, but not for later ones."""
        batch, event = sent.result()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)  # the memory is not reused before that stream no longer needs it
            return tensor

        return _mapped(batch, keep)

    def _sent(self, batch: Any) -> Any:
        with torch.cuda.stream(self._stream):
            return self._copy(self._send, batch), self._stream.record_event()

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


@runtime_checkable
class _Awaited(Protocol):
    """An iterator that knows whether its next item is there."""

    def is_ready(self) -> bool: ...


def is_ready(items: Iterator[Any]) -> bool:
    """Return whether an iterator has its next item; True if it does not know."""
    return items.is_ready() if isinstance(items, _Awaited) else True


def _ahead(batches: Iterator[Any], stream: Any) -> Iterator[Any]:
    """Yield each batch while the next one, if it is there, is being sent.

    An error is raised after the batches before it.
    """
    end: Any = object()
    with stream:
        sent = None
        while True:
            if sent is None:
                batch = next(batches, end)
                if batch is end:
                    return
                sent = stream.send(batch)
                del batch
            following = None
            error = None
            is_over = False
            if is_ready(batches):
                try:
                    batch = next(batches, end)
                    is_over = batch is end
                    following = None if is_over else stream.send(batch)
                    del batch
                except Exception as raised:
                    error = raised
            yield stream.receive(sent)
            if error is not None:
                raise error
            if is_over:
                return
            sent = following


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with `function` applied to each of its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _mapped(part, function) for name, part in value.items()}
    if isinstance(value, tuple) and "_fields" in dir(type(value)):
        return type(value)(*(_mapped(part, function) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(part, function) for part in value)
    return value
