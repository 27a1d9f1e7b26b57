"""A generation in a thread that moves only when it is asked to."""

import threading
import time

import pytest
import torch

from kvcache.hf.stepwise import stepwise

CPU = torch.device("cpu")


def counting(log, steps=5):
    """Return what hands its prompt and then 0, 1, 2 ... to a streamer, as `generate` does, and notes each step."""

    def generate(streamer):
        streamer.put(torch.tensor([[7, 7]]))
        for step in range(steps):
            log.append(step)
            streamer.put(torch.tensor([step]))
        streamer.end()
        log.append("end")

    return generate


def test_tokens_come_step_by_step_and_none_is_computed_before_it_is_asked_for():
    log = []
    steps = stepwise(counting(log), CPU)
    assert log == []
    for step in range(5):
        assert next(steps) == [step]
        time.sleep(0.002)
        assert log == list(range(step + 1))
    with pytest.raises(StopIteration):
        next(steps)
    assert log[-1] == "end"


def test_closing_ends_the_thread_at_its_step():
    log, before = [], threading.active_count()
    steps = stepwise(counting(log), CPU)
    assert [next(steps), next(steps)] == [[0], [1]]
    assert threading.active_count() == before + 1
    steps.close()
    assert threading.active_count() == before
    assert log == [0, 1]


def test_closing_one_that_was_not_begun_starts_nothing():
    log = []
    stepwise(counting(log), CPU).close()
    assert log == []


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_errors_come_out_where_the_tokens_do(error):
    def generate(streamer):
        counting([], 2)(streamer)
        raise error

    steps, before = stepwise(generate, CPU), threading.active_count()
    assert [next(steps), next(steps)] == [[0], [1]]
    with pytest.raises(type(error)) as caught:
        next(steps)
    assert caught.value is error
    assert threading.active_count() == before


def test_a_handler_of_errors_inside_does_not_hold_it_up():
    caught = []

    def generate(streamer):
        streamer.put(torch.tensor([[7]]))
        for step in range(5):
            try:
                streamer.put(torch.tensor([step]))
            except Exception as error:
                caught.append(error)

    steps = stepwise(generate, CPU)
    next(steps)
    steps.close()
    assert caught == []


def test_autocast_is_that_of_the_consumer():
    seen = []

    def generate(streamer):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    with torch.autocast("cpu", torch.bfloat16):
        assert list(stepwise(generate, CPU)) == []
    assert list(stepwise(generate, CPU)) == []
    assert seen[0] == (True, torch.bfloat16)
    assert seen[1][0] is False
