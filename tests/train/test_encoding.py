from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftkit.data.chat_templates import TEMPLATES
from ftkit.data.conversations import Message
from ftkit.data.encoding import IGNORED, encode
from ftkit.data.tokenizers import _with_template, check_size, check_tokens, learn_tokenizer
from ftkit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TALK = [
    Message("system", "Be brief."),
    Message("user", "How many?"),
    Message("assistant", "SELECT 1"),
    Message("user", "And é?"),
    Message("assistant", "SELECT 'é'"),
]


GEMMAS_OWN = (
    "{{ bos_token }}{% for turn in messages %}"
    "{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ turn['role'] }}\n{{ turn['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
"""A template that takes nothing but user and assistant in turn, as Gemma's and others' do."""


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return learn_tokenizer(["SELECT name FROM table WHERE how many"], 300, request.param)


def trained_text(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, all_tokens: bool = False) -> str:
    labels = encode(tokenizer, messages, all_tokens=all_tokens).labels
    return str(tokenizer.decode(labels[labels != IGNORED]))


def test_the_assistants_words_and_their_end_are_trained_and_nothing_else(tokenizer: PreTrainedTokenizerBase) -> None:
    end = tokenizer.eos_token
    assert trained_text(tokenizer, TALK) == f"SELECT 1{end}SELECT 'é'{end}"


def test_all_tokens_but_the_first_can_be_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    document = encode(tokenizer, TALK, all_tokens=True)
    assert document.num_targets == len(document.tokens) - 1


def test_labels_are_the_next_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    document = encode(tokenizer, TALK, all_tokens=False)
    trained = document.labels[:-1] != IGNORED
    assert (document.labels[:-1][trained] == document.tokens[1:][trained]).all()
    assert document.labels[-1] == IGNORED


def test_a_conversation_without_an_answer_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="nothing to train on"):
        encode(tokenizer, [Message("user", "hi")], all_tokens=False)


def test_a_template_that_rewrites_earlier_turns_is_refused(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewriting = "{{ messages | length }}{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", rewriting)
    with pytest.raises(DataError, match="rewrites earlier turns"):
        encode(tokenizer, TALK, all_tokens=False)


def test_what_a_template_does_not_take_is_an_error_of_the_data() -> None:
    tokenizer = learn_tokenizer(["how many"], 300, "gemma")
    tokenizer.chat_template = GEMMAS_OWN
    user, assistant = Message("user", "hi"), Message("assistant", "ho")
    with pytest.raises(DataError, match=r"can't render the turns user, user, assistant: Conversation roles must alt"):
        encode(tokenizer, [user, user, assistant], all_tokens=False)
    with pytest.raises(DataError, match=r"can't render the turns assistant: Conversation roles"):
        encode(tokenizer, [assistant], all_tokens=False)
    tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(DataError, match=r"can't render the turns user: can only concatenate str"):
        encode(tokenizer, [user], all_tokens=False)


def test_a_conversation_that_starts_with_the_assistant_is_trained_whole_or_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    greeting = [Message("assistant", "SELECT 1"), *TALK[1:]]
    with pytest.raises(DataError, match=r"the conversation starts with the assistant"):
        encode(tokenizer, greeting, all_tokens=False)
    assert "SELECT 1" in trained_text(tokenizer, greeting, all_tokens=True)


def test_a_system_turn_is_never_trained_as_the_assistants_words() -> None:
    talk = [TALK[0], TALK[2], *TALK[1:]]
    chatml, gemma = (learn_tokenizer(["how many"], 300, name) for name in ("chatml", "gemma"))
    assert trained_text(chatml, talk).startswith("SELECT 1<|im_end|>")
    with pytest.raises(DataError, match="after the system turn comes the user, in whose turn its text is"):
        encode(gemma, talk, all_tokens=False)


def long_talk(num_turns: int) -> list[Message]:
    """A conversation in which some users speak twice, and turns quote each other and the template."""
    turns = [Message("system", "Be brief.")]
    for number in range(num_turns):
        turns += [Message("user", "Again?")] if number % 7 == 3 else []
        turns.append(Message("assistant" if number % 2 else "user", f"turn {number // 8} <end_of_turn>\n"))
    return turns


def test_the_turns_of_a_long_conversation_are_those_found_by_rendering_all_before_each(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = long_talk(90)
    found = encode(tokenizer, talk, all_tokens=False)
    monkeypatch.setattr("ftkit.data.encoding._WINDOW", len(talk))
    assert (found.labels == encode(tokenizer, talk, all_tokens=False).labels).all()
    assert found.num_targets > 90


def test_the_work_for_a_conversation_grows_with_its_turns_and_not_with_their_square(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = [0]

    def count(_: object, turns: list[object], **options: bool) -> str:
        rendered[0] += len(turns)
        return apply(turns, **options)

    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", count)
    encode(tokenizer, long_talk(400), all_tokens=False)
    assert rendered[0] < 400 * 50


def test_a_template_to_which_the_distance_matters_is_refused_in_long_conversations_only() -> None:
    tokenizer = learn_tokenizer(["how many"], 300, "chatml")
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ loop.index }} {{ turn['role'] }}: {{ turn['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ messages | length + 1 }} assistant: {% endif %}"
    )
    talk = [Message("assistant" if number % 2 else "user", "hi") for number in range(60)]
    assert trained_text(tokenizer, talk[:16]) == "hi<|im_end|>" * 8
    with pytest.raises(DataError, match="rewrites earlier turns"):
        encode(tokenizer, talk, all_tokens=False)


def test_a_token_beyond_the_models_vocabulary_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    said: list[str] = []
    check_size(tokenizer, len(tokenizer), said.append)
    assert said == []
    check_size(tokenizer, 260, said.append)
    assert "model.architecture.vocab_size is 260" in said[0]
    check_tokens(tokenizer, np.array([3, 259]), 260)
    with pytest.raises(DataError, match=r"token 260 \('.+'\) is beyond the model's vocabulary of 260"):
        check_tokens(tokenizer, np.array([3, 260]), 260)
    with pytest.raises(DataError, match=r"token 0 \('<pad>'\) is beyond"):
        check_size(tokenizer, 0, said.append)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_fast": False}, "the tokeni.er of 'org/model' lacks a fast version"),
        ({"pad_token_id": None, "eos_token": None}, "the tokeni.er of 'org/model' lacks a padding or end token"),
    ],
)
def test_a_tokenizer_that_packs_cannot_be_made_with_is_refused(changes: dict[str, object], message: str) -> None:
    whole = {"is_fast": True, "pad_token_id": 0, "eos_token": "<eos>", "chat_template": "{{ messages }}"}
    with pytest.raises(DataError, match=message):
        _with_template(SimpleNamespace(**(whole | changes)), "org/model", "model")
