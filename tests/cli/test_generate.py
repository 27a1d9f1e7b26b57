import copy
import io
import json
import os
import re
import subprocess
import sys

import pytest

from kvcache.cli.main import main
from kvcache.cli.prompt import read_prompt
from tests.hf.tiny_models import bloom, deepseek_v3, llama

QUESTION = "What is the capital of France?"


def kvcache(capsys, *arguments):
    """Run the command in this process; return its exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


def longrope(**options):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 30, **factors}
    return llama(rope_parameters=rope, **options)


def generate_json(capsys, *arguments):
    status, out, err = kvcache(capsys, "generate", *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_it_answers_and_gives_an_account(capsys, smollm2):
    status, out, err = kvcache(capsys, "generate", QUESTION, "--max-new-tokens", 20)
    assert status == 0
    text, account = out.split("\n\n", 1)
    assert text == "The capital of France is Paris."
    lines = [line.rstrip() for line in account.splitlines()]
    assert re.fullmatch(r"Start    [\d.]+ s: [\d.]+ s imports, [\d.]+ s model, .* s engine, .* s first token", lines[0])
    assert lines[1] == "Tokens   37 in the prompt, 8 generated (ended by the model)"
    assert lines[2].startswith("Prefill  ")
    assert lines[3].startswith("Decode   ")
    assert lines[3].endswith(" for 7 tokens")
    assert lines[4] == "Cache    2.0 MB used of 2.9 MB, 46,080 bytes a token in float32"
    assert lines[5] == "Q, K, V  132 projections a layer with a cache, 972 without (7.4x)"
    assert lines[-1].startswith("smollm2 in float32 through kvcache's own decoder, ")
    assert "Traceback" not in err


def test_json_holds_what_people_see(capsys, smollm2):
    data = generate_json(capsys, QUESTION, "--max-new-tokens", 20)
    assert data["text"] == "The capital of France is Paris."
    assert (data["prompt_tokens"], data["generated_tokens"], data["finish_reason"]) == (37, 8, "stop")
    assert data["token_ids"][-1] == smollm2.tokenizer.eos_token_id
    assert data["qkv_projections_per_layer"] == {
        "with_cache": 3 * (37 + 8 - 1),
        "without_cache": 3 * sum(range(37, 45)),
    }
    assert data["cache"] == {
        "tokens": 44,
        "bytes": 64 * 46080,  # the 56 tokens that there may be, in blocks of 64
        "bytes_stored": 44 * 46080,
        "bytes_per_token": 46080,
        "storage": "float32",
    }
    assert data["model"] == "smollm2"
    assert (data["weights"], data["runs_through"]) == (None, "kvcache's own decoder")
    *stages, total = data["start_seconds"]
    assert (stages, total) == (["imports", "model", "engine", "first_token"], "total")
    assert data["start_seconds"]["total"] == pytest.approx(sum(data["start_seconds"][stage] for stage in stages))
    assert data["decode_tokens_per_second"] > 0


def test_compare_finds_the_same_tokens_without_a_cache(capsys, smollm2):
    data = generate_json(capsys, QUESTION, "--max-new-tokens", 6, "--compare")
    assert data["comparison"]["same_tokens"] is True
    assert data["comparison"]["first_difference"] is None
    assert data["comparison"]["speedup"] > 0
    assert data["without_cache"]["token_ids"] == data["token_ids"]
    assert data["without_cache"]["cache"] is None
    assert data["without_cache"]["qkv_projections_per_layer"]["without_cache"] == 3 * sum(range(37, 43))
    status, out, _ = kvcache(capsys, "generate", QUESTION, "--max-new-tokens", 3, "--compare")
    assert status == 0
    assert "with cache" in out
    assert "identical, all 3" in out
    assert "x as fast with the cache. Tokens are identical, all 3." in out


def test_the_model_may_be_kept_from_ending_early(capsys, smollm2):
    data = generate_json(capsys, QUESTION, "--max-new-tokens", 10, "--min-new-tokens", 10)
    assert data["generated_tokens"] == 10
    assert data["finish_reason"] == "length"
    assert smollm2.tokenizer.eos_token_id not in data["token_ids"]


def test_without_a_cache_it_says_the_same(capsys, smollm2):
    status, out, _ = kvcache(capsys, "generate", QUESTION, "--max-new-tokens", 5, "--no-cache")
    assert status == 0
    assert out.startswith("The capital of France is\n")
    assert "none: every token computed the whole sequence again" in out
    assert " s warm up, " in out
    assert "\nsmollm2 in float32 through transformers' forward, " in out


def test_bfloat16_halves_the_cache(capsys, smollm2):
    data = generate_json(capsys, QUESTION, "--max-new-tokens", 2, "--dtype", "bfloat16")
    assert (data["dtype"], data["cache"]["bytes_per_token"]) == ("bfloat16", 23040)


def test_the_cache_may_be_kept_in_fewer_bits(capsys, smollm2):
    data = generate_json(capsys, QUESTION, "--max-new-tokens", 20, "--storage", "int8", "--compare")
    assert data["text"] == "The capital of France is Paris."
    assert (data["dtype"], data["cache"]["storage"]) == ("float32", "int8")
    assert data["cache"]["bytes_per_token"] == 30 * 3 * 2 * (64 + 8)
    assert data["comparison"]["same_tokens"] is True
    data = generate_json(capsys, QUESTION, "--max-new-tokens", 2, "--storage", "int8/int4")
    assert (data["cache"]["storage"], data["cache"]["bytes_per_token"]) == ("int8/int4", 30 * 3 * (72 + 40))


def test_weights_may_be_in_int8(capsys, smollm2):
    arguments = (QUESTION, "--max-new-tokens", 20, "--weights", "int8")
    data = generate_json(capsys, *arguments, "--compare")
    assert data["text"] == "The capital of France is Paris."
    assert (data["weights"], data["runs_through"]) == ("int8", "kvcache's own decoder, weights in int8")
    assert data["without_cache"]["runs_through"] == "transformers' forward"
    _, out, _ = kvcache(capsys, "generate", *arguments)
    assert "\nsmollm2 in float32 through kvcache's own decoder, weights in int8, " in out


@pytest.mark.parametrize(
    ("make", "why"), [(bloom, "expected one of LlamaForCausalLM"), (longrope, "its rotary positions change beyond 30")]
)
@pytest.mark.filterwarnings("ignore:rotary positions of type 'longrope' change beyond 30 tokens:UserWarning")
def test_a_model_that_cannot_have_int8_weights_is_refused(capsys, smollm2, tmp_path, make, why):
    make(vocab_size=len(smollm2.tokenizer)).save_pretrained(tmp_path)
    smollm2.tokenizer.save_pretrained(tmp_path)
    status, out, err = kvcache(capsys, "generate", "one", "--raw", "--model", tmp_path, "--weights", "int8")
    assert (status, out) == (2, "")
    assert f"kvcache: error: --weights int8 cannot be had for {tmp_path}: " in err
    assert why in err


def test_tokens_may_be_proposed_and_the_text_stays_the_same(capsys, smollm2):
    prompt = "Say this again: one two three four five six seven eight. one two three four"
    arguments = (prompt, "--raw", "--max-new-tokens", 12)
    plain = generate_json(capsys, *arguments)
    data = generate_json(capsys, *arguments, "--prompt-lookup", 4, "--compare")
    assert data["token_ids"] == data["without_cache"]["token_ids"] == plain["token_ids"]
    assert plain["speculation"] is data["without_cache"]["speculation"] is None
    proposed, accepted = data["speculation"]["proposed_tokens"], data["speculation"]["accepted_tokens"]
    assert 0 < accepted <= proposed
    processed = data["prompt_tokens"] + 11 + proposed - accepted
    assert data["qkv_projections_per_layer"]["with_cache"] == 3 * processed
    _, out, _ = kvcache(capsys, "generate", *arguments, "--prompt-lookup", 4)
    assert f"\nProposed  {accepted} of {proposed} accepted: 12 tokens in {12 - accepted} steps" in out
    _, out, _ = kvcache(capsys, "generate", *arguments, "--prompt-lookup", 4, "--compare")
    assert "\nProposed, accepted " in out


def test_tokens_are_proposed_in_the_engine_only(capsys, smollm2, tmp_path):
    bloom(vocab_size=len(smollm2.tokenizer)).save_pretrained(tmp_path)
    smollm2.tokenizer.save_pretrained(tmp_path)
    status, out, err = kvcache(capsys, "generate", "one two", "--raw", "--model", tmp_path, "--prompt-lookup", 4)
    assert (status, out) == (2, "")
    assert f"--prompt-lookup is the engine's, in which {tmp_path} cannot run: " in err
    assert err.rstrip().endswith("; leave it out")


def test_a_seed_repeats_a_sample(capsys, smollm2):
    options = ("--temperature", 1.5, "--max-new-tokens", 8, "--top-k", 200, "--top-p", 0.99, "--min-p", 0.001)
    first, again, other = (
        generate_json(capsys, "Tell me a story.", *options, "--seed", seed)["token_ids"] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_quiet_prints_the_text_alone(capsys, smollm2, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(QUESTION, encoding="utf-8")
    status, out, _ = kvcache(capsys, "generate", "--prompt-file", file, "-q", "--max-new-tokens", 20)
    assert (status, out) == (0, "The capital of France is Paris.\n")


def test_a_dash_reads_standard_input_and_raw_leaves_the_template_out(capsys, smollm2, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"The capital of France is")))
    data = generate_json(capsys, "-", "--raw", "--max-new-tokens", 1)
    assert data["prompt_tokens"] == 5
    assert data["text"].strip() == "Paris"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, smollm2):
    """A random Llama with a context of 64 tokens, and the real tokenizer without its chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    llama(vocab_size=len(smollm2.tokenizer), num_hidden_layers=1, max_position_embeddings=64).save_pretrained(folder)
    tokenizer = copy.deepcopy(smollm2.tokenizer)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def test_the_context_limits_the_new_tokens(capsys, tiny_folder):
    status, out, err = kvcache(
        capsys, "generate", "one two three four", "--model", tiny_folder, "--max-new-tokens", 100, "--json"
    )
    assert status == 0, err
    assert "room for 61 new tokens" in err
    data = json.loads(out)
    assert data["prompt_tokens"] == 4
    assert data["generated_tokens"] == 61
    assert data["cache"]["tokens"] == 64  # every position of the context, and one token sampled from the last


