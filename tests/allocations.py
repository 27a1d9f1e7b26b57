"""Counts the bytes that torch operations allocate and copy."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountAllocations(TorchDispatchMode):
    """While active: `allocated`, bytes of results outside the arguments' memory, and `copied`, those `copy_` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copied += result.nbytes
        known = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.allocated += leaf.untyped_storage().nbytes()
        return result
