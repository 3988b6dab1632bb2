"""Generate completions for the prompts of a file in batches, and continue an interrupted output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, TextStreamer

from ftkit.data.cases import encode_prompt, encode_prompts, have_pictures, prompt_of, renderer_of
from ftkit.data.completion_metrics import read_calls
from ftkit.data.conversations import PICTURE, Conversation, JsonObject, Message, for_template
from ftkit.data.readers import read_json_lines
from ftkit.data.rows import Row
from ftkit.errors import DataError
from ftkit.evaluate.loaded_model import GeneratingModel
from ftkit.files import load_json, write_file, write_json

if TYPE_CHECKING:
    from ftkit.config.data import Format


@dataclass(frozen=True)
class Decoding:
    """Decoding settings; temperature 0 decodes greedily."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0

    def config(self, model: GeneratingModel) -> GenerationConfig:
        """Return transformers' settings for a model, with its end tokens; seed torch if tokens are sampled."""
        config = model.generation.greedy(model.tokenizer, self.max_new_tokens)
        if self.temperature:
            torch.manual_seed(self.seed)
            config.do_sample, config.temperature = True, self.temperature
        return config


def read_inputs(given: str) -> list[Row]:
    """Return the rows of a JSON Lines file or pipe (`<(zcat prompts.gz)`, `/dev/stdin`), or one row for a text."""
    if len(given) < 1000 and "\n" not in given:  # noqa: PLR2004 - of a path
        path = Path(given).expanduser()
        is_readable = path.is_file() or path.is_fifo() or path == Path("/dev/stdin")
        if path.suffix in (".jsonl", ".json", ".ndjson") or is_readable:
            if rows := read_json_lines(path):
                return rows
            raise DataError(f"--input: {given} has no rows", fix='each line is e.g. {"prompt": "..."}')
    return [Row({"prompt": given}, "--input")]


@dataclass(frozen=True)
class Reply:
    """A completion as text; `is_ended` tells whether it has its end token."""

    text: str
    is_ended: bool

    @classmethod
    def of(cls, model: GeneratingModel, completion: Sequence[int], *, is_raw: bool = False) -> Reply:
        """Return a completion without its end token; `is_raw` keeps other special tokens."""
        text = model.generation.text_of(model.tokenizer, completion, is_raw=is_raw)
        return cls(text, bool(completion) and completion[-1] in model.generation.end_tokens)


def generate_rows(
    model: GeneratingModel,
    rows: Sequence[Row],
    form: Format | None,
    options: Mapping[str, object],
    decoding: Decoding,
    batch_size: int,
) -> Iterator[list[dict[str, object]]]:
    """Yield the rows with their completions, in order, a batch at a time.

    Each has the row's columns, and `completion`, `finish_reason` (`stop` at an end token, `length` without one) and
    `model`. Completions of rows with tools keep special tokens, which mark calls.
    """
    prompts = []
    pictures = model.input.processor(is_needed=have_pictures(rows))
    renderer = renderer_of(model.tokenizer, model.label, options, pictures)
    for prompt in encode_prompts(model.tokenizer, renderer, rows, form, pictures):
        if isinstance(prompt, DataError):
            raise prompt
        prompts.append(prompt)
    config = decoding.config(model)
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        completions = model.complete(prompts[first : first + batch_size], config)
        replies = [
            Reply.of(model, completion, is_raw=bool(prompt_of(row.columns, form).tools))
            for row, completion in zip(batch, completions, strict=True)
        ]
        yield [
            {**row.columns, "completion": reply.text, "finish_reason": "stop" if reply.is_ended else "length",
             "model": model.label}
            for row, reply in zip(batch, replies, strict=True)
        ]  # fmt: skip


def count_done(output: Path, rows: Sequence[Row], label: str) -> int:
    """Return the number of completed rows in an interrupted output, 0 for a pipe; remove a partial last line."""
    if not output.is_file():  # reading a pipe would block
        return 0
    content = output.read_bytes()
    complete_lines = content[: content.rfind(b"\n") + 1]
    lines = complete_lines.splitlines()
    for number, line in enumerate(lines):
        done, expected = None, {}
        with suppress(ValueError):
            done = load_json(line)
        if number < len(rows):
            expected = json.loads(json.dumps(rows[number].columns, default=str)) | {"model": label}
        given = expected.keys() - {"completion", "finish_reason"}
        if not given or not isinstance(done, dict) or any(done.get(key) != expected[key] for key in given):
            raise DataError(
                f"{output}:{number + 1}: this line does not belong to the same line of the input and the same model",
                meaning="the file is the output of other prompts or of another model",
                fix="give another --output, or delete the file",
            )
    if len(complete_lines) < len(content):
        with output.open("r+b") as file:
            file.truncate(len(complete_lines))
    return len(lines)


