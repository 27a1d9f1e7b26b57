"""From a name to where a model's files are, and what is said when they cannot be loaded from there."""

import importlib
import logging as python_logging
import os
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvcache.errors import ModelError
from kvcache.hf import smollm2

HUB_TIMEOUT = 10.0  # seconds to wait for the hub's first answer

_loading = threading.Lock()  # transformers' loading sets process-wide defaults, and so does `_quiet`


class Source(NamedTuple):
    """Where a model's files are.

    Attributes:
        place: a folder or a hub id, as transformers takes it.
        failure: what is said when loading from there fails.
        gguf_file: the file in the folder that holds the model, with its whole path; None: transformers' format.
        local_files_only: whether the hub is not to be asked.
        remedy: what is said after any failure.
    """

    place: str
    failure: str
    gguf_file: str | None = None
    local_files_only: bool = True
    remedy: str = ""

    @property
    def shown(self) -> str:
        """How messages name it."""
        return self.gguf_file or self.place

    @property
    def options(self) -> dict[str, Any]:
        """What transformers' `from_pretrained` takes beside the place."""
        options: dict[str, Any] = {"local_files_only": self.local_files_only, "trust_remote_code": False}
        return options if self.gguf_file is None else options | {"gguf_file": self.gguf_file}


def locate(name: str | os.PathLike[str], report: Callable[[str], None]) -> Source:
    """Return where the files of a model are; `report` gets a short line when a slow stage begins.

    Args:
        name: as `load_model` takes it, not empty.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    text = os.fspath(name)
    if name == "smollm2":
        folder = smollm2.prepare(report)
        report("Loading smollm2")
        return Source(str(folder), "smollm2 cannot be loaded", remedy=f"; delete the folder {folder} and try again")
    if not isinstance(name, str) or _looks_like_path(text):
        path = Path(os.path.expanduser(text))  # which leaves it as it is where there is no such home
        source = _at_path(path)
        report(f"Loading {path.name}")
        return source
    return _on_the_hub(text, report)


@contextmanager
def loading(failure: str, remedy: str = "") -> Iterator[None]:
    """Let transformers load something, one at a time, and quietly; whatever it raises becomes one line.

    Raises:
        ModelError: it raised something, which is the cause.
    """
    try:
        with _loading, _quiet():
            yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except ModelError as cause:
        if not remedy:
            raise
        raise ModelError(f"{cause}{remedy}") from cause
    except Exception as cause:
        raise ModelError(f"{failure} ({one_line(cause)}){remedy}") from cause


def one_line(error: BaseException) -> str:
    """Return an exception as one line, of its kind and the first of what it says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return textwrap.shorten(f"{type(error).__name__}: {lines[0] if lines else 'no message'}", 240, placeholder=" ...")


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.endswith(".gguf") or os.path.isabs(text) or os.path.exists(text)


def _at_path(path: Path) -> Source:
    if not os.path.exists(path):
        raise ModelError(f"model path {str(path)!r} does not exist")
    if not path.is_dir():
        _check_is_gguf(path)
        return Source(str(path.parent), f"the GGUF file {str(path)!r} cannot be loaded", str(path.resolve()))
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {str(path)!r} has no config.json; expected a model in transformers' format")
    return Source(str(path), f"the model in {str(path)!r} cannot be loaded")


def _check_is_gguf(path: Path) -> None:
    if path.suffix != ".gguf":
        raise ModelError(f"model path {str(path)!r} is a file; expected a folder or a file that ends with .gguf")
    try:
        with path.open("rb") as stream:
            start = stream.read(4)
    except OSError as cause:
        raise ModelError(f"model path {str(path)!r} cannot be read: {cause.strerror}") from cause
    if start != b"GGUF":
        raise ModelError(f"{str(path)!r} is not a GGUF file: it starts with {start!r}, expected b'GGUF'")


def _on_the_hub(name: str, report: Callable[[str], None]) -> Source:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as cause:
        expected = "'smollm2', an existing path or a hub id such as 'org/name'"
        raise ModelError(f"model {name!r} does not exist; expected {expected}") from cause
    report(f"Loading {name}")
    unreachable = _why_unreachable(name)
    if unreachable is not None and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        remedy = "connect once, or pass the path of a local model"
        raise ModelError(
            f"model {name!r} is not in the local hub cache, and the hub cannot be reached: {remedy} "
            f"({one_line(unreachable)})"
        ) from unreachable
    failure = f"model {name!r} from the hub cannot be loaded"
    return Source(name, failure, local_files_only=unreachable is not None)


def _why_unreachable(name: str) -> Exception | None:
    """Ask the hub for the model once, without the half minute of retries that each file would get without a network."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        address = huggingface_hub.hf_hub_url(name, "config.json")
        huggingface_hub.get_hf_file_metadata(address, timeout=HUB_TIMEOUT, retry_on_errors=False)
    except errors.GatedRepoError as cause:
        remedy = "accept its terms on its page, then log in with `hf auth login`"
        raise ModelError(f"model {name!r} is behind a gate on the hub: {remedy}") from cause
    except errors.RepositoryNotFoundError as cause:
        remedy = "check the name, or log in with `hf auth login` if it is private"
        raise ModelError(f"model {name!r} is not on the hub: {remedy}") from cause
    except errors.EntryNotFoundError as cause:
        raise ModelError(f"model {name!r} on the hub has no config.json; expected a transformers model") from cause
    except Exception as cause:
        return cause
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' warnings and progress bars, then put back what the user had set."""
    from transformers.utils import logging

    gguf_loading: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    gguf_bar, gguf_loading.tqdm = gguf_loading.tqdm, logging.tqdm  # its own would not ask the hook
    hook = logging.set_tqdm_hook(lambda bar, args, options: bar(*args, **{**options, "disable": True}))
    verbosity = logging.get_verbosity()
    logging.set_verbosity(python_logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(hook)
        gguf_loading.tqdm = gguf_bar
