"""Content of report.html, read from the run's folder, with its charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from ftkit.cli.page.charts import Chart, Line, bars_height, draw_lines, memory_chart, timeline
from ftkit.cli.terminal.format import count, duration, energy, gib
from ftkit.errors import FtkitError, plural
from ftkit.files import read_json_if_valid
from ftkit.planning.plan import RunPlan, ScriptPlan, read_plan_to_use
from ftkit.planning.training_setup import GPUS
from ftkit.runs.facts import read_facts
from ftkit.runs.gpu_samples import GpuSummary, NodeSample, gpu_curve
from ftkit.runs.history import read_history
from ftkit.runs.spans import merge_spans

if TYPE_CHECKING:
    from ftkit.data.inspection import Sample as TrainedSample
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.history import History
    from ftkit.runs.records import Sample, StepRecord

_NUM_EXAMPLES = 6
_NUM_SAMPLES = 3
_SAMPLE_CHARACTERS = 3000
_MAX_TILES_PER_ROW = 6
_NARROWEST = 1 / 600  # smallest visible fraction of a run's time on the timeline
_TIME_USE = {
    "training": "forward, backward, optimizer", "data wait": "waiting for data", "other": "other",
    "checkpoint": "waiting for checkpoints", "evaluation": "evaluation", "start-up": "start-up",
    "repeated": "repeated steps", "down": "down between starts",
}  # fmt: skip


_Tile = tuple[str, str, str]  # title, value, and detail


def read_report(layout: RunLayout, state: str) -> dict[str, object]:
    """Collect the content of a run's page, by names in its template; `state` is the run's state in a word."""
    facts, history = read_facts(layout), read_history(layout)
    manifest = read_json_if_valid(layout.manifest, dict[str, Any]) or {}
    job, plan = facts.plan, facts.trainer
    tiles = [*_tiles(plan, history), *(_gpu_tiles(facts.gpus, history) if facts.gpus else [])]
    num_rows = 1 if len(tiles) <= _MAX_TILES_PER_ROW else 2
    return {
        "id": layout.root.name,
        "name": job.name if job else layout.root.name,
        "state": state,
        "summary": _summary(job) if job else "the plan of this run can't be read",
        "created": f"{job.created:%Y-%m-%d %H:%M} UTC" if job else "",
        "history": history,
        "facts": facts,
        "tiles": tiles,
        "tile_columns": max(1, -(-len(tiles) // num_rows)),  # they fill one row, or two of about equal length
        "charts": _draw_charts(plan, history, facts.samples),
        "comparisons": _comparisons(plan, history) if plan else [],
        "time_use": _time_use(history.time_use),
        "score_names": sorted({name for each in history.evaluations for name in each.scores}),
        "examples": _examples(history),
        "inputs": _inputs(plan, manifest, history) if plan else {},
        "command": " ".join(map(str, manifest.get("command", []))),
        "samples": _samples(layout),
    }


def _summary(plan: RunPlan | ScriptPlan) -> str:
    place = plan.placement
    if not isinstance(plan, RunPlan):
        words = " ".join([plan.script.path, *plan.script.args])
        return f"{words}; {plural(place.world_size, 'process')}, {plan.cluster.name}"
    recipe, where = plan.recipe, plural(place.world_size, "CPU process")
    if place.device == "cuda":
        where = f"{place.world_size} × {plan.cluster.gpu or 'GPU'}"
    if place.num_nodes > 1:
        where += f" on {plural(place.num_nodes, 'node')}"
    model = recipe.model.architecture.family if recipe.model.weights == "random" else recipe.model.weights
    names = {"full": "Full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
    method = names.get(recipe.training.method, recipe.training.method)
    return f"{method} of {model}, {count(plan.num_parameters)} parameters; {where}, {plan.cluster.name}"


def _tiles(plan: RunPlan | None, history: History) -> list[_Tile]:
    tiles: list[_Tile] = []
    last, validation = history.last_step, history.evaluations
    if last:
        tiles.append(("Training loss", f"{last.loss:.4g}", f"from {next(iter(history.steps.values())).loss:.4g}"))
    if after := history.last_evaluation:
        before = validation[0]
        detail = f"{after.when} training" if before is after else f"from {before.loss:.4g}"
        tiles.append(("Validation loss", f"{after.loss:.4g}", detail))
    if last and last.routers:
        tiles.append(("Busiest expert", f"{last.routers.max_utilization:.2f} ×", "the mean load of its layer"))
    device = "process" if plan and plan.placement.device == "cpu" else "GPU"
    if (speed := history.speed) is not None:
        detail = f"tokens/s per {device}" + ("" if history.mfu is None else f", {history.mfu:.1%} MFU")
        tiles.append(("Throughput", count(speed), detail))
    if (peak := history.peak_gib) is not None:
        gpu = GPUS.get(plan.cluster.gpu) if plan and plan.cluster.gpu else None
        tiles.append(("Peak memory", gib(peak), f"of {gib(gpu.memory_gib)}" if gpu else f"per {device}"))
    if history.spans:
        total = history.spans[-1].end - history.spans[0].begin
        steps = f"{last.step:,} of {last.num_steps:,} steps" if last else ""
        tiles.append(("Time", duration(total), steps))
        if plan and (cost := _cost(plan, history)) is not None:
            tiles.append(("Cost", f"{cost:,.2f}", "at the profile's price"))
    return tiles


def _cost(plan: RunPlan, history: History) -> float | None:
    """Return the cost of the processes of all starts, without the time between them."""
    seconds = history.process_seconds
    return None if seconds is None else plan.cost_of(seconds / plan.placement.world_size)


def _gpu_tiles(summary: GpuSummary, history: History) -> list[_Tile]:
    tiles = []
    if summary.utilization is not None:
        active = "" if summary.sm_activity is None else f"{summary.sm_activity:.0f}% of the SMs"
        tiles.append(("GPU utilization", f"{summary.utilization:.0f}%", active))
    if summary.power is not None:
        hottest = "" if summary.peak_temperature is None else f", peak {summary.peak_temperature:.0f}\u00a0°C"
        tiles.append(("GPU power", f"{summary.power:,.0f} W", f"mean per GPU{hottest}"))
    if summary.energy_kwh is not None:
        last = history.last_step
        per_token = energy(summary.energy_kwh * 1e6 / last.tokens) if last and last.tokens else ""
        tiles.append(("Energy", energy(summary.energy_kwh), per_token and f"{per_token} per 1M tokens"))
    return tiles


def _comparisons(plan: RunPlan, history: History) -> list[tuple[str, str, str, float | None]]:
    """Return rows of title, planned and measured number, and their ratio."""
    found: list[tuple[str, str, str, float | None]] = []

    def add(title: str, planned: float | None, measured: float | None, form: Callable[[float], str]) -> None:
        if planned is not None and measured is not None:
            found.append((title, form(planned), form(measured), measured / planned if planned else None))

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


def _time_use(used: Mapping[str, float]) -> list[tuple[str, str, str, float]]:
    rows = ((kind, title, used.get(kind, 0.0)) for kind, title in _TIME_USE.items())
    return [(kind, title, duration(each), each / sum(used.values())) for kind, title, each in rows if each > 0]


def _examples(history: History) -> list[tuple[Sample | None, Sample]]:
    """Pair the completions after training with those before; put pairs first that became correct."""
    after = history.last_evaluation
    if after is None or after.when == "before":
        return []
    before = history.evaluations[0] if history.evaluations[0].when == "before" else None
    earlier = {(each.question, each.picture): each for each in before.samples} if before else {}
    pairs = [(earlier.get((each.question, each.picture)), each) for each in after.samples]
    learned = [pair for pair in pairs if pair[0] and pair[1].correct and not pair[0].correct]
    wrong = [pair for pair in pairs if not pair[1].correct]
    rest = [pair for pair in pairs if pair not in learned and pair not in wrong]
    return (learned[: _NUM_EXAMPLES - 2] + wrong[:2] + rest)[:_NUM_EXAMPLES]


def _inputs(plan: RunPlan, manifest: dict[str, Any], history: History) -> dict[str, list[tuple[str, str]]]:
    model, training, batch = plan.recipe.model, plan.recipe.training, plan.batch
    git = (manifest.get("ftkit") or {}).get("git") or {}
    start = history.starts[-1] if history.starts else None
    world = plan.placement.world_size
    versions = ", ".join(f"{name} {version}" for name, version in start.versions.items()) if start else ""
    digests: dict[str, str] = next((each.get("data", {}) for each in reversed(manifest.get("starts", []))), {})
    sections = {
        "Model": [
            ("weights", model.weights),
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
        "Data": [("fingerprint", plan.fingerprint), *((f"{key} sha256", digest) for key, digest in digests.items())],
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


@cache  # a live page is drawn again and again
def _samples(layout: RunLayout) -> tuple[TrainedSample, ...]:
    """Return documents as the trainer sees them, a few screens of each; none if data or tokenizer is missing here."""
    try:
        from ftkit.data.inspection import samples_of_packs
        from ftkit.data.prepared_data import PreparedData
        from ftkit.data.tokenizers import load_saved_tokenizer

        plan = read_plan_to_use(layout)
        if not plan.data.is_prepared:
            return ()
        data = PreparedData(plan.data.root)
        found = samples_of_packs(data, [0], load_saved_tokenizer(data.tokenizer))
        return tuple(map(_shortened, islice(found, _NUM_SAMPLES)))
    except (FtkitError, ImportError, OSError, ValueError):  # a page without samples is better than none
        return ()


def _shortened(sample: TrainedSample) -> TrainedSample:
    """Truncate a document's text to a few screens: a sequence can be as long as a book."""
    segments, left = [], _SAMPLE_CHARACTERS
    for segment in sample.segments:
        if left > 0:
            segments.append(replace(segment, text=segment.text[:left] + " …" * (len(segment.text) > left)))
        left -= len(segment.text)
    return replace(sample, segments=tuple(segments))


