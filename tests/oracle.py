"""What attention over a cache must give, by the slowest and plainest means: one query at a time in float64."""

import math
from collections.abc import Sequence

import torch


def attend_one(
    q: torch.Tensor,  # (D,)
    k: torch.Tensor,  # (n, D): only the keys that the query sees
    v: torch.Tensor,  # (n, Dv)
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logit: float | None = None,
) -> tuple[torch.Tensor, float]:
    """Return the float64 output (Dv,) and log-sum-exp of one query over exactly the keys given."""
    scale = 1 / math.sqrt(q.shape[0]) if scale is None else scale
    scores = (k.double() @ q.double()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    logits = scores if sink_logit is None else torch.cat([scores, torch.tensor([sink_logit], dtype=torch.float64)])
    if len(logits) == 0:
        return torch.zeros(v.shape[1], dtype=torch.float64), -math.inf
    lse = torch.logsumexp(logits, dim=0)
    return torch.exp(scores - lse) @ v.double(), lse.item()


def visible_positions(
    position: int, *, start: int = 0, window: int | None = None, sinks: int = 0, length: int | None = None
) -> list[int]:
    """Return the positions that a query at `position` sees, by the words of the rule."""
    length = position + 1 if length is None else length
    seen = []
    for other in range(length):
        if other > position or other < start:
            continue
        if window is None or position - other < window or other < start + sinks:
            seen.append(other)
    return seen


def attend_rows(
    q: torch.Tensor,  # (B, H, T, D)
    k: torch.Tensor,  # (B, Hkv, S, D)
    v: torch.Tensor,  # (B, Hkv, S, Dv)
    *,
    lengths: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    window: int | None = None,
    sinks: int = 0,
    sink_logits: Sequence[float] | None = None,
    **scores: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, H, T, Dv) and log-sum-exp (B, H, T) in float64, for `attend`'s arguments."""
    batch, heads, num_queries, _ = q.shape
    group = heads // k.shape[1]
    output = torch.zeros(batch, heads, num_queries, v.shape[3], dtype=torch.float64)
    lse = torch.zeros(batch, heads, num_queries, dtype=torch.float64)
    for b in range(batch):
        length = k.shape[2] if lengths is None else lengths[b]
        for t in range(num_queries):
            seen = visible_positions(
                length - num_queries + t,
                start=0 if starts is None else starts[b],
                window=window,
                sinks=sinks,
                length=length,
            )
            for h in range(heads):
                output[b, h, t], lse[b, h, t] = attend_one(
                    q[b, h, t],
                    k[b, h // group, seen],
                    v[b, h // group, seen],
                    sink_logit=None if sink_logits is None else sink_logits[h],
                    **scores,
                )
    return output, lse


def mean_trick(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K = 0 and V of token i = i, counted from 1, each (1, 1, n, 1).

    Attention is then uniform, so an output is the mean of the token numbers that a query sees.
    """
    values = torch.arange(1, num_tokens + 1, dtype=dtype).view(1, 1, -1, 1)
    return torch.zeros_like(values), values


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check `actual` against a float64 result: the largest error over the largest value, by actual's dtype."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    scale = max(expected.abs().max().item(), 1e-30) if expected.numel() else 1.0
    error = (actual.double() - expected).abs().max().item() / scale if expected.numel() else 0.0
    assert error <= TOLERANCE[actual.dtype], f"relative error {error:.2e} in {actual.dtype}"
