"""Labels are what inference would write: constructions of chat templates × shapes of conversations, by another way.

Nothing here uses how ftkit finds completions: transformers renders the prompts, and the texts of turns are unique.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import pytest
import torch
from template_constructions import CONSTRUCTIONS, Construction, tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from ftkit.config.data import DataSpec, MessagesFormat
from ftkit.data import pictures
from ftkit.data.encoding import RowEncoder
from ftkit.data.packing import IGNORED, Document
from ftkit.data.rendering import ChatRenderer
from ftkit.data.rows import Row
from ftkit.data.template_probes import shapes
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.errors import DataError
from ftkit.launch.preflight import _check_labels
from ftkit.models.architecture import ModelSpec
from ftkit.train.components.generation import Generation

if TYPE_CHECKING:
    from ftkit.data.conversations import Conversation, Message

STRINGS = re.compile(r"text \d+(?: of \w+)?|reason \d+|hm \d+")
DATA = DataSpec.model_validate({"source": {"kind": "files", "train": "/x"}})


def as_turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return turn | ({"tool_call_id": message.tool_call_id, "name": "f"} if message.role == "tool" else {})


def strings_of(message: Message) -> list[str]:
    texts = [message.reasoning or "", message.content, *(str(call.arguments["a"]) for call in message.tool_calls)]
    return [found for text in texts for found in STRINGS.findall(text)]


def encode(encoder: RowEncoder, conversation: Conversation) -> list[Document] | DataError:
    columns = {"messages": [as_turn(message) for message in conversation.messages]}
    (result,) = encoder.encode(
        [Row(columns | ({"tools": list(conversation.tools)} if conversation.tools else {}), "f")]
    )
    return result


def pieces_of(document: Document, stops: set[int]) -> list[tuple[int, int]]:
    """Return the trained spans of tokens, divided after each token at which generation stops."""
    trained = [False, *(document.labels[:-1] != IGNORED).tolist()]
    found, start = [], None
    for place, (token, flag) in enumerate(zip(document.tokens.tolist(), trained, strict=True)):
        if flag and start is None:
            start = place
        if start is not None and (not flag or token in stops):
            found.append((start, place + flag))
            start = None
    return found + ([] if start is None else [(start, len(trained))])


def encoder_of(construction: Construction) -> tuple[RowEncoder, set[int]]:
    tokenizer, ends = tokenizer_of(construction)
    encoder = RowEncoder.of(tokenizer, DATA, MessagesFormat(), len(tokenizer), ends)
    assert encoder.renderer is not None
    return encoder, {*ends, *map(tokenizer.convert_tokens_to_ids, [tokenizer.eos_token, *encoder.renderer.end_tokens])}


@pytest.mark.parametrize("name", [name for name, each in CONSTRUCTIONS.items() if each.refused != "*"])
def test_each_assistant_turn_is_trained_once_after_the_prompt_of_inference_and_nothing_else_is(name: str) -> None:
    construction = CONSTRUCTIONS[name]
    encoder, stops = encoder_of(construction)
    tokenizer = encoder.tokenizer
    refused = set()
    for shape, conversation in shapes(construction.eos).items():
        documents = encode(encoder, conversation)
        if isinstance(documents, DataError):
            refused.add(shape)
            continue
        turns, seen = [as_turn(message) for message in conversation.messages], []
        prompts = {
            number: tokenizer.apply_chat_template(
                turns[:number], tools=list(conversation.tools) or None, add_generation_prompt=True, tokenize=False
            )
            for number, message in enumerate(conversation.messages)
            if message.role == "assistant"
        }
        for document in documents:
            for start, end in pieces_of(document, stops):
                before, text = (
                    tokenizer.decode(part) for part in (document.tokens[:start], document.tokens[start:end])
                )
                (turn,) = [number for number, prompt in prompts.items() if prompt == before]
                assert STRINGS.findall(text) == strings_of(conversation.messages[turn]), (shape, text)
                assert int(document.tokens[end - 1]) in stops, (shape, text)
                tag = re.search(r"<[^<>]*>\s*\Z", before)
                assert not (tag and text.startswith(tag[0].strip())), (shape, before, text)
                seen.append(turn)
        assert sorted(seen) == list(prompts), shape
    assert refused == set(construction.refused.split())


@pytest.mark.parametrize("fraction", ["", ".0"])
@pytest.mark.parametrize("value", [52.5, 13.0, -1.5, 1e30, 3, 10**25, True, None, [1, {"b": 2.5}]])
def test_the_numbers_of_a_call_are_trained_as_the_template_writes_them(value: object, fraction: str) -> None:
    tokenizer = learn_tokenizer(["what"], 300, "chatml")
    one_by_one = f"""'{{"a": ' + call.function.arguments.a | tojson + '{fraction}}}'"""
    tokenizer.chat_template = str(tokenizer.chat_template).replace("call.function.arguments | tojson", one_by_one)
    encoder = RowEncoder.of(tokenizer, DATA, MessagesFormat(), len(tokenizer), frozenset())
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": value}}}
    turns = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (documents,) = encoder.encode([Row({"messages": turns}, "f")])
    assert not isinstance(documents, DataError), documents
    trained = documents[0].tokens[1:][documents[0].labels[:-1] != IGNORED]
    assert f'{{"a": {json.dumps(value)}{fraction}}}' in tokenizer.decode(trained)


@pytest.mark.parametrize("name", [name for name, each in CONSTRUCTIONS.items() if each.refused == "*"])
def test_a_template_whose_labels_are_never_right_is_refused(name: str) -> None:
    tokenizer, ends = tokenizer_of(CONSTRUCTIONS[name])
    with pytest.raises(DataError, match="no conversation can"):
        ChatRenderer.of(tokenizer, {}, ends).find_unproven()


@pytest.mark.parametrize("name", [name for name, each in CONSTRUCTIONS.items() if each.refused != "*"])
def test_generation_stops_at_the_last_trained_token_and_not_before(name: str, tmp_path: Any) -> None:
    construction = CONSTRUCTIONS[name]
    encoder, stops = encoder_of(construction)
    tokenizer = encoder.tokenizer
    config = {"model_type": "llama", "eos_token_id": tokenizer.eos_token_id}
    ends = [tokenizer.convert_tokens_to_ids(token) for token in construction.ends]
    LlamaConfig(**config).save_pretrained(tmp_path)
    if ends:
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    settings = Generation.of(tokenizer, tmp_path).greedy(tokenizer, 200)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).eval()
    for name_of_shape in ("uaua", "ur", "uctcta"):
        documents = encode(encoder, shapes(construction.eos)[name_of_shape])
        for document in documents if isinstance(documents, list) else ():
            for start, end in pieces_of(document, stops):
                said = [*document.tokens[start:end].tolist(), 5, 6, 7]

                def repeat(ids: torch.Tensor, scores: torch.Tensor, said: list[int] = said, start: int = start) -> Any:
                    wanted = torch.tensor([said[min(ids.shape[1] - start, len(said) - 1)]])
                    return torch.full_like(scores, -torch.inf).index_fill(1, wanted, 0.0)

                prompt = torch.tensor([document.tokens[:start].tolist()])
                output = model.generate(
                    prompt, generation_config=settings, logits_processor=LogitsProcessorList([cast("Any", repeat)])
                )
                assert output[0, start:].tolist() == said[:-3]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("headers", "<|close|>"), ("two end tokens", "<|close|>"), ("end of conversation", "<|close|>"),
        ("end of conversation instead", "<|done|>"), ("end written by the next turn", "<|user|> <|tool|>"),
        ("other end of calls", "<|close|> <|call_done|>"), ("no end", ""),
    ],
)  # fmt: skip
def test_a_turn_ends_with_the_token_at_which_engines_stop(name: str, ends: str) -> None:
    tokenizer, model_ends = tokenizer_of(CONSTRUCTIONS[name])
    assert ChatRenderer.of(tokenizer, {}, model_ends).end_tokens == ends.split()
    if name == "end of conversation":  # a generation configuration that lists both changes nothing
        both = [tokenizer.convert_tokens_to_ids(token) for token in ("<|close|>", "<|done|>")]
        assert ChatRenderer.of(tokenizer, {}, both).end_tokens == ends.split()


def test_the_reference_page_has_what_is_trained_now() -> None:
    script = Path(__file__).parents[2] / "scripts" / "templates"
    scope = runpy.run_path(str(script))
    assert scope["page"]() == scope["PAGE"].read_text(encoding="utf-8"), "run scripts/templates"


def test_at_least_forty_shapes_are_tried() -> None:
    assert len(shapes("")) >= 40


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ m.content[:12] }}", "other text than the turn's own"),
        ("{{ m.content }}{% if loop.index0 %}{{ messages[0].content }}{% endif %}", "text of an earlier turn"),
        ("{{ m.content | replace('a', 'b') }}", "other text than the turn's own"),
    ],
)
def test_a_turn_that_is_not_the_datas_text_is_refused(template: str, reason: str) -> None:
    written = f"{{% for m in messages %}}<|open|>{{{{ m.role }}}}\n{template}<|close|>\n{{% endfor %}}"
    prompt = "{% if add_generation_prompt %}<|open|>assistant\n{% endif %}"
    tokenizer, _ = tokenizer_of(Construction("", "", written + prompt, ""))
    encoder = RowEncoder.of(tokenizer, DATA, MessagesFormat(), len(tokenizer))
    turns = [{"role": "user", "content": "what is that"}, {"role": "assistant", "content": "a cat, as far as I know"}]
    (result,) = encoder.encode([Row({"messages": turns}, "data.jsonl:7")])
    assert isinstance(result, DataError)
    assert reason in str(result)
    assert str(result).startswith("data.jsonl:7: turn 2")


def test_contents_are_not_given_as_parts_to_a_template_that_prints_them_as_python() -> None:
    written = "{% for m in messages %}<|open|>{{ m.role }}\n{{ m.content[:4] }}<|close|>\n{% endfor %}"
    tokenizer, _ = tokenizer_of(Construction("", "", written, ""))
    assert "type" not in ChatRenderer.of(tokenizer, {}).render(shapes("")["ua"])


@pytest.mark.parametrize(("shape", "is_refused"), [("ua", False), ("ur", True)])
def test_a_plan_refuses_first_rows_whose_labels_cannot_be_shown(shape: str, is_refused: bool, tmp_path: Path) -> None:
    tokenizer, _ = tokenizer_of(CONSTRUCTIONS["reasoning as a turn"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    rows = tmp_path / "rows.jsonl"
    turns = [as_turn(message) for message in shapes("")[shape].messages]
    rows.write_text("\n".join([json.dumps({"messages": turns})] * 4))
    data = DataSpec.model_validate({"source": {"kind": "files", "train": str(rows)}})
    recipe = SimpleNamespace(data=data, model=ModelSpec.model_construct(weights=str(tmp_path), added_tokens=()))
    if not is_refused:
        _check_labels(cast("Any", recipe), tmp_path)
        return
    with pytest.raises(DataError, match=r"rows\.jsonl:1: turn 2: .*'<\|close\|>'"):
        _check_labels(cast("Any", recipe), tmp_path)


class Picture: ...


def test_pictures_of_first_rows_are_in_memory_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = tokenizer_of(CONSTRUCTIONS["reasoning as a turn"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    turns = [{"role": "user", "content": "<image>" * 3}, {"role": "assistant", "content": "cats"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": turns, "images": ["a.png", "b.png", "c.png"]}))
    data = DataSpec.model_validate({"source": {"kind": "files", "train": str(rows)}, "pictures": True})
    recipe = SimpleNamespace(data=data, model=ModelSpec.model_construct(weights=str(tmp_path), added_tokens=()))
    in_memory, seen = WeakSet[Picture](), []

    def open_picture(source: object, folder: str) -> Picture:
        seen.append((source, folder, len(in_memory)))
        in_memory.add(picture := Picture())
        return picture

    monkeypatch.setattr(pictures, "open_picture", open_picture)
    _check_labels(cast("Any", recipe), tmp_path)
    assert seen == [(name, str(tmp_path), 0) for name in ("a.png", "b.png", "c.png")]
