"""Draws what benchmarks/decode.py measured, from its results file.

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.decode_plot

It reads benchmarks/results/decode.json and writes decode.png beside it.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

RESULTS = Path(__file__).parent / "results" / "decode.json"
COLORS = {
    "kvcache": "C3",
    "vLLM": "C0",
    "OpenVINO": "C2",
    "llama.cpp": "C4",
    "transformers, DynamicCache": "0.35",
    "transformers, StaticCache": "0.65",
}
LINES: dict[str, tuple[Any, str]] = {
    "float32": (":", "^"),
    "bfloat16": ("-", "o"),
    "int8": ("--", "s"),
    "4-bit": ("-.", "D"),
}  # and markers

Row = dict[str, Any]  # of the results file


def plot(data: dict[str, Any], path: Path) -> None:
    rows = [row for row in data["rows"] if row["lookup"] is None and "skipped" not in row]
    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(4.6 * len(batches), 6.2), layout="constrained")
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        draw(axes, [row for row in rows if row["batch"] == batch])
        axes.set_title("1 prompt" if batch == 1 else f"{batch} prompts")
    figure.axes[0].set_ylabel("tokens a second, all prompts")
    handles = [Line2D([], [], color=color, linewidth=3, label=side) for side, color in COLORS.items()]
    handles += [
        Line2D([], [], color="black", linestyle=line, marker=marker, label=f"{dtype} weights")
        for dtype, (line, marker) in LINES.items()
    ]
    handles.append(Line2D([], [], color="gold", linewidth=5, alpha=0.6, label="memory limit of these weights"))
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, handlelength=3.2)
    figure.supxlabel(
        f"smollm2, {data['machine']}; memory read with {data['median_gigabytes_per_second']:.1f} GB/s; medians",
        fontsize="small",
        color="dimgray",
    )
    figure.savefig(path, dpi=150)


def draw(axes: Axes, rows: list[Row]) -> None:
    contexts = sorted({row["context"] for row in rows})
    places = {context: place for place, context in enumerate(contexts)}
    limits: dict[str, dict[int, float]] = {}
    for side, color in COLORS.items():
        for dtype, (line, marker) in LINES.items():
            found = {row["context"]: row for row in rows if (row["side"], row["dtype"]) == (side, dtype)}
            for context, row in found.items():
                if row["over_limit"]:
                    limits.setdefault(dtype, {})[context] = row["tokens_per_second"] * row["over_limit"]
            axes.plot(
                [places[context] for context in sorted(found)],
                [found[context]["tokens_per_second"] for context in sorted(found)],
                color=color,
                linestyle=line,
                marker=marker,
                markersize=5,
                linewidth=2.2 if side == "kvcache" else 1.3,
                zorder=3 if side == "kvcache" else 2,
            )
    for dtype, speeds in limits.items():
        axes.plot(
            [places[context] for context in sorted(speeds)],
            [speeds[context] for context in sorted(speeds)],
            color="gold",
            linestyle=LINES[dtype][0],
            linewidth=4,
            alpha=0.6,
            zorder=1,
        )
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_xlim(-0.2, len(contexts) - 0.8)
    axes.set_xlabel("tokens of context")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda speed, _: f"{speed:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", alpha=0.3)


if __name__ == "__main__":
    plot(json.loads(RESULTS.read_text()), RESULTS.with_suffix(".png"))
