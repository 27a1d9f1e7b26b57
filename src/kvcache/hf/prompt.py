"""A prompt as people give it, as token ids."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.storage.tokens import check_token_ids

Prompt = str | Sequence[int] | torch.Tensor | Sequence[Mapping[str, Any]]


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the token ids, at least one.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: text, which is taken as it is; token ids, as a list or an integer tensor (T,); or a chat, a list of
            messages with a "role" and a "content", which goes through the tokenizer's chat template.

    Raises:
        InvalidTypeError: it is none of these.
        InvalidValueError: it has no tokens, or it is a chat and the tokenizer has no chat template, or one that refuses
            it.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt, verbose=False)["input_ids"]
    elif isinstance(prompt, Sequence) and any(isinstance(message, Mapping) for message in prompt):
        ids = tokenizer(_chat_text(tokenizer, prompt), add_special_tokens=False, verbose=False)["input_ids"]
    elif isinstance(prompt, (Sequence, torch.Tensor)) or hasattr(prompt, "tolist"):
        return check_token_ids("prompt", prompt).tolist()
    else:
        raise InvalidTypeError(
            f"prompt is a {type(prompt).__name__}; expected text, token ids, or messages such as "
            '{"role": "user", "content": "..."}'
        )
    if not ids:
        raise InvalidValueError("the prompt has no tokens; expected some text")
    return list(ids)


def check_known_ids(model: Any, ids: list[int]) -> None:
    """Check that a model has embeddings of these ids."""
    num_known = model.get_input_embeddings().weight.shape[0]
    if (largest := max(ids)) >= num_known:
        raise InvalidValueError(f"prompt holds the id {largest}; expected ids in [0, {num_known - 1}]")


def context_of(model: Any) -> int | None:
    """Return how many tokens the model takes, None without a limit."""
    context: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return context


def fitting_new_tokens(model: Any, prompt_tokens: int) -> int:
    """Return how many tokens the model's context leaves room for; the last one is sampled and takes no place."""
    context = context_of(model)
    if context is None:
        return sys.maxsize
    if prompt_tokens > context:
        raise InvalidValueError(f"the prompt has {prompt_tokens:,} tokens; the model's context is {context:,}")
    return context - prompt_tokens + 1


def _chat_text(tokenizer: Any, messages: Sequence[Any]) -> str:
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidTypeError(f"prompt[{index}] is a {type(message).__name__}; expected a message, as the others")
        if not {"role", "content"} <= message.keys():
            raise InvalidValueError(f'prompt[{index}] has {sorted(message)}; expected a "role" and a "content"')
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidValueError(
            "prompt is a chat, and the tokenizer has no chat_template; give text or token ids, or set a template"
        )
    import jinja2

    try:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
    except jinja2.TemplateError as cause:  # some allow no system message, say
        raise InvalidValueError(f"the tokenizer's chat template refuses the messages: {cause}") from cause
