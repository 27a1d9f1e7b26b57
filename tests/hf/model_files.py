"""A model of six words as files, and what loading a model that is damaged or missing must say."""

import importlib.machinery
import importlib.util

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from kvcache import ModelError
from kvcache.hf import load_model
from tests.hf.tiny_models import llama

WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "sat"]


def word_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def word_llama():
    return llama(torch.float32, vocab_size=len(WORDS), bos_token_id=1, eos_token_id=2, pad_token_id=2)


def check_error(name, *parts, **options):
    """Loading raises a `ModelError` of one line that contains `parts`."""
    with pytest.raises(ModelError) as caught:
        load_model(name, **options)
    message = str(caught.value)
    for part in parts:
        assert str(part) in message
    assert "\n" not in message
    return caught.value


def hide_packages(monkeypatch, *names):
    """Let it look as if these packages were not installed, to whoever asks without importing them."""
    for finder in (importlib.util, importlib.machinery.PathFinder):
        find = finder.find_spec

        def find_others(name, *args, find=find, **kwargs):
            return None if name in names else find(name, *args, **kwargs)

        monkeypatch.setattr(finder, "find_spec", find_others)
