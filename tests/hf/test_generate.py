"""`generate` and chunked forwards with our cache give what transformers' own cache gives, and runs without one."""

import copy

import pytest
import torch

from kvcache import CacheFullError
from kvcache.hf import cache_for
from tests.hf.older_releases import since_5_24
from tests.hf.runs import MODES, NEW, assert_same_logits, every_family, generate, ids_of, left_padded, logits_of
from tests.hf.tiny_models import FAMILIES, PAD, gemma3

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def assistants():
    """Models of the same kind with other weights: drafts that are nearly always wrong."""
    return {name: make(seed=5) for name, make in FAMILIES.items()}


@every_family
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_tokens", [None, 9 + NEW - 1], ids=["growing", "preallocated"])
def test_the_text_is_that_of_a_run_without_a_cache(models, family, mode, max_tokens):
    model, ids = models[family], ids_of(9)
    cache = cache_for(model, max_tokens)
    text = generate(model, ids, cache, **MODES[mode])
    assert text.shape[1] == 9 + NEW
    assert len(set(text[0, 9:].tolist())) > 4
    assert torch.equal(text, generate(model, ids, "no", **MODES[mode]))
    assert torch.equal(text, generate(model, ids, "own", **MODES[mode]))
    assert cache.get_seq_length() == 9 + NEW - 1


@every_family
@pytest.mark.parametrize("mode", ["greedy", "beams", "sampling", "several"])
def test_left_padded_batches_give_the_text_of_a_run_without_a_cache(models, family, mode):
    model, (ids, mask) = models[family], left_padded()
    options = MODES[mode] | {"attention_mask": mask}
    text = generate(model, ids, **options)
    assert text.shape[1] == 9 + NEW
    assert torch.equal(text, generate(model, ids, "no", **options))
    assert torch.equal(text, generate(model, ids, "own", **options))


@every_family
def test_a1_each_row_of_a_padded_batch_is_its_single_run(models, family):
    """A1: rows [P, P, 5, 6, 7] and [1, 2, 3, 4, 5], 4 tokens: positions count from the row's first real token."""
    model = models[family]
    ids, mask = torch.tensor([[PAD, PAD, 5, 6, 7], [1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    text = generate(model, ids, attention_mask=mask, max_new_tokens=4)
    for row, prompt in ((0, [5, 6, 7]), (1, [1, 2, 3, 4, 5])):
        single = generate(model, torch.tensor([prompt]), "no", max_new_tokens=4)
        assert text[row, 5:].tolist() == single[0, len(prompt) :].tolist()
    sizes = (5, 1, 1, 2)
    full_mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.int64)], dim=1)
    cached = logits_of(model, text, sizes, cache_for(model), full_mask)
    with torch.no_grad():
        assert_same_logits(cached[:1, 2:], model(text[:1, 2:], use_cache=False).logits)
        assert_same_logits(cached[1:], model(text[1:], use_cache=False).logits)


@every_family
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("max_tokens", [None, 24], ids=["growing", "preallocated"])
def test_a3_chunked_logits_are_those_of_one_pass(models, family, padded, max_tokens):
    """A3, N1 (float64): one by one, in chunks of 3, prefill then decode, long chunk last: equal to 1e-12."""
    model = models[family]
    ids, mask = left_padded((24, 15, 20)) if padded else (ids_of(24, batch=2), None)
    visible = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        positions = (visible.cumsum(1) - 1).clamp(min=0)
        expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for sizes in ((1,) * 24, (3,) * 8, (5,) + (1,) * 19, (2, 22), (13, 11)):
        logits = logits_of(model, ids, sizes, cache_for(model, max_tokens), mask)
        assert_same_logits(logits[visible == 1], expected[visible == 1])


@every_family
def test_chunked_prefill_of_generate(models, family):
    model = models[family]
    ids, mask = left_padded()
    expected = generate(model, ids, "no", attention_mask=mask)
    assert torch.equal(generate(model, ids, attention_mask=mask, prefill_chunk_size=2), expected)


