"""Write the figures of README.md and docs from the records, and find figures that have no record.

A figure stands between two HTML comments, which no page shows: `<!--= FIELD -->…<!--/-->`. FIELD is a format string of
Python; what follows it is written by `scripts/docs`:

    {r[images][ftkit import][seconds]:.0f}    record, row (its label `row` or `trainer`), and name of the median
    {plan[train-llama3-8b-4gpus].speed:,.0f}  what today's planner says of a record's run: speed, gib
    {preview[RECIPE CLUSTER NODES].step:.2g}  what the same of a shipped recipe: step, gib, speed (or NODESxGPUS)
    {of[planned][num_rows]}                   a value computed from several records, see `derived`
    {pair[train-llama3-8b-4gpus]}             speed and memory of ftkit and of the peer in a record
    {table[startup]}                          a table of the record, below a line that says where it was measured
    {table[planned-1]}                        measured runs beside what today's planner says of them
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from published import PUBLISHED, predicted_speed
from recording import CHECKOUT, FOLDER, GRAPHS, MEASURED, Record, Row, Training, read_record
from train import make_plan

from ftkit.config.context import Context
from ftkit.launch.resolve import RunArgs, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARKER = re.compile(r"(<!--= (?P<field>.+?) -->)(?P<text>.*?)(<!--/-->)", re.DOTALL)
PAGES = [
    CHECKOUT / "README.md",
    *(page for folder in ("docs", "docs/from", "docs/reference") for page in sorted(CHECKOUT.glob(f"{folder}/*.md"))),
]
UNSAID = {"learning_rate", "global_batch_size", "max_position_embeddings"}
"""Overrides that a row does not name: they change neither speed nor memory, or follow from the others."""


@dataclass(frozen=True)
class Planned:
    """A run that was measured, and what today's planner says of it; speeds are tokens per second and GPU."""

    training: Training
    name: str
    date: str
    row: Row
    speed: float
    gib: float

    @property
    def memory_error(self) -> float | None:
        """The planned memory's relative difference from the measured."""
        return _error(self.gib, self.row.medians.get("peak_gib"))

    @property
    def speed_error(self) -> float | None:
        """The planned speed's relative difference from the measured."""
        return _error(self.speed, self.row.medians.get("tokens_per_second"))


@cache
def read_all() -> dict[str, Record]:
    """Return all records by the names of their files."""
    return {path.stem: read_record(path) for path in sorted(FOLDER.glob("*.json"))}


@cache
def plan_again() -> list[Planned]:
    """Plan each of ftkit's measured runs with the planner of this checkout."""
    found = []
    for name, record in read_all().items():
        for row in record.rows:
            if row.training and row.labels.get("trainer", "ftkit") == "ftkit" and row.labels.get("device") != "cpu":
                steps = f", {len(row.repeats['step_seconds'])}" if row.repeats else ""
                training = with_kernel(row.training, row.labels)
                launched = ("training.cuda_graphs=false",) if row.labels.get("note") != GRAPHS else ()
                ran = replace(training, overrides=(*training.overrides, *launched))
                plan = make_plan(ran, Path(tempfile.gettempdir()) / "planned")
                speed = plan.speed.tokens_per_second / training.gpus
                found.append(Planned(training, name, record.date[:10] + steps, row, speed, plan.memory.total))
    return sorted(found, key=lambda each: (each.training.gpu, each.training.gpus, each.training.architecture))


def with_kernel(training: Training, labels: dict[str, str]) -> Training:
    """Return a run whose overrides name the attention kernel that ran, unless it was flash-attn-4 or is unknown."""
    kernel = labels.get("attention", "").partition(",")[0]
    if kernel in {"", "flash-attn-4"}:
        return training
    return replace(training, overrides=(*training.overrides, f"training.attention={kernel}"))


