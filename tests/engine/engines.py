"""Looks into an engine, and waits that end: what hangs fails."""

import asyncio
import gc
import threading
import time

from tests.engine.texts import TIMEOUT, word_of

LONG = 120  # new tokens, of a request that is ended early


def limited(function, *args, timeout=TIMEOUT, **options):
    """Call in a thread, so that what hangs fails."""
    results, errors = [], []

    def call():
        try:
            results.append(function(*args, **options))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
    return results[0]


def until(condition):
    """Wait until something is so."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "it never comes"
        time.sleep(0.001)


def collected(reference):
    gc.collect()
    return reference() is None


def scheduler_of(engine):
    return engine._worker._scheduler


def check_idle(engine):
    """Nothing runs, waits or holds a block; `call` acts between two steps, when all that was asked for is done."""

    def check():
        scheduler = scheduler_of(engine)
        assert scheduler.is_idle
        assert scheduler.requests == []
        assert scheduler.pool.sequences == []
        assert scheduler.pool.num_available == scheduler.pool.num_blocks
        scheduler.pool.check()

    limited(engine._worker.call, check)


def text_of(new):
    return " ".join(map(word_of, new))


def run_async(task):
    async def limit():
        return await asyncio.wait_for(task, TIMEOUT)

    return asyncio.run(limit())
