"""A request as its caller sees it: text as it comes, the outcome, and a way to end it early."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

from kvcache.engine.completion import Completion
from kvcache.engine.request import Request

Outcome = list[Completion] | Exception


class Job:
    """A request on its way, made by `Engine.submit`.

    Iterating, also with `async for`, yields the pieces of its first text as they come; leaving that early cancels it.
    Its text can be iterated once.
    """

    def __init__(self, request: Request, cancel: Callable[[Request], None]) -> None:
        self._request = request
        self._cancel = cancel
        self._future: Future[list[Completion]] = Future()
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
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

    def __iter__(self) -> Iterator[str]:
        try:
            while (piece := self._pieces.get()) is not None:
                yield piece
        finally:
            self.cancel()
        self._future.result()  # raises what ended it

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            while (piece := await asyncio.to_thread(self._pieces.get)) is not None:
                yield piece
        finally:
            self.cancel()
        self._future.result()

    async def wait(self) -> list[Completion]:
        """As `result`, for `await`; being cancelled there cancels the request."""
        try:
            return await asyncio.wrap_future(self._future)
        finally:
            self.cancel()

    def _note_text(self, index: int, piece: str) -> None:
        if index == 0:
            self._pieces.put(piece)

    def _note_end(self, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)
        self._pieces.put(None)
