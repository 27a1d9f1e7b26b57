import pytest

from kvcache.engine import Engine
from tests.engine.texts import words
from tests.hf.tiny_models import llama


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def tokenizer():
    return words()


@pytest.fixture
def engine(model, tokenizer):
    with Engine(model, tokenizer, memory="200kB", block_size=4) as engine:
        yield engine
