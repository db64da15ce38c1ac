"""Pipes that make batches and deliver them: `deal`, `collate_samples`, `mixup`, `cutmix`, `to_device`.

`deal` (indexed chains) and `deal_stream` share `dealer`. `batching`, `grouped`, `packed`, `own_order` and the `by_*`
modules decide which samples form a batch, `layout` and `lanes` which rank and worker makes it. `clock` knows the
position in an epoch, `state` saves it, and `skipping` counts samples that failed. `collate_samples` makes tensors;
`batch_pipe` is the base class of pipes that follow, and allocates batches in the memory in which they are sent. To
begin with, read `deal`.
"""

from kdpipes.delivery.batch_pipe import empty_batch
from kdpipes.delivery.collate_samples import collate, split_ctx

__all__ = ["collate", "empty_batch", "split_ctx"]
