"""What benchmarks/decode.py measured: a row for each case, how it stands to memory and to the engine, and tables."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open
from transformers import AutoConfig

from kvcache import CacheSpec

from .engine import table

OURS, FOUR_BITS = "kvcache", "4-bit"
REFERENCE = "float32"  # whose tokens of the engine's all others are compared with
WIDE = ("float32", "bfloat16")
# Of a weight: a float, or a code of 8 bits and its share of a scale in 16, which 32 have together.
WEIGHT_NBYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 2 / 32}
STORAGES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "bfloat16"}  # of keys and values, by the weights

Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What memory allows: no step is faster than reading the weights, and the keys and values, once."""

    num_weights: int  # of all layers and the head; the embedding of one token is nothing beside them
    token_nbytes: dict[str, int]  # of keys and values
    bandwidths: list[float]  # bytes a second, all measurements of a run

    @classmethod
    def of(cls, folder: Path, results: Iterable[Row]) -> Self:
        spec = CacheSpec.from_config(AutoConfig.from_pretrained(folder))
        with safe_open(folder / "model.safetensors", "pt") as weights:  # the head is the embedding, and there once
            sizes = [weights.get_tensor(name).numel() for name in weights.keys()]  # noqa: SIM118, it is no mapping
        bandwidths = [speed for result in results for speed in result.get("bandwidth", ())]
        return cls(sum(sizes), {name: spec.token_nbytes(kept) for name, kept in STORAGES.items()}, bandwidths)

    @property
    def bandwidth(self) -> float:
        return statistics.median(self.bandwidths)

    def step_seconds(self, dtype: str, context: int, batch: int) -> float | None:
        if dtype not in WEIGHT_NBYTES:
            return None
        weights = self.num_weights * WEIGHT_NBYTES[dtype]
        return (weights + batch * context * self.token_nbytes[dtype]) / self.bandwidth

    def as_row(self) -> Row:
        return {
            "num_weights": self.num_weights,
            "weight_bytes": WEIGHT_NBYTES,
            "token_bytes": self.token_nbytes,
            "median_gigabytes_per_second": self.bandwidth / 1e9,
            "best_gigabytes_per_second": max(self.bandwidths) / 1e9,
        }


def rows_of(results: Mapping[Any, Row], limits: Limits) -> list[Row]:
    """Return a row for each case, in their order, from what its process wrote."""
    rows = []
    tokens: dict[Any, Any] = {}  # of each case's first round
    for case, result in results.items():
        row = asdict(case)
        if "skipped" in result:
            row |= {"skipped": result["skipped"]}
        elif case.lookup is not None:
            rounds = result["rounds"]
            speeds = [one["tokens"] / one["seconds"] for one in rounds]
            row |= {"tokens_per_second": statistics.median(speeds), "new_tokens": len(rounds[0]["token_ids"])}
            tokens[case] = [rounds[0]["token_ids"]]
        else:
            row |= _decoding(result["rounds"], limits.step_seconds(case.dtype, case.context, case.batch), case.batch)
            row |= {name: result[name] for name in ("peak_nbytes", "loaded_nbytes")}
            tokens[case] = result["rounds"][0]["token_ids"]
            row["new_tokens"] = len(tokens[case][0]) if tokens[case] else 0
        rows.append(row)
    for case, row in zip(results, rows, strict=True):
        ours = [key for key in tokens if (key.side, key.dtype) == (OURS, REFERENCE) and _setting(key) == _setting(case)]
        plain = [key for key in tokens if (key.side, key.dtype) == (case.side, case.dtype) and key.lookup == 0]
        row["same_tokens"] = _num_same(tokens.get(case), tokens[ours[0]]) if ours else None
        if case.lookup and plain and "skipped" not in row:
            row["same_as_plain"] = tokens[case] == tokens[plain[0]]
            plain_row = rows[list(results).index(plain[0])]
            row["over_plain"] = row["tokens_per_second"] / plain_row["tokens_per_second"]
    return rows


def _setting(case: Any) -> tuple[int, int, bool]:
    return case.context, case.batch, case.lookup is not None


def _decoding(rounds: list[Row], limit: float | None, batch: int) -> Row:
    step = statistics.median(seconds for one in rounds for seconds in _steps(one["token_seconds"]))
    cold, *seen = rounds
    firsts = [max(times[0] for times in one["token_seconds"]) for one in rounds]
    return {
        "tokens_per_second": batch / step,
        "step_milliseconds": step * 1e3,
        "over_limit": limit and step / limit,
        "prefill_seconds": None if cold.get("is_filled") else firsts[0],
        "seen_milliseconds": statistics.median(firsts[1:]) * 1e3 if seen else None,
        "cached_tokens": seen[0]["cached_tokens"] if seen else None,
    }


def _steps(token_seconds: list[list[float]]) -> list[float]:
    """Return the seconds of the steps in which all texts get a token, and none its first."""
    begin, end = max(times[0] for times in token_seconds), min(times[-1] for times in token_seconds)
    ends = sorted({time for times in token_seconds for time in times if begin <= time <= end})
    return [after - before for before, after in pairwise(ends)]


