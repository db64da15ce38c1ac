"""`BatchPipe`, the base class of pipes after `deal` that make one item of each batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, check_type
from kdpipes.core.registry import pipe_name
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.core.traits import Traits
from kdpipes.delivery.batch_memory import Allocate
from kdpipes.delivery.dealer import Resumable


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
