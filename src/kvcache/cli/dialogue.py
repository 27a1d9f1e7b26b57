"""The talk of `kvcache chat`: lines in; answers as they come, and replies to commands, out.

On a terminal what is wrong is said and the talk goes on. From a pipe the first error ends it, as the answers would no
longer belong to the questions.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from kvcache.cli import units
from kvcache.cli.conversation import Conversation, Turn
from kvcache.errors import EngineClosedError, InvalidValueError

if TYPE_CHECKING:
    from kvcache.engine import Completion, Job

PROMPT, CONTINUED = "> ", "... "
ENDS = ("/exit", "/quit")
HELP = """\
/undo           drop the last question and its answer
/fork [NAME]    go on in a new branch that begins as this one
/branches       list the branches
/switch NAME    go on in another branch
/system [TEXT]  set the system message; without TEXT there is none
/reset          drop all questions and answers of this branch
/stats          tokens, speed and memory
/save FILE      write this branch as chat messages, in JSON
/exit           end the chat, as Ctrl-D does

A line that ends with \\ goes on in the next one. One that begins with a space is a question, even if / follows.
Ctrl-C ends an answer early."""


class Answerer(Protocol):
    """Who answers, and what a chat wants to know of them."""

    @property
    def context(self) -> int | None:
        """Tokens that a conversation may have, None without a limit."""

    def submit(self, messages: list[dict[str, str]]) -> "Job":
        """Begin an answer. Raises InvalidValueError if the messages cannot be answered."""

    def num_tokens(self, messages: list[dict[str, str]]) -> int:
        """Return how many tokens these messages are."""

    def cache_nbytes(self) -> tuple[int, int]:
        """Return the bytes of the cache that are in use, and all of them."""


def whole_lines(read: Callable[[str], str]) -> Iterator[str]:
    r"""Yield lines until `EOFError`, those that end with a backslash together with the next.

    Args:
        read: takes the prompt to show, and returns a line.

    >>> lines = iter(["one \\", "two", "three"])
    >>> def read(prompt):
    ...     for line in lines:
    ...         return line
    ...     raise EOFError
    >>> list(whole_lines(read))
    ['one \ntwo', 'three']
    """
    is_open = True
    while is_open:
        parts: list[str] = []
        try:
            while (line := read(CONTINUED if parts else PROMPT)).endswith("\\"):
                parts.append(line[:-1])
            parts.append(line)
        except EOFError:
            is_open = False
        if parts:
            yield "\n".join(parts)


class Dialogue:
    """A talk about one conversation.

    Args:
        answerer: who answers.
        conversation: where it begins.
        is_terminal: whether a person types the lines.
        as_json: whether each turn is printed as one JSON object.
    """

    def __init__(self, answerer: Answerer, conversation: Conversation, *, is_terminal: bool, as_json: bool) -> None:
        self.conversation = conversation
        self.answerer = answerer
        self._is_terminal = is_terminal
        self._as_json = as_json
        self._last: Completion | None = None
        self._notes = Console(stderr=as_json or not is_terminal, highlight=False, markup=False, emoji=False)
        self._commands: dict[str, Callable[[str], str]] = {
            "/help": lambda _: HELP,
            "/undo": self._undo,
            "/fork": self._fork,
            "/branches": self._list_branches,
            "/switch": self._switch,
            "/system": self._set_system,
            "/reset": self._reset,
            "/stats": self._tell_statistics,
            "/save": self._save,
        }

    def run(self, lines: Iterable[str]) -> None:
        """Take the lines one after another, to their end or that of the chat.

        Raises:
            InvalidValueError: a line from a pipe is wrong.
        """
        for line in lines:
            try:
                if line.startswith("/"):
                    name, *argument = line.split(maxsplit=1)
                    if name in ENDS:
                        return
                    self._note(self._command(name)("".join(argument).strip()))
                elif question := line.strip():
                    self._ask(question)
            except InvalidValueError as error:
                if not self._is_terminal:
                    raise
                self._note(f"error: {error}", style="red")
            if self._is_terminal:
                print(file=self._notes.file)  # a line between this and the next prompt

    def _command(self, name: str) -> Callable[[str], str]:
        if name not in self._commands:
            raise InvalidValueError(f"unknown command {name}; /help lists them")
        return self._commands[name]

    def _ask(self, question: str) -> None:
        branch = self.conversation.branch
        try:
            completion = self._answer(self.answerer.submit(branch.messages(question)))
        except InvalidValueError as error:
            remedy = "; /undo drops the last question and answer, /reset all of them" if branch.turns else ""
            raise InvalidValueError(f"the question was not taken: {error}{remedy}") from error
        except EngineClosedError:
            raise
        except (RuntimeError, MemoryError) as error:  # of the model, after which the engine goes on
            raise InvalidValueError(f"the answer failed: {error}") from error
        if completion.finish_reason == "cancelled" and not completion.text:
            self._note("Interrupted before the answer began: the question is dropped.")
            return
        self._last = completion
        self.conversation.add(Turn(question, completion.text))
        if self._as_json:
            print(json.dumps(self._turn_as_data(question, completion), ensure_ascii=False), flush=True)
        elif completion.finish_reason == "cancelled":
            self._note("Interrupted: the answer is kept as far as it came.")
        elif completion.finish_reason == "length":
            self._note(f"Cut off after {units.count(completion.usage.completion_tokens, 'token')}: {self._limit}.")

    def _answer(self, job: "Job") -> "Completion":
        """Show an answer as it comes, and return it."""
        shown = ""
        try:
            for piece in job:
                shown += piece
                self._show(piece)
        except KeyboardInterrupt:
            job.cancel()
            if not self._is_terminal:
                raise
        completion = job.result()[0]
        self._show(completion.text[len(shown) :] + "\n")
        return completion

    def _show(self, text: str) -> None:
        if not self._as_json:
            print(text, end="", flush=True)

    def _note(self, text: str, style: str = "dim") -> None:
        self._notes.print(text, style=style, soft_wrap=True)

    @property
    def _limit(self) -> str:
        """What ended an answer that the model did not end."""
        assert self._last is not None
        usage, context = self._last.usage, self.answerer.context
        is_full = context is not None and usage.prompt_tokens + usage.completion_tokens > context
        return f"the model's context of {context:,} tokens is full" if is_full else "--max-new-tokens"

    def _undo(self, _: str) -> str:
        return f"Dropped with its answer: {_shortened(self.conversation.undo().question)}"

    def _fork(self, name: str) -> str:
        before = self.conversation.current
        name = self.conversation.fork(name or None)
        return f"Now in branch {name}, which begins as {before}; /switch {before} goes back."

    def _list_branches(self, _: str) -> str:
        width = max(map(len, self.conversation.branches))
        return "\n".join(
            f"{'*' if name == self.conversation.current else ' '} {name:{width}}  {_account(branch.turns)}"
            for name, branch in self.conversation.branches.items()
        )

    def _switch(self, name: str) -> str:
        if not name:
            raise InvalidValueError("/switch needs the name of a branch; /branches lists them")
        self.conversation.switch(name)
        return f"Now in branch {name}: {_account(self.conversation.branch.turns)}"

    def _set_system(self, text: str) -> str:
        before = self.conversation.branch.system
        self.conversation.set_system(text or None)
        if text:
            return "The system message is set."
        return "There was no system message." if before is None else f"The system message is dropped: {before}"

    def _reset(self, _: str) -> str:
        return f"Dropped {units.count(self.conversation.reset(), 'question')}."

    def _save(self, file: str) -> str:
        if not file:
            raise InvalidValueError("/save needs the name of a file")
        messages = json.dumps(self.conversation.branch.messages(), indent=2, ensure_ascii=False)
        try:
            with Path(file).expanduser().open("x", encoding="utf-8") as target:
                target.write(messages + "\n")
        except OSError as cause:
            raise InvalidValueError(f"{file} cannot be written: {cause.strerror}") from cause
        return f"Written: {file}"

    def _tell_statistics(self, _: str) -> str:
        branch, context = self.conversation.branch, self.answerer.context
        tokens = self.answerer.num_tokens(branch.messages()) if branch.turns else 0
        limit = "" if context is None else f" of the {context:,} that the model takes"
        rows = [("Conversation", f"{units.count(tokens, 'token')}{limit}, {_account(branch.turns)}")]
        if self._last is not None:
            usage, timings = self._last.usage, self._last.timings
            rows.append(
                (
                    "Last turn",
                    f"prompt of {units.count(usage.prompt_tokens, 'token')}: {usage.cached_tokens:,} cached, "
                    f"{usage.computed_tokens:,} computed; {usage.completion_tokens:,} new",
                )
            )
            rate = "" if timings.per_token is None else f", then {units.rate(1 / timings.per_token)}"
            rows.append(("Speed", f"first token after {units.seconds(timings.first_token)}{rate}"))
        used, total = self.answerer.cache_nbytes()
        rows.append(("Cache", f"{units.size(used)} used of {units.size(total)}"))
        return "\n".join(f"{name:13} {text}" for name, text in rows)

    def _turn_as_data(self, question: str, completion: "Completion") -> dict[str, Any]:
        timings = completion.timings
        return {
            "question": question,
            "answer": completion.text,
            "branch": self.conversation.current,
            "finish_reason": completion.finish_reason,
            "usage": asdict(completion.usage),
            "timings": {
                "queue_seconds": timings.queue,
                "time_to_first_token_seconds": timings.first_token,
                "total_seconds": timings.total,
                "decode_tokens_per_second": None if timings.per_token is None else 1 / timings.per_token,
            },
        }


def _account(turns: tuple[Turn, ...]) -> str:
    last = f", the last: {_shortened(turns[-1].question)}" if turns else ""
    return units.count(len(turns), "question") + last


def _shortened(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3].rstrip() + "..."


def read_typed(prompt: str) -> str:
    """Return a line from a terminal, with the prompt on it and the keys of readline where there is one."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        print()  # what comes next stands in a line of its own
        raise


def read_piped(_: str) -> str:
    """Return a line of standard input, which is UTF-8 whatever the locale says."""
    data = sys.stdin.buffer.readline()
    if not data:
        raise EOFError
    try:
        return data.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as cause:
        raise InvalidValueError(f"a line of standard input is not UTF-8 text: {cause.reason}") from cause
