"""`ftkit verify-export`: verify that an export computes the same as the trained model."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import current_workspace, json_option
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.data.imports import import_transformers

if TYPE_CHECKING:
    from ftkit.evaluate.vllm import EngineName


@click.command(
    "verify-export",
    cls=ForwardedCommand,
    short_help="Verify an export against the trained model.",
    examples=("ftkit verify-export ./my-model", "ftkit verify-export ./my-model --engine transformers"),
)
@click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
)
@click.option(
    "--engine", type=click.Choice(["auto", "transformers", "vllm"]), default="auto",
    help="vllm: also load it with vLLM's engine; auto, the default, does so on GPUs where vLLM is installed.",
)  # fmt: skip
@json_option
def command(folder: Path, *, engine: EngineName, as_json: bool) -> None:
    """Load an export with transformers (and peft), and compare it with the record that 'ftkit export' wrote.

    Checks that its logits equal the trained model's and differ from the base model's, that generation stops at each end
    token, and that the chat template renders as in training. With vLLM, the same is checked with its engine. Exits with
    code 9 if a check fails.
    """
    os.environ.setdefault("HF_HOME", str(current_workspace().hub_home))
    import_transformers()
    from transformers.utils import logging

    from ftkit.evaluate.source import ModelFolder
    from ftkit.evaluate.verify_export import read_record, require_passed, verify_export
    from ftkit.evaluate.vllm import takes_vllm

    logging.disable_progress_bar()
    terminal = Terminal()
    has_vllm = takes_vllm(ModelFolder(folder, str(folder)), engine)  # report a missing vLLM before a model is loaded
    checks = verify_export(folder, terminal.say)
    if has_vllm:
        from ftkit.evaluate.verify_vllm import verify_with_vllm

        terminal.say("loading the model with vLLM")
        checks += verify_with_vllm(folder, read_record(folder))
    if as_json:
        terminal.json([asdict(check) for check in checks])
    else:
        facts = [(check.name, check.found if check.passed else Styled(check.found, "red")) for check in checks]
        terminal.facts(facts, is_data=True)
    require_passed(folder, checks)
