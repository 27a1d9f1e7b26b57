"""Texts that propose their next tokens are the texts that they are without, in fewer steps."""

from functools import partial

import pytest
import torch

from kvcache import InvalidTypeError, InvalidValueError
from kvcache.engine import Engine, Speculation
from kvcache.engine.lookup import PromptLookup
from kvcache.hf import forward_step
from tests.engine.proposals import Foretold, repeating, repetitive
from tests.engine.texts import Noted, cold, ids_of, options, single_bytes, words
from tests.engine.workloads import check_left, run, scheduler_of
from tests.hf.tiny_models import ALL_FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama", "mistral", "gemma3", "gpt_oss")  # full, sliding, and two with both
every_family = pytest.mark.parametrize("family", FAMILIES)
LOOKUP = {"prompt_lookup_num_tokens": 5}


@pytest.fixture(scope="module")
def models():
    return {family: repetitive(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def model(models):
    return models["llama"]


@pytest.fixture
def propose(monkeypatch):
    """Let something else propose, made as a `PromptLookup` is."""
    return partial(monkeypatch.setattr, "kvcache.engine.request.PromptLookup")


class Counted:
    """A forward that counts its steps, and lets logits be changed."""

    def __init__(self, model, change=lambda step, logits: None):
        self.num_steps = self.num_tokens = self.most_tokens = 0
        self._forward, self._change = partial(forward_step, model), change

    def __call__(self, step, places):
        logits = self._forward(step, places)
        self.num_steps += 1
        self.num_tokens += sum(step.num_tokens)
        self.most_tokens = max(self.most_tokens, sum(step.num_tokens))
        self._change(step, logits)
        return logits


class Wrong(PromptLookup):
    """Proposes any tokens, which are nearly always wrong, and notes them behind their texts."""

    def __init__(self, *sizes, noted):
        super().__init__(*sizes)
        self._noted = noted

    def propose(self, tokens, most):
        found = ids_of(min(most, self._num_tokens), seed=len(tokens))
        self._noted.append(tokens + found)
        return found


def checked(model, scheduler, *requests):
    """Run requests, and return for each the completion of its first text, which is that of a cold run."""
    run(scheduler, *requests)
    for request in requests:
        assert request.texts == [cold(model, request.ids, request.options.max_new_tokens)]
    return [request.outcome[0] for request in requests]


@every_family
def test_a_text_that_repeats_itself_takes_fewer_steps_than_it_has_tokens(models, tokenizer, family):
    model = models[family]
    ids = repeating(model)
    forward = Counted(model)
    request = Noted(ids, tokenizer, max_new_tokens=20, **LOOKUP)
    (completion,) = checked(model, scheduler_of(model, forward=forward), request)
    speculation = completion.speculation
    assert 0 < speculation.num_accepted <= speculation.num_proposed
    assert forward.num_steps == 20 - speculation.num_accepted < 15
    assert forward.num_tokens == len(ids) + 19 + speculation.num_proposed - speculation.num_accepted


def test_without_the_option_nothing_is_proposed(model, tokenizer):
    forward = Counted(model)
    request = Noted(repeating(model), tokenizer, max_new_tokens=9, prompt_lookup_num_tokens=0)
    (completion,) = checked(model, scheduler_of(model, forward=forward), request)
    assert completion.speculation is None
    assert forward.num_steps == 9


@pytest.mark.parametrize("block_size", [1, 2, 4])
@every_family
def test_i1_and_i3_rejected_tokens_leave_no_trace_and_are_never_found(tokenizer, propose, family, block_size):
    """In blocks of 1 and 2 those that were proposed would have filled some."""
    model, noted = ALL_FAMILIES[family](), []
    propose(partial(Wrong, noted=noted))
    scheduler = scheduler_of(model, block_size=block_size)
    ids = ids_of(12)
    request = Noted(ids, tokenizer, max_new_tokens=10, **LOOKUP)
    other = Noted(ids_of(7, seed=2), tokenizer, max_new_tokens=10)
    completion, _ = checked(model, scheduler, request, other)
    assert completion.speculation.num_proposed > 20 * completion.speculation.num_accepted
    text = ids + request.texts[0]
    wrong = [tokens for tokens in noted if tokens != text[: len(tokens)]]
    assert len(wrong) > 5
    for tokens in wrong:
        same = next(place for place, (one, own) in enumerate(zip(tokens, text, strict=False)) if one != own)
        assert scheduler.prefixes.lookup([*tokens, 0]).num_tokens <= same
    for tokens in wrong[::3]:
        checked(model, scheduler, Noted(tokens, tokenizer, max_new_tokens=3))
    checked(model, scheduler, Noted(text, tokenizer, max_new_tokens=4))


@pytest.mark.parametrize("block_size", [1, 3, 4])
@every_family
def test_proposals_right_up_to_any_place_change_nothing(tokenizer, propose, family, block_size):
    """Of models whose next token depends on all before it, so that one wrong row would be seen."""
    model = ALL_FAMILIES[family]()
    requests = [Noted(ids_of(length, seed=length), tokenizer, max_new_tokens=16, **LOOKUP) for length in (5, 8, 13)]
    texts = [request.ids + cold(model, request.ids, 16) for request in requests]
    propose(partial(Foretold, texts=texts))
    completions = checked(model, scheduler_of(model, block_size=block_size), *requests)
    for completion in completions:
        assert 0 < completion.speculation.num_accepted < completion.speculation.num_proposed


def test_i3_a_block_that_only_rejected_tokens_needed_is_free_behind_the_step(model, tokenizer, propose):
    propose(partial(Wrong, noted=[]))
    scheduler = scheduler_of(model, block_size=4)
    request = Noted(ids_of(10), tokenizer, max_new_tokens=9, prompt_lookup_num_tokens=8)
    scheduler.add(request)
    while request.outcome is None:
        scheduler.step()
        for branch in request.branches:
            if branch.sequence is not None:
                stored = len(branch.tokens) - 1
                assert branch.sequence.seq_len == stored
                assert len(branch.sequence.blocks()) == -(-stored // 4)
    check_left(scheduler)


DRAWN = {"do_sample": True, "seed": 7, "temperature": 0.7}


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.2},
        {"repetition_penalty": 0.8},
        {"logprobs": 3},
        {"min_new_tokens": 9},
        DRAWN,
        {**DRAWN, "temperature": 0.2, "repetition_penalty": 0.9, "logprobs": 2, "top_k": 20},
        {**DRAWN, "num_return_sequences": 3, "top_p": 0.9},
        {**DRAWN, "num_return_sequences": 4, "temperature": 0.1, "min_new_tokens": 4, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_texts_are_the_same_however_tokens_are_picked(tokenizer, propose, family, given):
    """Ends, log-probabilities and all."""
    model, ids = ALL_FAMILIES[family](), ids_of(9)
    given = {"max_new_tokens": 16, "eos_token_id": cold(model, ids, 11)[-1], **given}
    plain = Noted(ids, tokenizer, **given)
    run(scheduler_of(model), plain)
    propose(partial(Foretold, texts=[ids + text for text in plain.texts]))
    request = Noted(ids, tokenizer, **given, **LOOKUP)
    run(scheduler_of(model, max_running=3), request)
    assert request.texts == plain.texts
    for one, other in zip(plain.outcome, request.outcome, strict=True):
        assert (one.text, one.finish_reason, one.usage) == (other.text, other.finish_reason, other.usage)
        assert other.speculation.num_accepted > 0
        if one.logprobs is not None:
            for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-10)
                assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize("place", range(1, 12))
def test_nothing_is_taken_behind_an_end_token_or_a_stop_string(model, tokenizer, place):
    """Wherever it stands among what is proposed."""
    ids = repeating(model)
    free = cold(model, ids, 12)
    token = free[place]
    first = free.index(token)
    for given in ({"eos_token_id": token}, {"stop_strings": f"w{token}"}):
        request = Noted(ids, tokenizer, max_new_tokens=12, **given, **LOOKUP)
        plain = Noted(ids, tokenizer, max_new_tokens=12, **given)
        scheduler = scheduler_of(model)
        run(scheduler, request)
        run(scheduler_of(model), plain)
        assert request.texts == plain.texts
        assert len(request.texts[0]) <= first + 1
        assert request.outcome[0].text == plain.outcome[0].text
        assert request.outcome[0].finish_reason == "stop"


def test_pieces_part_no_character_where_several_tokens_come_at_once(model):
    ids = repeating(model)
    streams = []
    for lookup in ({}, LOOKUP):
        request = Noted(ids, single_bytes(), max_new_tokens=16, **lookup)
        run(scheduler_of(model), request)
        assert request.texts == [cold(model, ids, 16)]
        streams.append("".join(request.pieces.get(0, [])))
    assert streams[0] == streams[1]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_no_more_is_proposed_than_could_be_taken(model, tokenizer, count):
    """So that a pool which just fits the text fits its steps."""
    ids = repeating(model)
    scheduler = scheduler_of(model, num_blocks=len(ids) + count - 1, block_size=1)
    longest = 0

    def forward(step, places):
        nonlocal longest
        longest = max(longest, step.sequences[0].seq_len + step.num_tokens[0])
        return forward_step(model, step, places)

    scheduler._forward = forward
    request = Noted(ids, tokenizer, max_new_tokens=count, prompt_lookup_num_tokens=50)
    (completion,) = checked(model, scheduler, request)
    assert longest == len(ids) + count - 1
    assert completion.speculation.num_proposed <= max(count - 2, 0) * (count - 1)
    assert (completion.speculation.num_accepted > 0) == (count > 2)


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 8])
def test_proposals_fill_only_what_a_step_has_left(model, tokenizer, max_step_tokens):
    ids = repeating(model)
    forward = Counted(model)
    scheduler = scheduler_of(model, max_step_tokens=max_step_tokens, forward=forward)
    requests = [Noted(ids[cut:], tokenizer, max_new_tokens=12, **LOOKUP) for cut in range(2)]
    completions = checked(model, scheduler, *requests)
    assert forward.most_tokens <= max(max_step_tokens, 2)  # two texts, each of which always runs its token
    proposed = sum(completion.speculation.num_proposed for completion in completions)
    assert (proposed > 0) == (max_step_tokens > 1)


