"""Runs side by side: on the terminal and as JSON, and the texts that the comparison page shows too."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.curves import Scale, draw_curve
from ftkit.cli.terminal.format import count, duration, energy, gib
from ftkit.errors import plural
from ftkit.runs import compare
from ftkit.runs.manifest import DOCUMENT_NUMBERS

_RESULTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step": ("step", str),
    "tokens": ("tokens", count),
    "training loss": ("loss", "{:.4f}".format),
    "validated step": ("validated_step", str),
    "validation loss": ("validation_loss", "{:.4f}".format),
    "accuracy": ("accuracy", "{:.1%}".format),
    "margin": ("margin", "{:.3g}".format),
    "log-ratio per token": ("kl_per_token", "{:.3g}".format),
    "KL from the teacher": ("kl", "{:.3g}".format),
    "agreement with the teacher": ("agreement", "{:.1%}".format),
    "processes": ("num_processes", str),
    "tokens/s per process": ("tokens_per_second_per_process", count),
    "MFU": ("mfu", "{:.1%}".format),
    "peak memory, predicted": ("predicted_gib", gib),
    "peak memory, measured": ("measured_gib", gib),
    "training time": ("training_seconds", duration),
    "time with start-up": ("held_seconds", duration),
    "GPU utilization": ("gpu_utilization", "{:.0f}%".format),
    "GPU power": ("gpu_power", "{:,.0f} W".format),
    "energy": ("energy_kwh", energy),
    "cost": ("cost", "{:,.2f}".format),
    "restarts": ("num_restarts", str),
}
"""Rows of the result table: field of `RunResults`, and its format."""
_CURVE_WIDTH, _CURVE_HEIGHT = 76, 3


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, as text: results and differences by title, with a value for each run.

    `best` is empty if losses are not of the same data. `remarks` tell of unreadable records, restarts, other documents,
    and whether losses are equal to those of the first run.
    """

    names: list[str]
    ids: list[str]
    best: str
    results: list[tuple[str, list[str]]]
    differences: list[tuple[str, list[str]]]
    remarks: list[str]


def run_letters(num_runs: int) -> list[str]:
    return [chr(ord("A") + index) if index < 26 else str(index) for index in range(num_runs)]  # noqa: PLR2004


def compare_runs(runs: Sequence[compare.ComparedRun]) -> Comparison:
    names = run_letters(len(runs))
    results = []
    for title, (field, form) in _RESULTS.items():
        values = [getattr(run.results, field) for run in runs]
        if any(value is not None for value in values):
            results.append((title, ["-" if value is None else form(value) for value in values]))
        if title == "validation loss":
            for name in sorted({name for run in runs for name in run.results.scores}):
                scores = [run.results.scores.get(name) for run in runs]
                results.append((name.replace("_", " "), ["-" if score is None else f"{score:.1%}" for score in scores]))
    differences = [
        (f"{each.section}: {each.key}".removeprefix("recipe: "), list(map(_short, each.values)))
        for each in compare.find_differences(runs)
    ]
    best = describe_best(compare.find_best(runs), {run.id: name for name, run in zip(names, runs, strict=True)})
    if not best and (reason := compare.why_not_comparable(runs)):
        best = f"no run is best, because {reason}"
    remarks = list(_remarks(dict(zip(names, runs, strict=True))))
    return Comparison(names, [run.id for run in runs], best, results, differences, remarks)


def describe_best(best: compare.BestRun | None, names: Mapping[str, str]) -> str:
    """Say which run is the best and by how much, compared with the spread between seeds if runs repeat a setting."""
    if best is None or (len(best.means) == 1 and not best.seed_std):
        return ""
    metric = "training loss" if best.metric == "loss" else best.metric.replace("_", " ")
    if len({f"{mean:.4f}" for mean in best.means}) == 1 and not best.seed_std:
        return f"the runs are equally good: {metric} {best.value:.4f}"
    text = f"{names[best.run]} is best: {metric} {best.value:.4f}"
    sets = [", ".join(names[run] for run in runs) for runs in best.settings[:2]]
    if len(sets) > 1:
        gap = best.means[1] - best.means[0]
        amount = f"{abs(gap):.4f} ({abs(gap / best.means[1]) if best.means[1] else 0:.1%})"
        means = "" if best.seed_std is None else f"; the mean of {sets[0]} is {best.means[0]:.4f}"
        text += f"{means}, {amount} {'below' if gap > 0 else 'above'} {'that of ' * bool(means)}{sets[1]}"
    if best.seed_std is None:
        return text
    text += f"; runs that differ only in the seed have a standard deviation of {best.seed_std:.2g}"
    return text if best.is_clear else f"{text}, so the difference may be chance"


def _short(value: object) -> str:
    """Return a value as text, a SHA-256 by its beginning."""
    if isinstance(value, str):
        return value[:12] if re.fullmatch(r"[0-9a-f]{64}", value) else value
    return "-" if value is None else json.dumps(value)


