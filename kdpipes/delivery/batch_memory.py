"""Allocate tensors for batches; in a worker process, in the memory in which the batch is sent."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch


class Allocate(Protocol):
    """A function that returns an uninitialized tensor."""

    def __call__(
        self, shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor: ...


def allocate(
    shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """Return an uninitialized tensor in ordinary memory."""
    return torch.empty(tuple(shape), dtype=dtype, memory_format=memory_format)


def is_channels_last(batch: torch.Tensor) -> bool:
    """Return whether the pixels of a batch `[B, C, H, W]` are in memory one after the other, each with its channels."""
    is_dense = batch.dim() == 4 and batch.is_contiguous(memory_format=torch.channels_last)
    return is_dense and not batch.is_contiguous()


class _ThreadAllocator(threading.local):
    """The allocator of this thread. Threads that a chain starts use ordinary memory."""

    def __init__(self) -> None:
        self.allocate: Allocate = allocate


_here = _ThreadAllocator()


def make_batches_in(allocate: Allocate) -> None:
    """Let `empty_batch` call `allocate` in this thread."""
    _here.allocate = allocate


def empty_batch(
    shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """Return an uninitialized CPU tensor for a batch, which a worker process sends without copying it.

    Call it in a function of `.map(...)` after `.deal(...)`, fill the tensor, and return it as part of the batch. The
    memory is reused for later batches, so do not keep the tensor in the worker. If no worker process sends the batch,
    or if there is not enough memory, the tensor has its own memory, as from `torch.empty`.

    Args:
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        memory_format: `torch.channels_last` for images `[B, C, H, W]` with the strides that convolutions prefer.

    Example:
        >>> def stack(batch):
        ...     x = empty_batch((len(batch), 2), torch.float32)
        ...     for row, (value,) in enumerate(batch):
        ...         x[row] = value
        ...     return x
        >>> chain = kdp.from_dataset([(1, 0), (2, 0)]).select("x").deal(batch_size=2).map(stack)
        >>> next(iter(chain)).tolist()
        [[1.0, 1.0], [2.0, 2.0]]
    """
    return _here.allocate(shape, dtype, memory_format)
