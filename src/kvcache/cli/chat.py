"""`kvcache chat`: talk with a model, whose cache keeps what was said."""

import io
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvcache.checks import check_dtype, dtype_name
from kvcache.cli import dialogue, options, units
from kvcache.cli.conversation import Conversation
from kvcache.cli.start import collect_again, import_transformers
from kvcache.errors import InvalidValueError
from kvcache.memory import free_memory, parse_size
from kvcache.storage.codecs import check_storage

if TYPE_CHECKING:
    from kvcache.engine import Engine, Job

EPILOG = """
Examples:

  kvcache chat

  kvcache chat --system "Answer in one sentence." --temperature 0.7 --memory 2GiB

  kvcache chat --model ./my-model --dtype bfloat16 --storage int8

  kvcache chat --json < questions.txt

Once there, /help lists the commands: /undo, /fork and /switch, /stats, /system, /reset, /save, /exit.
"""


def chat(
    model: options.Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="A system message, which comes before all questions.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="End an answer after this many tokens.", min=1)] = 512,
    dtype: options.Dtype = "float32",
    storage: options.Storage = None,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    memory: Annotated[
        str | None,
        typer.Option(
            help="For keys and values: 2GiB, 500MB, or bytes; default: a quarter of what is free, and no more than 16 "
            "conversations of the model's whole context take."
        ),
    ] = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each turn as one JSON object.", rich_help_panel=options.OUTPUT)
    ] = False,
) -> None:
    """Talk with a language model. What was said stays in the KV cache, so each turn computes only what is new.

    Answers are streamed; Ctrl-C ends one early, Ctrl-D the chat. A line that ends with a backslash goes on in the next.

    From a pipe each line is a question, and the answers alone go to standard output.

    The first run with the default model fetches it (93 MB) and converts it once.
    """
    dtype = dtype_name(check_dtype("--dtype", dtype))
    kept = check_storage("--storage", dtype if storage is None else storage)
    compressed = options.check_weights(weights)
    nbytes = None if memory is None else parse_size("--memory", memory)
    options.check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if sys.stdin is None:
        raise InvalidValueError("standard input is closed; expected a terminal, or questions")
    messages = Console(stderr=True, highlight=False)
    with messages.status("Starting") as status:
        import_transformers()
        from kvcache import hf  # first, as it says what to install where transformers is missing
        from kvcache.engine import Engine

        loaded = hf.load_model(model, dtype=dtype, device=device, progress=status.update)
        if not getattr(loaded.tokenizer, "chat_template", None):
            raise InvalidValueError(f"{model} has no chat template; kvcache generate continues plain text")
        free = free_memory(device)
        if nbytes is not None and free is not None and nbytes > free:
            raise InvalidValueError(f"--memory is {units.size(nbytes)}; {units.size(free)} are free beside the model")
        engine = Engine(*loaded, memory=nbytes, storage=kept, weights=compressed)
        collect_again()
    with engine:
        answerer = EngineAnswerer(
            engine,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        room = units.size(engine.nbytes) + (f" in {kept.name}" if kept.name != dtype else "")
        ran = engine.runs_through.partition(": ")[0]  # and not why
        started = f"{model} in {dtype} through {ran}, memory for {engine.num_tokens:,} tokens ({room})."
        messages.print(f"{started} /help lists the commands.", markup=False, soft_wrap=True)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")  # a mistyped byte is no reason to stop
            with suppress(ImportError):
                import readline  # noqa: F401  # lets `input` edit lines and recall earlier ones
        talk = dialogue.Dialogue(answerer, Conversation(system), is_terminal=is_terminal, as_json=as_json)
        talk.run(dialogue.whole_lines(dialogue.read_typed if is_terminal else dialogue.read_piped))


class EngineAnswerer:
    """An engine that answers with certain options.

    Raises:
        InvalidValueError: an option is out of range.
    """

    def __init__(self, engine: "Engine", **generation: Any) -> None:
        from kvcache.engine.options import options_of

        options_of(engine.model.generation_config, generation)  # now, and not after the first question
        self._engine = engine
        self._generation = generation

    @property
    def context(self) -> int | None:
        """Tokens that a text of the model may have, None without a limit."""
        return self._engine.longest_text

    def submit(self, messages: list[dict[str, str]]) -> "Job":
        """Begin an answer.

        Raises:
            InvalidValueError: the messages do not fit, or the chat template refuses them.
        """
        return self._engine.submit(self._ids(messages), **self._generation)

    def num_tokens(self, messages: list[dict[str, str]]) -> int:
        """Return how many tokens these messages are."""
        return len(self._ids(messages))

    def cache_nbytes(self) -> tuple[int, int]:
        """Return the bytes of the blocks that keep something, and of all blocks."""
        return self._engine.kept_nbytes, self._engine.nbytes

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        from kvcache.hf.prompt import prompt_ids

        return prompt_ids(self._engine.tokenizer, messages)
