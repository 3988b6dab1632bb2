"""`ftkit generate`: generate completions for the prompts in a file."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.model_arguments import MODEL_HELP, decoding_options, find_model, load_into_engine, model_argument
from ftkit.cli.terminal.console import Terminal

if TYPE_CHECKING:
    from ftkit.evaluate.vllm import EngineName


@click.command(
    "generate",
    cls=ForwardedCommand,
    short_help="Generate completions for prompts, as JSON Lines.",
    examples=(
        "ftkit generate last --input 'CREATE TABLE pets (name TEXT) How many pets?'",
        "ftkit generate last --input prompts.jsonl --output completions.jsonl",
        "ftkit generate last@0 --input prompts.jsonl --batch-size 32",
    ),
    help=f"""Generate a completion for each prompt, and write them as JSON Lines.

    Each input line has the columns that the run was trained on, or turns ("messages"), or a "prompt". The output
    adds "completion", "finish_reason" (stop or length) and "model" to the columns. An existing output file is
    continued.

    {MODEL_HELP}
    """,
)
@model_argument
@click.option("--input", "given", metavar="FILE|TEXT", required=True, help="A JSON Lines file, or one prompt.")
@click.option(
    "--output", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Output file; default: stdout."
)
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), default=8, help="Prompts per batch (default 8).")
@decoding_options
def command(
    reference: str, *, given: str, output: Path | None, batch_size: int, engine: EngineName, **decoding: Any
) -> None:
    """Generate completions."""
    terminal, target = Terminal(), find_model(reference)
    from ftkit.evaluate.generate import Decoding, count_done, generate_rows, read_inputs

    rows = read_inputs(given)
    num_done = count_done(output, rows, target.source.label) if output else 0
    if num_done:
        terminal.say(f"{num_done:,} of {len(rows):,} prompts already completed")
    left = rows[num_done:]
    if not left:
        return
    model = load_into_engine(target.source, engine, terminal)
    data = target.plan.recipe.data if target.plan else None
    batches = generate_rows(
        model,
        left,
        data.format if data else None,
        data.template_options if data else {},
        Decoding(**decoding),
        batch_size,
    )
    file: IO[str] | None = None
    with ExitStack() as stack:
        for batch in batches:
            lines = "".join(json.dumps(each, ensure_ascii=False, default=str) + "\n" for each in batch)
            num_done += len(batch)
            if output is None:
                terminal.data(lines)
                continue
            # Opened once: a pipe's reader takes the first closing for the end.
            file = file or stack.enter_context(output.open("a", encoding="utf-8", newline="\n"))
            file.write(lines)
            file.flush()
            terminal.say(f"{num_done:,} of {len(rows):,} prompts")
