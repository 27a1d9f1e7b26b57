"""`use_attention`: the store is read where it can be, everything else is right too, and undoing leaves no trace.

That the text is transformers' own, for every family and mode, is in test_families.py.
"""

import copy
import pickle
import warnings

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, StaticCache

from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.hf import attention, cache_for, layers, use_attention
from kvcache.hf.deferred import Deferred
from tests.hf.runs import NEW, assert_same_logits, generate, ids_of, left_padded, logits_of
from tests.hf.tiny_models import ALL_FAMILIES, deepseek_v3, gemma2, gemma3, gpt_oss, llama, mistral, t5

pytestmark = pytest.mark.usefixtures("one_thread")
by_pytorch = pytest.mark.filterwarnings("ignore:attention under .* is PyTorch's:UserWarning")


@pytest.fixture
def reads(monkeypatch):
    """How many queries each reading of a store had, and "decoded" for each time that rows were decoded instead."""
    found: list[int | str] = []

    class Counted(layers.StoredRows):
        def attend(self, query, *arguments, **options):
            found.append(query.shape[2])
            return super().attend(query, *arguments, **options)

        def decoded(self):
            found.append("decoded")
            return super().decoded()

    monkeypatch.setattr(layers, "StoredRows", Counted)
    return found


FUSED = [name for name in ALL_FAMILIES if name != "deepseek_v3"]


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_prompts_and_decode_steps_read_the_store_in_every_layer(reads, family, padded):
    model = ALL_FAMILIES[family]()
    ids, mask = left_padded() if padded else (ids_of(9), None)
    with use_attention(model):
        logits_of(model, ids, (5, 1, 2, 1), cache_for(model, storage="int8"), mask)
    num_layers = model.config.num_hidden_layers
    assert reads == [5] * num_layers + [1] * num_layers + [2] * num_layers + [1] * num_layers


def test_a_model_that_changes_keys_and_values_gets_them_decoded_and_warns_once(reads):
    model, ids = deepseek_v3(), ids_of(9)
    expected = generate(model, ids, "no")
    cache = cache_for(model)
    with use_attention(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(generate(model, ids, cache), expected)
    assert len([one for one in caught if "does something with a layer's keys and values" in str(one.message)]) == 2
    assert reads == ["decoded"] * 2 * 2  # keys and values of two layers, at the first forward only
    assert all(layer.is_touched for layer in cache.layers)


@pytest.mark.filterwarnings("ignore:the model does something with a layer's keys and values:UserWarning")
@pytest.mark.filterwarnings("ignore:attention that does not read the store:UserWarning")
@pytest.mark.parametrize("options", [{}, {"max_tokens": 60}, {"block_size": 4}], ids=str)
def test_decoded_rows_may_lie_in_the_store_in_any_way(options):
    model, ids = deepseek_v3(), ids_of(11, batch=2)
    expected = logits_of(model, ids, (11,), cache_for(model))
    cache = cache_for(model, **options)
    with use_attention(model):
        assert_same_logits(logits_of(model, ids, (5, 1, 3, 2), cache), expected)


def test_what_stands_for_rows_is_copied_and_pickled_as_a_plain_tensor():
    model = llama()
    cache = cache_for(model, max_tokens=20)
    new = torch.randn(2, 3, 2, 5, 8, dtype=torch.float64)
    with use_attention(model):
        for k in cache.update(*new, 0):
            assert isinstance(k, Deferred)
            for one in (copy.deepcopy(k), pickle.loads(pickle.dumps(k))):
                assert type(one) is torch.Tensor
                assert torch.equal(one, k.content)
    assert torch.equal(k.content, new[1])


@pytest.mark.parametrize("storage", [None, "int8", "int4"])
def test_encoded_rows_are_read_as_decoded_ones_would_be(storage):
    """What attention reads of the store is what the model's own attention gets decoded."""
    model, ids = gemma3(), ids_of(24)
    with torch.no_grad():
        expected = logits_of(model, ids, (7, 1, 9, 1, 6), cache_for(model, storage=storage))
        with use_attention(model):
            logits = logits_of(model, ids, (7, 1, 9, 1, 6), cache_for(model, storage=storage))
    assert_same_logits(logits, expected)


def test_undoing_restores_every_configuration():
    for model in (llama(), gemma2(), t5()):
        configs = attention.configs_of(model)
        before = [copy.deepcopy(config.to_dict()) | {"attention": config._attn_implementation} for config in configs]
        fused = use_attention(model)
        assert model.config._attn_implementation == attention.NAME
        fused.undo()
        after = [config.to_dict() | {"attention": config._attn_implementation} for config in configs]
        assert after == before


def test_of_several_the_last_to_end_gives_the_attention_back():
    model = llama()
    first, second = use_attention(model), use_attention(model)
    first.undo()
    first.undo()
    assert model.config._attn_implementation == "kvcache"
    second.undo()
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_set_meanwhile_stays():
    model = llama()
    fused = use_attention(model)
    model.set_attn_implementation("eager")
    inner = use_attention(model)
    inner.undo()
    assert model.config._attn_implementation == "eager"
    fused.undo()
    assert model.config._attn_implementation == "eager"


def test_an_exception_undoes_it():
    model = llama()
    with pytest.raises(KeyError), use_attention(model):
        raise KeyError
    assert model.config._attn_implementation == model.model.config._attn_implementation == "sdpa"


def test_within_itself_it_changes_nothing():
    model = llama()
    with use_attention(model):
        with use_attention(model):
            pass
        assert model.config._attn_implementation == attention.NAME
    assert model.config._attn_implementation == "sdpa"


def test_other_models_keep_their_attention(reads):
    one, other = llama(), llama()
    with use_attention(one):
        generate(other, ids_of(9))
    assert other.config._attn_implementation == "sdpa"
    assert not reads


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "no"])
def test_other_caches_and_runs_without_one_are_right_too(reads, family, kind):
    model, (ids, mask) = ALL_FAMILIES[family](), left_padded((7, 9, 9))
    ids, mask = ids[1:], mask[1:]  # eager attention makes NaN of padding in float64

    def text():
        static = StaticCache(config=model.config, max_cache_len=40)
        cache = {"dynamic": DynamicCache(config=model.config), "static": static}.get(kind, "no")
        return generate(model, ids, cache, attention_mask=mask)

    expected = text()
    with use_attention(model):
        assert torch.equal(text(), expected)
    assert not reads


