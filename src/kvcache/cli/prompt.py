"""From what the user typed to token ids, and what fits after them."""

import os
import sys
from pathlib import Path
from typing import Any

from kvcache.errors import InvalidValueError


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the prompt's text: as given, from standard input for `-`, or from a file."""
    if prompt is None and prompt_file is None:
        raise InvalidValueError("no prompt; give it in quotes, or - to read standard input, or --prompt-file FILE")
    if prompt is not None and prompt_file is not None:
        raise InvalidValueError("both a prompt and --prompt-file; expected one of them")
    source = "the prompt" if prompt_file is None else f"--prompt-file {str(prompt_file)!r}"
    if prompt_file is not None:
        try:
            data = prompt_file.read_bytes()
        except OSError as cause:
            raise InvalidValueError(f"{source} cannot be read: {cause.strerror}") from cause
    elif prompt != "-":
        assert prompt is not None
        data = os.fsencode(prompt)  # the bytes that were typed, whatever the locale made of them
    elif sys.stdin is None:
        raise InvalidValueError("the prompt is -, but standard input is closed")
    else:
        data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise InvalidValueError(f"{source} is not UTF-8 text: {cause.reason} at byte {cause.start}") from cause
    if not text.strip():
        raise InvalidValueError(f"{source} is empty; expected some text")
    return text


def encode(tokenizer: Any, text: str, raw: bool) -> list[int]:
    """Return the prompt's token ids, wrapped in the chat template where the model has one and `raw` is False."""
    from kvcache.hf.prompt import prompt_ids  # not before it is known that transformers is there

    return prompt_ids(tokenizer, text if raw or not tokenizer.chat_template else [{"role": "user", "content": text}])
