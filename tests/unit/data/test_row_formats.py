"""Formats: parsing, detection, and rejection of unknown fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from ftkit.config.data import (
    DataSpec,
    Format,
    JinjaFormat,
    MessagesFormat,
    PromptCompletionFormat,
    TaskFormat,
    TextFormat,
    describe_format,
)
from ftkit.data.conversations import PICTURE, Conversation, Message, PlainText, ToolCall
from ftkit.data.preferences import Example, Preferences
from ftkit.data.row_formats import describe_roles, read_example, resolve_format, unused_columns
from ftkit.data.rows import Row
from ftkit.errors import DataError


def data(form: object = "auto", **fields: object) -> DataSpec:
    return DataSpec.model_validate({"source": {"kind": "files", "train": "/x"}, "format": form} | fields)


def read(columns: dict[str, Any], form: object = "auto", **fields: object) -> Example:
    spec = data(form, **fields)
    return read_example(columns, spec, resolve_format(spec.format, [Row(columns, "f.jsonl:1")]))


def turns_of(columns: dict[str, Any], form: object = "auto", **fields: object) -> list[tuple[str, str]]:
    example = read(columns, form, **fields)
    assert isinstance(example, Conversation)
    return [(message.role, message.content) for message in example.messages]


ASK, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PAIR = [("user", "q"), ("assistant", "a")]
QUESTION = {"kind": "prompt-completion", "prompt": "{context}\n{question}", "completion": "{sql}"}


@pytest.mark.parametrize(
    ("columns", "described", "turns"),
    [
        ({"messages": [ASK, ANSWER], "id": 7}, "openai turns in column 'messages'", PAIR),
        ({"dialog": [ASK, ANSWER]}, "openai turns in column 'dialog'", PAIR),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "sharegpt turns in column 'conversations'",
            PAIR,
        ),
        ({"instruction": "q", "input": "x", "output": "a", "text": "all"}, "alpaca", [("user", "q\n\nx"), PAIR[1]]),
        ({"instruction": "q", "input": None, "output": "a"}, "alpaca", PAIR),
        (
            {"instruction": "q", "output": "a", "system": "s", "history": [["q0", "a0"]]},
            "alpaca",
            [("system", "s"), ("user", "q0"), ("assistant", "a0"), *PAIR],
        ),
        (
            {"instruction": "q", "context": "c", "response": "a", "category": "qa"},
            "dolly",
            [("user", "q\n\nc"), PAIR[1]],
        ),
        ({"prompt": "q", "completion": "a"}, "prompt and completion from columns prompt, completion", PAIR),
        (
            {"": "0", "Unnamed: 0": 1, "prompt": "q", "completion": "a"},
            "prompt and completion from columns prompt, completion",
            PAIR,
        ),
        ({"question": "q", "answer": "a"}, "prompt and completion from columns question, answer", PAIR),
        ({"prompt": [ASK], "completion": [ANSWER]}, "prompt and completion from columns prompt, completion", PAIR),
    ],
)
def test_a_format_is_detected_from_rows_and_reported(
    columns: dict[str, Any], described: str, turns: list[tuple[str, str]]
) -> None:
    assert describe_format(resolve_format(data().format, [Row(columns, "f:1")])) == described
    assert turns_of(columns) == turns


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("user", "assistant"), ""),
        (("USER", "Assistant"), ""),
        (("human", "bot"), "; 'human' is user, 'bot' is assistant"),
        (("user", "robot"), ""),
    ],
)
def test_roles_with_other_names_are_reported(names: tuple[str, str], said: str) -> None:
    turns = [{"role": name, "content": "x"} for name in names]
    for column in (turns, json.dumps(turns)):
        assert describe_roles([Row({"messages": column}, "f:1")], MessagesFormat()) == said
    assert describe_roles([Row({"messages": "x"}, "f:1"), Row({}, "f:2")], MessagesFormat()) == ""
    assert describe_roles([Row({"text": "x"}, "f:1")], TextFormat()) == ""


@pytest.mark.parametrize(
    ("written", "roles"),
    [
        (["bot"], ["assistant"]),
        (["model", "Human"], ["assistant", "user"]),
        (["gpt", "assistant"], ["assistant"]),
        (["function-call", "ipython"], ["assistant", "tool"]),
    ],
)
def test_trained_roles_may_be_given_as_the_data_or_the_template_names_them(
    written: list[str], roles: list[str]
) -> None:
    assert data(train_on=written).train_on == roles


def test_an_unknown_role_is_refused_with_the_closest_one() -> None:
    with pytest.raises(DataError, match="a turn's role is 'assistent'") as caught:
        read({"messages": [ASK, {"role": "assistent", "content": "a"}]})
    assert "did you mean 'assistant'?" in caught.value.fix
    with pytest.raises(DataError, match="a turn's role is 'narrator'") as caught:
        read({"messages": [ASK, {"role": "narrator", "content": "a"}]})
    assert "the roles are system, developer, user, assistant, tool" in caught.value.fix
    with pytest.raises(ValidationError, match="or a list of roles"):
        data(train_on=["robot"])


def test_plain_text_is_detected_and_stays_a_text() -> None:
    assert read({"text": "Once upon\n", "url": "x"}) == PlainText("Once upon\n")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": 1}], r"f:1: no known format has the columns a"),
        ([{}], r"no known format has the columns \(none\)"),
        ([], "no rows to detect the format from"),
        ([{"input_ids": [1, 2], "labels": [1, 2]}], r"f:1: .* input_ids, labels"),
        ([{"conversations": [{"from": "user", "text": "q"}]}], r"f:1: column 'conversations' is not a list of turns"),
        ([{"dialog": [{"from": "user", "text": "q"}]}], r"columns dialog\n.*\nset how a row becomes a conversation"),
        ([{"messages": {"role": ["user"], "content": ["q"]}}], r"column 'messages' is not a list of turns in most"),
        ([{"messages": []}, {"messages": None}, {"messages": [ASK, ANSWER]}], r"not a list .*, such as \[\]\n"),
        ([{"messages": []}, {"messages": []}, {"messages": [ASK, ANSWER]}], r"column 'messages' is an empty list"),
        ([{"train": [{"messages": [ASK]}]}], r"f:1: .* train\n"),
    ],
)
def test_rows_of_unknown_format_are_rejected(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_format(data().format, [Row(columns, "f:1") for columns in rows])


def test_the_most_common_schema_of_the_first_rows_is_the_format() -> None:
    rows = [{"prompt": "q", "completion": "a"}, {"text": "a"}, {"text": "b", "id": 1}, {"text": "c"}]
    form = resolve_format(data().format, [Row(columns, f"f:{n}") for n, columns in enumerate(rows)])
    assert form == TextFormat()
    broken = [{"messages": value} for value in ([ASK, ANSWER], 3, [ASK, ANSWER])]
    form = resolve_format(data().format, [Row(columns, f"f:{n}") for n, columns in enumerate(broken)])
    assert form == MessagesFormat()


@pytest.mark.parametrize("form", ["auto", "alpaca", "dolly", "text", "messages", "sharegpt", "prompt-completion"])
def test_a_format_can_be_given_by_name(form: str) -> None:
    assert describe_format(data(form).format)
    assert data("sharegpt").format == MessagesFormat(style="sharegpt", column="conversations")


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": [ASK, ANSWER], "rating": 3},
        {"text": "t", "label": "x"},
        {"instruction": "q", "output": "a", "constraints": "none"},
        {"prompt": "q", "completion": "a", "thoughts": "t"},
    ],
)
def test_a_column_that_would_be_dropped_is_rejected_unless_ignored(columns: dict[str, Any]) -> None:
    (name,) = set(columns) & {"rating", "label", "constraints", "thoughts"}
    with pytest.raises(DataError, match=f"columns that the format does not know: {name}") as caught:
        read(columns)
    assert f"data.ignore_columns=[{name}]" in caught.value.fix
    assert read(columns, ignore_columns=[name])
    assert read(columns | {name: None})


@pytest.mark.parametrize(
    ("columns", "form", "missing", "advice"),
    [
        ({"chosen": "a", "rejected": "b"}, {"kind": "preferences", "chosen": "chosn"}, "chosn", "mean 'chosen' by"),
        ({"talk": [ASK, ANSWER]}, {"kind": "messages", "column": "talks"}, "talks", "did you mean 'talk' by 'talks'?"),
        ({"q": "q", "answer": "a"}, {"kind": "prompt-completion", "prompt": "{q}", "completion": "{anser}"}, "anser",
         "did you mean 'answer' by 'anser'?"),
        ({"instruction": "q", "ouput": "a"}, "alpaca", "output", "did you mean 'ouput' by 'output'?"),
        ({"talk": {"turns": [ASK, ANSWER]}}, {"kind": "messages", "column": "talk.turns"}, "talk.turns", "data.task"),
    ],
)  # fmt: skip
def test_a_column_that_a_row_lacks_is_named_with_the_similar_one(
    columns: dict[str, Any], form: object, missing: str, advice: str
) -> None:
    with pytest.raises(DataError, match=f"no column '{missing}': the row has ") as caught:
        read(columns, form)
    assert advice in caught.value.fix
    assert "ignore_columns" not in caught.value.fix


def test_an_unknown_column_is_suggested_for_the_optional_one_that_it_resembles() -> None:
    columns = {"promt": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match="does not know: promt") as caught:
        read(columns)
    assert "did you mean 'promt' by 'prompt'?" in caught.value.fix


def test_metadata_and_unselected_columns_are_skipped_and_can_be_shown() -> None:
    columns = {"context": "c", "question": "q", "sql": "s", "rating": 1, "id": 2}
    form = data(QUESTION).format
    assert turns_of(columns, QUESTION) == [("user", "c\nq"), ("assistant", "s")]
    assert unused_columns(columns, DataSpec.model_validate({"source": "./x.jsonl"}), form) == ["rating", "id"]
    assert unused_columns(columns, DataSpec.model_validate({"source": "./x.jsonl"}), TaskFormat()) == []


# --- Turns ---------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}


def messages_of(*turns: object, **columns: object) -> tuple[Message, ...]:
    example = read({"messages": list(turns)} | columns, "messages")
    assert isinstance(example, Conversation)
    return example.messages


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CALL | {"function": {"name": "find", "arguments": {"q": "x"}}},
        {"id": "c1", "name": "find", "arguments": {"q": "x"}},
    ],
)
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]], [json.dumps(TOOL)]])
def test_tool_calls_and_schemas_are_read_in_all_notations(call: object, tools: object) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    result = {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "find"}
    example = read({"messages": [ASK, turn, result, ANSWER], "tools": tools}, "messages")
    assert isinstance(example, Conversation)
    assert example.tools == (TOOL,)
    assert example.messages[1] == Message("assistant", "", tool_calls=(ToolCall("find", {"q": "x"}, "c1"),) * 2)
    assert example.messages[2] == Message("tool", "r", name="find", tool_call_id="c1")


def test_the_older_function_call_is_a_tool_call() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{}"}}
    found = messages_of(ASK, call, {"role": "function", "name": "find", "content": "r"}, functions=[TOOL["function"]])
    assert found[1].tool_calls == (ToolCall("find", {}),)
    assert found[2].role == "tool"


def test_parts_of_text_reasoning_and_weights_are_read() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    thought = ANSWER | {"reasoning_content": "hm", "weight": 0}
    found = messages_of(parts, thought, ASK, ANSWER | {"train": True, "thinking": "hm"})
    assert [message.content for message in found] == ["ab", "a", "q", "a"]
    assert [message.trained for message in found] == [None, False, None, True]
    assert [message.reasoning for message in found] == [None, "hm", None, "hm"]


@pytest.mark.parametrize("kind", ["input_text", "output_text"])
def test_text_parts_of_openais_responses_and_names_of_roles_in_any_case_are_read(kind: str) -> None:
    found = messages_of({"role": "User", "content": [{"type": kind, "text": "q"}]}, ANSWER | {"role": "Assistant"})
    assert found == (Message("user", "q"), Message("assistant", "a"))


def test_null_keys_are_ignored_because_tables_give_every_turn_all_keys() -> None:
    empty = {"tool_calls": None, "name": "", "weight": None, "audio": [], "refusal": None}
    assert messages_of(ASK, ANSWER | empty) == (Message("user", "q"), Message("assistant", "a"))


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "robot", "content": "x"}, r"turn 2: a turn's role is 'robot'"),
        ({"role": "user"}, "turn 2: the content of a turn of user is not text: None"),
        (
            {"role": "user", "content": [{"type": "input_audio"}, {"type": "text", "text": "t"}]},
            r"turn 2: .*\n.*input_audio",
        ),
        ("x", "turn 2: .*: x"),
        (ANSWER | {"mood": "good"}, "turn 2: a turn has unknown keys: mood"),
        ({"from": "gpt", "value": "a"}, "turn 2: a turn has unknown keys: from, value"),
        ({"role": "assistant", "content": " \n"}, "turn 2: an assistant turn is blank"),
        (ANSWER | {"weight": 0.5}, "turn 2: a turn's weight is 0.5"),
        (ANSWER | {"weight": 0, "train": True}, "turn 2: a turn's weight is 0 and True"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "turn 2: the content .* is not text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "u"}]},
            "turn 2: a picture, and data.pictures",
        ),
        (ASK | {"reasoning_content": "hm"}, "turn 2: a turn of user has reasoning or tool calls"),
        (ANSWER | {"reasoning_content": 3}, "turn 2: reasoning_content is not text"),
        (ANSWER | {"tool_calls": [{"function": {}}]}, "turn 2: a tool call has no name"),
        (ANSWER | {"tool_calls": [CALL | {"type": "code"}]}, "turn 2: can't parse a tool call"),
        (
            ANSWER | {"tool_calls": [{"name": "f", "arguments": "{"}]},
            "turn 2: can't read the arguments of the call of f as JSON",
        ),
        (
            ANSWER | {"tool_calls": [{"name": "f", "arguments": [1]}]},
            "turn 2: the arguments of the call of f are not an",
        ),
        (ANSWER | {"tool_calls": ["f"]}, "turn 2: a tool call is not a mapping"),
        (ANSWER | {"tool_calls": 3}, "turn 2: tool_calls is not a list"),
    ],
)
def test_a_turn_with_unknown_fields_is_rejected_with_its_number(turn: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        messages_of(ASK, turn)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "function"}], "a tool has no schema with a name"),
        ([{"name": "f", "parameters": "none"}], "the parameters of tool f are not a JSON schema"),
        ("[", "can't read tools as JSON"),
        (3, "tools is not a list"),
        ([TOOL | {"function": {"name": "other"}}], "turn 2: a tool is called that is not in tools: find"),
    ],
)
def test_missing_or_invalid_schemas_are_rejected(tools: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        messages_of(ASK, {"role": "assistant", "tool_calls": [CALL]}, tools=tools)


@pytest.mark.parametrize("turns", [None, [], "text", {}])
def test_a_column_without_a_list_of_turns_is_rejected(turns: object) -> None:
    with pytest.raises(DataError, match="column 'messages'"):
        read({"messages": turns}, "messages")


def test_ignored_keys_of_turns_are_dropped() -> None:
    turns = [ASK, ANSWER | {"mood": "good"}]
    assert turns_of({"messages": turns}, "messages", ignore_columns=["mood"]) == PAIR


@pytest.mark.parametrize(
    ("names", "role"),
    [
        (("human", "user", "Human", "prompter"), "user"),
        (("gpt", "assistant", "model", "chatgpt", "bard", "CHATBOT", "bot", "ai"), "assistant"),
        (("tool", "observation", "function_response", "function-response", "tool_response"), "tool"),
        (("system",), "system"),
    ],
)
def test_all_role_names_of_sharegpt_are_known(names: tuple[str, ...], role: str) -> None:
    turns = [{"from": name, "value": "x"} for name in names]
    assert turns_of({"conversations": turns}, "sharegpt") == [(role, "x")] * len(names)


@pytest.mark.parametrize(
    "value",
    [
        '{"name": "find", "arguments": {"q": "x"}}',
        '[{"name": "find", "arguments": "{\\"q\\": \\"x\\"}"}]',
        """{"name": "find", "arguments": '{"q": "x"}'}""",
    ],
)
@pytest.mark.parametrize("role", ["function_call", "function-call", "tool_call"])
def test_function_calls_of_sharegpt_become_tool_calls(role: str, value: str) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": role, "value": value}]
    example = read({"conversations": turns, "tools": json.dumps([TOOL["function"]]), "system": "s"}, "sharegpt")
    assert isinstance(example, Conversation)
    assert [message.role for message in example.messages] == ["system", "user", "assistant"]
    assert example.messages[2].tool_calls == (ToolCall("find", {"q": "x"}),)


def test_wrapping_of_tool_results_is_left_to_the_template() -> None:
    for value in ("r", "<tool_response>\nr\n</tool_response>\n"):
        turns = [{"from": "human", "value": "q"}, {"from": "tool", "value": value}]
        assert turns_of({"conversations": turns}, "sharegpt")[1] == ("tool", "r")
    with pytest.raises(DataError, match=r"turn 1: .*JSON"):
        turns_of({"conversations": [{"from": "function_call", "value": "find(x)"}]}, "sharegpt")


# --- Columns filled into texts -------------------------------------------------------------------


def test_columns_fill_system_prompt_and_completion() -> None:
    columns = {"context": "CREATE TABLE t (a)", "question": "How many {rows}?", "sql": "SELECT 1", "other": 3}
    assert turns_of(columns, QUESTION | {"system": "Table: {context}"}) == [
        ("system", "Table: CREATE TABLE t (a)"),
        ("user", "CREATE TABLE t (a)\nHow many {rows}?"),
        ("assistant", "SELECT 1"),
    ]


def test_jinja_fills_columns_with_conditions() -> None:
    form = {"kind": "jinja", "prompt": "{% if c %}{{ c }}: {% endif %}{{ q | trim }}\n", "completion": "{{ a }}"}
    assert data(form).format.columns == ["c", "q", "a"]
    assert turns_of({"c": "", "q": " hi {{ c }}", "a": 1, "d": 2}, form) == [
        ("user", "hi {{ c }}\n"),
        ("assistant", "1"),
    ]
    with pytest.raises(DataError, match=r"data\.format\.prompt .*'q'"):
        turns_of({"c": "x", "a": 1}, form)
    for text, message in (("{{ a", "not a Jinja template: line 1"), ("plain", "this Jinja template uses no column")):
        with pytest.raises(ValidationError, match=message):
            JinjaFormat(prompt=text, completion="{{ a }}")


def test_a_missing_column_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(DataError) as caught:
        read({"context": "", "sql": ""}, QUESTION)
    assert "question" in caught.value.what
    assert "context, sql" in caught.value.what
    with pytest.raises(DataError, match="no column 'response'"):
        read({"instruction": "q"}, "dolly")


FILLED = {"kind": "prompt-completion", "prompt": "{instruction}\n{input}", "completion": "{output}"}


def test_a_null_is_empty_text_and_never_the_word_none() -> None:
    columns = {"instruction": "Say hi", "input": None, "output": "hi"}
    assert turns_of(columns, FILLED) == [("user", "Say hi\n"), ("assistant", "hi")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": None}, r"all columns of data\.format\.completion are null: output"),
        ({"instruction": None, "input": None}, r"data\.format\.prompt are null: instruction, input"),
        ({"output": ""}, "an assistant turn is blank"),
        ({"input": ["a"]}, r"column 'input' is neither text nor a number: \['a'\]\n.*\nuse \{\{ input \| join \}\}"),
        ({"input": {"a": 1}}, r"column 'input' is neither text nor a number.*\n.*\nuse \{\{ input \| tojson \}\}"),
        ({"input": float("nan")}, "column 'input' is neither text nor a number: nan"),
    ],
)
def test_a_column_of_the_wrong_type_is_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read({"instruction": "Say hi", "input": "", "output": "hi"} | changes, FILLED)


def test_numbers_are_formatted_unchanged() -> None:
    columns = {"instruction": 7, "input": 0.5, "output": 1}
    assert turns_of(columns, FILLED) == [("user", "7\n0.5"), ("assistant", "1")]
    with pytest.raises(DataError, match=r"'output' .*: True"):
        turns_of({**columns, "output": True}, FILLED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{prompt", "expected '}' before end of string"),
        ("prompt}", "Single '}' encountered"),
        ("{prompt!q}", r"\{prompt!q\} is not a column name in braces"),
        ("{prompt:>3000000000}", r"\{prompt:>3000000000\} is not"),
        ("{prompt:{width}}", "is not a column name"),
        ("{prompt.__class__}", r"\{prompt\.__class__\} is not"),
        ("{prompt[0]}", "is not a column name"),
        ("{}", r"\{\} is not"),
        ('{"answer": 1}', "is not a column name in braces: write {{ and }}"),
    ],
)
def test_a_format_string_with_more_than_columns_is_rejected_with_the_recipe(text: str, message: str) -> None:
    for key in ("prompt", "completion", "system"):
        with pytest.raises(ValidationError, match=message):
            PromptCompletionFormat.model_validate({"kind": "prompt-completion", key: text})


def test_doubled_braces_are_text_and_names_may_have_spaces() -> None:
    form = {"kind": "prompt-completion", "prompt": '{{"q": {the question}}}', "completion": "{a-1}"}
    assert data(form).format.columns == ["the question", "a-1"]
    assert turns_of({"the question": 1, "a-1": "x"}, form)[0] == ("user", '{"q": 1}')


@pytest.mark.parametrize("template", ["jinja2", "gemmma", "chat.jinja"])
def test_an_invalid_chat_template_is_rejected(template: str) -> None:
    with pytest.raises(ValidationError, match="model, chatml"):
        data(chat_template=template)


# --- The reference systems' datasets ------------------------------------------------------------

REFERENCE_ROWS: list[tuple[object, dict[str, Any], list[str]]] = [
    (
        {"kind": "prompt-completion", "prompt": "{sql_context}\n{sql_prompt}", "completion": "{sql}"},
        {"id": 5097, "domain": "forestry", "domain_description": "d", "sql_complexity": "single join",
         "sql_task_type": "analytics", "sql_prompt": "How much?", "sql_context": "CREATE TABLE t (a INT);",
         "sql": "SELECT 1;", "sql_explanation": "e", "sql_complexity_description": "c",
         "sql_task_type_description": "t"},
        ["user", "assistant"],
    ),
    (
        "auto",
        {"instruction": "When?", "context": "", "response": "Then.", "category": "closed_qa"},
        ["user", "assistant"],
    ),
    (
        "auto",
        {"conversations": [
            {"from": "system", "value": "You can call tools."}, {"from": "human", "value": "Weather?"},
            {"from": "gpt", "value": '<tool_call>\n{"name": "w", "arguments": {}}\n</tool_call>'},
            {"from": "tool", "value": "<tool_response>\n12\n</tool_response>"}, {"from": "gpt", "value": "12 C"}]},
        ["system", "user", "assistant", "tool", "assistant"],
    ),
    (
        "auto",
        {"conversations": [
            {"from": "human", "value": "Weather?"}, {"from": "function_call", "value": '{"name": "w"}'},
            {"from": "observation", "value": '{"t": 12}'}, {"from": "gpt", "value": "12 C"}],
         "tools": '[{"name": "w", "description": "Weather", "parameters": {"c": {"type": "str"}}}]', "id": 1},
        ["user", "assistant", "tool", "assistant"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "columns", "roles"), REFERENCE_ROWS, ids=["R1", "R2", "R3", "R4"])
def test_rows_of_the_reference_systems_data_are_read(form: Format, columns: dict[str, Any], roles: list[str]) -> None:
    assert [role for role, _ in turns_of(columns, form)] == roles


@pytest.mark.parametrize("texts", [{"completion": "answer"}, {"prompt": "question"}, {"completion": "Yes, it is."}])
def test_a_columns_name_without_braces_is_refused(texts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"as in '\{answer\}'"):
        PromptCompletionFormat.model_validate(texts)


def test_a_prompt_may_be_the_same_for_each_example() -> None:
    assert PromptCompletionFormat(prompt="Write a poem.", completion="{poem}").columns == ["poem"]


def pictures_of(columns: dict[str, Any], **fields: object) -> list[tuple[str, tuple[object, ...]]]:
    example = read(columns, pictures=True, **fields)
    assert isinstance(example, Conversation)
    return [(message.content.replace(PICTURE, "#"), message.pictures) for message in example.messages]


PART = {"type": "image"}


def human(text: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": text}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("columns", "content", "pictures"),
    [
        ({"conversations": human("<image>\nq"), "image": "a.png"}, "#q", ("a.png",)),
        ({"conversations": human("q\n<image>"), "image": "a.png"}, "q#", ("a.png",)),
        ({"conversations": human("q <image> or <image>?"), "images": ["a", "b"]}, "q # or #?", ("a", "b")),
        ({"conversations": human("q"), "images": '["a", "b"]'}, "##q", ("a", "b")),
        ({"question": "q", "answer": "a", "image": {"bytes": b"x", "path": "p"}}, "#q", (b"x",)),
        ({"question": "q", "answer": "a", "image": {"path": "p"}}, "#q", ("p",)),
        ({"question": "q", "answer": "a", "image": None}, "q", ()),
        ({"messages": [{"role": "user", "content": [PART, {"type": "text", "text": "<image>"}, PART]}, ANSWER],
          "images": ["a", {"bytes": b"b"}]}, "#<image>#", ("a", b"b")),
        ({"messages": [{"role": "user", "content": [
            PART | {"image": "a"}, PART | {"url": "b"}, PART | {"path": "c"}, PART | {"base64": "ZA=="},
            PART | {"bytes": b"e", "path": "f"}, PART | {"image": {"bytes": b"g"}},
            {"type": "image_url", "image_url": "h"}, {"type": "image_url", "image_url": {"url": "i", "detail": "low"}},
            {"type": "input_image", "image_url": "j"}]}, ANSWER]},
         "#########", ("a", "b", "c", "data:;base64,ZA==", b"e", b"g", "h", "i", "j")),
    ],
)  # fmt: skip
def test_pictures_stand_where_parts_and_marks_have_them(
    columns: dict[str, Any], content: str, pictures: tuple[object, ...]
) -> None:
    assert pictures_of(columns) == [(content, pictures), ("a", ())]


def test_pictures_of_both_sides_of_a_pair_are_those_of_the_row() -> None:
    columns = {"prompt": "<image>\nq", "chosen": "a", "rejected": "b", "images": ["p"]}
    example = read(columns, pictures=True)
    assert isinstance(example, Preferences)
    for side in (example.chosen, *example.rejected):
        assert [message.pictures for message in side.messages] == [("p",), ()]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"conversations": human("<image> q"), "images": ["a", "b"]}, "1 mark .* and 2 pictures in column 'images'"),
        ({"conversations": human("<image> q")}, "1 mark .* and 0 pictures"),
        ({"messages": [{"role": "user", "content": [PART]}, ANSWER], "image": ["a", "b"]}, "1 mark .* 2 pictures"),
        (
            {"messages": [{"role": "user", "content": [PART | {"path": "c"}]}, ANSWER], "image": "a"},
            "0 marks .* 1 pict",
        ),
        ({"messages": [{"role": "user", "content": [PART | {"min_pixels": 4}]}, ANSWER]}, "unknown keys: min_pixels"),
        ({"messages": [ASK, ANSWER], "images": ["a"], "image": "b"}, "both 'images' and 'image'"),
        ({"question": "\ufdd1", "answer": "a", "image": "a"}, r"U\+FDD1"),
        ({"text": "t", "image": "a"}, "column 'image' has pictures, and the row is a text"),
    ],
)
def test_pictures_that_have_no_place_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(columns, pictures=True)


def test_pictures_for_a_model_of_text_are_refused_with_the_key_that_turns_them_on() -> None:
    for columns in (
        {"messages": [{"role": "user", "content": [PART | {"path": "a"}]}, ANSWER]},
        {"messages": [ASK, ANSWER], "images": ["a"]},
    ):
        with pytest.raises(DataError) as caught:
            read(columns)
        assert "data.pictures=true" in caught.value.fix
