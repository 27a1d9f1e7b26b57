"""Tokenizers without files, requests that note what they stream, and what a run without a cache says."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvcache.engine.options import options_of
from kvcache.engine.request import Request
from tests.hf.tiny_models import VOCAB

TIMEOUT = 60  # seconds, of every wait: what hangs fails


def word_of(token):
    return f"w{token}"


def words():
    """One word for each id of the tiny models."""
    tokenizer = Tokenizer(models.WordLevel({word_of(token): token for token in range(VOCAB)}, unk_token=word_of(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def single_bytes():
    """One id for each byte, so that many characters take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def options(**given):
    return options_of(transformers.GenerationConfig(), given)


def ids_of(count, seed=1):
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Noted(Request):
    """A request that notes the pieces of each text, and its ends."""

    def __init__(self, ids, tokenizer, namespace=None, **given):
        self.pieces = {}
        self.ends = []
        super().__init__(ids, options(**given), tokenizer, namespace, self._note_piece, self.ends.append)

    def _note_piece(self, index, piece):
        self.pieces.setdefault(index, []).append(piece)

    @property
    def error(self):
        assert len(self.ends) == 1
        assert isinstance(self.ends[0], Exception)
        return self.ends[0]

    @property
    def texts(self):
        """The tokens of each text, whose pieces are their text, neither lost nor doubled."""
        assert len(self.ends) == 1
        if isinstance(self.ends[0], Exception):
            raise self.ends[0]
        for index, completion in enumerate(self.ends[0]):
            assert "".join(self.pieces.get(index, [])) == completion.text
        return [completion.token_ids for completion in self.ends[0]]


@torch.no_grad()
def cold(model, ids, count):
    """Return the likeliest ids behind a text, each by a run of the whole text without a cache."""
    text = list(ids)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids) :]


@torch.no_grad()
def cold_logits(model, ids, new):
    """Return the logits (len(new), vocabulary) that each of the new ids was picked from, without a cache."""
    return model(torch.tensor([ids + new]), use_cache=False).logits[0, len(ids) - 1 : -1]
