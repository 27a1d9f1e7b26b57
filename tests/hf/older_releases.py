"""What lets these tests, which are written for the pinned transformers, run with the oldest release too."""

from functools import wraps

import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel

from kvcache.hf.versions import CACHE_ARGUMENT

IS_OLDER = CACHE_ARGUMENT != "cache"
since_5_24 = pytest.mark.skipif(IS_OLDER, reason="transformers before 5.24 does it otherwise")


def take_caches_as_cache():
    """Let models and `generate` take their cache as `cache`, whatever the installed transformers calls it."""
    if IS_OLDER:
        PreTrainedModel.__call__ = _renamed(torch.nn.Module.__call__)
        GenerationMixin.generate = _renamed(GenerationMixin.generate)


def _renamed(function):
    @wraps(function)
    def call(*args, cache=None, **kwargs):
        return function(*args, **kwargs, **({} if cache is None else {CACHE_ARGUMENT: cache}))

    return call
