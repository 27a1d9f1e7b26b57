import io
import json
import os
import re
import select
import sys
import time
from contextlib import suppress

import pytest

from kvcache.cli.main import main
from tests.hf.tiny_models import llama

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


@pytest.fixture
def chat(capsys, monkeypatch):
    """Run the command in this process with these lines in a pipe; return exit status, output and messages."""

    def run(lines, *arguments):
        data = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(SystemExit) as ended:
            main(["chat", "--memory", "50MB", *map(str, arguments)])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory, smollm2):
    """Make a folder with a random Llama, the real tokenizer, and this chat template."""

    def make(template, context=64):
        folder = tmp_path_factory.mktemp("chat")
        shape = {"num_hidden_layers": 1, "max_position_embeddings": context}
        llama(vocab_size=len(smollm2.tokenizer), **shape).save_pretrained(folder)
        smollm2.tokenizer.save_pretrained(folder)
        for file in folder.glob("*.jinja"):
            file.unlink()
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_folder(make_folder):
    return make_folder(TEMPLATE)


def test_the_second_turn_computes_only_what_is_new(chat, smollm2):
    questions = ["What is the capital of France?", "And of Italy?"]
    status, out, err = chat(questions, "--json")
    assert status == 0, err
    first, second = map(json.loads, out.splitlines())
    assert [turn["answer"] for turn in (first, second)] == [
        "The capital of France is Paris.",
        "The capital of Italy is Rome.",
    ]
    assert first["usage"] == {"prompt_tokens": 37, "cached_tokens": 0, "computed_tokens": 37, "completion_tokens": 8}
    # All of the first turn but its last token, which was sampled and never run.
    assert second["usage"] == {"prompt_tokens": 59, "cached_tokens": 44, "computed_tokens": 15, "completion_tokens": 8}
    assert first["timings"]["decode_tokens_per_second"] > 0
    through = "through kvcache's own decoder"
    assert f"smollm2 in float32 {through}, memory for 1,024 tokens (47.2 MB). /help lists the commands.\n" in err


def test_weights_may_be_in_int8(chat, smollm2):
    status, out, err = chat(["What is the capital of France?"], "--weights", "int8")
    assert (status, out) == (0, "The capital of France is Paris.\n")
    assert "smollm2 in float32 through kvcache's own decoder, weights in int8, memory for " in err


def test_a_branch_of_an_earlier_turn_finds_it_cached(chat, smollm2):
    lines = ["What is the capital of France?", "/fork", "And of Italy?", "/switch main", "And of Italy?", "/stats"]
    status, out, err = chat(lines, "--system", "Be brief.", "--storage", "int8", "--max-new-tokens", 3)
    assert status == 0, err
    _, in_fork, in_main = out.splitlines()
    assert in_fork == in_main
    computed = re.search(r"prompt of (\d+) tokens: (\d+) cached, 1 computed; 3 new", err)
    assert computed is not None, err
    assert int(computed[1]) == int(computed[2]) + 1
    assert " in int8). /help" in err


def test_a_pipe_gives_answers_alone(chat, tiny_folder):
    lines = ["\ufeffone", "", "two \\", "three", "/undo", "/exit", "four"]
    status, out, err = chat(lines, "--model", tiny_folder, "--max-new-tokens", 2)
    assert status == 0, err
    assert len(out.splitlines()) == 2
    assert "Dropped with its answer: two three\n" in err


def test_a_conversation_that_has_become_too_long_is_said_and_not_lost(chat, tiny_folder):
    status, out, err = chat(["one", "two " * 80], "--model", tiny_folder, "--max-new-tokens", 2)
    assert status == 2
    assert len(out.splitlines()) == 1
    message = err.splitlines()[-1]
    assert message.startswith("kvcache: error: the question was not taken: the prompt has ")
    assert message.endswith("the model's context is 64; /undo drops the last question and answer, /reset all of them")


def test_the_end_of_the_context_cuts_an_answer_off(chat, tiny_folder):
    status, _, err = chat(["one"], "--model", tiny_folder)
    assert status == 0, err
    assert re.search(r"Cut off after \d+ tokens: the model's context of 64 tokens is full\.", err)


def test_a_conversation_that_is_larger_than_the_memory_is_refused(chat, make_folder):
    folder = make_folder(TEMPLATE, context=256)
    status, _, err = chat(["one"], "--model", folder, "--memory", "10kB", "--max-new-tokens", 100)
    assert status == 2
    assert "the question was not taken: a prompt with its new tokens takes " in err


