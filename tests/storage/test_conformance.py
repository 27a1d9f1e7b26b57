"""What every cache of one layer promises, checked against full float64 attention over the visible history."""

import copy
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache import CacheFullError, InvalidTypeError, InvalidValueError, KVCacheError, RollbackError
from tests.oracle import TOLERANCE, assert_close, attend_rows, mean_trick, visible_positions
from tests.storage.caches import CACHE_KINDS, CacheKind

NAN = float("nan")
every_kind = pytest.mark.parametrize("kind", CACHE_KINDS, ids=str)


def random_tokens(count, batch=2, heads=2, head_dim=4, v_head_dim=None, seed=0, dtype=torch.float64):
    """Return keys (B, Hkv, count, D) and values (B, Hkv, count, Dv)."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, heads, count, head_dim, generator=generator, dtype=torch.float64)
    v = torch.randn(batch, heads, count, v_head_dim or head_dim, generator=generator, dtype=torch.float64)
    return k.to(dtype), v.to(dtype)


def random_queries(count, batch=2, heads=4, head_dim=4, seed=99):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, count, head_dim, generator=generator, dtype=torch.float64)


def filled(kind: CacheKind, count: int, **options):
    cache = kind(**options)
    k, v = random_tokens(count)
    cache.update(k, v)
    return cache, k, v


def check_attends_like_the_history(cache, kind, k, v, queries=1):
    """Check that the last `queries` tokens of the history (k, v) see what the kind's rule says."""
    q = random_queries(queries, batch=cache.batch_size)
    expected, expected_lse = attend_rows(q, k, v, window=kind.window, sinks=kind.sinks)
    output, lse = cache.attend(q, return_lse=True)
    assert_close(output, expected)
    assert_close(lse, expected_lse)
    assert_close(cache.attend(q), expected)


def content(cache):
    return {**cache.meta_state, **{name: tensor.tolist() for name, tensor in cache.state.items()}}


@every_kind
@given(chunks=st.lists(st.integers(0, 9), max_size=8))
@settings(max_examples=40)
def test_chunks_of_every_size_equal_one_run(kind, chunks):  # cases B3, C5, E2, E3, E5
    total = min(sum(chunks), kind.capacity or 40)
    k, v = random_tokens(total)
    q = random_queries(total)
    expected, _ = attend_rows(q, k, v, window=kind.window, sinks=kind.sinks)
    cache, end = kind(), 0
    for size in chunks:
        start, end = end, min(end + size, total)
        seen_k, seen_v = cache.update(k[:, :, start:end], v[:, :, start:end])
        assert cache.seq_len == cache.get_seq_len() == end
        visible = sorted({p for t in range(start, end) for p in visible_positions(t, **rule_of(kind))})
        if end > start:
            assert torch.equal(seen_k, k[:, :, visible])
            assert torch.equal(seen_v, v[:, :, visible])
            assert_close(cache.attend(q[:, :, start:end]), expected[:, :, start:end])


def rule_of(kind):
    return {"window": kind.window, "sinks": kind.sinks}


@every_kind
def test_slots_never_written_are_never_read(kind):  # case B7
    cache = kind()
    cache.k_cache.fill_(NAN)
    cache.v_cache.fill_(NAN)
    k, v = random_tokens(6)
    cache.update(k, v)
    check_attends_like_the_history(cache, kind, k, v, queries=6)
    cache.rollback(1)
    k, v = k[:, :, :5], v[:, :, :5]
    new_k, new_v = random_tokens(1, seed=1)
    cache.update(new_k, new_v)
    check_attends_like_the_history(cache, kind, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))


@every_kind
def test_rows_dropped_by_rollback_or_reset_are_never_read(kind):  # cases B7, C6
    cache, k, v = filled(kind, 3)
    cache.update(torch.full_like(k[:, :, :1], NAN), torch.full_like(v[:, :, :1], NAN))
    cache.rollback(1)
    new_k, new_v = random_tokens(1, seed=1)
    cache.update(new_k, new_v)
    check_attends_like_the_history(cache, kind, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))
    cache.update(torch.full_like(k, NAN), torch.full_like(v, NAN))
    cache.reset()
    assert (cache.seq_len, cache.stored_len) == (0, 0)
    cache.update(new_k, new_v)
    assert cache.stored_len == 1
    check_attends_like_the_history(cache, kind, new_k, new_v)


