"""Token ids in, printable text out, without ever breaking a character."""

from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for the first bytes of a longer character


class Detokenizer:
    """Turn a growing sequence of token ids into pieces of text.

    A piece is held back while it ends inside a multi-byte character. Only the newest few tokens are decoded again
    for each piece, so the cost of a token does not grow with the text.

    Args:
        tokenizer: a transformers tokenizer; special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # ids before this are never decoded again
        self._emitted = 0  # ids before this are in the text already

    def push(self, ids: list[int]) -> str:
        """Append `ids` and return the text that they complete, often one word, sometimes empty."""
        self._ids += ids
        text = self._pending()
        if text.endswith(_UNFINISHED):
            return ""
        if text:  # special tokens leave none, and the next token's text depends on what came before them
            self._context = self._emitted
        self._emitted = len(self._ids)
        return text

    def finish(self) -> str:
        """Return what was held back, though it may end inside a character."""
        text = self._pending()
        self._context = self._emitted = len(self._ids)
        return text

    def _pending(self) -> str:
        # A token's text can depend on the ones before it (leading spaces), so they are decoded with it.
        before = self._decode(self._ids[self._context : self._emitted])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
