"""Steps of a pool: what is stored, what queries see, what is refused, and that a step left undone never happened."""

import itertools
import math

import numpy as np
import pytest
import torch

import kvcache
from kvcache import (
    CacheSpec,
    InvalidTypeError,
    InvalidValueError,
    KVCache,
    LayerSpec,
    OutOfBlocksError,
)
from kvcache.attention import attend
from kvcache.storage.codecs import check_storage
from tests.oracle import assert_close, attend_rows
from tests.storage.pools import (
    FULL,
    MEAN,
    MIXED,
    STORAGES,
    append_layers,
    check_extend,
    check_forward,
    expected_outputs,
    extend,
    filled,
    held_rows,
    known_queries,
    known_rows,
    mean_forward,
    mean_of_seen,
    new_pool,
    poison,
    whole_content,
)

WINDOW = CacheSpec([LayerSpec(1, 1, window=4)])
ROUNDS = [[5, 1, 3, 1], [1, 1, 1, 1], [1, 5, 2, 7], [2, 1, 1, 2], [9, 1, 4, 1]]  # new tokens of 4 sequences
every_storage = pytest.mark.parametrize("storage", STORAGES)


def fresh_ids():
    return itertools.count(1)


def take(ids, count):
    return list(itertools.islice(ids, count))


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize(
    ("spec", "group"),
    [
        (MIXED, 2),  # grouped queries, and values of another size than keys
        (CacheSpec([LayerSpec(1, 4)]), 4),  # one key/value head for all
        (CacheSpec([LayerSpec(2, 3, window=5), LayerSpec(3, 4, window=5)]), 1),
        (CacheSpec([LayerSpec(1, 4, window=1)]), 2),
        (CacheSpec([LayerSpec(1, 4, window=2, sinks=5)]), 2),
    ],
    ids=["mixed", "multi-query", "window", "window of 1", "more sinks than window"],
)
def test_every_sequence_sees_its_own_history(spec, group, block_size):
    pool, ids = new_pool(spec, 60, block_size), fresh_ids()
    sequences = [pool.new_sequence() for _ in range(4)]
    for counts in ROUNDS:
        check_extend(pool, {s: take(ids, count) for s, count in zip(sequences, counts, strict=True)}, group=group)
    check_extend(pool, {sequences[2]: take(ids, 3)}, group=group)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"softcap": 1.5},
        {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
        {"scale": 1.0, "softcap": 0.7, "sink_logits": torch.zeros(4, dtype=torch.float64)},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_of_attention_reach_every_sequence(options):
    spec = CacheSpec([LayerSpec(2, 4, v_head_dim=6), LayerSpec(2, 6, window=4, sinks=2)])
    pool, ids = new_pool(spec), fresh_ids()
    sequences = [pool.new_sequence() for _ in range(4)]
    for counts in ROUNDS[:3]:
        check_extend(pool, {s: take(ids, count) for s, count in zip(sequences, counts, strict=True)}, **options)


@every_storage
@pytest.mark.parametrize("chunks", [[11], [5, 6], [3, 1, 1, 1, 5], [1] * 11])
def test_chunks_store_the_bytes_of_one_run(storage, chunks):  # case B3
    pool, ids = new_pool(storage=storage), list(range(1, 12))
    whole, neighbour = pool.new_sequence(), pool.new_sequence()
    extend(pool, {whole: ids})
    chunked, new, start = pool.new_sequence(), itertools.count(100), 0
    for size in chunks:
        extend(pool, {neighbour: take(new, 2), chunked: ids[start : start + size]})
        start += size
    assert held_rows(chunked) == held_rows(whole)
    codecs = check_storage("storage", storage)
    k, v = known_rows(MIXED, 0, ids)
    for stored, encoded in zip(held_rows(whole), (codecs.k.encode(k), codecs.v.encode(v)), strict=False):
        assert stored == bytes(encoded.contiguous().view(torch.uint8).flatten().tolist())


@every_storage
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_the_queries(storage, dtype):
    pool = new_pool(storage=storage)
    for output, lse in extend(pool, {pool.new_sequence(): [1, 2, 3]}, dtype=dtype, return_lse=True):
        assert output.dtype == dtype
        assert lse.dtype == (torch.float64 if torch.float64 in (dtype, pool.stores[0].k.dtype) else torch.float32)
    assert [store.k.dtype for store in pool.stores] == [check_storage("storage", storage).k.dtype] * 4


def test_keys_and_values_are_cast_by_value_whatever_they_come_in():  # case C9
    pool = new_pool(FULL, storage="float16/float32")
    k, v = known_rows(FULL, 0, [1, 2, 3])
    with pool.step([pool.new_sequence()], [[1, 2, 3]]) as step:
        step.append(0, k.float(), v.bfloat16())
    assert torch.equal(pool.stores[0].k[0, :, :3], k[0].float().half())
    assert torch.equal(pool.stores[0].v[0, :, :3], v[0].bfloat16().float())


def test_tensors_of_any_layout_are_stored_and_read_by_value():  # case B12
    pool = new_pool(FULL)
    step = pool.step([pool.new_sequence(), pool.new_sequence()], [[1, 2], [3]])
    k, v = (rows.transpose(1, 2).contiguous().transpose(1, 2) for rows in known_rows(FULL, 0, [1, 2, 3]))
    q = known_queries(FULL, 0, [1, 2, 3]).repeat_interleave(2, dim=3)[..., ::2]
    step.append(0, k, v)
    expected, _ = expected_outputs(FULL, 0, [[1, 2], [3]], [2, 1])
    assert_close(step.attend(0, q), expected)


@pytest.mark.parametrize(("chunks", "expected"), [([3, 1], [2.5]), ([2, 2], [2.0, 2.5]), ([4], [1.0, 1.5, 2.0, 2.5])])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_the_last_queries_see_all_before_them(chunks, expected, block_size):  # case B1
    pool = new_pool(MEAN, block_size=block_size)
    text = pool.new_sequence()
    for count in chunks:
        with pool.step([text], [[0] * count]) as step:
            full, sliding = mean_forward(step)
    assert full == sliding == [pytest.approx(expected, rel=1e-12)]


def test_ragged_sequences_each_end_at_their_own_length():  # case B1
    pool = new_pool(MEAN)
    short, long = pool.new_sequence(), pool.new_sequence()
    with pool.step([long], [[0, 0]]) as step:
        mean_forward(step)
    with pool.step([short, long], [[0, 0], [0, 0]]) as step:
        full, _ = mean_forward(step)
    assert full == [pytest.approx([1.0, 1.5]), pytest.approx([2.0, 2.5])]


@pytest.mark.parametrize("chunks", [[7], [3, 4], [3, 1, 1, 1, 1]])
def test_chunks_give_the_rows_of_one_run(chunks):  # case B3
    pool = new_pool(MEAN)
    text, rows = pool.new_sequence(), []
    for count in chunks:
        with pool.step([text], [[0] * count]) as step:
            rows += mean_forward(step)[0][0]
    assert rows == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0], rel=1e-12)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8])
