"""float16 and bfloat16 with the cache: as near to the exact result as without it, and finite."""

import copy

import pytest
import torch

from kvcache.hf import cache_for
from tests.hf.runs import every_family, ids_of, left_padded, logits_of
from tests.hf.tiny_models import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_family
def test_n1_half_precision_is_as_good_with_the_cache_as_without(models, family, dtype):
    """N1: against float64, the cached run's error is at most 4 times that of the run without a cache."""
    half = FAMILIES[family](dtype=dtype, initializer_range=0.1)
    exact = copy.deepcopy(half).double()
    ids = ids_of(20)
    with torch.no_grad():
        expected = exact(ids, use_cache=False).logits
        floor = 4 * torch.finfo(dtype).eps * expected.abs().max()
        uncached = (half(ids, use_cache=False).logits - expected).abs().max()
        for sizes in ((1,) * 20, (3,) * 6 + (2,)):
            logits = logits_of(half, ids, sizes, cache_for(half))
            assert logits.dtype == dtype
            assert (logits - expected).abs().max() <= max(4 * uncached, floor)


@every_family
def test_b9_half_precision_left_padded_batches_are_finite(family):
    """B9: float16, scores beyond its range (65504), one padded row: finite, and near the float32 result."""
    model = FAMILIES[family](dtype=torch.float16)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_proj.weight", "k_proj.weight", "q_norm", "k_norm")):
            parameter.data *= 100
        elif "c_attn.weight" in name:
            parameter.data[:, :64] *= 100
    reference = copy.deepcopy(model).float()
    ids, mask = left_padded((6, 12))
    scores = []
    for sizes in ((12,), (7, 1, 1, 1, 2)):
        half = logits_of(model, ids, sizes, cache_for(model), mask)
        full = logits_of(reference, ids, sizes, cache_for(reference), mask)
        assert half.isfinite().all()
        scores.append((half.float() - full)[mask == 1].abs().max() / full.abs().max())
    assert max(scores) < 0.02
