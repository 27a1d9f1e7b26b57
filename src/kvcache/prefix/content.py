"""What stands in a block, as bytes: its tokens, and what else they stand for.

    token       8 bytes, the id, the highest byte first                                        00 00 .. 2a
    of a medium 0xff, the digest's length, the digest, 8 bytes place in the medium, 8 bytes id   ff 20 .. ..

No token's bytes begin as another's whole bytes do, so the bytes of two blocks agree up to where their tokens agree,
bytes in order are tokens in order, and equal bytes are equal tokens that stand for the same.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvcache.checks import check_int
from kvcache.errors import InvalidTypeError, InvalidValueError

ID_SIZE = 8
MEDIUM = 0xFF  # the first byte of an id, which has 63 bits, is at most 0x7f
MAX_DIGEST_SIZE = 255


@dataclass(frozen=True)
class Media:
    """Tokens that stand for something besides their ids: an image, a sound.

    Args:
        start, stop: the positions of its tokens, from `start` to before `stop`; stop > start >= 0.
        digest: what tells it from all others, 1 to 255 bytes: for instance the SHA-256 of the image's content.

    Raises:
        InvalidValueError, InvalidTypeError: an argument is out of range or of the wrong kind.
    """

    start: int
    stop: int
    digest: bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", check_int("start", self.start, minimum=0))
        object.__setattr__(self, "stop", check_int("stop", self.stop, minimum=self.start + 1))
        if not isinstance(self.digest, bytes):
            raise InvalidTypeError(f"digest is a {type(self.digest).__name__}; expected bytes")
        if not 1 <= len(self.digest) <= MAX_DIGEST_SIZE:
            raise InvalidValueError(f"digest has {len(self.digest)} bytes; expected 1 to {MAX_DIGEST_SIZE}")


def check_media(media: Any, num_tokens: int) -> tuple[Media, ...]:
    """Return media in the order of their tokens, of which there must be `num_tokens` at least."""
    if isinstance(media, (str, bytes)) or not isinstance(media, Iterable):
        raise InvalidTypeError(f"media is a {type(media).__name__}; expected a list of Media")
    media = list(media)
    for index, medium in enumerate(media):
        if not isinstance(medium, Media):
            raise InvalidTypeError(f"media[{index}] is a {type(medium).__name__}; expected a Media")
        if medium.stop > num_tokens:
            raise InvalidValueError(f"media[{index}] ends at {medium.stop}; expected at most {num_tokens} tokens")
    media.sort(key=lambda medium: medium.start)
    for before, after in pairwise(media):
        if after.start < before.stop:
            raise InvalidValueError(f"media overlap: {before} and {after}; expected each token in one at most")
    return tuple(media)


class Content:
    """The bytes of a run of tokens, of which any part can be had.

    Args:
        tokens: the ids.
        first: the position of the first of them.
        media: of the whole text, in order.
    """

    def __init__(self, tokens: "array[int]", first: int, media: tuple[Media, ...]) -> None:
        ids = tokens[:]
        if sys.byteorder == "little":
            ids.byteswap()
        self._ids = ids.tobytes()
        self._first, self._end = first, first + len(ids)
        self._media = media
        self._media_stops = [medium.stop for medium in media]

    def part(self, start: int, stop: int) -> bytes:
        """Return the bytes of the tokens at the positions from `start` to before `stop`, or to the last there is."""
        stop = min(stop, self._end)
        ids = self._ids[ID_SIZE * (start - self._first) : ID_SIZE * (stop - self._first)]
        if not self._media:
            return ids
        parts, done = [], start
        for medium in self._media[bisect_right(self._media_stops, start) :]:
            if medium.start >= stop:
                break
            for position in range(max(start, medium.start), min(stop, medium.stop)):
                parts.append(ids[ID_SIZE * (done - start) : ID_SIZE * (position - start)])
                parts.append(bytes((MEDIUM, len(medium.digest))) + medium.digest)
                parts.append((position - medium.start).to_bytes(ID_SIZE, "big"))
                done = position
        parts.append(ids[ID_SIZE * (done - start) :])
        return b"".join(parts)


def common_tokens(one: bytes, other: bytes) -> int:
    """Return with how many equal tokens two blocks begin."""
    size = min(len(one), len(other))
    difference = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return _whole_tokens(one, size - (difference.bit_length() + 7) // 8)


def _whole_tokens(content: bytes, size: int) -> int:
    """Return how many tokens are whole in the first `size` bytes."""
    count = position = 0
    while position < size:
        if content[position] == MEDIUM:
            position += 2 + content[position + 1] + ID_SIZE if position + 1 < size else size
        position += ID_SIZE
        count += position <= size
    return count
