"""What a verification found: for people as a table, for machines as plain data."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvcache.verify.judge import Loss
from kvcache.verify.layers import BEFORE_THE_FIRST


class Verdict(StrEnum):
    """What was found in one scenario."""

    EXACT = "exact"  # bit for bit what a run without a cache gives
    ROUNDING = "rounding"  # different, but not more than rounding in the dtype explains
    LOSSY = "lossy as configured"  # rows are kept with less precision, and nothing else is wrong
    CORRUPT = "CORRUPT"
    ERROR = "ERROR"  # the decoder or its cache raised
    NOT_RUN = "not run"  # the decoder or its cache has no way to do it

    @property
    def is_failure(self) -> bool:
        """Whether it is corrupt or raised."""
        return self in (Verdict.CORRUPT, Verdict.ERROR)


@dataclass(frozen=True)
class Corruption:
    """Where a wrong output was seen first, and what explains it."""

    step: int  # of the scenario's, from 0
    row: int  # of the batch
    token: int  # its index in the text of that row, from 0
    layer: int | None  # from 0, -1: before the first; None: not known
    cause: str | None  # None: none of the known ones

    def __str__(self) -> str:
        where = f"at token {self.token}" + (f" of row {self.row}" if self.row else "")
        if self.layer == BEFORE_THE_FIRST:
            where += ", before the first layer"
        elif self.layer is not None:
            where += f", from layer {self.layer} on"
        return f"{self.cause or 'cause unknown'}; first {where}"


@dataclass(frozen=True)
class Finding:
    """One scenario's verdict. Errors are relative: |difference| / |reference|, the largest of the run's outputs."""

    scenario: str
    verdict: Verdict
    num_outputs: int = 0
    cached_error: float | None = None
    uncached_error: float | None = None
    loss: Loss | None = None
    corruption: Corruption | None = None
    reason: str | None = None  # why it was not run, not run once more in float64, or what was raised

    @property
    def note(self) -> str:
        """What there is to say beside the figures."""
        parts = [] if self.corruption is None else [str(self.corruption)]
        if self.corruption is None and self.loss is not None:
            parts.append(f"KL {self.loss.kl_divergence:.1e}, top-1 {self.loss.top1_agreement:.1%}")
        return "; ".join([*parts, *([self.reason] if self.reason else [])])


@dataclass(frozen=True)
class Report:
    """The findings of all scenarios. `str` is a table, `as_data` what JSON can hold."""

    subject: str
    dtype: str
    reference: str
    findings: list[Finding]

    @property
    def title(self) -> str:
        """What was verified, and against what."""
        return f"{self.subject} in {self.dtype}: largest errors against {self.reference}"

    @property
    def is_right(self) -> bool:
        """Whether some scenario was run, and none was corrupt or raised."""
        verdicts = {finding.verdict for finding in self.findings}
        return bool(verdicts - {Verdict.NOT_RUN}) and not any(verdict.is_failure for verdict in verdicts)

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        counts = {verdict: sum(finding.verdict == verdict for finding in self.findings) for verdict in Verdict}
        failed = counts[Verdict.CORRUPT], counts[Verdict.ERROR]
        right = len(self.findings) - sum(failed) - counts[Verdict.NOT_RUN]
        parts = [f"{right} of {right + sum(failed)} scenarios are right"]
        parts += [
            f"{number} {word}" for number, word in zip(failed, ("corrupt", "raised an error"), strict=True) if number
        ]
        if counts[Verdict.NOT_RUN]:
            parts.append(f"{counts[Verdict.NOT_RUN]} not run")
        return ", ".join(parts)

    def as_data(self) -> dict[str, Any]:
        """Return everything as JSON can hold it; an error or a loss that is no finite number is None."""
        findings = [{**_finite(asdict(finding)), "verdict": finding.verdict.value} for finding in self.findings]
        return {
            "subject": self.subject,
            "dtype": self.dtype,
            "reference": self.reference,
            "is_right": self.is_right,
            "findings": findings,
        }

    def as_json(self) -> str:
        """Return `as_data` as text."""
        return json.dumps(self.as_data(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        rows = [cells(finding) for finding in self.findings]
        widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
        lines = [_line(row, widths) for row in (HEADINGS, *rows)]
        return "\n".join([self.title, "", *lines, "", f"{self.summary}."])


HEADINGS = ("scenario", "verdict", "cached", "uncached", "")  # the errors with a cache and without


def cells(finding: Finding) -> tuple[str, ...]:
    """Return a finding as the cells of a table below `HEADINGS`."""
    errors = (finding.cached_error, finding.uncached_error)
    return (
        finding.scenario,
        finding.verdict.value,
        *("" if error is None else f"{error:.1e}" for error in errors),
        finding.note,
    )


def _line(row: Iterable[str], widths: list[int]) -> str:
    scenario, verdict, *errors, note = (
        cell.rjust(width) if column in (2, 3) else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([scenario, verdict, *errors, note]).rstrip()


def _finite(data: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _finite(value) if isinstance(value, dict) else None if _is_not_finite(value) else value
        for name, value in data.items()
    }


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