def write_data(path: Path, completions: Path, rows: Sequence[Row], form: Format | None, card: JsonObject) -> int:
    """Write completions as a chat data set with a card next to it; return the number of rows.

    Leaves out completions without an end token, because a model trained on them would learn to stop there; blank ones,
    which can't be trained on; and calls of tools, which a template may write in another way than the model did.
    """
    conversations: list[str] = []
    left_out = dict.fromkeys(("without_end", "blank", "with_calls"), 0)
    for row, done in zip(rows, read_json_lines(completions), strict=True):
        prompt, text = prompt_of(row.columns, form), str(done.columns["completion"])
        if done.columns["finish_reason"] != "stop":
            left_out["without_end"] += 1
        elif not text.strip():
            left_out["blank"] += 1
        elif prompt.tools and read_calls(text):
            left_out["with_calls"] += 1
        else:
            turns = [*map(_row_turn, prompt.messages), {"role": "assistant", "content": text}]
            tools = {"tools": list(prompt.tools)} if prompt.tools else {}
            conversations.append(json.dumps({"messages": turns, **tools}, ensure_ascii=False) + "\n")
    write_file(path, "".join(conversations).encode())
    counts = {"rows": len(conversations), **left_out}
    write_json(path.with_suffix(".card.json"), {**card, **counts, "created": datetime.now(UTC).isoformat()})
    return len(conversations)


def _row_turn(message: Message) -> JsonObject:
    """Return a turn of a prompt as a row of data has it, with the sources of pictures, and the reasoning once."""
    turn = for_template(message, in_parts=False)
    sources = iter(message.pictures)
    if message.pictures:
        if not all(isinstance(source, str) for source in message.pictures):
            raise DataError(
                "a picture is in the row itself, and can't be written as text",
                fix="write the pictures to files, and give their paths",
            )
        parts = [part if part["type"] == "text" else {**part, "image": next(sources)} for part in turn["content"]]
        turn = {**turn, "content": parts}
    return {key: value for key, value in turn.items() if key not in {"reasoning", "thinking"}}


# --- Chat ----------------------------------------------------------------------------------------


@dataclass
class ChatSession:
    model: GeneratingModel
    decoding: Decoding
    options: Mapping[str, object]  # variables for the chat template
    system: str | None = None
    tools: tuple[JsonObject, ...] = ()  # JSON schemas of tools that the model may call; nothing is executed
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str, on_text: Callable[[str], None] | None = None, pictures: Sequence[Path] = ()) -> Reply:
        """Generate the completion of a user turn, and append both turns to the conversation.

        `on_text` is called with pieces of the completion during generation; `pictures` are before the text.
        """
        before = (Message("system", self.system),) if self.system else ()
        shown = Message(
            "user", PICTURE * len(pictures) + text, pictures=tuple(str(each.absolute()) for each in pictures)
        )
        turns = (*self.messages, shown)
        conversation = Conversation((*before, *turns), self.tools)
        processor = self.model.input.processor(is_needed=any(turn.pictures for turn in turns))
        if pictures and processor is None:
            raise DataError(f"{self.model.label} sees no pictures", fix="choose a multimodal model")
        renderer = renderer_of(self.model.tokenizer, self.model.label, self.options, processor)
        prompt = encode_prompt(self.model.tokenizer, Row({}, "chat"), renderer.prompt(conversation), processor)
        if isinstance(prompt, DataError):
            raise prompt
        streamer = None if on_text is None else _Streamer(self.model, on_text, is_raw=bool(self.tools))
        (completion,) = self.model.complete([prompt], self.decoding.config(self.model), streamer=streamer)
        reply = Reply.of(self.model, completion, is_raw=bool(self.tools))
        self.messages = [*turns, Message("assistant", reply.text)]
        return reply


class _Streamer(TextStreamer):  # type: ignore[misc] # transformers has no types
    """Stream the text of a completion without end tokens, and with other special tokens only if `is_raw`."""

    def __init__(self, model: GeneratingModel, on_text: Callable[[str], None], *, is_raw: bool) -> None:
        super().__init__(model.tokenizer, skip_prompt=True, skip_special_tokens=not is_raw)
        self._on_text, self._ends = on_text, set(model.generation.end_tokens)

    def put(self, value: torch.Tensor) -> None:
        if value.numel() > 1 or value.item() not in self._ends:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: FBT001, FBT002 - transformers'
        del stream_end
        if text:
            self._on_text(text)
