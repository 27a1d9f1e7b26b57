"""Stop strings in text that comes in pieces, wherever the pieces part."""


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may become one.

    Args:
        strings: none of them empty.

    >>> stops = StopStrings(["END"])
    >>> [stops.push(piece) for piece in ("abc E", "ND", " now")], stops.is_hit
    (['abc ', '', ''], True)
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._held = ""
        self.is_hit = False

    def push(self, text: str, may_stop: bool = True) -> str:
        """Return what may be shown now; nothing any more once a stop string was hit.

        Where the text may not stop yet, a stop string that is complete passes; one that has begun may end it later.
        """
        if self.is_hit:
            return ""
        self._held += text
        places = [place for string in self._strings if (place := self._held.find(string)) >= 0]
        if places and may_stop:
            self.is_hit = True
            return self._release(min(places))
        return self._release(len(self._held) - self._num_held())

    def finish(self) -> str:
        """Return what was held back and became no stop string."""
        return self._release(0 if self.is_hit else len(self._held))

    def _release(self, end: int) -> str:
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def _num_held(self) -> int:
        """Return the length of the longest end of the text that a stop string begins with."""
        longest = min(len(self._held), max(map(len, self._strings), default=1) - 1)
        ends = (size for size in range(longest, 0, -1) if self._begins_one(self._held[-size:]))
        return next(ends, 0)

    def _begins_one(self, end: str) -> bool:
        return any(string.startswith(end) for string in self._strings)
