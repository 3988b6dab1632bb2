"""Content of report.html, read from the run's folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ftkit.cli.page.report_charts import Chart, draw_charts
from ftkit.cli.terminal.format import count, duration, energy, gib
from ftkit.errors import plural
from ftkit.files import read_json_if_valid
from ftkit.planning.plan import PlanError, RunPlan
from ftkit.planning.script import ScriptPlan, read_job_plan
from ftkit.planning.training_setup import GPUS
from ftkit.runs.gpu_samples import read_samples, summarize_samples
from ftkit.runs.history import History, Restart, read_history
from ftkit.runs.manifest import explain_missing_digests
from ftkit.runs.records import AnomalyRecord, EvaluationRecord, FirstStepRecord, Sample
from ftkit.runs.stragglers import Straggler, find_stragglers, read_timings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.planning.layout import RunLayout
    from ftkit.runs.gpu_samples import GpuSummary

_NUM_EXAMPLES = 6
_NUM_ANOMALIES = 12
_MAX_TILES_PER_ROW = 6
_TIME_USE = {
    "training": "forward, backward, optimizer", "data wait": "waiting for data", "other": "other",
    "checkpoint": "waiting for checkpoints", "evaluation": "evaluation", "start-up": "start-up",
    "repeated": "repeated steps", "down": "down between starts",
}  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """A headline number with its caption."""

    title: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Comparison:
    """A planned and a measured number; `ratio` is measured / planned."""

    title: str
    planned: str
    measured: str
    ratio: float | None


@dataclass(frozen=True)
class Example:
    """A validation question, with the completions before and after training."""

    before: Sample | None
    after: Sample


@dataclass(frozen=True)
class RunReport:
    """Content of a run's page."""

    id: str
    name: str
    state: str
    summary: str
    created: str
    tiles: list[Tile]
    charts: list[Chart]
    comparisons: list[Comparison]
    time_use: list[tuple[str, str, str, float]]
    evaluations: list[EvaluationRecord]
    examples: list[Example]
    anomalies: list[AnomalyRecord]
    restarts: list[Restart]
    stragglers: list[Straggler]
    checks: dict[str, str]
    first_step: FirstStepRecord | None
    facts: dict[str, list[tuple[str, str]]]
    doubts: list[str]
    command: str
    metrics_problem: str
    """Which records of the run can't be read, and why; empty if all can."""
    verdict: str = ""
    samples: list[Any] = field(default_factory=list)

    @property
    def tile_columns(self) -> int:
        """Number of columns of tiles on a wide screen: they fill one row, or two of about equal length."""
        num_rows = 1 if len(self.tiles) <= _MAX_TILES_PER_ROW else 2
        return max(1, -(-len(self.tiles) // num_rows))

    @property
    def score_names(self) -> list[str]:
        """Names of the scores of completions in any evaluation, except SQL accuracy, which has its own chart."""
        return sorted({name for each in self.evaluations for name in each.scores} - {"sql"})


def read_report(layout: RunLayout, state: str, *, samples: Sequence[Any] = (), verdict: str = "") -> RunReport:
    """Collect the content of a run's page.

    Args:
        layout: the run's folder.
        state: state of the run, in a word.
        samples: trained documents (`ftkit.data.inspection.Sample`), if they can be read.
        verdict: for a rerun, whether it reproduced the original.
    """
    history, gpus = read_history(layout), read_samples(layout)
    manifest = read_json_if_valid(layout.manifest, dict[str, Any]) or {}
    try:
        job = read_job_plan(layout)
    except PlanError:
        job = None
    plan = job if isinstance(job, RunPlan) else None
    validation = list(history.evaluations)
    return RunReport(
        id=layout.root.name,
        name=job.name if job else layout.root.name,
        state=state,
        summary=_summary(job) if job else "the plan of this run can't be read",
        created=f"{job.created:%Y-%m-%d %H:%M} UTC" if job else "",
        tiles=[*_tiles(plan, history), *_gpu_tiles(summarize_samples(gpus), history)],
        charts=draw_charts(plan, history, gpus),
        comparisons=_comparisons(plan, history) if plan else [],
        time_use=_time_use(history),
        evaluations=validation,
        examples=_examples(history),
        anomalies=list(history.anomalies[-_NUM_ANOMALIES:]),
        restarts=list(history.restarts),
        stragglers=find_stragglers(read_timings(layout)),
        checks=history.checks.texts if history.checks else {},
        first_step=history.start_up,
        facts=_facts(plan, manifest, history) if plan else {},
        doubts=explain_missing_digests(layout),
        command=" ".join(map(str, manifest.get("command", []))),
        metrics_problem=history.problem,
        verdict=verdict,
        samples=list(samples),
    )


def _summary(plan: RunPlan | ScriptPlan) -> str:
    place = plan.placement
    if isinstance(plan, ScriptPlan):
        words = " ".join([plan.script.path, *plan.script.args])
        return f"{words}; {plural(place.world_size, 'process')}, {plan.cluster.name}"
    recipe = plan.recipe
    model = recipe.model.architecture.family if recipe.model.weights == "random" else recipe.model.weights
    device = plan.cluster.gpu or "GPU" if place.device == "cuda" else "CPU process"
    where = f"{place.world_size} × {device}" if place.device == "cuda" else plural(place.world_size, "CPU process")
    nodes = f" on {plural(place.num_nodes, 'node')}" if place.num_nodes > 1 else ""
    method = {"full": "Full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}.get(
        recipe.training.method, recipe.training.method
    )
    return f"{method} of {model}, {count(plan.num_parameters)} parameters; {where}{nodes}, {plan.cluster.name}"


def _tiles(plan: RunPlan | None, history: History) -> list[Tile]:
    tiles: list[Tile] = []
    last, validation = history.last_step, history.evaluations
    if last:
        first = next(iter(history.steps.values()))
        tiles.append(Tile("Training loss", f"{last.loss:.4g}", f"from {first.loss:.4g}"))
    if after := history.last_evaluation:
        before = validation[0]
        has_before = before is not after
        detail = f"from {before.loss:.4g}" if has_before else f"{after.when} training"
        tiles.append(Tile("Validation loss", f"{after.loss:.4g}", detail))
        if after.execution_accuracy is not None:
            known = has_before and before.execution_accuracy is not None
            detail = f"from {before.execution_accuracy:.1%}" if known else ""
            tiles.append(Tile("SQL execution", f"{after.execution_accuracy:.1%}", detail))
    if last and last.routers:
        tiles.append(Tile("Busiest expert", f"{last.routers.max_utilization:.2f} ×", "the mean load of its layer"))
    device = "process" if plan and plan.placement.device == "cpu" else "GPU"
    if (speed := history.speed) is not None:
        mfu = history.mfu
        detail = f"tokens/s per {device}" + ("" if mfu is None else f", {mfu:.1%} MFU")
        tiles.append(Tile("Throughput", count(speed), detail))
    if (peak := history.peak_gib) is not None:
        gpu = GPUS.get(plan.cluster.gpu) if plan and plan.cluster.gpu else None
        tiles.append(Tile("Peak memory", gib(peak), f"of {gib(gpu.memory_gib)}" if gpu else f"per {device}"))
    if history.spans:
        total = history.spans[-1].end - history.spans[0].begin
        steps = f"{last.step:,} of {last.num_steps:,} steps" if last else ""
        tiles.append(Tile("Time", duration(total), steps))
        cost = _cost(plan, history) if plan else None
        if cost is not None:
            tiles.append(Tile("Cost", f"{cost:,.2f}", "at the profile's price"))
    return tiles


def _cost(plan: RunPlan, history: History) -> float | None:
    """Return the cost of the processes of all starts, without the time between them."""
    seconds = history.process_seconds
    return None if seconds is None else plan.cost_of(seconds / plan.placement.world_size)


def _gpu_tiles(summary: GpuSummary | None, history: History) -> list[Tile]:
    """Return the tiles of the GPUs' utilization, power and energy."""
    if summary is None:
        return []
    tiles = []
    if summary.utilization is not None:
        active = "" if summary.sm_activity is None else f"{summary.sm_activity:.0f}% of the SMs"
        tiles.append(Tile("GPU utilization", f"{summary.utilization:.0f}%", active))
    if summary.power is not None:
        hottest = "" if summary.peak_temperature is None else f", peak {summary.peak_temperature:.0f}\u00a0°C"
        tiles.append(Tile("GPU power", f"{summary.power:,.0f} W", f"mean per GPU{hottest}"))
    if summary.energy_kwh is not None:
        last = history.last_step
        per_token = energy(summary.energy_kwh * 1e6 / last.tokens) if last and last.tokens else ""
        tiles.append(Tile("Energy", energy(summary.energy_kwh), per_token and f"{per_token} per 1M tokens"))
    return tiles


def _comparisons(plan: RunPlan, history: History) -> list[Comparison]:
    found: list[Comparison] = []

    def add(title: str, planned: float | None, measured: float | None, form: Callable[[float], str]) -> None:
        if planned is not None and measured is not None:
            ratio = measured / planned if planned else None
            found.append(Comparison(title, form(planned), form(measured), ratio))

    speed, world = plan.speed, plan.placement.world_size
    if speed:
        measured = median(each.step_seconds for each in history.steady) if history.steady else None
        add("Step time", speed.step_seconds, measured or None, duration)
        full = "" if plan.fill_ratio is not None else " (planned for full packs)"
        add(f"Tokens/s per GPU{full}", speed.tokens_per_second / world, history.speed, count)
        add(f"MFU{full}", speed.mfu, history.mfu, "{:.1%}".format)
    device = "GPU" if plan.placement.device == "cuda" else "process"
    add(f"Peak memory per {device}", plan.memory.total, history.peak_gib, gib)
    seconds = plan.training_seconds
    trained = sum(span.seconds for span in history.spans if span.kind in ("training", "repeated", "checkpoint"))
    add("Time of all steps", seconds, trained or None, duration)
    if seconds is not None:
        add("Cost", plan.cost_of(seconds), _cost(plan, history), "{:,.2f}".format)
    add("Steps", plan.num_steps, history.end.step if history.end else None, "{:,.0f}".format)
    return found


def _time_use(history: History) -> list[tuple[str, str, str, float]]:
    """Return kind, title, time and fraction of the total."""
    used = history.time_use
    total = sum(used.values())
    return [
        (kind, title, duration(used[kind]), used[kind] / total)
        for kind, title in _TIME_USE.items()
        if used.get(kind, 0.0) > 0 and total
    ]


def _examples(history: History) -> list[Example]:
    """Pair the completions after training with those before; put pairs first that became correct."""
    after = history.last_evaluation
    if after is None or after.when == "before":
        return []
    before = history.evaluations[0] if history.evaluations[0].when == "before" else None
    earlier = {each.question: each for each in before.samples} if before else {}
    pairs = [Example(earlier.get(each.question), each) for each in after.samples]
    learned = [pair for pair in pairs if pair.before and pair.after.correct and not pair.before.correct]
    wrong = [pair for pair in pairs if not pair.after.correct]
    rest = [pair for pair in pairs if pair not in learned and pair not in wrong]
    return (learned[: _NUM_EXAMPLES - 2] + wrong[:2] + rest)[:_NUM_EXAMPLES]


def _facts(plan: RunPlan, manifest: dict[str, Any], history: History) -> dict[str, list[tuple[str, str]]]:
    """Return the run's inputs, by section."""
    recipe, training, batch = plan.recipe, plan.recipe.training, plan.batch
    git = (manifest.get("ftkit") or {}).get("git") or {}
    start = history.starts[-1] if history.starts else None
    world = plan.placement.world_size
    versions = ", ".join(f"{name} {version}" for name, version in start.versions.items()) if start else ""
    model = recipe.model
    digests: dict[str, str] = next((each.get("data", {}) for each in reversed(manifest.get("starts", []))), {})
    sections = {
        "Model": [
            ("weights", "random" if model.weights == "random" else model.weights),
            ("commit", model.revision or ""),
            ("parameters", f"{plan.num_parameters:,}, {plan.num_trained:,} of them trained"),
        ],
        "Training": [
            ("method", f"{training.method} in {training.precision}"),
            ("batch", (f"{plural(batch.global_batch_size, 'pack')} of {training.sequence_length:,} tokens: "
                      f"{batch.micro_batch_size} × {world} × {batch.accumulation_steps}")),
            ("learning rate", f"{training.learning_rate:g}, {training.schedule}"),
            ("activation checkpointing", plan.checkpointing_label),
            ("engine", f"{plan.engine.name}: {plan.engine.reason}"),
            ("seed", str(training.seed)),
        ],
        "Data": [
            ("fingerprint", plan.fingerprint),
            *((f"{name} sha256", digest) for name, digest in digests.items()),
        ],
        "Where": [
            ("cluster", f"{plan.cluster.name}, {plural(plan.placement.num_nodes, 'node')}"),
            ("device", start.device if start else plan.placement.device),
            ("image", plan.image or "no container"),
            ("image digest", str(manifest.get("image_sha256") or manifest.get("image_id") or "")),
        ],
        "Software": [
            ("ftkit", f"{plan.ftkit_version} {str(git.get('commit') or '')[:12]}"
                      + (" with uncommitted changes" if git.get("has_uncommitted_changes") else "")),
            ("versions", versions),
        ],
    }  # fmt: skip
    return {title: [(name, value) for name, value in rows if value] for title, rows in sections.items()}
