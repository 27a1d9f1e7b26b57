"""Options that several subcommands have, and what is checked of them together."""

import math
from typing import Annotated, Literal

import typer

from kvcache.errors import InvalidValueError

SAMPLING = "Sampling"
OUTPUT = "Output"

Model = Annotated[
    str, typer.Option(help="[bold]smollm2[/bold], a folder in transformers' format, a GGUF file or a hub id.")
]
Dtype = Annotated[str, typer.Option(help="Of the weights and what is computed: float32, bfloat16, float16 or float64.")]
Storage = Annotated[
    str | None,
    typer.Option(
        help="How the cache keeps keys and values: bfloat16, int8, int8/int4 (apart) ...; default: the --dtype."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="int8 runs a copy of the model's matrices in int8, which takes half the reading of 16 bits; default: as "
        "they are."
    ),
]
Device = Annotated[str, typer.Option(help="A torch device, such as cpu or cuda.")]
Temperature = Annotated[
    float,
    typer.Option(
        help="0 takes the likeliest token (greedy); above, tokens are sampled.", min=0.0, rich_help_panel=SAMPLING
    ),
]
TopK = Annotated[
    int, typer.Option(help="Sample among the k likeliest tokens; 0: all.", min=0, rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        help="Sample among the likeliest tokens that sum to this probability.",
        min=0.0,
        max=1.0,
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        help="Drop tokens less likely than this share of the likeliest.", min=0.0, max=1.0, rich_help_panel=SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 makes repeating a token less likely.", rich_help_panel=SAMPLING)
]
PromptLookup = Annotated[
    int,
    typer.Option(
        help="Propose up to this many tokens a step, looked up in the text itself; 0: none. The text is the same, and "
        "comes in fewer steps where it repeats what was said.",
        min=0,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", min=0, rich_help_panel=SAMPLING)]


def check_weights(weights: str | None) -> Literal["int8"] | None:
    """Return what `Engine` takes.

    Raises:
        InvalidValueError: it is something else.
    """
    if weights is None:
        return None
    if weights != "int8":
        raise InvalidValueError(f"--weights is {weights!r}; expected int8, or leave it out")
    return "int8"


def check_sampling(temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float) -> None:
    """Check what the ranges of the single options leave open.

    Raises:
        InvalidValueError: a number is not finite, the penalty is not above 0, or sampling is shaped and not asked for.
    """
    if not (math.isfinite(temperature) and math.isfinite(repetition_penalty) and repetition_penalty > 0):
        raise InvalidValueError(
            f"--temperature is {temperature} and --repetition-penalty {repetition_penalty}; expected finite numbers, "
            "the penalty above 0"
        )
    if temperature == 0 and (top_k, top_p, min_p) != (0, 1.0, 0.0):
        raise InvalidValueError("--top-k, --top-p and --min-p shape sampling; give a --temperature above 0 too")