def derived() -> dict[str, dict[str, Any]]:
    """Return what sentences say of several records together."""
    planned = plan_again()
    memory = sorted(each.memory_error for each in planned if each.memory_error is not None)
    speed = sorted(each.speed_error for each in planned if each.speed_error is not None)
    of: dict[str, dict[str, Any]] = {
        "planned": _spread(memory), "planned speed": _spread(speed), "families": families(),
        "published": _spread(sorted(predicted_speed(run) / run.speed - 1 for run in PUBLISHED)),
    }  # fmt: skip
    for peer in ("unsloth", "trl"):
        ratios = sorted(ratio for _, _, row, ratio in pairs() if row.labels["trainer"].casefold().startswith(peer))
        of[peer] = {"least": ratios[0], "most": ratios[-1], "num_rows": len(ratios)}
    return of


def pairs() -> Iterable[tuple[str, Row, Row, float]]:
    """Yield the name of ftkit's record, its row, a peer's row of the same call and run, and ftkit's speed over it."""
    calls: dict[tuple[str, str], list[tuple[str, Row]]] = defaultdict(list)
    for name, record in read_all().items():
        group = record.command if record.source.startswith(MEASURED) else name
        for row in record.rows:
            if row.training and "trainer" in row.labels:
                calls[group, str(row.training)].append((name, row))
    for rows in calls.values():
        ours = [(name, row) for name, row in rows if row.labels["trainer"] == "ftkit"]
        for peer in (row for _, row in rows if row.labels["trainer"] != "ftkit"):
            for name, own in ours:
                yield name, own, peer, _number(own, "tokens_per_second") / _number(peer, "tokens_per_second")


def pair_text(name: str) -> str:
    """Return the speed and memory of ftkit in a record, and of the peer of the same call, for a sentence."""
    ours, peer = next((own, peer) for each, own, peer, _ in pairs() if each == name)
    (speed, gib), (other, other_gib) = (
        (_number(row, "tokens_per_second"), _number(row, "peak_gib")) for row in (ours, peer)
    )
    return f"{speed:,.0f} tokens/s in {gib:.1f} GiB ({peer.labels['trainer']}: {other:,.0f} in {other_gib:.1f})"


def families() -> dict[str, int]:
    """Return how many families scripts/families tried, and how many of them train as packs or as padded rows."""
    page = (CHECKOUT / "docs/reference/families.md").read_text(encoding="utf-8")
    tried = re.search(r"(\d+) of \d+ families were tried", page)
    rows = re.findall(r"^\| `[\w-]+` \| (\w+) \| (\w+) \| \w+ \| \w+ \| \w+ \|$", page, re.MULTILINE)
    return {"tried": int(tried[1]) if tried else 0, "trained": sum("yes" in row for row in rows)}


def table(name: str) -> str:
    """Return a table, below a line on where and how it was measured."""
    made: dict[str, Callable[[], str]] = {
        "planned-1": lambda: planned_table([each for each in plan_again() if each.training.gpus == 1]),
        "planned-n": lambda: planned_table([each for each in plan_again() if each.training.gpus > 1]),
        "peers": peers_table,
        "kernels": kernels_table,
        "published": published_table,
    }
    return f"\n{made[name]() if name in made else record_table(read_all()[name])}\n\n"


def gpus(training: Training) -> str:
    """Return the GPUs of a run, with their number if there are several."""
    return f"{training.gpus} {training.gpu.upper()}" if training.gpus > 1 else training.gpu.upper()


def planned_table(planned: list[Planned]) -> str:
    """Return measured runs beside today's plan."""
    rows = [
        [
            describe(each.training, each.row.labels), gpus(each.training),
            show(each.row.medians.get("peak_gib"), ".1f"), f"{each.gib:.1f}", show(each.memory_error, "+.1%"),
            show(each.row.medians.get("tokens_per_second"), ",.0f"), f"{each.speed:,.0f}",
            show(each.speed_error, "+.1%"), each.date,
        ]
        for each in planned
    ]  # fmt: skip
    titles = "run|GPUs|peak GiB|planned|off by|tokens/s/GPU|planned|off by|measured, steps"
    return markdown(titles.split("|"), rows)


