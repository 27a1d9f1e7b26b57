"""What `kvcache plan` found: for people as a few lines and tables, for machines as plain data."""

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcache.checks import dtype_name
from kvcache.cli import units
from kvcache.plan import DecodingWork, Plan, decoding_work


@dataclass(frozen=True)
class PlanReport:
    """Everything there is to say about one call of the command."""

    model: str
    plan: Plan
    storages: list[Plan]  # the same for each storage that is compared
    memory_is_given: bool  # and not what was free
    bandwidth_is_given: bool  # and not measured

    @property
    def warning(self) -> str | None:
        """What is odd about the question."""
        longest = self.plan.model.max_positions
        if longest is None or self.plan.context <= longest:
            return None
        return f"--context is {self.plan.context:,}; the model is made for at most {longest:,} tokens."

    @property
    def work(self) -> tuple[DecodingWork, DecodingWork]:
        """What decoding one sequence up to the context computes, with a cache and without one."""
        with_cache, without = (
            decoding_work(self.plan.model, self.plan.context, use_cache=use) for use in (True, False)
        )
        return with_cache, without

    def as_json(self) -> str:
        """Return all figures as one JSON object."""
        plan = self.plan
        with_cache, without = self.work
        data = {
            "model": self.model,
            "parameters": plan.model.num_parameters,
            "layers": {kind: len(layers) for kind, layers in plan.model.cache.kinds.items()},
            "window": _window(plan),
            "max_positions": plan.model.max_positions,
            "dtype": dtype_name(plan.dtype),
            "context": plan.context,
            "batch": plan.batch,
            "block_size": plan.block_size,
            "machine": {
                "memory_bytes": plan.machine.memory,
                "memory_is_given": self.memory_is_given,
                "bandwidth_bytes_per_second": plan.machine.bandwidth,
                "bandwidth_is_given": self.bandwidth_is_given,
                "flops_per_second": plan.machine.compute,
            },
            "weights_bytes": plan.weights_nbytes,
            **_as_data(plan),
            "decoding": {
                "tokens": plan.context,
                "with_cache": _work_as_data(with_cache),
                "without_cache": _work_as_data(without),
            },
            "storages": [_as_data(each) for each in self.storages],
        }
        return json.dumps(data, indent=2, ensure_ascii=False)

    def print(self) -> None:
        """Print everything for people."""
        console = Console(highlight=False)
        console.width = max(console.width, 80)  # a table cut off says less than one that wraps
        for part in (_account_table(self), _work_table(self), _storage_table(self)):
            console.print(part)
            console.print()
        console.print(_footnote(self), style="dim")


def _as_data(plan: Plan) -> dict[str, Any]:
    return {
        "storage": plan.codecs.name,
        "bytes_per_token": plan.token_nbytes,
        "cache_bytes": plan.cache_nbytes,
        "cache_bytes_by_kind": plan.cache_nbytes_by_kind,
        "missing_bytes": max(0, plan.missing_nbytes),
        "longest_context": plan.longest_context,
        "sequences_that_fit": plan.sequences_that_fit,
        "step": {
            "bytes": plan.step_nbytes,
            "flops": plan.step_flops,
            "seconds": plan.step_seconds,
            "tokens_per_second": plan.tokens_per_second,
        },
    }


def _work_as_data(work: DecodingWork) -> dict[str, int]:
    return {"qkv_projections": work.qkv_projections, "attention_flops": work.attention_flops}


def _account_table(report: PlanReport) -> Table:
    plan, machine = report.plan, report.plan.machine
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    positions = plan.model.max_positions
    longest = "" if positions is None else f", texts of up to {units.count(positions, 'token')}"
    table.add_row("Model", Text(f"{report.model}, {_layers(plan)}{longest}"))
    parameters = f"{plan.model.num_parameters:,} parameters"
    table.add_row("Weights", f"{units.size(plan.weights_nbytes)} in {dtype_name(plan.dtype)}: {parameters}")
    table.add_row("Cache", _cache(plan))
    origin = "given" if report.memory_is_given else "free"
    table.add_row("Memory", f"{units.size(machine.memory)} {origin}: {_fit(plan)}")
    table.add_row("Room for", _room(plan))
    table.add_row("Step", _step(plan))
    origin = "given" if report.bandwidth_is_given else "measured"
    table.add_row("Bandwidth", f"{machine.bandwidth / 1e9:,.1f} GB/s {origin}")
    table.add_row("Compute", "not known, left out" if machine.compute is None else f"{_flops(machine.compute)}/s given")
    return table


