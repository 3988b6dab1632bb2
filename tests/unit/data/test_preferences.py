from __future__ import annotations

from typing import Any

import pytest

from ftkit.config.data import DataSpec, PreferencesFormat
from ftkit.data.preferences import Preferences
from ftkit.data.row_formats import check_format, read_example, resolve_format
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


def test_the_objective_and_the_format_must_agree() -> None:
    data = DataSpec.model_validate({"source": "./x.jsonl"})
    check_format(data, PreferencesFormat(), "dpo")
    with pytest.raises(DataError, match=r"(?s)preference data.*training.objective=dpo.*column: chosen"):
        check_format(data, PreferencesFormat(), "next_token")
    text = resolve_format(data.format, [Row({"text": "a"}, "x:1")])
    with pytest.raises(DataError, match="the rows have no pairs: plain text"):
        check_format(data, text, "simpo")
    for key, value in (("too_long", "truncate"), ("train_on", "all")):
        with pytest.raises(DataError, match=f"data.{key} is '{value}', but the rows are pairs"):
            check_format(data.model_copy(update={key: value}), PreferencesFormat(), "dpo")
