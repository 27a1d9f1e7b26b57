import pytest

from kvcache.cli.conversation import Conversation, Turn
from kvcache.errors import InvalidValueError

FIRST, SECOND = Turn("one?", "1"), Turn("two?", "2")


def talked(*turns, system=None):
    conversation = Conversation(system)
    for turn in turns:
        conversation.add(turn)
    return conversation


def test_messages_are_the_system_message_all_turns_and_the_question():
    assert talked(FIRST, system="Be brief.").branch.messages("two?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
    ]
    assert Conversation().branch.messages() == []


def test_undo_drops_the_last_turn_and_says_which():
    conversation = talked(FIRST, SECOND)
    assert conversation.undo() == SECOND
    assert conversation.branch.turns == (FIRST,)
    conversation.undo()
    with pytest.raises(InvalidValueError, match="there is no question to drop"):
        conversation.undo()


def test_a_fork_goes_its_own_way():
    conversation = talked(FIRST)
    assert conversation.fork("why") == "why"
    conversation.add(SECOND)
    conversation.set_system("Be brief.")
    conversation.switch("main")
    assert (conversation.branch.turns, conversation.branch.system) == ((FIRST,), None)
    conversation.switch("why")
    assert (conversation.branch.turns, conversation.branch.system) == ((FIRST, SECOND), "Be brief.")


def test_a_fork_without_a_name_gets_the_next_free_number():
    conversation = Conversation()
    assert [conversation.fork(), conversation.fork("4"), conversation.fork(), conversation.fork()] == [
        "2",
        "4",
        "5",
        "6",
    ]


@pytest.mark.parametrize(("name", "message"), [("main", "a branch 'main' already"), ("a b", "expected one word")])
def test_a_fork_needs_a_new_name_of_one_word(name, message):
    conversation = talked(FIRST)
    with pytest.raises(InvalidValueError, match=message):
        conversation.fork(name)
    assert list(conversation.branches) == ["main"]


def test_an_unknown_branch_is_refused_and_the_known_ones_named():
    conversation = Conversation()
    conversation.fork("why")
    with pytest.raises(InvalidValueError, match="there is no branch 'how'; expected one of main, why"):
        conversation.switch("how")
    assert conversation.current == "why"


def test_reset_keeps_the_system_message_and_other_branches():
    conversation = talked(FIRST, SECOND, system="Be brief.")
    conversation.fork("why")
    assert conversation.reset() == 2
    assert conversation.branch.messages() == [{"role": "system", "content": "Be brief."}]
    assert len(conversation.branches["main"].turns) == 2
