"""Compare runs: differences of their inputs, their results, and their loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from ftkit.errors import NotFoundError
from ftkit.files import read_json_if_valid
from ftkit.runs.ends import End
from ftkit.runs.find import RunFolder, find_run
from ftkit.runs.gpu_samples import read_samples, summarize_samples
from ftkit.runs.history import read_history
from ftkit.runs.listing import find_sweep
from ftkit.runs.manifest import DOCUMENT_NUMBERS, describe_data, flat, mapping, mappings

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout, Workspace
    from ftkit.runs.records import StartRecord

_SECTIONS = ("recipe", "data", "image", "versions", "cluster")


@dataclass(frozen=True)
class LossPoint:
    """The loss after a step."""

    step: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class RunResults:
    """The results of a run as in its `History` and `GpuSummary`; None if unknown."""

    step: int | None = None
    tokens: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    execution_accuracy: float | None = None
    accuracy: float | None = None  # of preferences, as `margin` and `kl_per_token`: of the last evaluation, or step
    margin: float | None = None
    kl_per_token: float | None = None
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


@dataclass(frozen=True)
class ComparedRun:
    """A run in a comparison."""

    id: str
    inputs: dict[str, dict[str, object]]  # by section and key
    results: RunResults
    curve: tuple[LossPoint, ...]  # repeated steps occur once
    metrics_problem: str = ""  # which records can't be read, and why


@dataclass(frozen=True)
class Difference:
    """A value in which runs differ: one for each run; None where a run has no such value."""

    section: str
    key: str
    values: tuple[object, ...]


AlignedBy = Literal["tokens", "step"]


@dataclass(frozen=True)
class AlignedLosses:
    """Places where all of several runs have a record, by what is equal there, with each run's loss."""

    by: AlignedBy
    points: list[tuple[int, tuple[float, ...]]]

    def some(self, num_points: int = 10) -> list[tuple[int, tuple[float, ...]]]:
        """Return at most `num_points` of the points, evenly spaced."""
        last = len(self.points) - 1
        chosen = {last * index // max(1, num_points - 1) for index in range(num_points)} if self.points else set()
        return [self.points[index] for index in sorted(chosen)]


@dataclass(frozen=True)
class CurveComparison:
    """A run's loss curve compared with the first run's, where both have a record."""

    by: AlignedBy
    num_common: int
    largest_difference: float | None  # of finite losses
    first_difference: int | None  # the tokens or the step after which losses differ for the first time


def read_run(layout: RunLayout) -> ComparedRun:
    """Read a run for a comparison, from its folder. Missing or damaged values are unknown."""
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
    results = RunResults(
        step=last.step if last else None,
        tokens=last.tokens if last else None,
        loss=last.loss if last else None,
        validation_loss=after.loss if after else None,
        execution_accuracy=after.execution_accuracy if after else None,
        **{name: scores.get(name) for name in ("accuracy", "margin", "kl_per_token")},
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
        for key in dict.fromkeys(key for run in runs for key in run.inputs[section]):
            values = tuple(run.inputs[section].get(key) for run in runs)
            if any(value != values[0] for value in values):
                found.append(Difference(section, key, values))
    return found


@dataclass(frozen=True)
class BestRun:
    """The run with the lowest loss, and how far its setting, a run's inputs but for the seed, is below the next one."""

    run: str
    metric: Literal["validation_loss", "loss"]
    loss: float
    settings: tuple[tuple[str, ...], ...]  # the runs of each setting, the one with the lowest mean loss first
    means: tuple[float, ...]  # of the settings
    seed_std: float | None  # sample standard deviation of a loss over seeds, pooled over settings; None without repeats

    @property
    def is_clear(self) -> bool:
        """Whether the best two settings differ by more than twice the standard error of their difference."""
        if self.seed_std is None or len(self.means) < 2:  # noqa: PLR2004
            return True
        error = self.seed_std * sqrt(sum(1 / len(runs) for runs in self.settings[:2]))
        return self.means[1] - self.means[0] > 2 * error


def find_best(runs: Sequence[ComparedRun]) -> BestRun | None:
    """Find the run with the lowest validation loss, else training loss; None if these are not of the same data."""
    metric: Literal["validation_loss", "loss"] = "validation_loss"
    if all(run.results.validation_loss is None for run in runs):
        metric = "loss"
    losses = {run.id: loss for run in runs if (loss := getattr(run.results, metric)) is not None and isfinite(loss)}
    measured = [run for run in runs if run.id in losses]
    differences = find_differences(measured)
    of_metric = {"tokenizer sha256", "validation sha256" if metric == "validation_loss" else "train sha256"}
    if not losses or any(each.key in of_metric for each in differences):
        return None
    settings: dict[str, list[str]] = {}
    for index, run in enumerate(measured):
        known = (each for each in differences if not each.key.endswith(("seed", "fingerprint", "sha256")))
        settings.setdefault(repr([each.values[index] for each in known]), []).append(run.id)
    means = {tuple(ids): fmean(losses[name] for name in ids) for ids in settings.values()}
    ranked = sorted(means, key=means.__getitem__)
    squares = sum((losses[name] - mean) ** 2 for ids, mean in means.items() for name in ids)
    freedom = len(losses) - len(means)
    lowest = min(losses, key=losses.__getitem__)
    seed_std = sqrt(squares / freedom) if freedom else None
    return BestRun(lowest, metric, losses[lowest], tuple(ranked), tuple(means[ids] for ids in ranked), seed_std)


def find_run_step(reference: str, workspace: Workspace) -> tuple[RunFolder, str]:
    """Find the run and the step of `RUN@STEP`, `RUN@best`, or `RUN@last`; the step is empty for a run alone.

    `SWEEP@best` is the best run of a sweep, unless a run has that name.
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
        if best := find_best([read_run(folder.layout) for folder in folders.values()]):
            return folders[best.run], ""
        raise NotFoundError(
            f"{reference}: the losses of this sweep's runs can't be compared",
            meaning="none has a loss yet, or they are of different data",
            fix=f"choose one of them: ftkit compare {name}",
        ) from None


def compare_curves(first: ComparedRun, other: ComparedRun) -> CurveComparison:
    """Compare two loss curves where both have a record."""
    aligned = align_losses([first, other])
    differing = [place for place, (one, two) in aligned.points if repr(one) != repr(two)]  # two NaN are equal
    gaps = [abs(one - two) for _, (one, two) in aligned.points if isfinite(one) and isfinite(two)]
    return CurveComparison(aligned.by, len(aligned.points), max(gaps, default=None), next(iter(differing), None))


def align_losses(runs: Sequence[ComparedRun]) -> AlignedLosses:
    """Return the losses that were recorded after the same number of tokens, or else at the same step.

    Runs on the same packs have the same tokens where their numbers of packs are equal, whatever their batches; with
    another order of packs, only where an epoch ends.
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