def peers_table() -> str:
    """Return ftkit beside other trainers, whose attention is named unless it is SDPA."""

    def name_of(peer: Row) -> str:
        kernel = peer.labels.get("attention", "SDPA")
        return peer.labels["trainer"] + (f", {kernel}" if kernel != "SDPA" else "")

    rows = [
        [
            describe(with_kernel(own.training, own.labels), own.labels),
            gpus(own.training),
            name_of(peer),
            *(show(row.medians["tokens_per_second"], ",.0f") for row in (own, peer)), f"{ratio:.2f}",
            *(show(row.medians["peak_gib"], ".1f") for row in (own, peer)),
        ]
        for _, own, peer, ratio in pairs()
        if own.training
    ]  # fmt: skip
    titles = "run|GPUs|peer|tokens/s/GPU, ftkit|peer|ftkit ×|peak GiB, ftkit|peer"
    return markdown(titles.split("|"), sorted(rows))


def kernels_table() -> str:
    """Return the milliseconds of a step by group of kernels, for the profiled runs on an H200."""
    rows = []
    for record in (record for name, record in read_all().items() if name.startswith("kernels-h200-")):
        found = {row.labels.get("whole") or row.labels.get("group"): row.medians["milliseconds"] for row in record.rows}
        architecture, *overrides = shlex.split(record.rows[0].labels["case"])
        step, *groups = (cast("float", found[name]) for name in ("step, first kernel to last", "matmuls", "attention"))
        run = describe(Training(architecture, tuple(overrides)), {})
        rows.append([run, *(f"{each:.0f}" for each in (step, *groups, step - sum(groups)))])
    return markdown(["run", "step, ms", "matmuls", "attention", "all else"], rows)


def published_table() -> str:
    """Return others' published speeds beside today's plan."""
    rows = [
        [
            run.label,
            f"{run.num_gpus} {run.gpu.device_name}",
            show(run.speed),
            show(speed),
            f"{speed / run.speed - 1:+.0%}",
        ]
        for run in PUBLISHED
        for speed in [predicted_speed(run)]
    ]
    return markdown(["who and what", "GPUs", "published", "planned", "off by"], rows)


def record_table(record: Record) -> str:
    """Return a record's rows with a column for each median, below where it was measured."""
    names = list(dict.fromkeys(name for row in record.rows for name in row.medians))
    rows = [[row.labels["row"], *(show(row.medians.get(name)) for name in names)] for row in record.rows]
    where = ", ".join(filter(None, record.hardware.values()))
    kept = "" if record.rows[0].repeats else " Repeats were not kept."
    return f"`{record.command}`: {where}, {record.date[:10]}.{kept}\n\n" + markdown(["", *names], rows)


def describe(training: Training, labels: dict[str, str]) -> str:
    """Return a run by its shape and the settings that are not the benchmark's own.

    A shape that ftkit does not ship is named by the row's label `shape`, instead of by what it overrides.
    """
    overrides = [each for each in training.overrides if not ("shape" in labels and each.startswith("model."))]
    settings = (each.removeprefix("training.").removeprefix("model.architecture.") for each in overrides)
    last = dict(each.split("=", 1) for each in settings)
    said = [f"{key}={value}" for key, value in last.items() if key not in UNSAID]
    parallel = [f"context_parallel={training.context_parallel}"] if training.context_parallel > 1 else []
    documents = [f"{len(training.documents)} documents a pack"] if len(training.documents) > 1 else []
    note = [labels["note"]] if "note" in labels else []
    return ", ".join([labels.get("shape", training.architecture), *said, *parallel, *documents, *note])


