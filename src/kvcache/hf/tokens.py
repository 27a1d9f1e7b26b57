"""The ids of the tokens whose keys and values a cache holds, as far as the model's inputs told them."""

import torch


class TokenRecord:
    """Ids in the order in which they came: noting some costs the same however many there are already.

    Reordering beams rewrites them all, which transformers does with its own ids at every step too.
    """

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []  # each (B, T)
        self._length = 0

    def fork(self) -> "TokenRecord":
        """Return a record of the same ids, which goes on by itself."""
        other = TokenRecord()
        other._chunks, other._length = self._chunks[:], self._length
        return other

    def append(self, ids: torch.Tensor | None, after: int) -> None:
        """Note that `ids` (B, T) follow the first `after` tokens; with None, or a gap before them, nothing is known."""
        if after < self._length:
            self._replace(self.first(after))
        known = self._chunks[-1] if self._chunks else None
        gap = after != self._length
        if gap or ids is None or ids.ndim != 2 or (known is not None and not _same_batch(known, ids)):
            self._replace(None)
        else:
            self._chunks.append(ids.clone())  # the caller may fill the same tensor with the next ids
            self._length += ids.shape[1]

    def first(self, length: int) -> torch.Tensor | None:
        """Return the ids (B, length) of the first `length` tokens, None where they are not known."""
        if length > self._length or not self._chunks:
            return None
        self._replace(torch.cat(self._chunks, dim=1))
        return self._chunks[0][:, :length]

    def select(self, rows: torch.Tensor) -> None:
        """Let row i of the batch become what row `rows[i]` was."""
        ids = self.first(self._length)
        self._replace(None if ids is None else ids[rows.to(ids.device)])

    def _replace(self, ids: torch.Tensor | None) -> None:
        self._chunks = [] if ids is None else [ids]
        self._length = 0 if ids is None else ids.shape[1]


def _same_batch(known: torch.Tensor, ids: torch.Tensor) -> bool:
    return known.shape[0] == ids.shape[0] and known.device == ids.device
