"""`kvcache generate`: continue a prompt, stream the text, and say what the cache saved."""

import secrets
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kvcache.checks import check_dtype, dtype_name
from kvcache.cli import options, units
from kvcache.cli.progress import progress_bar
from kvcache.cli.prompt import encode, read_prompt
from kvcache.cli.start import Stopwatch, collect_again, import_transformers
from kvcache.errors import InvalidValueError, NotSupportedError
from kvcache.storage.codecs import check_storage

EPILOG = """
Examples:

  kvcache generate "Why does a transformer need a KV cache?"

  kvcache generate "What is the capital of France?" --compare

  kvcache generate --prompt-file report.txt --model ./my-model --json

  kvcache generate --prompt-file "correct this.txt" --prompt-lookup 10
"""


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; [bold]-[/bold] reads it from standard input.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file (UTF-8) instead.")] = None,
    model: options.Model = "smollm2",
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many new tokens.", min=1)] = 128,
    min_new_tokens: Annotated[
        int, typer.Option(help="Do not let the model end the text before this many new tokens.", min=0)
    ] = 0,
    dtype: options.Dtype = "float32",
    storage: options.Storage = None,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt as it is, without the model's chat template.")
    ] = False,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep keys and values, or compute all again for every token.")
    ] = True,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run it again without a cache and show both side by side.")
    ] = False,
    prompt_lookup: options.PromptLookup = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the text and nothing else.", rich_help_panel=options.OUTPUT)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object.", rich_help_panel=options.OUTPUT)
    ] = False,
) -> None:
    """Continue a prompt with a language model, and see what the KV cache saved.

    The first run with the default model fetches it (93 MB) and converts it once.
    """
    text = read_prompt(prompt, prompt_file)
    dtype = dtype_name(check_dtype("--dtype", dtype))
    kept = None if storage is None else check_storage("--storage", storage)
    compressed = options.check_weights(weights)
    if kept is not None and not cache:
        raise InvalidValueError("--storage says how a cache keeps rows; leave --no-cache out")
    if compressed is not None and not cache:
        raise InvalidValueError("--weights are the engine's, which keeps a cache; leave --no-cache out")
    if compare and not cache:
        raise InvalidValueError("--compare runs with and without a cache; leave --no-cache out")
    if prompt_lookup and not cache:
        raise InvalidValueError("--prompt-lookup goes back in a cache where it was wrong; leave --no-cache out")
    if min_new_tokens > max_new_tokens:
        raise InvalidValueError(
            f"--min-new-tokens is {min_new_tokens}; expected at most --max-new-tokens = {max_new_tokens}"
        )
    options.check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    messages = Console(stderr=True)
    start = Stopwatch()

    with messages.status("Starting") as status:
        import_transformers()
        from kvcache import hf  # first, as it says what to install where transformers is missing
        from kvcache.cli import report, run
        from kvcache.hf.prompt import fitting_new_tokens

        start.end("imports")
        loaded = hf.load_model(model, dtype=dtype, device=device, progress=status.update)
        start.end("model")
        prompt_ids = encode(loaded.tokenizer, text, raw)
        fitting = fitting_new_tokens(loaded.model, len(prompt_ids))
        generation = {
            "max_new_tokens": min(max_new_tokens, fitting),
            "min_new_tokens": min(min_new_tokens, fitting),
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "prompt_lookup_num_tokens": prompt_lookup,
            "seed": secrets.randbelow(2**31) if seed is None else seed,
        }
        continued = run.Text(*loaded, prompt_ids, generation)
        if cache:
            continued.check_memory(kept)
        collect_again()
    if max_new_tokens > fitting:
        room = units.count(fitting, "new token")
        messages.print(f"The model's context has room for {room}, so no more are generated.")

    def show(piece: str) -> None:
        start.end("first_token")
        if not as_json:
            print(piece, end="", flush=True)

    if not cache:
        continued.warm_up()
        start.end("warm_up")
        first = continued.without_cache(show)
    else:
        try:
            first = continued.through_engine(kept, compressed, show, lambda: start.end("engine"))
        except NotSupportedError as error:
            if compressed is not None:
                raise NotSupportedError(f"--weights {weights} cannot be had for {model}: {error}") from error
            if prompt_lookup:
                raise NotSupportedError(
                    f"--prompt-lookup is the engine's, in which {model} cannot run: {error}; leave it out"
                ) from error
            why = f"{model} cannot run in the engine, so transformers runs it: {error}"
            messages.print(why, markup=False, soft_wrap=True)
            continued.warm_up()
            start.end("warm_up")
            first = continued.through_transformers(kept, show)
    show("\n")
    second = None
    if compare:
        with progress_bar(messages) as bar:
            task = bar.add_task("Again, without a cache", total=len(first.token_ids))
            continued.warm_up()
            second = continued.without_cache(lambda _: None, lambda: bar.advance(task))

    result = report.Report(model, dtype, torch.get_num_threads(), first, second, start.seconds, compressed)
    if as_json:
        print(result.as_json())
    elif not quiet:
        result.print()
