"""Batches as a short pickle and the memory of their arrays, so that the memory can travel without being copied."""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
from typing import Any

import cloudpickle
import numpy as np
import torch

from kdpipes.core.chain import Chain
from kdpipes.core.errors import add_note
from kdpipes.storage.shared import Shared, sharing

__all__ = ["add_traceback", "name_classes", "pack", "pack_error", "unpack"]


def pack(item: Any) -> tuple[bytes, list[memoryview]]:
    """Return `item` as a pickle and the memory of its tensors and arrays, uncopied where it is contiguous.

    Raises:
        TypeError: The item cannot be pickled, or holds a tensor that does not lie in the CPU's memory.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    try:
        _Packer(file, protocol=5, buffer_callback=buffers.append).dump(item)
    except _DeviceTensorError:
        raise
    except Exception as error:
        why = str(error).rstrip(".")
        raise TypeError(f"A batch cannot be sent from a worker: {why}. Return plain data.") from error
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def name_classes(chain: Any) -> None:
    """Let cloudpickle name the classes of a notebook or a function that a chain uses, before workers are forked.

    It pickles such a class by value, under a name that it gives it when it first meets it. A worker that named it would
    send objects of a class of its own, which are no instances of the main process's.
    """
    held = (value.value for pipe in Chain.of(chain).pipes for value in vars(pipe).values() if isinstance(value, Shared))
    with sharing():
        for part in [chain, *map(type, Chain.of(chain).pipes), *map(type, held)]:
            with contextlib.suppress(Exception):  # what does not pickle does not matter: forks inherit it
                cloudpickle.dumps(part)


def unpack(stream: bytes | bytearray | memoryview, buffers: list[Any]) -> Any:
    """Return what was packed; its tensors and arrays are views of `buffers`."""
    return pickle.loads(stream, buffers=buffers)  # noqa: S301 - sent by a worker of ours, which runs the user's chain


def pack_error(error: BaseException) -> bytes:
    """Return an error as a pickle, with the traceback as a note; as text, if it cannot be made again."""
    lines = add_traceback(error)
    try:
        payload: bytes = cloudpickle.dumps(error)
        if not isinstance(pickle.loads(payload), BaseException):  # noqa: S301 - made in the line above
            raise TypeError("What comes back is no error.")
    except Exception:
        payload = cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}\n{lines}"))
    return payload


def add_traceback(error: BaseException) -> str:
    """Attach the traceback of an error in a worker to it as a note, and return it."""
    if isinstance(error, RuntimeError) and "CUDA in forked subprocess" in str(error):
        add_note(error, _CUDA_IN_WORKER)
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    add_note(error, f"In a worker:\n{lines}")
    return lines


_CUDA_IN_WORKER = (
    "kdpipes: CUDA cannot be used in a worker that was forked from a process that uses it. Leave the device to the "
    'main process, by `.to_device("cuda")` at the end of the chain; or start workers with `start_method="spawn"`.'
)


class _DeviceTensorError(TypeError):
    pass


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle carries no types
    """cloudpickle's pickler, which takes lambdas and classes of a notebook, and gives the memory of tensors apart."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
            return _reduced(value)
        return super().reducer_override(value)


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.device.type != "cpu":
        raise _DeviceTensorError(
            f"A batch with a tensor on {tensor.device} cannot be sent from a worker. Return CPU tensors, and put "
            "`.to_device(...)` at the end of the chain: it runs in the main process."
        )
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
    content: Any = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    kind = None if type(tensor) is torch.Tensor else type(tensor)
    attributes = tensor.__dict__ if kind is not None else None
    needs_grad = tensor.requires_grad and tensor.is_leaf
    return _tensor, (pickle.PickleBuffer(content), plain.dtype, tuple(plain.shape), needs_grad, kind, attributes)


def _tensor(
    content: Any, dtype: torch.dtype, shape: tuple[int, ...], needs_grad: bool, kind: Any, attributes: Any
) -> torch.Tensor:
    content = memoryview(content)
    tensor = (
        torch.frombuffer(content, dtype=dtype).reshape(shape) if content.nbytes else torch.empty(shape, dtype=dtype)
    )
    if kind is not None:
        tensor = tensor.as_subclass(kind)
        tensor.__dict__.update(attributes)
    return tensor.requires_grad_() if needs_grad else tensor