def test_where_blocks_are_short_texts_go_on_without_proposals(model, tokenizer):
    """Nobody is preempted, and no step is refused, that would not be without."""
    ids = repeating(model)
    counts = []
    for lookup in ({}, {"prompt_lookup_num_tokens": 30}):
        scheduler = scheduler_of(model, num_blocks=2 * -(-(len(ids) + 11) // 2), block_size=2)
        requests = [Noted(text, tokenizer, max_new_tokens=12, **lookup) for text in (ids, ids[1:])]
        completions = checked(model, scheduler, *requests)
        counts.append(scheduler.num_preemptions)
        if lookup:
            assert min(completion.speculation.num_accepted for completion in completions) > 0
    assert counts == [0, 0]


def test_no_step_preempts_for_what_is_proposed(model, tokenizer, monkeypatch):
    """Each preemption is in a step that has tried to do without."""
    tried = []
    scheduler = scheduler_of(model, num_blocks=7, block_size=8)
    step, preempt = scheduler.pool.step, scheduler._preempt
    running = scheduler.running

    def noted_step(sequences, tokens):
        tried.append([sequence.seq_len + len(new) for sequence, new in zip(sequences, tokens, strict=True)])
        return step(sequences, tokens)

    def noted_preempt(branch):
        assert tried[-1] == [len(other.tokens) for other in running]
        preempt(branch)

    monkeypatch.setattr(scheduler.pool, "step", noted_step)
    monkeypatch.setattr(scheduler, "_preempt", noted_preempt)
    requests = [Noted(repeating(model)[cut:], tokenizer, max_new_tokens=20, **LOOKUP) for cut in (20, 21)]
    completions = checked(model, scheduler, *requests)
    assert scheduler.num_preemptions > 0
    assert all(completion.speculation.num_accepted > 0 for completion in completions)


def test_a_text_preempted_at_every_token_goes_on_as_if_it_was_not(model, tokenizer):
    ids = repeating(model)
    for index in range(12):
        scheduler = scheduler_of(model, block_size=2, max_step_tokens=16)
        request = Noted(ids, tokenizer, max_new_tokens=12, **LOOKUP)
        scheduler.add(request)
        while request.outcome is None and len(request.branches[0].new_ids) < index:
            scheduler.step()
        if request.outcome is None:
            scheduler.step()
        if scheduler.running:
            scheduler._preempt(scheduler.running[0])
            scheduler.pool.check()
        checked(model, scheduler)
        assert request.texts == [cold(model, ids, 12)]


def test_a_tokenizer_that_fails_among_accepted_tokens_ends_one_request_alone(model, tokenizer):
    """At each of them; what had run stays right, and is found."""
    ids = repeating(model)
    expected = cold(model, ids, 12)

    class Failing:
        def __init__(self, left):
            self.left = left

        def decode(self, ids, **options):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("no such token")
            return "x"

    for left in range(0, 14, 2):
        scheduler = scheduler_of(model, block_size=2)
        bad = Noted(ids, Failing(left), max_new_tokens=12, **LOOKUP)
        good = Noted(ids[1:], tokenizer, max_new_tokens=12, **LOOKUP)
        run(scheduler, bad, good)
        assert str(bad.error) == "no such token"
        assert good.texts == [cold(model, good.ids, 12)]
        checked(model, scheduler, Noted(ids + expected, tokenizer, max_new_tokens=3))


def test_logits_that_are_nan_count_only_where_a_token_is_picked_from_them(model, tokenizer, propose):
    ids, spoiled = ids_of(12), []

    def spoil_rejected(step, logits):
        if len(step.sequences) == 1 and len(logits) > 1:
            proposed, picked = step.tokens[0].tolist()[1:], logits.argmax(dim=-1).tolist()
            wrong = [place for place, (one, other) in enumerate(zip(proposed, picked, strict=False)) if one != other]
            logits[wrong[0] + 1 :] = torch.nan
            spoiled.append(wrong[0])

    propose(partial(Wrong, noted=[]))
    request = Noted(ids, tokenizer, max_new_tokens=12, **LOOKUP)
    checked(model, scheduler_of(model, forward=Counted(model, spoil_rejected)), request)
    assert len(spoiled) > 5


def test_logits_that_are_nan_behind_an_accepted_token_end_the_request(model, tokenizer):
    ids = repeating(model)

    def spoil_accepted(step, logits):
        if len(logits) > 2:
            logits[2] = torch.nan

    request = Noted(ids, tokenizer, max_new_tokens=12, **LOOKUP)
    scheduler = scheduler_of(model, forward=Counted(model, spoil_accepted))
    run(scheduler, request)
    assert "NaN" in str(request.error)
    scheduler._forward = partial(forward_step, model)
    checked(model, scheduler, Noted(ids, tokenizer, max_new_tokens=12))


def test_a_forward_that_fails_leaves_no_proposal_behind(model, tokenizer):
    ids = repeating(model)

    def fail(step, logits):
        if len(logits) > 1:
            raise RuntimeError("out of memory")

    scheduler = scheduler_of(model, forward=Counted(model, fail))
    request = Noted(ids, tokenizer, max_new_tokens=12, **LOOKUP)
    run(scheduler, request)
    assert str(request.error) == "out of memory"
    scheduler._forward = partial(forward_step, model)
    checked(model, scheduler, Noted(ids, tokenizer, max_new_tokens=12, **LOOKUP))


def test_an_engine_takes_the_option_and_tells_what_came_of_it(model):
    ids = repeating(model)
    with Engine(model, words(), num_tokens=256, block_size=4) as engine:
        plain = engine.generate(ids, max_new_tokens=16)
        speculated = engine.generate(ids, max_new_tokens=16, **LOOKUP)
        pieces = "".join(engine.stream(ids, max_new_tokens=16, **LOOKUP))
    assert plain.speculation is None
    assert isinstance(speculated.speculation, Speculation)
    assert speculated.speculation.num_accepted > 0
    assert speculated.token_ids == plain.token_ids
    assert pieces == plain.text


def test_the_options_are_those_of_transformers():
    assert (options().prompt_lookup_num_tokens, options().max_matching_ngram_size) == (0, 2)
    asked = options(prompt_lookup_num_tokens=4, max_matching_ngram_size=3)
    assert (asked.prompt_lookup_num_tokens, asked.max_matching_ngram_size) == (4, 3)


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "max_matching_ngram_size"])
def test_options_that_are_no_such_number_are_refused_by_name(name):
    for value in (True, "3", 1.5, [2]):
        with pytest.raises(InvalidTypeError, match=f"^{name} is "):
            options(**{name: value})
    with pytest.raises(InvalidValueError, match=f"^{name} is -1"):
        options(**{name: -1})


@pytest.mark.parametrize("size", [0, 17])
def test_n_grams_of_other_sizes_are_refused(size):
    with pytest.raises(InvalidValueError, match=f"^max_matching_ngram_size is {size}; expected an integer"):
        options(max_matching_ngram_size=size)
