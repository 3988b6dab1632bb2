"""`ftkit chat`, `ftkit generate` and `ftkit serve`, and the arguments of commands that run a model."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import warnings
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from ftkit import process
from ftkit.cli.arguments import complete_cluster, complete_image, complete_run, current_workspace
from ftkit.cli.commands import current_context
from ftkit.cli.forwarded import ForwardedCommand
from ftkit.cli.submit import say_overridden
from ftkit.cli.terminal.console import Cell, Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.image_reference import parse_image
from ftkit.config.load import load_cluster
from ftkit.data.conversations import read_tools
from ftkit.data.imports import import_transformers
from ftkit.errors import NotFoundError, PrerequisiteError, TrainingError
from ftkit.evaluate.source import ModelFolder, find_target
from ftkit.launch.side_jobs import ServeArgs, plan_serving, submit, tunnel, wait_for_server
from ftkit.planning.layout import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftkit.data.conversations import JsonObject
    from ftkit.evaluate.generate import ChatSession
    from ftkit.evaluate.load import GeneratingModel, LoadedModel
    from ftkit.evaluate.source import ModelSource, Target
    from ftkit.evaluate.vllm import EngineName
    from ftkit.launch.side_jobs import SideJob


MODEL_HELP = (
    "RUN selects a run as in other commands: its best step if the recipe sets evaluation.best, else the newest step "
    "with an export or a checkpoint. RUN@STEP is the model after a step, RUN@best the best one (else by validation "
    "loss), RUN@0 the model before training. MODEL is a folder (./model) or a hub id (org/model)."
)

model_argument = click.argument("reference", metavar="RUN|MODEL", shell_complete=complete_run)
engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "transformers", "vllm"]),
    default="auto",
    help="auto, the default: vLLM for exports and hub models on GPUs where it is installed, else transformers.",
)
_DECODING_OPTIONS = (
    click.option(
        "--max-new-tokens",
        metavar="N",
        type=click.IntRange(min=1),
        default=256,
        help="Maximum number of new tokens (default 256).",
    ),
    click.option(
        "--temperature",
        metavar="T",
        type=click.FloatRange(min=0),
        default=0.0,
        help="Sampling temperature; 0, the default, decodes greedily.",
    ),
    click.option("--seed", metavar="N", type=int, default=0, help="Sampling seed (default 0)."),
    engine_option,
)


def decoding_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the decoding options."""
    for decorate in reversed(_DECODING_OPTIONS):
        function = decorate(function)
    return function


def find_model(reference: str) -> Target:
    """Return the model that `reference` selects.

    Raises:
        PrerequisiteError: a package that runs models is missing here.
        NotFoundError: there is no such run or model.
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"this command runs a model and needs packages that are not installed: {', '.join(missing)}",
            meaning="ftkit was installed without the packages for training",
            fix="pip install 'ftkit[train]'; or run the same command in a job, in the training image of the run: "
            "it has all packages",
        )

    target = find_target(reference, current_workspace())
    import_transformers()  # before modules that import more of it
    return target


def load_into_engine(source: ModelSource, engine: EngineName, terminal: Terminal) -> GeneratingModel:
    """Load a model into the selected engine, and print where it is loaded.

    Raises:
        PrerequisiteError: vLLM is selected, and is missing here or can't load a checkpoint.
    """
    from ftkit.evaluate.vllm import load_with_vllm, takes_vllm

    if takes_vllm(source, engine):
        terminal.say(f"loading {source.label} with vLLM")
        return load_with_vllm(source)
    return load_model(source, terminal)


def load_model(source: ModelSource, terminal: Terminal) -> LoadedModel:
    """Load a model on the first GPU, on all GPUs if it doesn't fit on one, or on the CPU, and print where."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    from ftkit.evaluate.load import available_devices
    from ftkit.evaluate.load import load_model as load

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # its warnings about peft
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    devices = available_devices()
    where = "the CPU" if devices[0].type == "cpu" else str(devices[0])
    terminal.say(f"loading {source.label} on {where if len(devices) == 1 else f'{where}, or on {len(devices)} GPUs'}")
    return load(source, *devices)


