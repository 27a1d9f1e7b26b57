"""The engine as people use it: prompts of all kinds, from one thread or many, in little memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import kvcache
from kvcache import CacheSpec, InvalidTypeError, InvalidValueError, NotSupportedError
from kvcache.engine import Engine
from kvcache.engine.room import Room
from kvcache.storage.codecs import check_storage
from tests.engine.engines import check_idle, limited, scheduler_of, text_of
from tests.engine.texts import TIMEOUT, cold, ids_of, single_bytes
from tests.hf.tiny_models import CHANGING_POSITIONS, bart, bloom, deepseek_v3, gemma3, gpt2, llama, mistral

pytestmark = pytest.mark.usefixtures("one_thread")


def test_generate_gives_text_tokens_and_what_they_took(engine, model):
    ids = ids_of(9)
    expected = cold(model, ids, 5)
    completion = engine.generate(ids, max_new_tokens=5)
    assert (completion.token_ids, completion.text, completion.finish_reason) == (expected, text_of(expected), "length")
    assert completion.logprobs is None
    usage = completion.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.completion_tokens) == (9, 0, 9, 5)
    timings = completion.timings
    assert 0 <= timings.queue <= timings.first_token <= timings.total
    assert timings.per_token == pytest.approx((timings.total - timings.first_token) / 4)
    assert engine.generate(ids, max_new_tokens=1).timings.per_token is None
    check_idle(engine)


def test_prompts_are_text_ids_tensors_or_chats(engine, model, tokenizer):
    ids = ids_of(4)
    expected = cold(model, ids, 3)
    chat = [{"role": "user", "content": text_of(ids)}]
    for prompt in (ids, tuple(ids), torch.tensor(ids), text_of(ids)):
        assert engine.generate(prompt, max_new_tokens=3).token_ids == expected
    with pytest.raises(InvalidValueError, match="no chat_template"):
        engine.generate(chat)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    try:
        assert engine.generate(chat, max_new_tokens=3).token_ids == expected
    finally:
        tokenizer.chat_template = None


def test_f19_the_last_token_sampled_never_counts_as_cached(engine, model):
    """F19: nor does the last one of a prompt that is there; the next turn reuses all that has run."""
    ids = ids_of(4)
    first = engine.generate(ids, max_new_tokens=3)
    again = engine.generate(ids, max_new_tokens=3)
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 3)
    text = ids + first.token_ids + ids_of(2, seed=2)
    turn = engine.generate(text, max_new_tokens=3)
    assert (turn.usage.cached_tokens, turn.usage.computed_tokens) == (6, 3)
    assert turn.token_ids == cold(model, text, 3)
    assert engine.statistics.num_hits == 2


def test_d5_the_same_prompt_again_computes_its_last_token_only(engine, model):
    ids = ids_of(5)
    for cached in (0, 4, 4):
        completion = engine.generate(ids, max_new_tokens=3)
        assert completion.usage.cached_tokens == cached
        assert completion.token_ids == cold(model, ids, 3)


def test_several_texts_of_one_prompt(engine):
    given = {"num_return_sequences": 3, "do_sample": True, "seed": 1, "max_new_tokens": 6}
    texts = engine.generate(ids_of(5), **given)
    assert len({completion.text for completion in texts}) == 3
    assert engine.generate_many([ids_of(5)], **given)[0][2].token_ids == texts[2].token_ids


def test_a_stream_gives_the_text_of_generate_piece_by_piece(engine):
    ids = ids_of(9)
    pieces = list(engine.stream(ids, max_new_tokens=7))
    assert "".join(pieces) == engine.generate(ids, max_new_tokens=7).text
    assert len(pieces) == 7


def test_streams_never_break_a_character():
    model = llama(vocab_size=256)
    with Engine(model, single_bytes(), memory="200kB", block_size=4) as engine:
        text = engine.generate("é", max_new_tokens=60, do_sample=True, seed=1).text
        pieces = list(engine.stream("é", max_new_tokens=60, do_sample=True, seed=1))
        assert "".join(pieces) == text
        stop = text[20:23]
        assert (
            engine.generate("é", max_new_tokens=60, do_sample=True, seed=1, stop_strings=stop).text
            == (text[: text.index(stop)])
        )


def test_a_text_iterated_again_ends_at_once(engine):
    job = engine.submit(ids_of(5), max_new_tokens=3)
    assert len(limited(list, job)) == 3
    assert limited(list, job) == []


def test_generate_many_keeps_the_order(engine, model):
    prompts = [ids_of(1 + seed, seed) for seed in range(12)]
    found = engine.generate_many(prompts, max_new_tokens=4)
    assert [completion.token_ids for completion in found] == [cold(model, ids, 4) for ids in prompts]
    assert engine.generate_many([]) == []


def test_k1_a_bad_prompt_among_good_ones_fails_alone(engine, model):
    prompts = [ids_of(3), [], "", [5, 97], ids_of(4), 7, ids_of(129), [-1]]
    found = engine.generate_many(prompts, return_exceptions=True, max_new_tokens=2)
    assert [type(outcome).__name__ for outcome in found] == [
        *("Completion", "InvalidValueError", "InvalidValueError", "InvalidValueError"),
        *("Completion", "InvalidTypeError", "InvalidValueError", "InvalidValueError"),
    ]
    for index in (0, 4):
        assert found[index].token_ids == cold(model, prompts[index], 2)
    with pytest.raises(InvalidValueError, match="prompt"):
        engine.generate_many(prompts, max_new_tokens=2)
    check_idle(engine)


def test_prompts_as_one_string_are_refused(engine):
    with pytest.raises(InvalidTypeError, match="prompts is a str; expected a list of prompts"):
        engine.generate_many("w3 w4")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt"),
        ("", "the prompt has no tokens"),
        ([5, 97], r"prompt holds the id 97; expected ids in \[0, 96\]"),
        ([-1, 5], "prompt"),
        (ids_of(129), "the prompt has 129 tokens; the model's context is 128"),
    ],
)
def test_k1_prompts_that_cannot_run_are_refused_by_name(engine, prompt, message):
    with pytest.raises(InvalidValueError, match=message):
        engine.generate(prompt)
    with pytest.raises(InvalidValueError, match=message):
        engine.stream(prompt)


def test_a_text_ends_where_the_context_does(model, tokenizer):
    with Engine(model, tokenizer, memory="2MB") as engine:
        completion = engine.generate(ids_of(125), max_new_tokens=20, min_new_tokens=9)
        assert (len(completion.token_ids), completion.finish_reason) == (4, "length")
        assert len(engine.generate(ids_of(128)).token_ids) == 1


def test_j1_a_prompt_larger_than_the_memory_is_refused_at_once(model, tokenizer):
    with Engine(model, tokenizer, memory=4 * 4 * 512, block_size=4) as engine:
        assert engine.num_tokens == 16
        running = engine.submit(ids_of(5), max_new_tokens=12)
        with pytest.raises(InvalidValueError, match="give the engine more memory"):
            engine.generate(ids_of(20), max_new_tokens=1)
        assert len(engine.generate(ids_of(3), max_new_tokens=2).token_ids) == 2
        assert len(running.result(TIMEOUT)[0].token_ids) == 12


def test_positions_that_change_with_the_length_end_a_request_alone(tokenizer):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    model = llama(rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors})
    with Engine(model, tokenizer, memory="200kB", block_size=4) as engine:
        long = engine.submit(ids_of(10), max_new_tokens=50)
        short = engine.submit(ids_of(3), max_new_tokens=5)
        assert len(long.result(TIMEOUT)[0].token_ids) == 7
        assert short.result(TIMEOUT)[0].token_ids == cold(model, ids_of(3), 5)
        with pytest.raises(InvalidValueError, match="17 tokens; rotary positions of type 'longrope' change beyond 16"):
            engine.generate(ids_of(17))


def test_options_and_namespaces_are_checked_before_anything_runs(engine):
    with pytest.raises(InvalidValueError, match="unknown option 'max_tokens'"):
        engine.stream(ids_of(3), max_tokens=3)
    with pytest.raises(InvalidTypeError, match="namespace is"):
        engine.generate(ids_of(3), namespace=object())


def test_f2_a_namespace_is_apart(engine):
    cached = [
        engine.generate(ids_of(9), namespace=namespace, max_new_tokens=1).usage.cached_tokens
        for namespace in (None, "a", "a", {"salt": "a"})
    ]
    assert cached == [0, 0, 8, 0]


def test_eight_threads_at_once(engine, model):
    def work(number):
        for seed in range(6):
            ids = ids_of(3 + number, seed)
            if seed % 2:
                text = "".join(engine.stream(text_of(ids), max_new_tokens=5))
            else:
                text = engine.generate(ids, max_new_tokens=5).text
            assert text == text_of(cold(model, ids, 5))

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(work, number) for number in range(8)]:
            future.result(TIMEOUT)
    check_idle(engine)


def test_j5_two_engines_in_turn_do_not_disturb_each_other(tokenizer):
    """J5: each with its own model, one with windows, at once from two threads, then in turn."""
    models = [gemma3(), llama(), mistral()]
    engines = [Engine(model, tokenizer, memory="200kB", block_size=4) for model in models]
    expected = [[cold(model, ids_of(9, seed), 6) for seed in range(5)] for model in models]
    try:
        jobs = [[engine.submit(ids_of(9, seed), max_new_tokens=6) for seed in range(5)] for engine in engines]
        assert [[job.result(TIMEOUT)[0].token_ids for job in row] for row in jobs] == expected
        for seed in range(5):
            for engine, row in zip(engines, expected, strict=True):
                assert engine.generate(ids_of(9, seed), max_new_tokens=6).token_ids == row[seed]
    finally:
        for engine in engines:
            engine.close()
    assert all(model.config._attn_implementation != "kvcache" for model in models)


def test_two_engines_of_one_model(model, tokenizer):
    with Engine(model, tokenizer, memory="200kB") as one, Engine(model, tokenizer, memory="200kB") as two:
        jobs = [engine.submit(ids_of(9, seed), max_new_tokens=9) for seed in range(6) for engine in (one, two)]
        for index, job in enumerate(jobs):
            assert job.result(TIMEOUT)[0].token_ids == cold(model, ids_of(9, index // 2), 9)
    assert model.config._attn_implementation != "kvcache"


def test_the_modes_of_torch_in_the_callers_thread_do_not_matter(model, tokenizer):
    expected = cold(model, ids_of(5), 4)
    with torch.inference_mode():
        engine = Engine(model, tokenizer, memory="200kB", block_size=4)
        assert engine.generate(ids_of(5), max_new_tokens=4).token_ids == expected
    with engine, torch.enable_grad():
        assert engine.generate(ids_of(5), max_new_tokens=4, logprobs=1).token_ids == expected


def test_the_memory_is_no_more_than_was_asked_for(tokenizer):
    for make in (llama, gemma3, mistral):
        with Engine(make(), tokenizer, memory=100_000, block_size=4) as engine:
            pool = scheduler_of(engine).pool
            assert 90_000 < pool.nbytes <= 100_000
            assert engine.num_tokens == 4 * pool.num_blocks[next(iter(pool.num_blocks))]


def test_the_memory_has_room_for_16_texts_where_nothing_is_said(model, tokenizer):
    with Engine(model, tokenizer) as engine:
        assert engine.num_tokens == 16 * 128
        assert (
            repr(engine)
            == "Engine(LlamaForCausalLM, through transformers' forward, room for 2,048 tokens, 1.0 MB in float64)"
        )
    with Engine(gemma3(), tokenizer) as engine:
        assert engine.num_tokens == 16 * 128
    rope, limit = CHANGING_POSITIONS["longrope"]
    with Engine(llama(rope_parameters=rope | {"rope_theta": 10000.0}), tokenizer, block_size=4) as engine:
        assert engine.num_tokens == 16 * limit


def test_an_engine_of_one_block_and_one_text_at_once(model, tokenizer):
    with Engine(model, tokenizer, memory=16 * 512, block_size=16, max_running=1) as engine:
        jobs = [engine.submit(ids_of(9), max_new_tokens=8) for _ in range(3)]
        for job in jobs:
            assert job.result(TIMEOUT)[0].token_ids == cold(model, ids_of(9), 8)
        check_idle(engine)
    with pytest.raises(InvalidValueError, match=r"memory is 8,191 bytes; a block of 16 tokens takes 8,192"):
        Engine(model, tokenizer, memory=16 * 512 - 1, block_size=16)


def test_the_memory_can_be_said_in_tokens(model, tokenizer):
    with Engine(model, tokenizer, num_tokens=21, block_size=4) as engine:
        assert (engine.num_tokens, engine.nbytes, engine.storage) == (24, 24 * 512, "float64")
        assert len(engine.generate(ids_of(5), max_new_tokens=20).token_ids) == 20
        with pytest.raises(InvalidValueError, match="25 tokens, 7 blocks of the full layers; expected at most the 6"):
            engine.generate(ids_of(5), max_new_tokens=21)


def test_sliding_layers_get_what_the_texts_that_run_see_of_them(tokenizer):
    model = gemma3(window=5)
    storage = check_storage("storage", "float64")
    room = Room(CacheSpec.from_config(model.config), 4, storage, max_step_tokens=8, max_running=2)
    assert room.blocks(400) == {"full": 100, "sliding": 2 * 2 * 3 + 2}  # a window of 5 may touch 3 blocks
    assert room.blocks(9) == {"full": 3, "sliding": 3}
    with Engine(model, tokenizer, num_tokens=400, block_size=4, max_step_tokens=8, max_running=2) as engine:
        assert engine.num_tokens == 400
        assert engine.nbytes == room.nbytes(400) < 2 * Room.nbytes(replace(room, max_running=99), 400) / 3
        prompts = [ids_of(40, seed) for seed in range(5)]
        for prompt, answer in zip(prompts, engine.generate_many(prompts, max_new_tokens=30), strict=True):
            assert answer.token_ids == cold(model, prompt, 30)
        assert scheduler_of(engine).num_preemptions == 0
        check_idle(engine)
    for nbytes in range(room.nbytes(4), room.nbytes(200), 777):
        num_tokens = room.tokens_to_hold(nbytes, None, None, torch.device("cpu"))
        assert room.nbytes(num_tokens) <= nbytes < room.nbytes(num_tokens + 4)
    sliding = Room(CacheSpec.from_config(mistral(window=5).config), 4, storage, max_step_tokens=8, max_running=2)
    assert sliding.blocks(400) == {"sliding": 14}


def test_a_text_may_be_as_long_as_the_model_takes(model, tokenizer, engine):
    assert engine.longest_text == 128
    rope, limit = CHANGING_POSITIONS["longrope"]
    with Engine(llama(rope_parameters=rope | {"rope_theta": 10000.0}), tokenizer, memory="200kB") as engine:
        assert engine.longest_text == limit
    with Engine(bigger := gpt2(), tokenizer, memory="200kB") as engine:
        assert engine.longest_text == bigger.config.max_position_embeddings


def test_what_the_models_settings_ask_for_and_an_engine_does_not_do_is_said(tokenizer):
    model = llama()
    neutral = {"num_beams": 1, "min_length": 0, "typical_p": 1.0, "suppress_tokens": [], "no_repeat_ngram_size": 0}
    model.generation_config.update(**neutral, top_k=7, pad_token_id=0)
    Engine(model, tokenizer, memory="200kB").close()
    model.generation_config.update(no_repeat_ngram_size=2, num_beams=3)
    with pytest.warns(UserWarning, match="generation_config has no_repeat_ngram_size=2, num_beams=3, which only"):
        Engine(model, tokenizer, memory="200kB").close()


def test_a_next_turn_is_found_behind_the_windows_of_a_text_that_has_ended(tokenizer):
    model = gemma3(window=5)
    with Engine(model, tokenizer, num_tokens=400, block_size=4, max_step_tokens=8, max_running=2) as engine:
        first = engine.generate(ids_of(21), max_new_tokens=6)
        engine.generate(ids_of(21, seed=2), max_new_tokens=6)
        again = engine.generate([*ids_of(21), *first.token_ids, 5, 6], max_new_tokens=6)
        assert again.usage.cached_tokens == 26
        assert again.token_ids == cold(model, [*ids_of(21), *first.token_ids, 5, 6], 6)


def test_whoever_asks_lets_its_own_threads_go(model, tokenizer, monkeypatch):
    callers = []
    monkeypatch.setattr("kvcache.engine.worker.release_threads", lambda: callers.append(threading.current_thread()))
    with Engine(model, tokenizer, memory="200kB") as engine, ThreadPoolExecutor(1) as other:
        other.submit(engine.generate, ids_of(3), max_new_tokens=2).result(TIMEOUT)
    maker, asker = callers
    assert maker is threading.current_thread() is not asker


def test_rows_can_be_kept_in_another_storage(model, tokenizer):
    with Engine(model, tokenizer, memory="200kB", storage="float32") as engine:
        assert scheduler_of(engine).pool.storage == "float32"
        assert engine.generate(ids_of(5), max_new_tokens=4).token_ids == cold(model, ids_of(5), 4)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"block_size": 0}, InvalidValueError, "block_size is 0"),
        ({"max_step_tokens": 0}, InvalidValueError, "max_step_tokens is 0"),
        ({"max_running": 0}, InvalidValueError, "max_running is 0"),
        ({"max_running": 1.5}, InvalidTypeError, "max_running is a float"),
        ({"memory": "lots"}, InvalidValueError, "memory is 'lots'"),
        ({"memory": 0}, InvalidValueError, "memory is 0"),
        ({"num_tokens": 0}, InvalidValueError, "num_tokens is 0"),
        ({"num_tokens": 2.5}, InvalidTypeError, "num_tokens is a float"),
        (
            {"memory": 100, "num_tokens": 2},
            InvalidValueError,
            "memory is 100 and num_tokens is 2; expected one of them",
        ),
        ({"storage": "int7"}, InvalidValueError, "storage"),
        ({"tokenizer": "smollm2"}, InvalidTypeError, "tokenizer is a str"),
        ({"model": torch.nn.Linear(2, 2)}, InvalidTypeError, "model is a Linear"),
        ({"model": bart()}, InvalidTypeError, "an encoder-decoder"),
        ({"model": deepseek_v3()}, NotSupportedError, "layers keep one latent for all heads"),
        ({"model": bloom()}, NotSupportedError, "attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_are_checked_by_name(model, tokenizer, given, error, message):
    threads = threading.active_count()
    with pytest.raises(error, match=message):
        Engine(**{"model": model, "tokenizer": tokenizer, **given})
    assert threading.active_count() == threads


def test_the_thread_uses_as_many_cores_as_its_maker(model, tokenizer):
    found = []
    with Engine(model, tokenizer, memory="200kB") as engine:
        limited(engine._worker.call, lambda: found.append(torch.get_num_threads()))
    assert found == [torch.get_num_threads()] == [1]


def test_the_default_model_by_its_name(smollm2):
    with kvcache.Engine(*smollm2, memory="64MiB") as engine:
        chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        first = engine.generate(chat, max_new_tokens=12)
        again = engine.generate(chat, max_new_tokens=12)
    assert "Paris" in first.text
    assert again.text == first.text
    assert again.usage.cached_tokens == first.usage.prompt_tokens - 1


def test_more_memory_than_is_free_is_refused(model, tokenizer):
    with pytest.raises(InvalidValueError, match=r"memory is 1,000,000,000,000,000 bytes, and [0-9,]+ are free"):
        Engine(model, tokenizer, memory="1000TB")
    with pytest.raises(InvalidValueError, match=r"memory is 1,000,[0,]+ bytes, and [0-9,]+ are free"):
        Engine(model, tokenizer, memory=10**30)
    with pytest.raises(
        InvalidValueError, match=r"num_tokens is 1,000,000,000,000, which takes [0-9,]+ bytes, and [0-9,]+ "
    ):
        Engine(model, tokenizer, num_tokens=10**12)


def test_a_stream_is_one_text(engine):
    with pytest.raises(InvalidValueError, match="num_return_sequences is 2; expected 1, as a stream is one text"):
        engine.stream(ids_of(3), num_return_sequences=2, temperature=1.0)
    check_idle(engine)


def test_a_namespace_is_what_it_was_when_it_was_given(engine):
    namespace = {"user": 1}
    engine.generate(ids_of(9), namespace=namespace, max_new_tokens=1)
    job = engine.submit(ids_of(9), namespace=namespace, max_new_tokens=1)
    namespace["user"] = 2
    assert job.result(TIMEOUT)[0].usage.cached_tokens == 8
    assert engine.generate(ids_of(9), namespace=namespace, max_new_tokens=1).usage.cached_tokens == 0


def test_scores_that_become_infinite_end_a_request_alone(engine, model):
    job = engine.submit(ids_of(5), max_new_tokens=5)
    with pytest.raises(InvalidValueError, match="make them so; expected values nearer to 1"):
        engine.generate(ids_of(5), temperature=1e-320, max_new_tokens=2)
    assert job.result(TIMEOUT)[0].token_ids == cold(model, ids_of(5), 5)
    check_idle(engine)


def test_a_chat_template_that_refuses_is_an_error_by_name(engine, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(InvalidValueError, match="chat template refuses the messages: no system messages"):
        engine.generate([{"role": "system", "content": "x"}])
