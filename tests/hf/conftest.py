import pytest

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
