"""What is a paged cache's own: which blocks are shared, copied and used again, and what they cost."""

import pytest
import torch

from kvcache import CacheFullError, InvalidTypeError, InvalidValueError, KVCache, PagedCache, native
from tests.allocations import CountAllocations
from tests.oracle import assert_close, attend_rows
from tests.storage.caches import ENCODED_STORAGES, FLOAT_STORAGES, random_tokens
from tests.storage.histories import NAN, content, random_queries

STORAGES = [*FLOAT_STORAGES, *ENCODED_STORAGES]


def ones(count, batch=1, heads=2, head_dim=4):
    return torch.ones(batch, heads, count, head_dim)


def with_tokens(count, batch=1, block_size=4, **options):
    """Return a cache of `count` random tokens, and these."""
    cache = PagedCache(batch, 2, 4, block_size, torch.float64, **options)
    k, v = random_tokens(count, batch=batch)
    cache.append(k, v)
    return cache, k, v


def append_random(cache, count, seed=1):
    """Append random tokens and return them."""
    tokens = random_tokens(count, batch=cache.batch_size, seed=seed)
    cache.append(*tokens)
    cache.check()
    return tokens


def tables(cache):
    """Return the ids of the blocks of every row of the batch."""
    return [cache.blocks(row) for row in range(cache.batch_size)]


def holders(cache):
    """Return how many rows of the batch hold each block."""
    return [cache.num_holders(block) for block in range(cache.num_blocks)]


def snapshot(cache):
    """Return everything that a failing call must leave as it is."""
    return content(cache), tables(cache), holders(cache), cache.num_free, cache.nbytes


def poison_free_blocks(cache):
    """Fill the blocks that nobody holds with what reads as NaN."""
    for block in range(cache.num_blocks):
        if cache.num_holders(block) == 0:
            for buffer in (cache.k_cache, cache.v_cache):
                buffer[block].fill_(255 if buffer.dtype == torch.uint8 else NAN)


def test_attributes_are_as_given():
    cache = PagedCache(3, 2, 4, 16, torch.bfloat16, "cpu", v_head_dim=5, max_seq_len=99)
    assert (cache.batch_size, cache.num_heads, cache.head_dim, cache.block_size) == (3, 2, 4, 16)
    assert (cache.v_head_dim, cache.dtype, cache.device) == (5, torch.bfloat16, torch.device("cpu"))
    assert (cache.max_seq_len, cache.num_blocks, cache.num_free, cache.nbytes) == (99, 0, 0, 0)
    cache.append(ones(17, batch=3), ones(17, batch=3, head_dim=5))
    assert cache.k_cache.shape == (6, 2, 16, 4)
    assert cache.v_cache.shape == (6, 2, 16, 5)
    assert cache.nbytes == 6 * 2 * 16 * (4 + 5) * 2
    assert PagedCache(1, 2, 4).block_size == 64
    assert PagedCache(1, 2, 4).max_seq_len is None


def test_repr_says_what_it_is():
    cache = PagedCache(1, 2, 4, storage="int8")
    assert repr(cache) == (
        "PagedCache(batch_size=1, num_heads=2, head_dim=4, block_size=64, max_seq_len=None, dtype=float32, "
        "storage=int8, device=cpu, seq_len=0)"
    )


def test_bad_sizes_and_ids_are_named():
    for options, error, message in (
        ({"block_size": 0}, InvalidValueError, "block_size is 0"),
        ({"block_size": 4.0}, InvalidTypeError, "block_size is a float"),
        ({"max_seq_len": -1}, InvalidValueError, "max_seq_len is -1"),
        ({"max_seq_len": "9"}, InvalidTypeError, "max_seq_len is a str"),
    ):
        with pytest.raises(error, match=message):
            PagedCache(1, 2, 4, **options)
    cache, _, _ = with_tokens(5)
    for act, error, message in (
        (lambda: cache.blocks(1), InvalidValueError, "row is 1; expected one of the 1"),
        (lambda: cache.blocks("0"), InvalidTypeError, "row is a str"),
        (lambda: cache.num_holders(2), InvalidValueError, "block is 2; expected one of the 2"),
        (lambda: cache.num_holders(-1), InvalidValueError, "block is -1"),
    ):
        with pytest.raises(error, match=message):
            act()


