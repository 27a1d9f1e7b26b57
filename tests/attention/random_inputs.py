"""Random queries, keys and values in every dtype."""

import torch

NAN = float("nan")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def random_qkv(batch=2, heads=4, kv_heads=2, queries=3, slots=9, head_dim=8, v_head_dim=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(batch + heads + queries + slots + head_dim)
    shapes = (
        (batch, heads, queries, head_dim),
        (batch, kv_heads, slots, head_dim),
        (batch, kv_heads, slots, v_head_dim or head_dim),
    )
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