@every_family
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_attention_implementation(family, attention):
    model = FAMILIES[family](attn_implementation=attention)
    assert torch.equal(generate(model, ids_of(9)), generate(model, ids_of(9), "no"))


@every_family
@pytest.mark.parametrize("drafts", ["prompt lookup", "wrong", "right"])
@pytest.mark.parametrize("max_tokens", [None, 40], ids=["growing", "preallocated"])
def test_i1_rejected_drafts_leave_no_trace(models, assistants, family, drafts, max_tokens):
    """I1, E10: with drafts that are nearly always wrong, sometimes or always right, the text is the greedy one."""
    model = models[family]
    ids = torch.cat([ids_of(6)] * 2, dim=1)  # something to look up
    options = {"prompt_lookup_num_tokens": 4}
    if drafts != "prompt lookup":
        options = {"assistant_model": assistants[family] if drafts == "wrong" else copy.deepcopy(model)}
    cache = cache_for(model, max_tokens)
    text = generate(model, ids, cache, **options)
    assert torch.equal(text, generate(model, ids, "no"))
    assert cache.get_seq_length() == text.shape[1] - 1
    assert torch.equal(cache.known_tokens(), text[:, :-1])


def test_sampled_assisted_decoding_is_that_of_transformers_own_cache(models, assistants):
    for name, model in models.items():
        options = {"do_sample": True, "assistant_model": assistants[name]}
        assert torch.equal(generate(model, ids_of(9), **options), generate(model, ids_of(9), "own", **options))


@since_5_24
def test_past_key_values_is_the_older_name_of_the_argument(models):
    model, ids = models["mistral"], ids_of(9)
    cache = cache_for(model)
    with pytest.warns(FutureWarning, match="past_key_values"):
        text = model.generate(ids, max_new_tokens=NEW, past_key_values=cache)
    assert torch.equal(text, generate(model, ids, "no"))
    assert cache.get_seq_length() == 9 + NEW - 1


def test_c1_generate_stops_at_a_full_cache():
    """C1: room for the prompt only: the first decoded token is refused, with what is stored and what to do."""
    model = gemma3()
    cache = cache_for(model, max_tokens=5)
    message = r"the cache is full: 5 of 5 tokens stored, 1 more asked for; .*max_tokens=6\) or more"
    with pytest.raises(CacheFullError, match=message):
        generate(model, ids_of(5), cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5, 5]
    assert torch.equal(generate(model, ids_of(5), cache, max_new_tokens=1), generate(model, ids_of(5), "no", 1))


@every_family
@pytest.mark.parametrize("count", [1, 4])
def test_c16_the_last_token_is_not_cached(models, family, count):
    """C16: after 5 + 1 and 5 + 4 ids the cache holds 5 and 8 tokens."""
    model = models[family]
    cache = cache_for(model)
    text = generate(model, ids_of(5), cache, max_new_tokens=count)
    assert cache.get_seq_length() == text.shape[1] - 1 == 4 + count


@every_family
def test_k8_each_row_stops_at_its_own_end(models, family):
    """K8: the end token at step 1, at step 3 and never: each row has its own length, the others go on."""
    model = models[family]
    for seed in range(50):
        ids, mask = left_padded(seed=seed)
        plain = generate(model, ids, "no", attention_mask=mask)[:, 9:].tolist()
        ends = [plain[0][0], plain[1][2]]
        steps = [next((step + 1 for step, token in enumerate(row) if token in ends), NEW) for row in plain]
        if steps == [1, 3, NEW]:
            break
    else:
        pytest.fail("no prompt among 50 whose rows end at steps 1, 3 and never; try others")
    options = {"attention_mask": mask, "eos_token_id": ends, "pad_token_id": PAD}
    text = generate(model, ids, **options)[:, 9:].tolist()
    assert text == [row[:step] + [PAD] * (NEW - step) for row, step in zip(plain, (1, 3, NEW), strict=True)]
    assert text == generate(model, ids, "own", **options)[:, 9:].tolist()
