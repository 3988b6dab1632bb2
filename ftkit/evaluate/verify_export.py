"""Verify an export: load it with transformers and peft, and compare its logits with its record."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

from ftkit.errors import FtkitError, NotFoundError, TrainingError, one_line
from ftkit.files import DamagedFileError, read_json
from ftkit.model_folder import EXPORT_RECORD
from ftkit.runs.checkpoints import SavedFile
from ftkit.train.components.export_record import ExportRecord, render, sample_logits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLERANCE = 1e-4
"""Largest error of logits: the root-mean-square difference from the record's, relative to their standard deviation.
Both are computed in fp32 from the same numbers; docs/use-the-model.md has measured errors."""
_TOLERANCE_BEFORE_ROUNDING = 5e-2
"""The same for records of earlier versions, which have the logits of the weights before they were rounded to bf16."""
CLOSER_THAN_BASE = 0.5
"""Largest error, and largest change by rounding, relative to the distance between the trained model and its base."""
_NUM_TOKENS_BEFORE_END = 3


@dataclass(frozen=True)
class Check:
    """The result of one comparison, and whether it failed."""

    name: str
    found: str
    passed: bool


def verify_export(folder: Path, report: Callable[[str], None]) -> list[Check]:
    """Compare an export with its record; return every check, passed or not.

    Args:
        folder: the export.
        report: called with one line at the start of each stage.

    Raises:
        NotFoundError: it is not an export, or has no record.
    """
    record = read_record(folder)
    report("reading the weight files")
    checks = [_check_files(folder, record)]
    report("loading the tokenizer")
    checks += _check_tokenizer(folder, record)
    report("loading the model")
    try:
        checks += _check_model(folder, record)
    except FtkitError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged files make transformers, peft and safetensors raise anything
        checks.append(Check("loads in transformers", f"{type(error).__name__}: {one_line(error)}", passed=False))
    return checks


def require_passed(folder: Path, checks: list[Check]) -> None:
    """Raise an error if any check failed.

    Raises:
        TrainingError: with all failed checks.
    """
    failed = [check for check in checks if not check.passed]
    if failed:
        raise TrainingError(
            f"{folder} does not match the trained model: "
            + "; ".join(f"{check.name}: {check.found}" for check in failed),
            meaning="files were changed, renamed or truncated after the export, or a library loads them differently",
            fix="export again with 'ftkit export', and don't serve this folder",
        )


def read_record(folder: Path) -> ExportRecord:
    """Read the record of an export.

    Raises:
        NotFoundError: there is no usable record.
    """
    missing = NotFoundError(
        f"{folder} has no {EXPORT_RECORD} with the trained model's logits",
        meaning="ftkit did not export it, an earlier version did, or the logits could not be computed",
        fix="export the run again: ftkit export RUN",
    )
    try:
        record = read_json(folder / EXPORT_RECORD, ExportRecord)
    except DamagedFileError as error:
        raise missing from error
    if record is None or record.trained is None:
        raise missing
    return record


def _check_files(folder: Path, record: ExportRecord) -> Check:
    wrong = []
    for name, file in record.files.items():
        try:
            is_intact = SavedFile.of(folder / name) == file
        except OSError:
            is_intact = False
        wrong += [] if is_intact else [name]
    extra = {path.name for path in folder.glob("*.safetensors")} - record.files.keys()
    if wrong or extra:
        text = f"differ from what was written: {', '.join([*wrong, *sorted(extra)])}"
        return Check("weight files", text, passed=False)
    return Check("weight files", f"{len(record.files)}, sizes and digests as written", passed=True)


def _check_tokenizer(folder: Path, record: ExportRecord) -> list[Check]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        differing = []
        for prompt in record.prompts:
            text = render(tokenizer, prompt) if prompt.turns else prompt.text
            tokens = tokenizer(text, add_special_tokens=not prompt.turns)["input_ids"]
            if text != prompt.text or tuple(tokens) != prompt.tokens:
                differing.append(text)
    except Exception as error:  # noqa: BLE001 - templates and damaged files raise anything
        return [Check("chat template", f"{type(error).__name__}: {one_line(error)}", passed=False)]
    if differing:
        text = f"{len(differing)} of {len(record.prompts)} prompts are rendered differently than in training"
        return [Check("chat template", f"{text}: {one_line(differing[0])!r}", passed=False)]
    return [Check("chat template", f"renders {len(record.prompts)} prompts as in training", passed=True)]


def _check_model(folder: Path, record: ExportRecord) -> list[Check]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reasons for warnings, such as missing adapters, are checked below
        model = _load(folder, record)
    model.eval()
    logits, trained = sample_logits(model, record.prompts), record.trained or []
    error = distance(logits, record.exported or trained)
    is_before_rounding = record.exported is None and record.precision != "fp32"
    tolerance = _TOLERANCE_BEFORE_ROUNDING if is_before_rounding else TOLERANCE
    checks, effect = [], None
    if record.untrained is not None:
        effect = distance(record.untrained, trained)
        tolerance = min(tolerance, CLOSER_THAN_BASE * effect)
        from_base = distance(logits, record.untrained, trained)
        text = f"differ by {from_base:.2g}, as trained: {effect:.2g}"
        checks.append(Check("logits and the base model's", text, passed=effect > 0 and from_base > error))
        if record.kind == "adapters":
            with model.disable_adapter():
                base_error = distance(sample_logits(model, record.prompts), record.untrained)
            text = f"logits differ by {base_error:.2g} from those of the base of training"
            checks.append(Check("base model", text, passed=base_error <= TOLERANCE))
    if record.exported is not None:
        rounding = distance(record.exported, trained)
        text = f"to {record.precision} moves logits by {rounding:.2g}"
        is_small = effect is None or rounding <= CLOSER_THAN_BASE * effect
        checks.append(Check("rounding", text if is_small else f"{text}, training by {effect:.2g}", passed=is_small))
    text = f"differ by {error:.2g}, tolerance {tolerance:.2g}"
    checks.append(Check("logits and the trained model's", text, passed=error <= tolerance))
    return [*checks, _check_end(folder, model, record)]


def _load(folder: Path, record: ExportRecord) -> Any:
    if record.kind == "model":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from peft import PeftModel  # noqa: PLC0415 - takes seconds, and only adapters need it

    try:
        base = AutoModelForCausalLM.from_pretrained(record.base, revision=record.revision, dtype=torch.float32)
    except OSError as error:
        raise NotFoundError(
            f"the base model {record.base} can't be loaded: {one_line(error)}",
            meaning="adapters need it, and it is not on this machine",
            fix="copy it to this machine, or set HF_HOME to the cache that has it",
        ) from error
    return PeftModel.from_pretrained(base, str(folder))


def distance(one: list[Any], other: list[Any], scale: list[Any] | None = None) -> float:
    """Return the root-mean-square difference, relative to the standard deviation of the last argument."""
    if [len(row) for row in one] != [len(row) for row in other]:
        return float("inf")
    first, second, third = (
        torch.tensor([token for row in rows for token in row]) for rows in (one, other, scale or other)
    )
    if first.shape != second.shape:
        return float("inf")
    distance = float((first - second).square().mean().sqrt() / third.std())
    return distance if distance == distance else float("inf")  # noqa: PLR0124 - NaN


def _check_end(folder: Path, model: Any, record: ExportRecord) -> Check:
    """Generate with the exported settings; a completion must end at each end token."""
    if not record.end_tokens:
        return Check("end of turn", "no token ends a completion, as in training", passed=True)
    settings = GenerationConfig.from_pretrained(folder)
    settings.update(max_new_tokens=2 * _NUM_TOKENS_BEFORE_END + 2, do_sample=False, num_beams=1)
    if settings.pad_token_id is None:
        settings.pad_token_id = record.end_tokens[0]
    prompt = torch.tensor([record.prompts[0].tokens])
    length = prompt.shape[1] + _NUM_TOKENS_BEFORE_END
    other = next(token for token in range(len(record.end_tokens) + 1) if token not in record.end_tokens)
    written = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    missed = [str(end) for end in record.end_tokens if end not in written]
    for end in () if missed else record.end_tokens:
        done = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=settings,
            # All tokens are forced: the end token at this length, and before it a token that ends nothing.
            prefix_allowed_tokens_fn=lambda _, row, end=end: [end] if len(row) == length else [other],
        )
        missed += [] if done.shape[1] == length + 1 else [str(end)]
    if missed:
        return Check("end of turn", f"generation does not stop at token {', '.join(missed)}", passed=False)
    return Check("end of turn", f"generation stops at {', '.join(map(str, record.end_tokens))}", passed=True)
