"""What was said in a chat: questions and answers, in branches that may begin alike.

A branch is a value that never changes: a fork is the same value under another name, and a turn that fails leaves all
as it was.
"""

import re
from dataclasses import dataclass, replace

from kvcache.errors import InvalidValueError

FIRST_BRANCH = "main"


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Branch:
    """The turns of one line of a conversation, and the system message before them."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """Return it as chat messages, a new question behind."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        if question is not None:
            messages.append({"role": "user", "content": question})
        return messages


class Conversation:
    """Branches by name, one of which goes on.

    Attributes:
        branches: all of them, in the order in which they were made.
        current: the name of the one that goes on.

    >>> chat = Conversation(system="Be brief.")
    >>> chat.add(Turn("What is a key?", "What a token is found by."))
    >>> chat.fork()
    '2'
    >>> chat.undo().question
    'What is a key?'
    >>> {name: len(branch.turns) for name, branch in chat.branches.items()}
    {'main': 1, '2': 0}
    """

    def __init__(self, system: str | None = None) -> None:
        self.branches = {FIRST_BRANCH: Branch(system)}
        self.current = FIRST_BRANCH

    @property
    def branch(self) -> Branch:
        """The branch that goes on."""
        return self.branches[self.current]

    def add(self, turn: Turn) -> None:
        """Append a turn to the branch."""
        self._change(turns=(*self.branch.turns, turn))

    def undo(self) -> Turn:
        """Drop the last turn of the branch, and return it.

        Raises:
            InvalidValueError: there is none.
        """
        if not self.branch.turns:
            raise InvalidValueError("there is no question to drop")
        *kept, dropped = self.branch.turns
        self._change(turns=tuple(kept))
        return dropped

    def reset(self) -> int:
        """Drop all turns of the branch but not its system message, and return how many there were."""
        dropped = len(self.branch.turns)
        self._change(turns=())
        return dropped

    def set_system(self, text: str | None) -> None:
        """Set the branch's system message, or drop it."""
        self._change(system=text)

    def fork(self, name: str | None = None) -> str:
        """Go on in a new branch that begins as this one, and return its name; the next free number without one.

        Raises:
            InvalidValueError: there is a branch of that name, or it is not one word.
        """
        if name is None:
            number = len(self.branches) + 1
            while str(number) in self.branches:
                number += 1
            name = str(number)
        if not re.fullmatch(r"\S+", name):
            raise InvalidValueError(f"the name is {name!r}; expected one word")
        if name in self.branches:
            raise InvalidValueError(f"there is a branch {name!r} already; /switch {name} goes to it")
        self.branches[name] = self.branch
        self.current = name
        return name

    def switch(self, name: str) -> None:
        """Go on in another branch.

        Raises:
            InvalidValueError: there is none of that name.
        """
        if name not in self.branches:
            raise InvalidValueError(f"there is no branch {name!r}; expected one of {', '.join(self.branches)}")
        self.current = name

    def _change(self, **changes: object) -> None:
        self.branches[self.current] = replace(self.branch, **changes)  # type: ignore[arg-type]
