"""One cache over several texts and turns: continued, copied, reset, or wholly cached already."""

import copy
import pickle

import pytest
import torch

from kvcache import InvalidValueError
from kvcache.hf import cache_for, use_attention
from tests.hf.runs import MODES, NEW, assert_same_logits, every_family, generate, ids_of, left_padded, logits_of

pytestmark = pytest.mark.usefixtures("one_thread")


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
@pytest.mark.parametrize(
    "duplicate",
    [
        lambda cache, model: copy.copy(cache),
        lambda cache, model: copy.deepcopy(cache),
        lambda cache, model: pickle.loads(pickle.dumps(cache)).attach(model),
        lambda cache, model: cache.fork(),
    ],
    ids=["copy", "deepcopy", "pickle", "fork"],
)
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
        assert torch.equal(generate(model, ids, duplicate(stored, model)), generate(model, ids, "no"))
        assert stored.get_seq_length() == 3


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
def test_f19_the_last_token_sampled_was_never_run(models, family):
    """F19: prompt of 4 and 3 new tokens are 7 ids and 6 rows; the next turn, those 7 + 2, reuses 6 and runs 3."""
    model = models[family]
    cache, fed = cache_for(model), []
    text = generate(model, ids_of(4), cache, max_new_tokens=3)
    assert (text.shape[1], cache.get_seq_length()) == (7, 6)
    assert torch.equal(cache.known_tokens(), text[:, :6])
    text = torch.cat([text, ids_of(2, seed=3)], dim=1)
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    turn = generate(model, text, cache, max_new_tokens=2)
    hook.remove()
    assert fed == [text[:, 6:].tolist(), turn[:, 9:10].tolist()]
    assert torch.equal(turn, generate(model, text, "no", max_new_tokens=2))


@every_family
def test_a9_only_the_common_beginning_of_another_prompt_is_reused(models, family):
    """A9: cached 1 .. 10, new prompt 1 2 3 6 7 10: refused, and after a crop to 1 2 3 the text of a cold run."""
    model, cached = models[family], torch.tensor([[*range(1, 11)]])
    prompt = torch.tensor([[1, 2, 3, 6, 7, 10]])
    cache = cache_for(model)
    cache.activate_past_recording()  # so that windows can go back too
    with torch.no_grad():
        model(cached, cache=cache)
    with pytest.raises(InvalidValueError, match="the cache holds 10 tokens, but the prompt has 6"):
        generate(model, prompt, cache)
    with pytest.raises(InvalidValueError, match="the cache holds 10 tokens, but the prompt begins with other ones"):
        generate(model, torch.cat([prompt, prompt], dim=1), cache)
    assert torch.equal(cache.known_tokens(), cached)
    cache.crop(-7)
    assert cache.known_tokens().tolist() == [[1, 2, 3]]
    assert torch.equal(generate(model, prompt, cache), generate(model, prompt, "no"))


def test_j5_two_models_side_by_side_do_not_disturb_each_other(models):
    """J5: a model with windows and one without, each with its own cache, one step of each in turn."""
    pair, text = [models["llama"], models["gemma3"]], ids_of(14)
    caches, logits = [cache_for(model) for model in pair], [[], []]
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 14)):
            for model, cache, seen in zip(pair, caches, logits, strict=True):
                seen.append(model(text[:, start:stop], cache=cache).logits)
        for model, seen in zip(pair, logits, strict=True):
            assert_same_logits(torch.cat(seen, dim=1), model(text, use_cache=False).logits)


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
def test_forks_of_a_cache_in_blocks_share_them_and_go_on_by_themselves(models, family):
    model, prefix = models[family], ids_of(9)
    stored = cache_for(model, block_size=4)
    with use_attention(model):
        with torch.no_grad():
            model(prefix, cache=stored)
        forks = [stored.fork() for _ in range(3)]
        shared = [layer for layer in stored.layers if layer.kind == "full"]
        assert [layer.rows.num_holders(0) for layer in shared] == [4] * len(shared)
        for seed, fork in enumerate(forks):
            ids = torch.cat([prefix, ids_of(3, seed=seed)], dim=1)
            assert torch.equal(generate(model, ids, fork), generate(model, ids, "no"))
            assert torch.equal(fork.known_tokens()[:, :12], ids)
        assert torch.equal(stored.known_tokens(), prefix)
        forks[0].reset()
        del forks, fork
    assert [layer.rows.num_holders(0) for layer in shared] == [1] * len(shared)
