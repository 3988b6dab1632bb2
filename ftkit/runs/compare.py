"""Compare runs: differences of their inputs, their results, and their loss curves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from ftkit.config.objectives import OBJECTIVE_METRICS, OPTIONS, ReferencedSpec
from ftkit.config.recipe import BestSpec
from ftkit.errors import NotFoundError
from ftkit.files import mapping, read_json_if_valid
from ftkit.runs.ends import End
from ftkit.runs.find import RunFolder, find_run
from ftkit.runs.gpu_samples import read_samples, summarize_samples
from ftkit.runs.history import read_history
from ftkit.runs.listing import find_sweep
from ftkit.runs.manifest import DOCUMENT_NUMBERS, describe_data, flat, mappings

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout, Workspace
    from ftkit.runs.records import StartRecord

_SECTIONS = ("recipe", "data", "image", "versions", "cluster")
_DERIVED = re.compile(r"(model|teacher)\.architecture\.counts\.|teacher\.(?!weights$|revision$|trained\.sha256$)")
"""Keys of a resolved recipe that are derived from other keys."""
_OF_OBJECTIVE = {"loss", *OBJECTIVE_METRICS}
"""Metrics of an evaluation whose definitions depend on the objective and its options."""


@dataclass(frozen=True)
class LossPoint:
    step: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class RunResults:
    """The results of a run as in its `History` and `GpuSummary`; None if unknown."""

    step: int | None = None
    tokens: int | None = None
    loss: float | None = None
    validated_step: int | None = None  # of the last evaluation; with `evaluation.best`, after training, of the best one
    validation_loss: float | None = None
    accuracy: float | None = None  # like `margin` and `kl_per_token`, of preferences: in the last evaluation or step
    margin: float | None = None
    kl_per_token: float | None = None
    kl: float | None = None  # of distillation, like `agreement`
    agreement: float | None = None
    selected: float | None = None  # the recipe's `evaluation.best.metric` in the last evaluation
    tokens_per_second_per_process: float | None = None
    mfu: float | None = None
    predicted_gib: float | None = None  # peak of a device
    measured_gib: float | None = None
    training_seconds: float | None = None
    num_restarts: int = 0
    restart_reasons: tuple[Annotated[End | None, BeforeValidator(End.from_json)], ...] = ()
    held_seconds: float | None = None
    num_processes: int | None = None
    cost: float | None = None  # of the GPUs in `held_seconds`, in the currency of the cluster's `price_per_gpu_hour`
    gpu_utilization: float | None = None
    gpu_power: float | None = None
    energy_kwh: float | None = None
    scores: dict[str, float] = field(default_factory=dict)  # of completions, in the last evaluation


@dataclass(frozen=True)
class ComparedRun:
    id: str
    inputs: dict[str, dict[str, object]]  # by section and key
    results: RunResults
    curve: tuple[LossPoint, ...]  # repeated steps occur once
    metrics_problem: str = ""  # which records can't be read, and why


@dataclass(frozen=True)
class Difference:
    """A key whose values differ between runs; `values` has one per run, None for a run without the key."""

    section: str
    key: str
    values: tuple[object, ...]


AlignedBy = Literal["tokens", "step"]


@dataclass(frozen=True)
class AlignedLosses:
    """Points at which all runs have a record, aligned by tokens or step, with the loss of each run."""

    by: AlignedBy
    points: list[tuple[int, tuple[float, ...]]]

    def some(self, num_points: int = 10) -> list[tuple[int, tuple[float, ...]]]:
        """Return at most `num_points` of the points, evenly spaced."""
        last = len(self.points) - 1
        chosen = {last * index // max(1, num_points - 1) for index in range(num_points)} if self.points else set()
        return [self.points[index] for index in sorted(chosen)]


@dataclass(frozen=True)
class CurveComparison:
    """A run's loss curve compared with the first run's, at points where both have a record."""

    by: AlignedBy
    num_common: int
    largest_difference: float | None  # of finite losses
    first_difference: int | None  # tokens or step at the first difference


def read_run(layout: RunLayout) -> ComparedRun:
    """Read a run from its folder for a comparison. Missing or damaged values are None."""
    manifest = read_json_if_valid(layout.manifest, dict[str, object]) or {}
    plan = read_json_if_valid(layout.plan, dict[str, object]) or {
        "recipe": manifest.get("resolved_recipe"),
        "engine": {"name": manifest.get("engine")},
        "cluster": manifest.get("cluster_profile"),
        "placement": manifest.get("placement"),
        "fingerprint": manifest.get("data_fingerprint"),
        "ftkit_version": mapping(manifest.get("ftkit")).get("version"),
    }
    history = read_history(layout)
    last, after, start = history.last_step, history.last_evaluation, history.start
    gpus = summarize_samples(read_samples(layout))
    memory = [value for value in mapping(plan.get("memory")).values() if isinstance(value, float)]
    price, cost = mapping(plan.get("cluster")).get("price_per_gpu_hour"), None
    is_on_gpus = mapping(plan.get("placement")).get("device") == "cuda"
    if is_on_gpus and isinstance(price, int | float) and history.process_seconds is not None:
        cost = price * history.process_seconds / 3600
    scores = after.scores if after else last.scores if last else {}
    selection = mapping(mapping(mapping(plan.get("recipe")).get("evaluation")).get("best")).get("metric")
    results = RunResults(
        step=last.step if last else None,
        tokens=last.tokens if last else None,
        loss=last.loss if last else None,
        validated_step=after.step if after else None,
        validation_loss=after.loss if after else None,
        **{name: scores.get(name) for name in ("accuracy", "margin", "kl_per_token", "agreement")},
        kl=scores.get("kl") if "agreement" in scores else None,  # `kl` of kto is its reference point
        selected=after.value_of(selection) if after and isinstance(selection, str) else None,
        tokens_per_second_per_process=history.speed,
        mfu=history.mfu,
        predicted_gib=sum(memory) if memory else None,
        measured_gib=history.peak_gib,
        training_seconds=history.training_seconds,
        num_restarts=len(history.restarts),
        restart_reasons=tuple(each.reason for each in history.restarts),
        held_seconds=history.held_seconds,
        num_processes=start.world_size if start else None,
        cost=cost,
        gpu_utilization=gpus.utilization if gpus else None,
        gpu_power=gpus.power if gpus else None,
        energy_kwh=gpus.energy_kwh if gpus else None,
        scores={name: score for name, score in scores.items() if name not in OBJECTIVE_METRICS},
    )
    curve = tuple(LossPoint(step, each.tokens, each.loss) for step, each in history.steps.items())
    return ComparedRun(
        layout.root.name, describe_inputs(layout, plan, manifest, start), results, curve, history.problem
    )


def describe_inputs(
    layout: RunLayout, plan: Mapping[str, object], manifest: Mapping[str, object], start: StartRecord | None
) -> dict[str, dict[str, object]]:
    """Return a run's inputs, by section and key, from the content of its plan and manifest, and its newest start.

    The data's digests are looked up in the workspace of `layout` if the manifest has none yet.
    """
    recipe = mapping(plan.get("recipe"))
    data = next(reversed(mappings(manifest.get("starts"))), {})
    if not data.get("data"):
        data = {**describe_data(layout, plan.get("fingerprint"))}
    code = mapping(mapping(manifest.get("ftkit")).get("git"))
    engine = mapping(plan.get("engine")).get("name")
    image_keys = ("image", "container_image", "image_id", "image_sha256", "image_lock_sha256")
    cluster = {**mapping(plan.get("cluster")), **mapping(plan.get("placement"))}
    return {
        "recipe": {
            **dict(flat({key: value for key, value in recipe.items() if key not in ("data", "image")})),
            **({"training.engine": engine} if engine else {}),
        },
        "data": {
            **dict(flat(mapping(recipe.get("data")))),
            "fingerprint": plan.get("fingerprint"),
            **{f"{name} sha256": digest for name, digest in mapping(data.get("data")).items()},
            **mapping(data.get("documents")),
        },
        "image": {key: manifest.get(key, plan.get(key)) for key in image_keys},
        "versions": {
            "ftkit": plan.get("ftkit_version"),
            "ftkit commit": code.get("commit"),
            "ftkit has uncommitted changes": code.get("has_uncommitted_changes"),
            **(start.versions if start else {}),
        },
        "cluster": {
            **{key: value for key, value in flat(cluster) if key != "description"},
            "device": start.device if start else None,
        },
    }


def find_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the inputs that differ between runs, in the order of sections."""
    found = []
    for section in _SECTIONS:
        for key in dict.fromkeys(key for run in runs for key in run.inputs[section] if not _DERIVED.match(key)):
            values = tuple(run.inputs[section].get(key) for run in runs)
            if any(value != values[0] for value in values):
                found.append(Difference(section, key, values))
    return found