@pytest.mark.parametrize("kind", [kind for kind in CACHE_KINDS if kind.sinks == 0], ids=str)
def test_left_padding_hides_the_rows_before_each_start(kind):  # cases A1, B16, G7
    k, v = random_tokens(8)
    starts = [3, 0]
    k[0, :, :3], v[0, :, :3] = NAN, NAN
    cache = kind()
    cache.update(k[:, :, :5], v[:, :, :5])
    q = random_queries(8)
    expected, _ = attend_rows(q, k, v, starts=starts, window=kind.window)
    assert_close(cache.attend(q[:, :, :5], starts=starts), expected[:, :, :5])
    for t in range(5, 8):
        cache.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert_close(cache.attend(q[:, :, t : t + 1], starts=torch.tensor(starts)), expected[:, :, t : t + 1])


@every_kind
def test_options_of_attention_reach_the_kernel(kind):
    cache, k, v = filled(kind, 6)
    q = random_queries(1)
    logits = [0.5, -1.0, 2.0, 0.0]
    expected, expected_lse = attend_rows(q, k, v, scale=0.3, softcap=2.0, sink_logits=logits, **rule_of(kind))
    output, lse = cache.attend(q, scale=0.3, softcap=2.0, sink_logits=torch.tensor(logits), return_lse=True)
    assert_close(output, expected)
    assert_close(lse, expected_lse)


@every_kind
def test_values_may_have_their_own_head_size(kind):
    cache = kind(v_head_dim=3)
    k, v = random_tokens(6, v_head_dim=3)
    cache.update(k, v)
    assert cache.attend(random_queries(1)).shape == (2, 4, 1, 3)
    check_attends_like_the_history(cache, kind, k, v)


@every_kind
def test_rollback_and_retry_equals_never_having_appended(kind):  # cases E7, I1
    for length in range(1, 14):
        for dropped in range(length + 1):
            cache, k, v = filled(kind, length)
            before = content(cache)
            if not cache.can_rollback(dropped):
                with pytest.raises(RollbackError, match=f"cannot drop its last {dropped} tokens"):
                    cache.rollback(dropped)
                assert content(cache) == before
                continue
            cache.rollback(dropped)
            assert cache.seq_len == length - dropped
            new_k, new_v = random_tokens(2, seed=1)
            k, v = (torch.cat([old[:, :, : length - dropped], new], dim=2) for old, new in ((k, new_k), (v, new_v)))
            cache.update(new_k, new_v)
            check_attends_like_the_history(cache, kind, k, v, queries=2)


@every_kind
def test_rolling_back_nothing_or_everything_is_always_right(kind):  # case D3
    cache, k, v = filled(kind, 4)
    cache.rollback(0)
    check_attends_like_the_history(cache, kind, k, v)
    for bad in (5, 9):
        with pytest.raises(InvalidValueError, match=f"n is {bad}; expected at most seq_len = 4"):
            cache.rollback(bad)
        with pytest.raises(InvalidValueError, match=f"length is {bad}; expected at most seq_len = 4"):
            cache.truncate(bad)
        assert not cache.can_rollback(bad)
    with pytest.raises(InvalidValueError, match="n is -1"):
        cache.rollback(-1)
    with pytest.raises(InvalidValueError, match="length is -1"):
        cache.truncate(-1)
    cache.truncate(4)
    assert cache.seq_len == 4
    cache.truncate(3)
    assert cache.seq_len == 3
    cache.rollback(3)
    assert (cache.seq_len, cache.stored_len) == (0, 0)


@every_kind
def test_a_refused_update_changes_nothing(kind):  # cases B14, C3
    cache, k, v = filled(kind, 6)
    before = content(cache)
    good, _ = random_tokens(2)
    bad_updates = [
        (good[0], good, InvalidValueError, "k_new has shape"),
        (good, good[0], InvalidValueError, "v_new has shape"),
        (good[:1], good[:1], InvalidValueError, r"k_new has shape .* = \(2, 2, any, 4\)"),
        (good[:, :1], good[:, :1], InvalidValueError, "k_new has shape"),
        (good, good[:, :, :1], InvalidValueError, r"v_new has shape .* = \(2, 2, 2, 4\)"),
        (good[..., :3], good, InvalidValueError, "k_new has shape"),
        (good.int(), good, InvalidTypeError, "k_new has dtype int32"),
        (good, good.tolist(), InvalidTypeError, "v_new is a list"),
        (None, good, InvalidTypeError, "k_new is a NoneType"),
        (good.to("meta"), good, InvalidValueError, "k_new is on meta; expected cpu"),
        (good, good.to("meta"), InvalidValueError, "v_new is on meta; expected cpu"),
    ]
    for k_new, v_new, error, message in bad_updates:
        with pytest.raises(error, match=message):
            cache.update(k_new, v_new)
    if kind.capacity:
        many_k, many_v = random_tokens(kind.capacity - 5)
        with pytest.raises(CacheFullError, match=f"6 of {kind.capacity} tokens stored, {kind.capacity - 5} more"):
            cache.update(many_k, many_v)
    assert content(cache) == before
    check_attends_like_the_history(cache, kind, k, v)


