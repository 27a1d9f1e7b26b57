"""The entry point of the `kvcache` command: its subcommands, and how it ends when something is wrong."""

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

import kvcache
from kvcache.cli import chat, generate, plan, verify
from kvcache.errors import KVCacheError

app = typer.Typer(
    help="Decode language models with a KV cache that is exact, fast and checked.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command(epilog=generate.EPILOG)(generate.generate)
app.command(epilog=chat.EPILOG)(chat.chat)
app.command(epilog=verify.EPILOG)(verify.verify)
app.command(epilog=plan.EPILOG)(plan.plan)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvcache {kvcache.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command; wrong input ends it with status 2 and one line that says what is wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        with _plain_warnings():
            status = app(arguments, prog_name="kvcache", standalone_mode=False)
    except TyperException as error:  # unknown options, values out of range
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if "unexpected extra argument" in message:
            message += "; quote a prompt of several words"
        status = _fail(message) if message else 2  # no arguments at all: the help has been shown
    except (KVCacheError, ModuleNotFoundError) as error:  # a missing package names the extra that brings it
        status = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except OSError as error:  # a full disk behind standard output, say
        status = _fail(str(error))
    sys.exit(status)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show each warning once, as a line of its own without the code that it comes from."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        line = " ".join(str(message).split())
        if line not in shown:
            shown.add(line)
            print(f"kvcache: warning: {line}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _fail(message: str) -> int:
    print(f"kvcache: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
