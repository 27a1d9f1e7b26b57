"""A request as its caller sees it: text as it comes, the outcome, and a way to end it early."""

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

from kvcache.engine.completion import Completion, Outcome
from kvcache.engine.request import Request


class Job:
    """A request on its way, made by `Engine.submit`.

    Iterating, also with `async for`, yields the pieces of its first text as they come; leaving that early cancels it.
    Its text can be iterated once.
    """

    def __init__(self, request: Request, cancel: Callable[[Request], None]) -> None:
        self._request = request
        self._cancel = cancel
        self._future: Future[list[Completion]] = Future()
        self._future.set_running_or_notify_cancel()  # so that a cancelled task leaves it to the worker to set it
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._wake: Callable[[], object] = _nobody_waits
        request.on_text = self._note_text
        request.on_end = self._note_end

    def result(self, timeout: float | None = None) -> list[Completion]:
        """Wait for the end, and return all texts.

        Raises:
            TimeoutError: that takes more than `timeout` seconds; the request goes on.
            What ended the request.
        """
        return self._future.result(timeout)

    def cancel(self) -> None:
        """End the request after the step that it is in: its outcome is what it has by then."""
        if not self.is_done:
            self._cancel(self._request)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def __iter__(self) -> "Pieces":
        return Pieces(self)

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            while True:
                arrived.clear()
                while not self._pieces.empty():
                    if (piece := self.next_piece()) is None:
                        self._future.result()
                        return
                    yield piece
                await arrived.wait()
        finally:
            self._wake = _nobody_waits
            self.cancel()

    async def wait(self) -> list[Completion]:
        """As `result`, for `await`; being cancelled there cancels the request."""
        try:
            return await asyncio.wrap_future(self._future)
        finally:
            self.cancel()

    def next_piece(self) -> str | None:
        """Wait for the next piece of its text and return it, None behind the last one."""
        piece = self._pieces.get()
        if piece is None:
            self._pieces.put(None)  # for whoever asks again
        return piece

    def _note_text(self, index: int, piece: str) -> None:
        if index == 0:
            self._put(piece)

    def _note_end(self, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)
        self._put(None)

    def _put(self, piece: str | None) -> None:
        self._pieces.put(piece)
        with suppress(RuntimeError):  # the loop was closed, so nobody waits
            self._wake()


class Pieces(Iterator[str]):
    """The pieces of a job's text. Unlike a generator's, its `close` has an effect before the first piece too."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __next__(self) -> str:
        try:
            piece = self._job.next_piece()
        except BaseException:  # an interrupt
            self.close()
            raise
        if piece is None:
            self._job.result()  # raises what ended it
            raise StopIteration
        return piece

    def close(self) -> None:
        """End the request."""
        self._job.cancel()

    def __del__(self) -> None:
        self.close()


def _nobody_waits() -> None:
    pass
