"""`BatchPipe`, the base class of pipes after `deal` that make one item of each batch."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, check_type
from kdpipes.core.registry import pipe_name
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.core.traits import Traits
from kdpipes.delivery.dealer import Resumable


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


class OneToOne(Resumable, IterDataPipe[Any]):
    """Base class of the pipes after `deal` that make one item of each batch before they read the next one."""

    traits = Traits(role="batch", gives="batches", holds_back=False)
    computed: ClassVar[tuple[str, ...]] = ("_allocate",)
    _allocate: Allocate | None = None  # allocates batches; None for ordinary memory

    def make_batches_in(self, allocate: Allocate) -> None:
        """Allocate batches with `allocate`, whose memory is reused for later batches, so that nothing may keep them."""
        self._allocate = allocate


class BatchPipe(OneToOne):
    """The base class of your own batch pipes, which make one item of each batch of `deal`.

    A subclass implements `process`. States, resuming, the length, and random numbers that do not depend on the number
    of workers follow from it. `functional_pipe("name", flavour="iter")` registers it as a method.

    Args:
        source_datapipe: `deal`, or a pipe after it that makes one item of each batch.

    Raises:
        ChainError: There is no `deal` upstream, or a pipe after it may hold batches back or change their number.
        TypeError: `process` returned None.

    Example:
        >>> class Doubled(kdp.BatchPipe):
        ...     def process(self, batch, rng):
        ...         return [2 * x for x in batch]
        >>> list(Doubled(kdp.from_dataset([1, 2, 3], "x").select("x", bare=True).deal(batch_size=2)))
        [[2, 4], [6]]
    """

    set_by_init = ("source",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        signature = inspect.signature(cls.process)
        try:
            signature.bind(None, None, None)
        except TypeError:
            raise TypeError(
                f"`{cls.__name__}.process` must take a batch and a random generator, `process(self, batch, rng)`, but "
                f"is `process{signature}` instead."
            ) from None

    def __init__(self, source_datapipe: IterDataPipe[Any]) -> None:
        check_type("source_datapipe", source_datapipe, IterDataPipe, "a stream of batches")
        if Chain.of(source_datapipe).numbering_deal() is None:
            raise ChainError(
                f"`{pipe_name(self)}` takes the batches of `deal`, but `{pipe_name(source_datapipe)}` does not give "
                "them one by one. Put it after `.deal(...)`, and before pipes that hold batches back."
            )
        self.source = source_datapipe

    def process(self, batch: Any, rng: np.random.Generator) -> Any:
        """Return the item for a batch.

        Args:
            batch: The batch from the source. It must not be modified.
            rng: A generator whose random numbers depend only on the seed of `deal`, the epoch, the batch and this pipe.
        """
        raise TypeError(f"{type(self).__name__} must implement `process(self, batch, rng)`.")

    def __len__(self) -> int:
        return len(self.source)

    def iterate(self) -> Iterator[Any]:
        dealer = Chain.of(self).numbering_deal()
        place = self.unique_name()
        for batch in self.source:
            item = self.process(batch, dealer.batch_key().rng(place))
            if item is None and batch is not None:
                raise TypeError(
                    f"`process` of `{pipe_name(self)}` must return the item for a batch, but returned None."
                )
            yield item

    def unique_name(self) -> str:
        """Return a name that no other pipe of the chain has: "mixup", "mixup_2", ..."""
        number = sum(type(node.pipe) is type(self) for node in Chain.of(self).one_to_one_path())
        return pipe_name(self) if number == 1 else f"{pipe_name(self)}_{number}"