@every_kind
def test_bad_queries_are_named(kind):
    cache, _, _ = filled(kind, 3)
    q = random_queries(1)
    for bad, error, message in (
        (q[0], InvalidValueError, "q has shape"),
        (q[:1], InvalidValueError, r"q has shape .* = \(2, any, any, 4\)"),
        (q[..., :3], InvalidValueError, "q has shape"),
        (q[:, :3], InvalidValueError, "q has 3 heads and k has 2"),
        (q.long(), InvalidTypeError, "q has dtype int64"),
        (random_queries(4), InvalidValueError, "q has T = 4 queries; expected at most seq_len = 3"),
        (q.to("meta"), InvalidValueError, "q is on meta"),
    ):
        with pytest.raises(error, match=message):
            cache.attend(bad)
    with pytest.raises(InvalidValueError, match="starts has shape"):
        cache.attend(q, starts=[0])
    with pytest.raises(TypeError, match="attention_mask"):
        cache.attend(q, attention_mask=None)


@every_kind
def test_no_tokens_change_nothing(kind):  # case K1
    cache, k, v = filled(kind, 6)
    before = content(cache)
    empty_k, empty_v = random_tokens(0)
    cache.update(empty_k, empty_v)
    assert content(cache) == before
    assert cache.attend(random_queries(0)).shape == (2, 4, 0, 4)
    check_attends_like_the_history(cache, kind, k, v)
    fresh = kind()
    seen_k, _ = fresh.update(empty_k, empty_v)
    assert seen_k.shape == (2, 2, 0, 4)
    assert fresh.attend(random_queries(0)).shape == (2, 4, 0, 4)


@every_kind
def test_lengths_and_positions_are_snapshots(kind):  # cases A5, D9
    cache, _, _ = filled(kind, 3)
    length, positions = cache.seq_len, cache.next_positions(2)
    cache.update(*random_tokens(2))
    assert type(length) is int
    assert length == 3
    assert positions.tolist() == [[3, 4], [3, 4]]
    assert type(cache.stored_len) is int
    assert cache.next_positions(1, starts=[2, 7]).tolist() == [[3], [0]]
    assert cache.next_positions(0).shape == (2, 0)
    for starts in ([0], [-1, 0], [0.5, 0.0]):
        with pytest.raises(KVCacheError, match="starts"):
            cache.next_positions(1, starts=starts)


@every_kind
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_stored_is_cast_by_value(kind, autocast):  # case C9
    cache = kind(dtype=torch.bfloat16)
    k, v = random_tokens(3)
    for t in range(3):  # prefill and decode write alike
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            seen_k, seen_v = cache.update(k[:, :, t : t + 1].float(), v[:, :, t : t + 1].bfloat16())
    assert seen_k.dtype == seen_v.dtype == torch.bfloat16
    newest = visible_positions(2, **rule_of(kind))
    assert torch.equal(seen_k, k.bfloat16()[:, :, newest])
    assert torch.equal(seen_v, v.bfloat16()[:, :, newest])
    one_shot = kind(dtype=torch.bfloat16)
    one_shot.update(k, v)
    assert content(one_shot) == content(cache)


@every_kind
def test_storage_may_be_narrower_than_what_comes_out(kind):
    cache = kind(dtype=torch.float32, storage="bfloat16")
    k, v = random_tokens(2)
    seen_k, seen_v = cache.update(k, v)
    visible = sorted({p for t in range(2) for p in visible_positions(t, **rule_of(kind))})
    assert seen_k.dtype == seen_v.dtype == cache.dtype == torch.float32
    assert torch.equal(seen_k, k.bfloat16().float()[:, :, visible])
    assert cache.k_cache.dtype == torch.bfloat16
    assert (cache.storage, cache.nbytes) == ("bfloat16", kind(dtype=torch.bfloat16).nbytes)
    q = random_queries(1).float()
    assert_close(cache.attend(q), attend_rows(q, k.bfloat16(), v.bfloat16(), **rule_of(kind))[0])


