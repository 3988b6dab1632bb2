from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftkit.data.chat_templates import TEMPLATES
from ftkit.data.conversations import Message
from ftkit.data.encoding import IGNORED, encode
from ftkit.data.tokenizers import learn_tokenizer
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


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ messages | length }}{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="rewrites earlier turns"):
        encode(tokenizer, TALK, all_tokens=False)
