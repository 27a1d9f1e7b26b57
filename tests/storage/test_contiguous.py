import pytest
import torch

from kvcache import CacheFullError, InvalidTypeError, InvalidValueError, KVCache
from tests.allocations import CountAllocations
from tests.oracle import mean_trick
from tests.storage.caches import ENCODED_STORAGES, FLOAT_STORAGES


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


def test_encoded_buffers_hold_bytes():
    cache = KVCache(3, 2, 64, 16, torch.bfloat16, v_head_dim=33, storage="int8/int4")
    assert (cache.storage, cache.dtype) == ("int8/int4", torch.bfloat16)
    assert cache.k_cache.dtype == cache.v_cache.dtype == torch.uint8
    assert cache.k_cache.shape == (3, 2, 16, 72)
    assert cache.v_cache.shape == (3, 2, 16, 25)
    assert cache.nbytes == 3 * 2 * 16 * (72 + 25)


@pytest.mark.parametrize(
    ("storage", "name"),
    [
        (None, "float32"),
        ("int8", "int8"),
        (torch.float16, "float16"),
        (("int8", torch.bfloat16), "int8/bfloat16"),
        (["int4", "int4"], "int4"),
        ("float32/int4", "float32/int4"),
    ],
)
def test_storage_is_told_by_name(storage, name):
    cache = KVCache(1, 2, 4, 16, storage=storage)
    assert cache.storage == cache.copy().storage == cache.meta_state["storage"] == name


def test_repr_says_what_it_is():
    cache = KVCache(1, 2, 4, 16)
    cache.update(ones(3), ones(3))
    assert repr(cache) == (
        "KVCache(batch_size=1, num_heads=2, head_dim=4, max_seq_len=16, dtype=float32, device=cpu, seq_len=3)"
    )
    narrow = KVCache(1, 2, 4, 16, v_head_dim=8, storage="float16")
    assert "v_head_dim=8, max_seq_len=16, dtype=float32, storage=float16, " in repr(narrow)
    assert "max_seq_len=16, dtype=float32, storage=int8/int4, " in repr(KVCache(1, 2, 4, 16, storage="int8/int4"))


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
    for count in (max(capacity - 1, 0), capacity):
        cache.reset()
        cache.append(ones(count), ones(count))
        assert cache.seq_len == count
    cache.reset()
    with pytest.raises(CacheFullError, match=f"0 of {capacity} tokens stored, {capacity + 1} more asked for"):
        cache.append(ones(capacity + 1), ones(capacity + 1))
    assert cache.seq_len == 0


def test_a_chunk_that_only_partly_fits_is_refused_whole():  # case B14
    cache = KVCache(1, 2, 4, 8)
    cache.update(ones(7), ones(7))
    before = cache.k_cache.clone(), cache.v_cache.clone()
    for store in (cache.update, cache.append):
        with pytest.raises(CacheFullError, match="7 of 8 tokens stored, 2 more asked for"):
            store(7 * ones(2), 7 * ones(2))
    assert cache.seq_len == 7
    assert torch.equal(cache.k_cache, before[0])
    assert torch.equal(cache.v_cache, before[1])


def test_last_queries_see_everything_before_them():  # case B1
    cache = KVCache(1, 1, 1, 4, torch.float64)
    cache.update(*mean_trick(4))
    for queries, expected in ((1, [2.5]), (2, [2.0, 2.5])):
        output = cache.attend(torch.ones(1, 1, queries, 1, dtype=torch.float64))
        assert output.flatten().tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", ["update", "append"])
def test_big_chunks_append_to_a_filled_cache(method):  # case C5
    cache = KVCache(1, 2, 4, 14)
    tokens = torch.randn(1, 2, 14, 4)
    for start, end in ((0, 1), (1, 5), (5, 14)):
        getattr(cache, method)(tokens[:, :, start:end], -tokens[:, :, start:end])
    k, v = cache.stored_rows()
    assert cache.seq_len == 14
    assert torch.equal(k, tokens)
    assert torch.equal(v, -tokens)


@pytest.mark.parametrize("storage", ["float16", "int8/int4"])
def test_resized_fits_whatever_holds_the_stored_tokens(storage):
    cache = KVCache(1, 2, 4, 16, storage=storage, v_head_dim=3)
    cache.append(ones(5), ones(5, head_dim=3))
    for capacity in (5, 6, 40):
        other = cache.resized(max_seq_len=capacity)
        assert (other.max_seq_len, other.seq_len, other.storage, other.v_head_dim) == (capacity, 5, storage, 3)
        assert all(torch.equal(*rows) for rows in zip(other.stored_rows(), cache.stored_rows(), strict=True))
    with pytest.raises(InvalidValueError, match=r"has 5 rows after 5 tokens; expected .* max_seq_len >= 5, which is 4"):
        cache.resized(max_seq_len=4)
    assert (cache.max_seq_len, cache.seq_len) == (16, 5)


def test_update_returns_views_of_the_buffers():
    cache = KVCache(1, 2, 4, 16)
    k, v = cache.update(ones(3), ones(3))
    assert k.shape == v.shape == (1, 2, 3, 4)
    assert k.data_ptr() == cache.k_cache.data_ptr()
    assert v.data_ptr() == cache.v_cache.data_ptr()


@pytest.mark.parametrize("storage", ["float16", "bfloat16", *ENCODED_STORAGES])
def test_update_returns_copies_of_rows_that_are_kept_in_another_form(storage):
    cache = KVCache(1, 2, 4, 16, storage=storage)
    k, v = cache.update(ones(3), 2 * ones(3))
    assert (k == 1).all()
    assert (v == 2).all()
    k.fill_(7)
    v.fill_(7)
    k, v = cache.update(ones(1), 2 * ones(1))
    assert k.dtype == v.dtype == torch.float32
    assert k.shape == v.shape == (1, 2, 4, 4)
    assert (k == 1).all()
    assert (v == 2).all()


@pytest.mark.parametrize("method", ["update", "append"])
def test_512_steps_allocate_nothing(method):  # case C12
    cache = KVCache(1, 2, 4, 512)
    k, v = ones(1), ones(1)
    store = getattr(cache, method)
    with CountAllocations() as count:
        for _ in range(512):
            store(k, v)
    assert count.allocated == 0


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_append_makes_no_copy_in_the_dtype_that_comes_out(storage):  # case C12
    cache = KVCache(1, 2, 4, 4100, storage=storage)
    cache.append(ones(4096), ones(4096))
    with CountAllocations() as count:
        cache.append(ones(1), ones(1))
    assert count.allocated <= 2 * ones(1).nbytes + cache.token_nbytes


@pytest.mark.parametrize("storage", [*FLOAT_STORAGES, *ENCODED_STORAGES])
def test_an_append_costs_the_same_however_much_is_stored(storage):  # case C12
    allocated, copied = set(), set()
    for length in (64, 4000):
        cache = KVCache(1, 2, 40, length + 1, storage=storage)
        cache.append(ones(length, head_dim=40), ones(length, head_dim=40))
        k, v = ones(1, head_dim=40), ones(1, head_dim=40)
        with CountAllocations() as count:
            cache.append(k, v)
        allocated.add(count.allocated)
        copied.add(count.copied)
    assert len(allocated) == len(copied) == 1


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
