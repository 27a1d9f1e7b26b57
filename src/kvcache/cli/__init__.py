"""The `kvcache` command."""

import sys

from kvcache.cli.start import rest_collector


def main(arguments: list[str] | None = None) -> None:
    """Run the command, or say which packages it needs."""
    rest_collector()
    try:
        from kvcache.cli.main import main as run
    except ModuleNotFoundError as error:
        print(f"kvcache: error: the command needs {error.name}: pip install 'torch-kvcache[cli]'", file=sys.stderr)
        sys.exit(2)
    run(arguments)
