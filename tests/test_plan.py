"""The planner against values worked out by hand, counting one by one, and real pools."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import BlockPool, CacheSpec, LayerSpec
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.plan import Machine, ModelSizes, Plan, decoding_work
from kvcache.storage.specs import kept_rows

GIB = 2**30
SMOLLM2 = ModelSizes(CacheSpec([LayerSpec(3, 64)] * 30), (9,) * 30, 134_515_008, 134_515_008, max_positions=8192)
# The tiny Gemma 3: a row of a layer takes 2 * (8 + 8) numbers, 128 bytes in float32.
SLIDING, FULL = LayerSpec(2, 8, window=5), LayerSpec(2, 8)
HYBRID = ModelSizes(CacheSpec([SLIDING, SLIDING, FULL]), (4, 4, 4), 29_712, 26_608)
WINDOWS = ModelSizes(CacheSpec([SLIDING, SLIDING]), (4, 4), 1000, 1000)


def plan_of(model, context, batch=1, memory=GIB, bandwidth=20e9, compute=None, **options):
    return Plan(model, Machine(memory, bandwidth, compute), context, batch, **options)


def test_smollm2_takes_the_known_bytes():
    plan = plan_of(SMOLLM2, 2048, dtype="bfloat16")
    assert plan.weights_nbytes == 269_030_016
    assert plan.token_nbytes == 23_040
    assert plan.cache_nbytes == 2048 * 23_040
    assert plan.cache_nbytes_by_kind == {"full": 47_185_920}
    assert plan.missing_nbytes == 269_030_016 + 47_185_920 - GIB
    assert plan.cache_room == 804_711_808
    assert plan.longest_context == 34_926  # 804711808 / 23040 = 34926.7
    assert plan.sequences_that_fit == 17  # 804711808 / 47185920 = 17.05
    assert replace(plan, batch=4).longest_context == 8731
    assert replace(plan, batch=4).cache_nbytes == 188_743_680


def test_a_step_of_smollm2_reads_the_weights_once_and_the_cache_of_each_sequence():
    plan = plan_of(SMOLLM2, 2048, batch=4, dtype="bfloat16")
    assert plan.step_nbytes == 269_030_016 + 4 * 47_185_920
    assert plan.step_flops == 4 * (2 * 134_515_008 + 30 * 2 * 9 * (64 + 64) * 2048)
    assert plan.step_seconds == pytest.approx(457_773_696 / 20e9)
    assert plan.tokens_per_second == pytest.approx(4 * 20e9 / 457_773_696)


def test_the_slower_of_reading_and_computing_decides():
    slow = plan_of(SMOLLM2, 2048, dtype="bfloat16", compute=10e9)  # 410587776 FLOPs
    assert slow.step_seconds == pytest.approx(0.0410587776)
    fast = plan_of(SMOLLM2, 2048, dtype="bfloat16", compute=1e12)
    assert fast.step_seconds == pytest.approx(316_215_936 / 20e9)


@pytest.mark.parametrize(
    ("storage", "token_nbytes"),
    [("float32", 46_080), ("bfloat16", 23_040), ("int8", 12_960), ("int8/int4", 10_080), ("int4", 7_200)],
)
def test_storage_changes_the_cache_and_not_the_weights(storage, token_nbytes):
    plan = plan_of(SMOLLM2, 100, storage=storage)
    assert plan.weights_nbytes == 538_060_032
    assert (plan.token_nbytes, plan.cache_nbytes) == (token_nbytes, 100 * token_nbytes)
    assert plan.step_nbytes == 538_060_032 + 100 * token_nbytes
    assert plan.longest_context == (GIB - 538_060_032) // token_nbytes


def test_the_storage_is_the_dtype_where_none_is_given():
    assert plan_of(SMOLLM2, 1, dtype=torch.float16).codecs.name == "float16"


def test_sliding_layers_keep_their_window():
    plan = plan_of(HYBRID, 10, batch=2)
    assert plan.cache_nbytes_by_kind == {"full": 2 * 10 * 128, "sliding": 2 * 2 * 5 * 128}
    assert plan.cache_nbytes == 5120
    assert plan.step_nbytes == 26_608 * 4 + 5120
    assert plan.step_flops == 2 * (2 * 26_608 + 2 * 4 * (8 + 8) * (10 + 5 + 5))
    assert plan_of(HYBRID, 3).cache_nbytes_by_kind == {"full": 3 * 128, "sliding": 2 * 3 * 128}


def test_blocks_are_whole():
    plan = plan_of(HYBRID, 10, block_size=4)  # full: 3 blocks; sliding: 2 for the window and 1 more
    assert plan.cache_nbytes_by_kind == {"full": 12 * 128, "sliding": 2 * 12 * 128}
    assert replace(plan, context=20).cache_nbytes_by_kind == {"full": 20 * 128, "sliding": 2 * 12 * 128}
    assert plan.step_nbytes == plan_of(HYBRID, 10).step_nbytes  # a step reads rows, not blocks


@pytest.mark.parametrize(
    ("room", "longest"),
    [(0, 0), (383, 0), (384, 1), (1000, 2), (1919, 4), (1920, 5), (3000, 13), (1280 + 128 * 1000, 1000)],
)
def test_the_longest_context_of_a_hybrid_goes_on_behind_the_window(room, longest):
    assert plan_of(HYBRID, 1, memory=29_712 * 4 + room).longest_context == longest


def test_windows_alone_have_room_for_any_length_or_for_what_fits():
    assert plan_of(WINDOWS, 1, memory=4000 + 2 * 5 * 128).longest_context is None
    assert plan_of(WINDOWS, 1, memory=4000 + 2 * 5 * 128 - 1).longest_context == 4
    assert plan_of(WINDOWS, 10**6, memory=4000 + 3 * 2 * 5 * 128).sequences_that_fit == 3


def test_weights_that_do_not_fit_leave_no_room():
    plan = plan_of(SMOLLM2, 1, memory=500_000_000)
    assert (plan.cache_room, plan.longest_context, plan.sequences_that_fit) == (0, 0, 0)
    assert plan.missing_nbytes == 38_060_032 + 46_080


@given(
    memory=st.integers(29_712 * 4, 400_000),
    batch=st.integers(1, 5),
    block_size=st.none() | st.integers(1, 9),
    storage=st.sampled_from(["float32", "int8/int4", "int4"]),
)
def test_the_longest_context_fits_and_one_token_more_does_not(memory, batch, block_size, storage):
    plan = plan_of(HYBRID, 1, batch=batch, memory=memory, block_size=block_size, storage=storage)
    longest = plan.longest_context
    if longest:
        assert replace(plan, context=longest).missing_nbytes <= 0
    assert replace(plan, context=longest + 1).missing_nbytes > 0


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("sinks", [0, 1, 4, 5])
def test_a_pool_never_holds_more_blocks_while_it_decodes(window, sinks):
    pool = BlockPool(CacheSpec([LayerSpec(1, 1, window=window, sinks=sinks)]), num_blocks=20, block_size=4)
    sequence, row, most = pool.new_sequence(), torch.zeros(1, 1, 1, 1), 0
    for num_tokens in range(1, 50):
        with pool.step([sequence], [[7]]) as step:
            step.append(0, row, row)
            most = max(most, pool.num_blocks["sliding"] - pool.num_free["sliding"])
        assert 4 * most <= kept_rows(num_tokens, window, sinks, block_size=4)
    assert 4 * most >= kept_rows(50, window, sinks, block_size=4) - 4  # and never many fewer


def test_experts_are_read_when_a_token_is_sent_to_them():
    # Four experts of 1000 parameters, two for each token.
    model = ModelSizes(CacheSpec([LayerSpec(1, 1)]), (1,), 9000, 5000, 4000, num_experts=4, experts_per_token=2)
    row = 2 * 4  # bytes
    assert plan_of(model, 1).step_nbytes == (5000 + 2000) * 4 + row
    assert plan_of(model, 1, batch=2).step_nbytes == (5000 + 4000) * 4 + 2 * row
    assert plan_of(model, 1, batch=9).step_nbytes == (5000 + 4000) * 4 + 9 * row
    assert plan_of(model, 1, batch=9).step_flops == 9 * (2 * (5000 + 2000) + 2 * (1 + 1))


def test_work_of_smollm2_by_hand():
    with_cache, without = (decoding_work(SMOLLM2, 100, use_cache=use) for use in (True, False))
    assert with_cache.qkv_projections == 30 * 3 * 100
    assert without.qkv_projections == 30 * 3 * 5050
    assert with_cache.attention_flops == 30 * 2 * 9 * 128 * 5050
    assert without.attention_flops == 30 * 2 * 9 * 128 * 171_700  # 100 * 101 * 102 / 6


@given(num_tokens=st.integers(0, 40), window=st.none() | st.integers(1, 12), sinks=st.integers(0, 3))
def test_attention_work_equals_counting_one_by_one(num_tokens, window, sinks):
    layer = LayerSpec(1, 3, 2, window=window, sinks=0 if window is None else sinks)
    model = ModelSizes(CacheSpec([layer]), (4,), 1, 1)

    def seen(position):
        return sum(window is None or key > position - window or key < sinks for key in range(position + 1))

    each = 2 * 4 * (3 + 2)
    cached = sum(seen(position) for position in range(num_tokens))
    again = sum(seen(position) for length in range(1, num_tokens + 1) for position in range(length))
    assert decoding_work(model, num_tokens, use_cache=True).attention_flops == each * cached
    assert decoding_work(model, num_tokens, use_cache=False).attention_flops == each * again


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"context": 0}, InvalidValueError, "context is 0; expected an integer >= 1"),
        ({"context": 1.5}, InvalidTypeError, "context is a float"),
        ({"batch": 0}, InvalidValueError, "batch is 0"),
        ({"block_size": 0}, InvalidValueError, "block_size is 0"),
        ({"dtype": "int8"}, InvalidValueError, "dtype is 'int8'"),
        ({"storage": "int3"}, InvalidValueError, "storage is 'int3'"),
        ({"memory": 0}, InvalidValueError, "memory is 0"),
        ({"bandwidth": 0.0}, InvalidValueError, "bandwidth is 0.0; expected a number above 0"),
        ({"bandwidth": None}, InvalidTypeError, "bandwidth is a NoneType"),
        ({"compute": -1.0}, InvalidValueError, "compute is -1.0"),
    ],
)
def test_what_is_out_of_range_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        plan_of(SMOLLM2, **({"context": 1} | options))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": None}, InvalidTypeError, "cache is a NoneType; expected a CacheSpec"),
        (
            {"query_heads": (4, 4)},
            InvalidValueError,
            "query_heads has 2 entries; expected one for each of the 3 layers",
        ),
        ({"query_heads": (4, 4, 0)}, InvalidValueError, "query_heads is 0"),
        ({"num_parameters": 0}, InvalidValueError, "num_parameters is 0"),
        ({"num_expert_parameters": -1}, InvalidValueError, "num_expert_parameters is -1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        replace(HYBRID, **change)


def test_a_plan_of_something_else_is_refused():
    with pytest.raises(InvalidTypeError, match="model is a str; expected a ModelSizes"):
        Plan("smollm2", Machine(memory=10, bandwidth=1.0), context=1)
