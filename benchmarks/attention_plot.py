"""Draws what benchmarks/attention.py measured, from its results file.

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.attention_plot

It reads benchmarks/results/attention.json and writes attention.png beside it.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

RESULTS = Path(__file__).parent / "results" / "attention.json"
OURS = "kvcache.attend"
LAYOUTS = {"blocks of 16": 16, "one block": None}  # that are drawn, and their block size
SHAPE = ("batch", "heads", "kv_heads", "length", "head_dim")

Row = dict[str, Any]  # of the results file


def plot(data: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(12, 9), layout="constrained")
    axes = figure.subplot_mosaic([[*LAYOUTS], ["sides", "sides"]])
    for layout, block_size in LAYOUTS.items():
        rows = [row for row in data["rows"] if row["side"] == OURS and row["block_size"] == block_size]
        plot_contexts(axes[layout], rows)
        axes[layout].set_title(f"{OURS}, {layout}, 32 heads over 8 of 128")
    axes["one block"].sharey(axes["blocks of 16"])
    plot_sides(axes["sides"], [row for row in data["rows"] if row["block_size"] is None])
    for each in axes.values():
        each.set_ylabel("time over the memory limit")
        each.set_yscale("log")
        each.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        each.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
        each.yaxis.set_minor_formatter(NullFormatter())
        each.axhline(1, color="dimgray", linestyle="--", linewidth=1)
        each.grid(axis="y", alpha=0.3)
    figure.supxlabel(f"{data['machine']}; medians", fontsize="small", color="dimgray")
    figure.savefig(path, dpi=150)


def plot_contexts(axes: Axes, rows: list[Row]) -> None:
    """Draw a line for each storage over the lengths of one sequence."""
    rows = [row for row in rows if (row["batch"], row["heads"]) == (1, 32)]
    lengths = sorted({row["length"] for row in rows})
    for storage, marker in zip(distinct(row["storage"] for row in rows), "os^Dvp", strict=True):
        ratios = {row["length"]: row["over_limit"] for row in rows if row["storage"] == storage}
        axes.plot(lengths, [ratios[length] for length in lengths], marker=marker, label=storage)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}k" if length >= 1024 else length for length in lengths])
    axes.set_xlabel("tokens stored")
    axes.legend(frameon=False)


def plot_sides(axes: Axes, rows: list[Row]) -> None:
    """Draw bars of all sides for each shape and storage that all of them were measured on."""
    ratios = {(shape_of(row), row["storage"], row["side"]): row["over_limit"] for row in rows}
    sides = distinct(row["side"] for row in rows)
    groups = distinct((shape_of(row), row["storage"]) for row in rows if row["side"] != OURS)
    shapes, storages = distinct(shape for shape, _ in groups), distinct(storage for _, storage in groups)
    width = 0.8 / len(sides)
    for index, side in enumerate(sides):
        places = [group + (index - (len(sides) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(places, [ratios[*group, side] for group in groups], width, label=side)
    axes.set_xticks(range(len(groups)), [storage for _, storage in groups], fontsize="small")
    for index, (batch, heads, kv_heads, length, head_dim) in enumerate(shapes):
        middle = (index + 0.5) / len(shapes)
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        label = f"{sequences} of {length:,} tokens\n{heads} heads over {kv_heads} of {head_dim}"
        axes.text(middle, -0.1, label, transform=axes.transAxes, ha="center", va="top")
    for end in range(len(storages), len(groups), len(storages)):
        axes.axvline(end - 0.5, ymax=0.9, color="dimgray", linewidth=1)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(0.7, 3 * axes.get_ylim()[1])  # room for the legend
    axes.legend(frameon=False, ncols=len(sides), loc="upper center")
    axes.set_title("Plain tensors, one new token: all sides")


def shape_of(row: Row) -> tuple[int, ...]:
    return tuple(row[name] for name in SHAPE)


def distinct(items: Any) -> list[Any]:
    """Return each item once, in the order of their first appearance."""
    return list(dict.fromkeys(items))


if __name__ == "__main__":
    plot(json.loads(RESULTS.read_text()), RESULTS.with_suffix(".png"))