def test_rows_of_the_batch_take_blocks_in_turn():
    cache, _, _ = with_tokens(9, batch=2)
    assert tables(cache) == [[0, 1, 2], [3, 4, 5]]
    append_random(cache, 3)
    assert tables(cache) == [[0, 1, 2], [3, 4, 5]]
    append_random(cache, 1)
    assert tables(cache) == [[0, 1, 2, 6], [3, 4, 5, 7]]
    assert holders(cache) == [1] * 8


def test_a_write_into_a_shared_open_block_copies_that_block_alone():
    cache, k, v = with_tokens(10)
    cache.repeat(3)
    assert tables(cache) == [[0, 1, 2]] * 3
    assert holders(cache) == [3, 3, 3]
    new = append_random(cache, 1)
    assert tables(cache) == [[0, 1, 3], [0, 1, 4], [0, 1, 2]]  # of equals the last keeps the block
    assert holders(cache) == [3, 3, 1, 1, 1]
    append_random(cache, 1, seed=2)
    assert tables(cache) == [[0, 1, 3], [0, 1, 4], [0, 1, 2]]  # from now on each writes its own
    cache.rollback(1)
    for rows, past, tokens in zip(cache.stored_rows(), (k, v), new, strict=True):
        assert torch.equal(rows, torch.cat([past.expand(3, -1, -1, -1), tokens], dim=2))


def test_shared_full_blocks_are_never_copied():
    cache, _, _ = with_tokens(8)
    cache.repeat(2)
    append_random(cache, 5)
    assert tables(cache) == [[0, 1, 2, 3], [0, 1, 4, 5]]
    assert holders(cache) == [2, 2, 1, 1, 1, 1]


def test_reordered_rows_share_and_dropped_ones_give_their_blocks_back():
    cache, _, _ = with_tokens(6)
    cache.repeat(3)
    append_random(cache, 1)
    assert tables(cache) == [[0, 2], [0, 3], [0, 1]]
    cache.reorder([1, 1, 0])
    cache.check()
    assert tables(cache) == [[0, 3], [0, 3], [0, 2]]
    assert holders(cache) == [3, 0, 1, 2]
    append_random(cache, 1, seed=2)
    assert tables(cache) == [[0, 1], [0, 3], [0, 2]]  # block 1, which was free, is the only copy
    assert cache.num_blocks == 4
    cache.select([2])
    cache.check()
    assert tables(cache) == [[0, 2]]
    assert cache.num_free == 2


def test_a_rollback_into_a_shared_block_copies_it_at_the_next_append():
    cache, k, _ = with_tokens(10)
    cache.repeat(2)
    append_random(cache, 1)
    cache.rollback(4)  # into block 1, which both hold
    assert tables(cache) == [[0, 1], [0, 1]]
    new_k, _ = append_random(cache, 1)
    assert holders(cache)[:2] == [2, 1]
    assert len({table[1] for table in tables(cache)}) == 2
    assert torch.equal(cache.stored_rows()[0], torch.cat([k[:, :, :7].expand(2, -1, -1, -1), new_k], dim=2))


def test_freed_blocks_are_used_again_before_new_ones():
    cache, _, _ = with_tokens(12)
    size = cache.nbytes
    cache.rollback(5)
    assert (tables(cache), cache.num_free) == ([[0, 1]], 1)
    append_random(cache, 2)
    assert tables(cache) == [[0, 1, 2]]
    cache.reset()
    assert (tables(cache), cache.num_free) == ([[]], 3)
    append_random(cache, 12)
    assert cache.nbytes == size
    assert sorted(cache.blocks(0)) == [0, 1, 2]


