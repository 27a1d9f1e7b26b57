"""Partial attention results over parts of the keys, merged by their log-sum-exp."""

from collections.abc import Sequence

import torch

from kvcache.attention.arguments import check_parts


def merge_attention(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint parts of the keys into attention over all of them, exactly.

    Args:
        outputs: one output (B, H, T, Dv) a part, as `attend(..., return_lse=True)` gives it; one dtype.
        lses: the natural log-sum-exp (B, H, T) of each part; -inf where a query saw nothing in it.

    Returns:
        The merged output (B, H, T, Dv) in the outputs' dtype and its log-sum-exp (B, H, T), so that results can
        be merged again. A query that saw nothing anywhere gets zeros and -inf. Give `sink_logits` to one part only.

    Raises:
        InvalidValueError: no parts, or their numbers, shapes or devices differ.
        InvalidTypeError: their dtypes differ or are not floating.

    Source: FlashInfer (arXiv:2501.01005), section 2.2, "attention states" and their composition.

    >>> from kvcache import attend
    >>> q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    >>> parts = [attend(q, k[:, :, rows], v[:, :, rows], return_lse=True) for rows in (slice(0, 4), slice(4, 9))]
    >>> merged, _ = merge_attention(*zip(*parts))
    >>> torch.allclose(merged, attend(q, k, v), atol=1e-6)
    True
    """
    check_parts(outputs, lses)
    wide = any(part.dtype == torch.float64 for part in (*outputs, *lses))
    dtype = torch.float64 if wide else torch.float32
    lse_parts = torch.stack([lse.to(dtype) for lse in lses])  # (P, B, H, T)
    output_parts = torch.stack([output.to(dtype) for output in outputs])  # (P, B, H, T, Dv)
    lse = torch.logsumexp(lse_parts, dim=0)
    weights = torch.exp(lse_parts - lse.masked_fill(lse == float("-inf"), 0.0))[..., None]
    # A part that a query saw nothing of has weight 0, whatever it holds.
    merged = (weights * output_parts).masked_fill(weights == 0, 0.0).sum(dim=0)
    return merged.to(outputs[0].dtype), lse