@by_pytorch
@pytest.mark.parametrize("make", [llama, gemma2, gpt_oss, gemma3])
def test_a_mask_of_the_users_own_is_honoured(reads, make):
    """Every query sees its own token and every second one before: neither causal nor a window."""
    model, ids = make(), ids_of(8, batch=2)
    index = torch.arange(8)
    seen = (index[:, None] >= index) & ((index[:, None] - index) % 2 == 0)
    if model.config._attn_implementation == "eager":
        mask = torch.where(seen, 0.0, -1e30).to(torch.float64).expand(2, 1, 8, 8)
    else:
        mask = seen.expand(2, 1, 8, 8)
    if hasattr(model.config, "layer_types"):
        mask = dict.fromkeys(set(model.config.layer_types), mask)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        with use_attention(model):
            logits = model(ids, attention_mask=mask, cache=cache_for(model)).logits
    assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max()  # eager rounds its weights to float32
    assert set(reads) == {"decoded"}


@by_pytorch
@pytest.mark.parametrize("mask", [[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1]], ids=str)
def test_padding_elsewhere_than_before_the_text_is_honoured(reads, mask):
    model, ids = mistral(), ids_of(6, batch=2)
    mask = torch.tensor([mask, [1] * 6])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        with use_attention(model):
            logits = model(ids, attention_mask=mask, cache=cache_for(model)).logits
    assert_same_logits(logits[mask == 1], expected[mask == 1])
    assert set(reads) == {"decoded"}


def test_position_biases_are_honoured(reads):
    model, ids = t5(), ids_of(9)
    expected = generate(model, ids, "no")
    with use_attention(model), pytest.warns(UserWarning, match="attention under position_bias is PyTorch's"):
        assert torch.equal(generate(model, ids), expected)
    assert set(reads) == {"decoded"}


