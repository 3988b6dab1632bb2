"""`ftkit export`: write a checkpoint's weights in Hugging Face's layout, and verify them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ftkit import process
from ftkit.cli.arguments import RUN_HELP, current_workspace, get_run, run_argument
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.data.imports import import_transformers
from ftkit.errors import EXIT_CODES, FtkitError, TrainingError
from ftkit.paths import is_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.planning.layout import RunLayout

_HUB = "hf://"
_VERIFICATION_SECONDS = 24 * 3600.0


@click.command(
    "export",
    cls=ForwardedCommand,
    short_help="Export a checkpoint for transformers, peft or vLLM.",
    examples=(
        "ftkit export last",
        "ftkit export demo --step best --dtype fp32",
        "ftkit export demo --step 10 --to ./my-model",
        "ftkit export demo --push ./copies/demo",
    ),
    help=f"""Export the trained model of a run from one of its checkpoints, on a machine without GPUs.

    The folder has everything transformers or peft loads: weights, configuration, tokenizer, chat template, generation
    settings and a model card. It is renamed into place only after another process has loaded it and computed the same
    logits as the trained model. Prints the folder.

    {RUN_HELP}
    """,
)
@run_argument
@click.option(
    "--step", metavar="N|best|last", default="",
    help="Checkpoint: a step, 'best' (by evaluation.best, or validation loss), or 'last'; default: the best by "
    "evaluation.best if the recipe sets it, else the newest.",
)  # fmt: skip
@click.option("--merge", "merges", is_flag=True, help="Merge adapters into the unquantized base model.")
@click.option(
    "--dtype", "precision", type=click.Choice(["bf16", "fp32"]), help="Dtype of the weights; default: that of training."
)
@click.option(
    "--format", "form", type=click.Choice(["hf", "gguf", "vllm-lora"]), default="hf", show_default=True,
    help="gguf: also write a GGUF file, with llama.cpp's own converter. vllm-lora: adapters; fails if vLLM would "
    "ignore any of them.",
)  # fmt: skip
@click.option(
    "--to", "folder", metavar="DIR", type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    help="Folder to write; default: in the run's folder.",
)  # fmt: skip
@click.option(
    "--push", "destination", metavar="hf://ORG/NAME|s3://…|gs://…|FOLDER",
    help="Copy the export there too. A new hub repository is private.",
)  # fmt: skip
@click.option(
    "--verify/--no-verify", "verifies", default=True,
    help="Verify the export (default). Where less than 4 bytes of memory per parameter are free, it takes longer.",
)  # fmt: skip
def command(  # noqa: PLR0913 - one for each option
    reference: str, *, step: str, merges: bool, precision: str | None, folder: Path | None, verifies: bool,
    destination: str | None, form: Any,
) -> None:  # fmt: skip
    """Export a checkpoint."""
    terminal, layout = Terminal(), get_run(reference).layout
    if destination is not None:
        _check_destination(destination)
    _use_hub_cache()
    import_transformers()
    from ftkit.evaluate.export import ExportRequest, export_run

    if form != "hf":
        _check_format(form, layout, merges=merges)
    request = ExportRequest(step, merges, cast("Any", precision), folder)
    exported = export_run(layout, request, _verifier(terminal) if verifies else None, terminal.say)
    if form != "hf":
        _finish_format(form, exported, layout, terminal)
    terminal.data(f"{exported}\n")
    if destination is not None:
        terminal.data(f"{_push(exported, destination, terminal)}\n")


def _check_format(form: Any, layout: RunLayout, *, merges: bool) -> None:
    from ftkit.evaluate.formats import check_format
    from ftkit.planning.plan import read_plan

    check_format(form, read_plan(layout), merges=merges)


def _finish_format(form: str, exported: Path, layout: RunLayout, terminal: Terminal) -> None:
    """Convert an export, or check that vLLM loads it."""
    from ftkit.evaluate.formats import read_precision, verify_vllm_lora, write_gguf

    if form == "vllm-lora":
        rank = verify_vllm_lora(exported)
        terminal.say(f"vLLM loads all of the adapters: vllm serve BASE --enable-lora --max-lora-rank {rank}")
        return
    precision = read_precision(exported)
    file = exported / f"{layout.root.name}-{precision}.gguf"
    for warning in write_gguf(exported, file, precision, terminal.say):
        terminal.warn(warning)


def _check_destination(destination: str) -> None:
    """Check that a destination can be written to, before anything is computed.

    Raises:
        UsageError: it is none of the forms of --push.
        FtkitError: it can't be written to.
    """
    from ftkit.hub.push import check_hub_access
    from ftkit.runs.storage.store import Store

    if destination.startswith(_HUB):
        check_hub_access(destination)
    elif destination.partition("://")[0] in ("s3", "gs") or is_path(destination):
        Store(destination).check_writable()
    else:
        raise click.UsageError(
            f"--push: expected hf://ORG/NAME, s3://…, gs://… or a folder (./copy), got '{destination}'",
            click.get_current_context(),
        )


def _push(exported: Path, destination: str, terminal: Terminal) -> str:
    """Copy an export; return its address."""
    from ftkit.hub.push import push_to_hub
    from ftkit.models.folder import EXPORT_RECORD
    from ftkit.runs.storage.sync import push

    try:
        if destination.startswith(_HUB):
            return push_to_hub(exported, destination, terminal.say)
        push(exported, destination, EXPORT_RECORD, terminal.say)
    except FtkitError as error:
        raise type(error)(
            f"the export is in {exported}, but not in {destination}: {error.what}",
            meaning=error.meaning,
            fix=error.fix or "repeat the command: existing files are not copied again",
        ) from error
    return destination


def _use_hub_cache() -> None:
    """Look for base models in the jobs' cache, unless HF_HOME is set."""
    os.environ.setdefault("HF_HOME", str(current_workspace().hub_home))


def _verifier(terminal: Terminal) -> Callable[[Path], None]:
    def verify(folder: Path) -> None:
        done = process.run_stoppable(
            [sys.executable, "-m", "ftkit", "verify", str(folder)], timeout_seconds=_VERIFICATION_SECONDS
        )
        if done.returncode == -signal.SIGKILL:
            raise TrainingError(
                "the process that verified the export was killed, and the export was removed",
                meaning="usually the machine ran out of memory: other programs took it while the check ran",
                fix="export on a machine with more memory, or without the check: --no-verify",
            )
        if done.returncode:
            what = done.stderr.strip() or EXIT_CODES.get(done.returncode, f"it ended with status {done.returncode}")
            raise _failed(what)
        terminal.say(done.stdout.rstrip())

    return verify


def _failed(what: str) -> FtkitError:
    return TrainingError(
        f"the export did not match the trained model and was removed\n{what}",
        fix="if rounding causes the difference: --dtype fp32",
    )
