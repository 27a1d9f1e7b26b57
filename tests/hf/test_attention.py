"""What a model's own attention makes of the keys and values that the cache returns."""

import types

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from kvcache.hf import cache_for
from kvcache.hf.versions import CACHE_ARGUMENT
from tests.hf.runs import ids_of
from tests.hf.tiny_models import llama, mistral

pytestmark = pytest.mark.usefixtures("one_thread")


def attention_over(cache, config, k, v, mask=None, window=False, layer=0):
    """Return transformers' own SDPA attention (B, T, H, D) of zero queries over the cache, with its own masks."""
    batch, _, count, dim = k.shape
    embeds = torch.zeros(batch, count, config.hidden_size)
    make = create_sliding_window_causal_mask if window else create_causal_mask
    past = {CACHE_ARGUMENT: cache}
    attention_mask = make(config=config, inputs_embeds=embeds, attention_mask=mask, position_ids=None, **past)
    keys, values = cache.update(k, v, layer)
    queries = torch.zeros(batch, config.num_attention_heads, count, dim)
    module = types.SimpleNamespace(
        num_key_value_groups=config.num_attention_heads // k.shape[1], is_causal=True, training=False
    )
    return sdpa_attention_forward(module, queries, keys, values, attention_mask)[0]


def numbers(first, last, batch=1, heads=2):
    """K = 0 and V = the number of the token: attention gives the mean of the numbers that a query sees."""
    v = torch.arange(first, last + 1.0)[None, None, :, None].expand(batch, heads, -1, 8)
    return torch.zeros_like(v), v


def test_b1_a_query_sees_all_cached_keys():
    """B1: over 4 keys one query gives 2.5 and two give [2.0, 2.5], as in one pass over all."""
    model = llama()
    for cached, expected in ((3, [2.5]), (2, [2.0, 2.5]), (0, [1.0, 1.5, 2.0, 2.5])):
        cache = cache_for(model)
        if cached:
            attention_over(cache, model.config, *numbers(1, cached))
        assert attention_over(cache, model.config, *numbers(cached + 1, 4))[0, :, 0, 0].tolist() == expected


def test_b1_and_e3_through_a_window():
    """B1, E3: a window of 4 and 7 tokens, as 7, 4 + 3 and one by one: [1, 1.5, 2, 2.5, 3.5, 4.5, 5.5]."""
    model = mistral(window=4)
    for sizes in ((7,), (4, 3), (1,) * 7):
        cache, seen = cache_for(model), []
        for size in sizes:
            rows = numbers(len(seen) + 1, len(seen) + size)
            seen += attention_over(cache, model.config, *rows, window=True)[0, :, 0, 0].tolist()
        assert seen == pytest.approx([1, 1.5, 2, 2.5, 3.5, 4.5, 5.5])


def test_b16_padded_keys_get_no_weight_whatever_they_hold():
    """B16: rows that start at 2 and 0, one query at a time: the mean is over the row's own tokens only."""
    model = llama()
    cache = cache_for(model)
    k, v = numbers(1, 3, batch=2)
    v = v.clone()
    v[0, :, :2] = 1e30
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    attention_over(cache, model.config, k, v, mask=mask)
    for last in (4, 5):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
        means = attention_over(cache, model.config, *numbers(last, last, batch=2), mask=mask)[:, 0, 0, 0].tolist()
        assert means == [(3 + last) / 2, (1 + last) / 2]


def test_b10_query_heads_read_their_own_key_value_head():
    """B10: 4 query heads over 2 key/value heads of V = 10 and 20 give 10, 10, 20, 20."""
    model = llama()
    cache = cache_for(model)
    for count in (3, 1):
        v = torch.tensor([10.0, 20.0])[None, :, None, None].expand(1, 2, count, 8)
        output = attention_over(cache, model.config, torch.zeros_like(v), v)
    assert output[0, 0, :, 0].tolist() == [10, 10, 20, 20]


def test_a3_a_new_token_is_rotated_by_its_own_position(models):
    """A3: after a prefill of 5, decoding one token uses row 5 of the position table."""
    ids = ids_of(6)
    for name, model in models.items():
        seen = []
        inner = model.transformer.wpe if name == "gpt2" else model.model.rotary_emb

        def look(module, args, kwargs, seen=seen):
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            seen.append([value.tolist() for value in given if not value.is_floating_point()])

        hook = inner.register_forward_pre_hook(look, with_kwargs=True)
        cache = cache_for(model)
        with torch.no_grad():
            model(ids[:, :5], cache=cache)
            seen.clear()
            logits = model(ids[:, 5:], cache=cache).logits
            assert seen in ([[[[5]]]], [[[[5]]]] * 2)  # once for each kind of layer
            expected = model(ids, use_cache=False).logits[:, 5:]
        hook.remove()
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