@every_kind
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype_is_within_its_rounding(kind, dtype):  # cases B9, N1
    cache = kind(dtype=dtype)
    k, v = random_tokens(9, dtype=dtype)
    cache.update(k[:, :, :8], v[:, :, :8])
    cache.update(k[:, :, 8:], v[:, :, 8:])
    q = random_queries(1).to(dtype)
    output = cache.attend(q)
    assert output.dtype == dtype
    assert_close(output, attend_rows(q, k, v, **rule_of(kind))[0])


@every_kind
def test_float16_scores_out_of_range_stay_finite(kind):  # case B9
    cache = kind(batch_size=1, num_heads=1, head_dim=1, dtype=torch.float16)
    k = torch.tensor([300.0, -300.0, 300.0]).view(1, 1, 3, 1)
    v = torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1)
    cache.update(k, v)
    q = torch.full((1, 1, 1, 1), 300.0, dtype=torch.float16)
    assert_close(cache.attend(q), attend_rows(q, k, v, **rule_of(kind))[0])


@every_kind
def test_grouped_query_heads_read_their_own_head(kind):  # case B10
    cache = kind(batch_size=1, num_heads=2, head_dim=1)
    v = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 5, 1)
    cache.update(torch.zeros_like(v), v)
    output = cache.attend(torch.ones(1, 4, 1, 1, dtype=torch.float64))
    assert output.flatten().tolist() == pytest.approx([10, 10, 20, 20])


@every_kind
def test_inputs_of_any_layout_are_stored_by_value(kind):  # case B12
    k, v = random_tokens(5)
    plain, strided = kind(), kind()
    plain.update(k, v)
    wide = torch.stack([k, torch.full_like(k, NAN)], dim=-1)
    strided.update(wide[..., 0], v.transpose(1, 2).contiguous().transpose(1, 2))
    assert content(strided) == content(plain)
    k.fill_(NAN)  # the cache holds copies
    v.fill_(NAN)
    assert content(strided) == content(plain)


@every_kind
def test_keys_and_values_stay_apart_through_batch_operations(kind):  # case D1
    cache = kind(batch_size=3)
    ones = torch.ones(3, 2, 4, 4, dtype=torch.float64)
    cache.update(ones, 2 * ones)
    cache.select([0, 2])
    cache.repeat(2)
    cache.reorder([3, 2, 1, 0])
    cache = cache.copy()
    assert cache.batch_size == 4
    assert (cache.state["k"] == 1).all()
    assert (cache.state["v"] == 2).all()


@every_kind
@pytest.mark.parametrize("length", [0, 2, 11])
def test_rows_of_the_batch_follow_the_index(kind, length):  # case D8's kind, beams
    for act, rows in (
        (lambda c: c.reorder([1, 1]), [1, 1]),
        (lambda c: c.reorder(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.select([1]), [1]),
        (lambda c: c.select([1, 0, 1]), [1, 0, 1]),
        (lambda c: c.repeat(1), [0, 1]),
        (lambda c: c.repeat(3), [0, 0, 0, 1, 1, 1]),
    ):
        cache, k, v = filled(kind, length)
        assert act(cache) is None
        assert (cache.batch_size, cache.seq_len) == (len(rows), length)
        new_k, new_v = random_tokens(1, batch=len(rows), seed=1)
        cache.update(new_k, new_v)
        history = [torch.cat([old[rows], new], dim=2) for old, new in ((k, new_k), (v, new_v))]
        check_attends_like_the_history(cache, kind, *history)


@every_kind
def test_bad_batch_operations_change_nothing(kind):
    cache, _, _ = filled(kind, 6)
    before = content(cache)
    for act, error, message in (
        (lambda: cache.reorder([0]), InvalidValueError, "index has 1 entries; expected batch_size = 2"),
        (lambda: cache.reorder([0, 2]), InvalidValueError, "index holds 2"),
        (lambda: cache.select([-1]), InvalidValueError, "index holds -1"),
        (lambda: cache.select([]), InvalidValueError, "index is empty"),
        (lambda: cache.select([True, False]), InvalidTypeError, "index has dtype bool"),
        (lambda: cache.select([[0, 1]]), InvalidValueError, "index has shape"),
        (lambda: cache.select([0.0]), InvalidTypeError, "index has dtype float32"),
        (lambda: cache.select(None), InvalidTypeError, "index is a NoneType"),
        (lambda: cache.repeat(0), InvalidValueError, "n is 0"),
        (lambda: cache.repeat(1.5), InvalidTypeError, "n is a float"),
        (lambda: cache.rollback("1"), InvalidTypeError, "n is a str"),
        (lambda: cache.next_positions(-1), InvalidValueError, "num_tokens is -1"),
        (lambda: cache.to("nowhere"), InvalidValueError, "device is 'nowhere'"),
    ):
        with pytest.raises(error, match=message):
            act()
    assert content(cache) == before


COPIES = {
    "copy": lambda cache: cache.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "state": lambda cache: type(cache).from_state(cache.state, cache.meta_state),
}


@every_kind
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("length", [0, 3, 11])
def test_copies_are_equal_and_independent(kind, way, length):  # case C14
    cache, k, v = filled(kind, length, storage="float32") if way == "state" else filled(kind, length)
    k, v = k.to(cache.k_cache.dtype), v.to(cache.k_cache.dtype)
    other = COPIES[way](cache)
    assert type(other) is type(cache)
    assert repr(other) == repr(cache)
    assert content(other) == content(cache)
    assert other.nbytes == cache.nbytes
    branches = [random_tokens(2, seed=seed, dtype=k.dtype) for seed in (1, 2)]
    for branch, (new_k, new_v) in zip((cache, other), branches, strict=True):
        branch.update(new_k, new_v)
    for branch, (new_k, new_v) in zip((cache, other), branches, strict=True):
        check_attends_like_the_history(branch, kind, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2), queries=2)