def differing_objectives(runs: Sequence[ComparedRun]) -> str:
    """Describe how the definitions of the runs' losses differ; empty if the losses are comparable."""
    found = [_loss_options(run.inputs.get("recipe", {})) for run in runs]
    for key in dict.fromkeys(chain(*found)):
        values = dict.fromkeys(str(each.get(key, "-")) for each in found)
        if len(values) > 1:
            return f"{key} is {' and '.join(values)}"
    return ""


def comparable_losses(runs: Sequence[ComparedRun]) -> list[list[int]]:
    """Group the indices of runs whose losses are comparable."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number, run in enumerate(runs):
        options = _loss_options(run.inputs.get("recipe", {}))
        groups.setdefault(tuple(sorted((key, str(value)) for key, value in options.items())), []).append(number)
    return list(groups.values())


def _loss_options(recipe: Mapping[str, object]) -> dict[str, object]:
    """Return the objective, its options, and the weights of its teacher or reference, by keys of the recipe."""
    name = str(recipe.get("training.objective", "next_token"))
    prefix, spec = f"training.{name}.", OPTIONS.get(name)
    other_model = "teacher" if name == "distill" else "model" if spec and issubclass(spec, ReferencedSpec) else None
    weights = (f"{other_model}.weights", f"{other_model}.revision")
    values = {prefix + key: value for key, value in (spec.model_validate({}).model_dump() if spec else {}).items()}
    values |= {key: value for key, value in recipe.items() if key.startswith(prefix) or key in weights}
    values.pop(f"{prefix}reference", None)  # only how the reference is computed
    return {"training.objective": name, **values}


@dataclass(frozen=True)
class BestRun:
    """The best run by a metric, and the mean of each setting, which is a run's inputs except the seed."""

    run: str
    metric: str  # `validation_loss`, `loss` of training, or the recipe's `evaluation.best.metric`
    value: float
    settings: tuple[tuple[str, ...], ...]  # the runs of each setting, the one with the best mean first
    means: tuple[float, ...]  # of the settings
    seed_std: float | None  # sample standard deviation over seeds, pooled over settings; None without repeats

    @property
    def is_clear(self) -> bool:
        """Whether the best two settings differ by more than twice the standard error of their difference."""
        if self.seed_std is None or len(self.means) < 2:  # noqa: PLR2004
            return True
        error = self.seed_std * sqrt(sum(1 / len(runs) for runs in self.settings[:2]))
        return abs(self.means[1] - self.means[0]) > 2 * error


