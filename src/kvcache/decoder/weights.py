"""Matrices in int8: half of what a step reads of them in 16 bits.

Of each row 32 weights share a scale, in bfloat16: w ~ code * scale with codes from -127 to 127.
"""

from typing import Literal

import torch

from kvcache.decoder.description import Linear
from kvcache.storage.codecs import GROUP_SIZE

Weights = Literal["int8"]  # what matrices can be kept in, instead of what they are in

_LARGEST = 127
_ROWS = 4096  # encoded at a time, so that memory for floats stays small


def in_int8(linear: Linear) -> Linear:
    """Return the layer with int8 codes, whose columns must be a multiple of 32; its bias stays."""
    weight = linear.weight.detach()
    codes = torch.empty(weight.shape, dtype=torch.int8, device="cpu")
    scales = torch.empty(weight.shape[0], weight.shape[1] // GROUP_SIZE, dtype=torch.bfloat16, device="cpu")
    for first in range(0, weight.shape[0], _ROWS):
        rows = slice(first, first + _ROWS)
        groups = _groups(weight[rows].float())
        scale = (groups.abs().amax(dim=-1) / _LARGEST).bfloat16()
        steps = scale.float().unsqueeze(-1)
        exact = torch.where(steps > 0, groups / steps, 0.0)
        codes[rows] = exact.round_().clamp_(-_LARGEST, _LARGEST).flatten(1).to(torch.int8)
        scales[rows] = scale
    return Linear(codes, linear.bias, scales)


class WeightMemory:
    """Where matrices are decoded, one after the other, to floats of one dtype: each lasts until the next.

    Made anew for each step, so that steps of several threads have their own.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory = torch.empty(0, dtype=dtype, device="cpu")

    def decoded(self, linear: Linear) -> torch.Tensor:
        """Return the weights (out, in) of a layer; themselves if they are of the dtype."""
        weight = linear.weight
        if linear.scales is None and weight.dtype == self._dtype:
            return weight
        if len(self._memory) < weight.numel():
            self._memory = torch.empty(weight.numel(), dtype=self._dtype, device="cpu")
        target = self._memory[: weight.numel()].view(weight.shape)
        if linear.scales is None:
            return target.copy_(weight)
        torch.mul(_groups(weight), linear.scales.to(self._dtype).unsqueeze(-1), out=_groups(target))
        return target


def _groups(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(len(rows), -1, GROUP_SIZE)
