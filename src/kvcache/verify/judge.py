"""Is a difference between a cached and an uncached run rounding or a fault?

The error of an output is the length of its difference from the reference's over the length of the reference's. Two
measures decide, so that neither a loose bound hides a small fault nor an unlucky rounding looks like one:

    as it is run   the largest error with the cache is at most 4 times the largest without it over the same outputs
                   (or a few units in the last place). Where it is more, the uncached run is repeated with weights
                   that are off by a unit in the last place: an output that moves a quarter as far by that alone is
                   rounding.
    once more      the same run in the reference's dtype, where rounding is far below what a fault does. Left out where
                   the run itself is in float32 or float64, nothing is rounded on purpose and nothing looks wrong.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcache.verify.decoder import Decoder
from kvcache.verify.trial import Step, Text, Texts, as_stored

FACTOR = 4.0
FLOOR_ULPS = 4
ROUNDING_LIMIT = {torch.float64: 1e-6, torch.float32: 1e-3}  # of runs in the reference's dtype, by that dtype
NUDGES = 6
HOPELESS = 1000.0  # times the error by rounding, which further runs will not explain either


@dataclass(frozen=True)
class Place:
    """One output of a run."""

    step: int
    row: int
    text: Text  # up to the token whose output it is

    @property
    def token(self) -> int:
        """The token's index in its text, from 0."""
        return len(self.text) - 1


@dataclass(frozen=True)
class Errors:
    """How far the outputs of a run are from a reference."""

    places: list[Place]
    cached: torch.Tensor  # (N,), relative
    uncached: torch.Tensor
    bits_equal: bool  # cached and uncached outputs are the same numbers

    @property
    def largest_cached(self) -> float:
        """The largest error with the cache."""
        return float(self.cached.max())

    @property
    def largest_uncached(self) -> float:
        """The largest error without it."""
        return float(self.uncached.max())

    def above(self, bound: float, *, count_nan: bool = True) -> list[Place]:
        """Return the places whose error is above, in the order in which they were computed."""
        found = zip(self.places, self.cached.tolist(), strict=True)
        return [place for place, error in found if error > bound or (count_nan and math.isnan(error))]


@dataclass(frozen=True)
class Loss:
    """What storing rows with less precision costs, over the outputs of a run."""

    kl_divergence: float  # mean of KL(reference || cached), in nats
    top1_agreement: float  # share of outputs whose likeliest token is the reference's


def outputs_of(steps: Sequence[Step]) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield every output (V,) with its place."""
    for number, step in enumerate(steps):
        for row, index, text in step.places():
            yield Place(number, row, text), step.outputs[row, index]


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |output - expected| / |expected|, NaN where the output is NaN."""
    expected = expected.double()
    error = float((output.double() - expected).norm())
    return error / max(float(expected.norm()), torch.finfo(torch.float32).tiny)


def errors_of(steps: Sequence[Step], uncached: Texts, reference: Texts) -> Errors:
    """Hold every output of a run, and that of the uncached run of the same text, against a reference."""
    uncached.prepare(steps)
    reference.prepare(steps)
    places, cached_errors, uncached_errors, bits_equal = [], [], [], True
    for place, output in outputs_of(steps):
        expected, without = reference.output(place.text), uncached.output(place.text)
        places.append(place)
        cached_errors.append(relative_error(output, expected))
        uncached_errors.append(relative_error(without, expected))
        bits_equal = bits_equal and torch.equal(output, without)
    return Errors(places, torch.tensor(cached_errors), torch.tensor(uncached_errors), bits_equal)


def loss_of(steps: Sequence[Step], reference: Texts) -> Loss:
    """Return what a lossy run lost."""
    divergences, agreements = [], []
    for place, output in outputs_of(steps):
        expected = reference.output(place.text).double().log_softmax(-1)
        found = output.double().log_softmax(-1)
        divergences.append((expected.exp() * (expected - found)).sum().item())
        agreements.append(float(expected.argmax() == found.argmax()))
    return Loss(sum(divergences) / len(divergences), sum(agreements) / len(agreements))


def reference_limit(decoder: Decoder) -> float:
    """Return the error up to which rounding explains any output of a run with a cache in the reference's dtype."""
    return ROUNDING_LIMIT[decoder.cached_dtype]


def rounding_bound(errors: Errors, dtype: torch.dtype) -> float:
    """Return the error up to which rounding explains any output of a run in this dtype."""
    return FACTOR * max(errors.largest_uncached, FLOOR_ULPS * torch.finfo(dtype).eps)


def beyond_rounding(errors: Errors, decoder: Decoder, reference: Texts) -> list[Place]:
    """Return the places of a run in the decoder's own dtype where rounding does not explain the error."""
    suspects = errors.above(rounding_bound(errors, decoder.dtype))
    if not suspects:
        return []
    found = dict(zip(errors.places, errors.cached.tolist(), strict=True))
    by_rounding = dict.fromkeys({place.text for place in suspects}, 0.0)
    for seed in range(NUDGES):
        nudged = as_stored(_nudged(decoder, seed))
        for text in sorted(by_rounding, key=len, reverse=True):
            error = relative_error(nudged.output(text), reference.output(text))
            by_rounding[text] = max(by_rounding[text], error)
        suspects = [place for place in suspects if not found[place] <= FACTOR * by_rounding[place.text]]
        if all(not found[place] <= HOPELESS * by_rounding[place.text] for place in suspects):
            break  # also where there are none
    return suspects


def _nudged(decoder: Decoder, seed: int) -> Decoder:
    nudged = decoder.copied(decoder.dtype)
    eps = torch.finfo(decoder.dtype).eps
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for weights in nudged.module.parameters():
        if weights.is_floating_point():
            signs = torch.randint(0, 2, weights.shape, generator=generator, device=weights.device) * 2 - 1
            weights.data.mul_((1 + eps * signs).to(weights.dtype))
    return nudged
