"""Which fault explains a wrong output: small runs that only that fault can make go as they do.

Most ask what an output depends on: a token is exchanged, and the output may change only where the token is one of those
that it may see. They run in the reference's dtype, where an output that depends on nothing else stays as it is.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcache.errors import NotSupportedError
from kvcache.verify import scenarios
from kvcache.verify.decoder import Decoder, ExchangedRows
from kvcache.verify.judge import outputs_of, reference_limit, relative_error
from kvcache.verify.scenarios import Scenario
from kvcache.verify.trial import Step, Text, Trial, as_stored, text_of_length

logger = logging.getLogger(__name__)

SPARE = 7  # slots more than needed
LARGEST_ROUNDING = 0.2  # error of a cache that keeps rows in few bits, and does so rightly


class Case:
    """A decoder that gives wrong outputs, and texts to find out why."""

    def __init__(self, decoder: Decoder, texts: list[Text]) -> None:
        self.decoder, self.texts = decoder, texts
        self.uncached = as_stored(decoder)  # what it says without a cache
        self._answers: dict[Callable[[Case], bool], bool] = {}

    @cached_property
    def exchanged_rows(self) -> list[ExchangedRows]:
        """What each layer gave to a cache and got back, [] where that is not seen."""
        return self.decoder.exchanged_rows(torch.tensor([self.text], device=self.decoder.device))

    def has(self, is_cause: "Callable[[Case], bool]") -> bool:
        """Whether one of `CAUSES` holds; each is asked once."""
        if is_cause not in self._answers:
            try:
                self._answers[is_cause] = is_cause(self)
            except Exception:  # a run that cannot be made, or fails, says nothing about this cause
                logger.debug("%s could not be asked", is_cause.__name__, exc_info=True)
                self._answers[is_cause] = False
        return self._answers[is_cause]

    @property
    def text(self) -> Text:
        """A text of a few tokens, fewer than any window's where that leaves some."""
        shortest = min(self.decoder.windows, default=len(self.texts[0]))
        return self.texts[0][: max(4, min(12, shortest - 1))]

    def trial(self, batch_size: int = 1, *, spare: int = SPARE, pad_token: int = 0) -> Trial:
        """Return a new trial with room to spare."""
        return Trial(self.decoder, batch_size, capacity=len(self.texts[0]) + spare, pad_token=pad_token)

    def padded_trial(self, pad_token: int) -> Trial:
        """Return a trial of two texts, the second padded by two tokens, and then one token more of each."""
        trial, other = self.trial(2, pad_token=pad_token), self.texts[1][: len(self.text) - 2]
        trial.feed(self.text[:-1], other[:-1])
        trial.feed(self.text[-1:], other[-1:])
        return trial

    def other(self, token: int) -> int:
        """Return another token."""
        return (token + max(1, self.decoder.vocab_size // 2)) % self.decoder.vocab_size

    def differs(self, output: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether two outputs are different beyond rounding; two that are not numbers are not."""
        if output.isnan().any() and expected.isnan().any():
            return False
        return not relative_error(output, expected) <= reference_limit(self.decoder)

    def is_right(self, trial: Trial) -> bool:
        """Whether all outputs of a trial are those of a run without a cache."""
        return not any(
            self.differs(output, self.uncached.output(place.text)) for place, output in outputs_of(trial.steps)
        )


def overwrites_at_capacity(case: Case) -> bool:
    """A full cache took one more token, and the outputs are wrong only then."""
    text = case.text
    roomy, full = case.trial(), case.trial(spare=len(text) - 1 - len(case.texts[0]))
    roomy.decode(text)
    full.decode(text[:-1])
    if not (case.is_right(roomy) and case.is_right(full)):
        return False
    try:
        full.feed(text[-1:])
    except Exception:
        return False
    return not case.is_right(full)


def feeds_the_prompt_twice(case: Case) -> bool:
    """The outputs are those of a text in which the prompt comes twice."""
    prompt, token = case.text[:-1], case.text[-1:]
    trial = case.trial(spare=SPARE + len(prompt))
    trial.feed(prompt)
    output = trial.feed(token)[0, -1]
    doubled, once = case.uncached.output(prompt + prompt + token), case.uncached.output(prompt + token)
    return case.differs(doubled, once) and not case.differs(output, doubled)


def swaps_rows(case: Case) -> bool:
    """An output depends on another row of the batch."""
    texts = [text[: len(case.text)] for text in case.texts]

    def outputs(changed: int | None, index: Sequence[int]) -> torch.Tensor:
        prompts = [
            [case.other(token) for token in text[:-2]] if row == changed else text[:-2]
            for row, text in enumerate(texts)
        ]
        trial = case.trial(len(texts))
        first = trial.feed(*prompts)
        if index:
            trial.reorder(index)
            first = first[list(index)]
        trial.decode(*(text[-2:] for text in texts))
        return torch.cat([first, *(step.outputs for step in trial.steps[1:])], dim=1)

    for index in ((), (1, 2, 0)):
        try:
            before = outputs(None, index)
            for changed in range(len(texts)):
                after = outputs(changed, index)
                others = [row for row, source in enumerate(index or range(len(texts))) if source != changed]
                if any(case.differs(before[row], after[row]) for row in others):
                    return True
        except NotSupportedError:
            continue
    return False


def leaves_the_tail_unmasked(case: Case) -> bool:
    """The outputs depend on how many slots are unused."""

    def output(spare: int) -> torch.Tensor:
        trial = case.trial(spare=spare)
        trial.feed(case.text[:-1])
        return trial.feed(case.text[-1:])

    little, much = output(SPARE), output(2 * SPARE)
    return case.differs(little, much) or bool(much.isnan().any())  # of what stands in slots that nobody has written


def keeps_stale_rows(case: Case) -> bool:
    """The outputs depend on tokens that were dropped."""

    def output(dropped: Sequence[int]) -> torch.Tensor:
        trial = case.trial()
        trial.feed(case.text[:-2])
        trial.decode(dropped)
        trial.rollback(len(dropped))
        return trial.feed(case.text[-2:])

    draft = case.text[:2]
    return case.differs(output(draft), output([case.other(token) for token in draft]))


def gives_all_rows_one_position(case: Case) -> bool:
    """In a padded batch the row without padding is right, and those with padding are wrong, whatever the padding is."""
    trial = case.padded_trial(pad_token=0)
    wrong_rows = {
        place.row
        for place, output in outputs_of(trial.steps)
        if not output.isnan().any() and case.differs(output, case.uncached.output(place.text))
    }
    return wrong_rows == {1} and not shows_padding(case)


def shows_padding(case: Case) -> bool:
    """The outputs depend on what stands where a row is padded."""
    return _rows_differ(case, case.padded_trial(pad_token=0), case.padded_trial(pad_token=case.other(0)))


def _rows_differ(case: Case, first: Trial, second: Trial) -> bool:
    pairs = zip(outputs_of(first.steps), outputs_of(second.steps), strict=True)
    return any(case.differs(output, other) for (_, output), (_, other) in pairs)


def misaligns_the_mask(case: Case) -> bool:
    """Tokens see later ones, or miss earlier ones; or of several at once the first is wrong, and one at a time none."""
    text = case.text
    num_past = len(text) // 2
    singly = case.trial()
    singly.decode(text)
    is_right_singly = case.is_right(singly)

    def outputs(changed: int | None) -> torch.Tensor:
        tokens = [case.other(token) if index == changed else token for index, token in enumerate(text)]
        trial = case.trial()
        if not is_right_singly:  # wrong positions may let several at once see later ones, but none misses earlier ones
            trial.decode(tokens)
            return torch.cat([step.outputs[0] for step in trial.steps[num_past:]])
        trial.feed(tokens[:num_past])
        return trial.feed(tokens[num_past:])[0]

    before = outputs(None)
    if before.isnan().any():
        return False
    for changed in range(len(text)):
        after = outputs(changed)
        for index in range(len(text) - num_past):
            sees = changed <= num_past + index
            if case.differs(before[index], after[index]) != sees:
                return True
    # No position within the chunk explains its first token.
    return is_right_singly and case.differs(before[0], case.uncached.output(text[: num_past + 1]))


def bounds_the_window_wrongly(case: Case) -> bool:
    """Texts far shorter than the window are right, longer ones are not."""
    windows = [window for window in case.decoder.windows if window > 2]
    if not windows:
        return False

    def is_right(length: int) -> bool:
        text = text_of_length(case.texts, length)
        trial = Trial(case.decoder, capacity=length + SPARE)
        decoded = max(1, length // 3)
        trial.feed(text[:-decoded])
        trial.decode(text[-decoded:])
        return case.is_right(trial)

    has_right_one = any(is_right(length) for length in {2, 3, min(windows) - 1} if length < min(windows))
    return has_right_one and not all(is_right(window + 4) for window in windows)


def freezes_the_scale(case: Case) -> bool:
    """What comes first decides how well everything later is kept."""
    text = case.texts[0][: max(8, len(case.text))]

    def error(first: int) -> float:
        trial = case.trial()
        trial.feed(text[:first])
        trial.decode(text[first:])
        errors = [relative_error(out, case.uncached.output(place.text)) for place, out in outputs_of(trial.steps)]
        return max(errors[-3:])

    at_first = error(len(text) - 1)
    return at_first < LARGEST_ROUNDING and error(1) > 2 * at_first


def takes_keys_for_values(case: Case) -> bool:
    """What a layer got back as values are keys; or values differ by position where all tokens are the same."""
    exchanged = case.exchanged_rows
    if exchanged:
        return any(
            _same(rows.returned[1], rows.given[0]) or _same(rows.returned[0], rows.given[1]) for rows in exchanged
        )
    return _of_one_token(case) == "varies"


def crosses_heads(case: Case) -> bool:
    """What a layer got back belongs to another head; or texts are wrong however they come, which positions explain not.

    Texts of one token are then wrong, though equally at all places, if values are crossed, and right if keys are.
    """
    exchanged = case.exchanged_rows
    if exchanged:
        pairs = [pair for rows in exchanged for pair in zip(rows.returned, rows.given, strict=True)]
        return any(not _same(*pair) and _same(*(rows.sort(1).values for rows in pair)) for pair in pairs)
    of_one_token = _of_one_token(case)
    return of_one_token == "wrong" or (of_one_token == "right" and _is_always_wrong(case))


def _is_always_wrong(case: Case) -> bool:
    at_once, singly = case.trial(), case.trial()
    at_once.feed(case.text)
    singly.decode(case.text)
    return not case.is_right(at_once) and not case.is_right(singly)


def offsets_positions(case: Case) -> bool:
    """All rows come back as they were given, and no other cause holds; or a text of one token repeated is right.

    What only goes wrong elsewhere than in a prompt and tokens after it is something else.
    """
    trial = case.trial()
    trial.feed(case.text[:3])
    trial.feed(case.text[3:-1])
    trial.feed(case.text[-1:])
    if case.is_right(trial):
        return False
    pairs = [pair for rows in case.exchanged_rows for pair in zip(rows.returned, rows.given, strict=True)]
    if pairs and all(_same(*pair) for pair in pairs):
        return True
    return _of_one_token(case) == "right"


def _of_one_token(case: Case) -> str:
    """Return how outputs are where all tokens are the same: "right", "wrong" but equal, "varies", "" if not known."""
    text = case.text[:1] * len(case.text)
    expected = [case.uncached.output(text[:length]) for length in range(1, len(text) + 1)]
    if any(case.differs(output, expected[0]) for output in expected):
        return ""  # positions are added to the tokens, for instance
    trial = case.trial()
    trial.feed(text[:-2])
    trial.decode(text[-2:])
    outputs = [output for _, output in outputs_of(trial.steps)]
    if any(case.differs(output, outputs[0]) for output in outputs):
        return "right" if case.is_right(trial) else "varies"
    return "right" if case.is_right(trial) else "wrong"


def _same(rows: torch.Tensor, others: torch.Tensor) -> bool:
    return rows.shape == others.shape and torch.equal(rows, others)


@dataclass(frozen=True)
class Cause:
    """A fault, and how it is told from others; it is sought in some scenarios only, or in all."""

    name: str
    holds: Callable[[Case], bool]
    scenarios: tuple[Callable[..., list[Step]], ...] = ()


BATCHES = (
    scenarios.batch,
    scenarios.left_padded_batch,
    scenarios.reorder,
    scenarios.rollback_and_retry,
    scenarios.fork,
    scenarios.save_and_restore,
)
# In this order: a fault further down may look like one above it only in part.
CAUSES = (
    Cause("overwrite at capacity", overwrites_at_capacity, (scenarios.full_cache,)),
    Cause("prompt fed twice", feeds_the_prompt_twice),
    Cause("rows swapped in a batch", swaps_rows, BATCHES),
    Cause("unmasked tail", leaves_the_tail_unmasked),
    Cause("stale rows after rollback", keeps_stale_rows, (scenarios.rollback_and_retry, scenarios.full_cache)),
    Cause("one position for all rows", gives_all_rows_one_position, (scenarios.left_padded_batch,)),
    Cause("mask alignment", shows_padding, (scenarios.left_padded_batch,)),
    Cause("window bound", bounds_the_window_wrongly),
    Cause("mask alignment", misaligns_the_mask),
    Cause("frozen scale", freezes_the_scale),
    Cause("K taken for V", takes_keys_for_values),
    Cause("crossed heads", crosses_heads),
    Cause("position offset", offsets_positions),
)


def likely_cause(case: Case, scenario: Scenario) -> str | None:
    """Return the name of the fault that explains a scenario's wrong outputs, None where none does."""
    for cause in CAUSES:
        if (not cause.scenarios or scenario.run in cause.scenarios) and case.has(cause.holds):
            return cause.name
    return None
