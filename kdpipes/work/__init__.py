"""Pipes that change samples one by one: fields, decoding, transforms, errors, replay.

`fields` renames, adds and selects fields. `decode` and `jpeg` make images of bytes, `transform` applies callables, and
`transforms` and `image_ops` are the callables that kdpipes provides; `adapters` and `joint` prepare those of other
libraries, and those of several fields. `on_error` decides about samples that cannot be made. To begin with, read
`fields`.
"""

from kdpipes.work.decode import DecodedImage, EncodedImage
from kdpipes.work.transform import RecordedTransform

__all__ = ["DecodedImage", "EncodedImage", "RecordedTransform"]
