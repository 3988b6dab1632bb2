from __future__ import annotations

import pytest
from pydantic import ValidationError

from ftkit.config.data import MessagesFormat, PromptCompletionFormat
from ftkit.data.conversations import Message, to_messages
from ftkit.errors import DataError

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


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tool_calls": [{"name": "search"}]}, "turn 2: a turn has keys that are not supported: tool_calls"),
        ({"reasoning_content": "so", "weight": 0}, "not supported: reasoning_content, weight"),
        ({"name": "bot"}, "not supported: name"),
        ({"from": "gpt"}, "not supported: from"),
    ],
)
def test_a_key_of_a_turn_that_would_be_dropped_is_named(extra: dict[str, object], message: str) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"} | extra]
    with pytest.raises(DataError, match=message):
        to_messages({"messages": turns}, MessagesFormat(kind="messages"))


def test_a_key_without_a_value_says_nothing() -> None:
    turn = {"role": "assistant", "content": "a", "tool_calls": None, "name": "", "weight": None, "parts": []}
    assert to_messages({"messages": [turn]}, MessagesFormat(kind="messages")) == [Message("assistant", "a")]


@pytest.mark.parametrize("content", ["", " \n"])
def test_a_blank_answer_is_refused_and_a_blank_system_turn_is_not(content: str) -> None:
    turns = [{"role": "system", "content": content}, {"role": "assistant", "content": "a"}]
    assert len(to_messages({"messages": turns}, MessagesFormat(kind="messages"))) == 2
    turns[1]["content"] = content
    with pytest.raises(DataError, match="an assistant turn is blank"):
        to_messages({"messages": turns}, MessagesFormat(kind="messages"))


ALPACA = PromptCompletionFormat(kind="prompt-completion", prompt="{instruction}\n{input}", completion="{output}")


def test_a_null_is_empty_text_and_never_the_word_none() -> None:
    example = {"instruction": "Say hi", "input": None, "output": "hi"}
    assert to_messages(example, ALPACA) == [Message("user", "Say hi\n"), Message("assistant", "hi")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": None}, r"all columns of data\.format\.completion are null: output"),
        ({"instruction": None, "input": None}, r"data\.format\.prompt are null: instruction, input"),
        ({"output": ""}, "an assistant turn is blank"),
        ({"input": ["a"]}, r"column 'input' is neither text nor a number: \['a'\]"),
        ({"input": {"a": 1}}, "column 'input' is neither text nor a number"),
        ({"input": float("nan")}, "column 'input' is neither text nor a number: nan"),
    ],
)
def test_a_column_that_is_not_what_a_format_takes_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_messages({"instruction": "Say hi", "input": "", "output": "hi"} | changes, ALPACA)


def test_numbers_are_written_as_they_are() -> None:
    example = {"instruction": 7, "input": 0.5, "output": True}
    assert [message.content for message in to_messages(example, ALPACA)] == ["7\n0.5", "True"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{prompt", "expected '}' before end of string"),
        ("prompt}", "Single '}' encountered"),
        ("{prompt!q}", r"\{prompt!q\} is not a column's name in braces"),
        ("{prompt!r}", r"\{prompt!r\} is not"),
        ("{prompt:>3000000000}", r"\{prompt:>3000000000\} is not"),
        ("{prompt:{width}}", "is not a column's name"),
        ("{prompt.__class__}", r"\{prompt\.__class__\} is not"),
        ("{prompt[0]}", "is not a column's name"),
        ("{}", r"\{\} has no column's name"),
        ('{"answer": 1}', "is not a column's name in braces: write {{ and }}"),
    ],
)
def test_a_format_string_with_more_than_columns_is_refused_with_the_recipe(text: str, message: str) -> None:
    for key in ("prompt", "completion"):
        with pytest.raises(ValidationError, match=message):
            PromptCompletionFormat.model_validate(
                {"kind": "prompt-completion", "prompt": "p", "completion": "c"} | {key: text}
            )


def test_doubled_braces_are_text_and_names_may_have_spaces() -> None:
    form = PromptCompletionFormat(kind="prompt-completion", prompt='{{"q": {the question}}}', completion="{a-1}")
    assert form.columns == ["the question", "a-1"]
    assert to_messages({"the question": 1, "a-1": "x"}, form)[0].content == '{"q": 1}'
