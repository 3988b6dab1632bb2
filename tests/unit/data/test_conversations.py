from __future__ import annotations

import pytest

from ftkit.data.conversations import Message, to_messages
from ftkit.errors import DataError
from ftkit.specs.data import MessagesFormat, PromptCompletionFormat

QUESTION = PromptCompletionFormat(kind="prompt-completion", prompt="{context}\n{question}", completion="{sql}")


def test_columns_fill_the_prompt_and_the_completion() -> None:
    example = {"context": "CREATE TABLE t (a)", "question": "How many {rows}?", "sql": "SELECT 1", "other": 3}
    assert to_messages(example, QUESTION) == [
        Message("user", "CREATE TABLE t (a)\nHow many {rows}?"),
        Message("assistant", "SELECT 1"),
    ]


def test_a_missing_column_is_named_beside_those_that_exist() -> None:
    with pytest.raises(DataError) as caught:
        to_messages({"context": "", "sql": ""}, QUESTION)
    assert "question" in caught.value.what
    assert "context, sql" in caught.value.meaning


def test_sharegpt_turns_become_roles() -> None:
    form = MessagesFormat(kind="messages", column="conversations", style="sharegpt")
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    messages = to_messages({"conversations": turns}, form)
    assert [message.role for message in messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize("turns", [None, [], "text", [{"role": "robot", "content": "x"}], [{"role": "user"}], ["x"]])
def test_what_is_no_conversation_is_refused(turns: object) -> None:
    with pytest.raises(DataError):
        to_messages({"messages": turns}, MessagesFormat(kind="messages"))
