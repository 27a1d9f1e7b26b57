"""What is proposed behind a text, from the text alone; held against a search through the whole of it."""

import random

import pytest

from kvcache.engine.lookup import PromptLookup


def proposed(tokens, num_tokens=4, max_ngram=2, most=100):
    return PromptLookup(num_tokens, max_ngram).propose(tokens, most)


def test_what_followed_the_last_tokens_before_is_proposed():
    assert proposed([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]


def test_no_more_are_proposed_than_wanted():
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    assert proposed(text, num_tokens=2) == [3, 4]
    assert proposed(text, most=1) == [3]
    assert proposed(text, most=0) == []


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3]])
def test_nothing_is_proposed_where_nothing_stands_twice(text):
    assert proposed(text) == []


def test_the_longest_n_gram_decides():
    text = [7, 1, 2, 30, 0, 8, 1, 2, 40, 0, 7, 1, 2]
    assert proposed(text, num_tokens=1, max_ngram=3) == [30]
    assert proposed([1, 30, 0, 2, 1], num_tokens=1, max_ngram=3) == [30]


def test_a_text_that_repeats_itself_goes_on_so():
    """Beyond its end too: what is proposed may be longer than what was repeated."""
    assert proposed([5, 5], num_tokens=3) == [5, 5, 5]
    assert proposed([1, 2, 3, 1, 2, 3], num_tokens=7) == [1, 2, 3, 1, 2, 3, 1]


def test_of_several_places_the_first_behind_the_last_copy_is_taken_else_the_newest():
    lookup = PromptLookup(num_tokens=2, max_ngram=2)
    text = [1, 2, 30, 31, 0, 1, 2, 40, 41, 0, 1, 2, 50, 51, 0, 1, 2]
    for expected in ([30, 31], [40, 41], [50, 51]):
        assert lookup.propose(text, 2) == expected
        lookup.note_run(2)
        lookup.note_accepted()
        lookup.note_accepted()
        text += [*expected, 0, 1, 2]
    assert lookup.propose(text, 2) == [30, 31]  # what was copied first, which stands behind all of that now
    text = [1, 2, 60, 61, 0, 1, 2, 70, 71, 0, 1, 2]
    lookup = PromptLookup(num_tokens=2, max_ngram=2)
    lookup._left = len(text)
    assert lookup.propose(text, 2) == [70, 71]


def test_behind_a_change_a_copy_goes_on_where_it_was_left():
    """Three lines begin alike; in their copy the first one ends differently."""
    lookup = PromptLookup(num_tokens=3, max_ngram=2)
    text = [1, 2, 30, 31, 0, 1, 2, 40, 0, 1, 2, 50, 0, 9, 1, 2]
    assert lookup.propose(text, 3) == [30, 31, 0]
    lookup.note_run(3)
    lookup.note_accepted()
    text += [30, 77, 0, 1, 2]
    assert lookup.propose(text, 3) == [40, 0, 1]


def test_fewer_are_proposed_where_they_were_rejected_and_more_again_where_they_were_right():
    lookup = PromptLookup(num_tokens=6, max_ngram=1)
    text = [5] * 4
    counts = []
    for num_right in (6, 2, 0, 0, 1, 3, 6):
        counts.append(len(lookup.propose(text, 100)))
        lookup.note_run(counts[-1])
        for _ in range(min(num_right, counts[-1])):
            lookup.note_accepted()
        text += [5]
    assert counts == [6, 6, 5, 1, 1, 3, 6]
    assert (lookup.num_proposed, lookup.num_accepted) == (sum(counts), 6 + 2 + 0 + 0 + 1 + 3 + 6)


def searched(tokens, num_tokens, max_ngram, left):
    """The same by a search through the whole text."""
    for size in range(min(max_ngram, len(tokens)), 0, -1):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
        if ends:
            start = next((end for end in ends if end >= left), ends[-1])
            text = list(tokens)
            while len(text) < start + num_tokens or len(text) < len(tokens) + num_tokens:
                text.append(text[start + len(text) - len(tokens)])
            return start, text[len(tokens) : len(tokens) + num_tokens]
    return left, []


@pytest.mark.parametrize("seed", range(20))
def test_an_index_that_grows_finds_what_a_search_finds(seed):
    chance = random.Random(seed)
    size, max_ngram, num_tokens = chance.randint(1, 5), chance.randint(1, 4), chance.randint(1, 6)
    lookup, text, left, limit = PromptLookup(num_tokens, max_ngram), [], 0, num_tokens
    for _ in range(60):
        text = text + [chance.randint(1, size) for _ in range(chance.randint(1, 4))]
        start, expected = searched(text, limit, max_ngram, left)
        found = lookup.propose(text, 100)
        assert found == expected
        if found and chance.random() < 0.7:
            lookup.note_run(len(found))
            num_accepted = chance.randint(0, len(found))
            for _ in range(num_accepted):
                lookup.note_accepted()
            limit = min(2 * num_accepted + 1, num_tokens)
            left = start + num_accepted if num_accepted else left


def test_a_token_costs_the_same_however_long_the_text_is():
    """Each is looked at once when it comes: what is indexed twice would stand twice."""
    lookup = PromptLookup(num_tokens=2, max_ngram=3)
    text = list(range(1000))
    for token in range(1000, 1100):
        lookup.propose(text, 2)
        text.append(token)
    assert sum(map(len, lookup._ends.values())) == 1 + 2 + 3 * (len(text) - 2 - 2)
    assert max(map(len, lookup._ends.values())) == 1