def test_a_prompt_of_exactly_the_context_fits_and_one_more_is_refused(capsys, tiny_folder):
    fits = " ".join(["one"] * 64)
    data = generate_json(capsys, fits, "--model", tiny_folder)
    assert (data["prompt_tokens"], data["generated_tokens"]) == (64, 1)
    status, out, err = kvcache(capsys, "generate", fits + " one", "--model", tiny_folder)
    assert (status, out) == (2, "")
    assert err == "kvcache: error: the prompt has 65 tokens; the model's context is 64\n"


def test_compare_draws_the_same_tokens_with_and_without_a_cache(capsys, tiny_folder):
    options = ("--temperature", 1.5, "--top-k", 50, "--repetition-penalty", 1.1, "--seed", 3, "--max-new-tokens", 40)
    data = generate_json(capsys, "one two three four", "--model", tiny_folder, "--compare", *options)
    assert data["generated_tokens"] == 40
    assert len(set(data["token_ids"])) > 10
    assert data["comparison"]["same_tokens"] is True
    other = generate_json(capsys, "one two three four", "--model", tiny_folder, *options, "--seed", 4)
    assert other["token_ids"] != data["token_ids"]


@pytest.mark.filterwarnings("ignore:the model does something with a layer's keys:UserWarning")
@pytest.mark.filterwarnings("ignore:rotary positions of type 'longrope' change beyond 30 tokens:UserWarning")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (deepseek_v3, "layers keep one latent for all heads"),
        (bloom, "has attention of its own"),
        (longrope, "its rotary positions change beyond 30 tokens"),
    ],
)
def test_a_model_that_the_engine_does_not_take_runs_all_the_same(capsys, smollm2, tmp_path, make, why):
    make(vocab_size=len(smollm2.tokenizer)).save_pretrained(tmp_path)
    smollm2.tokenizer.save_pretrained(tmp_path)
    options = ("--model", tmp_path, "--dtype", "float64", "--raw", "--max-new-tokens", 12, "--compare", "--json")
    status, out, err = kvcache(capsys, "generate", "one two " * 16, *options)
    assert status == 0, err
    assert f"{tmp_path} cannot run in the engine, so transformers runs it: " in err
    assert why in err
    data = json.loads(out)
    assert data["cache"]["tokens"] == data["prompt_tokens"] + 11
    assert data["comparison"]["same_tokens"] is True


