import pytest
import torch

from kvcache import (
    CacheFullError,
    CausalSelfAttentionWithCache,
    InvalidTypeError,
    InvalidValueError,
    KVCache,
    SlidingWindowCache,
)
from tests.oracle import assert_close, attend_rows
from tests.storage.caches import CACHE_KINDS


def module(d_model=12, num_heads=6, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return CausalSelfAttentionWithCache(d_model, num_heads, **options).to(dtype)


def tokens(count, batch=2, d_model=12, dtype=torch.float64):
    return torch.randn(batch, count, d_model, generator=torch.Generator().manual_seed(1), dtype=dtype)


def expected_output(attention, x, **rule):
    """Compute the module's output with loops, reading qkv_proj as (batch, seq, H + 2 Hkv, head_dim)."""
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    projected = x @ attention.qkv_proj.weight.T
    split = projected.view(*x.shape[:2], heads + 2 * kv_heads, attention.head_dim).transpose(1, 2)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    attended, _ = attend_rows(q, k, v, **rule)
    return attended.transpose(1, 2).reshape(x.shape) @ attention.out_proj.weight.T


@pytest.mark.parametrize("num_kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("kind", CACHE_KINDS, ids=str)
@pytest.mark.parametrize("chunks", [[11], [5, 6], [5, 1, 1, 1, 1, 1, 1], [1] * 11, [0, 3, 0, 8]])
def test_every_chunking_over_every_cache_equals_one_uncached_run(kind, chunks, num_kv_heads):  # case B3
    attention = module(num_kv_heads=num_kv_heads)
    x = tokens(11)
    expected = expected_output(attention, x, window=kind.window, sinks=kind.sinks)
    cache = kind(num_heads=num_kv_heads, head_dim=2)
    outputs, start = [], 0
    with torch.no_grad():
        for size in chunks:
            output, returned = attention(x[:, start : start + size], cache, use_cache=True)
            assert returned is cache
            outputs.append(output)
            start += size
            assert cache.seq_len == start
        assert_close(torch.cat(outputs, dim=1), expected)


def test_without_a_cache_it_is_causal_self_attention():
    attention, x = module(), tokens(7)
    output, cache = attention(x)
    assert cache is None
    assert_close(output, expected_output(attention, x))


def test_weights_load_of_a_module_that_reads_qkv_as_batch_seq_3_heads_head_dim():
    """Such a module splits `qkv_proj`'s output as (batch, seq, 3, num_heads, head_dim); the result is the same."""
    attention, x = module(), tokens(5)
    state = attention.state_dict()
    assert {name: tuple(weight.shape) for name, weight in state.items()} == {
        "qkv_proj.weight": (36, 12),
        "out_proj.weight": (12, 12),
    }
    qkv = (x @ state["qkv_proj.weight"].T).view(2, 5, 3, 6, 2).permute(2, 0, 3, 1, 4)
    scores = (qkv[0] @ qkv[1].transpose(-1, -2)) * attention.scale
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    attended = (scores.softmax(-1) @ qkv[2]).transpose(1, 2).reshape(2, 5, 12)
    output, _ = attention(x)
    assert_close(output, attended @ state["out_proj.weight"].T)
    assert (attention.d_model, attention.num_heads, attention.head_dim, attention.scale) == (12, 6, 2, 2**-0.5)


def test_use_cache_without_a_cache_creates_one():
    attention, x = module(max_seq_len=9, num_kv_heads=2), tokens(5)
    output, cache = attention(x, use_cache=True)
    assert repr(cache) == (
        "KVCache(batch_size=2, num_heads=2, head_dim=2, max_seq_len=9, dtype=float64, device=cpu, seq_len=5)"
    )
    assert_close(output, expected_output(attention, x))
    assert module().max_seq_len == 2048


def test_use_cache_false_ignores_the_cache_and_returns_it_unchanged():
    attention, x = module(), tokens(5)
    cache = KVCache(2, 6, 2, 8, torch.float64)
    cache.update(torch.ones(2, 6, 3, 2), torch.ones(2, 6, 3, 2))
    output, returned = attention(x, cache)
    assert returned is cache
    assert cache.seq_len == 3
    assert_close(output, expected_output(attention, x))


def test_a_full_cache_refuses_and_stays_as_it_was():  # case C1
    attention, x = module(max_seq_len=5), tokens(6)
    _, cache = attention(x[:, :5], use_cache=True)
    with pytest.raises(CacheFullError, match="5 of 5 tokens stored, 1 more asked for"):
        attention(x[:, 5:], cache, use_cache=True)
    assert cache.seq_len == 5
    with pytest.raises(CacheFullError, match="0 of 5 tokens stored, 6 more"):
        attention(x, use_cache=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_as_near_as_the_uncached_run(dtype):  # case N1
    attention, x = module(dtype=dtype), tokens(16, dtype=dtype)
    exact = CausalSelfAttentionWithCache(12, 6).double()
    exact.load_state_dict(attention.state_dict())
    with torch.no_grad():
        expected, _ = exact(x.double())
        uncached, _ = attention(x)
        outputs, cache = [], None
        for t in range(16):
            output, cache = attention(x[:, t : t + 1], cache, use_cache=True)
            outputs.append(output)
    assert cache.dtype == dtype
    cached_error = (torch.cat(outputs, dim=1).double() - expected).abs().max()
    uncached_error = (uncached.double() - expected).abs().max()
    floor = 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert cached_error <= torch.maximum(4 * uncached_error, floor)


def test_autocast_keeps_the_cache_in_the_computed_dtype():  # case C9
    attention, x = module(dtype=torch.float32), tokens(4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = attention(x[:, :3], use_cache=True)
        output, _ = attention(x[:, 3:], cache, use_cache=True)
    assert cache.dtype == output.dtype == torch.bfloat16
    attention(x[:, :2], KVCache(2, 6, 2, 8), use_cache=True)


def test_training_with_a_cache_gives_gradients_to_the_new_tokens_only():
    attention, x = module(), tokens(5).requires_grad_()
    _, cache = attention(x[:, :3], use_cache=True)
    output, _ = attention(x[:, 3:], cache, use_cache=True)
    output.square().sum().backward()
    assert (x.grad[:, :3] == 0).all()
    constant_past = torch.cat([x[:, :3].detach(), new := x[:, 3:].detach().requires_grad_()], dim=1)
    uncached, _ = attention(constant_past)
    uncached[:, 3:].square().sum().backward()
    assert_close(x.grad[:, 3:], new.grad)


def test_gradients_without_a_cache_are_right():
    attention, x = module(d_model=4, num_heads=2), tokens(3, batch=1, d_model=4).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: attention(y)[0], [x])


def test_one_window_cache_serves_a_prompt_longer_than_its_window():
    attention, x = module(), tokens(11)
    cache = SlidingWindowCache(2, 6, 2, window=3, dtype=torch.float64, slack=2)
    with torch.no_grad():
        prompt, _ = attention(x[:, :9], cache, use_cache=True)
        cache.rollback(2)
        retry, _ = attention(x[:, 7:], cache, use_cache=True)
    expected = expected_output(attention, x, window=3)
    assert_close(prompt, expected[:, :9])
    assert_close(retry, expected[:, 7:])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((12, 5), {}, InvalidValueError, "d_model is 12; expected a multiple of num_heads = 5"),
        ((0, 1), {}, InvalidValueError, "d_model is 0"),
        ((12, 0), {}, InvalidValueError, "num_heads is 0"),
        ((12.0, 6), {}, InvalidTypeError, "d_model is a float"),
        ((12, 6), {"num_kv_heads": 4}, InvalidValueError, "num_kv_heads is 4; expected a divisor of num_heads = 6"),
        ((12, 6), {"num_kv_heads": 0}, InvalidValueError, "num_kv_heads is 0"),
        ((12, 6), {"max_seq_len": -1}, InvalidValueError, "max_seq_len is -1"),
    ],
)
def test_bad_sizes_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        CausalSelfAttentionWithCache(*arguments, **options)


@pytest.mark.parametrize(
    ("x", "cache", "error", "message"),
    [
        (tokens(2)[0], None, InvalidValueError, "x has shape"),
        (tokens(2)[..., :5], None, InvalidValueError, r"x has shape \(2, 2, 5\); expected .* = \(any, any, 12\)"),
        (tokens(2).long(), None, InvalidTypeError, "x has dtype int64"),
        (tokens(2).float(), None, InvalidTypeError, "x has dtype torch.float32; expected torch.float64"),
        (tokens(2).to("meta"), None, InvalidValueError, "x is on meta"),
        ([1.0], None, InvalidTypeError, "x is a list"),
        (tokens(2), KVCache(1, 6, 2, 8), InvalidValueError, "kv_cache has batch_size = 1; expected 2"),
        (tokens(2), KVCache(2, 3, 2, 8), InvalidValueError, "kv_cache has num_heads = 3; expected 6"),
        (tokens(2), KVCache(2, 6, 4, 8), InvalidValueError, "kv_cache has head_dim = 4; expected 2"),
        (tokens(2), KVCache(2, 6, 2, 8, v_head_dim=3), InvalidValueError, "kv_cache has v_head_dim = 3"),
        (tokens(2), KVCache(2, 6, 2, 8, device="meta"), InvalidValueError, "kv_cache has device = meta"),
        (tokens(2), (1, 2), InvalidTypeError, "kv_cache is a tuple; expected a KVCache"),
    ],
)
def test_bad_inputs_are_named_and_change_nothing(x, cache, error, message):
    with pytest.raises(error, match=message):
        module()(x, cache, use_cache=True)
    if isinstance(cache, KVCache):
        assert cache.seq_len == 0
