import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvcache.hf.detokenize import Detokenizer
from tests.engine.texts import single_bytes
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


def byte_fallback_tokenizer():
    """Every byte is a token, and bytes that are no text are one mark each, with the characters that touch them."""
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@given(text=st.text("aé日🦙", max_size=12), size=st.integers(1, 3))
def test_bytes_as_tokens_never_show_a_part_of_a_character(text, size):
    tokenizer = byte_fallback_tokenizer()
    pieces, rest = pieces_of(tokenizer, list(text.encode()), size)
    assert ("".join(pieces), rest) == (text, "")


def test_what_stands_before_an_unfinished_character_comes_at_once(smollm2):
    ids = smollm2.tokenizer("So 🦙!")["input_ids"]
    whole = next(number for number in range(len(ids)) if "\ufffd" in smollm2.tokenizer.decode(ids[: number + 1]))
    detokenizer = Detokenizer(smollm2.tokenizer)
    assert detokenizer.push(ids[: whole + 1]).rstrip() == "So"
    assert detokenizer.push(ids[whole + 1 :]).lstrip() + detokenizer.finish() == "🦙!"


@pytest.mark.parametrize("make", [single_bytes, byte_fallback_tokenizer])
def test_what_is_no_text_does_not_wait_for_ever(make):
    tokenizer = make()
    ids = [0xFF] * 50
    pieces, rest = pieces_of(tokenizer, ids)
    assert len("".join(pieces)) > 40
    assert "".join(pieces) + rest == tokenizer.decode(ids)


parts_of_bytes = st.sampled_from([b"\xff", b"\xf0\x9f", b"\xff" * 9, b"\xff" * 70, "🦙".encode(), "é".encode(), b"a"])


@given(parts=st.lists(parts_of_bytes, max_size=8))
def test_characters_among_what_is_no_text_are_not_lost(parts):
    tokenizer = single_bytes()
    letters = bytes_to_unicode()
    ids = tokenizer.convert_tokens_to_ids([letters[byte] for byte in b"".join(parts)])
    shown, rest = pieces_of(tokenizer, ids)
    assert "".join(shown) + rest == tokenizer.decode(ids)
