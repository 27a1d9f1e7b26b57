"""Keys and values that are kept in another form than a tensor of numbers, as attention sees them."""

from typing import Protocol, Self, runtime_checkable

import torch


@runtime_checkable
class EncodedStore(Protocol):
    """Rows that are decoded when they are read; `kvcache.storage.codecs.EncodedRows` is one."""

    @property
    def data(self) -> torch.Tensor:
        """What is kept: (N, Hkv, S, anything)."""

    @property
    def codec_name(self) -> str:
        """How rows are kept, by the codec's name."""

    @property
    def shape(self) -> torch.Size:
        """The shape (N, Hkv, S, head size) of the decoded rows."""

    @property
    def device(self) -> torch.device:
        """Where `data` is."""

    def with_data(self, data: torch.Tensor) -> Self:
        """Return other rows kept in the same form."""

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows as numbers of `dtype`."""


Store = torch.Tensor | EncodedStore


def stored_data(store: Store) -> torch.Tensor:
    """Return what a store keeps, whose first three dimensions are those of its rows."""
    return store if isinstance(store, torch.Tensor) else store.data


def decoded_dtype(store: Store) -> torch.dtype:
    """Return the dtype that holds every number in the store exactly, or float32 for encoded ones."""
    return store.dtype if isinstance(store, torch.Tensor) else torch.float32


def decode_data(store: Store, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that the store keeps, all of them or some, as numbers of `dtype`."""
    return data.to(dtype) if isinstance(store, torch.Tensor) else store.with_data(data).decode(dtype)