@click.command(
    "chat",
    cls=ForwardedCommand,
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
def chat_command(
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
@click.option(
    "--output", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Output file; default: stdout."
)
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), default=8, help="Prompts per batch (default 8).")
@decoding_options
def generate_command(
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


_EXPORT_SECONDS = 6 * 3600


@click.command(
    "serve",
    cls=ForwardedCommand,
    examples=(
        "ftkit serve demo --dry-run",
        "ftkit serve demo --gpus 2 --time 08:00:00 --no-follow",
        "ftkit serve demo --no-follow -- --max-model-len 8192",
    ),
    help="""Start vLLM's OpenAI-compatible server on the export of a run, in the serving image, and print its address.

    RUN, RUN@STEP and RUN@best work as in 'ftkit chat'; a checkpoint without an export is exported first. Adapters are
    served on their base model. Arguments after -- are passed to 'vllm serve'. Export VLLM_API_KEY to require a key:
    without it, everyone on the cluster's network can use the server.
    """,
)
@click.argument("reference", metavar="RUN", shell_complete=complete_run)
@click.argument("words", metavar="[-- VLLM-OPTION]...", nargs=-1)
@click.option("--cluster", metavar="NAME", shell_complete=complete_cluster, help="Cluster; default: the run's.")
@click.option("--image", metavar="NAME:TAG", shell_complete=complete_image, help="Serving image; default: vllm:0.33.")
@click.option(
    "--gpus", "num_gpus", metavar="N", type=click.IntRange(min=1), help="GPUs; default: as many as the weights need."
)
@click.option(
    "--port", metavar="N", type=click.IntRange(1024, 65535), help="Port; default: 20000 + job id modulo 10000."
)
@click.option("--time", "time_limit", metavar="LIMIT", help="Time limit; default: the profile's.")
@click.option("--dry-run", is_flag=True, help="Print the job script and submit nothing.")
@click.option("--follow/--no-follow", default=True, help="Wait until the server answers (default).")
def serve_command(  # noqa: PLR0913 - one for each option
    reference: str, words: tuple[str, ...], *, cluster: str | None, image: str | None, num_gpus: int | None,
    port: int | None, time_limit: str | None, dry_run: bool, follow: bool,
) -> None:  # fmt: skip
    """Serve a model."""
    terminal, ctx = Terminal(), current_context()
    target = find_target(reference, current_workspace())
    if target.plan is None:
        raise NotFoundError(f"{reference} is not a run", fix="serve a folder with vLLM itself: vllm serve FOLDER")
    place = load_cluster(cluster, ctx) if cluster else target.plan.cluster
    chosen = parse_image(image, ctx.project, "command line", "--image") if image else None
    args = ServeArgs(num_gpus, port, time_limit, words)
    folder = _export(target, terminal, dry_run=dry_run)
    job = plan_serving(target.plan, place, chosen, folder, args, ctx)
    say_overridden(terminal, ctx.project)
    if dry_run:
        terminal.data(job.script)
        return
    job_id = submit(job, os.environ)
    terminal.say(f"job {job_id} serves {target.plan.id}")
    if follow:
        _follow_server(job, job_id, terminal)
    else:
        _show_server(job_id, job, None, terminal)
        terminal.data(f"{job_id}\n")


def _export(target: Target, terminal: Terminal, *, dry_run: bool) -> Path:
    """Return the export to serve; if there is only a checkpoint, export it first."""
    source = target.source
    if isinstance(source, ModelFolder):
        return source.folder
    export = ["export", source.plan.id, "--step", str(source.step)]
    if dry_run or not source.step:
        raise NotFoundError(f"there is no export of {source.label}", fix=f"export it: ftkit {' '.join(export)}")
    terminal.say(f"exporting {source.label}")
    done = process.run_stoppable([sys.executable, "-m", "ftkit", *export], timeout_seconds=_EXPORT_SECONDS)
    made = find_target(source.label, Workspace(source.plan.workspace)).source
    if done.returncode or not isinstance(made, ModelFolder):
        raise TrainingError(f"{source.label} can't be exported: {done.stderr.strip()}", fix=f"ftkit {' '.join(export)}")
    return made.folder


def _follow_server(job: SideJob, job_id: str, terminal: Terminal) -> None:
    try:
        address = wait_for_server(job, job_id, terminal.say)
    except KeyboardInterrupt:
        _show_server(job_id, job, None, terminal)
        raise
    _show_server(job_id, job, address, terminal)
    terminal.data(f"{address}/v1\n")


def _show_server(job_id: str, job: SideJob, address: str | None, terminal: Terminal) -> None:
    facts: list[tuple[str, Cell]] = [("model", job.plan.name)]
    if address:
        facts.append(("from a laptop", tunnel(address, socket.gethostname(), getpass.getuser())))
    else:
        facts.append(("address", f"once the server answers, in {short_path(job.address_file)}-{job_id}"))
    facts += [("log", short_path(job.log)), ("cancel", f"scancel {job_id}")]
    terminal.facts(facts, is_data=False)
