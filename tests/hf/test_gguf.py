"""Loading GGUF files."""

from pathlib import Path

import torch

from kvcache.hf import load_model
from kvcache.hf.smollm2 import LAYER_NAMES
from tests.hf.model_files import check_error, hide_packages, word_llama


def write_gguf(path: Path):
    """A GGUF file of the tiny Llama, its tokenizer as byte-level BPE without merges."""
    from gguf import GGUFWriter

    model = word_llama()
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
    names |= {target: source for source, target in LAYER_NAMES.items()}
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
    torch.testing.assert_close(model(ids).logits, word_llama().double()(ids).logits, rtol=1e-6, atol=1e-6)
    assert tokenizer("<s>bab").input_ids == [1, 4, 5]
    assert lines == ["Loading tiny.gguf"]
    assert capfd.readouterr() == ("", "")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert torch.equal(load_model(tmp_path / "saved", dtype="float64").model(ids).logits, model(ids).logits)


def test_a_gguf_file_says_what_it_needs(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    hide_packages(monkeypatch, "accelerate")
    check_error(tmp_path / "tiny.gguf", repr(str(tmp_path / "tiny.gguf")), "pip install accelerate")


def test_a_truncated_gguf_file_is_one_line(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:600])
    check_error(path, "the GGUF file", repr(str(path)), "cannot be loaded")
