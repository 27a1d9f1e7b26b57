"""Which releases of transformers are taken, and how each wants the cache."""

import importlib
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import kvcache.hf
from kvcache import InvalidValueError
from kvcache.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS, OLDEST, check_transformers
from tests.hf.runs import ids_of
from tests.hf.tiny_models import llama

ROOT = Path(__file__).parents[2]


def test_the_oldest_release_is_the_one_that_is_declared_and_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"transformers>={OLDEST},<6" in project["optional-dependencies"]["hf"]
    assert f"transformers=={OLDEST}.0" in (ROOT / "constraints-oldest.txt").read_text().splitlines()


@pytest.mark.parametrize("version", ["4.57.1", "5.9.3", "5.20.0", "5.20.0.dev0"])
def test_an_older_release_is_refused_when_the_adapter_is_imported(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda package: version)
    message = f"needs transformers >= {OLDEST}, and {version} is installed: pip install 'transformers>={OLDEST},<6'"
    with pytest.raises(ImportError, match=re.escape(message)):
        importlib.reload(kvcache.hf)


@pytest.mark.parametrize("version", [f"{OLDEST}.0", "5.24.0", "5.100.2", "5.30.0.dev0"])
def test_a_newer_release_is_taken(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda package: version)
    check_transformers()


@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
def test_a_cache_that_the_model_would_not_see_is_refused():
    """transformers before 5.24 takes `cache` for an option of attention, and makes a cache of its own."""
    model, ids = llama(), ids_of(4)
    for name in ("cache", "past_key_values"):
        cache = kvcache.hf.cache_for(model)
        if name in CACHE_ARGUMENTS:
            with torch.no_grad():
                torch.nn.Module.__call__(model, ids, **{name: cache})
            assert cache.get_seq_length() == 4
        else:
            with pytest.raises(InvalidValueError, match=f"ignores {name}; pass the cache as {CACHE_ARGUMENT}"):
                torch.nn.Module.__call__(model, ids, **{name: cache})
            assert cache.get_seq_length() == 0
