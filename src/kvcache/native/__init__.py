"""The CPU kernels: the C++ beside this file, compiled when the package is installed, and whether they are there.

They take pointers, sizes and strides, so that one build serves every release of torch.
"""

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch._C._functorch import peek_interpreter_stack

kernels: ModuleType | None = None
missing_because = ""
try:
    # After torch, whose OpenMP runtime the kernels then share, and with it the number of threads.
    kernels = import_module("kvcache.native._kernels")
except ImportError as error:
    missing_because = str(error)

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, "int8": 3, "int4": 4}
"""What the kernels call the floating dtypes and the codecs."""


def have_memory(*tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors: not those of other modes and transforms, such as vmap, that have no address."""
    for tensor in tensors:  # a loop: this is on the way of every token
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return False
    return peek_interpreter_stack() is None


@cache
def warn_that_kernels_are_missing() -> None:
    """Say once what is slow and how to mend it."""
    warnings.warn(
        f"kvcache's native CPU kernels are not there ({missing_because}), so PyTorch's attention is used, which is "
        "several times slower over blocks and encoded rows. With a C++ compiler (GCC or Clang) installed, "
        "`pip install --force-reinstall --no-cache-dir --no-deps torch-kvcache` builds them; without "
        "--no-cache-dir pip may take the wheel that it built before, without them.",
        stacklevel=2,
    )
