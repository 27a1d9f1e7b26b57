"""The package installs where there is no compiler, and says at run time what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# An editable install, where there is one, would come before every folder.
CODE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
import warnings, torch, kvcache
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        q, k, v = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 4, 1), torch.arange(4.0).view(1, 1, 4, 1)
        print(kvcache.attend(q, k, v).item())
print(kvcache.__file__, kvcache.native.kernels, [str(warning.message) for warning in caught])
"""


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory):
    """Install the package into a folder of its own as on a machine without a compiler, and return the folder."""
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("the sources are not here")
    source, target = tmp_path_factory.mktemp("source") / "kvcache", tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "results"))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(source)]
    done = subprocess.run(command, env={**os.environ, "CXX": "/no/compiler"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def test_without_a_compiler_the_install_succeeds_and_one_warning_tells(without_compiler):
    assert not list(without_compiler.rglob("_kernels*"))
    environment = {**os.environ, "PYTHONPATH": str(without_compiler)}
    command = [sys.executable, "-c", CODE]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=without_compiler)
    lines = output.stdout.splitlines()
    assert lines[:2] == ["1.5", "1.5"]
    assert lines[2].startswith(str(without_compiler))
    assert lines[2].count("kernels are not there") == 1
    assert "pip install --force-reinstall --no-cache-dir" in lines[2]
