"""A client's conversation."""

from __future__ import annotations

import pytest

from router.chat_history import ChatHistory

USER, ASSISTANT, SYSTEM = ("user", "assistant", "system")


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_questions_and_answers_in_turn() -> None:
    history = ChatHistory()
    assert history.ask("a?") == said((USER, "a?"))
    history.answered("a.")
    assert history.ask("b?") == said((USER, "a?"), (ASSISTANT, "a."), (USER, "b?"))
    history.answered("b.")
    assert history.messages == said((USER, "a?"), (ASSISTANT, "a."), (USER, "b?"), (ASSISTANT, "b."))
    assert len(history) == 2


def test_a_question_without_an_answer_leaves_no_trace() -> None:
    history = ChatHistory()
    history.ask("fails")
    assert history.ask("works?") == said((USER, "works?"))
    history.answered("yes")
    assert history.messages == said((USER, "works?"), (ASSISTANT, "yes"))
    with pytest.raises(ValueError, match="nothing was asked"):
        history.answered("again")


def test_the_system_message_stands_first_and_outlives_the_rest() -> None:
    history = ChatHistory("Be brief.")
    history.ask("a?")
    history.answered("a.")
    history.system = "Be long."
    assert history.messages[0] == {"role": SYSTEM, "content": "Be long."}
    history.clear()
    assert history.messages == said((SYSTEM, "Be long."))
    assert len(history) == 0
    history.system = ""
    assert history.messages == []


def test_what_is_given_and_taken_is_copied() -> None:
    begin = said((USER, "a?"), (ASSISTANT, "a."))
    history = ChatHistory(messages=begin)
    history.messages[0]["content"] = "changed"
    begin[0]["content"] = "changed"
    assert history.ask("b?")[0]["content"] == "a?"
