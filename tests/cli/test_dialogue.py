import json

import pytest

from kvcache.cli.conversation import Conversation, Turn
from kvcache.cli.dialogue import Dialogue, read_typed, whole_lines
from kvcache.engine import Completion, Timings
from kvcache.errors import InvalidValueError
from kvcache.hf.turn import Usage


class Echo:
    """Answers with the question's words in capitals, one piece a word.

    Args:
        interrupt_at: the piece in whose place Ctrl-C is pressed.
        refused: a question that does not fit.
        limit: words after which an answer is cut off.
    """

    context = 100

    def __init__(self, interrupt_at=None, refused=None, limit=50):
        self.asked = []
        self.interrupt_at, self.refused, self.limit = interrupt_at, refused, limit

    def submit(self, messages):
        question = messages[-1]["content"]
        if question == self.refused:
            raise InvalidValueError("the prompt has 101 tokens; the model's context is 100")
        self.asked.append(messages)
        return EchoJob(question.upper().split(), self.interrupt_at, self.limit)

    def num_tokens(self, messages):
        return sum(len(message["content"].split()) for message in messages)

    def cache_nbytes(self):
        return 2_000, 8_000_000


class EchoJob:
    def __init__(self, words, interrupt_at, limit):
        self.words, self.interrupt_at, self.limit = words, interrupt_at, limit
        self.given = []
        self.is_cancelled = False

    def __iter__(self):
        for index, word in enumerate(self.words[: self.limit]):
            if index == self.interrupt_at:
                raise KeyboardInterrupt
            self.given.append(word)
            yield word + " "

    def cancel(self):
        self.is_cancelled = True

    def result(self):
        cut = len(self.words) > self.limit
        reason = "cancelled" if self.is_cancelled else "length" if cut else "stop"
        text = "".join(word + " " for word in self.given)
        usage = Usage(30, 20, 10, len(self.given))
        return [Completion(text, [], reason, usage, Timings(0.0, 0.25, 1.0, 0.05))]


def talk(*lines, is_terminal=True, as_json=False, **behaviour):
    dialogue = Dialogue(Echo(**behaviour), Conversation(), is_terminal=is_terminal, as_json=as_json)
    dialogue.run(iter(lines))
    return dialogue


def turns(dialogue):
    return [(turn.question, turn.answer) for turn in dialogue.conversation.branch.turns]


def test_each_question_is_asked_with_all_that_was_said(capsys):
    dialogue = talk("one", "", "  two  ")
    assert capsys.readouterr().out == "ONE \n\n\nTWO \n\n"
    assert [message["content"] for message in dialogue.answerer.asked[-1]] == ["one", "ONE ", "two"]


def test_from_a_pipe_only_answers_are_printed(capsys):
    talk("one", "/undo", "/stats", "two", "/exit", "three", is_terminal=False)
    out, err = capsys.readouterr()
    assert out == "ONE \nTWO \n"
    assert err.startswith("Dropped with its answer: one\n")


def test_undo_says_what_it_drops(capsys):
    dialogue = talk("one", "two", "/undo")
    assert "Dropped with its answer: two\n" in capsys.readouterr().out
    assert turns(dialogue) == [("one", "ONE ")]


def test_branches_are_made_listed_and_left(capsys):
    dialogue = talk("one", "/fork why", "two", "/branches", "/switch main", "three")
    assert turns(dialogue) == [("one", "ONE "), ("three", "THREE ")]
    assert dialogue.conversation.branches["why"].turns == (Turn("one", "ONE "), Turn("two", "TWO "))
    out = capsys.readouterr().out
    assert "Now in branch why, which begins as main; /switch main goes back.\n" in out
    assert "  main  1 question, the last: one\n* why   2 questions, the last: two\n" in out
    assert "Now in branch main: 1 question, the last: one\n" in out


def test_the_system_message_is_set_and_dropped(capsys):
    dialogue = talk("/system Be brief.", "one", "/system", "two")
    first, second = dialogue.answerer.asked
    assert first[0] == {"role": "system", "content": "Be brief."}
    assert second[0] == {"role": "user", "content": "one"}
    assert "The system message is dropped: Be brief.\n" in capsys.readouterr().out


def test_reset_begins_anew(capsys):
    assert turns(talk("one", "two", "/reset", "three")) == [("three", "THREE ")]
    assert "Dropped 2 questions.\n" in capsys.readouterr().out


def test_statistics_of_the_conversation_and_the_last_turn(capsys):
    talk("/stats", "one two", "/stats")
    out = capsys.readouterr().out
    assert "Conversation  0 tokens of the 100 that the model takes, 0 questions\n" in out
    assert "Conversation  4 tokens of the 100 that the model takes, 1 question, the last: one two\n" in out
    assert "Last turn     prompt of 30 tokens: 20 cached, 10 computed; 2 new\n" in out
    assert "Speed         first token after 250 ms, then 20.0 tokens/s\n" in out
    assert "Cache         2.0 kB used of 8.0 MB\n" in out


