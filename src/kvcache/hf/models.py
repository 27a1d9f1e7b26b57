"""From a name to a model and its tokenizer, or its configuration alone.

A name is `"smollm2"`, a folder in transformers' format, a GGUF file or a hub id. However loading fails, the caller
gets a `ModelError` of one line that names the model and says what to do; what transformers raised is its cause.
A model that would load with weights missing, or with a tokenizer without tokens, is refused.
"""

import importlib.util
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvcache.checks import check_device, check_dtype
from kvcache.errors import InvalidTypeError, InvalidValueError, ModelError
from kvcache.hf.source import Source, loading, locate, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


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
    _check_name(name)
    dtype = check_dtype("dtype", dtype)
    device = check_device("device", device)
    if device.type == "meta":
        raise InvalidValueError("device is 'meta'; expected a device with memory, such as cpu")
    source = locate(name, _check_progress(progress))
    with loading(source.failure, source.remedy):
        loaded = _load(source, dtype)
    loaded.model.to(device)  # type: ignore[arg-type]
    return loaded


def load_config(
    name: str | os.PathLike[str] = "smollm2", *, progress: Callable[[str], None] | None = None
) -> "PreTrainedConfig":
    """Return a decoder's configuration, without its weights; takes and raises what `load_model` does."""
    _check_name(name)
    source = locate(name, _check_progress(progress))
    with loading(source.failure, source.remedy):
        return _load_config(source)


def _check_name(name: Any) -> None:
    text = os.fspath(name) if isinstance(name, (str, os.PathLike)) else name
    if not isinstance(text, str):
        raise InvalidTypeError(f"name is a {type(name).__name__} ({name!r}); expected a str or a path")
    if not text.strip():
        raise InvalidValueError(f"name is {text!r}; expected 'smollm2', a path or a hub id such as 'org/name'")


def _check_progress(progress: Any) -> Callable[[str], None]:
    if progress is None:
        return lambda line: None
    if not callable(progress):
        raise InvalidTypeError(f"progress is a {type(progress).__name__}; expected a function of one str")
    return progress  # type: ignore[no-any-return]


def _load(source: Source, dtype: torch.dtype) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantization = None if source.gguf_file is None else _unpacked_gguf(source.gguf_file)
    auto_model: Any = AutoModelForCausalLM
    config = _load_config(source)
    tokenizer = _load_tokenizer(AutoTokenizer, source, config)
    model, info = auto_model.from_pretrained(
        source.place,
        config=config,
        dtype=dtype,
        quantization_config=quantization,
        output_loading_info=True,
        **source.options,
    )
    if info["missing_keys"]:
        first, *others = sorted(info["missing_keys"])
        raise ModelError(f"the model in {source.shown!r} has no weights for {first} and {len(others)} more")
    return LoadedModel(model.eval(), tokenizer)


def _load_config(source: Source) -> "PreTrainedConfig":
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(source.place, **source.options)
    _check_is_decoder(config, source.shown)
    return config


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


def _load_tokenizer(auto: Any, source: Source, config: "PreTrainedConfig") -> "PreTrainedTokenizerBase":
    missing = (
        f"the model in {source.shown!r} has no tokenizer: its files (such as tokenizer.json) are missing or damaged"
    )
    try:
        tokenizer = auto.from_pretrained(source.place, config=config, **source.options)
    except Exception as cause:
        raise ModelError(f"{missing} ({one_line(cause)})") from cause
    # Some classes make a tokenizer without a vocabulary when they find no file.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise ModelError(missing)
    tokenizer.padding_side = "left"  # as `generate` needs it
    return tokenizer  # type: ignore[no-any-return]