def find_best(runs: Sequence[ComparedRun]) -> BestRun | None:
    """Find the best run by `evaluation.best.metric` if all have the same, else by validation loss, or training loss.

    Returns None if the values are of different data, or if `why_not_comparable` has a reason.
    """
    metric, sign, values = _values_of_metric(runs)
    measured = [run for run in runs if run.id in values]
    differences = find_differences(measured)
    of_metric = {"tokenizer sha256", "train sha256" if metric == "loss" else "validation sha256"}
    if not values or any(each.key in of_metric for each in differences) or why_not_comparable(runs):
        return None
    settings: dict[str, list[str]] = {}
    for index, run in enumerate(measured):
        known = (each for each in differences if not each.key.endswith(("seed", "fingerprint", "sha256")))
        settings.setdefault(repr([each.values[index] for each in known]), []).append(run.id)
    means = {tuple(ids): fmean(values[name] for name in ids) for ids in settings.values()}
    ranked = sorted(means, key=lambda ids: sign * means[ids])
    squares = sum((values[name] - mean) ** 2 for ids, mean in means.items() for name in ids)
    freedom = len(values) - len(means)
    best = min(values, key=lambda name: sign * values[name])
    seed_std = sqrt(squares / freedom) if freedom else None
    return BestRun(best, metric, values[best], tuple(ranked), tuple(means[ids] for ids in ranked), seed_std)


def why_not_comparable(runs: Sequence[ComparedRun]) -> str:
    """Describe why the metric that ranks runs has another meaning in some of them; empty if there is no such reason."""
    metric, _, values = _values_of_metric(runs)
    measured = [run for run in runs if run.id in values]
    of_objective = metric.removeprefix("validation_").partition("/")[0] in _OF_OBJECTIVE
    if of_objective and (reason := differing_objectives(measured)):
        return f"losses are of different objectives: {reason}"
    of_rows = "evaluation.max_packs" if of_objective or metric == "perplexity" else "evaluation.generation."
    for each in find_differences(measured) if metric != "loss" else ():
        if each.key.startswith(of_rows) and not each.key.endswith(".metrics"):
            values_of_key = " and ".join(dict.fromkeys(map(str, each.values)))
            return f"evaluations may be of different rows: {each.key} is {values_of_key}"
    return ""


