"""Keys and values that are kept in another form than a tensor of numbers, as attention sees them."""

from abc import ABC, abstractmethod
from typing import Self

import torch


class EncodedStore(ABC):
    """Rows that are decoded when they are read; `kvcache.storage.codecs.EncodedRows` is one."""

    data: torch.Tensor
    """What is kept: (N, Hkv, S, anything)."""

    head_dim: int
    """The head size of the decoded rows."""

    @property
    @abstractmethod
    def codec_name(self) -> str:
        """How rows are kept, by the codec's name."""

    @property
    def shape(self) -> torch.Size:
        """The shape (N, Hkv, S, head_dim) of the decoded rows."""
        return torch.Size((*self.data.shape[:-1], self.head_dim))

    @property
    def device(self) -> torch.device:
        """Where `data` is."""
        return self.data.device

    @abstractmethod
    def with_data(self, data: torch.Tensor) -> Self:
        """Return other rows kept in the same form."""

    @abstractmethod
    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows as numbers of `dtype`."""


Store = torch.Tensor | EncodedStore


def stored_data(store: Store) -> torch.Tensor:
    """Return what a store keeps, whose first three dimensions are those of its rows."""
    return store if isinstance(store, torch.Tensor) else store.data


def copied(store: Store) -> Store:
    """Return a store of its own memory with the same rows."""
    return store.clone() if isinstance(store, torch.Tensor) else store.with_data(store.data.clone())


def decoded_dtype(store: Store) -> torch.dtype:
    """Return the dtype that holds every number in the store exactly, or float32 for encoded ones."""
    return store.dtype if isinstance(store, torch.Tensor) else torch.float32


def decode_data(store: Store, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that the store keeps, all of them or some, as numbers of `dtype`."""
    return data.to(dtype) if isinstance(store, torch.Tensor) else store.with_data(data).decode(dtype)