@every_storage
def test_the_last_block_is_read_up_to_the_length_only(storage, length):  # cases B5, B7
    pool = new_pool(FULL, num_blocks=3, storage=storage)
    poison(pool)
    cache = KVCache(1, 2, 4, max_seq_len=8, dtype=torch.float64, storage=storage)
    ids = list(range(1, length + 1))
    cache.update(*known_rows(FULL, 0, ids))
    expected = cache.attend(known_queries(FULL, 0, ids))
    [output] = extend(pool, {pool.new_sequence(): ids})
    assert output.isfinite().all()
    assert_close(output, expected)
    if storage == "float64":
        assert_close(output, expected_outputs(FULL, 0, [ids], [length])[0])


def test_the_mean_of_a_poisoned_block_is_that_of_its_valid_rows():  # case B5
    for length in (1, 3, 4, 5, 7, 8):
        pool = new_pool(MEAN)
        poison(pool)
        with pool.step([pool.new_sequence()], [[0] * length]) as step:
            full, _ = mean_forward(step)
        assert full[0][-1] == pytest.approx((length + 1) / 2, rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_recycled_blocks_show_nothing_of_what_they_held(value):  # case B7
    pool, old, kept = filled(12, 5)
    for store in pool.stores:
        for block in old.blocks(store.layer.kind):
            store.k[block], store.v[block] = value, value
    old.free()
    new = pool.new_sequence()
    check_extend(pool, {new: [100, 101, 102, 103, 104], kept: [200]})
    check_extend(pool, {new: [105], kept: [201]})
    assert set(new.blocks()) <= {0, 1, 2}


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("count", [1, 3])
def test_query_heads_read_the_key_value_head_of_their_group(heads, kv_heads, count):  # case B10
    pool = new_pool(CacheSpec([LayerSpec(kv_heads, 2)]))
    v = torch.arange(1.0, kv_heads + 1).mul(10).view(1, -1, 1, 1).expand(1, kv_heads, count, 2)
    with pool.step([pool.new_sequence()], [[0] * count]) as step:
        step.append(0, torch.zeros_like(v), v)
        output = step.attend(0, torch.ones(1, heads, count, 2))
    for t in range(count):
        assert output[0, :, t, 0].tolist() == [10.0 * (1 + head // (heads // kv_heads)) for head in range(heads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_is_as_near_as_attention_without_a_pool(dtype):  # case N1
    spec = CacheSpec([LayerSpec(2, 16)])
    pool, ids = new_pool(spec, storage=dtype), list(range(1, 31))
    text, outputs = pool.new_sequence(), []
    for start in range(0, 30, 5):
        outputs += extend(pool, {text: ids[start : start + 5]}, dtype=dtype)
    q, k, v = known_queries(spec, 0, ids), *known_rows(spec, 0, ids)
    exact, _ = attend_rows(q, k, v)
    uncached = attend(q.to(dtype), k.to(dtype), v.to(dtype))
    errors = [(output.double() - exact).abs().max().item() for output in (torch.cat(outputs, dim=2), uncached)]
    assert errors[0] <= max(4 * errors[1], 4 * torch.finfo(dtype).eps)


def test_a_prompt_longer_than_the_window_stays_causal():  # case E3
    for block_size in (1, 2, 3, 4, 8):
        pool = new_pool(WINDOW, block_size=block_size)
        with pool.step([pool.new_sequence()], [[0] * 7]) as step:
            assert mean_forward(step) == [[pytest.approx([1, 1.5, 2, 2.5, 3.5, 4.5, 5.5], rel=1e-12)]]


@pytest.mark.parametrize("block_size", [1, 2, 4, 5])
@pytest.mark.parametrize("size", range(1, 12))
def test_chunks_through_a_window_equal_one_run(size, block_size):  # case E5
    pool = new_pool(CacheSpec([LayerSpec(1, 1, window=4), LayerSpec(1, 1, window=4)]), block_size=block_size)
    text, rows = pool.new_sequence(), []
    for start in range(0, 11, size):
        with pool.step([text], [[0] * min(size, 11 - start)]) as step:
            rows += mean_forward(step)[1][0]
    expected = [mean_of_seen(position, WINDOW.layers[0]) for position in range(11)]
    assert rows == pytest.approx(expected, rel=1e-12)


def test_sinks_and_newest_rows_are_kept():  # case E12
    pool = new_pool(CacheSpec([LayerSpec(1, 1, window=3, sinks=2)]), block_size=1)
    text = pool.new_sequence()
    for _ in range(8):
        with pool.step([text], [[0]]) as step:
            [[last]] = mean_forward(step)
    assert last == pytest.approx([(1 + 2 + 6 + 7 + 8) / 5], rel=1e-12)
    kept = [pool.stores[0].v[block, 0, 0, 0].item() for block in text.blocks("sliding")]
    assert kept == [1, 2, 6, 7, 8]
    assert (text.seq_len, pool.num_free) == (8, {"sliding": 35})


def test_tokens_positions_and_last_say_where_each_token_is():
    pool, first, second, third = filled(3, 1, 6)
    step = pool.step([third, pool.new_sequence(), first, second], [[7], [8, 9, 10], [11, 12], [13]])
    assert step.num_tokens == [1, 3, 2, 1]
    assert step.tokens.tolist() == [[7, 8, 9, 10, 11, 12, 13]]
    assert step.positions.tolist() == [[6, 0, 1, 2, 3, 4, 1]]
    assert step.last.tolist() == [0, 3, 5, 6]
    assert {step.tokens.dtype, step.positions.dtype, step.last.dtype} == {torch.int64}
    append_layers(step)
    step.commit()
    assert step.positions.tolist() == [[6, 0, 1, 2, 3, 4, 1]]


@pytest.mark.parametrize(
    "tokens",
    [
        [[11, 12], [13, 14]],
        ((11, 12), range(13, 15)),
        [torch.tensor([11, 12]), torch.tensor([13, 14], dtype=torch.int32)],
        torch.tensor([[11, 12], [13, 14]]),
        [iter([11, 12]), torch.tensor([13, 14], dtype=torch.uint8)],
    ],
    ids=["lists", "tuple and range", "tensors", "one tensor", "iterator"],
)
def test_ids_come_in_many_forms(tokens):
    pool, first, second = filled(1, 2)
    with pool.step((first, second), tokens) as step:
        append_layers(step)
    assert (first.tokens, second.tokens) == ([1, 11, 12], [2, 3, 13, 14])


def test_ids_are_any_numbers_of_63_bits():
    pool = new_pool()
    text, ids = pool.new_sequence(), [1, 0, 2**63 - 1, 2**62]
    with pool.step([text], [ids]) as step:
        append_layers(step)
    assert text.tokens == ids


def test_layers_come_in_any_order_and_are_attended_any_number_of_times():
    pool, text = filled(5)
    step = pool.step([text], [[6, 7]])
    outputs = {}
    for layer in (3, 0, 2, 1):
        step.append(layer, *known_rows(MIXED, layer, [6, 7]))
        outputs[layer] = step.attend(layer, known_queries(MIXED, layer, [6, 7]))
    for layer, output in outputs.items():
        assert_close(output, expected_outputs(MIXED, layer, [[1, 2, 3, 4, 5, 6, 7]], [2])[0])
        assert torch.equal(step.attend(layer, known_queries(MIXED, layer, [6, 7])), output)
    step.commit()
    check_extend(pool, {text: [8]})


@pytest.mark.parametrize("layer", [np.int64(0), torch.tensor(0)], ids=["numpy", "torch"])
def test_a_layer_is_named_by_whatever_stands_for_an_integer(layer):
    pool, text = filled(5, spec=FULL)
    with pool.step([text], [[6]]) as step:
        step.append(layer, *known_rows(FULL, 0, [6]))
        step.attend(layer, known_queries(FULL, 0, [6]))
        with pytest.raises(InvalidValueError, match="layer 0 is appended already"):
            step.append(layer, *known_rows(FULL, 0, [6]))
    assert text.seq_len == 6


def test_a_step_under_inference_mode_leaves_a_pool_for_all_modes():
    with torch.inference_mode():
        pool, text = filled(5)
        check_extend(pool, {text: [6]})
    with torch.no_grad():
        check_extend(pool, {text: [7]})
    check_extend(pool, {text: [8]})


@every_storage
def test_gradients_flow_into_the_queries_only(storage):
    pool, text = filled(5, spec=FULL, storage=storage)
    step = pool.step([text, pool.new_sequence()], [[6, 7], [8]])
    k, v = (rows.requires_grad_() for rows in known_rows(FULL, 0, [6, 7, 8]))
    q = known_queries(FULL, 0, [6, 7, 8]).requires_grad_()
    step.append(0, k, v)
    output = step.attend(0, q)
    step.commit()
    extend(pool, {text: [9, 10]})  # what is appended later does not reach back
    output.square().sum().backward()
    assert (k.grad, v.grad) == (None, None)
    assert not pool.stores[0].k.requires_grad
    assert not pool.stores[0].v.requires_grad
    expected = torch.zeros_like(q)
    for ids, places in (([1, 2, 3, 4, 5, 6, 7], [0, 1]), ([8], [2])):
        rows = known_rows(FULL, 0, ids)
        if storage != "float64":
            codecs = check_storage("storage", storage)
            rows = [
                codec.decode(codec.encode(x), 4, torch.float64)
                for codec, x in zip((codecs.k, codecs.v), rows, strict=True)
            ]
        alone = q.detach()[:, :, places].requires_grad_()
        attend(alone, *rows).square().sum().backward()
        expected[:, :, places] = alone.grad
    assert_close(q.grad, expected)


def test_two_blocks_of_four_with_seven_tokens_take_one_more_and_not_two():  # cases B14, C3
    pool, text, neighbour = filled(7, 8, num_blocks=4)
    before = whole_content(pool)
    with pytest.raises(OutOfBlocksError) as caught:
        pool.step([text], [[20, 21]])
    assert (caught.value.kind, caught.value.needed, caught.value.available) == ("full", 1, 0)
    assert whole_content(pool) == before
    assert pool.open_steps == []
    check_extend(pool, {text: [20]})
    with pytest.raises(OutOfBlocksError, match=r"^blocks of the full layers: 1 needed for the step, 0 available"):
        pool.step([neighbour], [[21]])
    pool.check()


def bad_step(sequences=None, tokens=None):
    """Return what calls `step` with these, made from a pool, a sequence in it of 6 tokens, and another."""

    def act(pool, text, other):
        step_sequences = [text] if sequences is None else sequences(pool, text, other)
        return pool.step(step_sequences, [[1]] * len(step_sequences) if tokens is None else tokens)

    return act


def freed(pool, text, other):
    other.free()
    return [text, other]


def busy(pool, text, other):
    pool.step([other], [[1]])
    return [text, other]


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (bad_step(lambda p, t, o: (s for s in [t]), [[1]]), InvalidTypeError, "sequences is a generator; expected a l"),
        (bad_step(lambda p, t, o: t, [[1]]), InvalidTypeError, "sequences is a Sequence; expected a list of Sequence"),
        (bad_step(lambda p, t, o: []), InvalidValueError, "sequences is empty; expected at least one Sequence"),
        (bad_step(lambda p, t, o: [t, 3]), InvalidTypeError, r"sequences\[1\] is a int; expected a Sequence"),
        (
            bad_step(lambda p, t, o: [t, new_pool().new_sequence()]),
            InvalidValueError,
            r"sequences\[1\] belongs to another pool",
        ),
        (bad_step(lambda p, t, o: [t, o, t]), InvalidValueError, r"sequences\[2\] is in the step twice; expected each"),
        (bad_step(freed), InvalidValueError, r"sequences\[1\] was freed; make another with pool.new_sequence"),
        (bad_step(busy), InvalidValueError, r"sequences\[1\] is in an open step; commit or abort that first"),
        (bad_step(tokens=[]), InvalidValueError, "tokens has 0 entries; expected one for each of 1 sequences"),
        (bad_step(tokens=[[1], [2]]), InvalidValueError, "tokens has 2 entries; expected one for each of 1 sequences"),
        (bad_step(tokens=1), InvalidTypeError, "tokens is a int; expected a list of token ids for each sequence"),
        (bad_step(tokens="7"), InvalidTypeError, "tokens is a str; expected a list of token ids for each sequence"),
        (bad_step(tokens=[[]]), InvalidValueError, r"tokens\[0\] is empty; expected at least one token id"),
        (bad_step(tokens=[torch.tensor([], dtype=int)]), InvalidValueError, r"tokens\[0\] is empty; expected"),
        (bad_step(tokens=[7]), InvalidTypeError, r"tokens\[0\] is a int; expected a list of token ids"),
        (bad_step(tokens=[None]), InvalidTypeError, r"tokens\[0\] is a NoneType"),
        (bad_step(tokens=["7"]), InvalidTypeError, r"tokens\[0\] is a str; expected a list of token ids"),
        (
            bad_step(tokens=[[1.0]]),
            InvalidTypeError,
            r"tokens\[0\]\[0\] is a float \(1.0\); expected an integer token id",
        ),
        (bad_step(tokens=[[True]]), InvalidTypeError, r"tokens\[0\]\[0\] is a bool \(True\); expected"),
        (bad_step(tokens=[[7, "7"]]), InvalidTypeError, r"tokens\[0\]\[1\] is a str"),
        (bad_step(tokens=[[[7]]]), InvalidTypeError, r"tokens\[0\]\[0\] is a list"),
        (bad_step(tokens=[torch.tensor([1.0])]), InvalidTypeError, r"tokens\[0\] has dtype float32; expected integers"),
        (bad_step(tokens=[torch.tensor([True])]), InvalidTypeError, r"tokens\[0\] has dtype bool; expected integers"),
        (bad_step(tokens=[torch.tensor([[1]])]), InvalidValueError, r"tokens\[0\] has shape \(1, 1\); expected \(T,\)"),
        (bad_step(tokens=[torch.tensor(1)]), InvalidValueError, r"tokens\[0\] has shape \(\); expected \(T,\)"),
        (bad_step(tokens=torch.tensor([1])), InvalidValueError, r"tokens has shape \(1,\); expected \(B, T\) = \(1, a"),
        (bad_step(tokens=torch.ones(1, 1)), InvalidTypeError, r"tokens\[0\] has dtype float32; expected integers"),
        (bad_step(tokens=[[2**63]]), InvalidValueError, r"tokens\[0\]\[0\] is -?\d+; expected an integer of 64"),
        (
            bad_step(tokens=[[-(2**63) - 1]]),
            InvalidValueError,
            r"tokens\[0\]\[0\] is -?\d+; expected an integer of 64",
        ),
    ],
)
def test_a_step_is_refused_before_anything_changes(act, error, message):  # case K1
    pool, text, other = filled(6, 3)
    before = held_rows(text), text.tokens, text.blocks()
    with pytest.raises(error, match=f"^{message}"):
        act(pool, text, other)
    assert (held_rows(text), text.tokens, text.blocks()) == before
    assert text.open_step is None
    pool.check()
    check_extend(pool, {text: [100]})


K, V = known_rows(FULL, 0, [10, 11, 12])
Q = known_queries(FULL, 0, [10, 11, 12])


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda step: step.append(-1, K, V), InvalidValueError, "layer is -1; expected an integer >= 0"),
        (
            lambda step: step.append(1, K, V),
            InvalidValueError,
            "layer is 1; expected one of the 1 layers, counted from",
        ),
        (lambda step: step.append(False, K, V), InvalidTypeError, "layer is a bool"),
        (lambda step: step.append("0", K, V), InvalidTypeError, "layer is a str"),
        (
            lambda step: step.append(0, K[0], V),
            InvalidValueError,
            r"k has shape \(2, 3, 4\); expected \(1, Hkv, N, D\)",
        ),
        (lambda step: step.append(0, K[:, :, 1:], V), InvalidValueError, r"k has shape .* = \(1, 2, 3, 4\)"),
        (
            lambda step: step.append(0, K, V[:, :, 1:]),
            InvalidValueError,
            r"v has shape \(1, 2, 2, 4\); expected \(1, Hk",
        ),
        (lambda step: step.append(0, K[:, :1], V[:, :1]), InvalidValueError, r"k has shape \(1, 1, 3, 4\)"),
        (lambda step: step.append(0, K, V[..., 1:]), InvalidValueError, r"v has shape \(1, 2, 3, 3\)"),
        (lambda step: step.append(0, K.expand(2, -1, -1, -1), V), InvalidValueError, r"k has shape \(2, 2, 3, 4\)"),
        (lambda step: step.append(0, K.int(), V), InvalidTypeError, "k has dtype int32; expected one of"),
        (lambda step: step.append(0, K, V.long()), InvalidTypeError, "v has dtype int64; expected one of"),
        (lambda step: step.append(0, K.cfloat(), V), InvalidTypeError, "k has dtype complex64"),
        (lambda step: step.append(0, None, V), InvalidTypeError, "k is a NoneType; expected a torch.Tensor"),
        (lambda step: step.append(0, K, V.tolist()), InvalidTypeError, "v is a list; expected a torch.Tensor"),
        (lambda step: step.append(0, K.to("meta"), V), InvalidValueError, "k is on meta; expected cpu"),
        (lambda step: step.append(0, K, V.to("meta")), InvalidValueError, "v is on meta; expected cpu"),
        (lambda step: step.attend(0, Q), InvalidValueError, "layer 0 is not appended yet; append its keys and values"),
        (lambda step: step.attend(1, Q), InvalidValueError, "layer is 1; expected one of the 1 layers"),
        (lambda step: step.attend(-1, Q), InvalidValueError, "layer is -1"),
        (lambda step: step.attend(True, Q), InvalidTypeError, "layer is a bool"),
        (lambda step: step.attend("0", Q), InvalidTypeError, "layer is a str"),
        (lambda step: step.commit(), InvalidValueError, r"layers \[0\] are not appended; expected every layer before"),
        (lambda step: step.commit([1, 1]), InvalidValueError, r"layers \[0\] are not appended"),
    ],
)
def test_a_step_refuses_what_does_not_fit_and_goes_on(act, error, message):
    pool, text, other = filled(6, 3, spec=FULL)
    before = whole_content(pool)
    step = pool.step([text, other], [[10, 11], [12]])
    with pytest.raises(error, match=f"^{message}"):
        act(step)
    assert step.is_open
    pool.check()
    step.abort()
    assert whole_content(pool) == before
    with pool.step([text, other], [[10, 11], [12]]) as step:
        check_forward(step)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda step: step.append(0, K, V), InvalidValueError, "layer 0 is appended already; expected each layer once"),
        (lambda step: step.attend(0, Q[0]), InvalidValueError, r"q has shape \(4, 3, 4\); expected \(1, H, N, D\)"),
        (lambda step: step.attend(0, Q[:, :, :1]), InvalidValueError, r"q has shape .* = \(1, any, 3, 4\)"),
        (lambda step: step.attend(0, Q[..., :3]), InvalidValueError, r"q has shape \(1, 4, 3, 3\)"),
        (
            lambda step: step.attend(0, Q[:, :3]),
            InvalidValueError,
            "q has 3 heads and k has 2; expected the query heads",
        ),
        (lambda step: step.attend(0, Q.int()), InvalidTypeError, "q has dtype int32"),
        (lambda step: step.attend(0, None), InvalidTypeError, "q is a NoneType"),
        (lambda step: step.attend(0, Q.to("meta")), InvalidValueError, "q is on meta; expected cpu"),
        (lambda step: step.attend(0, Q, scale="1"), InvalidTypeError, "scale is a str"),
        (lambda step: step.attend(0, Q, scale=math.nan), InvalidValueError, "scale is nan"),
        (lambda step: step.attend(0, Q, softcap=0.0), InvalidValueError, "softcap is 0.0; expected a number > 0"),
        (lambda step: step.attend(0, Q, sink_logits=Q[0, :3, 0, 0]), InvalidValueError, "sink_logits has shape"),
        (
            lambda step: step.commit([2]),
            InvalidValueError,
            r"keep is \[2\]; expected a number for each sequence, at mo",
        ),
        (lambda step: step.commit([2, 1, 0]), InvalidValueError, r"keep is \[2, 1, 0\]; expected"),
        (lambda step: step.commit([]), InvalidValueError, r"keep is \[\]; expected"),
        (lambda step: step.commit([3, 1]), InvalidValueError, r"keep is \[3, 1\]; expected .*, at most \[2, 1\]"),
        (lambda step: step.commit([2, 2]), InvalidValueError, r"keep is \[2, 2\]; expected .*, at most \[2, 1\]"),
        (lambda step: step.commit([2, -1]), InvalidValueError, r"keep\[1\] is -1; expected an integer >= 0"),
        (lambda step: step.commit([2, True]), InvalidTypeError, r"keep\[1\] is a bool"),
        (lambda step: step.commit([2.0, 1]), InvalidTypeError, r"keep\[0\] is a float"),
        (lambda step: step.commit(2), InvalidTypeError, "keep is a int; expected a list of one number a sequence"),
        (lambda step: step.commit("21"), InvalidTypeError, "keep is a str"),
    ],
)
def test_an_appended_step_refuses_what_does_not_fit_and_goes_on(act, error, message):
    pool, text, other = filled(6, 3, spec=FULL)
    step = pool.step([text, other], [[10, 11], [12]])
    step.append(0, K, V)
    before = [store.k.clone() for store in pool.stores], pool.num_free
    with pytest.raises(error, match=f"^{message}"):
        act(step)
    assert step.is_open
    assert torch.equal(pool.stores[0].k, before[0][0])
    assert pool.num_free == before[1]
    pool.check()
    expected, _ = expected_outputs(FULL, 0, [[1, 2, 3, 4, 5, 6, 10, 11], [7, 8, 9, 12]], [2, 1])
    assert_close(step.attend(0, Q), expected)
    step.commit([1, 1])
    assert (text.tokens[6:], other.tokens[3:]) == ([10], [12])
    pool.check()


