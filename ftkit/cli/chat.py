"""`ftkit chat`, `ftkit generate` and `ftkit serve`: try a model, complete prompts, serve a model to other programs."""

from __future__ import annotations

import getpass
import json
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypedDict, Unpack

import click

from ftkit import process
from ftkit.cli import arguments
from ftkit.cli.commands import current_context
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.inference import engine_option, find_model, load_into_engine, model_argument
from ftkit.cli.submit import submit_job
from ftkit.cli.terminal.console import Facts, Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.image_reference import parse_image
from ftkit.config.load import load_cluster
from ftkit.data.conversations import read_tools
from ftkit.data.rows import Row, errors_at
from ftkit.errors import NotFoundError, TrainingError
from ftkit.evaluate.source import ModelFolder, Target, find_target, weights_digests
from ftkit.launch.side_jobs import plan_serving, tunnel, wait_for_server
from ftkit.planning.layout import Workspace

if TYPE_CHECKING:
    from ftkit.evaluate.generate import ChatSession
    from ftkit.evaluate.served_model import EngineName
    from ftkit.launch.render import SideJob

_HELP = """/reset  clear the conversation
/exit   end it, as Ctrl-D does
\\       at the end of a line: the message continues on the next one"""
_decoding_options = arguments.together(
    arguments.number_option("--max-new-tokens", default=256, about="Maximum number of new tokens (default 256)."),
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


@forwarded_command(
    "chat",
    "ftkit chat last",
    "ftkit chat last --before",
    "echo 'CREATE TABLE pets (name TEXT) How many pets?' | ftkit chat last",
)
@model_argument
@click.option("--system", metavar="TEXT", help="System prompt.")
@arguments.file_option(
    "--tools", "tools_file",
    about="JSON file with tool schemas. Tool calls are printed as the model writes them and never executed.",
)  # fmt: skip
@click.option(
    "--image",
    "images",
    metavar="PATH",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A picture for the first turn; may be given several times.",
)
@click.option("--before", "with_before", is_flag=True, help="Also show the completion of the model before training.")
@_decoding_options
def chat_command(
    reference: str, *, system: str | None, tools_file: Path | None, images: tuple[Path, ...], with_before: bool,
    engine: EngineName, **decoding: Unpack[_DecodingOptions],
) -> None:  # fmt: skip
    r"""Chat with a model. To complete a file of prompts, use 'ftkit generate'; for other programs, 'ftkit serve'.

    Each line is a turn; a line that ends with \ continues on the next line. /help lists the commands. In a pipe, only
    completions go to stdout.

    {MODEL}
    """
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
    with errors_at(Row({}, str(tools_file))):
        tools = read_tools(tools_file.read_bytes()) if tools_file else ()
    with ExitStack() as stack:
        sessions = {}
        for name, source in sources.items():
            loaded = load_into_engine(source, engine, terminal, has_pictures=bool(images), num_models=len(sources))
            sessions[name] = ChatSession(stack.enter_context(loaded), Decoding(**decoding), options, system, tools)
        if tools:
            terminal.say(f"tools: {', '.join(tool['function']['name'] for tool in tools)}")
        for turn in _turns(terminal):
            if turn == "/reset":
                for session in sessions.values():
                    session.messages.clear()
                continue
            _answer(sessions, turn, images, terminal)
            images = ()


def _answer(sessions: Mapping[str, ChatSession], turn: str, images: Sequence[Path], terminal: Terminal) -> None:
    if len(sessions) == 1:
        (session,) = sessions.values()
        reply = session.ask(turn, terminal.data, images)
        terminal.data("\n")
        if not reply.is_ended:
            most = session.decoding.max_new_tokens
            terminal.say(Styled(f"(truncated after {most} tokens: --max-new-tokens)", "yellow"))
        return
    for name, session in sessions.items():  # print each when it is done: one model may be slow
        terminal.facts([(f"{name:<6}", session.ask(turn, None, images).text)], is_data=True)


def _turns(terminal: Terminal) -> Iterator[str]:
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        import readline  # noqa: F401 - gives input() its history and keys

        terminal.say("Write a message; /help lists the commands.")
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
        if turn in ("/exit", "/quit"):
            return
        if turn == "/help" or (is_interactive and re.fullmatch(r"/\w+", turn) and turn != "/reset"):
            terminal.say(_HELP if turn == "/help" else f"there is no command {turn}\n{_HELP}")
        elif turn:
            yield turn


@forwarded_command(
    "generate",
    "ftkit generate last --input 'CREATE TABLE pets (name TEXT) How many pets?'",
    "ftkit generate last --input prompts.jsonl --output completions.jsonl",
    "ftkit generate last@0 --input prompts.jsonl --batch-size 32",
)
@model_argument
@click.option("--input", "given", metavar="FILE|TEXT", required=True, help="A JSON Lines file, or one prompt.")
@arguments.file_option("--output", "-o", about="Output file; default: stdout.", exists=False)
@arguments.file_option("--as-data", about="Also write a chat data set to train on, and a card.", exists=False)
@arguments.number_option("--batch-size", default=8, about="Prompts per batch (default 8).")
@_decoding_options
def generate_command(
    reference: str, *, given: str, output: Path | None, as_data: Path | None, batch_size: int, engine: EngineName,
    **decoding: Unpack[_DecodingOptions],
) -> None:  # fmt: skip
    """Generate a completion for each prompt, and write them as JSON Lines.

    Each input line has the columns that the run was trained on, or turns ("messages"), or a "prompt". The output
    adds "completion", "finish_reason" (stop or length) and "model" to the columns. An existing output file is
    continued. --as-data also writes prompts with their completions as turns, without those that reached
    --max-new-tokens, are blank, or call tools; the card has model, digests, this command's settings, counts and date.
    Its completions are in FILE.completions, unless --output says another file.

    {MODEL}
    """
    terminal, target = Terminal(), find_model(reference)
    from ftkit.evaluate.generate import Decoding, count_done, generate_rows, read_inputs, write_data

    output = output or (as_data and as_data.with_name(f"{as_data.name}.completions"))
    rows = read_inputs(given)
    for path in filter(None, (output, as_data)):
        path.parent.mkdir(parents=True, exist_ok=True)
    num_done = count_done(output, rows, target.source.label) if output else 0
    if num_done:
        terminal.say(f"{num_done:,} of {len(rows):,} prompts already completed")
    left = rows[num_done:]
    data = target.plan.recipe.data if target.plan else None
    form, options = (data.format, data.template_options) if data else (None, {})
    file: IO[str] | None = None
    with ExitStack() as stack:
        model = stack.enter_context(load_into_engine(target.source, engine, terminal)) if left else None
        batches = model and generate_rows(model, left, form, options, Decoding(**decoding), batch_size)
        for batch in batches or ():
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
    if as_data and output:
        files = weights_digests(target.source)
        card = {"model": target.source.label, "weights_sha256": files, "prompts": given, "engine": engine, **decoding}
        card["from_earlier_commands"] = len(rows) - len(left)  # perhaps with other settings
        num_rows = write_data(as_data, output, rows, form, card)
        terminal.say(f"{num_rows:,} of {len(rows):,} completions can be trained on: data.source={short_path(as_data)}")


@forwarded_command(
    "serve",
    "ftkit serve demo --dry-run",
    "ftkit serve demo --gpus 2 --time 08:00:00 --no-follow",
    "ftkit serve demo --no-follow -- --max-model-len 8192",
)
@arguments.run_argument
@click.argument("words", metavar="[-- VLLM-OPTION]...", nargs=-1)
@arguments.cluster_option
@arguments.image_option("Serving image; default: vllm:0.33.")
@arguments.number_option("--gpus", "num_gpus", about="GPUs; default: as many as the weights need.")
@arguments.number_option("--port", low=1024, high=65535, about="Port; default: 20000 + job id modulo 10000.")
@arguments.time_option("the profile's")
@arguments.dry_run_option("the job script")
@arguments.follow_option
def serve_command(  # noqa: PLR0913 - one for each option
    reference: str, words: tuple[str, ...], *, cluster: str | None, image: str | None, num_gpus: int | None,
    port: int | None, time_limit: str | None, dry_run: bool, follow: bool,
) -> None:  # fmt: skip
    """Start vLLM's OpenAI-compatible server on the export of a run, in the serving image, and print its address.

    RUN, RUN@STEP and RUN@best work as in 'ftkit chat'; a checkpoint without an export is exported first. Adapters are
    served on their base model. Arguments after -- are passed to 'vllm serve'. Export VLLM_API_KEY to require a key:
    without it, everyone on the cluster's network can use the server.
    """
    terminal, ctx = Terminal(), current_context()
    target = find_target(reference, arguments.current_workspace())
    if target.plan is None:
        raise NotFoundError(f"{reference} is not a run", fix="serve a folder with vLLM itself: vllm serve FOLDER")
    place = load_cluster(cluster, ctx) if cluster else target.plan.cluster
    chosen = parse_image(image, ctx.project, "command line", "--image") if image else None
    folder = _export(target, terminal, dry_run=dry_run)
    job = plan_serving(
        target.plan, place, chosen, folder, ctx, num_gpus=num_gpus, port=port, time_limit=time_limit, words=words
    )
    if not (job_id := submit_job(job, terminal, dry_run=dry_run)):
        return
    terminal.say(f"job {job_id} serves {target.plan.id}")
    try:
        address = wait_for_server(job, job_id, terminal.say) if follow else None
    except KeyboardInterrupt:
        _show_server(job_id, job, None, terminal)
        raise
    _show_server(job_id, job, address, terminal)
    terminal.data(f"{address}/v1\n" if address else f"{job_id}\n")


def _export(target: Target, terminal: Terminal, *, dry_run: bool) -> Path:
    """Return the export to serve; if there is only a checkpoint, export it first."""
    source = target.source
    if isinstance(source, ModelFolder):
        return source.folder
    export = ["export", source.plan.id, "--step", str(source.step)]
    if dry_run or not source.step:
        raise NotFoundError(f"there is no export of {source.label}", fix=f"export it: ftkit {' '.join(export)}")
    terminal.say(f"exporting {source.label}")
    done = process.run_stoppable([sys.executable, "-m", "ftkit", *export], timeout_seconds=6 * 3600)
    made = find_target(source.label, Workspace(source.plan.workspace)).source
    if done.returncode or not isinstance(made, ModelFolder):
        raise TrainingError(f"{source.label} can't be exported: {done.stderr.strip()}", fix=f"ftkit {' '.join(export)}")
    return made.folder


def _show_server(job_id: str, job: SideJob, address: str | None, terminal: Terminal) -> None:
    facts: Facts = [("model", job.plan.name)]
    if address:
        facts.append(("from a laptop", tunnel(address, socket.gethostname(), getpass.getuser())))
    else:
        facts.append(("address", f"once the server answers, in {short_path(job.address_file)}-{job_id}"))
    facts += [("log", short_path(job.log)), ("cancel", f"scancel {job_id}")]
    terminal.facts(facts, is_data=False)
