"""A compiled forward with a cache gives the logits of one that is not compiled."""

from contextlib import nullcontext

import pytest
import torch

from kvcache.hf import cache_for, use_attention
from tests.hf.runs import assert_same_logits, ids_of, logits_of
from tests.hf.tiny_models import llama

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = (3, 1, 1, 2)


@pytest.mark.filterwarnings("ignore:attention under this mask is PyTorch's:UserWarning")
@pytest.mark.parametrize("fused", [False, True], ids=["model's own", "kvcache"])
def test_a_compiled_model_decodes_as_before(fused):
    model, ids = llama(), ids_of(7)
    torch.compiler.reset()
    with use_attention(model) if fused else nullcontext():
        expected = logits_of(model, ids, SIZES, cache_for(model))
        compiled = torch.compile(model, backend="eager")
        assert_same_logits(logits_of(compiled, ids, SIZES, cache_for(model)), expected)
    torch.compiler.reset()