@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize(
    "act",
    [
        lambda step: step.append(0, K, V),
        lambda step: step.attend(0, Q),
        lambda step: step.commit(),
        lambda step: step.commit([1, 1]),
        lambda step: step.abort(),
    ],
    ids=["append", "attend", "commit", "keep", "abort"],
)
def test_a_step_that_is_over_stays_over(end, act):
    pool, text, other = filled(6, 3, spec=FULL)
    with pool.step([text, other], [[10, 11], [12]]) as step:
        step.append(0, K, V)
        getattr(step, end)()
        after = whole_content(pool)
        with pytest.raises(InvalidValueError, match=r"^the step is over; start another with pool.step\(\.\.\.\)$"):
            act(step)
    assert not step.is_open
    assert whole_content(pool) == after
    pool.check()


def test_an_exception_after_the_commit_undoes_nothing():
    pool, text = filled(6, spec=FULL)
    with pytest.raises(ZeroDivisionError), pool.step([text], [[7]]) as step:  # noqa: PT012
        append_layers(step)
        step.commit()
        raise ZeroDivisionError
    assert text.tokens == [1, 2, 3, 4, 5, 6, 7]
    pool.check()


def test_four_query_heads_over_three_are_refused():  # case B10
    spec = CacheSpec([LayerSpec(3, 2)])
    pool = new_pool(spec)
    with pytest.raises(InvalidValueError, match="q has 4 heads and k has 3"):  # noqa: PT012, SIM117
        with pool.step([pool.new_sequence()], [[1]]) as step:
            step.append(0, torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1, 2))
            step.attend(0, torch.ones(1, 4, 1, 2))
    assert pool.num_free == pool.num_blocks
    pool.check()


