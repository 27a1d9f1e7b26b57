"""Sessions: each call gives what a run without a cache gives, computes only what is new, and can be taken back."""

import gc
import itertools
import threading
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from kvcache import InvalidTypeError, InvalidValueError
from kvcache.hf import Completion, Session, Usage
from tests.hf.runs import assert_same_logits, generate
from tests.hf.tiny_models import FAMILIES, VOCAB, bart, bloom, deepseek_v3, gpt2, llama, mistral

pytestmark = pytest.mark.usefixtures("one_thread")

ROLES = ("system", "user", "assistant")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


SESSION_FAMILIES = FAMILIES | {"deepseek_v3": deepseek_v3, "bloom": bloom}
every_family = pytest.mark.parametrize("family", SESSION_FAMILIES)
SLIDING = ("mistral", "gemma3")  # windows of 6 and 5
COPYING = ("deepseek_v3", "bloom")


@pytest.fixture(scope="module")
def all_models():
    return {name: make() for name, make in SESSION_FAMILIES.items()}


@pytest.fixture(scope="module")
def tokenizer():
    """One word for each id of the tiny models."""
    words = ["<pad>", "<s>", "</s>", *ROLES, *(f"w{index}" for index in range(6, VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # no special tokens: all are text
    fast.chat_template = TEMPLATE
    return fast


def ids_of(count, seed=1):
    return torch.randint(6, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def cold(model, ids, count, **options):
    """Return the ids that a run without a cache adds."""
    given = torch.tensor([ids])
    mask = torch.ones_like(given)  # without one ids of 0 would be padding
    return generate(model, given, "no", count, attention_mask=mask, **options)[0, len(ids) :].tolist()


def turn(session, ids, count, cached=None):
    """Generate, check it against a run without a cache, and return the text with the new ids."""
    completion = session.generate(ids, max_new_tokens=count)
    assert completion.token_ids == cold(session.model, ids, count)
    text = ids + completion.token_ids
    assert session.tokens == text[:-1]
    usage = completion.usage
    assert session.usage == usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), count)
    assert usage.cached_tokens + usage.computed_tokens == len(ids)
    if cached is not None:
        assert usage.cached_tokens == cached
    check_blocks(session)
    return text


def check_blocks(session):
    for layer in session._state.layers:
        if hasattr(layer.rows, "check"):
            layer.rows.check()


@contextmanager
def fed(model):
    """How many tokens each forward got, and the last logits of each."""
    counts, logits = [], []
    hooks = (
        model.register_forward_pre_hook(
            lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        ),
        model.register_forward_hook(lambda module, args, output: logits.append(output.logits[:, -1])),
    )
    yield counts, logits
    for hook in hooks:
        hook.remove()


@every_family
def test_f19_the_last_token_sampled_was_never_run(all_models, tokenizer, family):
    """F19: prompt of 4 and 3 new tokens: 6 rows; the next turn, those 7 + 2, reuses 6 and computes 3."""
    model = all_models[family]
    session = Session(model, tokenizer)
    assert session.usage is None
    assert session.tokens == []
    text = turn(session, ids_of(4), 3)
    assert session.usage == Usage(4, 0, 4, 3)
    assert len(session.tokens) == 6
    with fed(model) as (counts, logits):
        completion = session.generate(text + ids_of(2, seed=2), max_new_tokens=2)
    assert completion.usage == Usage(prompt_tokens=9, cached_tokens=6, computed_tokens=3, completion_tokens=2)
    assert counts == [3, 1]
    text = text + ids_of(2, seed=2) + completion.token_ids
    with torch.no_grad():
        expected = model(torch.tensor([text]), use_cache=False).logits[:, -3:-1]
    if family == "bloom":  # attends in float32
        assert torch.allclose(torch.stack(logits, dim=1), expected, atol=1e-5)
    else:
        assert_same_logits(torch.stack(logits, dim=1), expected)


@every_family
def test_turns_that_grow_compute_only_what_is_new(all_models, tokenizer, family):
    session = Session(all_models[family], tokenizer, block_size=4)
    text = turn(session, ids_of(11), 5, cached=0)
    for seed in range(2, 6):
        text = turn(session, text + ids_of(3, seed), 4, cached=len(text) - 1)
    assert len(session.tokens) == 11 + 5 + 4 * 7 - 1


@every_family
def test_d5_the_same_prompt_again_computes_at_most_all_but_the_last(all_models, tokenizer, family):
    """D5: also the text that is cached, to its last token."""
    session = Session(all_models[family], tokenizer, block_size=4)
    ids = ids_of(9)
    turn(session, ids, 1, cached=0)
    turn(session, ids, 1, cached=8)
    turn(session, ids, 6, cached=8)
    assert session.usage == Usage(9, 8, 1, 6)
    turn(session, ids, 2, cached=8)  # a window has moved on by now, and the state before serves
    turn(session, session.tokens, 2, cached=9)


@every_family
def test_a9_a_text_that_parts_from_the_cached_one_goes_back(all_models, tokenizer, family):
    """A9: only the common beginning is reused; where a window cannot go back, what the best earlier state has of it."""
    session = Session(all_models[family], tokenizer, block_size=4)
    first = turn(session, ids_of(12), 4, cached=0)  # 16, of which 15 are cached
    turn(session, first + ids_of(3, seed=2), 5, cached=15)
    sliding = family in SLIDING
    turn(session, first + ids_of(4, seed=3), 3, cached=15 if sliding else 16)
    turn(session, first[:13] + ids_of(2, seed=4), 3, cached=0 if sliding else 13)
    turn(session, first[:3] + ids_of(2, seed=5), 3, cached=3 if family not in SLIDING else 0)
    turn(session, ids_of(7, seed=6), 2, cached=0)


@every_family
def test_c14_a_prefix_continued_by_two_forks_stays_as_it_was(all_models, tokenizer, family):
    """C14: both texts are those of cold runs, and the prefix is as long as before."""
    model = all_models[family]
    session = Session(model, tokenizer, block_size=4)
    prefix = ids_of(10)
    turn(session, prefix, 1)
    assert session.tokens == prefix
    forks = session.fork(), session.fork()
    assert forks[0].usage is None
    texts = [prefix + ids_of(3, seed) for seed in (2, 3)]
    for _ in range(2):
        texts = [turn(fork, text, 4) for fork, text in zip(forks, texts, strict=True)]
        assert [fork.usage.cached_tokens for fork in forks] in ([10, 10], [16, 16])
        assert session.tokens == prefix
        assert session.usage == Usage(10, 0, 10, 1)
    turn(session, prefix + ids_of(2, seed=4), 3, cached=10)


def first_layer(session):
    return session._state.layers[0].rows


def test_a_fork_shares_blocks_and_gives_them_back(all_models, tokenizer):
    session = Session(all_models["llama"], tokenizer, block_size=4)
    text = turn(session, ids_of(22), 3)
    size, rows = session.nbytes, first_layer(session)
    fork = session.fork()
    assert fork.nbytes == size
    assert first_layer(fork).k_cache.data_ptr() == rows.k_cache.data_ptr()
    turn(fork, text + ids_of(9, seed=2), 5)
    assert rows.num_holders(0) >= 2
    assert first_layer(fork).blocks(0)[:6] == rows.blocks(0)[:6]  # 24 tokens are 6 full blocks
    del fork
    gc.collect()
    assert {rows.num_holders(block) for block in rows.blocks(0)} == {1}
    assert rows.num_blocks - rows.num_free == len(rows.blocks(0))


@pytest.mark.parametrize("family", COPYING)
def test_models_that_do_not_read_blocks_keep_their_rows_in_one_run(all_models, tokenizer, family):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = Session(all_models[family], tokenizer)
        turn(session, ids_of(5), 4)
    assert type(first_layer(session)).__name__ == "KVCache"


@every_family
def test_undo_takes_calls_back_whole(all_models, tokenizer, family):
    session = Session(all_models[family], tokenizer, block_size=4)
    first = turn(session, ids_of(12), 4)
    states = [[], session.tokens]
    for ids in (first + ids_of(3, seed=2), first[:5] + ids_of(9, seed=3)):  # on, and back
        turn(session, ids, 5)
        states.append(session.tokens)
    for expected in states[-2::-1][: session._earlier.maxlen]:
        session.undo()
        assert session.tokens == expected
        check_blocks(session)
    if family not in COPYING:
        assert session.tokens == []
        with pytest.raises(InvalidValueError, match="nothing to undo"):
            session.undo()
    turn(session, first + ids_of(2, seed=4), 3)


def test_undo_goes_back_four_calls_and_a_fork_has_none(all_models, tokenizer):
    session = Session(all_models["llama"], tokenizer, block_size=4)
    text = ids_of(3)
    for seed in range(6):
        text = turn(session, text + ids_of(2, seed), 2)
    with pytest.raises(InvalidValueError, match="nothing to undo; of its calls at most the last 4"):
        session.fork().undo()
    for _ in range(4):
        session.undo()
    assert session.tokens == text[: 3 + 2 * 4 - 1]
    with pytest.raises(InvalidValueError, match="nothing to undo"):
        session.undo()


def test_memory_of_texts_that_are_no_longer_kept_is_used_again(all_models, tokenizer):
    session = Session(all_models["llama"], tokenizer, block_size=4)
    start = ids_of(8)
    sizes = []
    for seed in range(20):
        turn(session, start + ids_of(12, seed), 4, cached=0 if seed == 0 else 8)
        sizes.append(session.nbytes)
    assert sizes[-1] == sizes[8]


@every_family
def test_a_stream_is_the_text_of_generate(all_models, tokenizer, family):
    model = all_models[family]
    session, other = (Session(model, tokenizer, block_size=4) for _ in range(2))
    ids = ids_of(9)
    pieces = list(session.stream(ids, max_new_tokens=7))
    completion = other.generate(ids, max_new_tokens=7)
    assert "".join(pieces) == completion.text == tokenizer.decode(cold(model, ids, 7))
    assert len(pieces) == 7
    assert session.usage == completion.usage
    assert session.tokens == other.tokens
    turn(session, ids + completion.token_ids + ids_of(2, seed=2), 3, cached=15)


@every_family
@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_stream_closed_early_keeps_what_it_has_computed(all_models, tokenizer, family, count):
    model = all_models[family]
    session = Session(model, tokenizer, block_size=4)
    ids, before = ids_of(9), threading.active_count()
    with fed(model) as (counts, _):
        stream = session.stream(ids, max_new_tokens=7)
        pieces = list(itertools.islice(stream, count))
        stream.close()
    assert counts == [9] + [1] * (count - 1)
    assert threading.active_count() == before
    new = cold(model, ids, 7)[:count]
    assert "".join(pieces) == tokenizer.decode(new)
    assert session.tokens == (ids + new)[:-1]
    assert session.usage == Usage(9, 0, 9, count)
    session.undo()
    assert session.tokens == []
    assert next(session.stream(ids, max_new_tokens=7)) == tokenizer.decode(new[:1])
    turn(session, ids + new + ids_of(2, seed=2), 3, cached=9)


def test_nothing_else_goes_while_a_stream_is_unfinished(all_models, tokenizer):
    session = Session(all_models["llama"], tokenizer)
    ids = ids_of(5)
    unused = session.stream(ids, max_new_tokens=2)  # one that is not begun holds up nobody
    stream = session.stream(ids, max_new_tokens=4)
    next(stream)
    for act in (
        lambda: session.generate(ids, max_new_tokens=1),
        lambda: next(session.stream(ids, max_new_tokens=1)),
        lambda: next(unused),
        session.undo,
        session.fork,
    ):
        with pytest.raises(InvalidValueError, match="the session is in use; first let its stream come to its end"):
            act()
    assert session.tokens == []
    assert session.usage is None
    assert len(list(stream)) == 3
    assert len(session.tokens) == 8
    with pytest.raises(StopIteration):
        next(stream)
    turn(session, ids, 2)


def test_a_stream_that_is_dropped_ends(all_models, tokenizer):
    session, before = Session(all_models["llama"], tokenizer), threading.active_count()
    for piece in session.stream(ids_of(5), max_new_tokens=50):
        assert piece
        break
    gc.collect()
    assert threading.active_count() == before
    assert session.tokens == ids_of(5)


def test_streams_of_forks_side_by_side_do_not_disturb_each_other(all_models, tokenizer):
    model = all_models["llama"]
    session = Session(model, tokenizer, block_size=4)
    prefix = ids_of(10)
    turn(session, prefix, 1)
    forks = [session, session.fork(), session.fork()]
    texts = [prefix + ids_of(3, seed) for seed in (2, 3, 4)]
    attention = model.config._attn_implementation
    streams = [
        fork.stream(text, max_new_tokens=5 + 4 * index)
        for index, (fork, text) in enumerate(zip(forks, texts, strict=True))
    ]
    pieces = list(itertools.zip_longest(*streams, fillvalue=""))
    for index, (fork, text) in enumerate(zip(forks, texts, strict=True)):
        assert "".join(parts[index] for parts in pieces) == tokenizer.decode(cold(model, text, 5 + 4 * index))
        assert fork.usage.cached_tokens == 10
        check_blocks(fork)
    assert model.config._attn_implementation == attention


@contextmanager
def failing(model, call, error):
    """Raise in the last layer when it is called for the time `call`."""
    calls = itertools.count(1)

    def fail(*_):
        if next(calls) == call:
            raise error

    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    hook = layers[-1].register_forward_pre_hook(fail)
    yield
    hook.remove()


@every_family
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError("enough"), ValueError("wrong")])
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_a_call_that_fails_changes_nothing(all_models, tokenizer, family, error, call, way):
    model = all_models[family]
    session = Session(model, tokenizer, block_size=4)
    text = turn(session, ids_of(9), 4)
    before, usage = session.tokens, session.usage
    attention = model.config._attn_implementation
    for ids in (text + ids_of(2, seed=2), ids_of(4, seed=3)):
        act = session.generate if way == "generate" else lambda *args, **options: list(session.stream(*args, **options))
        with failing(model, call, error), pytest.raises(type(error) if isinstance(error, Exception) else error):
            act(ids, max_new_tokens=5)
        assert (session.tokens, session.usage) == (before, usage)
        assert model.config._attn_implementation == attention
        check_blocks(session)
    turn(session, text + ids_of(2, seed=2), 3, cached=12)


