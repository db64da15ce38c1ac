"""Pipes that change samples one by one: fields, decoding, transforms, errors, replay.

`fields` renames, adds and selects fields. `decode` and `jpeg` decode images, `transform` applies callables, and
`transforms` and `image_ops` are the callables that kdpipes provides. `adapters` prepares transforms of other libraries,
and `joint` transforms of several fields. `on_error` handles samples that cannot be made. Start reading with `fields`.
"""

from kdpipes.work.decode import DecodedImage, EncodedImage
from kdpipes.work.transform import RecordedTransform

__all__ = ["DecodedImage", "EncodedImage", "RecordedTransform"]
