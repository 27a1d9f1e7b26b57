"""Attention over any cache: options, padding, head groups, dtypes, gradients."""

import copy

import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError, KVCacheError
from tests.oracle import TOLERANCE, assert_close, attend_rows
from tests.storage.caches import STORED_KINDS, random_tokens
from tests.storage.histories import (
    NAN,
    check_attends_like_the_history,
    content,
    every_kind,
    every_plain_kind,
    filled,
    random_queries,
    rule_of,
)


@every_kind
def test_options_of_attention_reach_the_kernel(kind):
    cache, k, v = filled(kind, 6)
    q = random_queries(1)
    logits = [0.5, -1.0, 2.0, 0.0]
    expected, expected_lse = attend_rows(q, k, v, scale=0.3, softcap=2.0, sink_logits=logits, **rule_of(kind))
    output, lse = cache.attend(q, scale=0.3, softcap=2.0, sink_logits=torch.tensor(logits), return_lse=True)
    assert_close(output, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("kind", [kind for kind in STORED_KINDS if kind.sinks == 0], ids=str)
def test_left_padding_hides_the_rows_before_each_start(kind):  # cases A1, B16, G7
    k, v = kind.tokens(8)
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


@every_plain_kind
@pytest.mark.parametrize("length", [3, 12, 35])
def test_negative_starts_are_refused(kind, length):
    cache, k, v = filled(kind, length)
    before = content(cache)
    for starts in ([0, -5], torch.tensor([-5, 0]), [-5, length - 1]):
        with pytest.raises(InvalidValueError, match="starts holds -5"):
            cache.attend(random_queries(1), starts=starts)
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
    with pytest.raises(InvalidValueError, match="T is -1; expected an integer >= 0"):
        cache.next_positions(T=-1)


@every_kind
def test_values_may_have_their_own_head_size(kind):
    cache, k, v = filled(kind, 6, v_head_dim=3)
    assert cache.attend(random_queries(1)).shape == (2, 4, 1, 3)
    check_attends_like_the_history(cache, kind, k, v)


@every_kind
def test_grouped_query_heads_read_their_own_head(kind):  # case B10
    cache = kind(batch_size=1, num_heads=2, head_dim=1)
    v = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 5, 1)
    cache.update(torch.zeros_like(v), v)
    output = cache.attend(torch.ones(1, 4, 1, 1, dtype=torch.float64))
    assert output.flatten().tolist() == pytest.approx([10, 10, 20, 20])


@every_kind
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype_is_within_its_rounding(kind, dtype):  # cases B9, N1
    cache = kind(dtype=dtype)
    k, v = kind.tokens(9, dtype)
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
def test_gradients_flow_into_queries_and_not_into_the_past(kind):
    cache = kind()
    k, v = (rows.requires_grad_() for rows in kind.tokens(4))
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
def test_append_and_attend_is_both_and_gives_the_new_tokens_gradients(kind):
    cache, k, v = filled(kind, 5)
    for count in (0, 1, 9):
        new = [rows.requires_grad_() for rows in (random_queries(count), *kind.tokens(count, seed=count))]
        twin = cache.copy()
        output = cache.append_and_attend(*new, scale=0.3)
        assert_close(twin.append_and_attend(*(rows.detach() for rows in new), scale=0.3), output.detach())
        assert content(twin) == content(cache)
        same = [rows.detach().clone().requires_grad_() for rows in new]
        k = torch.cat([k.detach(), same[1]], dim=2)
        v = torch.cat([v.detach(), same[2]], dim=2)
        expected, _ = attend_rows(same[0], k, v, scale=0.3, **rule_of(kind))
        assert_close(output.detach(), expected.detach())
        if count:
            gradients = torch.autograd.grad(output.square().sum(), new)
            for gradient, right in zip(gradients, torch.autograd.grad(expected.square().sum(), same), strict=True):
                assert torch.allclose(gradient, right, rtol=1e-9, atol=1e-12)


@every_kind
def test_a_refused_append_and_attend_stores_nothing(kind):
    cache, k, v = filled(kind, 6)
    before = content(cache)
    q, (new_k, new_v) = random_queries(2), random_tokens(2)
    for arguments, options, error, message in (
        ((q[:, :, :1], new_k, new_v), {}, InvalidValueError, "q has shape"),
        ((q[..., :3], new_k, new_v), {}, InvalidValueError, "q has shape"),
        ((q[:, :3], new_k, new_v), {}, InvalidValueError, "q has 3 heads and k has 2"),
        ((q.long(), new_k, new_v), {}, InvalidTypeError, "q has dtype int64"),
        ((q, new_k[:, :1], new_v), {}, InvalidValueError, "k_new has shape"),
        ((q, new_k, new_v[:, :, :1]), {}, InvalidValueError, "v_new has shape"),
        ((q, new_k, new_v), {"scale": NAN}, InvalidValueError, "scale is nan"),
    ):
        with pytest.raises(error, match=message):
            cache.append_and_attend(*arguments, **options)
        assert content(cache) == before
    check_attends_like_the_history(cache, kind, k, v)


@every_kind
@pytest.mark.parametrize("count", [1, 2])
def test_backward_is_right_after_later_appends_though_keys_are_frozen(kind, count):
    cache, k, v = filled(kind, 3)
    # As many query heads as key/value heads, and one token: other steps make attention copy the keys by itself.
    q, (new_k, new_v) = random_queries(count, heads=2).requires_grad_(), kind.tokens(count, seed=1)
    new_v.requires_grad_()
    output = cache.append_and_attend(q, new_k, new_v)
    cache.append(*random_tokens(1, seed=2))
    gradients = torch.autograd.grad(output.sum(), (q, new_v))
    history = torch.cat([k, new_k], dim=2), torch.cat([v, new_v], dim=2)
    expected = torch.autograd.grad(attend_rows(q, *history, **rule_of(kind))[0].sum(), (q, new_v))
    for actual, right in zip(gradients, expected, strict=True):
        assert torch.allclose(actual, right, rtol=1e-9, atol=1e-12)
