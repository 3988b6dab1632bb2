"""`ftkit chat`: chat with a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.model_arguments import MODEL_HELP, decoding_options, find_model, load_into_engine, model_argument
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.data.conversations import JsonObject
    from ftkit.evaluate.generate import ChatSession
    from ftkit.evaluate.vllm import EngineName


@click.command(
    "chat",
    cls=ForwardedCommand,
    short_help="Chat with a trained model.",
    examples=(
        "ftkit chat last",
        "ftkit chat last --before",
        "echo 'CREATE TABLE pets (name TEXT) How many pets?' | ftkit chat last",
    ),
    help=f"""Chat with a model. Each line is a turn; a line that ends with \\ continues on the next line.

    /reset clears the conversation; /exit or Ctrl-D ends it. In a pipe, only completions go to stdout.

    {MODEL_HELP}
    """,
)
@model_argument
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option(
    "--tools",
    "tools_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file with tool schemas. Tool calls are printed as the model writes them and never executed.",
)
@click.option("--before", "with_before", is_flag=True, help="Also show the completion of the model before training.")
@decoding_options
def command(
    reference: str,
    *,
    system: str | None,
    tools_file: Path | None,
    with_before: bool,
    engine: EngineName,
    **decoding: Any,
) -> None:
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
    tools = _read_tools(tools_file)
    sessions = {
        name: ChatSession(load_into_engine(source, engine, terminal), Decoding(**decoding), options, system, tools)
        for name, source in sources.items()
    }
    if tools:
        terminal.say(f"tools: {', '.join(tool['function']['name'] for tool in tools)}")
    for turn in _turns(terminal):
        if turn == "/reset":
            for session in sessions.values():
                session.reset()
        elif len(sessions) == 1:
            _stream(sessions["answer"], turn, terminal)
        else:
            for name, session in sessions.items():  # print each when it is done: one model may be slow
                terminal.passages([(f"{name:<6}", [Styled(session.ask(turn).text, "")])])


def _read_tools(path: Path | None) -> tuple[JsonObject, ...]:
    from ftkit.data.turns import read_tools

    return () if path is None else read_tools(path.read_text(encoding="utf-8"))


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
