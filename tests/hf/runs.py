"""Prompts, and runs of tiny models with our cache, transformers' own and none."""

import copy

import pytest
import torch
from torch import nn

from kvcache.decoder import Linear
from kvcache.decoder.weights import in_int8
from kvcache.hf import cache_for
from tests.decoder.reference import weights_of
from tests.hf.tiny_models import FAMILIES, PAD, VOCAB

NEW = 16

every_family = pytest.mark.parametrize("family", FAMILIES)

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 30},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 2},
}


def ids_of(count, batch=1, seed=1):
    return torch.randint(3, VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths=(4, 9, 6), seed=2):
    """Return ids and mask (B, longest) of rows of these lengths."""
    ids, longest = ids_of(max(lengths), len(lengths), seed), max(lengths)
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])
    return ids.masked_fill(mask == 0, PAD), mask


def generate(model, ids, cache="ours", max_new_tokens=NEW, **options):
    """Generate with "ours", transformers' "own" or "no" cache, or with the cache given."""
    if cache == "ours":
        options["cache"] = cache_for(model)
    elif cache == "no":
        options["use_cache"] = False
    elif cache != "own":
        options["cache"] = cache
    torch.manual_seed(7)
    return model.generate(ids, max_new_tokens=max_new_tokens, **options)


def logits_of(model, ids, sizes, cache, mask=None):
    """Return the logits of all tokens, run in steps of these sizes through the cache."""
    start, parts = 0, []
    with torch.no_grad():
        for size in sizes:
            part = slice(start, start + size)
            options = {}
            if mask is not None:
                options["attention_mask"] = mask[:, : part.stop]
                options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, part]
            parts.append(model(ids[:, part], cache=cache, **options).logits)
            start += size
    return torch.cat(parts, dim=1)


def assert_same_logits(actual, expected):
    """Within 1e-12 of the largest logit (float64)."""
    assert actual.dtype == torch.float64
    assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max()


def decoded_model(model):
    """Return the model in float64 with the weights that int8 codes of its matrices stand for."""
    copied = copy.deepcopy(model).double()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            copied.get_submodule(name).weight = nn.Parameter(weights_of(in_int8(Linear(module.weight))))
    return copied
