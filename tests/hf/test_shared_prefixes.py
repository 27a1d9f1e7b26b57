"""Texts that share a prefix through a pool, with models of transformers: the logits of a cold run, in float64."""

import pytest
import torch

from kvcache import BlockPool, CacheSpec, InvalidValueError, PrefixCache
from kvcache.hf import forward_step
from kvcache.prefix import LookupEnd
from tests.hf.runs import ids_of
from tests.hf.tiny_models import ALL_FAMILIES, POOLED, WINDOW, gemma3, llama

pytestmark = pytest.mark.usefixtures("one_thread", "softmax_in_float64")

SHARED = ids_of(3 * WINDOW, seed=1)[0].tolist()
OWN = [[40 + length, *ids_of(length, seed=length)[0].tolist()] for length in (8, 3, 0, 16)]  # none begins as another


def prefixes_of(model, num_blocks=60, block_size=4, storage="float64"):
    pool = BlockPool(CacheSpec.from_config(model.config), num_blocks, block_size, storage)
    return PrefixCache(pool, model)


@torch.no_grad()
def cold(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


@torch.no_grad()
def run(model, prefixes, tokens, num_new=6, chunk=None):
    """Decode greedily behind a text, each logit held against a run without a cache; return how many were reused."""
    sequence = prefixes.acquire(tokens)
    reused = sequence.seq_len
    waiting = tokens[reused:]
    for _ in range(num_new):
        while waiting:
            with prefixes.pool.step([sequence], [waiting[:chunk]]) as step:
                logits = forward_step(model, step)[0]
            waiting = waiting[len(step.tokens[0]) :]
        expected = cold(model, sequence.tokens)
        assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
        waiting = [int(logits.argmax())]
    prefixes.publish(sequence)
    sequence.free()
    prefixes.pool.check()
    return reused


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("family", POOLED)
def test_a_prefix_of_three_windows_is_reused_and_equal_to_a_cold_run(family, chunk):
    model = ALL_FAMILIES[family]()
    prefixes = prefixes_of(model)
    reused = [run(model, prefixes, SHARED + own, chunk=chunk) for own in OWN]
    assert reused == [0, len(SHARED), len(SHARED), len(SHARED)]
    assert [run(model, prefixes, SHARED + own) for own in OWN] == [len(SHARED) + len(own) - 1 for own in OWN]


def test_d8_a_batch_of_texts_that_found_different_lengths_is_equal_to_cold_runs():
    model = gemma3()
    prefixes = prefixes_of(model)
    run(model, prefixes, SHARED + OWN[0])
    texts = [SHARED + OWN[1], OWN[2], SHARED + OWN[0] + OWN[3], SHARED[:7] + OWN[1]]
    sequences = [prefixes.acquire(text) for text in texts]
    assert [sequence.seq_len for sequence in sequences] == [15, 0, 24, 7]
    new = [text[sequence.seq_len :] for text, sequence in zip(texts, sequences, strict=True)]
    with torch.no_grad(), prefixes.pool.step(sequences, new) as step:
        logits = forward_step(model, step)
    expected = torch.stack([cold(model, text) for text in texts])
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_texts_are_right_while_blocks_of_both_kinds_are_evicted():
    model = gemma3()
    prefixes = prefixes_of(model, num_blocks={"full": 16, "sliding": 9})
    for turn in range(12):
        own = OWN[turn % len(OWN)]
        run(model, prefixes, (SHARED if turn % 3 else SHARED[:6]) + own)
    statistics = prefixes.statistics
    assert min(statistics.num_evicted.values()) > 0
    assert statistics.num_reused > 40


@torch.no_grad()
def change_weights(model):
    model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def change_rope(model):
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).double()


def write_data(model):
    model.model.layers[1].self_attn.v_proj.weight.data *= 0.5


def load_other(model):
    model.load_state_dict(llama(seed=5).state_dict())


def train_a_step(model):
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.tensor([SHARED]), labels=torch.tensor([SHARED])).loss.backward()
    optimiser.step()


@pytest.mark.parametrize("change", [change_weights, change_rope, write_data, load_other, train_a_step])
def test_what_other_weights_or_positions_computed_is_not_reused(change):
    model = llama()
    prefixes = prefixes_of(model)
    assert [run(model, prefixes, SHARED), run(model, prefixes, SHARED)] == [0, 14]
    change(model)
    assert prefixes.lookup(SHARED).end is LookupEnd.NOTHING_KEPT
    assert [run(model, prefixes, SHARED), run(model, prefixes, SHARED)] == [0, 14]


def test_an_adapter_is_a_namespace_by_itself_on_and_off():
    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.enabled = base, True
            self.down, self.up = torch.nn.Linear(32, 2).double(), torch.nn.Linear(2, base.out_features).double()

        def forward(self, x):
            return self.base(x) + (self.up(self.down(x)) if self.enabled else 0)

    model = llama()
    prefixes = prefixes_of(model)
    assert run(model, prefixes, SHARED) == 0
    attention = model.model.layers[0].self_attn
    attention.k_proj = Adapted(attention.k_proj)
    assert [run(model, prefixes, SHARED) for _ in range(2)] == [0, 14]
    attention.k_proj.enabled = False
    assert [run(model, prefixes, SHARED) for _ in range(2)] == [0, 14]
    attention.k_proj.enabled = True
    assert run(model, prefixes, SHARED) == 14


def test_another_model_over_the_pool_of_a_prefix_cache_is_refused():
    model = llama()
    prefixes = prefixes_of(model)
    sequence = prefixes.acquire(SHARED)
    message = "the pool has a PrefixCache of another model"
    with prefixes.pool.step([sequence], [SHARED]) as step:
        with pytest.raises(InvalidValueError, match=message):
            forward_step(llama(seed=1), step)
        with torch.no_grad():
            forward_step(model, step)


def test_a_configuration_that_changed_is_compared_again():
    model = ALL_FAMILIES["mistral"]()
    prefixes = prefixes_of(model)
    run(model, prefixes, SHARED)
    model.config.sliding_window = None
    sequence = prefixes.pool.new_sequence()
    step = prefixes.pool.step([sequence], [SHARED])
    with pytest.raises(InvalidValueError, match="layer 0 of the pool is"):
        forward_step(model, step)
    step.abort()
