"""The CPU kernels: the C++ beside this file, compiled when the package is installed, and whether they are there.

They take pointers, sizes and strides, so that one build serves every release of torch.
"""

import os
import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

_PROCESS = os.getpid()

kernels: ModuleType | None = None
missing_because = ""
try:
    # After torch: where both want the OpenMP runtime of the same name, as on Linux, they then share torch's.
    kernels = import_module("kvcache.native._kernels")
except ImportError as error:
    missing_because = str(error)

_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    "int8": "int8",
    "int4": "int4",
}
_NUMBERS: dict[str, int] = getattr(kernels, "FORMATS", dict.fromkeys(_NAMES.values(), 0))
FORMATS = {key: _NUMBERS[name] for key, name in _NAMES.items()}
"""The kernels' numbers for the floating dtypes and the codecs that they know."""

FEW_QUERIES: int = getattr(kernels, "QUERY_TOKENS", 32)
"""New tokens of a sequence that share one reading of its keys and values."""

MAX_HEAD_DIM: int = getattr(kernels, "MAX_HEAD_DIM", 512)

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
RECORDING_MODES = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]

if not getattr(kernels, "HAS_OPENMP", True):
    warnings.warn(
        "kvcache's native CPU kernels were built without OpenMP and use one thread; install it (libgomp or libomp) "
        "and then kvcache again",
        stacklevel=2,
    )


def have_memory(*tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors, of which an address tells all, and nobody records what is done with them.

    Subclasses, the tensors of transforms such as vmap, and those that stand for their negative are not plain; tracing
    records operations of PyTorch alone.
    """
    for tensor in tensors:  # a loop: this is on the way of every token
        if type(tensor) not in PLAIN_TYPES or tensor.is_neg():
            return False
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, RECORDING_MODES)):
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and torch._C._get_tracing_state() is None


def release_threads() -> None:
    """Let the threads that the calling one computes with go, until it needs some again: they end, or sleep.

    Where two threads of a process compute in turn, both keep such threads, more than there are cores. GNU's OpenMP then
    lets all of them sleep between operations, and waking them is felt in a small model's decode step.
    """
    if kernels is not None and os.getpid() == _PROCESS:  # a fork has the books of its parent's threads and not those
        kernels.release_threads()


@cache
def warn_that_kernels_are_missing() -> None:
    """Say once what is slow and how to mend it."""
    warnings.warn(
        f"kvcache's native CPU kernels are not there ({missing_because}), so PyTorch appends and attends, many "
        "times more slowly over blocks and encoded rows. They are compiled when kvcache is installed with a C++ "
        "compiler (GCC 12 or newer, or Clang) at hand: in its checkout `pip install --force-reinstall --no-cache-dir "
        "--no-deps .`; without --no-cache-dir pip may take the wheel that it built before, without them.",
        stacklevel=5,  # who calls `attend`
    )