@pytest.mark.filterwarnings("ignore:rotary positions of type 'longrope' change beyond 30 tokens:UserWarning")
def test_only_a_text_in_which_positions_change_leaves_the_engine(capsys, smollm2, tmp_path):
    longrope(vocab_size=len(smollm2.tokenizer)).save_pretrained(tmp_path)
    smollm2.tokenizer.save_pretrained(tmp_path)
    prompt = "one two " * 10
    num_tokens = len(smollm2.tokenizer(prompt)["input_ids"])
    for new_tokens, leaves in ((31 - num_tokens, False), (32 - num_tokens, True)):
        options = ("--model", tmp_path, "--raw", "--max-new-tokens", new_tokens, "--json")
        status, out, err = kvcache(capsys, "generate", prompt, *options)
        assert status == 0, err
        assert ("its rotary positions change beyond 30 tokens" in err) == leaves
        assert json.loads(out)["cache"]["tokens"] == num_tokens + new_tokens - 1


@pytest.mark.parametrize("make", [llama, bloom])  # through the engine, and not
def test_more_than_the_memory_holds_is_refused_before_anything_runs(capsys, smollm2, tmp_path, make):
    limits = {} if make is bloom else {"max_position_embeddings": 10**13}
    make(vocab_size=len(smollm2.tokenizer), **limits).save_pretrained(tmp_path)
    smollm2.tokenizer.save_pretrained(tmp_path)
    status, out, err = kvcache(capsys, "generate", "one", "--raw", "--model", tmp_path, "--max-new-tokens", 10**12)
    assert (status, out) == (2, "")
    assert "error: keys and values of 1,000,000,000,000 tokens, new ones included, take " in err
    assert err.endswith("free; ask for fewer new tokens, or with --storage for fewer bits\n")


