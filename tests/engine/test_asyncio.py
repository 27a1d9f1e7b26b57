"""The engine in asyncio: the same texts, and tasks that are cancelled take their requests with them."""

import asyncio
import threading

import pytest

from kvcache import InvalidValueError
from tests.engine.engines import LONG, check_idle, run_async, scheduler_of, text_of
from tests.engine.texts import cold, ids_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_asyncio_gives_the_same(engine, model):
    prompts = [ids_of(3 + seed, seed) for seed in range(4)]
    expected = [cold(model, ids, 4) for ids in prompts]

    async def main():
        assert (await engine.agenerate(prompts[0], max_new_tokens=4)).token_ids == expected[0]
        pieces = [piece async for piece in engine.astream(prompts[1], max_new_tokens=4)]
        assert "".join(pieces) == text_of(expected[1])
        found = await engine.agenerate_many(prompts, max_new_tokens=4)
        assert [completion.token_ids for completion in found] == expected
        found = await engine.agenerate_many([prompts[0], []], return_exceptions=True, max_new_tokens=4)
        assert isinstance(found[1], InvalidValueError)
        with pytest.raises(InvalidValueError):
            await engine.agenerate_many([prompts[0], []], max_new_tokens=4)
        with pytest.raises(InvalidValueError):
            await engine.agenerate([])

    run_async(main())
    check_idle(engine)


def test_k3_a_task_that_is_cancelled_cancels_its_requests_and_no_others(engine, model):
    """K3: waiting for a text, for many, and between two pieces of a stream."""

    async def stream():
        async for _ in engine.astream(ids_of(4, 2), max_new_tokens=LONG):
            pass

    async def main():
        other = asyncio.create_task(engine.agenerate(ids_of(6, 9), max_new_tokens=60))
        tasks = [
            asyncio.create_task(engine.agenerate(ids_of(4), max_new_tokens=LONG)),
            asyncio.create_task(engine.agenerate_many([ids_of(4, 3), ids_of(4, 4)], max_new_tokens=LONG)),
            asyncio.create_task(stream()),
        ]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await other).token_ids == cold(model, ids_of(6, 9), 60)
        assert scheduler_of(engine).requests == []

    run_async(main())
    check_idle(engine)


def test_a_stream_left_early_in_asyncio_is_cancelled(engine):
    async def main():
        pieces = engine.astream(ids_of(4), max_new_tokens=LONG)
        async for _ in pieces:
            break
        await pieces.aclose()
        while not scheduler_of(engine).is_idle:
            await asyncio.sleep(0.001)

    run_async(main())
    check_idle(engine)


def test_many_streams_in_asyncio_take_no_threads(engine, model):
    async def text(seed):
        return "".join([piece async for piece in engine.astream(ids_of(4, seed), max_new_tokens=8)])

    async def main():
        before = threading.active_count()
        found = await asyncio.gather(*map(text, range(50)))
        assert threading.active_count() == before
        return found

    assert run_async(main()) == [text_of(cold(model, ids_of(4, seed), 8)) for seed in range(50)]


def test_a_loop_that_ends_before_its_requests_does_no_harm(engine, model):
    async def main():
        task = asyncio.ensure_future(anext(engine.astream(ids_of(4), max_new_tokens=LONG)))
        await asyncio.sleep(0.01)
        return task

    asyncio.run(main())
    assert engine.generate(ids_of(5), max_new_tokens=4).token_ids == cold(model, ids_of(5), 4)
