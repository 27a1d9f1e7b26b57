"""What texts have in a step, and their next tokens, picked from its logits before its commit.

A text may have proposed tokens behind its own in a step. From the logits behind each of them a token is picked as ever,
with the same processors and draws, as long as the one before is what was proposed: so the text is the same as without
proposals, in fewer steps.

    own  proposed       picked behind them         the text goes on with     the commit keeps
    a    b  c  d        b  c  x  -                 b c x                     a b c
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kvcache.engine.request import Branch
from kvcache.errors import InvalidValueError


@dataclass(eq=False)
class Part:
    """What a text has in a step, and what comes of it.

    Attributes:
        branch: the text.
        tokens: those of its own that run.
        is_last: whether these are all that have not run, so that the next one is picked.
        proposed: what may come behind them, and runs with them.
        num_accepted: how many of these became the text's and were gone on behind.
        siblings: texts that begin behind the same prompt, which has just run.
        error: what its request ends with.
    """

    branch: Branch
    tokens: list[int]
    is_last: bool
    proposed: list[int] = field(default_factory=list)
    num_accepted: int = 0
    siblings: list[Branch] = field(default_factory=list)
    error: Exception | None = None

    @property
    def num_kept(self) -> int:
        """How many of its tokens in the step become part of its sequence."""
        return len(self.tokens) + self.num_accepted


def propose(parts: Iterable[Part], max_tokens: int) -> None:
    """Let texts propose tokens, the first ones first, until a step has so many tokens."""
    parts = list(parts)
    left = max_tokens - sum(len(part.tokens) for part in parts)
    for part in parts:
        if part.is_last:
            part.proposed = part.branch.propose(left)
            left -= len(part.proposed)


def places_of(parts: Iterable[Part], device: torch.device) -> torch.Tensor | None:
    """Return the places in a step whose logits are needed: each part's last token of its own, and those proposed.

    None where nothing is proposed, so that those are the last ones.
    """
    places: list[int] = []
    end = num_proposed = 0
    for part in parts:
        end += len(part.tokens) + len(part.proposed)
        num_proposed += len(part.proposed)
        places += range(end - 1 - len(part.proposed), end)
    return torch.tensor(places, device=device) if num_proposed else None


def pick(parts: Iterable[Part], logits: torch.Tensor) -> None:
    """Let the texts of a step take their next tokens.

    Args:
        parts: of the step, in its order; what comes of each is set.
        logits: (R, vocabulary), of the places of `places_of`.
    """
    is_nan, likeliest = _read(logits)
    first = 0
    failed = set()
    for part in parts:
        stop = first + len(part.proposed) + 1
        if part.is_last and part.branch.request not in failed:
            try:
                _pick(part, logits[first:stop], likeliest[first:stop], is_nan[first:stop])
            except Exception as error:  # of its sampling or its tokenizer: the others go on
                part.error = error
                failed.add(part.branch.request)
        first = stop


def _pick(part: Part, logits: torch.Tensor, likeliest: list[int], is_nan: list[bool]) -> None:
    branch, lookup = part.branch, part.branch.lookup
    part.siblings = branch.missing_siblings()
    if lookup is not None and part.proposed:
        lookup.note_run(len(part.proposed))
    for row, token, is_bad, proposal in zip(logits, likeliest, is_nan, [*part.proposed, None], strict=True):
        if is_bad:
            raise InvalidValueError("the model's logits behind this prompt are NaN")
        for text in [branch, *part.siblings]:
            if text.takes_the_likeliest:
                text.take(token)
            else:
                text.pick(row)
        if lookup is None or branch.completion is not None or branch.tokens[-1] != proposal:
            break
        part.num_accepted += 1
        lookup.note_accepted()


def _read(logits: torch.Tensor) -> tuple[list[bool], list[int]]:
    """Return of each row of logits (R, vocabulary) whether any is NaN, and the likeliest token."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return scores.isnan().any(dim=-1).tolist(), scores.argmax(dim=-1).tolist()
