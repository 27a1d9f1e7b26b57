"""What ends early: requests that are cancelled, and engines that are closed, dropped, or at work when all ends."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvcache import EngineClosedError
from kvcache.engine import Engine
from tests.engine.engines import LONG, check_idle, collected, limited, run_async, scheduler_of, text_of, until
from tests.engine.texts import TIMEOUT, cold, ids_of
from tests.hf.tiny_models import llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_k3_closing_a_stream_early_cancels_it(engine, num_read):
    """K3: also before its first piece."""
    pieces = engine.stream(ids_of(5), max_new_tokens=LONG)
    for _ in range(num_read):
        next(pieces)
    pieces.close()
    until(lambda: scheduler_of(engine).is_idle)
    check_idle(engine)
    assert len(limited(list, pieces)) < LONG


def test_a_stream_that_is_dropped_is_cancelled(engine):
    pieces = engine.stream(ids_of(5), max_new_tokens=LONG)
    next(pieces)
    job = weakref.ref(pieces._job)
    del pieces
    until(lambda: scheduler_of(engine).is_idle)
    check_idle(engine)
    until(lambda: collected(job))


def test_a_job_can_be_waited_for_cancelled_and_asked(engine, model):
    job = engine.submit(ids_of(5), max_new_tokens=LONG)
    with pytest.raises(TimeoutError):
        job.result(timeout=0)
    assert not job.is_done
    job.cancel()
    (completion,) = job.result(TIMEOUT)
    assert job.is_done
    assert completion.finish_reason == "cancelled"
    assert completion.token_ids == cold(model, ids_of(5), len(completion.token_ids))
    job.cancel()
    check_idle(engine)


def test_k3_a_thousand_random_cancels_leak_nothing(engine, model):
    """K3: waiting, running, streamed, from several threads, and twice."""
    pick = random.Random(0)
    under_way = []
    with ThreadPoolExecutor(4) as threads:
        for number in range(1000):
            given = {"max_new_tokens": pick.randint(1, 40)}
            if number % 7 == 0:
                given |= {"num_return_sequences": 2, "do_sample": True}
            under_way.append(engine.submit(ids_of(pick.randint(1, 12), pick.randint(0, 9)), **given))
            if len(under_way) > 12:
                job = under_way.pop(pick.randrange(len(under_way)))
                threads.submit(job.cancel)
                if number % 5 == 0:
                    threads.submit(job.cancel)
                    threads.submit(list, job)
        for job in under_way:
            job.cancel()
    for job in under_way:
        assert job.result(TIMEOUT)
    until(lambda: scheduler_of(engine).is_idle)
    check_idle(engine)
    assert engine.generate(ids_of(5), max_new_tokens=4).token_ids == cold(model, ids_of(5), 4)


def test_close_ends_everything_with_an_error(model, tokenizer):
    engine = Engine(model, tokenizer, memory="200kB", block_size=4, max_running=2)
    jobs = [engine.submit(ids_of(5, seed), max_new_tokens=LONG) for seed in range(5)]
    pieces = engine.stream(ids_of(5), max_new_tokens=LONG)
    limited(engine.close)
    for job in jobs:
        with pytest.raises(EngineClosedError, match="closed before the request had ended"):
            job.result(TIMEOUT)
        job.cancel()
    with pytest.raises(EngineClosedError):
        limited(list, pieces)
    pieces.close()
    limited(engine.close)
    for function in (engine.generate, engine.stream, engine.submit):
        with pytest.raises(EngineClosedError, match="make another one"):
            function(ids_of(3))
    with pytest.raises(EngineClosedError):
        limited(lambda: engine.statistics)
    with pytest.raises(EngineClosedError):
        run_async(engine.agenerate(ids_of(3)))
    assert isinstance(engine.generate_many([ids_of(3)], return_exceptions=True)[0], EngineClosedError)
    assert scheduler_of(engine).pool.sequences == []


def test_close_while_many_threads_submit_never_hangs(model, tokenizer):
    for delay in (0.0, 0.001, 0.01, 0.03):
        engine = Engine(model, tokenizer, memory="200kB", block_size=4)

        def work(number, engine=engine):
            while True:
                engine.generate(ids_of(3, number), max_new_tokens=3)

        with ThreadPoolExecutor(6) as threads:
            futures = [threads.submit(work, number) for number in range(6)]
            time.sleep(delay)
            limited(engine.close)
            for future in futures:
                with pytest.raises(EngineClosedError):
                    future.result(TIMEOUT)


def test_a_fault_in_the_scheduler_ends_all_requests_with_it(model, tokenizer, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    engine = Engine(model, tokenizer, memory="200kB", block_size=4)
    jobs = [engine.submit(ids_of(5, seed), max_new_tokens=LONG) for seed in range(3)]
    pieces = iter(jobs[0])
    next(pieces)

    def fail():
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(scheduler_of(engine), "_admit", fail)
    for job in jobs:
        with pytest.raises((ZeroDivisionError, EngineClosedError)):
            job.result(TIMEOUT)
    until(lambda: not engine._worker._thread.is_alive())
    with pytest.raises(EngineClosedError):
        engine.submit(ids_of(3))


def test_books_that_are_wrong_leave_nobody_waiting(model, tokenizer, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = Engine(model, tokenizer, memory="200kB", block_size=4)
    scheduler, told = scheduler_of(engine), threading.Event()

    def fail(*_):
        told.wait(TIMEOUT)
        raise RuntimeError("books are wrong")

    for name in ("_admit", "cancel", "_stop"):
        monkeypatch.setattr(scheduler, name, fail)
    jobs = [engine.submit(ids_of(5), max_new_tokens=LONG) for _ in range(3)]
    for job in jobs:
        job.cancel()
    told.set()
    for job in jobs:
        with pytest.raises((RuntimeError, EngineClosedError)):
            job.result(TIMEOUT)
    until(lambda: not engine._worker._thread.is_alive())


def test_a_forward_that_fails_leaves_the_engine_usable(model, tokenizer):
    fails = []
    hook = model.lm_head.register_forward_pre_hook(lambda *_: fails.pop()() if fails else None)

    def fail():
        raise RuntimeError("out of memory")

    try:
        with Engine(model, tokenizer, memory="200kB", block_size=4) as engine:
            fails.append(fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.generate(ids_of(5), max_new_tokens=4)
            assert engine.generate(ids_of(5), max_new_tokens=4).token_ids == cold(model, ids_of(5), 4)
            check_idle(engine)
    finally:
        hook.remove()


def test_an_engine_that_is_dropped_goes_with_its_thread_and_its_memory(tokenizer):
    model = llama()
    engine = Engine(model, tokenizer, memory="200kB", block_size=4)
    engine.generate(ids_of(5), max_new_tokens=3)
    thread, pool, gone = engine._worker._thread, weakref.ref(scheduler_of(engine).pool), weakref.ref(engine)
    del engine
    until(lambda: collected(gone))  # once the thread has left the step of the request
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert collected(pool)
    gone = weakref.ref(model)
    del model
    assert collected(gone)


def test_a_stream_keeps_its_engine(model, tokenizer):
    pieces = Engine(model, tokenizer, memory="200kB", block_size=4).stream(ids_of(5), max_new_tokens=20)
    gc.collect()
    assert "".join(limited(list, pieces)) == text_of(cold(model, ids_of(5), 20))


def test_an_interrupt_of_generate_cancels_the_request(engine, monkeypatch):
    from kvcache.engine.job import Job

    def interrupted(job, timeout=None):
        until(lambda: scheduler_of(engine).running)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Job, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(ids_of(5), max_new_tokens=LONG)
        with pytest.raises(KeyboardInterrupt):
            engine.generate_many([ids_of(5), ids_of(6)], max_new_tokens=LONG)
    until(lambda: scheduler_of(engine).is_idle)
    check_idle(engine)


EXIT = """
import threading
from tests.engine.texts import ids_of, words
from tests.hf.tiny_models import llama
from kvcache.engine import Engine

engine = Engine(llama(max_position_embeddings=10**6), words(), memory="50MB")
pieces = engine.stream(ids_of(5), max_new_tokens=50_000)
print(next(pieces))
job = engine.submit(ids_of(6), max_new_tokens=50_000)
thread = threading.Thread(target=lambda: print(next(iter(engine.stream(ids_of(7), max_new_tokens=9)))))
thread.start()
"""


def test_a_process_ends_with_an_engine_at_work():
    """With a stream that is open, an engine that nobody closed, and a thread that still uses it."""
    ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=2 * TIMEOUT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.split()) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_in_a_fork_of_the_process_it_is_closed(engine):
    """The thread is not there, and nobody would ever answer; neither are those that the caller computed with."""
    torch.set_num_threads(2)  # which the fixture takes back
    torch.randn(3_000_000).exp()
    child = os.fork()
    if child == 0:
        try:
            engine.generate(ids_of(3))
        except EngineClosedError:
            os._exit(7)
        finally:
            os._exit(1)
    ended = []
    try:
        until(lambda: ended.append(os.waitpid(child, os.WNOHANG)) or ended[-1][0])
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(ended[-1][1]) == 7
    assert len(engine.generate(ids_of(3), max_new_tokens=2).token_ids) == 2
