"""The arguments of commands that run a model, and how these load it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import complete_run_step, current_workspace
from ftkit.data.imports import import_transformers
from ftkit.errors import PrerequisiteError
from ftkit.evaluate.source import ModelSource, Target, find_target

if TYPE_CHECKING:
    from ftkit.cli.terminal.console import Terminal
    from ftkit.evaluate.loaded_model import GeneratingModel, LoadedModel
    from ftkit.evaluate.served_model import EngineName

model_argument = click.argument("reference", metavar="RUN|MODEL", shell_complete=complete_run_step)
engine_option = click.option(
    "--engine", type=click.Choice(["auto", "transformers", "vllm"]), default="auto",
    help="auto, the default: vLLM for exports and hub models on GPUs where it is installed, else transformers.",
)  # fmt: skip


def require_packages(*names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"this command needs packages that are not installed: {', '.join(missing)}",
            meaning="ftkit was installed without the packages for training",
            fix="pip install 'ftkit[train]'; or run the same command in a job, in the training image of the run: "
            "it has all packages",
        )


def find_model(reference: str) -> Target:
    require_packages("torch", "transformers")
    target = find_target(reference, current_workspace())
    import_transformers()  # before modules that import more of it
    return target


@contextmanager
def load_into_engine(
    source: ModelSource, engine: EngineName, terminal: Terminal, *, has_pictures: bool = False, num_models: int = 1
) -> Iterator[GeneratingModel]:
    """Load one of `num_models` models into the selected engine for the block, and print where it is loaded."""
    from ftkit.evaluate.served_model import served_by_vllm, takes_vllm

    if takes_vllm(source, engine, has_pictures=has_pictures):
        terminal.say(f"loading {source.label} with vLLM")
        with served_by_vllm(source, terminal.say, num_models) as model:
            yield model
    else:
        yield load_here(source, terminal)


def load_here(source: ModelSource, terminal: Terminal) -> LoadedModel:
    """Load a model on the first GPU, on all GPUs if it doesn't fit on one, or on the CPU, and print where."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    from ftkit.evaluate.loaded_model import available_devices, load_model

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # its warnings about peft
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    devices = available_devices()
    where = "the CPU" if devices[0].type == "cpu" else str(devices[0])
    terminal.say(f"loading {source.label} on {where if len(devices) == 1 else f'{where}, or on {len(devices)} GPUs'}")
    return load_model(source, *devices)
