"""`ftkit chat` and `ftkit generate`: try a model, and complete prompts."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, TypedDict, Unpack

import click

from ftkit.cli.arguments import file_option, number_option, together
from ftkit.cli.forwarded import ForwardedCommand
from ftkit.cli.inference import MODEL_HELP, engine_option, find_model, load_into_engine, model_argument
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.data.turns import read_tools
from ftkit.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftkit.evaluate.generate import ChatSession
    from ftkit.evaluate.vllm import EngineName

_decoding_options = together(
    number_option("--max-new-tokens", default=256, about="Maximum number of new tokens (default 256)."),
    click.option(
        "--temperature", metavar="T", type=click.FloatRange(min=0), default=0.0,
        help="Sampling temperature; 0, the default, decodes greedily.",
    ),
    click.option("--seed", metavar="N", type=int, default=0, help="Sampling seed (default 0)."),
    engine_option,
)  # fmt: skip


class _DecodingOptions(TypedDict):
    max_new_tokens: int
    temperature: float
    seed: int


@click.command(
    "chat",
    cls=ForwardedCommand,
    examples=(
        "ftkit chat last",
        "ftkit chat last --before",
        "echo 'CREATE TABLE pets (name TEXT) How many pets?' | ftkit chat last",
    ),
    help=f"""Chat with a model, to try it. To complete a file of prompts, use 'ftkit generate'; for other programs,
    'ftkit serve'. Each line is a turn; a line that ends with \\ continues on the next line.

    /reset clears the conversation; /exit or Ctrl-D ends it. In a pipe, only completions go to stdout.

    {MODEL_HELP}
    """,
)
@model_argument
@click.option("--system", metavar="TEXT", help="System prompt.")
@file_option(
    "--tools", "tools_file",
    about="JSON file with tool schemas. Tool calls are printed as the model writes them and never executed.",
)  # fmt: skip
@click.option("--before", "with_before", is_flag=True, help="Also show the completion of the model before training.")
@_decoding_options
def chat_command(
    reference: str, *, system: str | None, tools_file: Path | None, with_before: bool, engine: EngineName,
    **decoding: Unpack[_DecodingOptions],
) -> None:  # fmt: skip
    """Chat with a model."""
    terminal, target = Terminal(), find_model(reference)
    from ftkit.evaluate.generate import ChatSession, Decoding

    sources = {"answer": target.source}
    if with_before:
        if target.before is None:
            raise NotFoundError(
                f"ftkit does not know the model before training for {reference}",
                meaning="it is a model, not a run",
                fix="give the run, or omit --before",
            )
        sources = {"before": target.before, "after": target.source}
    options = target.data.template_options if target.data else {}
    tools = read_tools(tools_file.read_text(encoding="utf-8")) if tools_file else ()
    sessions = {
        name: ChatSession(load_into_engine(source, engine, terminal), Decoding(**decoding), options, system, tools)
        for name, source in sources.items()
    }
    if tools:
        terminal.say(f"tools: {', '.join(tool['function']['name'] for tool in tools)}")
    for turn in _turns(terminal):
        if turn == "/reset":
            for session in sessions.values():
                session.messages.clear()
        elif len(sessions) == 1:
            _stream(sessions["answer"], turn, terminal)
        else:
            for name, session in sessions.items():  # print each when it is done: one model may be slow
                terminal.facts([(f"{name:<6}", session.ask(turn).text)], is_data=True)


def _stream(session: ChatSession, turn: str, terminal: Terminal) -> None:
    reply = session.ask(turn, terminal.data)
    terminal.data("\n")
    if not reply.is_ended:
        terminal.say(Styled(f"(truncated after {session.decoding.max_new_tokens} tokens: --max-new-tokens)", "yellow"))


def _turns(terminal: Terminal) -> Iterator[str]:
    """Yield the user's turns until the end of the input."""
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        import readline  # noqa: F401 - gives input() its history and keys

        terminal.say("Write a message; /reset clears the conversation, /exit ends it.")
    lines: list[str] = []
    while True:
        try:
            line = input(("… " if lines else "> ") if is_interactive else "")
        except EOFError:
            return
        lines.append(line.removesuffix("\\"))
        if line.endswith("\\"):
            continue
        turn, lines = "\n".join(lines).strip(), []
        if turn == "/exit":
            return
        if turn:
            yield turn


@click.command(
    "generate",
    cls=ForwardedCommand,
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
@file_option("--output", "-o", about="Output file; default: stdout.", exists=False)
@number_option("--batch-size", default=8, about="Prompts per batch (default 8).")
@_decoding_options
def generate_command(
    reference: str, *, given: str, output: Path | None, batch_size: int, engine: EngineName,
    **decoding: Unpack[_DecodingOptions],
) -> None:  # fmt: skip
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
    form, options = (data.format, data.template_options) if data else (None, {})
    file: IO[str] | None = None
    with ExitStack() as stack:
        for batch in generate_rows(model, left, form, options, Decoding(**decoding), batch_size):
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
