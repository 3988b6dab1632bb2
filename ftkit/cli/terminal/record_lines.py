"""Records as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from ftkit.cli.terminal.format import count, duration
from ftkit.config.objectives import OBJECTIVE_METRICS
from ftkit.config.training import ActivationCheckpointing
from ftkit.errors import plural
from ftkit.runs import records


def sharding_text(record: records.ShardingRecord) -> str:
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
    "first loss of pairs": ("the loss is {} while the model is its reference", ""),
    "margin of pairs": ("a step along the gradient raises the margin by {}", ""),
    "logits of the model's own class": ("logits are those of the model's class ({})", ""),
}
"""The checks before step 1 in words, with the noun of what was counted, in the order in which they are printed."""


def damage_of(record: records.StartRecord) -> str:
    """Name the damaged checkpoints that a resume passed over."""
    return f"checkpoint of step {' and '.join(map(str, record.damaged))}"


def checks_text(record: records.VerificationRecord) -> str:
    """Describe the checks before step 1; those that found nothing, such as quantized parameters, are left out."""
    others = {name: (f"{{}} {name}", "") for name in record.checks if name not in _CHECKS}
    parts = []
    for name, (words, noun) in (_CHECKS | others).items():
        value = record.checks.get(name, 0)
        if value in (0, "0"):
            continue
        if isinstance(value, int):
            value = plural(value, noun) if noun else f"{value:,}"
        parts.append(words.format(value))
    return ", ".join(parts)


def record_line(record: records.Record) -> str:  # noqa: C901, PLR0911, PLR0912 - one case for each kind of record
    match record:
        case records.StageRecord():
            return record.stage
        case records.StartRecord():
            where = f"{plural(record.world_size, 'process')}, {record.device}, {record.engine}"
            if record.resumed_from:
                damaged = f"; damaged: {damage_of(record)}" if record.damaged else ""
                return f"training continues after step {record.resumed_from} of {record.num_steps}: {where}{damaged}"
            return f"training begins, {plural(record.num_steps, 'step')}: {where}"
        case records.VerificationRecord():
            return f"checks passed: {checks_text(record)}"
        case records.MemoryRecord():
            now, peak = record.largest_allocated_gib, record.largest_peak_gib
            return f"memory after {record.stage}: {now:.2f} GiB, peak {peak:.2f} GiB"
        case records.FirstStepRecord():
            longest = sorted(record.phases.items(), key=lambda phase: -phase[1])[:3]
            phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest)
            return f"step {record.step} ended {record.seconds:.1f} s after the start; longest: {phases}"
        case records.StepRecord():
            step = f"{record.step:>{len(str(record.num_steps))}}/{record.num_steps}"
            rate, speed = f"{record.learning_rate:.2e}", count(record.tokens_per_second)
            return f"step {step}  loss {record.loss:.4f}  learning rate {rate}  {speed} tokens/s in total"
        case records.AnomalyRecord():
            if record.kind == "nonfinite":
                return f"step {record.step} skipped: its loss or gradient is not finite"
            return f"step {record.step} is a spike: loss {record.loss:.4f}, gradient norm {record.grad_norm:.3g}"
        case records.EvaluationRecord():
            when = f"{record.when} training" if record.when in {"before", "after"} else f"at step {record.step}"
            return f"validation {when}: {measured(record)}"
        case records.CheckpointRecord():
            waited = f"training waited {record.stalled_seconds:.1f} s"
            return f"checkpoint of step {record.step} written in {record.seconds:.1f} s, {waited}"
        case records.FailedCheckpointRecord():
            failures = f"{plural(record.num_failed, 'failure')} in a row"
            return f"checkpoint of step {record.step} could not be written: {record.reason} ({failures})"
        case records.ShardingRecord():
            return record.warning or sharding_text(record)
        case records.ScriptStepRecord():
            step = f"step {record.step}/{record.num_steps}" if record.num_steps else plural(record.step, "step")
            loss = "" if record.loss is None else f", loss {record.loss:.4f}"
            rate = "" if record.learning_rate is None else f", learning rate {record.learning_rate:.2e}"
            return f"{step}{loss}{rate}"
        case records.EndRecord():
            took = f"{duration(record.training_seconds)} of training since the last start"
            return f"{record.outcome} after {plural(record.step, 'step')}, {took}{early_stopping(record)}"
        case _:
            raise TypeError(record.event)


def early_stopping(record: records.EndRecord) -> str:
    """Return why training ended before its last step; empty if it did not."""
    if record.early_stopping_patience is None:
        return ""
    return f"; stopped early: {plural(record.early_stopping_patience, 'evaluation')} without improvement"


def measured(record: records.EvaluationRecord) -> str:
    own = {name: score for name, score in record.scores.items() if name not in OBJECTIVE_METRICS}
    scores = [f"{name.replace('_', ' ')} {score:.0%}" for name, score in own.items()]
    pairs = [f"loss {record.loss:.4g}", *texts] if (texts := pair_texts(record.scores)) else []
    return ", ".join([*pairs, f"perplexity {record.perplexity:.4g}", *scores])


def pair_texts(scores: Mapping[str, float]) -> list[str]:
    """Return the objective's metrics in words; both sides apart, because training may make both less likely."""
    if "agreement" in scores:
        losses = f"kl {scores['kl']:.3g}, next token loss {scores['next_token_loss']:.3g}"
        return [losses, f"agreement with the teacher {scores['agreement']:.0%}"]
    if not {"log_prob_chosen", "log_prob_rejected"} & scores.keys():
        return []

    def both(name: str) -> str:
        keys = (f"{name}_{side}" for side in ("chosen", "rejected"))
        return " and ".join(f"{scores[key]:.3g}" if key in scores else "-" for key in keys)

    is_untrained = not scores["accuracy"] and scores.get("margin") == 0  # all margins are 0, so none is right or wrong
    labels = {"kl_per_token": "log-ratio per token", "kl": "reference point"}  # the latter of kto
    return [
        *([] if is_untrained else [f"accuracy {scores['accuracy']:.0%}"]),
        *([f"margin {scores['margin']:.3g}"] if "margin" in scores else []),
        f"rewards {both('reward')}",
        f"log-probabilities {both('log_prob')} (chosen and rejected)",
        *(f"{label} {scores[name]:.3g}" for name, label in labels.items() if name in scores),
    ]
