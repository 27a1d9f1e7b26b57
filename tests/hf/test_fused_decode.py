"""Decode steps through `attend`: which ones, the same text, and a model that is afterwards as it was."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcache.hf import attention, cache_for
from kvcache.hf.attention import attention_forward, fused_decode
from tests.hf.runs import NEW, every_family, generate, ids_of, left_padded
from tests.hf.tiny_models import FAMILIES, llama

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 2
# Behind a prompt longer than the window transformers masks its layers.
LAYERS_WITHOUT_MASK = {"llama": 2, "mistral": 0, "gemma3": 1, "gpt2": 2}


@pytest.fixture
def queries(monkeypatch):
    """The calls of `attend`: how many queries each had."""
    counts: list[int] = []

    def counted(q, *arguments, **options):
        counts.append(q.shape[2])
        return attend(q, *arguments, **options)

    attend = attention.attend
    monkeypatch.setattr(attention, "attend", counted)
    return counts


@pytest.fixture
def layer():
    return llama(torch.float32).model.layers[0].self_attn


def qkv(heads=4, kv_heads=2, queries=1, slots=6):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, queries), (kv_heads, slots), (kv_heads, slots)
    return [torch.randn(2, *shape, 8, generator=generator) for shape in shapes]


def test_decode_steps_call_attend_and_a_prefill_does_not(queries):
    model, ids = llama(torch.float32), ids_of(7)
    cache = cache_for(model)
    with torch.no_grad(), fused_decode(model):
        model(ids[:, :5], cache=cache)
        assert queries == []
        for token in (5, 6):
            logits = model(ids[:, token : token + 1], cache=cache).logits
    assert queries == [1] * 2 * LAYERS
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids, use_cache=False).logits[:, -1:], rtol=1e-4, atol=1e-4)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_text_is_the_same(queries, family, dtype):
    model, ids = FAMILIES[family](dtype), ids_of(9)
    expected = generate(model, ids)
    assert not queries
    with fused_decode(model):
        assert torch.equal(generate(model, ids), expected)
    assert queries == [1] * (NEW - 1) * LAYERS_WITHOUT_MASK[family]


def test_a_padded_batch_has_masks_and_goes_where_it_went(queries):
    model, (ids, mask) = llama(torch.float32), left_padded()
    expected = generate(model, ids, attention_mask=mask)
    with fused_decode(model):
        assert torch.equal(generate(model, ids, attention_mask=mask), expected)
    assert not queries


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.tensor([True, False, True, True, True, True]).expand(2, 1, 1, 6)},
        {"dropout": 0.5},
        {"position_bias": torch.linspace(-1, 1, 6).expand(2, 4, 1, 6)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_attend_is_not_made_for_goes_to_transformers(queries, layer, options):
    options = {"attention_mask": None, "scaling": 0.3, **options}
    torch.manual_seed(0)
    expected, _ = sdpa_attention_forward(layer, *qkv(), **options)
    torch.manual_seed(0)
    assert torch.equal(attention_forward(layer, *qkv(), **options)[0], expected)
    assert not queries


def test_a_softcap_is_refused_as_transformers_refuses_it(queries, layer):
    with pytest.raises(ValueError, match="does not support `softcap`"):
        attention_forward(layer, *qkv(), attention_mask=None, softcap=20.0)
    assert not queries


@pytest.mark.parametrize(
    "options",
    [{}, {"output_attentions": False, "softcap": None}, {"use_cache": True, "sliding_window": 4, "is_causal": True}],
    ids=["nothing", "asked for nothing", "harmless"],
)
def test_what_changes_nothing_goes_to_attend(queries, layer, options):
    expected, _ = sdpa_attention_forward(layer, *qkv(), attention_mask=None, scaling=0.3)
    output, _ = attention_forward(layer, *qkv(), attention_mask=None, scaling=0.3, **options)
    torch.testing.assert_close(output, expected)
    assert queries == [1]


def test_the_model_is_afterwards_as_it_was(queries):
    model = llama(torch.float32)
    with fused_decode(model):
        assert model.config._attn_implementation == attention.NAME
    assert model.config._attn_implementation == model.model.config._attn_implementation == "sdpa"
    generate(model, ids_of(9))
    assert not queries


def test_an_exception_leaves_the_model_as_it_was():
    model = llama(torch.float32)
    with pytest.raises(KeyError), fused_decode(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_within_itself_it_changes_nothing(queries):
    model = llama(torch.float32)
    with fused_decode(model):
        with fused_decode(model):
            pass
        generate(model, ids_of(9), max_new_tokens=2)
    assert queries == [1] * LAYERS
    assert model.config._attn_implementation == "sdpa"


def test_a_model_with_another_attention_is_left_alone(queries):
    model = llama(torch.float32, attn_implementation="eager")
    with fused_decode(model):
        assert model.config._attn_implementation == "eager"
        generate(model, ids_of(9))
    assert model.config._attn_implementation == "eager"
    assert not queries


def test_the_name_is_registered_by_the_use_of_it(monkeypatch):
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, attention.NAME, raising=False)
    model = llama(torch.float32, attn_implementation="eager")
    with fused_decode(model):
        assert attention.NAME not in AttentionInterface()
    with fused_decode(llama(torch.float32)):
        assert AttentionInterface()[attention.NAME] is attention_forward
        assert attention.NAME in AttentionMaskInterface()
