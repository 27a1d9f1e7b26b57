"""How much memory an engine takes, and how many tokens that holds."""

from bisect import bisect_right
from dataclasses import dataclass

import torch

from kvcache.checks import check_int
from kvcache.errors import InvalidValueError
from kvcache.memory import free_memory, parse_size
from kvcache.storage import CacheSpec
from kvcache.storage.codecs import Storage
from kvcache.storage.specs import kept_rows

SHARE_OF_FREE_MEMORY = 4  # one part of so many, where it is not said
WHOLE_TEXTS = 16  # and no more than so many of the longest texts take
USUAL_LENGTH = 8192  # tokens of a long text, where the model has no limit


@dataclass(frozen=True)
class Room:
    """What decides how many blocks each kind of layers gets.

    Full layers keep every token. Sliding ones get what a step writes, and the windows of `max_running` texts twice: of
    those that run, and for as many that have ended, behind which others can go on.

    Attributes: `spec` of the model's layers, and arguments of `Engine`.
    """

    spec: CacheSpec
    block_size: int
    storage: Storage
    max_step_tokens: int
    max_running: int

    def blocks(self, num_tokens: int) -> dict[str, int]:
        """Return the blocks of each kind of a pool that holds so many tokens."""
        size, blocks = self.block_size, {}
        for kind in self.spec.kinds:
            of_a_text = kept_rows(num_tokens, *self.spec.rule(kind), block_size=size)
            of_all = 2 * self.max_running * of_a_text + self.max_step_tokens
            blocks[kind] = -(-min(num_tokens, of_all) // size)
        return blocks

    def nbytes(self, num_tokens: int) -> int:
        """Return the bytes of that pool."""
        return self.spec.nbytes(self.blocks(num_tokens), self.block_size, self.storage)

    def tokens_to_hold(
        self, memory: int | str | None, num_tokens: int | None, longest_text: int | None, device: torch.device
    ) -> int:
        """Return how many tokens an engine holds.

        Args:
            memory, num_tokens: as in `Engine`.
            longest_text: tokens that a text may have, None without a limit.
            device: where they are.

        Raises:
            InvalidTypeError, InvalidValueError: an argument is out of range, both are given, or there is less memory.
        """
        if memory is not None and num_tokens is not None:
            raise InvalidValueError(f"memory is {memory!r} and num_tokens is {num_tokens!r}; expected one of them")
        if num_tokens is not None:
            held = check_int("num_tokens", num_tokens, minimum=1)
            _check_free(f"num_tokens is {held:,}, which takes", self.nbytes(held), device)
            return held
        if memory is None:
            nbytes = self._usual_nbytes(longest_text or USUAL_LENGTH, device)
        elif isinstance(memory, str):
            nbytes = parse_size("memory", memory)
        else:
            nbytes = check_int("memory", memory, minimum=1)
        _check_free("memory is", nbytes, device)
        return self._num_tokens_in(nbytes)

    def _usual_nbytes(self, longest_text: int, device: torch.device) -> int:
        most = self.nbytes(WHOLE_TEXTS * longest_text)
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


def _check_free(what: str, nbytes: int, device: torch.device) -> None:
    if (free := free_memory(device)) is not None and nbytes > free:
        raise InvalidValueError(f"{what} {nbytes:,} bytes, and {free:,} are free; expected at most that")