@pytest.mark.filterwarnings("default:the model's generation_config has:UserWarning")
def test_what_the_model_asks_for_and_is_not_done_is_said_once(capsys, smollm2, tmp_path):
    model = llama(vocab_size=len(smollm2.tokenizer))
    model.generation_config.update(no_repeat_ngram_size=2)
    model.save_pretrained(tmp_path)
    smollm2.tokenizer.save_pretrained(tmp_path)
    options = ("--raw", "--model", tmp_path, "--max-new-tokens", 2, "--compare")
    status, _, err = kvcache(capsys, "generate", "one", *options)
    assert status == 0, err
    expected = "the model's generation_config has no_repeat_ngram_size=2, which only model.generate does"
    assert err.count("generation_config") == err.count(f"kvcache: warning: {expected}\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hello", "--max-new-tokens", 0], "Invalid value for '--max-new-tokens'"),
        (["hello", "--max-new-tokens", 3, "--min-new-tokens", 4], "--min-new-tokens is 4; expected at most"),
        (["hello", "--max-new-tokens", "many"], "Invalid value for '--max-new-tokens'"),
        ([""], "the prompt is empty"),
        ([" \n "], "the prompt is empty"),
        ([], "no prompt; give it in quotes, or - to read standard input, or --prompt-file FILE"),
        (["hello", "--prompt-file", "x"], "both a prompt and --prompt-file; expected one of them"),
        (["hello", "--top-k", 5], "--top-k, --top-p and --min-p shape sampling; give a --temperature above 0 too"),
        (["--prompt-file", "/nowhere/x"], "--prompt-file '/nowhere/x' cannot be read: No such file or directory"),
        (["--prompt-file", "/"], "--prompt-file '/' cannot be read: Is a directory"),
        (["hello", "--model", "/nowhere/model"], "model path '/nowhere/model' does not exist"),
        (["hello", "--model", ""], "name is ''"),
        (["hello", "--dtype", "float31"], "--dtype is 'float31'; expected one of float16, bfloat16, float32, float64"),
        (["hello", "--storage", "int9"], "--storage is 'int9'; expected one of float16, bfloat16"),
        (["hello", "--storage", "int8", "--no-cache"], "--storage says how a cache keeps rows"),
        (["hello", "--weights", "int4"], "--weights is 'int4'; expected int8, or leave it out"),
        (["hello", "--weights", "int8", "--no-cache"], "--weights are the engine's, which keeps a cache; leave --no"),
        (["hello", "--prompt-lookup", "-1"], "Invalid value for '--prompt-lookup'"),
        (["hello", "--prompt-lookup", "3", "--no-cache"], "--prompt-lookup goes back in a cache where it was wrong"),
        (["hello", "--device", "nowhere"], "device is 'nowhere'"),
        (["hello", "--device", "meta"], "device is 'meta'; expected a device with memory"),
        (["hello", "--temperature", "nan"], "Invalid value for '--temperature'"),
        (["hello", "--temperature", "inf"], "--temperature is inf"),
        (["hello", "--temperature", "-1"], "Invalid value for '--temperature'"),
        (["hello", "--top-p", "2"], "Invalid value for '--top-p'"),
        (["hello", "--repetition-penalty", "0"], "--repetition-penalty 0.0"),
        (["hello", "--compare", "--no-cache"], "--compare runs with and without a cache"),
        (["hello", "--wrong"], "No such option: --wrong"),
        (["hello", "again"], "quote a prompt of several words"),
    ],
)
def test_wrong_input_ends_with_status_2_and_one_line(capsys, arguments, message):
    status, out, err = kvcache(capsys, "generate", *arguments)
    assert (status, out) == (2, "")
    error_lines = [line for line in err.splitlines() if line.startswith("kvcache: error: ")]
    assert len(error_lines) == 1
    assert message in error_lines[0]
    assert "Traceback" not in err


