"""Draws what benchmarks/generate.py measured, from its results file.

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.generate_plot

It reads benchmarks/results/generate.json and writes generate.png beside it.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results" / "generate.json"
BASELINE = "DynamicCache"
COLORS = {  # transformers' caches in grey
    "DynamicCache": "0.35",
    "StaticCache": "0.65",
    "cache_for": "C0",
    "use_attention, float32": "C1",
    "use_attention, bfloat16": "C2",
    "use_attention, int8": "C3",
}

Row = dict[str, Any]  # of the results file


def plot(data: dict[str, Any], path: Path) -> None:
    rows = data["rows"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure = Figure(figsize=(13, 4.2 * len(dtypes) + 0.6), layout="constrained")
    for line, dtype in zip(figure.subplots(len(dtypes), 2, squeeze=False), dtypes, strict=True):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        bars(line[0], of_dtype, "tokens_per_second", 1, ".1f")
        line[0].set_ylabel("tokens a second, all requests")
        line[0].set_title(f"Decode, {dtype} weights")
        bars(line[1], of_dtype, "peak_memory", 1e-6, ".0f")
        line[1].set_ylabel("MB at the peak, beyond the model")
        line[1].set_title(f"Memory, {dtype} weights")
    handles = {bar.get_label(): bar for axes in figure.axes for bar in axes.containers}
    systems = [system for system in COLORS if system in handles]
    figure.legend(
        [handles[system] for system in systems], systems, loc="outside upper center", ncols=len(systems), frameon=False
    )
    figure.supxlabel(
        f"{data['model']}, {data['machine']}; medians. * the cache was filled without processing the prompts",
        fontsize="small",
        color="dimgray",
    )
    figure.savefig(path, dpi=150)


def bars(axes: Axes, rows: list[Row], column: str, factor: float, form: str) -> None:
    """Draw a group of bars for each setting, one bar a system."""
    settings = list(dict.fromkeys((row["batch"], row["context"], row["prefill"]) for row in rows))
    systems = [system for system in COLORS if any(row["system"] == system for row in rows)]
    width = 0.84 / len(systems)
    for index, system in enumerate(systems):
        places, heights = [], []
        for group, setting in enumerate(settings):
            for row in rows:
                if row["system"] == system and (row["batch"], row["context"], row["prefill"]) == setting:
                    places.append(group + (index - (len(systems) - 1) / 2) * width)
                    heights.append(row[column] * factor)
        drawn = axes.bar(places, heights, width, color=COLORS[system], label=system)
        axes.bar_label(drawn, [f"{height:{form}}" for height in heights], fontsize=6, rotation=90, padding=2)
    labels = [
        f"{'1 request' if batch == 1 else f'{batch} requests'}\n{context:,} tokens{'' if prefill else ' *'}"
        for batch, context, prefill in settings
    ]
    axes.set_xticks(range(len(settings)), labels)
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


if __name__ == "__main__":
    plot(json.loads(RESULTS.read_text()), RESULTS.with_suffix(".png"))
