"""Hold a cache against a run without one, scenario by scenario."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from kvcache.checks import check_int, dtype_name
from kvcache.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from kvcache.verify.causes import Case, likely_cause
from kvcache.verify.decoder import Decoder
from kvcache.verify.judge import EXACT, FACTOR, Errors, Place, beyond_rounding, errors_of, loss_of
from kvcache.verify.layers import first_wrong_layer
from kvcache.verify.report import Corruption, Finding, Report, Verdict
from kvcache.verify.scenarios import DECODED, SCENARIOS, Scenario
from kvcache.verify.trial import Step, Text, Uncached

NUM_TEXTS = 3
TEXT_LENGTH = 40
SHORTEST_TEXT = 3 * DECODED
MEMORY_MARGIN = 1.2
LARGEST_LOSS = 0.7  # an error beyond which a lossy run has little to do with the reference


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

    Modules are in eval mode meanwhile. The reference is the same decoder in float64 without a cache, or in float32 where there is no memory for a copy.

    Args:
        decoder: the model and its cache: a `HuggingFaceDecoder`, or your own `Decoder`.
        texts: three texts of at least 24 token ids each; default: random tokens.
        seed: of those.
        subject: what the report calls the decoder; default: its class.
        progress: called with the name of each scenario when it begins.

    Returns:
        A `Report`: its `is_right` says whether any scenario was corrupt or raised, `str` of it is a table.

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
    reference = f"{dtype_name(run.exact.dtype)} without a cache"
    if run.exact.dtype != torch.float64:
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
    checked = [tuple(check_int("texts", token, minimum=0) for token in text) for text in texts]
    if len(checked) != NUM_TEXTS or min(map(len, checked)) < SHORTEST_TEXT:
        lengths = [len(text) for text in checked]
        raise InvalidValueError(
            f"texts are {len(checked)} of {lengths} tokens; expected {NUM_TEXTS} of at least {SHORTEST_TEXT}"
        )
    if max(map(max, checked)) >= decoder.vocab_size:
        raise InvalidValueError(f"texts has token {max(map(max, checked))}; expected ids below {decoder.vocab_size}")
    length = min(TEXT_LENGTH, *map(len, checked))
    return [text[:length] for text in checked]


def _random_texts(decoder: Decoder, seed: int) -> list[Text]:
    generator = torch.Generator().manual_seed(seed)
    first = min(1, decoder.vocab_size - 1)  # 0 is often padding, which transformers warns of
    ids = torch.randint(first, decoder.vocab_size, (NUM_TEXTS, TEXT_LENGTH), generator=generator)
    return [tuple(row) for row in ids.tolist()]


class _Verification:
    """A decoder, the same in the reference's dtype, and what both say without a cache."""

    def __init__(self, decoder: Decoder, texts: list[Text]) -> None:
        self.decoder, self.exact, self.texts = decoder, _reference(decoder), texts
        self.uncached = Uncached(decoder)
        self.reference = Uncached(self.exact, through_codec=False)
        self.case = Case(self.exact, _random_texts(decoder, seed=0))
        self.rounded_reference = Uncached(self.exact)
        token = torch.zeros(1, 1, dtype=torch.int64, device=decoder.device)
        knows_codec = self.exact.forward_through_codec(token) is not None
        self.has_exact_run = knows_codec or not decoder.is_lossy
        self.needs_exact_run = self.has_exact_run and (decoder.is_lossy or torch.finfo(decoder.dtype).bits == 16)
        self._lossy_bound = LARGEST_LOSS  # where there is no exact run: the first scenario's error sets it for the rest

    def finding(self, scenario: Scenario) -> Finding:
        """Run one scenario and judge it."""
        try:
            steps = scenario.run(self.decoder, self.texts)
        except NotSupportedError as error:
            return Finding(scenario.name, Verdict.NOT_RUN, reason=_one_line(error))
        except Exception as error:
            return Finding(scenario.name, Verdict.ERROR, reason=f"{type(error).__name__}: {_one_line(error)}")
        errors = errors_of(steps, self.uncached, self.reference)
        corruption = self._corruption(scenario, steps, errors)
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
        )

    def _corruption(self, scenario: Scenario, steps: list[Step], errors: Errors) -> Corruption | None:
        wrong = self._wrong(errors)
        wrong_exactly = self._wrong_exactly(scenario) if wrong or self.needs_exact_run else []
        if wrong_exactly:
            place, decoder, bound = wrong_exactly[0], self.exact, EXACT[self.exact.dtype]
        elif wrong:
            place, decoder, bound = wrong[0], self.decoder, FACTOR * max(errors.largest_uncached, EXACT[torch.float64])
        else:
            return None
        layer = first_wrong_layer(decoder, lambda decoder: scenario.run(decoder, self.texts), place, bound)
        cause = likely_cause(self.case, scenario.name)
        return Corruption(place.step, place.row, place.token, layer, cause)

    def _wrong(self, errors: Errors) -> list[Place]:
        if self.has_exact_run:
            return beyond_rounding(errors, self.decoder, self.reference)
        wrong = errors.above(self._lossy_bound)
        if self._lossy_bound == LARGEST_LOSS:
            self._lossy_bound = min(LARGEST_LOSS, FACTOR * errors.largest_cached)
        return wrong

    def _wrong_exactly(self, scenario: Scenario) -> list[Place]:
        if not self.has_exact_run:
            return []
        try:
            steps = scenario.run(self.exact, self.texts)
        except Exception:  # what runs in its own dtype alone is judged there alone
            return []
        errors = errors_of(steps, self.rounded_reference, self.rounded_reference)
        # Some models give NaN for padding in float64 alone (their mask's -1.8e308 is -inf in a float32 softmax).
        return errors.above(EXACT[self.exact.dtype], count_nan=False)


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__


def _reference(decoder: Decoder) -> Decoder:
    """Return the decoder in float64, or in float32 where memory does not suffice.

    Raises:
        InvalidValueError: it does not suffice for either.
    """
    if decoder.dtype == torch.float64:
        return decoder
    free = _free_memory(decoder.device)
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


def _free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be used, None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kilobytes is None else int(kilobytes) * 1024
