"""Generate completions for the prompts of a file in batches, and continue an interrupted output."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftkit.data.prompts import conversation_of, encode_prompt, renderer_of
from ftkit.data.rows import Row, errors_at, read_json_lines
from ftkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import GenerationConfig

    from ftkit.config.data import Format
    from ftkit.evaluate.load import GeneratingModel

_FILE_ENDINGS = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Decoding:
    """Decoding settings.

    Attributes:
        temperature: sampling temperature; 0 decodes greedily.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0

    def config(self, model: GeneratingModel) -> GenerationConfig:
        """Return transformers' settings for a model, with its end tokens; seed torch if tokens are drawn."""
        config = model.generation.greedy(model.tokenizer, self.max_new_tokens)
        if self.temperature:
            torch.manual_seed(self.seed)
            config.do_sample, config.temperature = True, self.temperature
        return config


def read_inputs(given: str) -> list[Row]:
    """Return the rows of a JSON Lines file, or one row for a text.

    Raises:
        DataError: the file can't be read.
    """
    path = Path(given).expanduser() if len(given) < 1000 and "\n" not in given else None  # noqa: PLR2004 - of a path
    if path is not None and (path.suffix in _FILE_ENDINGS or path.is_file()):
        return read_json_lines(path)
    return [Row({"prompt": given}, "--input")]


def generate_rows(
    model: GeneratingModel,
    rows: Sequence[Row],
    form: Format | None,
    options: Mapping[str, Any],
    decoding: Decoding,
    batch_size: int,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows with their completions, a batch at a time, in their order.

    Each has the columns of the row, and `completion`, `finish_reason` (`stop` at an end token, `length` without one)
    and `model`.

    Raises:
        DataError: a row has no prompt; with its place. Nothing was generated then.
    """
    renderer = renderer_of(model, options)
    prompts = []
    for row in rows:
        with errors_at(row):
            prompts.append(encode_prompt(model, renderer, conversation_of(row.columns, form)))
    config = decoding.config(model)
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        completions = model.complete(prompts[first : first + batch_size], config)
        yield [
            row.columns
            | {
                "completion": model.text_of(completion),
                "finish_reason": "stop" if model.is_ended(completion) else "length",
                "model": model.label,
            }
            for row, completion in zip(batch, completions, strict=True)
        ]


def count_done(output: Path, rows: Sequence[Row], label: str) -> int:
    """Return the number of completed rows of an interrupted output; remove a partial last line.

    Raises:
        DataError: it is the output of other prompts, or of another model.
    """
    if not output.exists():
        return 0
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.splitlines()
    for number, (line, row) in enumerate(zip(lines, rows, strict=False), start=1):
        done = _parse(line)
        wanted = json.loads(json.dumps(row.columns, default=str)) | {"model": label}
        if any(done.get(key) != value for key, value in wanted.items() if key not in ("completion", "finish_reason")):
            raise _other_output(output, number)
    if len(lines) > len(rows):
        raise _other_output(output, len(rows) + 1)
    if len(whole) < len(content):
        with output.open("r+b") as file:
            file.truncate(len(whole))
    return len(lines)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _other_output(output: Path, line: int) -> DataError:
    return DataError(
        f"{output}:{line}: this line does not belong to the same line of the input and the same model",
        meaning="the file is the output of other prompts or of another model",
        fix="give another --output, or delete the file",
    )
