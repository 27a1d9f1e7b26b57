"""`generate` and chunked forwards with our cache, against transformers' own cache and runs without one."""

import copy
import pickle

import pytest
import torch

from kvcache import CacheFullError, InvalidValueError
from kvcache.hf import cache_for
from tests.hf.tiny_models import FAMILIES, PAD, VOCAB, bart, gemma3, t5

NEW = 16

every_family = pytest.mark.parametrize("family", FAMILIES)
every_encoder_decoder = pytest.mark.parametrize("make", [t5, bart])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """On models this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in FAMILIES.items()}


@pytest.fixture(scope="module")
def assistants():
    """Models of the same kind with other weights: drafts that are nearly always wrong."""
    return {name: make(seed=5) for name, make in FAMILIES.items()}


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


MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 30},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 2},
}


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
@pytest.mark.parametrize("max_tokens", [None, 40], ids=["growing", "preallocated"])
def test_c6_a_second_text_after_reset(models, family, max_tokens):
    """C6: run A, reset, run B (another batch size): B is that of a new cache."""
    model = models[family]
    cache = cache_for(model, max_tokens)
    for ids in (ids_of(9), ids_of(5, batch=3, seed=4), ids_of(11, seed=5)):
        cache.reset()
        assert torch.equal(generate(model, ids, cache), generate(model, ids, "no"))


@every_family
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("max_tokens", [None, 40], ids=["growing", "preallocated"])
def test_c14_a_stored_prefix_does_not_grow(models, family, duplicate, max_tokens):
    """C14: a prefix of 3, continued twice from copies, shallow ones too: still 3, and both equal a cold run."""
    model = models[family]
    prefix, first, second = ids_of(3), ids_of(4, seed=3), ids_of(5, seed=4)
    stored = cache_for(model, max_tokens)
    with torch.no_grad():
        model(prefix, cache=stored)
    for continuation in (first, second, first):
        ids = torch.cat([prefix, continuation], dim=1)
        assert torch.equal(generate(model, ids, duplicate(stored)), generate(model, ids, "no"))
        assert stored.get_seq_length() == 3


@every_family
@pytest.mark.parametrize("count", [1, 4])
def test_c16_the_last_token_is_not_cached(models, family, count):
    """C16: after 5 + 1 and 5 + 4 ids the cache holds 5 and 8 tokens."""
    model = models[family]
    cache = cache_for(model)
    text = generate(model, ids_of(5), cache, max_new_tokens=count)
    assert cache.get_seq_length() == text.shape[1] - 1 == 4 + count


@every_family
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_a_text_is_continued_turn_by_turn(models, family, mode):
    """Each turn gives the whole text again; only what is new runs, and the result is that of a cold run."""
    model, text = models[family], ids_of(5)
    cache = cache_for(model)
    fed = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for turn in range(3):
        if mode == "beams" and turn == 0:
            cache.reset()
        text = torch.cat([text, ids_of(3, seed=10 + turn)], dim=1)
        cold = generate(model, text, "no", max_new_tokens=6, **MODES[mode])
        fed.clear()
        text = generate(model, text, cache, max_new_tokens=6, **MODES[mode])
        assert torch.equal(text, cold)
        assert fed[0] == (8 if turn == 0 or mode == "beams" else 4)
        if mode == "beams":
            cache.reset()
            text = text[:, :5]
    hook.remove()


@every_family
def test_only_new_tokens_with_a_mask_over_all(models, family):
    model, ids = models[family], ids_of(12)
    cache = cache_for(model)
    generate(model, ids[:, :7], cache, max_new_tokens=1)
    text = generate(model, ids[:, 7:], cache, attention_mask=torch.ones(1, 12, dtype=torch.int64))
    assert torch.equal(text[:, 5:], generate(model, ids, "no")[:, 12:])


@every_family
def test_prompt_lookup_on_a_used_cache(models, family):
    """transformers would run the whole text again on top of what is cached."""
    model, ids = models[family], torch.cat([ids_of(6)] * 2, dim=1)
    for cached in (1, 7, 11, 12):
        cache = cache_for(model)
        with torch.no_grad():
            model(ids[:, :cached], cache=cache)
        text = generate(model, ids, cache, prompt_lookup_num_tokens=3)
        assert torch.equal(text, generate(model, ids, "no"))
        assert cache.get_seq_length() == text.shape[1] - 1


# --- what would silently be wrong


@every_family
@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt lookup"])
def test_d5_a_wholly_cached_prompt_runs_its_last_token_again(models, family, mode):
    """D5: 5 ids cached, the same 5 given: the text of a cold run, 4 tokens later the cache holds 8, not 13."""
    model, ids = models[family], ids_of(5)
    cache = cache_for(model)
    with torch.no_grad():
        model(ids, cache=cache)
    options = {"num_beams": 2} if mode == "beams" else {}
    cold = generate(model, ids, "no", max_new_tokens=4, **options)
    if mode == "beams":
        cache.batch_repeat_interleave(2)
    elif mode == "prompt lookup":
        options["prompt_lookup_num_tokens"] = 2
    assert torch.equal(generate(model, ids, cache, max_new_tokens=4, **options), cold)
    assert cache.get_seq_length() == 8


@every_family
@pytest.mark.parametrize("count", [5, 12])
def test_d5_in_a_left_padded_batch_and_over_a_wrapped_window(models, family, count):
    """D5: also where the window has already dropped tokens."""
    model = models[family]
    ids, mask = left_padded((count, count - 3))
    cache = cache_for(model)
    logits_of(model, ids, (count,), cache, mask)
    text = generate(model, ids, cache, attention_mask=mask)
    assert torch.equal(text, generate(model, ids, "no", attention_mask=mask))
    assert cache.get_seq_length() == count + NEW - 1


@every_family
def test_d5_with_embeddings(models, family):
    model, ids = models[family], ids_of(5)
    embeds = model.get_input_embeddings()(ids).detach()
    cache = cache_for(model)
    for _ in range(2):
        new = generate(model, None, cache, inputs_embeds=embeds, max_new_tokens=1)
        assert cache.get_seq_length() == 5
        assert torch.equal(new, generate(model, ids, "no", max_new_tokens=1)[:, 5:])
    with pytest.raises(InvalidValueError, match="the cache holds 5 tokens, but the prompt has 3"):
        generate(model, None, cache, inputs_embeds=embeds[:, :3])


@every_family
def test_a_prompt_shorter_than_the_cache_is_refused(models, family):
    model = models[family]
    cache = cache_for(model)
    generate(model, ids_of(6), cache, max_new_tokens=4)
    message = r"the cache holds 9 tokens, but the prompt has 4; for another text, reset\(\) the cache or crop\(\) it"
    with pytest.raises(InvalidValueError, match=message):
        generate(model, ids_of(4), cache)
    assert cache.get_seq_length() == 9
    cache.reset()
    assert torch.equal(generate(model, ids_of(4), cache), generate(model, ids_of(4), "no"))


@every_family
def test_another_prompt_on_a_used_cache_is_refused(models, family):
    model = models[family]
    cache = cache_for(model)
    generate(model, ids_of(6), cache, max_new_tokens=4)
    for count in (9, 14):
        with pytest.raises(InvalidValueError, match="the cache holds 9 tokens, but the prompt begins with other ones"):
            generate(model, ids_of(count, seed=3), cache)
    assert cache.get_seq_length() == 9


@every_family
def test_a11_new_ids_with_a_mask_that_does_not_cover_all_are_refused(models, family):
    """A11: cache of 6, ids of 1 and a mask of 6 (should be 7), through generate, padded or not."""
    model, ids = models[family], ids_of(7)
    for mask in (torch.ones(1, 6, dtype=torch.int64), torch.tensor([[0, 1, 1, 1, 1, 1]])):
        cache = cache_for(model)
        with torch.no_grad():
            model(ids[:, :6], cache=cache)
        with pytest.raises(InvalidValueError, match="covers 6 tokens; expected 7: 6 in the cache and 1 new ones"):
            generate(model, ids[:, 6:], cache, attention_mask=mask)
        with pytest.raises(InvalidValueError, match="the cache holds 6 tokens, but the prompt has 1"):
            generate(model, ids[:, 6:], cache)
        assert cache.get_seq_length() == 6


def test_a11_chunks_of_a_prompt_that_is_already_cached_are_refused(models):
    for model in models.values():
        cache = cache_for(model)
        ids = ids_of(6)
        with torch.no_grad():
            model(ids, cache=cache)
        with pytest.raises(InvalidValueError, match="covers 0 tokens; expected 8: 6 in the cache and 2 new ones"):
            generate(model, ids, cache, prefill_chunk_size=2)


@every_family
def test_a_cache_together_with_use_cache_false_is_refused(models, family):
    """transformers would run the whole text again at every step, on top of what is cached."""
    model = models[family]
    cache = cache_for(model)
    with pytest.raises(InvalidValueError, match="use_cache is False, so that generate would run the whole text again"):
        generate(model, ids_of(5), cache, use_cache=False)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_beams_on_a_cache_of_one_row_are_refused(models, options):
    for model in models.values():
        cache = cache_for(model)
        with torch.no_grad():
            model(ids_of(5), cache=cache)
        with pytest.raises(InvalidValueError, match=r"the cache holds 1 sequences, the input has 3; .*batch_repeat"):
            generate(model, ids_of(7), cache, **options)
        assert {layer.get_seq_length() for layer in cache.layers} == {5}


def test_k1_an_empty_prompt_is_refused_and_the_cache_stays_usable(models):
    """K1: ids of length 0."""
    for model in models.values():
        cache = cache_for(model)
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            generate(model, ids_of(3)[:, :0], cache)
        cache.reset()
        assert torch.equal(generate(model, ids_of(5), cache), generate(model, ids_of(5), "no"))


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
    options = {"attention_mask": mask, "eos_token_id": ends, "pad_token_id": PAD}
    text = generate(model, ids, **options)[:, 9:].tolist()
    assert text == [row[:step] + [PAD] * (NEW - step) for row, step in zip(plain, (1, 3, NEW), strict=True)]
    assert text == generate(model, ids, "own", **options)[:, 9:].tolist()


# --- half precision


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


# --- encoder-decoder


@every_encoder_decoder
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True}, {"num_beams": 4, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sampling", "several beams"],
)
@pytest.mark.parametrize("max_tokens", [None, NEW], ids=["growing", "preallocated"])
def test_d8_encoder_decoder_text_is_that_of_transformers_own_cache(make, options, max_tokens):
    """D8: cross rows are written once, follow the beams, and give the text of transformers' own cache and of none."""
    model, ids = make(), ids_of(7, batch=2)
    cache = cache_for(model, max_tokens)
    text = generate(model, ids, cache, **options)
    assert len(set(text[0].tolist())) > 4
    assert torch.equal(text, generate(model, ids, "own", **options))
    assert torch.equal(text, generate(model, ids, "no", **options))
    assert cache.get_seq_length() == NEW
    assert cache.cross_attention_cache.get_seq_length() == 7
    assert cache.cross_attention_cache.layers[0].rows.k_cache.shape[2] == 7


@every_encoder_decoder
def test_d8_the_padded_length_of_the_encoder_does_not_matter(make):
    """D8: the same encoder input padded to 5 and to 9."""
    model, texts = make(), []
    for length in (5, 9):
        ids, mask = torch.full((2, length), PAD), torch.zeros(2, length, dtype=torch.int64)
        ids[:, :4], mask[:, :4] = ids_of(4, batch=2), 1
        texts.append(generate(model, ids, attention_mask=mask, num_beams=2))
    assert torch.equal(*texts)


@every_encoder_decoder
def test_encoder_decoder_prompt_lookup(make):
    model, ids = make(), ids_of(8)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), generate(model, ids, "no"))


@every_encoder_decoder
def test_an_encoder_decoder_cache_is_for_one_input(make):
    """Its cross rows are those of the first input; a second one would silently read them."""
    model = make()
    cache = cache_for(model)
    generate(model, ids_of(7), cache)
    with pytest.raises(InvalidValueError, match=r"the cache holds 16 tokens and belongs to the encoder's last input"):
        generate(model, ids_of(7, seed=3), cache)
    cache.reset()
    assert torch.equal(generate(model, ids_of(5, seed=3), cache), generate(model, ids_of(5, seed=3), "no"))