def markdown(titles: list[str], rows: list[list[str]]) -> str:
    """Return a table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def show(value: float | str | None, spec: str = "") -> str:
    """Return a value as a table shows it: three digits, or all those before the decimal point."""
    if value is None or isinstance(value, str):
        return value or ""
    return format(value, spec or (",.0f" if abs(value) >= 100 else ".3g"))  # noqa: PLR2004


@dataclass(frozen=True)
class Preview:
    """What today's planner says of a shipped recipe: seconds of a step, GiB and tokens per second of a GPU."""

    step: float
    gib: float
    speed: float


@cache
def preview(words: str) -> Preview:
    """Plan `RECIPE CLUSTER NODES`, or `NODESxGPUS` with so many GPUs per node."""
    recipe, cluster, size = words.split()
    nodes, _, gpus = size.partition("x")
    folder = Path("/nonexistent")
    args = RunArgs(recipe, cluster=cluster, num_nodes=int(nodes), gpus_per_node=int(gpus) if gpus else None)
    plan = resolve(args, Context(folder, folder, {}))
    if plan.speed is None:
        raise ValueError(f"no speed is predicted on {cluster}")
    speed = plan.speed.tokens_per_second / plan.placement.world_size
    return Preview(plan.speed.step_seconds, plan.memory.total, speed)


class Made(dict[str, Any]):
    """Values by name, which are made when they are asked for."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> object:
        """Make a value."""
        return self.make(name)


def filled(text: str) -> str:
    """Return a page with today's figures in its markers; raises ValueError for a field that no record has."""
    kinds = ("row", "trainer", "group", "whole")  # the labels that name a row
    rows = {
        name: {next((row.labels[kind] for kind in kinds if kind in row.labels), ""): row.medians for row in record.rows}
        for name, record in read_all().items()
    }
    plans = {each.name: each for each in plan_again()}
    fields = {"r": rows, "plan": plans, "of": derived(), "table": Made(table), "pair": Made(pair_text),
              "preview": Made(preview)}  # fmt: skip

    def figure(found: re.Match[str]) -> str:
        try:
            return f"{found[1]}{found['field'].format_map(fields)}{found[4]}"
        except (KeyError, ValueError, TypeError, AttributeError, StopIteration) as error:
            raise ValueError(f"{found['field']}: no record has it ({error!r})") from error

    return MARKER.sub(figure, text)


UNITS = "tokens/s|[GMT]i?B(?:/s)?|TFLOP/s|%|×|times as|ms|µs|s|seconds|min|minutes|hours|families"
WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|twenty|thirty"
COUNTED = "tokens|parameters|documents|rows|chats|steps|runs|values"
FIGURE = re.compile(
    rf"(?<![\w.:/-])(?:(?:[\d.,]*\d(?: to [\d.,]*\d)?\s?|(?:{WORDS})\s)(?:{UNITS})(?![\w-])"
    rf"|\d{{1,3}}(?:,\d{{3}})+(?![\d,]|\s(?:{COUNTED})))"
)
"""A number with a unit of measurement, in digits or words, or one above 1,000 that does not count these things."""
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`|\]\([^)]*\)|<!-- Written by .*?<!-- The end", re.DOTALL | re.MULTILINE)


def figures_without_record(text: str) -> list[str]:
    """Return the numbers with a unit of measurement that stand neither in a marker nor in code."""
    rest = CODE.sub(" ", MARKER.sub(" ", text))
    return [" ".join(found[0].split()) for found in FIGURE.finditer(rest)]


def _spread(errors: list[float]) -> dict[str, float]:
    within = sorted(abs(error) for error in errors)
    count = len(errors)
    return {
        "num_rows": count, "least": errors[0], "most": errors[-1], "worst": within[-1], "over": 1 / (1 + errors[0]) - 1,
        **{f"within_{percent}": sum(error <= percent / 100 for error in within) for percent in (5, 6, 10)},
    }  # fmt: skip


def _error(planned: float, measured: float | str | None) -> float | None:
    return planned / measured - 1 if isinstance(measured, (int, float)) else None


def _number(row: Row, name: str) -> float:
    value = row.medians[name]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{row.labels}: {name} is no number")
    return value
