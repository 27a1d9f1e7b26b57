"""Forks of any cache: independent of each other whatever each does, and of blocks nothing is lost."""

import gc
import random
import threading

import pytest
import torch

from kvcache import CacheFullError, KVCache, PagedCache
from tests.storage.caches import COPIES, STORED_KINDS, random_tokens
from tests.storage.histories import check_attends_like_the_history, content, every_kind, every_plain_kind, filled

ACTS = {
    "nothing": lambda cache, kind: None,
    "append": lambda cache, kind: cache.append(*kind.tokens(3, batch=cache.batch_size, seed=5)),
    "roll back": lambda cache, kind: cache.rollback(1),
    "roll back and append": lambda cache, kind: (cache.rollback(1), cache.append(*kind.tokens(2, seed=6))),
    "reorder": lambda cache, kind: cache.reorder([1, 1]),
    "repeat": lambda cache, kind: cache.repeat(2),
    "select": lambda cache, kind: cache.select([1]),
    "reset": lambda cache, kind: cache.reset(),
    "restore": lambda cache, kind: cache._restore(*random_stored(cache), cache.seq_len),
}


def random_stored(cache):
    return [torch.flip(rows, [0]).clone() for rows in cache.stored_rows()]


def check_blocks(*caches):
    for cache in caches:
        if isinstance(cache, PagedCache):
            cache.check()


@every_kind
@pytest.mark.parametrize("length", [0, 8, 11])
def test_a_fork_holds_the_same_and_each_goes_on_by_itself(kind, length):  # case C14
    cache, k, v = filled(kind, length)
    before = content(cache)
    other = cache.fork()
    assert type(other) is type(cache)
    assert repr(other) == repr(cache)
    assert content(other) == content(cache) == before
    for step in range(3):  # in turn, so that each grows over what the other wrote
        for branch, seed in ((cache, 1), (other, 2)):
            branch.append(*kind.tokens(2, seed=10 * step + seed))
            check_blocks(cache, other)
    for branch, seed in ((cache, 1), (other, 2)):
        new = zip(*(kind.tokens(2, seed=10 * step + seed) for step in range(3)), strict=True)
        history = [torch.cat([old, *parts], dim=2) for old, parts in zip((k, v), new, strict=True)]
        check_attends_like_the_history(branch, kind, *history)


@every_plain_kind
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("who", ["the fork", "the original"])
def test_whatever_one_does_leaves_the_other_as_it_was(kind, act, who):
    cache, k, v = filled(kind, 10)
    other = cache.fork()
    actor, witness = (other, cache) if who == "the fork" else (cache, other)
    before = content(witness)
    ACTS[act](actor, kind)
    check_blocks(cache, other)
    assert content(witness) == before
    check_attends_like_the_history(witness, kind, k, v)
    new = kind.tokens(2, seed=9)
    witness.append(*new)
    check_blocks(cache, other)
    history = [torch.cat(parts, dim=2) for parts in zip((k, v), new, strict=True)]
    check_attends_like_the_history(witness, kind, *history)


@every_kind
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_fork_share_nothing_with_the_family(kind, way):
    cache, _, _ = filled(kind, 10)
    other = cache.fork()
    other.append(*kind.tokens(2, seed=3))
    copied = COPIES[way](other)
    expected = content(other)
    assert content(copied) == expected
    assert copied.stored_nbytes == other.stored_nbytes
    if isinstance(cache, PagedCache):
        assert (copied.num_blocks, copied.num_free) == (2 * len(copied.blocks(0)), 0)
        assert copied._family is None
    cache.append(*kind.tokens(3, seed=4))
    other.reset()
    check_blocks(copied, cache, other)
    assert content(copied) == expected


paged = pytest.mark.parametrize("kind", [kind for kind in STORED_KINDS if kind.grows], ids=str)


@paged
def test_a_fork_moves_no_row_and_gives_its_blocks_back_when_it_is_let_go(kind):
    cache, _, _ = filled(kind, 11)
    address, used = cache.k_cache.data_ptr(), cache.num_blocks - cache.num_free
    other = cache.fork()
    assert other.k_cache.data_ptr() == address == cache.k_cache.data_ptr()
    assert cache.num_blocks - cache.num_free == used
    assert [cache.num_holders(block) for block in cache.blocks(0)] == [2] * len(cache.blocks(0))
    other.append(*kind.tokens(9, seed=1))
    assert other.k_cache.data_ptr() == cache.k_cache.data_ptr()  # both see that there are more blocks now
    in_all = cache.num_blocks
    assert cache.num_blocks - cache.num_free > used
    del other
    assert cache.num_blocks - cache.num_free == used
    assert cache.num_blocks == in_all
    assert [cache.num_holders(block) for block in cache.blocks(0)] == [1] * len(cache.blocks(0))
    cache.check()


