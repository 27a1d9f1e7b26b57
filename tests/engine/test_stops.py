"""Where a text ends: stop strings, end tokens, limits; and that what is shown never breaks a character."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.engine.request import Branch
from kvcache.engine.stops import StopStrings
from tests.engine.texts import Noted, single_bytes, word_of, words


def pushed(strings, pieces):
    """Return what each piece lets through, what comes at the end, and whether a stop string was hit."""
    stops = StopStrings(strings)
    shown = [stops.push(piece) for piece in pieces]
    return shown, stops.finish(), stops.is_hit


def test_k6_a_stop_string_in_pieces_is_held_back():
    assert pushed(("END now",), ["abc E", "ND", " now"]) == (["abc ", "", ""], "", True)


def test_k6_what_becomes_no_stop_string_is_let_go():
    """K6: where the text goes on otherwise, and where it ends."""
    assert pushed(("END now",), ["abc E", "ND", " later"]) == (["abc ", "", "END later"], "", False)
    assert pushed(("END now",), ["abc E", "ND"]) == (["abc ", ""], "END", False)
    assert pushed(("aab",), ["a", "a", "a", "b", "c"]) == (["", "", "a", "", ""], "", True)


@pytest.mark.parametrize("strings", [("ab", "abc"), ("abc", "ab")])
def test_k6_of_overlapping_stop_strings_the_first_that_is_complete_counts(strings):
    assert pushed(strings, ["x", "a", "b", "c"]) == (["x", "", "", ""], "", True)
    assert pushed(strings, ["xabc"]) == (["x"], "", True)


def test_of_stop_strings_in_one_piece_the_one_that_begins_first_counts():
    assert pushed(("c", "bcd"), ["abcd"]) == (["a"], "", True)


def test_without_stop_strings_everything_passes():
    assert pushed((), ["ab", "", "c"]) == (["ab", "", "c"], "", False)


texts = st.text("abé🦙", max_size=12)


@given(text=texts, strings=st.lists(texts.filter(bool), max_size=3), sizes=st.lists(st.integers(1, 4), min_size=12))
def test_pieces_of_any_size_show_what_stands_before_the_first_stop_string(text, strings, sizes):
    borders = [0, *itertools.accumulate(sizes)]
    pieces = [text[start:stop] for start, stop in itertools.pairwise(borders)]
    shown, rest, is_hit = pushed(tuple(strings), pieces)
    places = [place for string in strings if (place := text.find(string)) >= 0]
    assert is_hit == bool(places)
    if len(strings) == 1 or not places:  # of several another may be complete earlier
        assert "".join(shown) + rest == text[: min(places, default=None)]
    else:
        assert text.startswith("".join(shown) + rest)
        assert not any(string in "".join(shown) for string in strings)


def taken(tokenizer, tokens, **options):
    """Let a text take tokens until it ends, and return its request and its completion."""
    request = Noted([0], tokenizer, **{"max_new_tokens": len(tokens)} | options)
    branch = request.branches = Branch(request, 0, torch.device("cpu"))
    for token in tokens:
        branch.take(token)
        if branch.completion is not None:
            break
    return request, branch.completion


def check(outcome, text, reason, count):
    request, completion = outcome
    pieces = request.pieces.get(0, [])
    assert ("".join(pieces), completion.text, completion.finish_reason) == (text, text, reason)
    assert completion.usage.completion_tokens == len(completion.token_ids) == count
    return pieces


@pytest.fixture(scope="module")
def by_bytes():
    return single_bytes()


def encoded(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    return ids


def test_k6_a_stop_string_over_borders_of_tokens(by_bytes):
    pieces = check(
        taken(by_bytes, encoded(by_bytes, "abc END now and on"), stop_strings="END now"),
        "abc ",
        "stop",
        len("abc END now"),
    )
    assert pieces == ["a", "b", "c", " "]


def test_k6_a_stop_string_of_longer_characters(by_bytes):
    ids = encoded(by_bytes, "né🦙日本 x")
    check(taken(by_bytes, ids, stop_strings=["🦙日"]), "né", "stop", len("né🦙日".encode()))
    check(taken(by_bytes, ids, stop_strings=["日 x", "🦙日本語"]), "né🦙日本 x", "length", len(ids))


def test_a_stop_string_that_the_limit_cuts_is_text(by_bytes):
    check(taken(by_bytes, encoded(by_bytes, "abc EN"), stop_strings=["END"]), "abc EN", "length", 6)


def test_a_stop_string_with_the_last_token_is_a_stop(by_bytes):
    check(taken(by_bytes, encoded(by_bytes, "abc END"), stop_strings=["END"]), "abc ", "stop", 7)


def test_pieces_never_break_a_character(by_bytes):
    text = "naïve 日本語 🦙 end"
    pieces = check(taken(by_bytes, encoded(by_bytes, text)), text, "length", len(text.encode()))
    assert pieces == list(text)


def test_a_character_that_the_limit_cuts_is_shown_as_such(by_bytes):
    request, completion = taken(by_bytes, encoded(by_bytes, "a🦙")[:-1])
    assert completion.text.startswith("a\ufffd")
    assert "".join(request.pieces[0]) == completion.text


def test_stop_strings_count_from_min_new_tokens_on(by_bytes):
    """A stop string that is complete before is text; one that is complete then ends it, wherever it began."""
    ids = encoded(by_bytes, "xSTOPySTOPz")
    for least in (0, 5):
        check(taken(by_bytes, ids, stop_strings=["STOP"], min_new_tokens=least), "x", "stop", 5)
    for least in (6, 7, 10):
        check(taken(by_bytes, ids, stop_strings=["STOP"], min_new_tokens=least), "xSTOPy", "stop", 10)
    check(taken(by_bytes, ids, stop_strings=["STOP"], min_new_tokens=11), "xSTOPySTOPz", "length", 11)


@pytest.mark.parametrize(("place", "count"), [(0, 1), (2, 3), (None, 4)])
def test_k8_an_end_token_ends_a_text_and_is_one_of_its_tokens(place, count):
    tokens = [5, 6, 7, 8]
    end = 90 if place is None else tokens[place]
    reason = "length" if place is None else "stop"
    text = " ".join(map(word_of, tokens[:count]))  # this tokenizer has no special tokens, which would be left out
    check(taken(words(), tokens, eos_token_id=[end, 91]), text, reason, count)
