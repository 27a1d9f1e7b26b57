"""Hold a cache against a run without one, scenario by scenario."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from kvcache.checks import check_int, dtype_name
from kvcache.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from kvcache.memory import free_memory
from kvcache.storage.tokens import check_token_ids
from kvcache.verify.causes import Case, likely_cause
from kvcache.verify.decoder import Decoder
from kvcache.verify.judge import (
    Errors,
    Place,
    beyond_rounding,
    errors_of,
    loss_of,
    reference_limit,
    rounding_bound,
)
from kvcache.verify.layers import BEFORE_THE_FIRST, first_wrong_layer
from kvcache.verify.report import Corruption, Finding, Report, Verdict
from kvcache.verify.scenarios import DECODED, SCENARIOS, Scenario
from kvcache.verify.trial import Text, as_stored, uncached

NUM_TEXTS = 3
TEXT_LENGTH = 40
SHORTEST_TEXT = 3 * DECODED
MEMORY_MARGIN = 1.2
LARGEST_LOSS = 1.0  # an error beyond which a lossy run has nothing to do with the reference


@torch.no_grad()
def verify(
    decoder: Decoder,
    *,
    texts: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    subject: str = "",
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run everything that people do with a cache, and hold each output against a run without a cache.

    The reference is the same decoder in float64 without a cache, or in float32 where there is no memory for a copy.
    Modules are in eval mode meanwhile.

    Args:
        decoder: the model and its cache: a `HuggingFaceDecoder`, or your own `Decoder`.
        texts: three texts of at least 24 token ids each; default: random tokens.
        seed: of those.
        subject: what the report calls the decoder; default: its class.
        progress: called with the name of each scenario when it begins.

    Returns:
        A `Report`: its `is_right` says whether some scenario was run and none was corrupt or raised; `str` is a table.

    Raises:
        InvalidTypeError, InvalidValueError: an argument is not what is described above, or there is no memory for any
            reference. And what `decoder.new_cache` raises.

    Example::

        print(verify(HuggingFaceDecoder(model, "kvcache", storage="int8", attention=True)))
    """
    if not isinstance(decoder, Decoder):
        raise InvalidTypeError(f"decoder is a {type(decoder).__name__}; expected a kvcache.verify.Decoder")
    if progress is not None and not callable(progress):
        raise InvalidTypeError(f"progress is a {type(progress).__name__}; expected a function of one str")
    with _in_eval_mode(decoder.module):
        decoder.new_cache(1, SHORTEST_TEXT)  # what cannot make one is refused here, and no scenario's fault
        run = _Verification(decoder, _texts(decoder, texts, check_int("seed", seed, minimum=0)))
        findings = []
        for scenario in SCENARIOS:
            if progress is not None:
                progress(scenario.name)
            findings.append(run.finding(scenario))
    dtype = dtype_name(decoder.dtype)
    reference = f"{dtype_name(run.reference_decoder.dtype)} without a cache"
    if run.reference_decoder.dtype != torch.float64:
        reference += " (too little memory for float64)"
    return Report(subject or type(decoder).__name__, dtype, reference, findings)


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _texts(decoder: Decoder, texts: Sequence[Sequence[int]] | None, seed: int) -> list[Text]:
    if texts is None:
        return _random_texts(decoder, seed)
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InvalidTypeError(f"texts is a {type(texts).__name__}; expected {NUM_TEXTS} lists of token ids")
    checked = [tuple(check_token_ids(f"texts[{index}]", text)) for index, text in enumerate(texts)]
    lengths = [len(text) for text in checked]
    if len(checked) != NUM_TEXTS or min(lengths) < SHORTEST_TEXT:
        raise InvalidValueError(
            f"texts are {len(checked)} of {lengths} tokens; expected {NUM_TEXTS} of at least {SHORTEST_TEXT}"
        )
    for index, text in enumerate(checked):
        if not 0 <= min(text) <= max(text) < decoder.vocab_size:
            raise InvalidValueError(
                f"texts[{index}] has ids from {min(text)} to {max(text)}; expected 0 to {decoder.vocab_size - 1}"
            )
    length = min(_longest_text(decoder), *lengths)
    return [text[:length] for text in checked]


def _longest_text(decoder: Decoder) -> int:
    length = TEXT_LENGTH if decoder.max_tokens is None else min(TEXT_LENGTH, decoder.max_tokens)
    if length < SHORTEST_TEXT:
        raise InvalidValueError(f"the decoder takes {length} tokens; expected at least {SHORTEST_TEXT}")
    return length


def _random_texts(decoder: Decoder, seed: int) -> list[Text]:
    generator = torch.Generator().manual_seed(seed % 2**63)
    first = min(1, decoder.vocab_size - 1)  # 0 is often padding, which transformers warns of
    ids = torch.randint(first, decoder.vocab_size, (NUM_TEXTS, _longest_text(decoder)), generator=generator)
    return [tuple(row) for row in ids.tolist()]


