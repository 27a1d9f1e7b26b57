"""Which tokens of which texts run in the next step.

    waiting   --admit-->   running   --end-->   out
       ^                      |
       +------ preempt -------+        gives its blocks back; what it had computed runs again, or is found

Each step has a token of every running text whose prompt has run, and parts of prompts as far as the step's budget goes,
the oldest first; what that leaves goes to tokens that texts propose. Where blocks are short, nothing is proposed, and
then the newest running text is preempted, so that the oldest always goes on.
"""

import time
from bisect import insort
from collections.abc import Callable
from contextlib import suppress

import torch

from kvcache.engine.picking import Part, pick, places_of, propose
from kvcache.engine.request import Branch, Request
from kvcache.errors import InvalidValueError, OutOfBlocksError
from kvcache.prefix import PrefixCache
from kvcache.storage.sequence import Sequence
from kvcache.storage.step import Step


class Scheduler:
    """Continuous batching over one pool.

    Args:
        prefixes: of the pool.
        forward: returns the logits (R, vocabulary) at some places among a step's tokens, int64 (R,); where these are
            None, of each sequence's last token.
        max_step_tokens: tokens that run in one step, those of texts whose prompt has run first; at least one of a
            prompt; >= 1.
        max_running: texts that run at once at most, >= 1.

    Used from one thread.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        forward: Callable[[Step, torch.Tensor | None], torch.Tensor],
        max_step_tokens: int = 512,
        max_running: int = 64,
    ) -> None:
        self.prefixes = prefixes
        self.pool = prefixes.pool
        self.waiting: list[Branch] = []  # in the order in which requests were made, as
        self.running: list[Branch] = []
        self.num_preemptions = 0
        self._forward = forward
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._order: dict[Request, int] = {}
        self._num_requests = 0
        self._refused_in: tuple[dict[str, int], int] | None = None  # blocks and texts when the next one had no room

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.running)

    def check_fits(self, num_tokens: int) -> None:
        """Check that a text of so many stored tokens fits into the pool, if it is there alone.

        Raises:
            InvalidValueError: it does not.
        """
        for kind, table in self.pool.new_tables().items():
            most = table.most_held(num_tokens)
            if most > (there := self.pool.num_blocks[kind]):
                raise InvalidValueError(
                    f"a prompt with its new tokens takes {num_tokens} tokens, {most} blocks of the {kind} layers; "
                    f"expected at most the {there} that there are; give the engine more memory, or ask for less"
                )

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidValueError: it could never run, since it is larger than the pool.
        """
        self.check_fits(request.num_tokens)
        branch = Branch(request, 0, self.pool.device)
        request.branches = [branch]
        self._order[request] = self._num_requests
        self._num_requests += 1
        self.waiting.append(branch)

    @property
    def requests(self) -> list[Request]:
        """The requests that have not ended: a snapshot."""
        return list(self._order)

    def cancel(self, request: Request) -> None:
        """End a request, whatever it is doing; what it has generated is its outcome."""
        self._end(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with an error."""
        self._end(request, error)

    def step(self) -> bool:
        """Run one step, and return whether there was anything to run.

        What the model raises ends the requests that are in the step.
        """
        self._admit()
        if not self.running:
            return False
        parts: list[Part] = []
        try:
            parts, step = self._reserve()
            with step:
                logits = self._forward(step, places_of(parts, self.pool.device))
                pick(parts, logits)
                step.commit(keep=[part.num_kept for part in parts])
        except Exception as error:  # of the model, or of a device that has no memory left
            for branch in [part.branch for part in parts] or self.running[:]:
                self._end(branch.request, error)
            return True
        for part in parts:
            self._settle(part)
        for part in parts:  # once all of a request's texts that have ended have given their blocks back
            self._note_end(part.branch.request)
        return True

    def _admit(self) -> None:
        for branch in list(self.waiting):
            if len(self.running) >= self._max_running:
                return
            if branch.request.outcome is not None:  # another of its texts could not be looked up
                continue
            if self._is_under_way(branch):  # so that it will be found
                continue
            if self.running and (self.pool.num_available, len(self.running)) == self._refused_in:
                return
            try:
                sequence = self.prefixes.acquire(branch.tokens, branch.request.namespace)
            except Exception as error:
                self._end(branch.request, error)
                continue
            if self.running and not self._has_room(len(branch.tokens), sequence):
                sequence.free()
                self._refused_in = self.pool.num_available, len(self.running)
                return
            self.waiting.remove(branch)
            branch.sequence = sequence
            self._start(branch)

    def _is_under_way(self, branch: Branch) -> bool:
        """Whether a running text has yet to run a block or more that this one begins with too."""
        for other in self.running:
            if other.request.namespace != branch.request.namespace or other.sequence is None:
                continue
            end = other.sequence.seq_len + self.pool.block_size
            runs_a_prompt = len(other.tokens) - other.sequence.seq_len > 1
            if runs_a_prompt and len(branch.tokens) >= end and other.tokens[:end] == branch.tokens[:end]:
                return True
        return False

    def _has_room(self, num_tokens: int, sequence: Sequence) -> bool:
        """Whether a text can run all its tokens, and every running one its own and a block more."""
        texts = [(num_tokens, sequence)]
        texts += [(len(other.tokens), other.sequence) for other in self.running if other.sequence is not None]
        written_in_a_step = -(-self._max_step_tokens // self.pool.block_size)
        for kind, available in self.pool.num_available.items():
            tables = [(length, text.seq_len, text.table(kind)) for length, text in texts]
            written = sum(table.num_blocks_for(length) - table.num_blocks_for(now) for length, now, table in tables)
            kept = sum(max(table.most_held(length) - len(table.blocks), 0) for length, _, table in tables)
            if min(written, kept + written_in_a_step) + len(texts) > available:
                return False
        return True

    def _start(self, branch: Branch) -> None:
        insort(self.running, branch, key=self._place)
        request = branch.request
        if request.started is None:
            assert branch.sequence is not None
            request.started, request.num_cached = time.perf_counter(), branch.sequence.seq_len

    def _place(self, branch: Branch) -> tuple[int, int]:
        return self._order[branch.request], branch.index

    def _parts(self, max_tokens: int) -> list[Part]:
        """Return the texts of a step with their tokens: those with one token left all, of others up to a number."""
        waiting = [(branch, branch.waiting) for branch in self.running]
        left = max(max_tokens - sum(len(tokens) == 1 for _, tokens in waiting), 1)
        parts = []
        for branch, tokens in waiting:
            run = tokens
            if len(tokens) > 1:
                run = tokens[:left]
                left -= len(run)
            if run:
                parts.append(Part(branch, run, is_last=len(run) == len(tokens)))
        return parts

    def _reserve(self) -> tuple[list[Part], Step]:
        """Return the next step; where blocks are short without proposals, with fewer tokens, then with fewer texts."""
        max_tokens, may_propose = self._max_step_tokens, True
        while True:
            parts = self._parts(max_tokens)
            if may_propose:
                propose(parts, max_tokens)
            sequences = [part.branch.sequence for part in parts if part.branch.sequence is not None]
            try:
                return parts, self.pool.step(sequences, [part.tokens + part.proposed for part in parts])
            except OutOfBlocksError:
                if any(part.proposed for part in parts):
                    may_propose = False
                elif max_tokens > self.pool.block_size:
                    max_tokens = max(max_tokens // 2, self.pool.block_size)
                elif len(self.running) > 1:
                    self._preempt(self.running[-1])
                elif max_tokens > 1:
                    max_tokens //= 2
                elif self.running[0].shares_open_block:
                    self._stop_sharing(self.running[0])
                else:
                    raise

    def _preempt(self, branch: Branch) -> None:
        self.num_preemptions += 1
        self._release(branch)
        insort(self.waiting, branch, key=self._place)

    def _stop_sharing(self, branch: Branch) -> None:
        """Let the only running text compute its open block anew, where there is no room for a copy to write."""
        assert branch.sequence is not None
        length, request = branch.sequence.seq_len, branch.request
        branch.sequence.free()
        whole = length - length % self.pool.block_size
        branch.sequence = self.prefixes.acquire(branch.tokens, request.namespace, max_reused=whole)
        request.num_cached = min(request.num_cached or 0, branch.sequence.seq_len)

    def _release(self, branch: Branch) -> None:
        """Let a running text give its blocks back; what it has computed can be found as long as there is room."""
        sequence, branch.sequence = branch.sequence, None
        assert sequence is not None
        self.running.remove(branch)
        with suppress(Exception):  # a look at the weights that fails; the next `acquire` raises it
            self.prefixes.publish(sequence)
        sequence.free()

    def _settle(self, part: Part) -> None:
        """Let a text go on, or end, as its tokens in a step say, and start those that begin behind it."""
        branch, request = part.branch, part.branch.request
        if part.error is not None:
            self._end(request, part.error)
        if request.outcome is not None:  # by another of its texts too
            return
        assert branch.sequence is not None
        for sibling in part.siblings:
            if sibling.completion is not None:
                continue
            if len(self.running) < self._max_running:
                sibling.sequence = branch.sequence.fork()
                self._start(sibling)
            else:
                insort(self.waiting, sibling, key=self._place)
        if branch.completion is not None:
            self._stop(branch)

    def _end(self, request: Request, error: Exception | None = None) -> None:
        if request.outcome is not None:
            return
        for branch in request.branches:
            self._stop(branch)
        request.branches[0].missing_siblings()
        try:
            for branch in request.branches:
                if error is None and branch.completion is None:
                    branch.end("cancelled")
        except Exception as cause:  # of its tokenizer
            error = cause
        if error is not None:
            request.end(error)
        self._note_end(request)

    def _stop(self, branch: Branch) -> None:
        """Let a text neither run nor wait any more."""
        if branch.sequence is not None:
            self._release(branch)
        elif branch in self.waiting:
            self.waiting.remove(branch)
            self._refused_in = None

    def _note_end(self, request: Request) -> None:
        request.note_end()
        if request.outcome is not None:
            self._order.pop(request, None)
