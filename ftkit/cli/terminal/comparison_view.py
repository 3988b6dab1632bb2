"""Runs side by side: on the terminal, as JSON, and for the comparison page."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ftkit.cli.terminal.console import Column, Styled, Terminal
from ftkit.cli.terminal.format import count, duration, energy, gib
from ftkit.errors import plural
from ftkit.runs.compare import align_losses, compare_curves, find_differences, have_same_documents, read_run
from ftkit.runs.manifest import DOCUMENT_NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ftkit.cli.page.comparison import ComparisonReport
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.compare import AlignedBy, ComparedRun, Difference


def comparison_report(layouts: Sequence[RunLayout]) -> ComparisonReport:
    """Collect the content of the comparison page."""
    from ftkit.cli.page.comparison import ComparisonReport, draw_comparison

    runs = [read_run(layout) for layout in layouts]
    names = _names(len(runs))
    return ComparisonReport(
        names=names,
        ids=[run.id for run in runs],
        results=_results(runs),
        differences=[(_title(each), list(map(_short, each.values))) for each in find_differences(runs)],
        verdicts=_remarks(runs),
        charts=draw_comparison(layouts, names),
    )


def show_comparison(runs: Sequence[ComparedRun], terminal: Terminal) -> None:
    """Print the differences, the results and the losses of runs."""
    names = _names(len(runs))
    terminal.facts([(name, Styled(run.id, "bold")) for name, run in zip(names, runs, strict=True)], is_data=True)
    terminal.text(is_data=True)
    differences = find_differences(runs)
    if differences:
        columns = (Column("WHAT DIFFERS", can_shrink=True), *(Column(name, can_shrink=True) for name in names))
        terminal.table(columns, [(_title(each), *map(_short, each.values)) for each in differences])
    else:
        terminal.text("no differences in recipe, data, image, versions, or cluster", is_data=True)
    terminal.text(is_data=True)
    columns = (Column("RESULT"), *(Column(name, is_number=True) for name in names))
    results = _results(runs)
    terminal.table(columns, [(title, *(each[title] for each in results)) for title in results[0]])
    aligned = align_losses(runs)
    if aligned.points:
        terminal.text(is_data=True)
        form = count if aligned.by == "tokens" else str
        losses = (Column(f"LOSS {name}", is_number=True) for name in names)
        columns = (Column(aligned.by.upper(), is_number=True), *losses)
        rows = [(form(place), *map("{:.4f}".format, each)) for place, each in aligned.points]
        terminal.table(columns, rows)
        if aligned.num_common > len(rows):
            terminal.text(f"{len(rows)} of {aligned.num_common} such records", is_data=True)
    terminal.text(is_data=True)
    for line in _remarks(runs):
        terminal.text(line, is_data=True)


def _names(number: int) -> list[str]:
    """Return short names for `number` runs: letters, then numbers."""
    return [chr(ord("A") + index) if index < 26 else str(index) for index in range(number)]  # noqa: PLR2004


def _title(difference: Difference) -> str:
    return f"{difference.section}: {difference.key}".removeprefix("recipe: ")


def _remarks(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the lines about unreadable records, restarts and equal losses."""
    named = zip(_names(len(runs)), runs, strict=True)
    unreadable = [f"{name}: {run.metrics_problem}" for name, run in named if run.metrics_problem]
    return [*unreadable, *_restarts(runs), *_other_documents(runs), *_verdicts(runs)]


def _restarts(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a line for each run that was restarted, with the causes, without their details."""
    lines = []
    for name, run in zip(_names(len(runs)), runs, strict=True):
        found = Counter(each.cause.words for each in run.results.restart_reasons if each)
        if found:
            reasons = ", ".join(reason if number == 1 else f"{reason} ({number})" for reason, number in found.items())
            lines.append(f"{name} was restarted after: {reasons}")
    return lines


def _other_documents(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield a line for each run that did not train on the first run's documents."""
    for name, run in zip(_names(len(runs))[1:], runs[1:], strict=True):
        if have_same_documents(runs[0], run) is False:
            one, two = runs[0].inputs["data"], run.inputs["data"]
            numbers = ", ".join(f"{one.get(key, '?')} and {two.get(key, '?')} {key}" for key in DOCUMENT_NUMBERS)
            yield f"A and {name} trained on different documents, so their losses are not of the same data: {numbers}"


def _verdicts(runs: Sequence[ComparedRun]) -> list[str]:
    names = _names(len(runs))
    pairs = zip(names[1:], runs[1:], strict=True)
    return [f"{names[0]} and {name}: {_verdict(runs[0], run)}" for name, run in pairs]


def _verdict(first: ComparedRun, other: ComparedRun) -> str:
    found = compare_curves(first, other)
    if found.num_common == 0:
        return "no records at the same number of tokens or the same step"
    where = "at the same number of tokens" if found.by == "tokens" else "at the same step, after other tokens"
    common = f"{plural(found.num_common, 'record')} {where}"
    if found.first_difference is None:
        return f"losses are equal, bit for bit ({common})"
    at_most = "" if found.largest_difference is None else f", by at most {found.largest_difference:.2g}"
    return f"losses differ from {_place(found.by, found.first_difference)} on{at_most} ({common})"


def _place(by: AlignedBy, place: int) -> str:
    """Return where records are compared, as text."""
    return f"{count(place)} tokens" if by == "tokens" else f"step {place}"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _results(runs: Sequence[ComparedRun]) -> list[dict[str, str]]:
    """Return the rows of the result table, one value per run; a row without values is omitted."""
    rows = [_result(run) for run in runs]
    known = [title for title in rows[0] if any(row[title] != "-" for row in rows)]
    return [{title: row[title] for title in known} for row in rows]


def _result(run: ComparedRun) -> dict[str, str]:
    found = run.results

    def show(value: float | None, form: Callable[[float], str]) -> str:
        return "-" if value is None else form(value)

    return {
        "step": show(found.step, str),
        "tokens": show(found.tokens, count),
        "loss": show(found.loss, "{:.4f}".format),
        "validation loss": show(found.validation_loss, "{:.4f}".format),
        "execution accuracy": show(found.execution_accuracy, "{:.1%}".format),
        "processes": show(found.num_processes, str),
        "tokens/s per process": show(found.tokens_per_second_per_process, count),
        "MFU": show(found.mfu, "{:.1%}".format),
        "peak memory, predicted": show(found.predicted_gib, gib),
        "peak memory, measured": show(found.measured_gib, gib),
        "training time": show(found.training_seconds, duration),
        "time with start-up": show(found.held_seconds, duration),
        "GPU utilization": show(found.gpu_utilization, "{:.0f}%".format),
        "GPU power": show(found.gpu_power, "{:,.0f} W".format),
        "energy": show(found.energy_kwh, energy),
        "cost": show(found.cost, "{:,.2f}".format),
        "restarts": str(found.num_restarts),
    }


def comparison_as_json(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the values of `ftkit compare --json`."""
    aligned = align_losses(runs)
    return {
        "runs": [run.id for run in runs],
        "differences": [asdict(each) for each in find_differences(runs)],
        "results": {run.id: asdict(run.results) for run in runs},
        "metrics_problems": {run.id: run.metrics_problem for run in runs if run.metrics_problem},
        "losses": [{aligned.by: place, "losses": losses} for place, losses in aligned.points],
        "against_first": {
            run.id: asdict(compare_curves(runs[0], run)) | {"same_documents": have_same_documents(runs[0], run)}
            for run in runs[1:]
        },
    }
