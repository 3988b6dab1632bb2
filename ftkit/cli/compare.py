"""`ftkit compare`: show runs side by side."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import RUN_HELP, get_runs, json_option
from ftkit.cli.commands import ForwardedCommand
from ftkit.cli.shell_completion import complete_run
from ftkit.cli.terminal.console import Column, Styled, Terminal
from ftkit.cli.terminal.format import count, duration, energy, finite, gib, plural, short_path
from ftkit.runs.compare import align_losses, compare_curves, find_differences, read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.cli.page.comparison import ComparisonReport
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.compare import ComparedRun, Difference


@click.command(
    "compare",
    cls=ForwardedCommand,
    short_help="Compare the settings and results of runs.",
    examples=(
        "ftkit compare demo other",
        "ftkit compare demo other --json | jq .results",
        "ftkit compare demo other --html comparison.html",
    ),
    help=f"""Show runs side by side: differences in recipe, data, image, versions and cluster; their results; and
    their losses after the same numbers of tokens. The last line says whether the losses are equal, bit for bit.

    {RUN_HELP} The id or the name of a sweep selects all of its runs.
    """,
)
@click.argument("references", metavar="RUN RUN...", nargs=-1, required=True, shell_complete=complete_run)
@click.option(
    "--html", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page instead."
)
@json_option
def command(references: tuple[str, ...], *, html: Path | None, as_json: bool) -> None:
    """Compare runs."""
    terminal = Terminal()
    layouts = [folder.layout for folder in get_runs(references)]
    if len(layouts) < 2:  # noqa: PLR2004 - what comparing takes
        raise click.UsageError("compare needs at least two different runs", click.get_current_context())
    if html:
        from ftkit.cli.page.charts import require_matplotlib
        from ftkit.cli.page.write import comparison_page, save_page

        require_matplotlib()
        save_page(comparison_page(comparison_report(layouts)), html)
        terminal.data(f"{short_path(html.absolute())}\n")
        return
    runs = [read_run(layout) for layout in layouts]
    if as_json:
        terminal.json(finite(_as_json(runs)))
    else:
        _show(runs, terminal)


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
        verdicts=_verdicts(runs),
        charts=draw_comparison(layouts, names),
    )


def _show(runs: Sequence[ComparedRun], terminal: Terminal) -> None:
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
    points = align_losses(runs)
    if points:
        terminal.text(is_data=True)
        columns = (Column("TOKENS", is_number=True), *(Column(f"LOSS {name}", is_number=True) for name in names))
        terminal.table(columns, [(count(tokens), *(f"{loss:.4f}" for loss in losses)) for tokens, losses in points])
    terminal.text(is_data=True)
    for verdict in _verdicts(runs):
        terminal.text(verdict, is_data=True)


def _names(number: int) -> list[str]:
    """Return short names for `number` runs: letters, then numbers."""
    return [chr(ord("A") + index) if index < 26 else str(index) for index in range(number)]  # noqa: PLR2004


def _title(difference: Difference) -> str:
    return f"{difference.section}: {difference.key}".removeprefix("recipe: ")


def _verdicts(runs: Sequence[ComparedRun]) -> list[str]:
    names = _names(len(runs))
    pairs = zip(names[1:], runs[1:], strict=True)
    return [f"{names[0]} and {name}: {_verdict(runs[0], run)}" for name, run in pairs]


def _verdict(first: ComparedRun, other: ComparedRun) -> str:
    found = compare_curves(first, other)
    if found.num_common == 0:
        return "no records at the same number of tokens"
    common = f"{plural(found.num_common, 'record')} at the same number of tokens"
    if found.first_difference is None:
        return f"losses are equal, bit for bit ({common})"
    at_most = "" if found.largest_difference is None else f", by {found.largest_difference:.2g} at most"
    return f"losses differ from {count(found.first_difference)} tokens on{at_most} ({common})"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _results(runs: Sequence[ComparedRun]) -> list[dict[str, str]]:
    """Return the rows of the result table, one value per run; a row without any value is left out."""
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
        "GPU memory, predicted": show(found.predicted_gib, gib),
        "memory, measured": show(found.measured_gib, gib),
        "training time": show(found.training_seconds, duration),
        "time with start-up": show(found.held_seconds, duration),
        "GPU utilization": show(found.gpu_utilization, "{:.0f} %".format),
        "GPU power": show(found.gpu_power, "{:,.0f} W".format),
        "energy": show(found.energy_kwh, energy),
        "cost": show(found.cost, "{:,.2f}".format),
        "restarts": str(found.num_restarts),
    }


def _as_json(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    return {
        "runs": [run.id for run in runs],
        "differences": [asdict(each) for each in find_differences(runs)],
        "results": {run.id: asdict(run.results) for run in runs},
        "losses": [{"tokens": tokens, "losses": losses} for tokens, losses in align_losses(runs)],
        "against_first": {run.id: asdict(compare_curves(runs[0], run)) for run in runs[1:]},
    }
