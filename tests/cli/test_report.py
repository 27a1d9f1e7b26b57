import json
from dataclasses import replace

import pytest

from kvcache.cli.report import (
    Report,
    as_data,
    comparison_as_data,
    first_difference,
    projections_with_cache,
    projections_without_cache,
)
from kvcache.cli.run import CacheAccount, Run
from kvcache.engine import Completion, Speculation, Timings
from kvcache.hf import Usage


def run_of(token_ids, prompt_tokens=4, first=1.0, later=2.0, cache=None, speculation=None):
    count = len(token_ids)
    timings = Timings(0.0, first, first + later, per_token=later / (count - 1) if count > 1 else None)
    usage = Usage(prompt_tokens, 0, prompt_tokens, count)
    return Run(Completion("text", list(token_ids), "length", usage, timings, speculation=speculation), cache)


def test_projections_are_counted_as_they_are_done():
    run = run_of([7, 8, 9])  # 4 + 1 + 1 tokens processed; the third new one never is
    assert projections_with_cache(run) == 3 * (4 + 1 + 1)
    assert projections_without_cache(run) == 3 * (4 + 5 + 6)
    proposed = run_of([7, 8, 9], speculation=Speculation(num_proposed=5, num_accepted=1))  # in steps of 4 and 6 tokens
    assert projections_with_cache(proposed) == 3 * (4 + 6)
    assert projections_without_cache(proposed) == 3 * (4 + 5 + 6)
    only_one = run_of([7])
    assert projections_with_cache(only_one) == projections_without_cache(only_one) == 3 * 4


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([5], [6], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2)],
)
def test_the_first_difference_is_found(ours, theirs, expected):
    assert first_difference(run_of(ours), run_of(theirs)) == expected


def test_rates_are_tokens_over_the_time_they_took():
    run = run_of([1, 2, 3, 4, 5], prompt_tokens=10, first=0.5, later=2.0)
    assert run.prefill_tokens_per_second == 20
    assert run.decode_tokens_per_second == 2
    assert run.total_seconds == 2.5
    assert run_of([1], later=0.0).decode_tokens_per_second is None


def test_data_hold_every_figure():
    cached = run_of(
        [1, 2], cache=CacheAccount(tokens=5, nbytes=640, stored_nbytes=320, token_nbytes=64, storage="float32")
    )
    assert as_data(cached) == {
        "generated_tokens": 2,
        "token_ids": [1, 2],
        "finish_reason": "length",
        "runs_through": "transformers' forward",
        "time_to_first_token_seconds": 1.0,
        "decode_seconds": 2.0,
        "total_seconds": 3.0,
        "prefill_tokens_per_second": 4.0,
        "decode_tokens_per_second": 0.5,
        "speculation": None,
        "qkv_projections_per_layer": {"with_cache": 15, "without_cache": 27},
        "cache": {"tokens": 5, "bytes": 640, "bytes_stored": 320, "bytes_per_token": 64, "storage": "float32"},
    }
    uncached = run_of([1, 3], later=5.0)
    assert as_data(uncached)["cache"] is None
    assert comparison_as_data(cached, uncached) == {"speedup": 2.0, "same_tokens": False, "first_difference": 1}


def test_the_start_is_told_stage_by_stage(capsys):
    stages = {"imports": 2.5, "model": 0.75, "engine": 0.25, "first_token": 0.125}
    report = Report("a model", "float32", 2, run_of([1, 2]), start_seconds=stages)
    report.print()
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "Start    3.6 s: 2.5 s imports, 0.8 s model, 0.2 s engine, 0.1 s first token" in lines
    assert json.loads(report.as_json())["start_seconds"] == {**stages, "total": 3.625}


def test_what_ran_the_model_is_told_and_why(capsys):
    def last_line(run):
        Report("a model", "bfloat16", 1, run).print()
        return capsys.readouterr().out.splitlines()[-1]

    run = run_of([1, 2])
    assert last_line(run) == "a model in bfloat16 through transformers' forward, 1 thread."
    ours = replace(run, runs_through="kvcache's own decoder, weights in int8")
    assert last_line(ours) == "a model in bfloat16 through kvcache's own decoder, weights in int8, 1 thread."
    theirs = replace(run, runs_through="transformers' forward: it is on [cuda]")
    assert last_line(theirs) == "a model in bfloat16 through transformers' forward (it is on [cuda]), 1 thread."


def test_int8_weights_explain_other_tokens(capsys):
    report = Report("a model", "float32", 1, run_of([1, 2]), run_of([1, 3]), weights="int8")
    report.print()
    out = " ".join(capsys.readouterr().out.split())
    assert "the same up to token 1: with the cache the weights are in int8, which rounds" in out
    assert json.loads(report.as_json())["weights"] == "int8"