def _values_of_metric(runs: Sequence[ComparedRun]) -> tuple[str, int, dict[str, float]]:
    """Return the metric that ranks the runs, its sign (1 if lower is better, else -1), and finite values by run."""
    recipes = [run.inputs["recipe"] for run in runs]
    chosen = {
        (str(each.get("evaluation.best.metric")), str(each.get("evaluation.best.mode", "auto"))) for each in recipes
    }
    (metric, mode), field = min(chosen), "selected"
    if len(chosen) > 1 or metric in ("None", "loss") or all(run.results.selected is None for run in runs):
        has_validation = any(run.results.validation_loss is not None for run in runs)
        metric = field = "validation_loss" if has_validation else "loss"
        mode = "min"
    found = {run.id: getattr(run.results, field) for run in runs}
    sign = {"min": 1, "max": -1}.get(mode) or (1 if BestSpec.model_construct(metric=metric).is_lower_better else -1)
    return metric, sign, {name: value for name, value in found.items() if value is not None and isfinite(value)}


def find_run_step(reference: str, workspace: Workspace) -> tuple[RunFolder, str]:
    """Find the run and the step of `RUN@STEP`, `RUN@best`, or `RUN@last`; the step is empty for `RUN`.

    `SWEEP@best` is the best run of a sweep, unless a run has the sweep's name.
    """
    name, _, step = reference.rpartition("@")
    if not name or not (step.isdecimal() or step in ("best", "last")):
        return find_run(reference, workspace), ""
    try:
        return find_run(name, workspace), step
    except NotFoundError:
        folders = {entry.folder.id: entry.folder for entry in find_sweep(name, workspace)} if step == "best" else {}
        if not folders:
            raise
        runs = [read_run(folder.layout) for folder in folders.values()]
        if best := find_best(runs):
            return folders[best.run], ""
        raise NotFoundError(
            f"{reference}: the losses of this sweep's runs can't be compared",
            meaning=why_not_comparable(runs) or "none has a loss yet, or they are of different data",
            fix=f"choose one of them: ftkit compare {name}",
        ) from None


def compare_curves(first: ComparedRun, other: ComparedRun) -> CurveComparison:
    """Compare two loss curves where both have a record; curves of different objectives have no common points."""
    if differing_objectives([first, other]):
        return CurveComparison("tokens", 0, None, None)
    aligned = align_losses([first, other])
    differing = [place for place, (one, two) in aligned.points if repr(one) != repr(two)]  # two NaN are equal
    gaps = [abs(one - two) for _, (one, two) in aligned.points if isfinite(one) and isfinite(two)]
    return CurveComparison(aligned.by, len(aligned.points), max(gaps, default=None), next(iter(differing), None))


def align_losses(runs: Sequence[ComparedRun]) -> AlignedLosses:
    """Align losses that were recorded after the same number of tokens, or else at the same step.

    Runs on the same packs have equal tokens after equal numbers of packs, whatever their batch sizes; if the order of
    packs differs, only at the ends of epochs.
    """
    found: dict[AlignedBy, list[tuple[int, tuple[float, ...]]]] = {}
    for by in ("tokens", "step"):
        curves = [{getattr(point, by): point.loss for point in run.curve} for run in runs]
        places = sorted(set(curves[0]).intersection(*curves))
        found[by] = [(place, tuple(curve[place] for curve in curves)) for place in places]
    by = "tokens" if len(found["tokens"]) > 1 else max(found, key=lambda each: len(found[each]))
    return AlignedLosses(by, found[by])


def have_same_documents(first: ComparedRun, other: ComparedRun) -> bool | None:
    """Return whether two runs trained on the same documents: by their tokens, else by numbers; None if unknown."""
    one, two = first.inputs.get("data", {}), other.inputs.get("data", {})

    def compare(key: str) -> bool | None:
        return one[key] == two[key] if one.get(key) is not None and two.get(key) is not None else None

    has_same_tokenizer = compare("tokenizer sha256")
    if has_same_tokenizer and compare("train sha256"):
        return True
    if has_same_tokenizer and (found := compare("documents sha256")) is not None:
        return found
    return False if False in map(compare, DOCUMENT_NUMBERS) else None