def test_a_device_with_its_index_is_the_same_device():
    pool = kvcache.BlockPool(FULL, 4, 4, "float64", device="cpu:0")
    text = pool.new_sequence()
    with pool.step([text], [[1, 2]]) as step:
        step.append(0, *known_rows(FULL, 0, [1, 2]))
    assert pool.device == torch.device("cpu")


def test_a_default_device_changes_nothing():
    pool, text = filled(5, spec=FULL)
    with pool.step([text], [[6]]) as step:
        step.append(0, *known_rows(FULL, 0, [6]))
        q = known_queries(FULL, 0, [6])
        with torch.device("meta"):
            output = step.attend(0, q)
        assert torch.equal(step.attend(0, q), output)


def test_what_a_step_made_in_inference_mode_serves_gradients_later():
    pool, text = filled(5, spec=FULL)
    with pool.step([text], [[6]]) as step:
        q = known_queries(FULL, 0, [6])
        with torch.inference_mode():
            step.append(0, *known_rows(FULL, 0, [6]))
            expected = step.attend(0, q)
            for tensor in (step.tokens, step.positions, step.last):
                assert not tensor.is_inference()
        q.requires_grad_()
        output = step.attend(0, q)
        output.sum().backward()
        assert q.grad is not None
        assert_close(output, expected)  # the route with a gradient rounds otherwise