# --- Charts ---------------------------------------------------------------------------------------


def _over_tokens(title: str, tokens: list[int], values: list[float], *, color: int, is_raw: bool = False) -> str:
    line = Line(title, tokens, values, is_raw=is_raw, color=color)
    return draw_lines(title.replace(" ", "-"), f"{title} by tokens", title, [line], from_zero=True)


def _pair_charts(tokens: list[int], steps: Sequence[StepRecord]) -> list[Chart]:
    """Return charts of both sides of pairs: the margin also grows while the chosen completions get less likely."""

    def of_sides(name: str, title: str) -> str:
        sides = ("chosen", "rejected")
        values = ([each.scores.get(f"{name}_{side}", math.nan) for each in steps] for side in sides)
        both = enumerate(zip(sides, values, strict=True))
        lines = [Line(side, tokens, scores, is_raw=True, color=color) for color, (side, scores) in both]
        return draw_lines(name, f"{title} by tokens", title, lines)

    if not steps or not all(each.scores for each in steps):
        return []
    if "agreement" in steps[0].scores:
        chart = _over_tokens("kl", tokens, [each.scores["kl"] for each in steps], color=2, is_raw=True)
        return [Chart("Divergence from the teacher", chart)]
    accuracy = _over_tokens("accuracy", tokens, [each.scores["accuracy"] for each in steps], color=2, is_raw=True)
    return [
        Chart("Rewards", of_sides("reward", "reward")),
        Chart("Log-probabilities: both falling is a known trap", of_sides("log_prob", "log-probability")),
        Chart("Accuracy of preferences", accuracy),
    ]


