from hypothesis import given
from hypothesis import strategies as st

from kvcache.hf.detokenize import Detokenizer
from tests.hf.model_files import word_tokenizer


def pieces_of(tokenizer, ids, size=1):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    return pieces, detokenizer.finish()


def test_characters_of_several_tokens_come_whole(smollm2):
    text = "naïve 日本語 🦙🇫🇷 e\u0301 end"
    ids = smollm2.tokenizer(text)["input_ids"]
    pieces, rest = pieces_of(smollm2.tokenizer, ids)
    assert "".join(pieces) == text
    assert rest == ""
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # something was held back, so the text does test it


@given(text=st.text(max_size=40).filter(lambda text: "\ufffd" not in text), size=st.integers(1, 3))
def test_pieces_join_to_the_whole_text(smollm2, text, size):
    ids = smollm2.tokenizer(text)["input_ids"]
    pieces, rest = pieces_of(smollm2.tokenizer, ids, size)
    assert "".join(pieces) + rest == smollm2.tokenizer.decode(ids, skip_special_tokens=True)


def test_an_unfinished_character_comes_out_at_the_end(smollm2):
    ids = smollm2.tokenizer("🦙")["input_ids"]
    pieces, rest = pieces_of(smollm2.tokenizer, ids[:-1])
    assert "".join(pieces) == ""
    assert rest.startswith("\ufffd")


def test_special_tokens_are_left_out(smollm2):
    end = smollm2.tokenizer.eos_token_id
    ids = [*smollm2.tokenizer("done")["input_ids"], end]
    pieces, rest = pieces_of(smollm2.tokenizer, ids)
    assert "".join(pieces) + rest == "done"


def test_a_special_token_in_the_middle_changes_nothing_around_it():
    tokenizer = word_tokenizer()
    ids = [3, 2, 2, 4, 2, 5]
    pieces, rest = pieces_of(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=True) == "the cat sat"