@paged
def test_a_fork_outlives_its_original(kind):
    cache, k, v = filled(kind, 10)
    other = cache.fork()
    cache.append(*kind.tokens(6, seed=1))
    del cache
    other.check()
    assert other.num_blocks - other.num_free == len(other._held)
    check_attends_like_the_history(other, kind, k, v)
    other.append(*kind.tokens(1, seed=2))
    other.check()


@paged
def test_a_reset_gives_back_what_forks_do_not_hold(kind):
    cache, _, _ = filled(kind, 12)
    other = cache.fork()
    cache.append(*kind.tokens(12, seed=1))
    used = cache.num_blocks - cache.num_free
    cache.reset()
    other.check()
    assert other.num_blocks - other.num_free == len(other._held) < used
    other.reset()
    assert cache.num_free == cache.num_blocks


def test_many_forks_that_come_and_go_leave_no_block_behind():
    acts = random.Random(0)
    cache = PagedCache(1, 2, 4, 4)
    cache.append(*random_tokens(18, batch=1))
    forks = [cache]
    for step in range(300):
        branch = acts.choice(forks)
        act = acts.choice(["fork", "append", "roll back", "let go"])
        if act == "fork" and len(forks) < 6:
            forks.append(branch.fork())
        elif act == "append" and branch.seq_len < 60:
            branch.append(*random_tokens(acts.randint(1, 7), batch=1, seed=step))
        elif act == "roll back":
            branch.rollback(acts.randint(0, branch.seq_len))
        elif act == "let go" and len(forks) > 1:
            forks.remove(branch)
        del branch
        acts.choice(forks).check()
    survivor = forks[0]
    forks.clear()
    del cache
    assert survivor.num_blocks - survivor.num_free == len(survivor.blocks(0))
    assert survivor.num_blocks < 120
    survivor.check()


def test_a_fork_that_is_let_go_in_a_cycle_or_in_a_thread_is_counted_out_once():
    cache = PagedCache(1, 2, 4, 4)
    cache.append(*random_tokens(10, batch=1))
    other = cache.fork()
    other.itself = other
    del other
    gc.collect()
    assert [cache.num_holders(block) for block in cache.blocks(0)] == [1, 1, 1]
    held = [cache.fork() for _ in range(20)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    cache.check()
    cache._leave()
    cache._leave()  # a second time is none
    assert cache.num_free == cache.num_blocks


def test_forks_may_need_more_blocks_than_one_cache_of_the_limit():
    cache = PagedCache(1, 2, 4, 4, max_seq_len=10)
    cache.append(*random_tokens(10, batch=1))
    forks = [cache.fork() for _ in range(3)]
    for seed, fork in enumerate(forks):
        fork.rollback(9)
        fork.append(*random_tokens(9, batch=1, seed=seed))
        with pytest.raises(CacheFullError):
            fork.append(*random_tokens(1, batch=1))
        fork.check()
    assert cache.num_blocks - cache.num_free == 12


def test_stored_bytes_are_those_of_the_cache_asked_and_not_of_its_forks():
    cache = PagedCache(1, 2, 4, 4)
    cache.append(*random_tokens(10, batch=1))
    other = cache.fork()
    other.append(*random_tokens(7, batch=1))
    assert cache.stored_nbytes == 10 * cache.token_nbytes
    assert other.stored_nbytes == 17 * other.token_nbytes
    assert other.nbytes == cache.nbytes == 6 * 4 * cache.token_nbytes  # 2 full ones, 2 open ones of 2, 2 more


def test_another_device_is_for_the_cache_that_is_moved_alone():
    cache = PagedCache(1, 2, 4, 4)
    cache.append(*random_tokens(10, batch=1))
    before, other = content(cache), cache.fork()
    assert other.to("cpu") is other
    assert other.k_cache.data_ptr() == cache.k_cache.data_ptr()  # it was there already
    assert other.to("meta").device.type == "meta"
    assert cache.device.type == "cpu"
    assert [cache.num_holders(block) for block in cache.blocks(0)] == [1, 1, 1]
    cache.check()
    assert content(cache) == before
    assert other.num_blocks == 3
    again = other.fork()
    assert again.device.type == "meta"


def test_an_append_that_fails_in_a_fork_changes_neither(monkeypatch):
    cache = PagedCache(1, 2, 4, 4)
    cache.append(*random_tokens(10, batch=1))
    other = cache.fork()
    before = content(cache), content(other)
    for method in ("grow", "copy_blocks", "scatter"):
        with monkeypatch.context() as patch:
            patch.setattr(type(cache._store), method, lambda *_: exec("raise MemoryError"))
            with pytest.raises(MemoryError):
                other.append(*random_tokens(9, batch=1, seed=1))
        assert (content(cache), content(other)) == before
        cache.check()
        other.check()


def test_forks_of_a_contiguous_cache_are_copies():
    cache = KVCache(1, 2, 4, 16)
    cache.append(*random_tokens(10, batch=1))
    assert cache.fork().k_cache.data_ptr() != cache.k_cache.data_ptr()