def _draw_charts(plan: RunPlan | None, history: History, gpus: Sequence[NodeSample]) -> list[Chart]:
    device = "GPU" if plan is not None and plan.placement.device == "cuda" else "process"
    steps, last, validation = list(history.steps.values()), history.last_step, history.evaluations
    tokens, rates = [each.tokens for each in steps], [each.learning_rate for each in steps]
    norms = [each.grad_norm for each in steps]
    losses = [
        Line("training", tokens, [each.loss for each in steps], is_raw=True),
        Line("validation", [history.tokens_at(each.step) for each in validation], [each.loss for each in validation],
             has_points=True, color=1),
    ]  # fmt: skip
    course = f"from {steps[0].loss:.4g} to {last.loss:.4g} over {count(last.tokens)} tokens" if last else ""
    speed = draw_lines(
        "speed", f"Tokens per second per {device}", f"tokens/s per {device}",
        [Line("measured", *history.speed_curve, is_raw=True, color=4)],
        expected=plan.speed.tokens_per_second / plan.placement.world_size if plan and plan.speed else None,
        form=count, from_zero=True, height=bars_height(len(history.memory)),
    )  # fmt: skip
    stages = [(each.stage, each.largest_peak_gib) for each in history.memory]
    memory = memory_chart(stages, [("plan", plan.memory.total)] if plan else [])
    spans = history.spans
    visible = merge_spans(spans, (spans[-1].end - spans[0].begin) * _NARROWEST) if spans else []
    kinds = ", ".join(dict.fromkeys(span.kind for span in spans))
    charts = [
        Chart("Loss", draw_lines("loss", f"Training loss {course}", "loss", losses, is_wide=True), is_wide=True),
        *_pair_charts(tokens, steps),
        Chart("Learning rate", _over_tokens("learning rate", tokens, rates, color=2)),
        Chart("Gradient norm", _over_tokens("gradient norm", tokens, norms, color=3, is_raw=True)),
        Chart("Throughput", speed),
        Chart("Memory by stage", memory),
        Chart("Load of the busiest expert", _draw_experts(history)),
        *_gpu_charts(gpus, history),
        Chart("Timeline", timeline(f"Time by activity: {kinds}", visible), is_wide=True),
    ]
    return [chart for chart in charts if chart.svg]


