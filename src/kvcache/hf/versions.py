"""Which releases of transformers the adapter works with, and what differs between them.

Since 5.24 models take their cache as `cache`, and under its older name `past_key_values` with a warning. Before, they
take `past_key_values` only, and a forward swallows a `cache` without a word.
"""

from importlib import metadata

OLDEST = "5.21"  # what pyproject.toml declares and constraints-oldest.txt pins


def check_transformers() -> None:
    """Raise `ImportError` if the installed transformers is older than what the adapter needs."""
    if _is_older_than(OLDEST):
        installed = metadata.version("transformers")
        raise ImportError(
            f"kvcache.hf needs transformers >= {OLDEST}, and {installed} is installed: "
            f"pip install 'transformers>={OLDEST},<6'",
            name="transformers",
        )


def _is_older_than(release: str) -> bool:
    return _major_and_minor(metadata.version("transformers")) < _major_and_minor(release)


def _major_and_minor(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


CACHE_ARGUMENTS = ("past_key_values",) if _is_older_than("5.24") else ("cache", "past_key_values")
CACHE_ARGUMENT = CACHE_ARGUMENTS[0]  # the name under which models take their cache