@every_kind
def test_state_holds_the_stored_rows_and_plain_data(kind):
    cache, k, v = filled(kind, 11)
    state = cache.state
    assert set(state) == {"k", "v"}
    for rows in state.values():
        assert rows.shape[2] == cache.stored_len
        assert rows.is_contiguous()
        assert rows.untyped_storage().nbytes() == rows.nbytes
    assert all(type(value) in (int, str) for value in cache.meta_state.values())
    for act in (lambda s: s.update(x=k), lambda s: s.pop("v"), lambda s: s.update(v=v[:, :, :0])):
        broken = cache.state
        act(broken)
        with pytest.raises(InvalidValueError, match="state"):
            type(cache).from_state(broken, cache.meta_state)
    for change in ({"type": "Other"}, {"version": 99}, {"seq_len": 0}, {"extra": 1}):
        with pytest.raises(InvalidValueError, match="state"):
            type(cache).from_state(cache.state, {**cache.meta_state, **change})


@every_kind
def test_caches_made_in_inference_mode_work_outside_of_it(kind):
    with torch.inference_mode():
        cache = kind()
        k, v = random_tokens(3)
        cache.update(k, v)
        cache.reorder([0, 1])
        other = cache.copy()
        other.repeat(2)
        other.select([0, 2])
    other.update(k, v)
    new_k, new_v = random_tokens(2, seed=1)
    cache.update(new_k, new_v)
    check_attends_like_the_history(cache, kind, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2), queries=2)
    with torch.inference_mode():
        cache.update(new_k, new_v)


@every_kind
def test_gradients_flow_into_queries_and_not_into_the_past(kind):
    cache = kind()
    k, v = (rows.requires_grad_() for rows in random_tokens(4))
    q = random_queries(2).requires_grad_()
    cache.update(k[:, :, :2], v[:, :, :2])
    output = cache.attend(q)
    cache.update(k[:, :, 2:], v[:, :, 2:])  # what backward needs survives later updates
    output.sum().backward()
    assert k.grad is None
    assert v.grad is None
    fresh = q.detach().clone().requires_grad_()
    expected = torch.autograd.grad(attend_rows(fresh, k[:, :, :2], v[:, :, :2], **rule_of(kind))[0].sum(), fresh)[0]
    assert torch.allclose(q.grad, expected, rtol=1e-9, atol=1e-12)
    copy.deepcopy(cache)  # works after a prefill with gradients


@every_kind
def test_bytes_are_known_and_constant(kind):
    cache = kind()
    expected = cache.nbytes
    assert expected == cache.k_cache.untyped_storage().nbytes() + cache.v_cache.untyped_storage().nbytes()
    buffers = cache.k_cache.data_ptr(), cache.v_cache.data_ptr()
    for t in range(20):
        cache.update(*random_tokens(1, seed=t))
    cache.reorder([1, 0])
    cache.rollback(1)
    cache.reset()
    assert cache.nbytes == expected
    assert buffers == (cache.k_cache.data_ptr(), cache.v_cache.data_ptr())