def test_a_consumer_that_fails_changes_nothing(all_models, tokenizer):
    session = Session(all_models["llama"], tokenizer)
    stream = session.stream(ids_of(5), max_new_tokens=9)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)
    assert session.tokens == []
    turn(session, ids_of(5), 3)


def test_prompts_are_text_ids_or_chats(all_models, tokenizer):
    session = Session(all_models["llama"], tokenizer)
    ids = ids_of(6)
    words = tokenizer.decode(ids)
    expected = session.generate(ids, max_new_tokens=4)
    assert isinstance(expected, Completion)
    assert expected.text == tokenizer.decode(expected.token_ids)
    for prompt in (words, tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32).numpy()):
        completion = session.generate(prompt, max_new_tokens=4)
        assert completion.token_ids == expected.token_ids
        assert completion.usage == Usage(6, 5, 1, 4)
    chat = [{"role": "system", "content": "w9 w8"}, {"role": "user", "content": "w7"}]
    as_ids = tokenizer.convert_tokens_to_ids(["system", "w9", "w8", "user", "w7", "assistant"])
    completion = session.generate(chat, max_new_tokens=4)
    assert completion.token_ids == cold(session.model, as_ids, 4)
    chat += [{"role": "assistant", "content": completion.text}, {"role": "user", "content": "w6"}]
    assert session.generate(chat, max_new_tokens=2).usage == Usage(13, 9, 4, 2)


