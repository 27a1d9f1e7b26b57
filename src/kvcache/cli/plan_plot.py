"""The picture of `kvcache plan`: memory and step time over the context, a line for each storage."""

import dataclasses
from pathlib import Path

from kvcache.checks import dtype_name
from kvcache.cli import units
from kvcache.cli.plan_report import PlanReport
from kvcache.errors import InvalidValueError
from kvcache.plan import Plan

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ModuleNotFoundError as error:
    name = str(error.name).partition(".")[0]
    raise ModuleNotFoundError(f"--plot needs {name}: pip install 'torch-kvcache[bench]'", name=name) from error


SUFFIXES = (".png", ".svg", ".pdf")
POINTS = 65  # of a line
GREY = "dimgray"


def check_suffix(path: Path) -> None:
    """Check that a picture can be written in the format that the path's suffix names."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidValueError(f"--plot is {str(path)!r}; expected a file that ends with {', '.join(SUFFIXES)}")


def draw(report: PlanReport, path: Path) -> None:
    """Write the picture: up to twice the context that was asked for, which is marked."""
    asked = report.plan
    contexts = sorted({max(1, 2 * asked.context * step // (POINTS - 1)) for step in range(POINTS)})
    lines = {each.codecs.name: [_at(each, context) for context in contexts] for each in report.storages}
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    memory, step = figure.subplots(1, 2)
    _plot_memory(memory, contexts, lines, asked)
    _plot_step(step, contexts, lines, report)
    for axes in (memory, step):
        axes.axvline(asked.context, color=GREY, linestyle=":", linewidth=1)
        axes.set_xlim(0, 2 * asked.context)
        axes.set_ylim(0)
        axes.set_xlabel(f"tokens of each sequence (dotted: {asked.context:,})")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.grid(alpha=0.3)
    handles, labels = step.get_legend_handles_labels()
    figure.legend(handles, labels, title="cache kept in", loc="outside upper center", ncols=len(labels), frameon=False)
    figure.supxlabel(
        f"{report.model}, weights in {dtype_name(asked.dtype)}, {units.count(asked.batch, 'sequence')}",
        fontsize="medium",
        color=GREY,
    )
    figure.savefig(path, dpi=150)


def _at(plan: Plan, context: int) -> Plan:
    return dataclasses.replace(plan, context=context)


def _plot_memory(axes: Axes, contexts: list[int], lines: dict[str, list[Plan]], asked: Plan) -> None:
    sizes = {name: [(plan.weights_nbytes + plan.cache_nbytes) for plan in plans] for name, plans in lines.items()}
    largest = max(nbytes for each in sizes.values() for nbytes in each)
    unit, factor = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    for name, each in sizes.items():
        axes.plot(contexts, [nbytes / factor for nbytes in each], label=name)
    axes.axhline(asked.weights_nbytes / factor, color=GREY, linestyle="--", linewidth=1)
    notes = [f"dashed: the weights alone, {units.size(asked.weights_nbytes)}"]
    if asked.machine.memory <= 1.5 * largest:  # further off it would press the lines together
        axes.axhline(asked.machine.memory / factor, color=GREY, linewidth=1.5)
        notes.append(f"grey: the memory, {units.size(asked.machine.memory)}")
    axes.set_ylabel(unit)
    axes.set_title(f"Memory: weights and cache\n{'; '.join(notes)}", fontsize="medium")


def _plot_step(axes: Axes, contexts: list[int], lines: dict[str, list[Plan]], report: PlanReport) -> None:
    times = {name: [plan.step_seconds for plan in plans] for name, plans in lines.items()}
    largest = max(max(each) for each in times.values())
    unit, factor = ("s", 1) if largest >= 1 else ("ms", 1e-3)
    for name, each in times.items():
        axes.plot(contexts, [seconds / factor for seconds in each], label=name)
    axes.set_ylabel(f"{unit} a step")
    machine = report.plan.machine
    origin = "given" if report.bandwidth_is_given else "measured"
    compute = "compute left out" if machine.compute is None else f"{machine.compute / 1e9:,.0f} GFLOP/s given"
    speeds = f"{machine.bandwidth / 1e9:,.1f} GB/s {origin}, {compute}"
    axes.set_title(f"Decode step, at best\n{speeds}", fontsize="medium")