def _gpu_charts(samples: Sequence[NodeSample], history: History) -> list[Chart]:
    """Return charts of utilization and power over time: the mean of the GPUs, and the range from lowest to highest."""
    begin = history.spans[0].begin if history.spans else None
    several = len({(sample.host, gpu.index) for sample in samples for gpu in sample.gpus}) > 1
    shown = "mean; area: lowest to highest GPU" if several else "mean"
    charts = []
    for title, unit, color, limit, value in (
        ("GPU utilization", "%", 2, 104.0, lambda gpu: gpu.utilization),
        ("GPU power", "W", 1, None, lambda gpu: gpu.power),
    ):
        curve = gpu_curve(samples, value, begin)
        line = Line(shown, curve.seconds, curve.mean, color=color, band=(curve.lowest, curve.highest))
        svg = draw_lines(
            title.replace(" ", "-").lower(), f"{title} over time: {shown}", f"{unit} ({shown})", [line],
            form="{:,.0f}".format, from_zero=True, is_over_time=True, limit=limit,
        )  # fmt: skip
        charts.append(Chart(title, svg))
    return charts


def _draw_experts(history: History) -> str:
    found = [(step.tokens, step.routers) for step in history.steps.values() if step.routers is not None]
    tokens, unit = [each for each, _ in found], "× the mean load of its layer"
    lines = [
        Line("of all layers", tokens, [routers.max_utilization for _, routers in found], color=1),
        Line("mean over the layers", tokens, [routers.mean_max_utilization for _, routers in found]),
    ]
    return draw_lines("experts", f"Busiest expert, {unit}, by tokens", unit, lines, from_zero=True)
