"""Matrices in int8: half of what a step reads of them in 16 bits.

Of each row 32 weights share a scale, in bfloat16: w ~ code * scale with codes from -127 to 127.
"""

import torch

from kvcache.decoder.description import Linear

GROUP = 32  # as of the cache's codecs
_LARGEST = 127
_ROWS = 4096  # encoded at a time, so that memory for floats stays small


def in_int8(linear: Linear) -> Linear:
    """Return the layer with int8 codes, whose columns must be a multiple of 32; its bias stays."""
    weight = linear.weight.detach()
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // GROUP, dtype=torch.bfloat16)
    for first in range(0, weight.shape[0], _ROWS):
        rows = slice(first, first + _ROWS)
        groups = _groups(weight[rows].float())
        scale = (groups.abs().amax(dim=-1) / _LARGEST).bfloat16()
        steps = scale.float().unsqueeze(-1)
        exact = torch.where(steps > 0, groups / steps, 0.0)
        codes[rows] = exact.round_().clamp_(-_LARGEST, _LARGEST).flatten(1).to(torch.int8)
        scales[rows] = scale
    return Linear(codes, linear.bias, scales)


def decoded(linear: Linear, dtype: torch.dtype, memory: torch.Tensor) -> torch.Tensor:
    """Return the weights (out, in) in `dtype`: themselves if they are, else written into `memory`, of that dtype."""
    weight = linear.weight
    if linear.scales is None and weight.dtype == dtype:
        return weight
    target = memory[: weight.numel()].view(weight.shape)
    if linear.scales is None:
        return target.copy_(weight)
    torch.mul(_groups(weight), linear.scales.to(dtype).unsqueeze(-1), out=_groups(target))
    return target


def _groups(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(len(rows), -1, GROUP)
