"""Loading a model by its name: folders, and arguments that are wrong."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils import logging as transformers_logging

from kvcache import InvalidTypeError, InvalidValueError
from kvcache.hf import load_model
from kvcache.hf.models import LoadedModel
from tests.hf.model_files import check_error, word_llama, word_tokenizer


def test_a_folder_loads_as_it_was_saved(folder):
    lines = []
    loaded = load_model(folder, progress=lines.append)
    model, tokenizer = loaded
    ids = torch.tensor([[1, 3, 4, 5]])
    assert torch.equal(model(ids).logits, word_llama()(ids).logits)
    assert tokenizer("the cat sat").input_ids == [3, 4, 5]
    assert (loaded.model, loaded.tokenizer) == (model, tokenizer)
    assert not model.training
    assert model.dtype == torch.float32
    assert lines == ["Loading tiny"]


def test_a_folder_may_be_named_by_a_relative_path_and_by_a_home_path(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in ("tiny", "./tiny", "~/tiny", str(folder)):
        assert isinstance(load_model(name), LoadedModel)


def test_weights_come_in_the_dtype_asked_for(folder):
    stored = word_llama().lm_head.weight
    for dtype in (torch.float64, "bfloat16", "float16"):
        model, _ = load_model(folder, dtype=dtype)
        expected = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert torch.equal(model.lm_head.weight, stored.to(expected))


def test_a_path_that_does_not_exist_is_named(tmp_path):
    for name in (
        tmp_path / "none",
        "./none",
        "~/none-such",
        "~nobody-of-this-name/x",
        "none.gguf",
        tmp_path / "no\nne",
    ):
        check_error(name, "model path", repr(str(Path(os.path.expanduser(name)))), "does not exist")


def test_a_folder_without_config_is_named(tmp_path):
    check_error(tmp_path, repr(str(tmp_path)), "has no config.json")


def test_a_file_that_is_no_gguf_is_named(tmp_path, folder):
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGML0000")
    check_error(file, repr(str(file)), "is not a GGUF file", "b'GGML'", "b'GGUF'")
    file.write_bytes(b"")
    check_error(file, "is not a GGUF file", "b''")
    check_error(folder / "config.json", "is a file", "expected a folder or a file that ends with .gguf")


def test_damaged_files_are_one_line_with_the_cause_chained(folder):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    error = check_error(folder, repr(str(folder)), "cannot be loaded", "SafetensorError")
    assert type(error.__cause__).__name__ == "SafetensorError"
    weights.unlink()
    check_error(folder, repr(str(folder)), "cannot be loaded", "model.safetensors")
    (folder / "config.json").write_text("{")
    check_error(folder, repr(str(folder)), "cannot be loaded", "config.json")


def test_an_unknown_architecture_is_named(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    check_error(folder, repr(str(folder)), "no-such-model")


def test_missing_weights_are_not_made_up(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    check_error(folder, repr(str(folder)), "has no weights for model.layers.2.", "and 8 more")


def test_models_without_a_language_model_head_are_refused(tmp_path):
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=8, **small))
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(vocab_size=8, **small))
    both = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    for model in (encoder, classifier, both):
        path = tmp_path / type(model).__name__
        model.save_pretrained(path)
        word_tokenizer().save_pretrained(path)
        check_error(path, repr(str(path)), f"is a {path.name}; expected a decoder with a language-model head")


def test_missing_tokenizer_files_are_named(folder, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    check_error(folder, repr(str(folder)), "has no tokenizer", "tokenizer.json", "are missing")
    # For GPT-2, transformers makes an empty tokenizer out of no files.
    gpt2 = tmp_path / "gpt2"
    config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(gpt2)
    check_error(gpt2, repr(str(gpt2)), "has no tokenizer", "tokenizer.json", "are missing")


def test_loading_leaves_the_users_settings_of_transformers_alone(folder, capfd):
    def settings():
        return (
            transformers_logging.get_verbosity(),
            transformers_logging.is_progress_bar_enabled(),
            transformers_logging.set_tqdm_hook(None),
            torch.get_default_dtype(),
            logging.getLogger().level,
        )

    before = settings()
    load_model(folder)
    (folder / "model.safetensors").write_bytes(b"")
    check_error(folder, "cannot be loaded")
    assert settings() == before
    assert capfd.readouterr() == ("", "")


def test_wrong_arguments_are_named(folder):
    for name in ("", "  "):
        with pytest.raises(InvalidValueError, match=f"name is '{name}'; expected 'smollm2', a path or a hub id"):
            load_model(name)
    for name in (None, 3, b"smollm2"):
        with pytest.raises(InvalidTypeError, match=f"name is a {type(name).__name__}"):
            load_model(name)
    with pytest.raises(InvalidValueError, match="dtype is 'int8'; expected one of float16, bfloat16"):
        load_model(folder, dtype="int8")
    with pytest.raises(InvalidValueError, match="device is 'nowhere'"):
        load_model(folder, device="nowhere")
    with pytest.raises(InvalidTypeError, match="progress is a str; expected a function"):
        load_model(folder, progress="yes")


def test_a_device_that_is_not_here_is_refused_before_anything_is_loaded():
    device = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(InvalidValueError, match=f"device is '{device}'; expected a device that torch can use here"):
        load_model("./no-such-folder", device=device)
