"""From what the user typed to token ids, and what fits after them."""

import sys
from pathlib import Path
from typing import Any

from kvcache.errors import InvalidValueError


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the prompt's text: as given, from standard input for `-`, or from a file."""
    if (prompt is None) == (prompt_file is None):
        raise InvalidValueError("expected a prompt, or --prompt-file, and not both")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as cause:
            reason = "is not UTF-8 text" if isinstance(cause, UnicodeDecodeError) else cause.strerror
            raise InvalidValueError(f"--prompt-file {str(prompt_file)!r} cannot be read: {reason}") from cause
    elif prompt == "-":
        prompt = sys.stdin.read()
    assert prompt is not None
    if not prompt.strip():
        raise InvalidValueError("the prompt is empty; expected some text")
    return prompt


def encode(tokenizer: Any, text: str, raw: bool) -> list[int]:
    """Return the prompt's token ids, wrapped in the chat template where the model has one and `raw` is False."""
    if raw or not tokenizer.chat_template:
        ids = tokenizer(text)["input_ids"]
    else:
        chat = [{"role": "user", "content": text}]
        templated = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(templated, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InvalidValueError("the prompt has no tokens; expected some text")
    return list(ids)


def fitting_new_tokens(model: Any, prompt_tokens: int) -> int:
    """Return how many tokens the model's context leaves room for; the last one is sampled and takes no place."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is None:
        return sys.maxsize
    if prompt_tokens > context:
        raise InvalidValueError(f"the prompt has {prompt_tokens:,} tokens; the model's context is {context:,}")
    return int(context) - prompt_tokens + 1
