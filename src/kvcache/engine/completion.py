"""What a request comes back with."""

from dataclasses import dataclass
from typing import Literal

from kvcache.engine.sampling import TokenLogprobs
from kvcache.hf.turn import Usage

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Timings:
    """When things happened, in seconds from the moment the request was made.

    Attributes:
        queue: until its prompt began to run.
        first_token: until its first token; 0 where there is none.
        total: until its last one, likewise.
        per_token: of each token after the first, the mean; None where there is none.
    """

    queue: float
    first_token: float
    total: float
    per_token: float | None


@dataclass(frozen=True)
class Speculation:
    """What came of tokens that were proposed.

    Attributes:
        num_proposed: tokens that were proposed and run.
        num_accepted: those of them that were right, and behind which the text went on: each saved a step.
    """

    num_proposed: int
    num_accepted: int


@dataclass(frozen=True)
class Completion:
    """A text that was generated.

    Attributes:
        text: without special tokens, and up to the stop string that ended it.
        token_ids: all new tokens, an end token among them.
        finish_reason: "stop" at an end token or a stop string, "length" at a limit, or "cancelled".
        usage: tokens of the prompt, those of them whose keys and values were there and were read, and new ones.
        timings: when it was done.
        logprobs: of each new token, if they were asked for.
        speculation: what came of tokens that were proposed; None without `prompt_lookup_num_tokens`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprobs] | None = None
    speculation: Speculation | None = None


Outcome = list[Completion] | Exception  # of a request: its texts, or what ended it
