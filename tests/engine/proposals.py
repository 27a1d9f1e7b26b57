"""Texts with much to propose: models that repeat themselves, and proposals that are right as often as one likes."""

import random

import torch

from kvcache.engine.lookup import PromptLookup
from tests.engine.texts import cold, ids_of
from tests.hf.tiny_models import ALL_FAMILIES, VOCAB


def repetitive(family):
    """Return a model whose next token depends on little but the last one, so that its texts soon go round."""
    model = ALL_FAMILIES[family](seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(300)
    return model


def repeating(model):
    """Return a prompt, of 33 tokens, that a repetitive model goes on repeating."""
    ids = ids_of(9)
    return ids + cold(model, ids, 24)


class Foretold(PromptLookup):
    """Proposes what comes next in texts that are known, half of the time up to a place picked at random only.

    Args:
        texts: lists of ids, to which others may be added.
        seed: of what is picked at random.
    """

    def __init__(self, num_tokens, max_ngram, texts, seed=0):
        super().__init__(num_tokens, max_ngram)
        self._texts, self._random = texts, random.Random(seed)

    def propose(self, tokens, most):
        for text in self._texts:
            if text[: len(tokens)] == tokens:
                found = text[len(tokens) :][:most][: self._random.randint(1, self._num_tokens)]
                if found and self._random.random() < 0.5:
                    place = self._random.randrange(len(found))
                    found[place] = (found[place] + 1) % VOCAB
                return found
        return []
