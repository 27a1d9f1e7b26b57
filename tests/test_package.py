import subprocess
import sys

import pytest

import kvcache

BUILT_IN = (ValueError, TypeError, OSError, RuntimeError)


def test_transformers_is_imported_when_kvcache_hf_is_first_asked_for():
    code = (
        "import sys, kvcache; print(sorted({'transformers', 'jax', 'rich', 'typer'} & set(sys.modules))); "
        "print(kvcache.hf.cache_for.__name__, kvcache.hf.load_model.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["[]", "cache_for load_model"]
    with pytest.raises(AttributeError, match="module 'kvcache' has no attribute 'nothing'"):
        _ = kvcache.nothing


def test_every_public_name_is_there_and_documented():
    for module in (kvcache, kvcache.engine, kvcache.hf, kvcache.prefix):
        for name in module.__all__:
            assert getattr(module, name).__doc__


def test_every_exception_is_a_kvcache_error_and_a_builtin_one():
    errors = [value for value in vars(kvcache).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert {error.__name__ for error in errors} >= {"CacheFullError", "RollbackError", "ModelError"}
    for error in errors:
        assert issubclass(error, kvcache.KVCacheError)
        assert error is kvcache.KVCacheError or issubclass(error, BUILT_IN)