class _Verification:
    """A decoder, the same in the reference's dtype, and what both say without a cache."""

    def __init__(self, decoder: Decoder, texts: list[Text]) -> None:
        self.decoder, self.texts = decoder, texts
        self.reference_decoder = _reference(decoder)
        self.uncached = as_stored(decoder)
        self.reference = uncached(self.reference_decoder)
        token = torch.zeros(1, 1, dtype=torch.int64, device=decoder.device)
        knows_codec = self.reference_decoder.forward_through_codec(token) is not None
        self.rounded_reference = as_stored(self.reference_decoder) if knows_codec else self.reference
        self.case = Case(self.reference_decoder, _random_texts(decoder, seed=0))
        self.knows_rounding = knows_codec or not decoder.is_lossy
        self.runs_once_more = self.knows_rounding and (knows_codec or torch.finfo(decoder.dtype).bits == 16)

    def finding(self, scenario: Scenario) -> Finding:
        """Run one scenario and judge it."""
        try:
            steps = scenario.run(self.decoder, self.texts)
        except NotSupportedError as error:
            return Finding(scenario.name, Verdict.NOT_RUN, reason=_one_line(error))
        except Exception as error:
            return Finding(scenario.name, Verdict.ERROR, reason=_raised(error))
        errors = errors_of(steps, self.uncached, self.reference)
        wrong = self._wrong(errors)
        wrong_once_more: list[Place] = []
        reason = None
        if self.runs_once_more or (wrong and self.knows_rounding):
            try:
                wrong_once_more = self._wrong_once_more(scenario)
            except Exception as error:
                reason = f"cannot be run in {dtype_name(self.reference_decoder.dtype)}: {_raised(error)}"
        corruption = None
        if wrong_once_more:
            bound = reference_limit(self.reference_decoder)
            corruption = self._corruption(scenario, self.reference_decoder, wrong_once_more[0], bound)
        elif wrong:
            corruption = self._corruption(scenario, self.decoder, wrong[0], rounding_bound(errors, self.decoder.dtype))
        if corruption is not None:
            verdict = Verdict.CORRUPT
        elif self.decoder.is_lossy:
            verdict = Verdict.LOSSY
        else:
            verdict = Verdict.EXACT if errors.bits_equal else Verdict.ROUNDING
        return Finding(
            scenario.name,
            verdict,
            len(errors.places),
            errors.largest_cached,
            errors.largest_uncached,
            loss_of(steps, self.reference) if self.decoder.is_lossy else None,
            corruption,
            reason,
        )

    def _wrong(self, errors: Errors) -> list[Place]:
        wrong = beyond_rounding(errors, self.decoder, self.reference)
        if self.knows_rounding:
            return wrong
        # The run it is held against has gone through the cache too, so that it may be wrong itself.
        lost = {*wrong, *errors.above(LARGEST_LOSS)}
        return [place for place in errors.places if place in lost]

    def _wrong_once_more(self, scenario: Scenario) -> list[Place]:
        steps = scenario.run(self.reference_decoder, self.texts)
        errors = errors_of(steps, self.rounded_reference, self.rounded_reference)
        # Some models give NaN for padding in float64 alone (their mask's -1.8e308 is -inf in a float32 softmax).
        return errors.above(reference_limit(self.reference_decoder), count_nan=False)

    def _corruption(self, scenario: Scenario, decoder: Decoder, place: Place, bound: float) -> Corruption:
        try:
            layer = first_wrong_layer(decoder, lambda decoder: scenario.run(decoder, self.texts), place, bound)
        except Exception:  # of a decoder that does not do the same again
            layer = None
        cause = likely_cause(self.case, scenario)
        if cause is None and layer == BEFORE_THE_FIRST:
            cause = "position offset"  # before the first layer there are tokens and, in some models, positions
        return Corruption(place.step, place.row, place.token, layer, cause)


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__


def _reference(decoder: Decoder) -> Decoder:
    """Return the decoder in float64, or in float32 where memory does not suffice.

    Raises:
        InvalidValueError: it does not suffice for either.
    """
    if decoder.dtype == torch.float64:
        return decoder
    free = free_memory(decoder.device)
    num_weights = sum(weights.numel() for weights in decoder.module.parameters())
    for dtype in (torch.float64, torch.float32):
        if decoder.dtype == dtype:
            return decoder
        needed = int(num_weights * dtype.itemsize * MEMORY_MARGIN)
        if free is None or needed <= free:
            return decoder.copied(dtype)
    assert free is not None
    raise InvalidValueError(
        f"the reference needs {needed / 1e9:.1f} GB for the weights in float32, {free / 1e9:.1f} GB are free; expected "
        "a smaller model or more memory"
    )
