"""The package installs where its kernels cannot be built, and says at run time what is missing."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
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


@pytest.mark.skipif(not (ROOT / "CMakeLists.txt").exists(), reason="the sources are not here")
# Not importlib.util.find_spec: when it is asked for pip, setuptools steps back, and inductor then fails.
@pytest.mark.skipif(PathFinder.find_spec("pip") is None, reason="installs with pip, which is not in this environment")
@pytest.mark.parametrize(
    ("environment", "arguments"),
    [
        pytest.param({"CXX": "/no/compiler"}, [], id="no compiler"),
        pytest.param({}, ["--config-settings=cmake.define.Python_INCLUDE_DIR=/no/headers"], id="no Python headers"),
    ],
)
def test_where_kernels_cannot_be_built_the_install_succeeds_and_one_warning_tells(tmp_path, environment, arguments):
    source, target = tmp_path / "kvcache", tmp_path / "installed"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.so", "build", "results"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), *arguments]
    done = subprocess.run([*install, str(source)], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(target.rglob("_kernels*"))
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"PYTHONPATH": str(target)},
        cwd=target,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["1.5", "1.5"]
    assert lines[2].startswith(str(target))
    assert lines[2].count("kernels are not there") == 1
    assert "pip install --force-reinstall --no-cache-dir" in lines[2]