def test_bytes_that_are_no_text_are_refused(capsys, monkeypatch):
    status, _, err = kvcache(capsys, "generate", "a\udcff\udcfeb")  # how Python reads such an argument
    assert status == 2
    assert err == "kvcache: error: the prompt is not UTF-8 text: invalid start byte at byte 1\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff hi")))
    status, _, err = kvcache(capsys, "generate", "-")
    assert status == 2
    assert "the prompt is not UTF-8 text" in err
    monkeypatch.setattr("sys.stdin", None)
    status, _, err = kvcache(capsys, "generate", "-")
    assert status == 2
    assert "standard input is closed" in err


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfhello")
    assert read_prompt(None, file) == "hello"


def test_a_full_disk_ends_it_in_one_line(tiny_folder):
    command = [sys.executable, "-m", "kvcache", "generate", "one two", "--model", str(tiny_folder), "--json"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode != 0
    assert "kvcache: error: [Errno 28] No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_ascii_terminal_gets_replacements(tiny_folder):
    command = [
        sys.executable,
        "-m",
        "kvcache",
        "generate",
        "caf\u00e9 caf\u00e9",
        "--model",
        str(tiny_folder),
        "--json",
    ]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    result = subprocess.run(command, capture_output=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["prompt_tokens"] > 0


def test_a_file_that_is_no_text_is_refused(capsys, tmp_path):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe\x00")
    status, out, err = kvcache(capsys, "generate", "--prompt-file", file)
    assert (status, out) == (2, "")
    assert f"--prompt-file '{file}' is not UTF-8 text: invalid start byte at byte 0" in err


def test_no_model_and_no_network_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    status, out, err = kvcache(capsys, "generate", "hello")
    assert (status, out) == (2, "")
    assert "kvcache: error: smollm2 cannot be fetched: connect to the network once, or pass the path" in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_installed_command_ends_the_same_way():
    result = subprocess.run(
        [sys.executable, "-m", "kvcache", "generate", "hello", "--model", "/nowhere/model"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "kvcache: error: model path '/nowhere/model' does not exist"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("missing", ["typer", "transformers"])
def test_without_its_packages_it_names_the_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from kvcache.cli import main; main(['generate', 'hello'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("kvcache: error: ")
    assert f"{missing}: pip install 'torch-kvcache[" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_and_version(capsys):
    status, out, _ = kvcache(capsys, "generate", "--help")
    assert status == 0
    for option in ("--model", "--max-new-tokens", "--temperature", "--dtype", "--no-cache", "--compare", "--json"):
        assert option in out
    status, out, _ = kvcache(capsys, "--version")
    assert (status, out) == (0, "kvcache 0.1.0\n")
