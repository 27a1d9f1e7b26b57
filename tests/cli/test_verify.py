import json
import sys

import pytest
import torch

from kvcache.hf import LoadedModel
from tests.cli.test_generate import kvcache
from tests.hf.model_files import word_tokenizer
from tests.hf.tiny_models import llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tiny(monkeypatch):
    """A model of six words in place of the one that would be loaded."""
    loaded = LoadedModel(llama(torch.float32, vocab_size=6, pad_token_id=2, intermediate_size=64), word_tokenizer())
    monkeypatch.setattr("kvcache.hf.load_model", lambda *args, **options: loaded)


def test_smollm2_is_right(capsys, smollm2):
    status, out, err = kvcache(capsys, "verify", "--storage", "int8", "--attention")
    assert status == 0, out
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == (
        "smollm2 with kvcache.hf.cache_for (storage int8, use_attention) in float32: "
        "largest errors against float64 without a cache"
    )
    assert lines[2].split() == ["scenario", "verdict", "cached", "uncached"]
    assert lines[3].startswith("prefill, then decode  lossy as configured")
    assert lines[3].endswith("%")
    assert lines[-1] == "10 of 10 scenarios are right, 1 not run."
    assert err.splitlines()[-1] == "save and restore (11 of 11)"


def test_native_decoding_is_right(capsys, tiny):
    status, out, _ = kvcache(capsys, "verify", "--native")
    assert status == 0, out
    assert out.startswith("smollm2 with kvcache.hf.NativeDecoder in float32: largest errors against float64")
    assert out.rstrip().endswith("10 of 10 scenarios are right, 1 not run.")


def test_native_decoding_with_int8_weights_and_rows_is_lossy_as_configured(capsys, tiny):
    status, out, _ = kvcache(capsys, "verify", "--native", "--weights", "int8", "--storage", "int8")
    assert status == 0, out
    assert out.startswith("smollm2 with kvcache.hf.NativeDecoder (storage int8, int8 weights) in float32: ")
    assert out.count("lossy as configured") == 10


def test_corruption_ends_with_status_1_and_says_where_and_why(capsys, tiny):
    status, out, _ = kvcache(capsys, "verify", "--cache", "tests.verify.faulty_caches:crossed_heads")
    assert status == 1
    assert "CORRUPT" in out
    assert "crossed heads; first at token 0, from layer 0 on" in out
    assert out.rstrip().endswith("0 of 10 scenarios are right, 10 corrupt, 1 not run.")


def test_json_holds_what_people_see(capsys, tiny):
    status, out, _ = kvcache(capsys, "verify", "--cache", "dynamic", "--json")
    assert status == 0
    data = json.loads(out)
    assert (data["subject"], data["dtype"], data["is_right"]) == ("smollm2 with DynamicCache", "float32", True)
    first, *_ = data["findings"]
    assert first["verdict"] in ("exact", "rounding")
    assert first["num_outputs"] == 40
    assert first["cached_error"] < 1e-4
    not_run = [finding for finding in data["findings"] if finding["verdict"] == "not run"]
    assert [finding["reason"] for finding in not_run] == ["no layer has a window"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "nothing"], "cache is 'nothing'; expected kvcache, dynamic, static or package.module:factory"),
        (["--cache", "no_package:make"], "cache is 'no_package:make', which cannot be imported: No module named"),
        (["--cache", "tests.verify.faulty_caches:not_a_cache"], "the cache factory returned a dict; expected"),
        (["--cache", "tests.verify.faulty_caches:raises"], "raised RuntimeError: no luck"),
        (["--cache", "tests.verify.faulty_caches:of_one_argument"], "raised TypeError: of_one_argument() takes 1"),
        (["--cache", "static", "--storage", "int8"], "storage is given with cache = 'static'; it belongs to"),
        (["--storage", "int3"], "--storage is 'int3'"),
        (["--weights", "int8"], "--weights is 'int8'; it belongs to --native"),
        (["--native", "--weights", "int4"], "weights is 'int4'; expected None or 'int8'"),
        (["--native", "--attention"], "--native is given with --attention; expected neither"),
        (["--native", "--cache", "static"], "--native is given with --cache static; expected neither"),
        (["--lossy"], "is_lossy is given with cache = 'kvcache'; it belongs to"),
        (["--dtype", "int8"], "--dtype is 'int8'"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_one_line(capsys, tiny, arguments, message):
    status, out, err = kvcache(capsys, "verify", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("kvcache: error:") == 1


def test_a_factory_may_be_in_the_current_directory(capsys, tiny, tmp_path, monkeypatch):
    (tmp_path / "my_caches.py").write_text(
        "from transformers import DynamicCache\n\n\ndef make(model, max_tokens):\n    return DynamicCache()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    status, out, _ = kvcache(capsys, "verify", "--cache", "my_caches:make")
    assert status == 0, out


def test_names_are_printed_as_they_are(capsys, tiny):
    status, out, _ = kvcache(capsys, "verify", "--model", "m[bold]x[/red]", "--cache", "dynamic")
    assert status == 0
    assert out.startswith("m[bold]x[/red] with DynamicCache")


def test_help_teaches(capsys):
    status, out, _ = kvcache(capsys, "verify", "--help")
    assert status == 0
    assert "package.module:factory" in out
    assert "kvcache verify --storage int8 --attention" in out
