"""`kvcache plan`: what of a model fits into memory, and how fast it can decode at best."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvcache.checks import check_dtype, dtype_name
from kvcache.cli import machine, options, units
from kvcache.errors import InvalidValueError
from kvcache.memory import free_memory, parse_size
from kvcache.plan import Machine, Plan
from kvcache.storage.codecs import check_storage

EPILOG = """
Examples:

  kvcache plan --context 8192

  kvcache plan --context 32768 --batch 16 --dtype bfloat16 --storage int8 --memory 8GiB --bandwidth 50

  kvcache plan --model ./my-model --context 4096 --plot plan.png
"""

STORAGES = ("float32", "bfloat16", "int8", "int8/int4", "int4")
MACHINE = "Machine"


def plan(
    model: options.Model = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens of each sequence.", min=1)] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences that are decoded at once.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16 or float64.")] = "float32",
    storage: options.Storage = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Keep rows in whole blocks of so many tokens, as a pool does; default: single rows.", min=1),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="For weights and cache: 2GiB, 500MB, or bytes; default: what is free on this machine.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            help="GB/s at which memory is read; default: measured here, in about a second.", rich_help_panel=MACHINE
        ),
    ] = None,
    compute: Annotated[
        float | None,
        typer.Option(help="GFLOP/s; default: not known, and left out of times.", rich_help_panel=MACHINE),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw memory and step time over the context into this .png, .svg or .pdf.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object.", rich_help_panel=options.OUTPUT)
    ] = False,
) -> None:
    """Say what fits into memory, and how fast decoding can be at best, from a model's configuration alone.

    No weights are loaded. Step times are limits, not predictions: what has to be read is read once, at full speed.

    The default model is fetched (93 MB) and converted once, as its configuration comes with it.
    """
    dtype = dtype_name(check_dtype("--dtype", dtype))
    kept = check_storage("--storage", dtype if storage is None else storage)
    given_memory = None if memory is None else parse_size("--memory", memory)
    for name, value in (("--bandwidth", bandwidth), ("--compute", compute)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidValueError(f"{name} is {value}; expected a finite number above 0")
    messages = Console(stderr=True)
    with messages.status("Starting") as status:
        if plot is not None:
            from kvcache.cli import plan_plot  # first, as it says what to install where matplotlib is missing

            plan_plot.check_suffix(plot)
        from kvcache import hf  # noqa: F401  # says what to install where transformers is missing
        from kvcache.cli.configuration import model_sizes
        from kvcache.cli.plan_report import PlanReport
        from kvcache.hf.models import load_config

        sizes = model_sizes(load_config(model, progress=status.update))
        available = given_memory or free_memory()
        assert available is not None  # psutil comes with transformers' extra
        nbytes = sizes.num_parameters * check_dtype("--dtype", dtype).itemsize
        _check_weights_fit(model, dtype, nbytes, available, given_memory is not None)
        status.update("Measuring the bandwidth")
        speed = machine.measure_bandwidth() if bandwidth is None else bandwidth * 1e9
    made = Plan(
        sizes,
        Machine(available, speed, None if compute is None else compute * 1e9),
        context,
        batch,
        dtype=dtype,
        storage=kept,
        block_size=block_size,
    )
    report = PlanReport(
        model,
        made,
        [dataclasses.replace(made, storage=each) for each in dict.fromkeys([*STORAGES, kept.name])],
        memory_is_given=given_memory is not None,
        bandwidth_is_given=bandwidth is not None,
    )
    if (warning := report.warning) is not None:
        messages.print(warning, style="yellow", highlight=False, soft_wrap=True)
    if plot is not None:
        plan_plot.draw(report, plot)
    if as_json:
        print(report.as_json())
    else:
        report.print()


def _check_weights_fit(model: str, dtype: str, nbytes: int, memory: int, is_given: bool) -> None:
    if nbytes > memory:
        has = f"--memory is {units.size(memory)}" if is_given else f"{units.size(memory)} of memory are free"
        raise InvalidValueError(
            f"the weights of {model} take {units.size(nbytes)} in {dtype}, and {has}: {units.size(nbytes - memory)} "
            "too little"
        )
