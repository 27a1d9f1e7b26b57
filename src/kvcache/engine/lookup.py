"""Tokens that may come next, looked up in the text itself: those that followed its last few tokens before.

    text        ... the  cat  sat  on  the  mat  ...  the  cat
                    --------  ==================      --------
                    found     proposed                the last n-gram, the longest that is found

Costs nothing but the look: no second model (prompt lookup; Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from bisect import bisect_left
from collections import defaultdict


class PromptLookup:
    """Proposes tokens behind one text that grows.

    Of several places where the last n-gram stands, the first one behind the last copy is taken, else the newest: a text
    that is copied with changes goes on behind each change where the copy was left. Where tokens were rejected, fewer
    are proposed: twice as many as were accepted, and one; so a text that repeats nothing costs one token a step.

    Args:
        num_tokens: to propose at most, >= 1.
        max_ngram: tokens of the longest n-gram to look for, >= 1.

    Attributes:
        num_proposed: tokens that were proposed and run so far.
        num_accepted: those of them that were right, and behind which the text went on.

    >>> lookup = PromptLookup(num_tokens=4, max_ngram=2)
    >>> lookup.propose([5, 1, 2, 3, 4, 9, 1, 2], most=10)
    [3, 4, 9, 1]
    """

    def __init__(self, num_tokens: int, max_ngram: int) -> None:
        self.num_proposed = self.num_accepted = 0
        self._num_tokens = num_tokens
        self._max_ngram = max_ngram
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # of each n-gram, in order
        self._num_indexed = 0
        self._limit = num_tokens
        self._start = 0  # of what was proposed last and is not accepted
        self._left = 0  # where the last copy was left

    def propose(self, tokens: list[int], most: int) -> list[int]:
        """Return what may follow, at most so many tokens; nothing where no n-gram stands twice.

        Args:
            tokens: all of the text, which begins with those of the last call.
            most: >= 0.
        """
        self._index(tokens)
        count = min(most, self._limit)
        start = self._find(tokens) if count else None
        if start is None:
            return []
        self._start = start
        proposed = tokens[start : start + count]
        period = len(tokens) - start
        while len(proposed) < count:  # a text that repeats what it has just said goes on with that
            proposed.append(proposed[-period])
        return proposed

    def note_run(self, num_tokens: int) -> None:
        """Take note that so many of the tokens proposed last run, >= 1."""
        self.num_proposed += num_tokens
        self._limit = 1

    def note_accepted(self) -> None:
        """Take note that the next of them is right."""
        self.num_accepted += 1
        self._start += 1
        self._left = self._start
        self._limit = min(self._limit + 2, self._num_tokens)

    def _index(self, tokens: list[int]) -> None:
        """Note where n-grams end that have a token behind them."""
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in range(1, min(self._max_ngram, end) + 1):
                self._ends[tuple(tokens[end - size : end])].append(end)
        self._num_indexed = max(len(tokens) - 1, 0)

    def _find(self, tokens: list[int]) -> int | None:
        for size in range(min(self._max_ngram, len(tokens)), 0, -1):
            if ends := self._ends.get(tuple(tokens[-size:])):
                return ends[min(bisect_left(ends, self._left), len(ends) - 1)]
        return None