def test_bad_arguments_are_named_and_change_nothing(all_models, tokenizer):
    session = Session(all_models["llama"], tokenizer)
    turn(session, ids_of(5), 2)
    before = session.tokens, session.usage
    message = {"role": "user", "content": "w7"}
    for prompt, options, error, expected in (
        ([], {}, InvalidValueError, "prompt is empty"),
        ("", {}, InvalidValueError, "the prompt has no tokens"),
        (7, {}, InvalidTypeError, "prompt is a int; expected text, token ids, or messages"),
        (None, {}, InvalidTypeError, "prompt is a NoneType"),
        (message, {}, InvalidTypeError, "prompt is a dict"),
        ([3, "x"], {}, InvalidTypeError, r"prompt\[1\] is a str"),
        ([3, 4.0], {}, InvalidTypeError, r"prompt\[1\] is a float"),
        ([3, VOCAB], {}, InvalidValueError, r"prompt holds the id 97; expected ids in \[0, 96\]"),
        ([-1, 3], {}, InvalidValueError, r"prompt\[0\] is -1; expected a token id >= 0"),
        (torch.tensor([[3, 4]]), {}, InvalidValueError, "prompt has shape"),
        (torch.tensor([3.0]), {}, InvalidTypeError, "prompt has dtype float32"),
        ([message, 3], {}, InvalidTypeError, r"prompt\[1\] is a int; expected a message"),
        ([{"role": "user"}], {}, InvalidValueError, r"prompt\[0\] has \['role'\]; expected a \"role\" and a"),
        ([3], {"num_beams": 2}, InvalidValueError, "num_beams is 2; expected 1"),
        ([3], {"num_return_sequences": 3}, InvalidValueError, "num_return_sequences is 3; expected 1"),
        ([3], {"use_cache": False}, InvalidValueError, "use_cache is set by the session"),
        ([3], {"streamer": None}, InvalidValueError, "streamer is set by the session"),
        ([3], {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ([3], {"max_new_token": 4}, ValueError, "max_new_token"),
    ):
        with pytest.raises(error, match=expected):
            session.generate(prompt, **options)
        with pytest.raises(error, match=expected):
            list(session.stream(prompt, **options))
        assert (session.tokens, session.usage) == before
    with pytest.raises(InvalidValueError, match="num_beams is 2"):
        session.stream([3], num_beams=2)  # at once
    turn(session, ids_of(5), 2, cached=4)


def test_bad_constructor_arguments_are_named(all_models, tokenizer):
    model = all_models["llama"]
    for act, error, message in (
        (lambda: Session("llama", tokenizer), InvalidTypeError, "model is a str"),
        (lambda: Session(bart(), tokenizer), InvalidTypeError, "model is a BartForCon.*, an encoder-decoder"),
        (lambda: Session(model, None), InvalidTypeError, "tokenizer is a NoneType"),
        (lambda: Session(model, tokenizer, block_size=0), InvalidValueError, "block_size is 0"),
        (lambda: Session(model, tokenizer, block_size=None), InvalidTypeError, "block_size is a NoneType"),
        (lambda: Session(model, tokenizer, storage="int3"), InvalidValueError, "storage"),
    ):
        with pytest.raises(error, match=message):
            act()


def test_a_tokenizer_without_a_chat_template_is_said_to_have_none(all_models, tokenizer, monkeypatch):
    session = Session(all_models["llama"], tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(InvalidValueError, match="the tokenizer has no chat_template"):
        session.generate([{"role": "user", "content": "w7"}])


def test_the_models_generation_config_is_heeded_and_left_as_it_is(tokenizer, caplog):
    model = llama()
    config = model.generation_config
    expected = cold(model, ids_of(6), 9)
    config.update(cache_implementation="static", pad_token_id=None, eos_token_id=[expected[4], 1], max_new_tokens=9)
    config.return_dict_in_generate = True
    before = config.to_dict()
    transformers.utils.logging.enable_propagation()
    session = Session(model, tokenizer)
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        completion = session.generate(ids_of(6))
        assert "".join(session.stream(ids_of(6))) == completion.text
    transformers.utils.logging.disable_propagation()
    assert caplog.records == []
    end = expected.index(expected[4]) + 1
    assert completion.token_ids == expected[:end]
    assert completion.finish_reason == "stop"
    assert session.generate(ids_of(6), max_new_tokens=end - 1).finish_reason == "length"
    assert session.generate(ids_of(6), eos_token_id=None, max_new_tokens=end).finish_reason == "length"
    assert config.to_dict() == before


def test_sampling_is_that_of_a_cold_run_with_the_same_seed(all_models, tokenizer):
    model = all_models["llama"]
    session = Session(model, tokenizer)
    options = {"do_sample": True, "top_k": 30, "temperature": 1.5}
    text = ids_of(8)
    for _ in range(3):
        expected = cold(model, text, 6, **options)
        torch.manual_seed(7)  # as the cold run
        completion = session.generate(text, max_new_tokens=6, **options)
        assert completion.token_ids == expected
        session.undo()
        torch.manual_seed(7)
        assert "".join(session.stream(text, max_new_tokens=6, **options)) == completion.text
        text = text + expected


def test_other_ways_to_decode_work(all_models, tokenizer):
    session = Session(all_models["llama"], tokenizer, block_size=4)
    ids = ids_of(6) * 2
    turn(session, ids, 2)
    expected = cold(session.model, ids, 6)
    assert session.generate(ids, max_new_tokens=6, prompt_lookup_num_tokens=3).token_ids == expected
    assert session.tokens == ids + expected[:-1]
    assert session.generate(ids, max_new_tokens=6, prefill_chunk_size=4).token_ids == expected


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_other_storages_work(tokenizer, storage):
    session = Session(mistral(torch.float32), tokenizer, storage=storage)
    first = session.generate(ids_of(9), max_new_tokens=4)
    again = session.fork().generate(ids_of(9) + first.token_ids, max_new_tokens=4)
    assert again.usage == Usage(13, 12, 1, 4)
    assert {layer.rows.storage for layer in session._state.layers} == {storage}


def test_a_session_in_and_out_of_inference_mode_and_autocast(tokenizer):
    session = Session(llama(torch.float32), tokenizer, block_size=4)
    with torch.inference_mode():
        text = ids_of(9) + session.generate(ids_of(9), max_new_tokens=4).token_ids
    turn(session, text + ids_of(2, seed=2), 4, cached=12)
    with torch.inference_mode():
        turn(session.fork(), text + ids_of(2, seed=3), 4, cached=13)
    with torch.autocast("cpu", torch.bfloat16):
        expected = session.fork().generate(text, max_new_tokens=6).text
        assert "".join(session.fork().stream(text, max_new_tokens=6)) == expected


def test_repr_says_what_it_holds(all_models, tokenizer):
    session = Session(all_models["gpt2"], tokenizer)
    assert repr(session) == "Session(GPT2LMHeadModel, 0 tokens, 0 bytes)"
    turn(session, ids_of(5), 3)
    assert repr(session) == f"Session(GPT2LMHeadModel, 7 tokens, {session.nbytes} bytes)"
    assert session.nbytes > 0


def test_a_model_is_freed_with_its_session(tokenizer):
    model = gpt2()
    session = Session(model, tokenizer)
    turn(session, ids_of(5), 3)
    list(session.stream(ids_of(5), max_new_tokens=3))
    seen = weakref.ref(model)
    del session, model
    gc.collect()
    assert seen() is None


def test_a_chat_with_smollm2(smollm2):
    """Multi-byte characters come whole, and a second question reuses the system prompt."""
    model, tokenizer = smollm2
    session = Session(model, tokenizer)
    system = {"role": "system", "content": "You are a helpful assistant who likes llamas 🦙, and answers in one line."}
    first = [system, {"role": "user", "content": "Repeat: naïve 日本語 🦙"}]
    pieces = list(session.stream(first, max_new_tokens=16))
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    question = [system, {"role": "user", "content": "What is two plus two?"}]
    second = session.generate(question, max_new_tokens=4)
    common = tokenizer.apply_chat_template([system], tokenize=True, return_dict=True)["input_ids"]
    assert second.usage.cached_tokens >= len(common)
    again = Session(model, tokenizer).generate(question, max_new_tokens=4)
    assert (again.token_ids, again.usage.cached_tokens) == (second.token_ids, 0)
    stopped = session.generate("One, two, three, four,", max_new_tokens=12, do_sample=False, stop_strings=[","])
    assert "," in stopped.text
    assert (stopped.finish_reason, len(stopped.token_ids) < 12) == ("stop", True)
