"""Whole steps of described decoders, by every way to run them, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import InvalidValueError
from kvcache.decoder import FewRows, ManyRows
from kvcache.decoder.rotary import RotaryTables
from tests.decoder.random_decoders import compressed, joined, new_ids, pool_for, random_decoder, with_pasts
from tests.decoder.reference import expected_logits
from tests.kernels import INSTRUCTION_SETS, needs_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

STORAGES = ["float32", "bfloat16", "float16", "int8", "int4"]
TOLERANCE = 3e-6  # of the greatest logit, or of 1 where few logits are all near 0
MANY_ROWS = len(INSTRUCTION_SETS)
WAYS = [*INSTRUCTION_SETS, "many rows"]

VARIANTS = {
    "like Llama": {},
    "like Qwen2": {"bias": True, "windows": (None, None, 5)},
    "like Qwen3": {"head_norms": True, "head_dim": 80, "heads": 2, "kv_heads": 1, "tied": True},
    "like Gemma": {
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "kv_heads": 1,
        "tied": True,
        "embedding_scale": 6.34375,
    },
    "like Gemma2": {
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "four_norms": True,
        "softcap": 2.0,
        "head_softcap": 3.0,
        "windows": (5, None, 5),
        "embedding_scale": 0.90625,
    },
    "like Gemma3": {"norm_offset": 1.0, "four_norms": True, "head_norms": True, "head_dim": 64, "windows": (9, None)},
    "sinks": {"windows": (None, 6, 6), "sinks": 3},
    "values of their own size": {"v_head_dim": 10, "head_dim": 6},
    "everything": {
        "bias": True,
        "head_norms": True,
        "four_norms": True,
        "softcap": 4.0,
        "head_softcap": 2.0,
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 12,
        "inner": 99,
        "vocab": 130,
        "hidden": 56,
        "sinks": 1,
    },
    "whole vectors": {"hidden": 64, "head_dim": 16, "inner": 128, "vocab": 64},
    "hardly anything": {"hidden": 1, "heads": 1, "kv_heads": 1, "head_dim": 2, "inner": 1, "vocab": 2},
}
# Tokens that sequences hold already, and how many new ones they get.
RAGGED = {
    "one token": ([0], [1]),
    "a prompt": ([0], [20]),
    "one each": ([3, 100, 0, 40], [1, 1, 1, 1]),
    "several each": ([70, 5], [4, 4]),
    "ragged": ([0, 130, 33, 8], [5, 1, 9, 3]),
}


def run(way, decoder, step, places=None):
    tables = RotaryTables(decoder.rotary, decoder.max_positions)
    if way == MANY_ROWS:
        return ManyRows(decoder, tables, torch.float32).run(step, places)
    return FewRows(decoder, tables, way).run(step, places)


def assert_close(logits, expected, tolerance=TOLERANCE):
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


def assert_right(way, decoder, pool, pasts, counts, places=None, tolerance=TOLERANCE):
    vocab = decoder.head.weight.shape[0]
    with pool.step(with_pasts(pool, pasts), new_ids(counts, vocab)) as step:
        logits = run(way, decoder, step, places)
        expected = expected_logits(decoder, step, places, tolerance)
    assert logits.dtype == torch.float32
    assert logits.shape == expected.shape
    assert_close(logits, expected, tolerance)
    pool.check()


every_way = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=needs_kernels if way != MANY_ROWS else ()) for way in range(len(WAYS))], ids=WAYS
)


@every_way
@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_rows_are_those_of_float64(variant, ragged, way):
    decoder = random_decoder(**VARIANTS[variant])
    assert_right(way, decoder, pool_for(decoder), *RAGGED[ragged])


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ["like Qwen2", "like Qwen3", "like Gemma2"])
def test_weights_in_16_bits_are_read_exactly(variant, dtype, way):
    decoder = random_decoder(**VARIANTS[variant], dtype=dtype)
    for ragged in RAGGED.values():
        assert_right(way, decoder, pool_for(decoder), *ragged)


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_weights_in_int8_are_those_that_their_codes_stand_for(bias, dtype, way):
    sizes = {"hidden": 96, "heads": 4, "head_dim": 8, "inner": 160}
    decoder = compressed(random_decoder(**sizes, bias=bias, dtype=dtype, tied=not bias))
    for ragged in RAGGED.values():
        assert_right(way, decoder, pool_for(decoder), *ragged)


@every_way
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_blocks_of_any_size_hold_rows_of_any_kind(block_size, storage, way):
    decoder = random_decoder(windows=(None, 20, 20), sinks=2, head_dim=64)
    for ragged in ("a prompt", "ragged"):
        assert_right(way, decoder, pool_for(decoder, block_size, storage), *RAGGED[ragged])


@every_way
@pytest.mark.parametrize("places", [[], [3], [17, 0, 4, 4], list(range(18)), list(range(18)) * 3])
def test_logits_are_those_of_the_tokens_asked_for(places, way):
    decoder = random_decoder(head_softcap=3.0)
    if not places:  # nothing to compare; the rows are stored all the same
        pool = pool_for(decoder)
        with pool.step([pool.new_sequence()], [[1, 2]]) as step:
            assert run(way, decoder, step, torch.tensor(places, dtype=torch.int64)).shape == (0, 37)
        return
    assert_right(way, decoder, pool_for(decoder), *RAGGED["ragged"], torch.tensor(places))


@every_way
@pytest.mark.parametrize(
    ("pasts", "counts"),
    [([0], [65]), ([9], [130]), ([0, 40, 3], [64, 1, 65])],
    ids=["65", "130", "64, 1 and 65"],
)
@pytest.mark.parametrize("variant", ["like Gemma2", "everything"])
def test_more_tokens_and_places_than_are_multiplied_at_a_time(variant, pasts, counts, way):
    decoder = random_decoder(**VARIANTS[variant])
    assert_right(way, decoder, pool_for(decoder), pasts, counts)
    count = sum(counts)
    for places in (torch.arange(count), torch.arange(count).flip(0), torch.tensor([count - 1, 0] * 33)):
        assert_right(way, decoder, pool_for(decoder), pasts, counts, places)


@every_way
@pytest.mark.parametrize("in_int8", [False, True])
def test_more_tokens_than_are_multiplied_at_a_time_by_smaller_weights(in_int8, way):
    decoder = random_decoder(hidden=96, head_dim=8, inner=160, dtype=torch.bfloat16)
    decoder = compressed(decoder) if in_int8 else decoder
    assert_right(way, decoder, pool_for(decoder), [5], [130], torch.arange(130))


SMALL = {"heads": 1, "kv_heads": 1, "head_dim": 8}
LARGE = {"heads": 16, "kv_heads": 4, "head_dim": 8}
WIDE = {"heads": 4, "kv_heads": 4, "head_dim": 80, "v_head_dim": 64}


@every_way
@pytest.mark.parametrize("windows", [(None,), (7,), (None, 7)], ids=str)
@pytest.mark.parametrize(
    "sizes", [(SMALL, LARGE), (LARGE, SMALL), (SMALL, WIDE), (WIDE, LARGE)], ids=["more", "fewer", "wider", "narrower"]
)
def test_layers_of_one_kind_have_heads_of_their_own(sizes, windows, way):
    decoder = joined(*(random_decoder(**size, windows=windows, seed=seed) for seed, size in enumerate(sizes)))
    for pasts, counts in (([0], [20]), ([600], [1]), ([0, 130, 33, 8], [5, 1, 40, 3]), ([3], [70])):
        assert_right(way, decoder, pool_for(decoder, num_tokens=800), pasts, counts)


@needs_kernels
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("variant", ["like Gemma2", "everything", "hardly anything"])
def test_any_number_of_threads(variant, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decoder = random_decoder(**VARIANTS[variant])
        for way in range(MANY_ROWS):
            for ragged in RAGGED.values():
                assert_right(way, decoder, pool_for(decoder), *ragged)
    finally:
        torch.set_num_threads(before)


def test_products_in_bfloat16_are_near():
    decoder = random_decoder(dtype=torch.bfloat16)
    pool = pool_for(decoder)
    with pool.step([pool.new_sequence()], new_ids([30], 37)) as step:
        logits = ManyRows(decoder, RotaryTables(decoder.rotary, None), torch.bfloat16).run(step)
    with pool.step([pool.new_sequence()], new_ids([30], 37)) as step:
        exact = run(MANY_ROWS, decoder, step)
    assert 0 < (logits - exact).norm() < 0.03 * exact.norm()


@st.composite
def _cases(draw):
    kv_heads = draw(st.integers(1, 3))
    numbers = draw(st.integers(0, 2**31))
    in_int8 = draw(st.booleans())
    unit = 32 if in_int8 else 1
    options = {
        "seed": numbers,
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "hidden": unit * draw(st.integers(1, 4) if in_int8 else st.integers(16, 90)),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 9)),
        "head_dim": 32 if in_int8 else draw(st.sampled_from([2, 6, 8, 14, 64, 80])),
        "inner": unit * draw(st.integers(1, 4 if in_int8 else 90)),
        "vocab": draw(st.integers(2, 70)),
        "windows": tuple(draw(st.lists(st.sampled_from([None, 5]), min_size=1, max_size=3))),
        "sinks": draw(st.integers(0, 3)),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "head_softcap": draw(st.sampled_from([None, 30.0])),
        "activation": draw(st.sampled_from(["silu", "gelu_tanh"])),
        "norm_offset": draw(st.sampled_from([0.0, 1.0])),
    }
    options["embedding_scale"] = draw(st.sampled_from([1.0, 3.0]))
    options |= {name: draw(st.booleans()) for name in ("bias", "head_norms", "four_norms", "tied")}
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    pasts = draw(st.lists(st.integers(0, 60), min_size=len(counts), max_size=len(counts)))
    places = draw(st.none() | st.lists(st.integers(0, sum(counts) - 1), min_size=1, max_size=9))
    storage, block_size = draw(st.sampled_from(STORAGES)), draw(st.sampled_from([1, 3, 16, 64]))
    return options, in_int8, storage, block_size, pasts, counts, places


@every_way
@given(_cases())
@settings(max_examples=40)
def test_any_decoder_over_any_step(way, case):
    options, in_int8, storage, block_size, pasts, counts, places = case
    decoder = random_decoder(**options)
    decoder = compressed(decoder) if in_int8 else decoder
    pool = pool_for(decoder, block_size, storage, num_tokens=sum(pasts) + sum(counts) + 4 * block_size)
    places = None if places is None else torch.tensor(places)
    # Among random decoders some are badly conditioned.
    assert_right(way, decoder, pool, pasts, counts, places, tolerance=1e-4)


# Products by themselves: of a decoder without layers.


@pytest.mark.parametrize("way", [pytest.param(way, marks=needs_kernels) for way in range(MANY_ROWS)], ids=WAYS[:-1])
@given(st.integers(1, 70), st.integers(1, 200), st.integers(1, 20), st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=60)
def test_products_of_any_size(way, rows, columns, num_tokens, dtype):
    decoder = random_decoder(windows=(), hidden=columns, vocab=rows, dtype=getattr(torch, dtype), bias=rows % 2 == 0)
    assert_right(way, decoder, pool_for(decoder), [0], [num_tokens], torch.arange(num_tokens))


@pytest.mark.parametrize("way", [pytest.param(way, marks=needs_kernels) for way in range(MANY_ROWS)], ids=WAYS[:-1])
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=30)
def test_products_of_any_size_in_int8(way, rows, groups, num_tokens):
    decoder = compressed(random_decoder(windows=(), hidden=32 * groups, vocab=rows, bias=rows % 2 == 0))
    assert_right(way, decoder, pool_for(decoder), [0], [num_tokens], torch.arange(num_tokens))


# What a step is made of.


@every_way
def test_a_step_that_has_layers_already_or_is_over_is_refused(way):
    decoder = random_decoder()
    pool = pool_for(decoder)
    sequence = pool.new_sequence()
    step = pool.step([sequence], [[1, 2]])
    run(way, decoder, step)
    with pytest.raises(InvalidValueError, match=r"appended already; expected"):
        run(way, decoder, step)
    step.abort()
    with pytest.raises(InvalidValueError, match="the step is over"):
        run(way, decoder, step)
    assert (sequence.seq_len, pool.num_free) == (0, pool.num_blocks)
    pool.check()


@every_way
def test_an_aborted_step_never_was(way):
    decoder = random_decoder()
    pool = pool_for(decoder)
    sequence, *_ = with_pasts(pool, [11])
    step = pool.step([sequence], [[1, 2, 3]])
    run(way, decoder, step)
    step.abort()
    assert sequence.seq_len == 11
    pool.check()
    with pool.step([sequence], [[4, 5]]) as step:
        logits = run(way, decoder, step)
        expected = expected_logits(decoder, step)
    assert_close(logits, expected)


@needs_kernels
def test_one_decoder_serves_pools_in_turn_and_notices_numbers_written_in_place():
    decoder = random_decoder()
    few = FewRows(decoder, RotaryTables(decoder.rotary, None))
    pools = [pool_for(decoder, 4, "float32"), pool_for(decoder, 16, "int8")]
    for attempt in range(3):
        decoder.layers[0].up.weight.mul_(0.5)
        for pool in pools:
            with pool.step(with_pasts(pool, [7, 0]), new_ids([1, 2], 37, seed=attempt)) as step:
                logits = few.run(step)
                expected = expected_logits(decoder, step)
            assert_close(logits, expected)


@needs_kernels
def test_what_kernels_write_counts_as_a_change_of_the_blocks():
    decoder = random_decoder()
    pool = pool_for(decoder)
    before = [store.k._version for store in pool.stores]
    with pool.step([pool.new_sequence()], [[1]]) as step:
        run(0, decoder, step)
    assert all(store.k._version > version for store, version in zip(pool.stores, before, strict=True))


@every_way
def test_weights_stay_as_they_are(way):
    decoder = random_decoder(tied=True, embedding_scale=2.0)
    before = decoder.embedding.weight.clone()
    pool = pool_for(decoder)
    with pool.step([pool.new_sequence()], [list(range(20))]) as step:
        run(way, decoder, step)
    assert torch.equal(decoder.embedding.weight, before)


@every_way
@pytest.mark.parametrize("ids", [[36, 37, 2], [2**40], [37] * 70], ids=["among others", "large", "all"])
def test_an_id_beyond_the_vocabulary_is_refused_before_anything_is_appended(ids, way):
    decoder = random_decoder()
    pool = pool_for(decoder)
    sequence, *_ = with_pasts(pool, [6])
    free = pool.num_free
    step = pool.step([sequence], [ids])
    with pytest.raises(
        InvalidValueError, match=f"tokens has the id {max(ids)}; expected ids below the vocabulary's 37"
    ):
        run(way, decoder, step)
    with pytest.raises(InvalidValueError, match=r"layers \[0, 1\] are not appended"):
        step.commit()
    step.abort()
    assert (sequence.seq_len, pool.num_free) == (6, free)
    pool.check()


@needs_kernels
@pytest.mark.parametrize("sizes", [{"head_dim": 1024}, {"v_head_dim": 1024}, {"head_dim": 514}], ids=str)
def test_heads_larger_than_the_kernels_have_room_for_are_refused(sizes):
    with pytest.raises(InvalidValueError, match="head sizes of at most 512"):
        random_decoder(heads=1, kv_heads=1, **sizes)