@every_kind
def test_to_moves_in_place_and_returns_the_cache(kind):
    cache, k, v = filled(kind, 6)
    assert cache.to("cpu") is cache
    check_attends_like_the_history(cache, kind, k, v)
    assert cache.copy().to("meta").device.type == "meta"


def test_bad_sizes_are_named():
    good = {"batch_size": 1, "num_heads": 1, "head_dim": 4}
    for kind in (CACHE_KINDS[0], CACHE_KINDS[2]):
        for name in good:
            for bad, error in ((0, InvalidValueError), (-1, InvalidValueError), (1.0, InvalidTypeError)):
                with pytest.raises(error, match=f"{name} is"):
                    kind(**{**good, name: bad})
        for name, bad, error in (
            ("v_head_dim", 0, InvalidValueError),
            ("dtype", torch.int8, InvalidValueError),
            ("dtype", "float31", InvalidValueError),
            ("dtype", 4, InvalidTypeError),
            ("storage", "int9", InvalidValueError),
            ("device", "nowhere", InvalidValueError),
        ):
            with pytest.raises(error, match=f"{name} is"):
                kind(**{**good, name: bad})


class CacheMachine(RuleBasedStateMachine):
    """Random acts on a cache, and on the plain list of what it was given."""

    @initialize(kind=st.sampled_from(CACHE_KINDS))
    def start(self, kind):
        self.kind = kind
        self.cache = kind()
        self.k, self.v = random_tokens(0)
        self.seed = 0

    def tokens(self, count):
        self.seed += 1
        return random_tokens(count, batch=self.cache.batch_size, seed=self.seed)

    @rule(count=st.integers(0, 9))
    def update(self, count):
        k, v = self.tokens(count)
        if self.kind.capacity and self.cache.seq_len + count > self.kind.capacity:
            with pytest.raises(CacheFullError):
                self.cache.update(k, v)
            return
        self.cache.update(k, v)
        self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        if count:
            check_attends_like_the_history(self.cache, self.kind, self.k, self.v, queries=count)

    @rule(count=st.integers(0, 12))
    def rollback(self, count):
        if self.cache.can_rollback(count):
            self.cache.rollback(count)
            length = self.k.shape[2] - count
            self.k, self.v = self.k[:, :, :length], self.v[:, :, :length]
        else:
            with pytest.raises((RollbackError, InvalidValueError)):
                self.cache.rollback(count)

    @rule()
    def reset(self):
        self.cache.reset()
        self.k, self.v = self.k[:, :, :0], self.v[:, :, :0]

    @rule(data=st.data())
    def rebatch(self, data):
        batch = self.cache.batch_size
        index = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
        self.cache.select(index)
        self.k, self.v = self.k[index], self.v[index]

    @rule(data=st.data())
    def reorder(self, data):
        batch = self.cache.batch_size
        index = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
        self.cache.reorder(index)
        self.k, self.v = self.k[index], self.v[index]

    @precondition(lambda self: self.cache.batch_size < 3)
    @rule()
    def repeat(self):
        self.cache.repeat(2)
        self.k, self.v = self.k.repeat_interleave(2, 0), self.v.repeat_interleave(2, 0)

    @rule(way=st.sampled_from(sorted(COPIES)))
    def continue_with_a_copy(self, way):
        old = self.cache
        self.cache = COPIES[way](old)
        if old.seq_len + 2 <= (self.kind.capacity or 1000):
            old.update(*self.tokens(2))

    @invariant()
    def lengths_agree(self):
        assert self.cache.seq_len == self.k.shape[2]
        assert self.cache.state["k"].shape[2] == self.cache.stored_len <= self.cache.k_cache.shape[2]

    @invariant()
    def the_next_token_sees_what_the_rule_says(self):
        if self.kind.capacity == self.cache.seq_len:
            return
        probe = self.cache.copy()
        k, v = random_tokens(1, batch=probe.batch_size, seed=12345)
        probe.update(k, v)
        history = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        check_attends_like_the_history(probe, self.kind, *history)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_mean_trick_reads_as_in_the_books():  # case B1 on a cache
    kind = CACHE_KINDS[0]
    cache = kind(batch_size=1, num_heads=1, head_dim=1)
    cache.update(*mean_trick(4))
    assert cache.attend(torch.ones(1, 1, 1, 1, dtype=torch.float64)).item() == pytest.approx(2.5)
    two = cache.attend(torch.ones(1, 1, 2, 1, dtype=torch.float64))
    assert two.flatten().tolist() == pytest.approx([2.0, 2.5])
