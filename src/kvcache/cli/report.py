"""The account of a generation: for people as a few lines, for machines as plain data."""

import json
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcache.cli import units
from kvcache.cli.run import Run
from kvcache.costs import count_qkv_projections
from kvcache.engine import Speculation


def projections_with_cache(run: Run) -> int:
    """Return the Q, K, V projections a layer: three for each token processed; the last one sampled never is."""
    num_new = run.num_processed - run.prompt_tokens
    return count_qkv_projections(run.prompt_tokens, num_new, use_cache=True)["total_projections"]


def projections_without_cache(run: Run) -> int:
    """Return the same for steps that each process everything so far: the prompt, then one token more a step."""
    prompt_step = 3 * run.prompt_tokens
    later_steps = count_qkv_projections(run.prompt_tokens, len(run.token_ids) - 1, use_cache=False)
    return prompt_step + later_steps["total_projections"]


def first_difference(run: Run, other: Run) -> int | None:
    """Return where the new tokens of two runs part, counted from 0, or None where they are the same."""
    for index, (token, other_token) in enumerate(zip(run.token_ids, other.token_ids, strict=False)):
        if token != other_token:
            return index
    shorter, longer = sorted((len(run.token_ids), len(other.token_ids)))
    return None if shorter == longer else shorter


def as_data(run: Run) -> dict[str, Any]:
    """Return a run's figures as JSON can hold them; seconds, bytes, tokens a second."""
    return {
        "generated_tokens": len(run.token_ids),
        "token_ids": run.token_ids,
        "finish_reason": run.completion.finish_reason,
        "runs_through": run.runs_through,
        "time_to_first_token_seconds": run.first_token_seconds,
        "decode_seconds": run.decode_seconds,
        "total_seconds": run.total_seconds,
        "prefill_tokens_per_second": run.prefill_tokens_per_second,
        "decode_tokens_per_second": run.decode_tokens_per_second,
        "speculation": None
        if run.completion.speculation is None
        else {
            "proposed_tokens": run.completion.speculation.num_proposed,
            "accepted_tokens": run.completion.speculation.num_accepted,
        },
        "qkv_projections_per_layer": {
            "with_cache": projections_with_cache(run),
            "without_cache": projections_without_cache(run),
        },
        "cache": None
        if run.cache is None
        else {
            "tokens": run.cache.tokens,
            "bytes": run.cache.nbytes,
            "bytes_stored": run.cache.stored_nbytes,
            "bytes_per_token": run.cache.token_nbytes,
            "storage": run.cache.storage,
        },
    }


def speedup(cached: Run, uncached: Run) -> float:
    """Return how many times as fast the run with the cache was, in total."""
    return uncached.total_seconds / cached.total_seconds


def comparison_as_data(cached: Run, uncached: Run) -> dict[str, Any]:
    """Return what `--compare` found as JSON can hold it."""
    return {
        "speedup": speedup(cached, uncached),
        "same_tokens": first_difference(cached, uncached) is None,
        "first_difference": first_difference(cached, uncached),
    }


@dataclass(frozen=True)
class Report:
    """Everything there is to say about one call of the command."""

    model: str
    dtype: str  # of the weights
    threads: int
    run: Run
    uncached: Run | None = None  # the same again without a cache, where that was asked for
    start_seconds: dict[str, float] = field(default_factory=dict)  # of each stage up to the first text
    weights: str | None = None  # what the run had instead of the model's own

    def as_json(self) -> str:
        """Return all figures as one JSON object."""
        data = {
            "model": self.model,
            "dtype": self.dtype,
            "weights": self.weights,
            "threads": self.threads,
            "prompt_tokens": self.run.prompt_tokens,
            "text": self.run.completion.text,
            "start_seconds": {**self.start_seconds, "total": sum(self.start_seconds.values())},
            **as_data(self.run),
        }
        if self.uncached is not None:
            data["without_cache"] = as_data(self.uncached)
            data["comparison"] = comparison_as_data(self.run, self.uncached)
        return json.dumps(data, indent=2, ensure_ascii=False)

    def print(self) -> None:
        """Print the account for people, below the text."""
        console = Console(highlight=False)
        console.width = max(console.width, 80)  # a table cut off says less than one that wraps
        console.print()
        if self.uncached is None:
            console.print(_account_table(self.run, self.start_seconds))
        else:
            console.print(_comparison_table(self.run, self.uncached))
            console.print(f"\n[bold]{speedup(self.run, self.uncached):.2f}x[/bold] as fast with the cache.", end=" ")
            console.print(f"Tokens are {_verdict(self.run, self.uncached, self.dtype, self.weights)}.")
        ran, _, why = self.run.runs_through.partition(": ")
        ran += f" ({why})" if why else ""
        line = f"{self.model} in {self.dtype} through {ran}, {units.count(self.threads, 'thread')}."
        console.print(f"\n{line}", style="dim", markup=False, soft_wrap=True)


