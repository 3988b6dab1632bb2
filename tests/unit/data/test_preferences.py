from __future__ import annotations

from typing import Any

import pytest

from ftkit.config.data import DataSpec, MessagesFormat, PreferencesFormat, label_of
from ftkit.data.conversations import Conversation
from ftkit.data.preferences import Preferences
from ftkit.data.row_formats import check_format, read_example, read_label, resolve_format
from ftkit.data.rows import Row
from ftkit.errors import DataError

SYSTEM, ASK = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
EARLIER = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
HH = "\n\nHuman: q\n\nAssistant:"


def read(columns: dict[str, Any], **fields: object) -> Preferences:
    data = DataSpec.model_validate({"source": "./x.jsonl"} | fields)
    form = resolve_format(data.format, [Row(columns, "x.jsonl:1")])
    found = read_example(columns, data, form)
    assert isinstance(found, Preferences)
    return found


def sides(columns: dict[str, Any], **fields: object) -> list[tuple[str, str]]:
    """Return each side as its prompt and its completion, with roles as initials."""
    return [
        tuple(
            " ".join(f"{turn.role[0]}:{turn.content}" for turn in part)
            for part in (each.messages[: each.num_prompt], each.messages[each.num_prompt :])
        )
        for each in read(columns, **fields).sides
    ]  # type: ignore[return-value]


PAIR = [("u:q", "a:good"), ("u:q", "a:bad")]


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "q", "chosen": GOOD, "rejected": BAD},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "q", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "score_chosen": 8.5, "score_rejected": 8.5},
        {"chosen": f"{HH} good", "rejected": f"{HH} bad"},
        {"chosen": f"{HH} good".replace("\n", "\r\n"), "rejected": f"{HH} bad".replace("\n", "\r\n")},
        {
            "chosen": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}],
            "rejected": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "bad"}],
        },
    ],
)
def test_pairs_are_detected_and_read_as_a_prompt_and_two_completions(columns: dict[str, Any]) -> None:
    assert sides(columns) == PAIR


def test_shared_turns_and_a_system_column_are_the_prompt_which_is_never_trained() -> None:
    columns = {"system": "s", "chosen": [*EARLIER, ASK, GOOD], "rejected": [*EARLIER, ASK, BAD]}
    assert sides(columns) == [("s:s u:a a:b u:q", "a:good"), ("s:s u:a a:b u:q", "a:bad")]
    for side in read(columns).sides:
        assert [turn.trained for turn in side.messages] == [False] * 4 + [None]


def test_each_of_several_rejected_completions_makes_a_pair() -> None:
    for rejected in (["bad", "worse"], [[BAD], [BAD | {"content": "worse"}]]):
        found = sides({"prompt": "q", "chosen": "good", "rejected": rejected})
        assert [completion for _, completion in found] == ["a:good", "a:bad", "a:good", "a:worse"]


def test_other_columns_can_be_given() -> None:
    columns = {"question": "q", "better": "good", "worse": "bad"}
    form = {"kind": "preferences", "prompt": "question", "chosen": "better", "rejected": "worse"}
    assert sides(columns, format=form) == PAIR


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "good \n"}, "are the same"),
        ({"prompt": "q", "chosen": "good", "rejected": " "}, "blank"),
        ({"prompt": "q", "chosen": "good", "rejected": []}, "neither text nor a list of turns"),
        ({"prompt": "q", "chosen": "good", "rejected": None}, "neither text nor a list of turns"),
        ({"prompt": "", "chosen": "good", "rejected": "bad"}, "not completions of the same prompt"),
        ({"chosen": [ASK, GOOD], "rejected": [SYSTEM, BAD]}, "not completions of the same prompt"),
        ({"chosen": [*EARLIER, ASK, GOOD], "rejected": [*EARLIER, SYSTEM, BAD]}, "not completions of the same prompt"),
        ({"prompt": "other", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "is not the end of the turns"),
        (
            {"prompt": "q", "chosen": "good", "rejected": "bad", "score_chosen": 1, "score_rejected": 2},
            r"(?s)lower score: 1.*one 2.*swapped",
        ),
        ({"prompt": "q", "chosen": "good", "rejected": "bad", "mood": "x"}, "columns that the format does not know"),
    ],
)
def test_rows_that_are_no_pairs_are_rejected(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(columns)


@pytest.mark.parametrize("label", [True, False, 1, 0, 1.0, "True", "0"])
@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "q", "completion": "good"},
        {"prompt": [ASK], "completion": [GOOD]},
        {"question": "q", "answer": "good"},
        {"messages": [ASK, GOOD]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}]},
    ],
)
def test_completions_with_a_label_are_detected(columns: dict[str, Any], label: object) -> None:
    data = DataSpec.model_validate({"source": "./x.jsonl"})
    row = columns | {"label": label}
    form = resolve_format(data.format, [Row(row, "x:1")])
    assert label_of(form) == "label"
    assert read_label(row, "label") == (label in {True, "True"})
    found = read_example(row, data, form)
    assert isinstance(found, Conversation)
    assert [(turn.role, turn.content) for turn in found.messages] == [("user", "q"), ("assistant", "good")]
    check_format(data, form, "kto")
    with pytest.raises(DataError, match=r"(?s)preference data.*objective=kto.*'select\(\.label\) \| del\(\.label\)'"):
        check_format(data, form, "next_token")
    with pytest.raises(DataError, match="the rows have no pairs"):
        check_format(data, form, "dpo")
    ignored = data.model_copy(update={"ignore_columns": ("label",)})
    assert label_of(resolve_format(data.format, [Row(row, "x:1")], ignored.ignore_columns)) is None


def test_a_label_is_true_or_false_and_other_columns_can_be_given() -> None:
    row = {"messages": [ASK, GOOD], "label": "good"}
    assert label_of(resolve_format(DataSpec.model_validate({"source": "./x"}).format, [Row(row, "x:1")])) is None
    with pytest.raises(DataError, match="column 'label' is not a label: good"):
        read_label(row, "label")
    form = MessagesFormat(label="liked")
    assert form.columns == ["messages", "tools", "liked"]
    assert read_label({"liked": 0}, "liked") is False


def test_the_objective_and_the_format_must_agree() -> None:
    data = DataSpec.model_validate({"source": "./x.jsonl"})
    check_format(data, PreferencesFormat(), "kto")
    with pytest.raises(DataError, match=r"(?s)kto, but the rows have no label: openai.*kind: messages, label: NAME"):
        check_format(data, MessagesFormat(), "kto")
    check_format(data, PreferencesFormat(), "dpo")
    with pytest.raises(DataError, match=r"(?s)preference data.*training.objective=dpo.*column: chosen"):
        check_format(data, PreferencesFormat(), "next_token")
    text = resolve_format(data.format, [Row({"text": "a"}, "x:1")])
    with pytest.raises(DataError, match="the rows have no pairs: plain text"):
        check_format(data, text, "simpo")
    for key, value in (("too_long", "truncate"), ("train_on", "all")):
        with pytest.raises(DataError, match=f"data.{key} is '{value}', but the rows are pairs"):
            check_format(data.model_copy(update={key: value}), PreferencesFormat(), "dpo")