def test_a_template_that_refuses_a_message_is_named(chat, make_folder):
    folder = make_folder(NO_SYSTEM + TEMPLATE)
    status, _, err = chat(["one"], "--model", folder, "--system", "Be brief.")
    assert status == 2
    assert "the tokenizer's chat template refuses the messages: System role not supported" in err


def test_a_model_without_a_chat_template_is_refused(chat, make_folder):
    folder = make_folder(None)
    status, out, err = chat(["one"], "--model", folder)
    assert (status, out) == (2, "")
    expected = f"kvcache: error: {folder} has no chat template; kvcache generate continues plain text"
    assert err.splitlines()[-1] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float31"], "--dtype is 'float31'; expected one of float16, bfloat16, float32, float64"),
        (["--storage", "int9"], "--storage is 'int9'; expected one of float16, bfloat16"),
        (["--memory", "much"], "--memory is 'much'; expected a size such as 2GiB, 500MB, or a number of bytes"),
        (["--memory", "9000TB"], "--memory is 9,000,000.0 GB; "),
        (["--memory", "100"], "memory is 100 bytes; a block of 64 tokens takes"),
        (["--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["--top-k", "5"], "--top-k, --top-p and --min-p shape sampling; give a --temperature above 0 too"),
        (["--temperature", "1", "--top-p", "0"], "top_p is 0.0; expected a number above 0, at most 1"),
        (["--model", "/nowhere/model"], "model path '/nowhere/model' does not exist"),
    ],
)
def test_wrong_options_end_it_before_the_first_question(chat, tiny_folder, arguments, message):
    status, out, err = chat(["one"], "--model", tiny_folder, *arguments)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_bytes_that_are_no_text_are_refused(chat, tiny_folder):
    status, out, err = chat(b"\xff hi\n", "--model", tiny_folder)
    assert (status, out) == (2, "")
    assert "a line of standard input is not UTF-8 text: invalid start byte" in err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    out = capsys.readouterr().out
    for words in ("--system", "--memory", "--temperature", "kvcache chat --json < questions.txt", "/undo"):
        assert words in out


class Terminal:
    """The command on a terminal of its own, at which a person types."""

    def __init__(self, *arguments):
        import pty

        command = [sys.executable, "-m", "kvcache", "chat", *map(str, arguments)]
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.execvpe(command[0], command, {**os.environ, "TERM": "dumb", "NO_COLOR": "1"})
        self.shown = ""

    def wait_for(self, text, seconds=120):
        """Return what is shown up to the text that is waited for."""
        ends_at = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < ends_at, self.shown
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.shown += os.read(self.terminal, 4096).decode(errors="replace").replace("\r\n", "\n")
        before, self.shown = self.shown.split(text, 1)
        return before

    def type(self, text):
        os.write(self.terminal, text.encode())

    def interrupt_until_it_ends(self, seconds=120, patience=10):
        """Return the exit status; an interrupt in the moment before Python waits for a key is seen at the next one."""
        start, num_typed = time.monotonic(), 0
        while not (ended := os.waitpid(self.process, os.WNOHANG))[0]:
            waited = time.monotonic() - start
            assert waited < seconds, self.shown
            if waited >= num_typed * patience:
                self.type("\x03")
                num_typed += 1
            with suppress(OSError):  # how Linux says that nobody has the terminal any more
                if select.select([self.terminal], [], [], 0.1)[0]:
                    self.shown += os.read(self.terminal, 4096).decode(errors="replace")
        return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_on_a_terminal_interrupts_end_an_answer_and_then_the_chat(make_folder):
    folder = make_folder(TEMPLATE, context=8192)
    terminal = Terminal("--model", folder, "--max-new-tokens", 8000, "--memory", "20MB")
    assert "/help lists the commands.\n" in terminal.wait_for("> ")
    terminal.type("one \\\n")
    terminal.wait_for("... ")
    terminal.type("two\n")
    terminal.wait_for("two\n")
    time.sleep(0.5)  # some of an answer that would take much longer
    terminal.type("\x03")
    terminal.wait_for("Interrupted")
    terminal.wait_for("> ")
    terminal.type("/undo\n")
    terminal.wait_for("Dropped with its answer: one two\n")
    terminal.wait_for("> ")
    terminal.type("/wrong\n")
    terminal.wait_for("error: unknown command /wrong; /help lists them\n\n> ")
    assert terminal.interrupt_until_it_ends() == 130
