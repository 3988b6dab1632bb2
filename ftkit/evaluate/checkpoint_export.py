"""Export the weights of any checkpoint of a run, in one process on a CPU, one decoder layer at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ftkit.config.training import Precision
from ftkit.data.cases import ModelInput
from ftkit.errors import (
    ConfigError,
    DataError,
    NotFoundError,
    PrerequisiteError,
    Problem,
    TrainingError,
    one_line,
    plural,
)
from ftkit.evaluate.loaded_model import LoadedModel, config_of, tokenizer_of
from ftkit.evaluate.scoring import evaluation_set
from ftkit.evaluate.source import MeasureSettings, TrainedStep
from ftkit.evaluate.verify_export import check_memory, peak_bytes
from ftkit.files import atomic_folder, read_json_if_valid
from ftkit.models.folder import EXPORT_RECORD
from ftkit.planning.plan import RunPlan, read_plan_to_use
from ftkit.runs.certificate import keep_certificate
from ftkit.runs.checkpoints import DamagedCheckpointError, choose_step
from ftkit.train.checkpoint.loading import describe_damage, open_trained
from ftkit.train.components.export_record import streamed_bytes
from ftkit.train.components.exporter import ExportedParts, Exporter, build_export_model
from ftkit.train.components.generation import Generation
from ftkit.train.memory.usage import available_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftkit.planning.layout import RunLayout

_MAX_COMPARED_ROWS = 50
_MAX_COMPARED_TOKENS = 2048  # tokens of a batch, padding included: its fp32 logits are in memory


@dataclass(frozen=True)
class ExportRequest:
    step: str  # a step with a checkpoint, or a name such as `last` or `best` (`choose_step`)
    merges: bool  # whether adapters are merged into the base model
    precision: Precision | None  # of the weights; None for that of training
    folder: Path | None  # None for a folder in the run's folder


def export_run(
    layout: RunLayout, request: ExportRequest, verify: Callable[[Path], None] | None, report: Callable[[str], None]
) -> Path:
    """Export a checkpoint; return the folder, which is renamed into place after `verify` returns.

    `verify` checks a written folder, and raises if it differs from the trained model. Without it, no reference values
    are recorded, and the model is never run. `report` gets a line at the start of each stage.

    Raises:
        ConfigError: adapters are to be merged, and the run has none.
        NotFoundError: there is no such checkpoint, or the base model can't be found.
        PrerequisiteError: this user can't write the folder, or this machine has too little memory to verify the export.
        TrainingError: a checkpoint is damaged, or belongs to another model.
    """
    plan = read_plan_to_use(layout)
    if request.merges and plan.recipe.training.adapters is None:
        raise ConfigError([Problem("", "--merge", "has no effect: this run has no adapters.", "Leave it out.")])
    checkpoints = dict(layout.list_checkpoints())
    step = choose_step(layout, request.step, checkpoints)
    checkpoint = checkpoints[step]
    words = [f"step-{step:06d}", "merged" if request.merges else "", request.precision or ""]
    folder = request.folder or layout.exports / "-".join(filter(None, words))
    _check_replaceable(folder, layout.root.name)
    report(f"reading the checkpoint of step {step}")
    try:
        if damage := describe_damage(checkpoint, step):
            raise DamagedCheckpointError(damage)  # noqa: TRY301 - one message for both
        tokenizer = tokenizer_of(TrainedStep(layout, plan, step))
        base, config = config_of(plan, tokenizer)
        parts = ExportedParts(plan.recipe, config, tokenizer, Generation.of(tokenizer, base), base)
        model = build_export_model(parts)
        if verify is not None:
            # The maximum over this process and the one that loads the export.
            largest = max(parameter.numel() for parameter in model.parameters())
            check_memory(max(streamed_bytes(model), peak_bytes(largest)), available_bytes())
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        trained = open_trained(checkpoint, shapes)
    except DamagedCheckpointError as error:
        raise TrainingError(
            f"the checkpoint {checkpoint} can't be exported: {one_line(error)}",
            meaning="the file system lost data, files were changed or moved, or they belong to another model",
            fix="export another step: --step N",
        ) from error
    exporter = Exporter(parts, model, trained)
    precision = request.precision or plan.recipe.training.compute_precision
    record = exporter.record(layout.root.name, step, precision, merges=request.merges)
    if verify is not None:
        report("computing logits of the trained model and of its base")
        record = exporter.with_logits(record)
        if request.merges and plan.recipe.training.method == "qlora":
            record = replace(record, merged=_compare_bases(exporter, plan, parts, report))
    with atomic_folder(folder) as temporary:
        report(f"writing {folder}")
        exporter.write(record, temporary, layout)
        keep_certificate(folder, temporary)
        if verify is not None:
            report("loading the export in another process to compare it with the trained model")
            verify(temporary)
    return folder


def _compare_bases(
    exporter: Exporter, plan: RunPlan, parts: ExportedParts, report: Callable[[str], None]
) -> tuple[float, float, int] | None:
    """Return the losses with training's 4-bit base and with the unquantized base, and the number of documents."""
    config = parts.config.text
    try:
        rows = MeasureSettings(("loss",), limit=_MAX_COMPARED_ROWS)
        data, _ = evaluation_set(ModelInput.of(parts.tokenizer, plan.id, config), plan, rows, report)
    except DataError as error:
        report(f"the loss with the unquantized base was not compared: {error.what}")
        return None
    documents = [document for _, document in data.documents]
    while len(documents) > 1 and len(documents) * max(len(each.tokens) for each in documents) > _MAX_COMPARED_TOKENS:
        documents.pop()

    def measure(model: PreTrainedModel) -> float:
        loaded = LoadedModel(plan.id, parts.tokenizer, parts.generation, model, torch.device("cpu"))
        sums = loaded.losses(documents)
        return math.fsum(loss for loss, _, _ in sums) / max(1.0, math.fsum(count for _, count, _ in sums))

    trained, unquantized = exporter.compare_bases(measure)
    report(
        f"the adapters are merged into the 4-bit base that they were trained on, dequantized: loss {trained:.4f} on "
        f"{plural(len(documents), 'validation document')}; with the unquantized base {unquantized:.4f}"
    )
    return trained, unquantized, len(documents)


def _check_replaceable(folder: Path, run: str) -> None:
    """Check that this user can write the folder, and that it is absent, empty, or an export of the same run."""
    existing = next(each for each in folder.parents if each.exists())
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        raise PrerequisiteError(
            f"can't write to {existing}",
            meaning="it is read-only, or belongs to another user",
            fix="export into a folder of your own: --to DIR",
        )
    is_empty = folder.is_dir() and not any(folder.iterdir())
    record = read_json_if_valid(folder / EXPORT_RECORD, dict[str, object]) or {}
    if folder.exists() and not is_empty and record.get("run") != run:
        is_what = f"is an export of {record['run']}" if record.get("run") else "is not an export"
        raise NotFoundError(
            f"--to: {folder} exists and {is_what}",
            meaning="an export only replaces an earlier export of the same run",
            fix="give a new folder",
        )
