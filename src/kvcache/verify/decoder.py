"""What `verify` asks of a model: a forward with and without a cache, and what else the cache can do."""

import copy
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from kvcache.errors import NotSupportedError


class Decoder(ABC):
    """A model and its cache. Implement `forward` and `new_cache`, and of the rest what the cache can do.

    A cache is whatever `new_cache` returns; `verify` only hands it back. Methods that change it do so in place.

    Attributes:
        module: holds all weights; `forward` must use `self.module`, as copies of it in other dtypes are run too.
        vocab_size: token ids are below it.
        windows: the windows of the sliding layers, in tokens, if there are any.
        max_tokens: tokens that the model has positions for; None: any number.
        is_lossy: whether stored rows are rounded on purpose (quantised).

    Example: see "Your own model" in docs/verify.md.
    """

    module: nn.Module
    vocab_size: int
    windows: tuple[int, ...] = ()
    max_tokens: int | None = None
    is_lossy: bool = False

    @abstractmethod
    def forward(self, tokens: torch.Tensor, cache: Any = None, padding: torch.Tensor | None = None) -> torch.Tensor:
        """Run tokens (B, T), int64; return logits (B, T, vocabulary), or other outputs (B, T, any number).

        Without a `cache` the tokens are whole texts. With one they follow those that it holds, which this call appends
        them to. `padding` (B,), int64, comes with the first tokens of a cache only: so many of them in each row are no
        tokens. Nothing attends to them and positions count from the first real one, in all later calls too, so keep it
        with the cache, and let `reorder` and `fork` keep it. Raise `NotSupportedError` where there is no such way.
        """

    @abstractmethod
    def new_cache(self, batch_size: int, capacity: int) -> Any:
        """Return an empty cache for `batch_size` texts of up to `capacity` tokens."""

    def rollback(self, cache: Any, num_tokens: int) -> None:
        """Drop the last tokens of every row; raise `NotSupportedError` where that cannot be."""
        raise NotSupportedError("the decoder has no rollback")

    def reorder(self, cache: Any, index: torch.Tensor) -> None:
        """Let row b of the batch continue what row `index[b]` holds."""
        raise NotSupportedError("the decoder has no reorder")

    def fork(self, cache: Any) -> Any:
        """Return an independent cache with the same content; default: a deep copy."""
        return copy.deepcopy(cache)

    def save(self, cache: Any) -> Any:
        """Return the cache's state as a program would store it; default: pickled bytes."""
        return pickle.dumps(cache)

    def restore(self, saved: Any) -> Any:
        """Return a cache from what `save` returned."""
        return pickle.loads(saved)

    def forward_through_codec(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Run whole texts without a cache, every key and value rounded as storing rounds it; None: not known how.

        Where it is known, a lossy cache is held against this to rounding, so that a fault cannot hide in the loss.
        """
        return None

    def exchanged_rows(self, tokens: torch.Tensor) -> list["ExchangedRows"]:
        """Run whole texts with a new cache; return what each layer gave it and got back, [] where that is not seen."""
        return []

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(weights.dtype for weights in self.module.parameters() if weights.is_floating_point())

    @property
    def cached_dtype(self) -> torch.dtype:
        """The dtype that runs with a cache compute in; default: that of the weights."""
        return self.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.module.parameters()).device

    def copied(self, dtype: torch.dtype) -> Self:
        """Return the same decoder over a copy of its module with weights of this dtype."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module).to(dtype)
        return other

    def layers(self) -> list[nn.Module]:
        """Return the layers in order, to say in which one a fault begins; default: the first `ModuleList`."""
        return next((list(part) for part in self.module.modules() if isinstance(part, nn.ModuleList)), [])


@dataclass(frozen=True, eq=False)
class ExchangedRows:
    """The keys and values (B, Hkv, T, D) that one layer gave to a cache, and those that it got back."""

    given: tuple[torch.Tensor, torch.Tensor]
    returned: tuple[torch.Tensor, torch.Tensor]
