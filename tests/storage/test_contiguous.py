import pytest
import torch

from kvcache import CacheFullError, InvalidTypeError, InvalidValueError, KVCache
from tests.allocations import CountAllocations


def ones(count, batch=1, heads=2, head_dim=4):
    return torch.ones(batch, heads, count, head_dim)


def test_attributes_are_as_given():
    cache = KVCache(3, 2, 4, 16, torch.bfloat16, "cpu", v_head_dim=5)
    assert (cache.batch_size, cache.num_heads, cache.head_dim, cache.max_seq_len) == (3, 2, 4, 16)
    assert (cache.v_head_dim, cache.dtype, cache.device) == (5, torch.bfloat16, torch.device("cpu"))
    assert cache.k_cache.shape == (3, 2, 16, 4)
    assert cache.v_cache.shape == (3, 2, 16, 5)
    assert cache.nbytes == 3 * 2 * 16 * (4 + 5) * 2
    assert (cache.seq_len, cache.get_seq_len(), cache.stored_len) == (0, 0, 0)


def test_repr_says_what_it_is():
    cache = KVCache(1, 2, 4, 16)
    cache.update(ones(3), ones(3))
    assert repr(cache) == (
        "KVCache(batch_size=1, num_heads=2, head_dim=4, max_seq_len=16, dtype=float32, device=cpu, seq_len=3)"
    )
    narrow = KVCache(1, 2, 4, 16, v_head_dim=8, storage="float16")
    assert "v_head_dim=8, max_seq_len=16, dtype=float32, storage=float16, " in repr(narrow)


@pytest.mark.parametrize("capacity", [0, 1, 4])
def test_exactly_as_many_tokens_fit_as_it_was_made_for(capacity):  # cases C1, C3
    cache = KVCache(1, 2, 4, capacity)
    for length in range(capacity):
        assert cache.seq_len == length
        cache.update(ones(1), ones(1))
    expected = (
        f"KVCache is full: {capacity} of {capacity} tokens stored, 1 more asked for; "
        f"create it with max_seq_len >= {capacity + 1}"
    )
    with pytest.raises(CacheFullError) as refused:
        cache.update(ones(1), ones(1))
    assert str(refused.value) == expected
    assert isinstance(refused.value, ValueError)
    assert cache.seq_len == capacity


def test_a_chunk_that_only_partly_fits_is_refused_whole():  # case B14
    cache = KVCache(1, 2, 4, 8)
    cache.update(ones(7), ones(7))
    before = cache.k_cache.clone()
    with pytest.raises(CacheFullError, match="7 of 8 tokens stored, 2 more asked for"):
        cache.update(7 * ones(2), 7 * ones(2))
    assert cache.seq_len == 7
    assert torch.equal(cache.k_cache, before)


def test_big_chunks_append_to_a_filled_cache():  # case C5
    cache = KVCache(1, 2, 4, 14)
    tokens = torch.randn(1, 2, 14, 4)
    for start, end in ((0, 1), (1, 5), (5, 14)):
        k, v = cache.update(tokens[:, :, start:end], -tokens[:, :, start:end])
    assert cache.seq_len == 14
    assert torch.equal(k, tokens)
    assert torch.equal(v, -tokens)


def test_update_returns_views_of_the_buffers():
    cache = KVCache(1, 2, 4, 16)
    k, v = cache.update(ones(3), ones(3))
    assert k.shape == v.shape == (1, 2, 3, 4)
    assert k.data_ptr() == cache.k_cache.data_ptr()
    assert v.data_ptr() == cache.v_cache.data_ptr()


def test_512_steps_allocate_nothing():  # case C12
    cache = KVCache(1, 2, 4, 512)
    k, v = ones(1), ones(1)
    with CountAllocations() as count:
        for _ in range(512):
            cache.update(k, v)
    assert count.allocated == 0


def test_a_decode_step_copies_nothing_of_what_is_stored():  # case C12
    allocated = []
    for length in (64, 4096):
        cache = KVCache(1, 2, 4, length + 1)
        cache.update(ones(length), ones(length))
        q = torch.ones(1, 4, 1, 4)
        with CountAllocations() as count:
            cache.update(ones(1), ones(1))
            cache.attend(q)
        allocated.append(count.allocated)
    assert allocated[1] == allocated[0]


def test_max_seq_len_must_be_a_size():
    with pytest.raises(InvalidValueError, match="max_seq_len is -1"):
        KVCache(1, 1, 1, -1)
    with pytest.raises(InvalidTypeError, match="max_seq_len is a NoneType"):
        KVCache(1, 1, 1, None)