def _remarks(runs: dict[str, compare.ComparedRun]) -> Iterator[str]:
    for name, run in runs.items():
        if run.metrics_problem:
            yield f"{name}: {run.metrics_problem}"
    for name, run in runs.items():
        found = Counter(each.cause.words for each in run.results.restart_reasons if each)
        if found:
            reasons = ", ".join(reason if number == 1 else f"{reason} ({number})" for reason, number in found.items())
            yield f"{name} was restarted after: {reasons}"
    (first_name, first), *others = runs.items()
    for name, run in others:
        if compare.have_same_documents(first, run) is False:
            one, two = first.inputs["data"], run.inputs["data"]
            numbers = ", ".join(f"{one.get(key, '?')} and {two.get(key, '?')} {key}" for key in DOCUMENT_NUMBERS)
            yield f"{first_name} and {name} trained on different documents; losses are not of the same data: {numbers}"
    for name, run in others:
        yield f"{first_name} and {name}: {_verdict(first, run)}"


def _verdict(first: compare.ComparedRun, other: compare.ComparedRun) -> str:
    if reason := compare.differing_objectives([first, other]):
        return f"losses are of different objectives: {reason}"
    found = compare.compare_curves(first, other)
    if found.num_common == 0:
        return "no records at the same number of tokens or the same step"
    is_by_tokens = found.by == "tokens"
    where = "at the same number of tokens" if is_by_tokens else "at the same step, after other tokens"
    common = f"{plural(found.num_common, 'record')} {where}"
    if found.first_difference is None:
        return f"losses are equal, bit for bit ({common})"
    at_most = "" if found.largest_difference is None else f", by at most {found.largest_difference:.2g}"
    place = f"{count(found.first_difference)} tokens" if is_by_tokens else f"step {found.first_difference}"
    return f"losses differ from {place} on{at_most} ({common})"


def show_comparison(runs: Sequence[compare.ComparedRun], terminal: Terminal) -> None:
    found = compare_runs(runs)
    terminal.facts([(name, Styled(run.id, "bold")) for name, run in zip(found.names, runs, strict=True)], is_data=True)
    if found.best:
        terminal.text(Styled(f"\n{found.best}", "bold"))
    terminal.text()
    if found.differences:
        titles = [f"{name}…" for name in ("WHAT DIFFERS", *found.names)]
        terminal.table(titles, [(title, *values) for title, values in found.differences])
    else:
        terminal.text("no differences in recipe, data, image, versions, or cluster")
    terminal.text()
    rows = [(title, *values) for title, values in found.results]
    terminal.table(["RESULT", *(f"#{name}" for name in found.names)], rows)
    aligned = compare.align_losses(runs)
    if aligned.points:
        terminal.text()
        form = count if aligned.by == "tokens" else str
        titles = [f"#{aligned.by.upper()}", *(f"#LOSS {name}" for name in found.names)]
        rows = [(form(place), *map("{:.4f}".format, losses)) for place, losses in aligned.some()]
        terminal.table(titles, rows)
        if len(aligned.points) > len(rows):
            terminal.text(f"{len(rows)} of {len(aligned.points)} such records")
    show_curves(runs, terminal, is_data=True)
    terminal.text()
    for line in found.remarks:
        terminal.text(line)


def show_curves(runs: Sequence[compare.ComparedRun], terminal: Terminal, *, is_data: bool) -> None:
    """Draw the loss of each run by tokens, all on the same axes; losses of different objectives on their own."""
    curves = [[(point.tokens, point.loss) for point in run.curve] for run in runs]
    if scale := Scale.of(curves):
        note = "; axes differ, as objectives do" if compare.differing_objectives(runs) else ""
        terminal.text(f"\nloss, {count(scale.first)} to {count(scale.last)} tokens{note}", is_data=is_data)
        owns = [Scale.of([curve]) if note else None for curve in curves]
        scales = [replace(scale, low=own.low, high=own.high) if own else scale for own in owns]
        drawn = [draw_curve(*both, _CURVE_WIDTH, _CURVE_HEIGHT) for both in zip(curves, scales, strict=True)]
        terminal.facts(list(zip(run_letters(len(runs)), drawn, strict=True)), is_data=is_data)


def comparison_as_json(runs: Sequence[compare.ComparedRun]) -> dict[str, object]:
    aligned = compare.align_losses(runs)
    first, *others = runs
    return {
        "runs": [run.id for run in runs],
        "differences": [asdict(each) for each in compare.find_differences(runs)],
        "different_objectives": compare.differing_objectives(runs),
        "best": (best := compare.find_best(runs)) and asdict(best) | {"is_clear": best.is_clear},
        "results": {run.id: asdict(run.results) for run in runs},
        "metrics_problems": {run.id: run.metrics_problem for run in runs if run.metrics_problem},
        "losses": [{aligned.by: place, "losses": losses} for place, losses in aligned.some()],
        "against_first": {
            other.id: asdict(compare.compare_curves(first, other))
            | {"same_documents": compare.have_same_documents(first, other)}
            for other in others
        },
    }
