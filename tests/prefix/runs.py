"""Texts run through a pool with a prefix cache, every output checked against attention over the text's own history."""

from kvcache.prefix import PrefixCache
from tests.storage.pools import append_only, check_extend, new_pool


def new_cache(num_blocks=40, block_size=4, model=None, **options):
    spec = {key: options.pop(key) for key in ("spec", "storage") if key in options}
    pool = new_pool(num_blocks=num_blocks, block_size=block_size, **spec)
    return PrefixCache(pool, model, **options)


def start(prefixes, tokens, namespace=None, chunk=None, **options):
    """Acquire a text and run the rest of it, in chunks if asked; return the sequence, and how many tokens were reused.

    Rows and outputs are checked, and all books.
    """
    sequence = prefixes.acquire(tokens, namespace, **options)
    reused = sequence.seq_len
    assert sequence.tokens == list(tokens[:reused])
    for first in range(reused, len(tokens), chunk or len(tokens)):
        check_extend(prefixes.pool, {sequence: list(tokens[first : first + (chunk or len(tokens))])})
    return sequence, reused


def run(prefixes, tokens, namespace=None, **options):
    """Run a text as `start` does, publish it and free it; return how many tokens were reused."""
    sequence, reused = start(prefixes, tokens, namespace, **options)
    prefixes.publish(sequence)
    sequence.free()
    prefixes.pool.check()
    return reused


def store(prefixes, tokens, namespace=None, **options):
    """Run a text as `run` does, without attention and checks."""
    sequence = prefixes.acquire(tokens, namespace, **options)
    reused = sequence.seq_len
    append_only(prefixes.pool, {sequence: tokens[reused:]})
    prefixes.publish(sequence)
    sequence.free()
    return reused


def nodes(prefixes):
    """Return all nodes but the roots."""
    return [node for root in prefixes._roots.values() for node in root.below()]


def kept_blocks(prefixes, kind="full"):
    """Return the ids of the blocks that are kept, in ascending order."""
    return sorted(prefixes._tree.queues[kind].blocks)
