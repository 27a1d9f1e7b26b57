"""Tensors whose content is computed only when something touches them.

A model that hands its keys, values and mask to attention as they are never touches them: attention then reads what they
stand for (`source`). Whatever else a model does with one gets the content, so nothing depends on how models behave.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

Source = TypeVar("Source")


class Deferred(torch.Tensor):
    """A tensor of known shape, dtype and device that stands for `source`; `on_touch` is called at the first touch."""

    source: Any
    touched = False
    _compute: Callable[[], torch.Tensor]
    _on_touch: Callable[[], None] | None
    _content: torch.Tensor | None = None

    @staticmethod
    def of(
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        source: Any,
        compute: Callable[[], torch.Tensor],
        on_touch: Callable[[], None] | None = None,
    ) -> "Deferred":
        """Return a tensor that stands for `source` and whose content `compute` returns."""
        deferred: Deferred = torch.Tensor._make_wrapper_subclass(Deferred, shape, dtype=dtype, device=device)
        deferred.source, deferred._compute, deferred._on_touch = source, compute, on_touch
        return deferred

    @property
    def content(self) -> torch.Tensor:
        """What the tensor holds."""
        if self._content is None:
            self._content = self._compute().contiguous()  # as the strides say of which operations are made
        return self._content

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def touch(value: Any) -> Any:
            if not isinstance(value, Deferred):
                return value
            if not value.touched:
                value.touched = True
                if value._on_touch is not None:
                    value._on_touch()
            return value.content

        return func(*tree_map(touch, args), **tree_map(touch, kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.content.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.content.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred({self.source!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def content_of(tensor: Any) -> Any:
    """Return the content of a deferred tensor, which is no touch, and anything else as it is."""
    return tensor.content if isinstance(tensor, Deferred) else tensor


def source_of(tensor: Any, kind: type[Source]) -> Source | None:
    """Return what an untouched deferred tensor stands for, if it is of this kind."""
    untouched = isinstance(tensor, Deferred) and not tensor.touched
    return tensor.source if untouched and isinstance(tensor.source, kind) else None
