"""The one thread in which a scheduler runs: others hand it requests, and it hands back what comes of them."""

import atexit
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch

from kvcache.engine.request import Request
from kvcache.engine.scheduler import Scheduler
from kvcache.errors import EngineClosedError
from kvcache.native import release_threads

Act = Callable[[], None]


class Worker:
    """Steps a scheduler in a thread of its own, as long as there is anything to do.

    Args:
        scheduler: which nobody else may use from now on.
        around: what is held while there is anything to do.
    """

    def __init__(self, scheduler: Scheduler, around: Callable[[], AbstractContextManager[object]]) -> None:
        self._scheduler = scheduler
        self._around = around
        self._inbox: deque[Act] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        # How many cores torch may use is set for each thread; this one goes by who made the engine.
        self._num_threads = torch.get_num_threads()
        release_threads()
        self._thread = threading.Thread(target=self._run, name="kvcache-engine", daemon=True)
        atexit.register(self.close)  # a thread that is in torch when the interpreter goes takes the process down
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand a request in; one that cannot run ends with its error.

        Raises:
            EngineClosedError: the worker is closed.
        """

        release_threads()  # whoever asks waits then, more often than not

        def add() -> None:
            try:
                self._scheduler.add(request)
            except Exception as error:
                request.end(error)

        self._hand_in(add)

    def cancel(self, request: Request) -> None:
        """End a request where it is; its outcome is what it has. Nothing happens to one that has ended."""
        with suppress(EngineClosedError):  # which ends all
            self._hand_in(lambda: self._scheduler.cancel(request))

    def call(self, act: Act) -> None:
        """Run something between two steps, and wait until it is done.

        Raises:
            EngineClosedError: the worker is closed. And what `act` raises.
        """
        done = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                act()
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        self._hand_in(run)
        while not done.wait(timeout=0.1):
            if not self._thread.is_alive() and not done.is_set():
                raise EngineClosedError("the engine was closed meanwhile")
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End all requests with an error, and the thread."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stop(self) -> None:
        """As `close`, without waiting for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _hand_in(self, act: Act) -> None:
        with self._changed:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; make another one")
            if not self._thread.is_alive():
                raise EngineClosedError(
                    "the engine's thread is in the process that this one is a fork of; make another"
                )
            self._inbox.append(act)
            self._changed.notify()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        error: Exception = EngineClosedError("the engine was closed before the request had ended")
        try:
            while self._wait():
                with torch.no_grad(), self._around():
                    while not self._is_closed and self._do_acts():
                        self._scheduler.step()
        except Exception as cause:  # a fault of this package: nobody shall wait for ever
            error = cause
            raise
        finally:
            with self._changed:
                self._is_closed = True
            while self._inbox:
                with suppress(Exception):  # its books are wrong already
                    self._inbox.popleft()()
            for request in self._scheduler.requests:
                try:
                    self._scheduler.fail(request, error)
                except Exception:  # its books are wrong already
                    request.end(error)
            atexit.unregister(self.close)

    def _wait(self) -> bool:
        """Wait for something to do, and return whether there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._is_closed)
            return not self._is_closed

    def _do_acts(self) -> bool:
        """Do what was handed in, and return whether there is a step to run."""
        while self._inbox:
            self._inbox.popleft()()
        return not self._scheduler.is_idle
