"""`kvcache verify`: is a cache of a model right, and if not, what is wrong with it?"""

import os
import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcache.checks import check_dtype, dtype_name
from kvcache.cli import options
from kvcache.cli.progress import progress_bar
from kvcache.cli.start import collect_again, import_transformers
from kvcache.decoder.weights import Weights
from kvcache.errors import InvalidValueError
from kvcache.storage.codecs import check_storage

if TYPE_CHECKING:
    from kvcache.verify import Decoder, Report

EPILOG = """
Examples:

  kvcache verify --dtype bfloat16

  kvcache verify --storage int8 --attention

  kvcache verify --native --weights int8

  kvcache verify --model ./my-model --cache static

  kvcache verify --model ./my-model --cache my_package.caches:make_cache
"""

# The first 40 tokens of each are taken.
PASSAGES = (
    "A transformer that writes a text reads all of it again for every word, unless it remembers what it has read: "
    "for each token and layer one key, by which the token is found, and one value, which it then contributes. To "
    "remember them is cheap; to compute them again costs more with each word that is written.",
    "The harbour lay quiet that morning, and only the smallest boat had left before the fog came in. Nobody on "
    "the pier could say whether the old man had taken his compass with him, but everyone agreed that he had "
    "crossed the bay more often than any of them, and in weather that was worse than this.",
    "To make the bread, mix five hundred grams of flour with ten grams of salt and three of dry yeast; add the "
    "water slowly and knead until the dough no longer sticks to your hands. Leave it in a warm place for two "
    "hours, shape it, let it rise once more, and bake it until the crust is brown.",
)
STYLES = {"exact": "green", "rounding": "green", "lossy as configured": "green", "CORRUPT": "bold red", "ERROR": "red"}


def verify(
    model: options.Model = "smollm2",
    cache: Annotated[
        str,
        typer.Option(
            help="Whose cache: [bold]kvcache[/bold] (this package's), [bold]dynamic[/bold] or [bold]static[/bold] "
            "(transformers'), or [bold]package.module:factory[/bold], sought in this directory too: "
            "factory(model, max_tokens) returns an empty one."
        ),
    ] = "kvcache",
    storage: Annotated[
        str | None,
        typer.Option(
            help="Of --cache kvcache: how rows are kept: bfloat16, int8, int8/int4 ...; default: the --dtype."
        ),
    ] = None,
    attention: Annotated[
        bool,
        typer.Option("--attention", help="With --cache kvcache: attention reads the cache as it is stored, in blocks."),
    ] = False,
    native: Annotated[
        bool,
        typer.Option("--native", help="With --cache kvcache: this package runs the model itself, over blocks."),
    ] = False,
    weights: Annotated[
        str | None, typer.Option(help="With --native: int8 for int8 weights; default: as they are.")
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="The factory's cache rounds what it keeps on purpose.")
    ] = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Hold a model's cache against a run without one, in everything that people do with a cache.

    For each scenario the table says how far its outputs are from a reference without one, and whether that is right:

    [green]exact[/green], [green]rounding[/green], [green]lossy as configured[/green]: it is.

    [red]CORRUPT[/red]: at which token and from which layer on it is wrong, and the likely cause.

    [red]ERROR[/red]: the model or its cache raised an exception.

    [dim]not run[/dim]: they have no way to do that.

    The exit status is 0 if nothing is wrong, 1 after CORRUPT or ERROR, 2 for wrong arguments.

    The default model takes one to three minutes. More in docs/verify.md.
    """
    dtype = dtype_name(check_dtype("--dtype", dtype))
    if storage is not None:
        check_storage("--storage", storage)
    _check_native(native, weights, cache, attention=attention, lossy=lossy)
    messages = Console(stderr=True)
    with messages.status("Starting") as status:
        import_transformers()
        from kvcache import hf  # first, as it says what to install where transformers is missing
        from kvcache.verify import HuggingFaceDecoder, NativePoolDecoder
        from kvcache.verify import verify as run
        from kvcache.verify.huggingface import import_factory
        from kvcache.verify.scenarios import SCENARIOS

        sys.path.insert(0, os.getcwd())  # where a factory is likely to be
        factory = import_factory(cache) if ":" in cache else cache

        loaded = hf.load_model(model, dtype=dtype, device=device, progress=status.update)
        decoder: Decoder
        if native:
            decoder = NativePoolDecoder(loaded.model, storage=storage, weights=cast(Weights | None, weights))
        else:
            decoder = HuggingFaceDecoder(loaded.model, factory, storage=storage, attention=attention, is_lossy=lossy)
        texts = [loaded.tokenizer(passage)["input_ids"] for passage in PASSAGES]
        collect_again()
    with progress_bar(messages) as progress:
        task = progress.add_task("", total=len(SCENARIOS))
        names = [scenario.name for scenario in SCENARIOS]
        width = max(map(len, names))

        def tell(name: str) -> None:
            progress.update(task, completed=names.index(name), description=name.ljust(width))
            if not messages.is_terminal:
                print(f"{name} ({names.index(name) + 1} of {len(names)})", file=sys.stderr, flush=True)

        report = run(
            decoder,
            texts=texts,
            subject=_subject(model, cache, storage, attention=attention, native=native, weights=weights),
            progress=tell,
        )
    if as_json:
        print(report.as_json())
    else:
        _print(report)
    if not report.is_right:
        raise typer.Exit(1)


def _check_native(native: bool, weights: str | None, cache: str, *, attention: bool, lossy: bool) -> None:
    if weights is not None and not native:
        raise InvalidValueError(f"--weights is {weights!r}; it belongs to --native")
    if native and (attention or lossy or cache != "kvcache"):
        given = "--attention" if attention else "--lossy" if lossy else f"--cache {cache}"
        raise InvalidValueError(f"--native is given with {given}; expected neither --attention nor another --cache")


def _subject(model: str, cache: str, storage: str | None, *, attention: bool, native: bool, weights: str | None) -> str:
    name = {"kvcache": "kvcache.hf.cache_for", "dynamic": "DynamicCache", "static": "StaticCache"}.get(cache, cache)
    name = "kvcache.hf.NativeDecoder" if native else name
    details = [f"storage {storage}"] if storage else []
    details += [f"{weights} weights"] if weights else []
    details += ["use_attention"] if attention else []
    return f"{model} with {name}" + (f" ({', '.join(details)})" if details else "")


def _print(report: "Report") -> None:
    from kvcache.verify.report import HEADINGS, cells

    console = Console(highlight=False)
    if not console.is_terminal:
        print(report)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if "cached" in heading else "left", no_wrap=heading != "")
    for finding in report.findings:
        scenario, verdict, *rest = cells(finding)
        table.add_row(scenario, Text(verdict, style=STYLES.get(verdict, "dim")), *map(Text, rest))
    console.width = max(console.width, 80)  # a table cut off says less than one that wraps
    console.print(Text(report.title), end="\n\n")
    console.print(table)
    console.print(f"\n[{'bold' if report.is_right else 'bold red'}]{report.summary}.[/]")