def _layers(plan: Plan) -> str:
    kinds = plan.model.cache.kinds
    text = " and ".join(f"{len(layers)} {kind}" for kind, layers in kinds.items()) + " layers"
    return text if _window(plan) is None else f"{text} (window {_window(plan):,})"


def _window(plan: Plan) -> int | None:
    return plan.model.cache.rule("sliding")[0] if "sliding" in plan.model.cache.kinds else None


def _cache(plan: Plan) -> str:
    by_kind = plan.cache_nbytes_by_kind
    parts = ", ".join(f"{units.size(nbytes)} {kind}" for kind, nbytes in by_kind.items())
    blocks = "" if plan.block_size is None else f" in blocks of {plan.block_size:,}"
    return (
        f"{units.size(plan.cache_nbytes)}{f' ({parts})' if len(by_kind) > 1 else ''} in {plan.codecs.name}: "
        f"{_sequences(plan)}{blocks}"
    )


def _sequences(plan: Plan) -> str:
    return f"{units.count(plan.batch, 'sequence')} of {units.count(plan.context, 'token')}"


def _fit(plan: Plan) -> str:
    left = -plan.missing_nbytes
    return f"all fits, {units.size(left)} left" if left >= 0 else f"{units.size(-left)} too little"


def _room(plan: Plan) -> str:
    longest = plan.longest_context
    if longest is None:
        most = f"{units.count(plan.batch, 'sequence')} of any length"
    else:
        most = f"{units.count(plan.batch, 'sequence')} of up to {units.count(longest, 'token')}"
    return f"{most}, or {units.count(plan.sequences_that_fit, 'sequence')} of {units.count(plan.context, 'token')}"


def _step(plan: Plan) -> str:
    return (
        f"{units.size(plan.step_nbytes)} read, {_flops(plan.step_flops)}: "
        f"at best {units.seconds(plan.step_seconds)}, {units.rate(plan.tokens_per_second)}"
    )


def _flops(number: float) -> str:
    for unit, factor in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number:,.0f} FLOP"


def _plain_table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    first, *others = headings
    table.add_column(first, style="bold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _work_table(report: PlanReport) -> Table:
    with_cache, without = report.work
    table = _plain_table(f"Decoding {report.plan.context:,} tokens", "with cache", "without", "ratio")
    projections = with_cache.qkv_projections, without.qkv_projections
    attention = with_cache.attention_flops, without.attention_flops
    for name, (ours, theirs), shown in (
        ("Q, K, V projections", projections, "{:,}".format),
        ("Attention", attention, _flops),
    ):
        table.add_row(name, shown(ours), shown(theirs), f"{theirs / ours:,.0f}x")
    return table


def _storage_table(report: PlanReport) -> Table:
    table = _plain_table(
        "Storage",
        "bytes\na token",
        "cache",
        "longest\ncontext",
        "sequences\nthat fit",
        "step\nat best",
        "tokens\na second",
    )
    for plan in report.storages:
        longest = "any" if plan.longest_context is None else f"{plan.longest_context:,}"
        table.add_row(
            plan.codecs.name,
            f"{plan.token_nbytes:,}",
            units.size(plan.cache_nbytes),
            longest,
            f"{plan.sequences_that_fit:,}",
            units.seconds(plan.step_seconds),
            f"{plan.tokens_per_second:,.1f}",
            style="green" if plan.codecs == report.plan.codecs else None,
        )
    return table


def _footnote(report: PlanReport) -> str:
    plan = report.plan
    each = "" if plan.batch == 1 else f" of each of {plan.batch:,} sequences"
    text = (
        f"Longest context: tokens{each} that fit behind the weights.\n"
        f"Sequences that fit: of {units.count(plan.context, 'token')} each."
    )
    if _window(plan) is not None:
        full = plan.model.cache.token_nbytes(plan.codecs, "full") if "full" in plan.model.cache.kinds else 0
        text += (
            f"\nBehind its window a token keeps {units.count(full, 'byte')} in {plan.codecs.name}, in the full layers."
        )
    return text
