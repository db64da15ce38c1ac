"""A stand-in for `torchvision.transforms.v2`, after the structure of its source: the tests import it by that name.

The base classes split as torchvision's do (`make_params`, `transform`), and draw from torch's generator alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class Transform(nn.Module):
    def check_inputs(self, flat_inputs: list[Any]) -> None:
        pass

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        raise NotImplementedError

    def forward(self, *inputs: Any) -> Any:
        flat_inputs, spec = tree_flatten(inputs if len(inputs) > 1 else inputs[0])
        self.check_inputs(flat_inputs)
        return self._transformed(flat_inputs, spec)

    def _transformed(self, flat_inputs: list[Any], spec: Any) -> Any:
        needs_transform = [isinstance(inpt, torch.Tensor | Image.Image) for inpt in flat_inputs]
        params = self.make_params([inpt for inpt, needs in zip(flat_inputs, needs_transform, strict=True) if needs])
        outputs = [
            self.transform(inpt, params) if needs else inpt
            for inpt, needs in zip(flat_inputs, needs_transform, strict=True)
        ]
        return tree_unflatten(outputs, spec)


class _RandomApplyTransform(Transform):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, *inputs: Any) -> Any:
        inputs = inputs if len(inputs) > 1 else inputs[0]
        flat_inputs, spec = tree_flatten(inputs)
        self.check_inputs(flat_inputs)
        if torch.rand(1) >= self.p:
            return inputs
        return self._transformed(flat_inputs, spec)


class RandomHorizontalFlip(_RandomApplyTransform):
    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return inpt.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


class RandomResizedCrop(Transform):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        width, height = flat_inputs[0].size
        side = int(torch.randint(8, min(width, height), ()))
        return {"top": int(torch.randint(height - side, ())), "left": 1, "size": (side, side)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        box = (params["left"], params["top"], params["left"] + params["size"][0], params["top"] + params["size"][1])
        return inpt.crop(box).resize((self.size, self.size))


class ColorJitter(Transform):
    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"fn_idx": torch.randperm(3), "factors": torch.rand(3), "hue_factor": None}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        pixels = torch.from_numpy(np.array(inpt))[..., params["fn_idx"]] * params["factors"]
        return Image.fromarray(pixels.to(torch.uint8).numpy())


class ElasticTransform(Transform):
    """Has large parameters."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"displacement": torch.rand(flat_inputs[0].size[::-1])[..., None]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return Image.fromarray((np.array(inpt) * params["displacement"].numpy()).astype(np.uint8))


class GaussianNoise(Transform):
    """Draws where it transforms."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return Image.fromarray((np.array(inpt) * torch.rand(()).item()).astype(np.uint8))


class RandAugment(Transform):
    """Draws and transforms in a `forward` of its own."""

    def forward(self, *inputs: Any) -> Any:
        return inputs[0].rotate(int(torch.randint(360, ())))


class ToImage(Transform):
    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return torch.from_numpy(np.array(inpt)).permute(2, 0, 1).contiguous()


class Lambda(Transform):
    def __init__(self, lambd: Callable[[Any], Any]) -> None:
        super().__init__()
        self.lambd = lambd

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self.lambd(inpt)


class Compose(Transform):
    def __init__(self, transforms: Any) -> None:
        super().__init__()
        self.transforms = transforms

    def forward(self, *inputs: Any) -> Any:
        needs_unpacking = len(inputs) > 1
        for transform in self.transforms:
            outputs = transform(*inputs)
            inputs = outputs if needs_unpacking else (outputs,)
        return outputs


class RandomApply(Transform):
    def __init__(self, transforms: Any, p: float = 0.5) -> None:
        super().__init__()
        self.transforms = transforms
        self.p = p

    def forward(self, *inputs: Any) -> Any:
        if torch.rand(1) >= self.p:
            return inputs[0]
        for transform in self.transforms:
            inputs = (transform(*inputs),)
        return inputs[0]


class RandomChoice(Transform):
    def __init__(self, transforms: Any) -> None:
        super().__init__()
        self.transforms = transforms
        self.p = [1 / len(transforms) for _ in transforms]

    def forward(self, *inputs: Any) -> Any:
        return self.transforms[int(torch.multinomial(torch.tensor(self.p), 1))](*inputs)


class RandomOrder(Transform):
    def __init__(self, transforms: Any) -> None:
        super().__init__()
        self.transforms = transforms

    def forward(self, *inputs: Any) -> Any:
        for index in torch.randperm(len(self.transforms)):
            inputs = (self.transforms[index](*inputs),)
        return inputs[0]