@by_pytorch
def test_dropout_is_honoured(reads):
    model, ids = llama(attention_dropout=0.5).train(), ids_of(6)
    torch.manual_seed(3)
    expected = model(ids, use_cache=False).logits
    with use_attention(model):
        torch.manual_seed(3)
        assert_same_logits(model(ids, use_cache=False).logits, expected)
        with torch.no_grad():
            torch.manual_seed(3)
            assert_same_logits(model(ids, cache=cache_for(model)).logits, expected)
    assert set(reads) == {"decoded"}


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"s_aux": torch.zeros(2)}], ids=["softcap", "sinks"])
def test_a_query_that_sees_nothing_gives_zeros_under_any_mask(options):
    layer = llama().model.layers[0].self_attn
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    mask = torch.tensor([[0, 0, 0], [1, 0, 1], [0, 1, 1]], dtype=torch.bool).expand(1, 1, 3, 3)
    output, _ = attention.attention_forward(layer, q, k, v, mask, **options)
    assert (output[0, 0] == 0).all()
    assert output[0, 1:].isfinite().all()
    assert (output[0, 1:] != 0).all()


def test_a_softcap_under_a_position_bias_is_refused():
    layer = llama().model.layers[0].self_attn
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    with pytest.raises(InvalidValueError, match="position_bias"):
        attention.attention_forward(layer, q, k, v, None, softcap=5.0, position_bias=torch.zeros(1, 2, 3, 3))


def test_gradients_are_those_of_the_models_own_attention():
    ids = ids_of(7)
    expected, model = gemma2(), gemma2()
    expected(ids, labels=ids, use_cache=False).loss.backward()
    with use_attention(model):
        model(ids, labels=ids, cache=cache_for(model)).loss.backward()
    for (name, one), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.filterwarnings("ignore:the model does something with a layer's keys and values:UserWarning")
def test_rows_that_changed_since_are_not_read():
    model, ids = llama(), ids_of(5)
    cache = cache_for(model)
    with use_attention(model), torch.no_grad():
        model(ids, cache=cache)
        k, v = cache.update(*torch.randn(2, 1, 2, 1, 8, dtype=torch.float64), 0)
        assert isinstance(k, Deferred)
        assert k.shape == v.shape == (1, 2, 6, 8)
        late, _ = cache.update(*torch.randn(2, 1, 2, 1, 8, dtype=torch.float64), 0)
    assert torch.equal(late + 0, cache.layers[0].keys)
    with pytest.raises(InvalidValueError, match="the cache has changed since it returned these"):
        k + 0
    cache.reset()
    with pytest.raises(InvalidValueError, match="the cache has changed since it returned these"):
        v.clone()


def test_beams_share_the_blocks_of_their_prompt():
    model, ids = llama(), ids_of(40)
    expected = generate(model, ids, "own", num_beams=3)
    with use_attention(model):
        run, blocks = cache_for(model), cache_for(model, block_size=4)
        for cache in (run, blocks):
            assert torch.equal(generate(model, ids, cache, num_beams=3), expected)
    prompt = 40 * run.token_nbytes
    assert run.stored_nbytes == (40 + NEW - 1) * run.token_nbytes
    assert blocks.stored_nbytes < run.stored_nbytes - prompt // 2  # three prompts there, one here


def test_blocks_without_use_attention_are_right_and_said_to_be_slow():
    model, ids = llama(), ids_of(9)
    with pytest.warns(UserWarning, match="needs a copy of all blocks at each step; call kvcache.hf.use_attention"):
        assert torch.equal(generate(model, ids, cache_for(model, block_size=4)), generate(model, ids, "no"))


def test_what_is_no_model_is_refused():
    with pytest.raises(InvalidTypeError, match="model is a str; expected a transformers model"):
        use_attention("smollm2")


def test_a_model_with_attention_of_its_own_is_refused_and_has_a_cache_all_the_same():
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=16, n_layer=2, n_head=2, pad_token_id=0)).eval()
    with pytest.raises(InvalidValueError, match=r"BloomForCausalLM has attention of its own .*without use_attention"):
        use_attention(model)
    assert model.config._attn_implementation != attention.NAME
    assert torch.equal(generate(model, ids_of(6)), generate(model, ids_of(6), "no"))