@pytest.mark.parametrize("storage", STORAGES)
def test_four_beams_hold_the_prompt_once(storage):
    k, v = random_tokens(1002, batch=1)
    cache = PagedCache(1, 2, 4, block_size=16, storage=storage)
    cache.append(k, v)
    stored, token = cache.stored_nbytes, cache.token_nbytes
    assert stored == 1002 * token
    cache.repeat(4)
    assert cache.stored_nbytes == stored
    for step in range(3):
        cache.append(*random_tokens(1, batch=4, seed=step))
    assert cache.num_blocks - cache.num_free == 63 + 3  # 1002 tokens are 62 blocks and 10 rows
    assert cache.stored_nbytes == (62 * 16 + 4 * 13) * token
    assert cache.nbytes <= 1.25 * 66 * 16 * token
    assert cache.copy().stored_nbytes == cache.stored_nbytes
    for step in range(20):
        cache.reorder([step % 4, 1, 1, 2])
        cache.append(*random_tokens(1, batch=4, seed=step))
    cache.check()
    assert cache.nbytes <= 1.3 * 70 * 16 * token
    unshared = KVCache(4, 2, 4, 1025, storage=storage)
    assert unshared.nbytes > 3 * cache.nbytes


def test_growth_keeps_what_is_stored_and_is_amortised():
    cache, k, v = with_tokens(1)
    sizes = [1]
    for step in range(1, 400):
        new = append_random(cache, 1, seed=step)
        k, v = (torch.cat(parts, dim=2) for parts in zip((k, v), new, strict=True))
        if cache.num_blocks != sizes[-1]:
            sizes.append(cache.num_blocks)
    assert sizes == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33, 41, 51, 63, 78, 97, 121]
    for rows, expected in zip(cache.stored_rows(), (k, v), strict=True):
        assert torch.equal(rows, expected)
    q = random_queries(1, batch=1)
    assert_close(cache.attend(q), attend_rows(q, k, v)[0])


def test_a_limit_bounds_the_blocks_too():
    cache, _, _ = with_tokens(0, batch=2, max_seq_len=22)
    for step in range(22):
        append_random(cache, 1, seed=step)
    assert cache.num_blocks <= 2 * 6
    with pytest.raises(CacheFullError) as refused:
        cache.append(*random_tokens(1))
    assert str(refused.value) == (
        "PagedCache is full: 22 of 22 tokens stored, 1 more asked for; create it with max_seq_len >= 23"
    )


def test_tokens_that_do_not_fit_change_nothing():
    for max_seq_len in (0, 5, 8):
        cache, _, _ = with_tokens(max_seq_len, max_seq_len=max_seq_len)
        for _ in range(2):
            cache.repeat(2)  # whoever appends must first take copies
            before = snapshot(cache)
            for count in (1, 2, 9):
                with pytest.raises(CacheFullError, match=f"{max_seq_len} of {max_seq_len} tokens stored, {count} more"):
                    cache.append(*random_tokens(count, batch=cache.batch_size))
                assert snapshot(cache) == before
        cache.check()


def test_a_step_that_fails_while_it_is_stored_changes_nothing(monkeypatch):
    cache, _, _ = with_tokens(7)
    cache.repeat(3)
    for count in (1, 9):
        before = content(cache), tables(cache)
        for method in ("copy_blocks", "scatter"):
            with monkeypatch.context() as patch:
                patch.setattr(type(cache._store), method, lambda *_: exec("raise MemoryError"))
                with pytest.raises(MemoryError):
                    cache.append(*random_tokens(count, batch=3))
            assert (content(cache), tables(cache)) == before
            cache.check()
    append_random(cache, 9)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("queries", [1, 3, 12])