def _account_table(run: Run, start_seconds: dict[str, float]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    if start_seconds:
        table.add_row("Start", _stages(start_seconds))
    generated = len(run.token_ids)
    ended = "ended by the model" if run.completion.finish_reason == "stop" else "ended by --max-new-tokens"
    table.add_row("Tokens", f"{run.prompt_tokens:,} in the prompt, {generated:,} generated ({ended})")
    first_token = f"first token after {units.seconds(run.first_token_seconds)}"
    table.add_row("Prefill", f"{units.rate(run.prefill_tokens_per_second)}, {first_token}")
    if (rate := run.decode_tokens_per_second) is not None:
        duration = f"{units.seconds(run.decode_seconds)} for {units.count(generated - 1, 'token')}"
        table.add_row("Decode", f"{units.rate(rate)}, {duration}")
    if (speculation := run.completion.speculation) is not None:
        steps = units.count(generated - speculation.num_accepted, "step")
        table.add_row("Proposed", f"{_accepted(speculation)} accepted: {generated:,} tokens in {steps}")
    if run.cache is None:
        table.add_row("Cache", "none: every token computed the whole sequence again")
    else:
        table.add_row(
            "Cache",
            f"{units.size(run.cache.stored_nbytes)} used of {units.size(run.cache.nbytes)}, "
            f"{run.cache.token_nbytes:,} bytes a token in {run.cache.storage}",
        )
    with_cache, without = projections_with_cache(run), projections_without_cache(run)
    ratio = f" ({without / with_cache:.1f}x)" if without > with_cache else ""
    table.add_row("Q, K, V", f"{with_cache:,} projections a layer with a cache, {without:,} without{ratio}")
    return table


def _stages(seconds: dict[str, float]) -> str:
    stages = (f"{duration:.1f} s {name.replace('_', ' ')}" for name, duration in seconds.items())
    return f"{sum(seconds.values()):.1f} s: {', '.join(stages)}"


def _accepted(speculation: Speculation) -> str:
    return f"{speculation.num_accepted:,} of {speculation.num_proposed:,}"


def _comparison_table(cached: Run, uncached: Run) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(style="bold")
    for heading in ("with cache", "without", "ratio"):
        table.add_column(heading, justify="right")
    for name, ours, theirs in (
        ("First token", cached.first_token_seconds, uncached.first_token_seconds),
        ("Later tokens", cached.decode_seconds, uncached.decode_seconds),
        ("Total", cached.total_seconds, uncached.total_seconds),
    ):
        table.add_row(name, units.seconds(ours), units.seconds(theirs), f"{theirs / ours:.2f}x" if ours else "")
    rates = cached.decode_tokens_per_second, uncached.decode_tokens_per_second
    table.add_row("Decode", *("-" if rate is None else units.rate(rate) for rate in rates))
    ours, theirs = projections_with_cache(cached), projections_without_cache(uncached)
    table.add_row("Q, K, V a layer", f"{ours:,}", f"{theirs:,}", f"{theirs / ours:.2f}x")
    if (speculation := cached.completion.speculation) is not None:
        table.add_row("Proposed, accepted", _accepted(speculation), "none")
    if cached.cache is not None:
        table.add_row("Cache", units.size(cached.cache.stored_nbytes), "none")
    return table


def _verdict(cached: Run, uncached: Run, dtype: str, weights: str | None) -> str:
    parted = first_difference(cached, uncached)
    if parted is None:
        return f"identical, all {len(cached.token_ids)}"
    if weights is not None:
        return f"the same up to token {parted}: with the cache the weights are in {weights}, which rounds"
    if cached.cache is not None and cached.cache.storage not in (dtype, "float32", "float64"):
        return f"the same up to token {parted}: the cache keeps {dtype} as {cached.cache.storage}, which rounds"
    if dtype in ("float16", "bfloat16"):
        return (
            f"the same up to token {parted}: {dtype} rounds matrix products of different shapes differently, and two "
            "next tokens were nearly as likely; in float32 they stay the same"
        )
    return f"the same up to token {parted}: two next tokens were as likely as {dtype} can tell"
