"""`ftkit serve`: serve a trained model with vLLM, as a Slurm job."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from typing import TYPE_CHECKING

import click

from ftkit import process
from ftkit.cli.arguments import complete_cluster, complete_image, complete_run, current_workspace
from ftkit.cli.commands import ForwardedCommand, current_context
from ftkit.cli.terminal.console import Cell, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.errors import NotFoundError, TrainingError

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.evaluate.source import Target
    from ftkit.launch.side_jobs import ServingJob

_EXPORT_SECONDS = 6 * 3600


@click.command(
    "serve",
    cls=ForwardedCommand,
    short_help="Serve a trained model with vLLM, as a Slurm job.",
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
def command(  # noqa: PLR0913 - one for each option
    reference: str, words: tuple[str, ...], *, cluster: str | None, image: str | None, num_gpus: int | None,
    port: int | None, time_limit: str | None, dry_run: bool, follow: bool,
) -> None:  # fmt: skip
    """Serve a model."""
    from ftkit.config.image_reference import parse_image
    from ftkit.config.load import load_cluster
    from ftkit.evaluate.source import find_target
    from ftkit.launch.side_jobs import ServeArgs, plan_serving, submit_serving

    terminal, ctx = Terminal(), current_context()
    target = find_target(reference, current_workspace())
    if target.plan is None:
        raise NotFoundError(f"{reference} is not a run", fix="serve a folder with vLLM itself: vllm serve FOLDER")
    place = load_cluster(cluster, ctx) if cluster else target.plan.cluster
    chosen = parse_image(image, ctx.project, "command line", "--image") if image else None
    args = ServeArgs(num_gpus, port, time_limit, words)
    folder = _export(target, terminal, dry_run=dry_run)
    job = plan_serving(target.plan, place, chosen, folder, args, ctx)
    if dry_run:
        terminal.data(job.script)
        return
    job_id = submit_serving(job, os.environ)
    terminal.say(f"job {job_id} serves {target.plan.id}")
    if follow:
        _follow(job, job_id, terminal)
    else:
        _show(job_id, job, None, terminal)
        terminal.data(f"{job_id}\n")


def _export(target: Target, terminal: Terminal, *, dry_run: bool) -> Path:
    """Return the export to serve; if there is only a checkpoint, export it first."""
    from ftkit.evaluate.source import ModelFolder, find_target
    from ftkit.planning.layout import Workspace

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


def _follow(job: ServingJob, job_id: str, terminal: Terminal) -> None:
    from ftkit.launch.side_jobs import wait_for_server

    try:
        address = wait_for_server(job, job_id, terminal.say)
    except KeyboardInterrupt:
        _show(job_id, job, None, terminal)
        raise
    _show(job_id, job, address, terminal)
    terminal.data(f"{address}/v1\n")


def _show(job_id: str, job: ServingJob, address: str | None, terminal: Terminal) -> None:
    from ftkit.launch.side_jobs import tunnel

    facts: list[tuple[str, Cell]] = [("model", job.plan.name)]
    if address:
        facts.append(("from a laptop", tunnel(address, socket.gethostname(), getpass.getuser())))
    else:
        facts.append(("address", f"once the server answers, in {short_path(job.address_file)}-{job_id}"))
    facts += [("log", short_path(job.log)), ("cancel", f"scancel {job_id}")]
    terminal.facts(facts, is_data=False)
