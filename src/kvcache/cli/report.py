"""The account of a generation: for people as a few lines, for machines as plain data."""

from typing import Any

from rich.console import Console
from rich.table import Table

from kvcache.cli.run import Run
from kvcache.costs import count_qkv_projections


def projections_with_cache(run: Run) -> int:
    """Return the Q, K, V projections a layer: three for each token processed; the last one sampled never is."""
    return count_qkv_projections(run.prompt_tokens, len(run.token_ids) - 1, use_cache=True)["total_projections"]


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
        "finish_reason": "stop" if run.stopped else "length",
        "time_to_first_token_seconds": run.first_token_seconds,
        "decode_seconds": run.decode_seconds,
        "total_seconds": run.total_seconds,
        "prefill_tokens_per_second": run.prefill_tokens_per_second,
        "decode_tokens_per_second": run.decode_tokens_per_second,
        "qkv_projections_per_layer": projections_without_cache(run)
        if run.cache is None
        else projections_with_cache(run),
        "cache": None
        if run.cache is None
        else {
            "tokens": run.cache.tokens,
            "bytes": run.cache.nbytes,
            "bytes_per_token": run.cache.bytes_per_token,
            "dtype": run.cache.dtype,
        },
    }


def comparison_as_data(cached: Run, uncached: Run) -> dict[str, Any]:
    """Return what `--compare` found as JSON can hold it."""
    return {
        "speedup": uncached.total_seconds / cached.total_seconds,
        "same_tokens": first_difference(cached, uncached) is None,
        "first_difference": first_difference(cached, uncached),
    }


def print_account(console: Console, run: Run, dtype: str, threads: int) -> None:
    """Print the account of one run."""
    generated = len(run.token_ids)
    ended = "ended by the model" if run.stopped else "ended by --max-new-tokens"
    table = _table()
    table.add_row("Tokens", f"{run.prompt_tokens:,} in the prompt, {generated:,} generated ({ended})")
    table.add_row(
        "Prefill", f"{_rate(run.prefill_tokens_per_second)}, first token after {_seconds(run.first_token_seconds)}"
    )
    if (rate := run.decode_tokens_per_second) is not None:
        table.add_row("Decode", f"{_rate(rate)}, {_seconds(run.decode_seconds)} for {_count(generated - 1, 'token')}")
    if run.cache is None:
        table.add_row("Cache", "none: every token computed the whole sequence again")
    else:
        used = run.cache.tokens * run.cache.bytes_per_token
        table.add_row(
            "Cache",
            f"{_size(used)} used of {_size(run.cache.nbytes)} in {run.cache.dtype}: "
            f"{_count(run.cache.tokens, 'token')} of {run.cache.bytes_per_token:,} bytes each",
        )
    with_cache, without = projections_with_cache(run), projections_without_cache(run)
    ratio = f" ({without / with_cache:.1f}x)" if without > with_cache else ""
    table.add_row("Q, K, V", f"{with_cache:,} projections a layer with a cache, {without:,} without{ratio}")
    table.add_row("Run", f"weights in {dtype}, {_count(threads, 'thread')}")
    console.print(table)


def print_comparison(console: Console, cached: Run, uncached: Run, dtype: str, threads: int) -> None:
    """Print both runs side by side."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for heading, align in (("", "left"), ("with cache", "right"), ("without", "right"), ("", "right")):
        table.add_column(heading, justify=align)  # type: ignore[arg-type]
    for name, ours, theirs in (
        ("First token", cached.first_token_seconds, uncached.first_token_seconds),
        ("Later tokens", cached.decode_seconds, uncached.decode_seconds),
        ("Total", cached.total_seconds, uncached.total_seconds),
    ):
        ratio = f"{theirs / ours:.2f}x" if ours else ""
        table.add_row(name, _seconds(ours), _seconds(theirs), ratio)
    rates = cached.decode_tokens_per_second, uncached.decode_tokens_per_second
    table.add_row("Decode", *("-" if rate is None else _rate(rate) for rate in rates))
    projections = projections_with_cache(cached), projections_without_cache(uncached)
    table.add_row(
        "Q, K, V a layer", *(f"{count:,}" for count in projections), f"{projections[1] / projections[0]:.1f}x"
    )
    if cached.cache is not None:
        table.add_row("Cache", _size(cached.cache.nbytes), "none")
    console.print(table)
    console.print()
    console.print(f"[bold]Speed-up[/bold] {uncached.total_seconds / cached.total_seconds:.2f}x in total")
    console.print(f"[bold]Tokens[/bold]   {_verdict(cached, uncached, dtype)}")
    console.print(
        f"[bold]Run[/bold]      {cached.prompt_tokens:,} tokens in the prompt, weights in {dtype}, "
        f"{_count(threads, 'thread')}"
    )


def _verdict(cached: Run, uncached: Run, dtype: str) -> str:
    parted = first_difference(cached, uncached)
    if parted is None:
        return f"identical, all {len(cached.token_ids)}"
    if dtype in ("float16", "bfloat16"):
        return (
            f"part at token {parted + 1}: {dtype} rounds matrix products of different shapes differently, and two "
            "next tokens were nearly as likely; in float32 they stay the same"
        )
    return f"part at token {parted + 1}: two next tokens were as likely as {dtype} can tell"


def _table() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    return table


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.1f} tokens/s"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