def _num_same(tokens: list[list[int]] | None, ours: list[list[int]]) -> list[int] | None:
    """Return how many tokens each text has, at its beginning, that the engine's has too."""
    if tokens is None:
        return None
    pairs = [zip(one, other, strict=False) for one, other in zip(tokens, ours, strict=True)]
    return [sum(1 for _ in takewhile(lambda both: both[0] == both[1], pair)) for pair in pairs]


def differing(rows: list[Row]) -> list[str]:
    """Return the engine's cases in which guessing changed the tokens."""
    return [
        f"{row['side']}, {row['dtype']}" for row in rows if row["side"] == OURS and row.get("same_as_plain") is False
    ]


def report(rows: list[Row]) -> str:
    decoding = [row for row in rows if row["lookup"] is None]
    editing = [row for row in rows if row["lookup"] is not None]
    parts = {
        "One prompt": one_prompt([row for row in decoding if row["batch"] == 1]),
        "Several prompts": several_prompts([row for row in decoding if row["batch"] > 1]),
        f"The engine's best of {' and '.join(WIDE)} over each side's best": ratios(decoding),
        "Speculation: editing": speculation(editing),
    }
    return "\n\n".join(f"{title}\n\n{text}" for title, text in parts.items() if text)


def one_prompt(rows: list[Row]) -> str:
    """Return a line for each side and dtype, with a number for each context in a cell."""
    contexts = _distinct(row["context"] for row in rows)
    lines = []
    for side, dtype in _distinct((row["side"], row["dtype"]) for row in rows):
        found = {row["context"]: row for row in rows if (row["side"], row["dtype"]) == (side, dtype)}
        those = [found.get(context, {}) for context in contexts]
        numbers = (
            ("tokens_per_second", ".1f"),
            ("over_limit", ".2f"),
            ("prefill_seconds", ".2f"),
            ("seen_milliseconds", ".0f"),
        )
        cells = [_slashed([_number(row.get(name), form) for row in those]) for name, form in numbers]
        same = [_slashed_same(row) for row in those]
        lines.append((side, dtype, *cells, _memory(those[-1]), _slashed(same)))
    behind = _slashed([f"{context:,}" for context in contexts])
    head = (
        f"side | weights | tokens/s behind {behind} | over limit | prefill, s | seen, ms "
        f"| memory, MB, at {contexts[-1]:,}" + " | same"
        if rows
        else ""
    )
    return table(head, lines) if rows else ""


def several_prompts(rows: list[Row]) -> str:
    lines = [
        (
            f"{row['batch']} x {row['context']:,}",
            row["side"],
            row["dtype"],
            row["skipped"] if "skipped" in row else f"{row['tokens_per_second']:.1f}",
            *(
                _number(row.get(name), form)
                for name, form in (("over_limit", ".2f"), ("prefill_seconds", ".2f"), ("seen_milliseconds", ".0f"))
            ),
            _memory(row),
            _slashed_same(row),
        )
        for row in rows
    ]
    head = "prompts | side | weights | tokens/s | over limit | prefill, s | seen, ms | memory, MB | same"
    return table(head, lines) if rows else ""


def ratios(rows: list[Row]) -> str:
    """Return a line for each side, a column for each setting."""
    settings = sorted({(row["batch"], row["context"]) for row in rows})
    best: dict[tuple[str, int, int], float] = {}
    for row in rows:
        is_ours_in_fewer_bits = row["side"] == OURS and row["dtype"] not in WIDE
        if "skipped" not in row and not is_ours_in_fewer_bits:
            key = row["side"], row["batch"], row["context"]
            best[key] = max(best.get(key, 0.0), row["tokens_per_second"])
    lines = []
    for side in _distinct(row["side"] for row in rows if row["side"] != OURS):
        pairs = [(best.get((OURS, *setting)), best.get((side, *setting))) for setting in settings]
        lines.append((side, *(f"{ours / theirs:.2f}x" if ours and theirs else None for ours, theirs in pairs)))
    head = " | ".join(["side", *(f"{batch} x {context:,}" for batch, context in settings)])
    return table(head, lines) if lines else ""


def speculation(rows: list[Row]) -> str:
    lines = [
        (
            row["side"],
            row["dtype"],
            f"{row['lookup']} tokens" if row["lookup"] else "nothing",
            row["skipped"] if "skipped" in row else f"{row['tokens_per_second']:.1f}",
            _number(row.get("over_plain"), ".2f") and f"{row['over_plain']:.2f}x",
            {None: None, True: "the same", False: "differ"}[row.get("same_as_plain")],
            _slashed_same(row),
        )
        for row in rows
    ]
    head = "side | weights | guessed | tokens/s | over nothing guessed | tokens | same as the engine's in float32"
    return table(head, lines) if rows else ""


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"


def _slashed(cells: list[str | None]) -> str | None:
    return None if not any(cells) else " / ".join(cell or "-" for cell in cells)


def _slashed_same(row: Row) -> str | None:
    """Return of how many new tokens how many are the engine's; of several prompts, the mean."""
    same = row.get("same_tokens")
    return same and f"{statistics.mean(same):.3g} of {row['new_tokens']}"


def _memory(row: Row) -> str | None:
    if "peak_nbytes" not in row:
        return None
    return f"{row['peak_nbytes'] / 1e6:,.0f}, {row['loaded_nbytes'] / 1e6:,.0f}"


def _distinct(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
