"""Encoding of rows: which tokens are trained, which stay text, and which rows are rejected, for several templates."""

from __future__ import annotations

import json
import pickle
import re
from base64 import b64encode
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ftkit.config.data import DataSpec
from ftkit.data import rendering
from ftkit.data.conversations import Conversation, read_turns
from ftkit.data.encoding import RowEncoder, find_end_tokens
from ftkit.data.packing import IGNORED, Document, shorten
from ftkit.data.row_formats import resolve_format
from ftkit.data.rows import Row
from ftkit.data.tokenizer_files import TEMPLATES
from ftkit.data.tokenizers import (
    _set_template,
    _with_padding,
    check_size,
    check_tokens,
    learn_tokenizer,
    load_tokenizer,
)
from ftkit.errors import DataError
from ftkit.models.architecture import ModelSpec
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase


def turns(*contents: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in contents]


TALK = turns(
    ("system", "Be brief."),
    ("user", "How many?"),
    ("assistant", "SELECT 1"),
    ("user", "And é?"),
    ("assistant", "SELECT 'é'"),
)
TEKKEN_SPECIALS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
ALTERNATING = (
    "{{ bos_token }}{% for turn in messages %}"
    "{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ turn['role'] }}\n{{ turn['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
"""A template that accepts only alternating user and assistant turns, like Gemma's."""


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return learn_tokenizer(["SELECT name FROM table WHERE how many"], 300, request.param)


@pytest.fixture(scope="module")
def chatml() -> PreTrainedTokenizerBase:
    return learn_tokenizer(["SELECT name FROM table WHERE how many"], 300, "chatml")


def encoder(tokenizer: Any, columns: dict[str, Any], **fields: object) -> RowEncoder:
    data = DataSpec.model_validate({"source": {"kind": "files", "train": "/x"}} | fields)
    form = resolve_format(data.format, [Row(columns, "f:1")])
    return RowEncoder.of(tokenizer, data, form, len(tokenizer))


def encode(tokenizer: Any, talk: list[dict[str, Any]], **fields: object) -> list[Document]:
    columns = {"messages": talk}
    (result,) = encoder(tokenizer, columns, **fields).encode([Row(columns, "f:1")])
    if isinstance(result, DataError):
        raise result
    return result


def trained_texts(tokenizer: Any, talk: list[dict[str, Any]], **fields: object) -> list[str]:
    documents = encode(tokenizer, talk, **fields)
    return [str(tokenizer.decode(document.labels[document.labels != IGNORED])) for document in documents]


def with_template(tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    return tokenizer


@pytest.mark.parametrize(
    ("template", "what", "fix"),
    [
        ("{{ bos_token }}\n{% if %}", r"^data\.chat_template, line 2: syntax error: Expected", "correct that line"),
        ("{% for turn in messages %}\n{{ 1 + turn.content }}\n{% endfor %}", r"user, assistant: line 2: unsupported",
         "correct that line of it"),
        ("\n{{ raise_exception('no system turn') }}", r"user, assistant: no system turn$", "leave out these turns"),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_named_with_the_line_to_correct(
    chatml: Any, template: str, what: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError) as caught:
        encode(with_template(chatml, template, monkeypatch), turns(("user", "q"), ("assistant", "a")))
    assert re.search(what, caught.value.what)
    assert fix in caught.value.fix


def test_only_assistant_turns_and_their_end_tokens_are_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    end = tokenizer.eos_token
    assert trained_texts(tokenizer, TALK) == [f"SELECT 1{end}SELECT 'é'{end}"]


def test_tokens_match_the_template_at_inference(tokenizer: PreTrainedTokenizerBase) -> None:
    (document,) = encode(tokenizer, TALK)
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    prompt = tokenizer.apply_chat_template(TALK[:-1], tokenize=True, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(document.tokens) == whole.rstrip()
    assert document.tokens[: len(prompt)].tolist() == prompt


def test_labels_are_the_next_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    (document,) = encode(tokenizer, TALK)
    trained = document.labels[:-1] != IGNORED
    assert (document.labels[:-1][trained] == document.tokens[1:][trained]).all()
    assert document.labels[-1] == IGNORED
    (document,) = encode(tokenizer, TALK, train_on="all")
    assert document.num_targets == len(document.tokens) - 1


@pytest.mark.parametrize(
    ("train_on", "texts"),
    [
        ("last", ["SELECT 'é'<|im_end|>"]),
        (["user"], ["<|im_start|>user\nHow many?<|im_end|><|im_start|>user\nAnd é?<|im_end|>"]),
        (["system", "assistant"], ["system\nBe brief.<|im_end|>SELECT 1<|im_end|>SELECT 'é'<|im_end|>"]),
    ],
)
def test_other_turns_can_be_trained(chatml: PreTrainedTokenizerBase, train_on: object, texts: list[str]) -> None:
    found = trained_texts(chatml, TALK, train_on=train_on)
    assert [text.replace("\n<|im_start|>", "<|im_start|>") for text in found] == texts


def test_a_turns_own_weight_overrides_the_recipe(chatml: PreTrainedTokenizerBase) -> None:
    talk = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:]]
    assert trained_texts(chatml, talk) == ["SELECT 'é'<|im_end|>"]
    with pytest.raises(DataError, match="system, user, assistant"):
        encode(chatml, talk[:3])
    (whole,), (rest,) = (trained_texts(chatml, each, train_on="all") for each in (TALK, talk))
    assert rest == whole.replace("SELECT 1<|im_end|>", "")
    with pytest.raises(DataError, match="nothing to train on"):
        encode(chatml, [each | {"weight": 0} for each in TALK], train_on="all")


def test_only_completions_can_be_trained(chatml: PreTrainedTokenizerBase) -> None:
    columns = {"prompt": TALK[:4], "completion": TALK[4:]}
    (documents,) = encoder(chatml, columns, train_on="completion").encode([Row(columns, "f:1")])
    assert isinstance(documents, list)
    assert [document.num_targets for document in documents] == [encode(chatml, TALK, train_on="last")[0].num_targets]
    with pytest.raises(DataError, match=r"data\.train_on is 'completion'"):
        encode(chatml, TALK, train_on="completion")


def test_a_conversation_without_an_assistant_turn_is_rejected(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="f:1: nothing"):
        encode(tokenizer, TALK[:2])


# --- Templates -----------------------------------------------------------------------------------

REWRITING = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% if turn.reasoning_content and loop.last %}<think>{{ turn.reasoning_content }}</think>{% endif %}"
    "{{ turn.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the reasoning of earlier turns."""


def test_a_template_that_rewrites_earlier_turns_gives_each_turn_its_own_document(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(chatml, REWRITING, monkeypatch)
    thinking = [turn | {"reasoning_content": "hm"} if turn["role"] == "assistant" else turn for turn in TALK]
    assert trained_texts(chatml, thinking) == [
        "<think>hm</think>SELECT 1<|im_end|>",
        "<think>hm</think>SELECT 'é'<|im_end|>",
    ]
    second = chatml.decode(encode(chatml, thinking)[1].tokens)
    assert "assistant\nSELECT 1<|im_end|>" in second
    assert trained_texts(chatml, TALK) == ["SELECT 1<|im_end|>SELECT 'é'<|im_end|>"]


def test_generation_blocks_do_not_change_what_is_trained(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    marking = (
        "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{% if turn.role == 'assistant' %}"
        "{% generation %}{{ turn.content }}{% endgeneration %}<|im_end|>"
        "{% else %}{{ turn.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    opening = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    with_template(chatml, marking + opening, monkeypatch)
    assert trained_texts(chatml, TALK) == ["SELECT 1<|im_end|>SELECT 'é'<|im_end|>"]
    with_template(chatml, marking, monkeypatch)  # inference sends no opening, so the model has to write it
    header = "<|im_start|>assistant\n"
    assert trained_texts(chatml, TALK) == [f"{header}SELECT 1<|im_end|>{header}SELECT 'é'<|im_end|>"]


def test_the_marker_of_a_turn_without_thinking_is_not_trained(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = "{% if add_generation_prompt %}<|im_start|>assistant\n"
    with_template(chatml, REWRITING.replace(opening, opening + "<think></think>\n"), monkeypatch)
    assert trained_texts(chatml, TALK) == ["SELECT 1<|im_end|>", "SELECT 'é'<|im_end|>"]
    assert "assistant\n<think></think>\nSELECT 'é'<|im_end|>" in chatml.decode(encode(chatml, TALK)[1].tokens)
    with_template(chatml, REWRITING.replace(opening, opening + "<think>\n"), monkeypatch)
    with pytest.raises(DataError, match=r"turn 3: .*<think>.n'"):
        encode(chatml, TALK)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"reasoning_content": "hm"}, "reasoning"),
        ({"tool_calls": [{"name": "f", "arguments": {}}]}, "tool calls"),
    ],
)
def test_fields_that_a_template_drops_are_rejected(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], words: str
) -> None:
    with_template(chatml, ALTERNATING.replace("<start_of_turn>", "<|im_start|>").replace("<end_of_turn>", "<|im_end|>"),
                  monkeypatch)  # fmt: skip
    with pytest.raises(DataError, match=f"the chat template drops {words}"):
        encode(chatml, [TALK[1], TALK[2] | extra])


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        ([TALK[0], *TALK[1:3]], "system turns"),
        ([*TALK[1:3], TALK[0], *TALK[1:3]], "system turns after the first turn"),
        ([{"role": "developer", "content": "Be brief."}, *TALK[1:3]], "developer turns"),
    ],
)
def test_roles_that_a_template_drops_are_rejected(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, talk: list[dict[str, Any]], words: str
) -> None:
    known = "turn.role in ('user', 'assistant')" + (" or turn is sameas messages[0]" if "after" in words else "")
    with_template(chatml, f"{{% for turn in messages if {known} %}}"
                  "<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
                  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", monkeypatch)  # fmt: skip
    with pytest.raises(DataError, match=f"the chat template drops .*{words}"):
        encode(chatml, talk)
    prompt = Conversation(tuple(read_turns(talk, "messages", "openai", ())))
    with pytest.raises(DataError, match=f"the chat template drops .*{words}"):
        rendering.ChatRenderer.of(chatml, {}).prompt(prompt)


def test_a_template_that_writes_only_lists_of_parts_gets_contents_as_parts(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [list(document.tokens) for document in encode(chatml, TALK)]
    parts = "{% for part in turn.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    template = (
        f"{{% for turn in messages %}}<|im_start|>{{{{ turn.role }}}}\n{parts}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with_template(chatml, template, monkeypatch)
    assert [list(document.tokens) for document in encode(chatml, TALK)] == expected


def test_a_template_without_the_contents_of_turns_is_rejected(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(chatml, "{% for turn in messages %}<|im_start|>{{ turn.role }}<|im_end|>\n{% endfor %}"
                  "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}", monkeypatch)  # fmt: skip
    with pytest.raises(DataError, match="drops contents of"):
        encode(chatml, TALK[1:3])


def test_a_turn_that_the_template_merges_with_the_turn_before_it_is_rejected(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(chatml, "{% set last = namespace(role='') %}{% for turn in messages %}{% if turn.role != last.role %}"
                  "{% if not loop.first %}<|im_end|>{% endif %}<|im_start|>{{ turn.role }}: {% endif %}"
                  "{{ turn.content }}{% set last.role = turn.role %}{% endfor %}<|im_end|>"
                  "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}", monkeypatch)  # fmt: skip
    assert trained_texts(chatml, TALK[1:3]) == ["SELECT 1<|im_end|>"]
    with pytest.raises(DataError, match="turn 3: inference opens"):
        encode(chatml, [*TALK[1:3], TALK[2]])


def test_a_conversation_that_the_template_rejects_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gemma = learn_tokenizer(["how many"], 300, "gemma")
    with_template(gemma, ALTERNATING, monkeypatch)
    user, assistant = turns(("user", "hi"), ("assistant", "ho"))
    with pytest.raises(DataError, match=r"user, user, assistant: "):
        encode(gemma, [user, user, assistant])
    with pytest.raises(DataError, match=r"turns assistant: Conversation"):
        encode(gemma, [assistant])
    with_template(gemma, "{{ messages[0]['content'] + 1 }}", monkeypatch)
    with pytest.raises(DataError, match=r"user, assistant: "):
        encode(gemma, [user, assistant])


def test_a_conversation_that_starts_with_the_assistant_is_trained_in_full_or_rejected(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    greeting = [TALK[2], *TALK[1:]]
    with pytest.raises(DataError, match=r"starts with"):
        encode(tokenizer, greeting)
    assert "SELECT 1" in trained_texts(tokenizer, greeting, train_on="all")[0]


def test_a_system_turn_is_never_trained_as_an_assistant_turn(chatml: PreTrainedTokenizerBase) -> None:
    talk = [TALK[0], TALK[2], *TALK[1:]]
    assert trained_texts(chatml, talk)[0].startswith("SELECT 1<|im_end|>")
    with pytest.raises(DataError, match="must follow"):
        encode(learn_tokenizer(["how many"], 300, "gemma"), talk)


def long_talk(num_turns: int) -> list[dict[str, Any]]:
    """A conversation with consecutive user turns, whose turns quote each other and the template."""
    found = [("system", "Be brief.")]
    for number in range(num_turns):
        found += [("user", "Again?")] if number % 7 == 3 else []
        found.append(("assistant" if number % 2 else "user", f"turn {number // 8} <end_of_turn>\n"))
    return turns(*found)


def test_incremental_rendering_of_a_long_conversation_matches_rendering_each_prefix(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = long_talk(90)
    (found,) = encode(tokenizer, talk)
    monkeypatch.setattr(rendering, "_WINDOW", len(talk))
    (exact,) = encode(tokenizer, talk)
    assert (found.labels == exact.labels).all()
    assert (found.tokens == exact.tokens).all()
    assert found.num_targets > 90


def test_rendering_cost_is_linear_in_the_number_of_turns(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = [0]
    render = rendering.ChatRenderer._render

    def count(self: Any, talk: list[object], tools: object, *, open_turn: bool) -> Any:
        rendered[0] += len(talk)
        return render(self, talk, tools, open_turn=open_turn)  # type: ignore[arg-type]

    monkeypatch.setattr(rendering.ChatRenderer, "_render", count)
    encode(tokenizer, long_talk(400))
    assert rendered[0] < 400 * 50


def test_a_template_that_depends_on_the_number_of_turns_is_rendered_in_full_for_each_turn(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbering = (
        "{% for turn in messages %}{{ loop.index }} {{ turn['role'] }}: {{ turn['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ messages | length + 1 }} assistant: {% endif %}"
    )
    with_template(chatml, numbering, monkeypatch)
    talk = turns(*[("assistant" if number % 2 else "user", "hi") for number in range(60)])
    assert trained_texts(chatml, talk) == ["hi<|im_end|>" * 30]


# --- Tokens --------------------------------------------------------------------------------------


def test_special_tokens_written_in_the_data_stay_text(tokenizer: PreTrainedTokenizerBase) -> None:
    end = str(tokenizer.eos_token)
    talk = turns(("user", f"What is {end}?"), ("assistant", f"{end} ends <b>it</b>{end}{end}."))
    (document,) = encode(tokenizer, talk)
    assert str(tokenizer.decode(document.tokens)).count(end) > (document.tokens == tokenizer.eos_token_id).sum()
    labels = document.labels[document.labels != IGNORED]
    assert (labels == tokenizer.eos_token_id).sum() == 1
    assert tokenizer.decode(labels) == f"{end} ends <b>it</b>{end}{end}.{end}"
    with pytest.raises(DataError, match=r"U\+FDD0"):
        encode(tokenizer, turns(("user", f"\ufdd0{end}"), ("assistant", "a")))


def test_plain_text_ends_with_the_end_token_and_is_trained_in_full(chatml: PreTrainedTokenizerBase) -> None:
    columns = {"text": "many <|im_end|> tables"}
    for parsed, ends in ((False, 1), (True, 2)):
        form = {"kind": "text", "parse_special_tokens": parsed}
        ((document,),) = encoder(chatml, columns, format=form).encode([Row(columns, "f:1")])  # type: ignore[misc]
        assert document.is_text
        assert chatml.decode(document.tokens) == "many <|im_end|> tables<|im_end|>"
        assert (document.tokens == chatml.eos_token_id).sum() == ends
        assert document.num_targets == len(document.tokens) - 1
    assert isinstance(encoder(chatml, columns).encode([Row({"text": " "}, "f:2")])[0], DataError)


def test_invalid_rows_are_reported_and_the_encoder_can_be_pickled(
    chatml: PreTrainedTokenizerBase,
) -> None:
    columns = {"messages": TALK}
    encode_rows = pickle.loads(pickle.dumps(encoder(chatml, columns))).encode  # noqa: S301 - made here
    good, bad, again = encode_rows([Row(columns, "f:1"), Row({"messages": 3}, "f:2"), Row(columns, "f:3")])
    assert str(bad).startswith("f:2: column 'messages' is not a list of turns")
    assert (good[0].tokens == again[0].tokens).all()


def test_a_tokenizer_with_a_prefix_space_adds_none_inside_a_text() -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate("\n▁abcdefghijklmnopqrstuvwxyz:", start=3)}
    backend = Tokenizer(models.BPE(vocab={"<pad>": 0, "<e>": 1, "<unk>": 2, **letters}, merges=[], unk_token="<unk>"))  # noqa: S106
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Replace("▁", " ")
    spacing = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<e>")  # noqa: S106
    spacing.chat_template = (
        "{% for t in messages %}{{ t.role }}: {{ t.content }}<e>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (document,) = encode(spacing, turns(("user", "hi"), ("assistant", "ho")))
    assert document.tokens.tolist() == spacing("user: hi<e>assistant: ho<e>", add_special_tokens=False)["input_ids"]
    assert spacing.decode(document.labels[document.labels != IGNORED]).strip() == "ho<e>"


def test_a_token_beyond_the_models_vocabulary_is_reported(tokenizer: PreTrainedTokenizerBase) -> None:
    said: list[str] = []
    model = ModelSpec.model_construct(added_tokens=())
    check_size(tokenizer, model, len(tokenizer), said.append)
    assert said == []
    check_size(tokenizer, model, 260, said.append)
    assert "model.architecture.vocab_size is 260" in said[0]
    check_tokens(tokenizer, np.array([3, 259]), 260)
    with pytest.raises(DataError, match=r"token 260 \('.+'\) .* 260"):
        check_tokens(tokenizer, np.array([3, 260]), 260)
    with pytest.raises(DataError, match=r"token 0 \('<pad>'\) "):
        check_size(tokenizer, model, 0, said.append)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_fast": False}, "the tokenizer of 'org/model' lacks a fast version"),
        ({"pad_token_id": None, "eos_token": None}, "the tokenizer of 'org/model' lacks a padding or end token"),
    ],
)
def test_a_tokenizer_that_is_unsuitable_for_packs_is_rejected(changes: dict[str, object], message: str) -> None:
    whole = {"is_fast": True, "pad_token_id": 0, "eos_token": "<eos>"}
    with pytest.raises(DataError, match=message):
        _with_padding(SimpleNamespace(**(whole | changes)), "org/model")


def test_texts_need_an_end_token(chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder(chatml, {"text": "a"})
    monkeypatch.setattr(type(chatml), "eos_token", None, raising=False)
    with pytest.raises(DataError, match="no end token"):
        encoder(chatml, {"text": "a"})


def test_a_custom_template_is_used_and_one_of_another_family_is_rejected(chatml: PreTrainedTokenizerBase) -> None:
    own = SimpleNamespace(chat_template=None)
    _set_template(own, "org/model", REWRITING)
    assert own.chat_template == REWRITING
    with pytest.raises(DataError, match="<bos>, <end_of_turn>, <start_of_turn> "):
        _set_template(chatml, "org/model", "gemma")
    for empty in (None, ""):
        with pytest.raises(DataError, match="no chat template"):
            _set_template(SimpleNamespace(chat_template=empty), "org/model", "model")
    with pytest.raises(DataError, match="default: rag, tool_use"):
        _set_template(SimpleNamespace(chat_template={"tool_use": REWRITING, "rag": REWRITING}), "org/model", "model")


def load_own(folder: Path, chat_template: str = "model") -> Any:
    return load_tokenizer(ModelSpec.model_construct(weights=str(folder), revision=None), chat_template)


def test_the_template_of_a_multimodal_models_processor_is_used_if_the_tokenizer_has_none(
    chatml: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    chatml.save_pretrained(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="no chat template"):
        load_own(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_own(tmp_path).chat_template == chatml.chat_template


@pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="transformers 4 does not read tekken.json")
def test_a_vocabulary_of_mistrals_has_its_begin_and_end_tokens(tmp_path: Path) -> None:
    specials = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(TEKKEN_SPECIALS)]
    vocabulary = [{"rank": byte, "token_bytes": b64encode(bytes([byte])).decode()} for byte in range(256)]
    sizes = {"default_vocab_size": 256 + len(specials), "default_num_special_tokens": len(specials)}
    config = sizes | {"pattern": r"\p{L}+|\s|.", "num_vocab_tokens": 256, "version": "v7"}
    stored = {"config": config, "vocab": vocabulary, "special_tokens": specials}
    (tmp_path / "tekken.json").write_text(json.dumps(stored))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    mistral = load_own(tmp_path, REWRITING)
    assert (mistral.bos_token_id, mistral.eos_token_id, len(mistral)) == (1, 2, 256 + len(specials))
    ((document,),) = encoder(mistral, {"text": "a"}).encode([Row({"text": "a"}, "f:1")])
    assert document.tokens.tolist() == [1, ord("a") + len(specials), 2]


@pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="transformers 4 has no such setting")
def test_mistrals_own_tokenizer_is_not_used_where_it_is_installed(
    chatml: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chatml.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    asked: list[object] = []
    original = AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer,
        "from_pretrained",
        lambda *args, **options: asked.append(options.get("mistral_format")) or original(*args, **options),
    )
    assert load_own(tmp_path).is_fast
    assert asked == [False]


def test_a_padding_token_beyond_the_embedding_is_replaced_by_the_end_token() -> None:
    padded = learn_tokenizer(["SELECT name FROM table WHERE how many"], 300, "chatml")
    padded.add_special_tokens({"pad_token": "[PAD]"})
    said: list[str] = []
    check_size(padded, ModelSpec.model_construct(added_tokens=()), len(padded) - 1, said.append)
    assert padded.pad_token == padded.eos_token
    assert "<|im_end|> is used" in said[0]


@pytest.mark.parametrize("template", ["{% for turn in messages %}{{ turn.content }}\n{% endfor %}", "{# nothing #}"])
def test_an_assistant_turn_without_an_end_token_is_rejected(
    chatml: PreTrainedTokenizerBase, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(chatml, template, monkeypatch)
    assert find_end_tokens(chatml) == []
    with pytest.raises(DataError, match="no special token"):
        encode(chatml, TALK)


def test_a_template_that_is_not_jinja_is_rejected_as_such(
    chatml: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(chatml, "{% for turn in messages %}", monkeypatch)
    with pytest.raises(DataError, match="Unexpected end of"):
        encode(chatml, TALK)


# --- Too long ------------------------------------------------------------------------------------


def document(labels: str, *, is_text: bool = False, end: str = "") -> Document:
    """A document with one token per letter: upper case is trained, `end` marks ends of turns."""
    tokens = np.arange(len(labels), dtype=np.int32) + 10
    tokens[[letter == end for letter in labels]] = 1
    targets = [*(number for number in range(1, len(labels)) if labels[number].isupper())]
    found = np.full(len(labels), IGNORED, dtype=np.int32)
    found[[number - 1 for number in targets]] = tokens[targets]
    return Document(tokens, found, is_text)


def test_truncation_keeps_the_ends_of_turns() -> None:
    long = document("uuAAuuAAAuAA")
    assert [len(part.tokens) for part in shorten(long, 12, "truncate", None)] == [12]
    (part,) = shorten(long, 11, "truncate", None)
    assert len(part.tokens) == 9
    assert part.num_targets == 5
    assert part.labels[-1] == IGNORED
    assert shorten(long, 3, "truncate", None) == []
    assert shorten(long, 11, "drop", None) == []
    whole = document("UUEAAAEBB", end="E")
    assert [len(part.tokens) for part in shorten(whole, 8, "truncate", 1)] == [7]


def test_a_document_with_pictures_is_never_cut() -> None:
    long = replace(document("uuAAuuAAAuAA"), pictures=b"record")
    assert shorten(long, 12, "truncate", None) == [long]
    assert shorten(long, 11, "truncate", None) == []


def test_text_is_split_or_truncated_at_any_token() -> None:
    text = document("A" * 10, is_text=True)
    parts = shorten(text, 4, "split", None)
    assert [len(part.tokens) for part in parts] == [4, 4, 4]
    labels = np.concatenate([part.labels[part.labels != IGNORED] for part in parts])
    assert labels.tolist() == text.tokens[1:].tolist(), "each token but the first is a label once"
    assert all(part.labels[-1] == IGNORED and part.num_targets == len(part.tokens) - 1 for part in parts)
    assert [len(part.tokens) for part in shorten(text, 4, "truncate", None)] == [4]
    assert [len(part.tokens) for part in shorten(text, 9, "split", None)] == [9, 2]
