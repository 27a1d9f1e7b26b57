"""`kvcache plan`, of models of which there is a configuration and no weights."""

import json
import struct
import sys

import pytest
import torch

from kvcache import memory
from kvcache.cli import machine, plan
from kvcache.cli.configuration import model_sizes
from kvcache.errors import InvalidValueError
from kvcache.hf.models import load_config
from kvcache.memory import parse_size
from tests.cli.test_generate import kvcache
from tests.hf.test_gguf import write_gguf
from tests.hf.tiny_models import deepseek_v3, gemma3, gpt2, gpt_oss, llama, mixtral

FIXED = ("--memory", "1MB", "--bandwidth", 1)


@pytest.fixture
def hybrid(tmp_path):
    """A folder with the configuration of the tiny Gemma 3, and nothing else."""
    folder = tmp_path / "gemma"
    gemma3().config.save_pretrained(folder)
    return folder


def plan_json(capsys, *arguments):
    status, out, err = kvcache(capsys, "plan", *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def lines_of(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_smollm2_has_the_known_sizes(smollm2):
    sizes = model_sizes(smollm2.model.config)
    assert sizes == model_sizes(load_config("smollm2"))
    assert sizes.num_parameters == sizes.num_step_parameters == smollm2.model.num_parameters() == 134_515_008
    assert sizes.cache.token_nbytes("bfloat16") == 23_040
    assert (sizes.query_heads, sizes.max_positions) == ((9,) * 30, 8192)


@pytest.mark.parametrize("family", [llama, gemma3, gpt2, gpt_oss, mixtral])
def test_parameters_are_counted_as_in_a_model(family):
    model = family()
    assert model_sizes(model.config).num_parameters == model.num_parameters()


def test_parameters_of_a_hybrid_by_hand():
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    layer = attention + 3 * 32 * 48 + 4 * 32 + 2 * 8
    sizes = model_sizes(gemma3().config)
    assert sizes.num_step_parameters == 3 * layer + 32 + 97 * 32
    assert sizes.num_parameters == sizes.num_step_parameters + 97 * 32  # the embeddings are looked up
    assert [spec.window for spec in sizes.cache.layers] == [5, 5, None]
    tied = model_sizes(gemma3(tie_word_embeddings=True).config)
    assert tied.num_parameters == tied.num_step_parameters == sizes.num_step_parameters


def test_experts_are_told_apart():
    sizes = model_sizes(mixtral().config)
    assert sizes.num_expert_parameters == 2 * 4 * 3 * 32 * 48
    assert (sizes.num_experts, sizes.experts_per_token) == (4, 2)


def test_the_account_and_the_tables(capsys, smollm2):
    options = ("--context", 2048, "--batch", 4, "--dtype", "bfloat16", "--memory", "1GiB", "--bandwidth", 20)
    status, out, err = kvcache(capsys, "plan", *options)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert lines_of(out) == [
        "Model smollm2, 30 full layers, texts of up to 8,192 tokens",
        "Weights 269.0 MB in bfloat16: 134,515,008 parameters",
        "Cache 188.7 MB in bfloat16: 4 sequences of 2,048 tokens",
        "Memory 1.1 GB given: all fits, 616.0 MB left",
        "Room for 4 sequences of up to 8,731 tokens, or 17 sequences of 2,048 tokens",
        "Step 457.8 MB read, 1.6 GFLOP: at best 23 ms, 174.8 tokens/s",
        "Bandwidth 20.0 GB/s given",
        "Compute not known, left out",
        "",
        "Decoding 2,048 tokens with cache without ratio",
        "Q, K, V projections 184,320 188,835,840 1,024x",
        "Attention 145.0 GFLOP 99.1 TFLOP 683x",
        "",
        "bytes longest sequences step tokens",
        "Storage a token cache context that fit at best a second",
        "float32 46,080 377.5 MB 4,365 8 32 ms 123.7",
        "bfloat16 23,040 188.7 MB 8,731 17 23 ms 174.8",
        "int8 12,960 106.2 MB 15,522 30 19 ms 213.2",
        "int8/int4 10,080 82.6 MB 19,958 38 18 ms 227.5",
        "int4 7,200 59.0 MB 27,941 54 16 ms 243.9",
        "",
        "Longest context: tokens of each of 4 sequences that fit behind the weights.",
        "Sequences that fit: of 2,048 tokens each.",
    ]


def test_a_hybrid_needs_no_weights(capsys, hybrid):
    status, out, err = kvcache(capsys, "plan", "--model", hybrid, "--context", 20, *FIXED, "--compute", 0.001)
    assert (status, err) == (0, "")
    text = " ".join(out.split())
    assert "1 full and 2 sliding layers (window 5)" in text
    assert "3.8 kB (2.6 kB full, 1.3 kB sliding) in float32: 1 sequence of 20 tokens" in text
    assert "Behind its window a token keeps 128 bytes in float32, in the full layers." in text
    assert "Compute 1.0 MFLOP/s given" in text


def test_json_holds_what_people_see(capsys, hybrid):
    data = plan_json(capsys, "--model", hybrid, "--context", 20, "--batch", 2, "--block-size", 4, *FIXED)
    assert (data["model"], data["parameters"], data["weights_bytes"]) == (str(hybrid), 29_712, 118_848)
    assert (data["layers"], data["window"], data["max_positions"]) == ({"full": 1, "sliding": 2}, 5, 128)
    assert (data["context"], data["batch"], data["block_size"], data["dtype"]) == (20, 2, 4, "float32")
    assert data["machine"] == {
        "memory_bytes": 1_000_000,
        "memory_is_given": True,
        "bandwidth_bytes_per_second": 1e9,
        "bandwidth_is_given": True,
        "flops_per_second": None,
    }
    assert data["cache_bytes_by_kind"] == {"full": 2 * 20 * 128, "sliding": 2 * 2 * 12 * 128}
    assert (data["cache_bytes"], data["missing_bytes"], data["bytes_per_token"]) == (11_264, 0, 384)
    assert data["sequences_that_fit"] == (1_000_000 - 118_848) // 5632
    step_bytes = 26_608 * 4 + 2 * (20 + 5 + 5) * 128
    assert data["step"] == {
        "bytes": step_bytes,
        "flops": 2 * (2 * 26_608 + 128 * 30),
        "seconds": step_bytes / 1e9,
        "tokens_per_second": pytest.approx(2e9 / step_bytes),
    }
    assert data["decoding"] == {
        "tokens": 20,
        "with_cache": {"qkv_projections": 3 * 3 * 20, "attention_flops": 128 * (210 + 2 * 90)},
        "without_cache": {"qkv_projections": 3 * 3 * 210, "attention_flops": 128 * (1540 + 2 * 860)},
    }
    storages = [each["storage"] for each in data["storages"]]
    assert storages == ["float32", "bfloat16", "int8", "int8/int4", "int4"]
    assert [each["bytes_per_token"] for each in data["storages"]] == [384, 192, 3 * 2 * 24, 3 * 2 * 20, 3 * 2 * 16]


def test_another_storage_joins_the_table(capsys, hybrid):
    data = plan_json(capsys, "--model", hybrid, "--storage", "int4/int8", *FIXED)
    assert data["storage"] == data["storages"][-1]["storage"] == "int4/int8"
    assert len(data["storages"]) == 6


def test_a_cache_that_does_not_fit_is_told(capsys, hybrid):
    status, out, _ = kvcache(capsys, "plan", "--model", hybrid, "--context", 100, "--memory", 120_000, "--bandwidth", 1)
    assert status == 0
    assert "Memory     120.0 kB given: 12.9 kB too little" in out
    assert "1 sequence of up to 3 tokens, or 0 sequences of 100 tokens" in out


def test_a_context_beyond_the_models_is_warned_of(capsys, hybrid):
    status, out, err = kvcache(capsys, "plan", "--model", hybrid, "--context", 129, *FIXED, "--json")
    assert status == 0
    assert err == "--context is 129; the model is made for at most 128 tokens.\n"
    assert json.loads(out)["context"] == 129


def test_memory_and_bandwidth_of_this_machine(capsys, hybrid, monkeypatch):
    monkeypatch.setattr(machine, "READ_NBYTES", 1 << 20)
    data = plan_json(capsys, "--model", hybrid)["machine"]
    assert data["memory_bytes"] > 10**8
    assert data["bandwidth_bytes_per_second"] > 10**8
    assert not data["memory_is_given"]
    assert not data["bandwidth_is_given"]


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    here = memory.free_memory()
    for name, text in (("max", "5000000\n"), ("current", "3000000\n"), ("stat", "anon 1\ninactive_file 1000000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.free_memory() == 3_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory() == pytest.approx(here, rel=0.5)


def test_a_gguf_file_is_a_model(capsys, tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    data = plan_json(capsys, "--model", tmp_path / "tiny.gguf", "--context", 4, *FIXED)
    assert (data["layers"], data["max_positions"]) == ({"full": 2}, 64)
    assert data["cache_bytes"] == 4 * 2 * 2 * (8 + 8) * 4


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")])
def test_the_plot_is_a_picture(capsys, hybrid, tmp_path, suffix, start):
    path = tmp_path / f"plan{suffix}"
    status, out, err = kvcache(capsys, "plan", "--model", hybrid, "--context", 64, *FIXED, "--plot", path)
    assert status == 0, err
    assert out.startswith("Model")
    picture = path.read_bytes()
    assert picture.startswith(start)
    if suffix == ".png":
        width, height = struct.unpack(">II", picture[16:24])
        assert (width, height) == (1650, 780)


def test_a_missing_matplotlib_names_what_to_install(capsys, hybrid, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib.")] + ["kvcache.cli.plan_plot"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("kvcache.cli.plan_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = kvcache(capsys, "plan", "--model", hybrid, "--plot", tmp_path / "plan.png")
    assert (status, out) == (2, "")
    assert "--plot needs matplotlib: pip install 'torch-kvcache[bench]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0"], "'--context'"),
        (["--batch", "0"], "'--batch'"),
        (["--block-size", "0"], "'--block-size'"),
        (["--memory", "lots"], "--memory is 'lots'; expected a size such as 2GiB, 500MB, or a number of bytes"),
        (["--memory", "0"], "--memory is '0'; expected at least one byte"),
        (["--storage", "int3"], "--storage is 'int3'; expected one of float16"),
        (["--dtype", "int8"], "--dtype is 'int8'; expected one of float16"),
        (["--bandwidth", "0"], "--bandwidth is 0.0; expected a finite number above 0"),
        (["--compute", "nan"], "--compute is nan; expected a finite number above 0"),
        (["--plot", "plan.gif"], "--plot is 'plan.gif'; expected a file that ends with .png, .svg, .pdf"),
        (["--memory", "100kB"], "take 118.8 kB in float32, and --memory is 100.0 kB: 18.8 kB too little"),
        (["--model", "./nothing"], "model path 'nothing' does not exist"),
        (["--model", "a/b/c"], "model 'a/b/c' does not exist; expected 'smollm2', an existing path or a hub id"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_one_line(capsys, hybrid, arguments, message):
    status, out, err = kvcache(capsys, "plan", "--model", hybrid, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("kvcache: error:") == 1


def test_weights_larger_than_the_free_memory_are_told(capsys, hybrid, monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda: 100_000)
    status, _, err = kvcache(capsys, "plan", "--model", hybrid)
    assert status == 2
    assert "and 100.0 kB of memory are free: 18.8 kB too little" in err


def test_a_folder_without_a_configuration_is_told(capsys, tmp_path):
    status, _, err = kvcache(capsys, "plan", "--model", tmp_path)
    assert status == 2
    assert "has no config.json; expected a model in transformers' format" in err


def test_layers_of_other_kinds_are_refused(capsys, tmp_path):
    deepseek_v3(torch.float32).config.save_pretrained(tmp_path)
    status, _, err = kvcache(capsys, "plan", "--model", tmp_path)
    assert status == 2
    assert "layer 0 of the model has kv_lora_rank=10: layers keep one latent for all heads (MLA)" in err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2GiB", 2**31), ("500MB", 500_000_000), ("1.5 GB", 1_500_000_000), ("7", 7), ("3kib", 3072), (" 1 TB ", 10**12)],
)
def test_sizes_are_read(text, nbytes):
    assert parse_size("--memory", text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "2 GiB 3", "-1MB", "1e9", "2XB", "0.1", "1,000"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidValueError, match="--memory is "):
        parse_size("--memory", text)


def test_names_are_printed_as_they_are(capsys, tmp_path, monkeypatch):
    gemma3().config.save_pretrained(tmp_path / "m[bold]x[")
    monkeypatch.chdir(tmp_path)
    status, out, _ = kvcache(capsys, "plan", "--model", "m[bold]x[", *FIXED)
    assert status == 0
    assert out.startswith("Model      m[bold]x[, 1 full and 2 sliding layers (window 5)")


def test_help_teaches(capsys):
    status, out, _ = kvcache(capsys, "plan", "--help")
    assert status == 0
    assert "limits, not predictions" in out
    assert "kvcache plan --context 8192" in out