def test_save_writes_messages_and_never_over_a_file(capsys, tmp_path):
    file = tmp_path / "a chat.json"
    dialogue = talk("one", f"/save {file}", f"/save {file}", "/save")
    assert json.loads(file.read_text(encoding="utf-8")) == dialogue.conversation.branch.messages()
    out = capsys.readouterr().out
    assert f"Written: {file}\n" in out
    assert f"error: {file} cannot be written: File exists\n" in out
    assert "error: /save needs the name of a file\n" in out


def test_an_unknown_command_names_help_and_the_talk_goes_on(capsys):
    assert turns(talk("/undo", "/wrong way", "/switch", "one")) == [("one", "ONE ")]
    out = capsys.readouterr().out
    assert "error: there is no question to drop\n" in out
    assert "error: unknown command /wrong; /help lists them\n" in out
    assert "error: /switch needs the name of a branch; /branches lists them\n" in out


def test_help_names_every_command(capsys):
    dialogue = talk("/help")
    out = capsys.readouterr().out
    assert [name for name in dialogue._commands if name != "/help" and name not in out] == []


def test_a_space_before_a_slash_makes_it_a_question():
    assert turns(talk(" /etc is")) == [("/etc is", "/ETC IS ")]


def test_a_question_that_does_not_fit_leaves_all_as_it_was(capsys):
    dialogue = talk("one", "long", "two", refused="long")
    assert turns(dialogue) == [("one", "ONE "), ("two", "TWO ")]
    assert (
        "error: the question was not taken: the prompt has 101 tokens; the model's context is 100; /undo drops the "
        "last question and answer, /reset all of them\n"
    ) in capsys.readouterr().out
    talk("long", refused="long")
    assert "/undo" not in capsys.readouterr().out  # there is nothing to drop


def test_the_first_error_ends_a_pipe(capsys):
    with pytest.raises(InvalidValueError, match="unknown command /wrong"):
        talk("one", "/wrong", "two", is_terminal=False)
    assert capsys.readouterr().out == "ONE \n"


def test_an_interrupted_answer_is_kept_as_far_as_it_came(capsys):
    dialogue = talk("one two three", "four", interrupt_at=2)
    assert turns(dialogue) == [("one two three", "ONE TWO "), ("four", "FOUR ")]
    assert "ONE TWO \nInterrupted: the answer is kept as far as it came.\n" in capsys.readouterr().out


def test_a_question_that_is_interrupted_before_its_answer_is_dropped(capsys):
    dialogue = talk("one", interrupt_at=0)
    assert turns(dialogue) == []
    assert "Interrupted before the answer began: the question is dropped.\n" in capsys.readouterr().out


def test_an_interrupt_ends_a_pipe():
    with pytest.raises(KeyboardInterrupt):
        talk("one two", interrupt_at=1, is_terminal=False)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [(1, "1 token: --max-new-tokens."), (71, "71 tokens: the model's context of 100 tokens is full.")],
)
def test_a_limit_that_cuts_an_answer_off_is_named(capsys, limit, reason):
    talk(" ".join(["one"] * 80), limit=limit)
    assert f"Cut off after {reason}\n" in capsys.readouterr().out


def test_json_is_one_object_a_turn(capsys):
    talk("one\ntwo", "/fork why", "three", as_json=True)
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert first == {
        "question": "one\ntwo",
        "answer": "ONE TWO ",
        "branch": "main",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 30, "cached_tokens": 20, "computed_tokens": 10, "completion_tokens": 2},
        "timings": {
            "queue_seconds": 0.0,
            "time_to_first_token_seconds": 0.25,
            "total_seconds": 1.0,
            "decode_tokens_per_second": 20.0,
        },
    }
    assert second["branch"] == "why"
    assert "Now in branch why" in err


def test_a_backslash_at_the_very_end_loses_nothing():
    lines = iter(["one\\", "two\\"])
    prompts = []

    def read(prompt):
        prompts.append(prompt)
        for line in lines:
            return line
        raise EOFError

    assert list(whole_lines(read)) == ["one\ntwo"]
    assert prompts == ["> ", "... ", "... "]


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_what_ends_the_chat_at_its_prompt_leaves_a_fresh_line(capsys, monkeypatch, end):
    def type_nothing(prompt):
        raise end

    monkeypatch.setattr("builtins.input", type_nothing)
    with pytest.raises(end):
        read_typed("> ")
    assert capsys.readouterr().out == "\n"
