"""From a name to a model and its tokenizer.

A name is `"smollm2"`, a folder in transformers' format, a GGUF file or a hub id. However loading fails, the caller
gets a `ModelError` of one line that names the model and says what to do; what transformers raised is its cause.
A model that would load with weights missing, or with a tokenizer without tokens, is refused.
"""

import importlib.util
import logging as python_logging
import os
import re
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvcache.checks import check_device, check_dtype
from kvcache.errors import InvalidTypeError, InvalidValueError, ModelError
from kvcache.hf import smollm2

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

HUB_TIMEOUT = 10.0  # seconds to wait for the hub's first answer

_loading = threading.Lock()  # transformers' loading sets process-wide defaults, and so does `_quiet`


class LoadedModel(NamedTuple):
    """A model in eval mode and its tokenizer; unpacks as `model, tokenizer`."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


def load_model(
    name: str | os.PathLike[str] = "smollm2",
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a decoder and its tokenizer, which pads on the left, as generating needs it.

    Args:
        name: `"smollm2"` (SmolLM2-135M-Instruct, fetched and converted on first use), a folder in transformers'
            format, a GGUF file, or a hub id such as `"org/name"`. What exists on disk, is absolute, starts with
            `.` or `~`, or ends with `.gguf` is a path.
        dtype: of the weights: float16, bfloat16, float32 or float64, or its name.
        device: where the weights go.
        progress: called with one short line when a slow stage begins.

    Raises:
        ModelError: the model cannot be found, fetched, checked or loaded, or is no decoder with a language-model
            head, or has no tokenizer.
        InvalidTypeError, InvalidValueError: an argument is not what is described above.

    Example::

        model, tokenizer = load_model("smollm2", dtype="bfloat16")
    """
    text = _check_name(name)
    dtype = check_dtype("dtype", dtype)
    device = check_device("device", device)
    if device.type == "meta":
        raise InvalidValueError("device is 'meta'; expected a device with memory, such as cpu")
    report = _check_progress(progress)
    if name == "smollm2":
        loaded = _load_smollm2(dtype, report)
    elif not isinstance(name, str) or _looks_like_path(text):
        loaded = _load_path(Path(text).expanduser(), dtype, report)
    else:
        loaded = _load_from_hub(text, dtype, report)
    loaded.model.to(device)  # type: ignore[arg-type]
    return loaded


def _check_name(name: Any) -> str:
    text = os.fspath(name) if isinstance(name, (str, os.PathLike)) else name
    if not isinstance(text, str):
        raise InvalidTypeError(f"name is a {type(name).__name__} ({name!r}); expected a str or a path")
    if not text.strip():
        raise InvalidValueError(f"name is {text!r}; expected 'smollm2', a path or a hub id such as 'org/name'")
    return text


def _check_progress(progress: Any) -> Callable[[str], None]:
    if progress is None:
        return lambda line: None
    if not callable(progress):
        raise InvalidTypeError(f"progress is a {type(progress).__name__}; expected a function of one str")
    return progress  # type: ignore[no-any-return]


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.endswith(".gguf") or os.path.isabs(text) or os.path.exists(text)


def _load_smollm2(dtype: torch.dtype, report: Callable[[str], None]) -> LoadedModel:
    folder = smollm2.prepare(report)
    report("Loading smollm2")
    try:
        with _errors_in_one_line("smollm2 cannot be loaded"):
            return _load(str(folder), dtype)
    except ModelError as cause:
        raise ModelError(f"{cause}; delete the folder {folder} and try again") from cause


def _load_path(path: Path, dtype: torch.dtype, report: Callable[[str], None]) -> LoadedModel:
    if not os.path.exists(path):
        raise ModelError(f"model path {str(path)!r} does not exist")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model folder {str(path)!r} has no config.json; expected a model in transformers' format")
        what = f"the model in {str(path)!r} cannot be loaded"
        gguf_file = None
    else:
        _check_is_gguf(path)
        what = f"the GGUF file {str(path)!r} cannot be loaded"
        gguf_file = str(path.resolve())
    report(f"Loading {path.name}")
    with _errors_in_one_line(what):
        return _load(str(path.parent if gguf_file else path), dtype, gguf_file=gguf_file)


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


def _load_from_hub(name: str, dtype: torch.dtype, report: Callable[[str], None]) -> LoadedModel:
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
            f"({_one_line(unreachable)})"
        ) from unreachable
    with _errors_in_one_line(f"model {name!r} from the hub cannot be loaded"):
        return _load(name, dtype, local_files_only=unreachable is not None)


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


def _load(
    source: str, dtype: torch.dtype, *, gguf_file: str | None = None, local_files_only: bool = True
) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shown = gguf_file or source
    where: dict[str, Any] = {"local_files_only": local_files_only, "trust_remote_code": False}
    if gguf_file is not None:
        where["gguf_file"] = gguf_file
    quantization = None if gguf_file is None else _unpacked_gguf(gguf_file)
    auto_model: Any = AutoModelForCausalLM
    with _loading, _quiet():
        config = AutoConfig.from_pretrained(source, **where)
        _check_is_decoder(config, shown)
        tokenizer = _load_tokenizer(AutoTokenizer, shown, source, config=config, **where)
        model, info = auto_model.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            quantization_config=quantization,
            output_loading_info=True,
            **where,
        )
    if info["missing_keys"]:
        first, *others = sorted(info["missing_keys"])
        raise ModelError(f"the model in {shown!r} has no weights for {first} and {len(others)} more")
    return LoadedModel(model.eval(), tokenizer)


def _unpacked_gguf(gguf_file: str) -> Any:
    from transformers import GgufConfig

    if not importlib.util.find_spec("accelerate"):
        raise ModelError(f"the GGUF file {gguf_file!r} needs the package accelerate: pip install accelerate")
    return GgufConfig(dequantize=True)


def _check_is_decoder(config: "PreTrainedConfig", source: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architectures = config.architectures or [type(config).__name__]
    tasks = [match[1] for match in (re.search(r"For([A-Z]\w*)$", one) for one in architectures) if match]
    other_task = bool(tasks) and not any(task.startswith(("CausalLM", "ConditionalGeneration")) for task in tasks)
    if config.is_encoder_decoder or other_task or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"the model in {source!r} is a {', '.join(architectures)}; expected a decoder with a language-model head"
        )


def _load_tokenizer(auto: Any, shown: str, source: str, **options: Any) -> "PreTrainedTokenizerBase":
    missing = f"the model in {shown!r} has no tokenizer: its files (such as tokenizer.json) are missing or damaged"
    try:
        tokenizer = auto.from_pretrained(source, **options)
    except Exception as cause:
        raise ModelError(f"{missing} ({_one_line(cause)})") from cause
    # Some classes make a tokenizer without a vocabulary when they find no file.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise ModelError(missing)
    tokenizer.padding_side = "left"  # as `generate` needs it
    return tokenizer  # type: ignore[no-any-return]


@contextmanager
def _errors_in_one_line(what: str) -> Iterator[None]:
    try:
        yield
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as cause:
        raise ModelError(f"{what} ({_one_line(cause)})") from cause


def _one_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return textwrap.shorten(f"{type(error).__name__}: {lines[0] if lines else 'no message'}", 240, placeholder=" ...")


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