def test_free_blocks_and_free_rows_are_never_read(storage, queries):
    cache, other = PagedCache(2, 2, 4, 4, storage=storage), KVCache(2, 2, 4, 64, storage=storage)
    k, v = random_tokens(30)
    cache.append(k, v)
    cache.append(torch.full_like(k, NAN), torch.full_like(v, NAN))
    cache.rollback(30 + 7)
    poison_free_blocks(cache)
    other.append(k[:, :, :23], v[:, :, :23])
    for count in (0, 1, 5, 12):
        new = random_tokens(count, seed=count)
        cache.append(*new)
        other.append(*new)
        poison_free_blocks(cache)
        for starts in (None, [3, 0]):
            q = random_queries(queries).float()
            output = cache.attend(q, starts=starts)
            assert output.isfinite().all()
            assert_close(output, other.attend(q, starts=starts))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_the_bits_that_a_contiguous_cache_stores(storage, dtype):
    cache, other = (
        PagedCache(2, 2, 40, 4, v_head_dim=33, storage=storage),
        KVCache(2, 2, 40, 99, v_head_dim=33, storage=storage),
    )
    for step, count in enumerate((3, 1, 1, 17, 1, 0, 4)):
        new = [rows.to(dtype) for rows in random_tokens(count, head_dim=40, v_head_dim=33, seed=step)]
        returned = cache.update(*new), other.update(*new)
        for rows, expected in zip(*returned, strict=True):
            assert rows.is_contiguous()
            assert torch.equal(rows, expected)
        for rows, expected in zip(cache.stored_rows(), other.stored_rows(), strict=True):
            assert torch.equal(rows, expected)
        cache.reorder([1, 0])
        other.reorder([1, 0])


def test_a_state_holds_only_valid_rows_and_comes_back_without_free_blocks():
    cache, _, _ = with_tokens(30)
    cache.repeat(2)
    append_random(cache, 1)
    cache.rollback(12)
    other = PagedCache.from_state(cache.state, cache.meta_state)
    other.check()
    assert cache.state["k"].shape == (2, 2, 19, 4)
    assert content(other) == content(cache)
    assert other.num_blocks == 10
    assert holders(other) == [1] * 10


def test_a_copy_shares_blocks_among_its_rows_and_none_with_the_original():
    cache, _, _ = with_tokens(10)
    cache.repeat(2)
    other = cache.copy()
    other.check()
    assert (tables(other), holders(other)) == (tables(cache), holders(cache))
    before = snapshot(cache)
    append_random(other, 9)
    assert snapshot(cache) == before
    append_random(cache, 1)
    assert tables(other)[0][:2] == tables(cache)[0][:2] == [0, 1]


def test_a_token_costs_the_same_however_much_is_stored():
    counts = set()
    for length in (2, 4002):
        cache, _, _ = with_tokens(length, batch=2)
        append_random(cache, 1)
        k, v = random_tokens(1)
        q = random_queries(1)
        if native.kernels is not None:
            k, v, q = k.float(), v.float(), q.float()
            cache = PagedCache(2, 2, 4, 4)
            cache.append(*random_tokens(length + 1))
        with CountAllocations() as count:
            cache.append(k, v)
            if native.kernels is not None:
                cache.attend(q)
        counts.add((count.allocated, count.copied))
    assert len(counts) == 1


def test_blocks_are_kept_where_they_are_until_more_are_needed():
    cache, _, _ = with_tokens(12)
    address = cache.k_cache.data_ptr()
    cache.rollback(6)
    cache.reorder([0])
    append_random(cache, 6)
    cache.reset()
    append_random(cache, 12)
    assert cache.k_cache.data_ptr() == address
    append_random(cache, 1)
    assert cache.k_cache.data_ptr() != address


def test_gradients_of_queries_survive_later_steps():
    cache, k, v = with_tokens(6)
    q = random_queries(2, batch=1).requires_grad_()
    output = cache.attend(q)
    cache.rollback(3)
    append_random(cache, 9)
    cache.reset()
    output.sum().backward()
    fresh = q.detach().clone().requires_grad_()
    expected = torch.autograd.grad(attend_rows(fresh, k, v)[0].sum(), fresh)[0]
    assert torch.allclose(q.grad, expected, rtol=1e-9, atol=1e-12)
