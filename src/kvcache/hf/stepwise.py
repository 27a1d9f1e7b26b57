"""`model.generate` as an iterator of new tokens: a thread that moves only while somebody waits for the next ones.

    consumer   next() ........ tokens, next() ....... tokens, close()
    thread            a step          |      a step         |     ends

So nothing of the model or the cache changes while the consumer works with what it got, and of several generations in
one thread each computes in its turn.
"""

import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class _Closed(BaseException):
    """Ends a generation that nobody waits for any more; no handler of ordinary errors stops it."""


class _Handover(BaseStreamer):
    """Given to `generate`, which hands it the prompt first, then the new tokens of each step."""

    def __init__(self) -> None:
        self.done: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()  # new tokens; None at the end
        self.wanted = threading.Semaphore(0)
        self.is_closed = False
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.done.put(value.flatten().tolist())
            self.wanted.acquire()
            if self.is_closed:
                raise _Closed
        self._prompt_seen = True

    def end(self) -> None:
        pass


def stepwise(generate: Callable[[BaseStreamer], Any], device: torch.device) -> Generator[list[int]]:
    """Yield the ids of the new tokens, often one, after each step of `generate(streamer)`.

    Closing the iterator ends the generation after the step that it is at. Whatever `generate` raises is raised here.
    Autocast on `device` is as it is where the iteration begins.
    """
    handover = _Handover()
    errors: list[BaseException] = []
    kind = device.type
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def run() -> None:
        try:
            with autocast:
                generate(handover)
        except BaseException as error:
            errors.append(error)
        finally:
            handover.done.put(None)

    thread = threading.Thread(target=run, name="kvcache-generate", daemon=True)  # an abandoned one holds up no exit
    thread.start()
    try:
        while (ids := handover.done.get()) is not None:
            yield ids
            handover.wanted.release()
    finally:
        handover.is_closed = True
        handover.wanted.release()
        thread.join()
    if errors:
        raise errors[0]
