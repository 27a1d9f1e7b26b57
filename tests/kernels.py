"""Which native kernels are there, and what it takes to build some."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from kvcache import native

INSTRUCTION_SETS: list[str] = [] if native.kernels is None else native.kernels.INSTRUCTION_SETS
HAS_COMPILER = any(map(shutil.which, ("g++", "clang++")))
HAS_HEADERS = Path(sysconfig.get_path("include"), "Python.h").exists()

needs_kernels = pytest.mark.skipif(native.kernels is None, reason=f"no native kernels: {native.missing_because}")
needs_compiler = pytest.mark.skipif(not (HAS_COMPILER and HAS_HEADERS), reason="no C++ compiler or no Python headers")
