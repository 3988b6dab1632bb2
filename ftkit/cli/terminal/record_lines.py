"""Records as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from ftkit.cli.terminal.format import count, duration
from ftkit.config.training import ActivationCheckpointing
from ftkit.errors import plural
from ftkit.runs.records import (
    AnomalyRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    FailedCheckpointRecord,
    FirstStepRecord,
    MemoryRecord,
    ScriptStepRecord,
    ShardingRecord,
    StageRecord,
    StartRecord,
    StepRecord,
    VerificationRecord,
)

if TYPE_CHECKING:
    from ftkit.runs.records import Record


def sharding_text(record: ShardingRecord) -> str:
    """Describe how a script's model is sharded over its processes."""
    part = f"{count(record.num_held)} of {count(record.num_parameters)} parameters on rank 0"
    units = f", {plural(record.num_units, 'unit')}" if record.num_units else ""
    return f"{record.sharding}: {part}{units}"


_CHECKS = {
    "parameters": ("{}", "parameter"),
    "trainable parameters": ("{} of them trained", ""),
    "quantized parameters": ("{} of them quantized", ""),
    "parameters on this rank": ("{} on this rank", ""),
    "units": ("{}", "sharded unit"),
    "sharded layers": ("{} of them decoder layers", ""),
    **{
        f"layers with checkpointing '{mode}'": (f"{{}} with checkpointing '{mode}'", "layer")
        for mode in get_args(ActivationCheckpointing)
    },
    "offloaded layers": ("{} with activations in host memory", "layer"),
    "fewest targets in a pack": ("at least {} in each pack", "target"),
    "documents are": ("documents are {}", ""),
    "documents isolated": ("they do not attend to each other ({})", ""),
    "later tokens unseen": ("tokens do not attend to later ones ({})", ""),
    "logits of the model's own class": ("logits are those of the model's class ({})", ""),
}
"""The checks before step 1 in words, with the noun of what was counted, in the order in which they are printed."""


def checks_text(record: VerificationRecord) -> str:
    """Describe the checks before step 1; those that found nothing, such as quantized parameters, are left out."""
    others = {name: (f"{{}} {name}", "") for name in record.checks if name not in _CHECKS}
    found = ((words, noun, record.checks.get(name, 0)) for name, (words, noun) in (_CHECKS | others).items())
    return ", ".join(words.format(_counted(value, noun)) for words, noun, value in found if value not in (0, "0"))


def _counted(value: int | str, noun: str) -> str:
    if isinstance(value, int):
        return plural(value, noun) if noun else f"{value:,}"
    return value


def record_line(record: Record) -> str:  # noqa: C901, PLR0912 - one case for each kind of record
    """Return a record as one line of text."""
    match record:
        case StageRecord():
            line = record.stage
        case StartRecord():
            line = start_line(record)
        case VerificationRecord():
            line = f"checks passed: {checks_text(record)}"
        case MemoryRecord():
            line = (
                f"memory after {record.stage}: {record.largest_allocated_gib:.2f} GiB, "
                f"peak {record.largest_peak_gib:.2f} GiB"
            )
        case FirstStepRecord():
            line = first_step_line(record)
        case StepRecord():
            line = step_line(record)
        case AnomalyRecord():
            line = anomaly_line(record)
        case EvaluationRecord():
            line = evaluation_line(record)
        case CheckpointRecord():
            line = (
                f"checkpoint of step {record.step} written in {record.seconds:.1f} s, "
                f"training waited {record.stalled_seconds:.1f} s"
            )
        case FailedCheckpointRecord():
            line = (
                f"checkpoint of step {record.step} could not be written: {record.reason} "
                f"({plural(record.num_failed, 'failure')} in a row)"
            )
        case ShardingRecord():
            line = record.warning or sharding_text(record)
        case ScriptStepRecord():
            line = plural(record.step, "optimizer step")
        case EndRecord():
            line = (
                f"{record.outcome} after {plural(record.step, 'step')}, "
                f"{duration(record.training_seconds)} of training since the last start"
            ) + early_stopping(record)
    return line


def early_stopping(record: EndRecord) -> str:
    """Return why training ended before its last step; empty if it did not."""
    if record.early_stopping_patience is None:
        return ""
    return f"; stopped early: {plural(record.early_stopping_patience, 'evaluation')} without improvement"


def first_step_line(record: FirstStepRecord) -> str:
    """Describe how long a start took, with its longest phases."""
    longest = sorted(record.phases.items(), key=lambda phase: -phase[1])[:3]
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest)
    return f"step {record.step} ended {record.seconds:.1f} s after the start; longest: {phases}"


def anomaly_line(record: AnomalyRecord) -> str:
    """Describe an anomaly of a step."""
    if record.kind == "nonfinite":
        return f"step {record.step} skipped: its loss or gradient is not finite"
    return f"step {record.step} is a spike: loss {record.loss:.4f}, gradient norm {record.grad_norm:.3g}"


def step_line(record: StepRecord) -> str:
    """Describe a step."""
    return (
        f"step {record.step:>{len(str(record.num_steps))}}/{record.num_steps}  loss {record.loss:.4f}  "
        f"learning rate {record.learning_rate:.2e}  {count(record.tokens_per_second)} tokens/s"
    )


def start_line(record: StartRecord) -> str:
    """Describe the start of training."""
    where = f"{plural(record.world_size, 'process')}, {record.device}, {record.engine}"
    if record.resumed_from:
        return f"training continues after step {record.resumed_from} of {record.num_steps}: {where}"
    return f"training begins, {plural(record.num_steps, 'step')}: {where}"


def evaluation_line(record: EvaluationRecord) -> str:
    """Describe an evaluation."""
    when = f"{record.when} training" if record.when in {"before", "after"} else f"at step {record.step}"
    return f"validation {when}: {measured(record)}"


def measured(record: EvaluationRecord) -> str:
    """Return the numbers of an evaluation."""
    accuracy = record.execution_accuracy
    scores = [f"execution accuracy {accuracy:.0%}"] if accuracy is not None else []
    scores += [f"{name.replace('_', ' ')} {score:.0%}" for name, score in record.scores.items() if name != "sql"]
    return ", ".join([f"perplexity {record.perplexity:.4g}", *scores])
