"""Token ids in, printable text out, without ever breaking a character."""

from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for the first bytes of a longer character
# No more of these at the end can become a character: 3 bytes of one can be there, and some decoders show the bytes of
# the whole one before it so, too, as long as it is not.
_MOST_UNFINISHED = 7
_LONGEST_RUN = 64  # tokens without a border between characters, which are decoded again each time


class Detokenizer:
    """Turn a growing sequence of token ids into pieces of text.

    The beginning of a multi-byte character is held back until it is whole. Only the newest few tokens are decoded again
    for each piece, so the cost of a token does not grow with the text.

    Args:
        tokenizer: a transformers tokenizer; special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # ids before this are never decoded again
        self._emitted = 0  # ids before this are in the text already, and
        self._shown = 0  # so many characters of those behind

    def push(self, ids: list[int]) -> str:
        """Append `ids` and return the text that they complete, often one word, sometimes empty."""
        return "".join([self._push(token) for token in ids])

    def _push(self, token: int) -> str:
        self._ids.append(token)
        text = self._pending()
        held = min(len(text) - len(text.rstrip(_UNFINISHED)), _MOST_UNFINISHED)
        piece = text[: len(text) - held]
        if held == 0:
            if text or self._shown:  # special tokens leave none, and what follows depends on what came before them
                self._context = self._emitted
            self._emitted, self._shown = len(self._ids), 0
            return piece
        self._shown += len(piece)
        if len(self._ids) - self._emitted > _LONGEST_RUN:  # it is no text, and not worth decoding from its beginning
            self._context = self._emitted = len(self._ids) - _LONGEST_RUN // 2
            self._shown = max(len(self._decode(self._ids[self._context :])) - held, 0)
        return piece

    def finish(self) -> str:
        """Return what was held back, though it may end inside a character."""
        text = self._pending()
        self._context = self._emitted = len(self._ids)
        self._shown = 0
        return text

    def _pending(self) -> str:
        # A token's text can depend on the ones before it (leading spaces), so they are decoded with it.
        before = self._decode(self._ids[self._context : self._emitted])
        return self._decode(self._ids[self._context :])[len(before) + self._shown :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
