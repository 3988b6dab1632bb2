"""`ftkit serve`: serve a model to other programs, from a Slurm job."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from typing import TYPE_CHECKING

import click

from ftkit import process
from ftkit.cli.arguments import (
    cluster_option,
    current_workspace,
    dry_run_option,
    follow_option,
    image_option,
    number_option,
    run_argument,
    time_option,
)
from ftkit.cli.commands import current_context
from ftkit.cli.forwarded import ForwardedCommand
from ftkit.cli.submit import say_overridden
from ftkit.cli.terminal.console import Facts, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.image_reference import parse_image
from ftkit.config.load import load_cluster
from ftkit.errors import NotFoundError, TrainingError
from ftkit.evaluate.source import ModelFolder, find_target
from ftkit.launch.side_jobs import ServeArgs, plan_serving, submit, tunnel, wait_for_server
from ftkit.planning.layout import Workspace

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.evaluate.source import Target
    from ftkit.launch.render import SideJob

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
@run_argument
@click.argument("words", metavar="[-- VLLM-OPTION]...", nargs=-1)
@cluster_option
@image_option("Serving image; default: vllm:0.33.")
@number_option("--gpus", "num_gpus", about="GPUs; default: as many as the weights need.")
@number_option("--port", low=1024, high=65535, about="Port; default: 20000 + job id modulo 10000.")
@time_option("the profile's")
@dry_run_option("the job script")
@follow_option
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
    job_id, address = submit(job, os.environ), None
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
    done = process.run_stoppable([sys.executable, "-m", "ftkit", *export], timeout_seconds=_EXPORT_SECONDS)
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
