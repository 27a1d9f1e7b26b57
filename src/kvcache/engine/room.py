"""How much memory an engine takes, and how many tokens that holds."""

from bisect import bisect_right
from dataclasses import dataclass

import torch

from kvcache.checks import check_int
from kvcache.errors import InvalidValueError
from kvcache.memory import free_memory, parse_size
from kvcache.storage import CacheSpec
from kvcache.storage.codecs import StorageLike

SHARE_OF_FREE_MEMORY = 4  # one part of so many, where it is not said
WHOLE_TEXTS = 16  # and no more than so many texts of the model's whole context take
USUAL_CONTEXT = 8192  # tokens, where the model has no limit


@dataclass(frozen=True)
class Room:
    """What decides how many blocks each kind of layers gets.

    Full layers keep every token. Beside them, sliding ones get what the windows of `max_running` texts see and a step
    writes: more would only serve texts that begin as one that has ended.

    Attributes: `spec` of the model's layers, and arguments of `Engine`.
    """

    spec: CacheSpec
    block_size: int
    storage: StorageLike
    max_step_tokens: int
    max_running: int

    def blocks(self, num_tokens: int) -> dict[str, int]:
        """Return the blocks of each kind of a pool that holds so many tokens."""
        whole = -(-num_tokens // self.block_size)
        blocks = dict.fromkeys(self.spec.kinds, whole)
        if len(blocks) > 1:
            blocks["sliding"] = min(whole, self._blocks_of_windows())
        return blocks

    def nbytes(self, num_tokens: int) -> int:
        """Return the bytes of that pool."""
        return self.spec.nbytes(self.blocks(num_tokens), self.block_size, self.storage)

    def num_tokens(
        self, memory: int | str | None, num_tokens: int | None, longest_text: int | None, device: torch.device
    ) -> int:
        """Return how many tokens an engine holds.

        Args:
            memory, num_tokens: as in `Engine`.
            longest_text: tokens of the model's context, None without a limit.
            device: where they are.

        Raises:
            InvalidTypeError, InvalidValueError: an argument is out of range, both are given, or there is less memory.
        """
        if num_tokens is None:
            if memory is None:
                nbytes = self._usual_nbytes(longest_text or USUAL_CONTEXT, device)
            elif isinstance(memory, str):
                nbytes = parse_size("memory", memory)
            else:
                nbytes = check_int("memory", memory, minimum=1)
            num_tokens = self._num_tokens_in(nbytes)
        elif memory is not None:
            raise InvalidValueError(f"memory is {memory!r} and num_tokens is {num_tokens!r}; expected one of them")
        else:
            num_tokens = check_int("num_tokens", num_tokens, minimum=1)
            nbytes = self.nbytes(num_tokens)
        if (free := free_memory(device)) is not None and nbytes > free:
            raise InvalidValueError(f"memory is {nbytes:,} bytes, and {free:,} are free; expected at most that")
        return num_tokens

    def _usual_nbytes(self, longest_text: int, device: torch.device) -> int:
        most = WHOLE_TEXTS * self.nbytes(longest_text)
        return min((free_memory(device) or SHARE_OF_FREE_MEMORY * most) // SHARE_OF_FREE_MEMORY, most)

    def _num_tokens_in(self, nbytes: int) -> int:
        size = self.block_size
        if nbytes < (least := self.nbytes(size)):
            raise InvalidValueError(
                f"memory is {nbytes:,} bytes; a block of {size} tokens takes {least:,}, expected at least that"
            )
        of_all_tokens = next(iter(self.spec.kinds))  # "full" where there are such layers
        most = nbytes // (size * self.spec.token_nbytes(self.storage, of_all_tokens))
        return size * bisect_right(range(1, most + 1), nbytes, key=lambda blocks: self.nbytes(blocks * size))

    def _blocks_of_windows(self) -> int:
        window, sinks = self.spec.rule("sliding")
        assert window is not None
        of_a_text = -(-sinks // self.block_size) + -(-window // self.block_size) + 2  # neither end is at a border
        return self.max_running * of_a_text + -(-self.max_step_tokens // self.block_size)
