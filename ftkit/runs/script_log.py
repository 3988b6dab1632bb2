"""Parse a script's progress from its output: tqdm and Keras bars, the Trainer's dicts, and lines with a loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftkit.process import without_control
from ftkit.runs.ends import log_tail
from ftkit.runs.metrics_file import read_last_record
from ftkit.runs.records import EndRecord, ScriptStepRecord

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout

_MAX_LINE = 2_000  # characters; longer lines are ignored
_RANK = re.compile(r"^(?:\[\w{1,20}\]:? ?)+")  # torchrun's and accelerate's prefix of a line
_FLOAT = r"""\s{0,9}[:=]?\s{0,9}\[?(?:tensor\()?['"]?([-+]?(?:\d{1,30}\.?\d{0,30}(?:e[-+]?\d{1,3})?|nan|inf)\b)"""
_INTEGER = r"(\d{1,3}(?:,\d{3}){1,5}|\d{1,18})"
_TQDM = re.compile(r"\d{1,3}%\|[^|]{0,200}\|\s{0,9}(\d{1,18})/(\d{1,18}) \[[\d:]{1,12}<([\d:]{1,12})?")
_KERAS = re.compile(r"^\s{0,9}(\d{1,18})/(\d{1,18}) [━\[]")
_STEP = re.compile(
    r"(?<![\w-])(?:global[ _])?(?:steps?|iteration|iter)['\"]?\s{0,12}[:=#]?\s{0,12}\[?"
    rf"{_INTEGER}(?:\s{{0,12}}(?:/|of)\s{{0,12}}{_INTEGER})?\b",
    re.IGNORECASE,
)
_LOSS = re.compile(rf"(?<![\w.])(?:([a-z]{{1,20}})[ _/-])?loss['\"]?{_FLOAT}", re.IGNORECASE)
_LEARNING_RATE = re.compile(rf"(?<![\w-])(?:learning[ _-]rate|lr)['\"]?{_FLOAT}", re.IGNORECASE)
_OF_TRAINING = re.compile(r"train|epoch|step|iter|loss|tun", re.IGNORECASE)
_OF_EVALUATION = re.compile(r"^(?:val|eval|test|dev|aux|best)", re.IGNORECASE)


@dataclass
class _Count:
    """A count of steps in the output; `num_losses` counts losses on its lines, or while it was the newest count."""

    step: int
    total: int | None
    first_line: int
    num_losses: int = 0
    seconds_left: float | None = None

    @property
    def rank(self) -> tuple[int, bool, bool, int]:
        """Larger if it more likely counts training steps; an evaluation's bar begins while the Trainer's is open."""
        is_open = self.total is not None and self.step < self.total
        return self.num_losses, self.total is not None, is_open, -self.first_line if is_open else self.first_line


def read_script_step(layout: RunLayout) -> ScriptStepRecord | None:
    """Read a script's progress from the ends of its log and metrics.jsonl; None if neither has any."""
    last = read_last_record(layout.metrics)
    known = last if isinstance(last, ScriptStepRecord | EndRecord) else None
    found = parse_progress(log_tail(layout, None), known.step if known else 0)
    return replace(found, time=known.time) if known else found if found != ScriptStepRecord(0, 0) else None


def parse_progress(lines: Iterable[str], num_counted: int = 0) -> ScriptStepRecord:
    """Return the progress in lines of output, where a carriage return ends a line too; the step is 0 if it shows none.

    `num_counted` is the known number of optimizer steps so far: a bar with a smaller total counts something else,
    such as the steps of one epoch.
    """
    counts: dict[int | None, _Count] = {}
    newest: _Count | None = None
    loss = learning_rate = None
    for number, line in enumerate(lines):
        text = _RANK.sub("", without_control(line)) if len(line) <= _MAX_LINE else ""
        losses = [] if "train_runtime" in text else _LOSS.findall(text)  # the Trainer's last line has the mean
        losses = [value for before, value in losses if not _OF_EVALUATION.match(before)]
        count = _read_count(text, number, has_loss=bool(losses))
        if count:
            count.first_line, count.num_losses = number, 0
            if known := counts.get(count.total):
                count.first_line, count.num_losses = known.first_line, known.num_losses
            counts[count.total] = count
            newest = count if count.total is not None or newest is None else newest
        if losses:
            loss = float(losses[0])
            for each in {id(each): each for each in (count, newest) if each}.values():
                each.num_losses += 1
        if (losses or count) and (rate := _LEARNING_RATE.search(text)):
            learning_rate = float(rate[1])
    fitting = [each for each in counts.values() if each.total is None or each.total >= num_counted]
    best = max(fitting, key=lambda each: each.rank, default=_Count(0, None, 0))
    if learning_rate is not None and not math.isfinite(learning_rate):
        learning_rate = None
    return ScriptStepRecord(0, max(best.step, num_counted), best.total, loss, learning_rate, best.seconds_left)


def _read_count(text: str, number: int, *, has_loss: bool) -> _Count | None:
    """Return the count of steps in a line; None if it has none, or if a bar's description shows another count."""
    if bar := _TQDM.search(text):
        about = text[: bar.start()].strip(" :")
        if about and (_OF_EVALUATION.match(about) or not _OF_TRAINING.search(about)):
            return None
        parts = [int(part or 0) for part in reversed((bar[3] or "").split(":"))]
        left = sum(part * 60**place for place, part in enumerate(parts[:3])) if bar[3] else None
        found = _Count(int(bar[1]), int(bar[2]), number, seconds_left=left)
    elif match := _KERAS.search(text) or _STEP.search(text):
        step, total = (int(value.replace(",", "")) if value else None for value in match.groups())
        if step is None or (total is None and not has_loss):
            return None
        found = _Count(step, total, number)
    else:
        return None
    return found if found.total is None or 0 < found.total >= found.step else None
