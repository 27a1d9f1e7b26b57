import pytest
import torch

from tests.hf.model_files import word_llama, word_tokenizer
from tests.hf.older_releases import take_caches_as_cache
from tests.hf.tiny_models import FAMILIES, WINDOW, gemma3

take_caches_as_cache()


@pytest.fixture(scope="module")
def hybrid():
    """Sliding (window 5), sliding, full."""
    return gemma3(window=WINDOW)


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in FAMILIES.items()}


@pytest.fixture(scope="module")
def softmax_in_float64():
    """Let eager attention (Gemma 2) keep float64, which it asks its softmax to round to float32.

    There the lowest float64, with which it masks, is an infinity, and makes NaN of padding, which sees nothing.
    """
    softmax = torch.nn.functional.softmax

    def unrounded(scores, dim=None, dtype=None):
        return softmax(scores, dim=dim, dtype=None if scores.dtype == torch.float64 else dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", unrounded)
        yield


@pytest.fixture
def folder(tmp_path):
    """A model of six words in transformers' format."""
    path = tmp_path / "tiny"
    word_llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def models_folder(tmp_path, monkeypatch):
    """Where smollm2 would be stored by a user whose cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvcache" / "models"
