import subprocess
import sys

import kvcache


def test_importing_it_imports_no_transformers():
    code = "import sys, kvcache; print(sorted({'transformers', 'jax', 'rich', 'typer'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_there_and_documented():
    for name in kvcache.__all__:
        assert getattr(kvcache, name).__doc__


def test_every_exception_is_a_kvcache_error_and_a_builtin_one():
    errors = [value for value in vars(kvcache).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert {error.__name__ for error in errors} >= {"CacheFullError", "RollbackError", "ModelError"}
    for error in errors:
        assert issubclass(error, kvcache.KVCacheError)
        assert error is kvcache.KVCacheError or issubclass(error, (ValueError, TypeError, OSError))
