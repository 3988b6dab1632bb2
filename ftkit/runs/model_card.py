"""Describe an export: model card, loss curve, and recipe, from the files of the run.

The card is README.md as the Hugging Face hub shows it.
"""

from __future__ import annotations

import json
import math
import shlex
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

from ruamel.yaml import YAML

from ftkit.config.training import TrainingSpec
from ftkit.errors import plural
from ftkit.files import read_json_if_valid, read_small
from ftkit.models.architecture import ArchitectureSpec, ModelSpec
from ftkit.paths import is_path
from ftkit.runs.metrics_file import read_outline, read_records
from ftkit.runs.records import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ftkit.config.recipe import RecipePlan
    from ftkit.planning.layout import RunLayout

CARD_FILE = "README.md"
CURVE_FILE = "loss.svg"
RECIPE_FILE = "recipe.yaml"
_REPEATED = ("name", "model", "data", "training", "evaluation")
"""Sections of a recipe that affect training or evaluation."""
_ROPE = {"rope_scaling", "max_position_embeddings"}
Point = tuple[float, float]

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_MAX_POINTS = 400
_NUM_TICKS = 5
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.grid{stroke:#d0d7de;stroke-width:1}"
    ".train{fill:none;stroke:#0969da;stroke-width:1.5}.valid{fill:none;stroke:#bc4c00;stroke-width:1.5}"
    ".dot{fill:#bc4c00}"
    "@media(prefers-color-scheme:dark){text{fill:#8d96a0}.grid{stroke:#30363d}}"
)


def write_card(
    folder: Path,
    layout: RunLayout,
    recipe: RecipePlan,
    step: int,
    kind: Literal["model", "adapters"],
    license_name: str | None = None,
) -> None:
    """Write the card of an export, the picture of its loss, and its recipe.

    Args:
        folder: the export's folder.
        layout: the run's folder with its manifest and its records, if they exist.
        recipe: the run's resolved recipe.
        step: number of training steps of the weights.
        kind: whether a full model or adapters are exported.
        license_name: the license of the base model, if it is known.
    """
    curve = loss_curve(layout.metrics, step)
    if curve is not None:
        (folder / CURVE_FILE).write_text(curve, encoding="utf-8")
    (folder / RECIPE_FILE).write_text(_yaml(typed_recipe(recipe)), encoding="utf-8")
    card = _card(layout, recipe, step, kind, license_name, has_curve=curve is not None)
    (folder / CARD_FILE).write_text(card, encoding="utf-8")


def typed_recipe(recipe: RecipePlan) -> dict[str, Any]:
    """Return a recipe that `ftkit run FILE` accepts: with all values, since defaults may change between versions."""
    values = recipe.model_dump(mode="json", include=set(_REPEATED))
    shape, model = values["model"].pop("architecture"), values["model"]
    kept: set[str] = set()  # pretrained weights define the shape
    if recipe.model.weights == "random":
        kept = set(ArchitectureSpec.model_fields)
    elif recipe.model.architecture.rope_scaling is not None:
        kept = _ROPE
    values["model"] = {key: value for key, value in model.items() if key in ModelSpec.model_fields}
    values["model"]["architecture"] = {key: value for key, value in shape.items() if key in kept}
    values["training"] = {key: each for key, each in values["training"].items() if key in TrainingSpec.model_fields}
    return values


def _yaml(values: dict[str, Any]) -> str:
    yaml, text = YAML(typ="rt", pure=True), StringIO()  # "safe" sorts keys
    yaml.dump(values, text)
    return text.getvalue()


def _card(
    layout: RunLayout, recipe: RecipePlan, step: int, kind: Literal["model", "adapters"], license_name: str | None,
    *, has_curve: bool,
) -> str:  # fmt: skip
    manifest = read_json_if_valid(layout.manifest, dict[str, Any]) or {}
    base = None if recipe.model.weights == "random" else recipe.model.weights
    head = {
        "library_name": "peft" if kind == "adapters" else "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base if base is not None and not is_path(base) else None,
        "license": license_name,
        "tags": ["ftkit", recipe.training.method],
    }
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items() if value is not None)
    parts = [
        f"---\n{front}\n---\n\n# {layout.root.name}",
        _list(_facts(recipe, step, kind, base, license_name)),
        "## Measured on the validation split\n\n" + _metrics(layout, step),
        *([f"## Loss\n\n![Loss by step]({CURVE_FILE})"] if has_curve else []),
        "## How to repeat it\n\n" + _repeat(manifest, recipe),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(
    recipe: RecipePlan, step: int, kind: str, base: str | None, license_name: str | None
) -> list[tuple[str, object]]:
    training, lora = recipe.training, recipe.training.adapters
    revision = f", revision {recipe.model.revision}" if recipe.model.revision else ""
    size = f", rank {lora.rank}, alpha {lora.alpha}" if lora else ""
    return [
        ("Content", "a full model" if kind == "model" else "adapters, which peft loads onto the base model"),
        ("Base model", f"{base}{revision}" if base else "none: training began with random weights"),
        ("License of the base model", license_name or "not stated in its files"),
        ("Recipe", recipe.name),
        ("Method", training.method + size),
        ("Steps", f"{step}, {plural(training.global_batch_size, 'pack')} of {training.sequence_length} tokens each"),
        ("Learning rate", f"{training.learning_rate:g}"),
        ("Data", _data(recipe)),
    ]


def _data(recipe: RecipePlan) -> str:
    values = recipe.data.source.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    scalars = {key: value for key, value in values.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{key} {value}" for key, value in scalars.items()) or type(recipe.data.source).__name__


def _list(facts: list[tuple[str, object]]) -> str:
    return "\n".join(f"* {name}: {value}" for name, value in facts)


def _metrics(layout: RunLayout, step: int) -> str:
    """Return a table with the evaluation before training, and the newest one of these weights."""
    evaluations = [record for record in read_outline(layout.metrics) if isinstance(record, EvaluationRecord)]
    before = [("before training", record) for record in evaluations if record.when == "before"]
    these = [(f"after {plural(step, 'step')}", record) for record in evaluations if record.step == step > 0]
    rows = [*before[:1], *these[-1:]]
    if not rows:
        return "Nothing was measured."
    scores = sorted({name for _, record in rows for name in _scores(record)})
    lines = [["", "loss", "perplexity", *scores], ["---"] * (3 + len(scores))]
    for weights, record in rows:
        own = _scores(record)
        measured = [f"{own[name]:.1%}" if name in own else "" for name in scores]
        lines.append([weights, f"{record.loss:.4f}", f"{record.perplexity:.2f}", *measured])
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return table if these else f"{table}\n\nThe weights after {plural(step, 'step')} were not evaluated."


def _scores(record: EvaluationRecord) -> dict[str, float]:
    scores = {name.replace("_", " "): score for name, score in record.scores.items() if name != "sql"}
    accuracy = record.execution_accuracy
    return scores if accuracy is None else {"SQL execution": accuracy} | scores


def _repeat(manifest: dict[str, Any], recipe: RecipePlan) -> str:
    ftkit, command = manifest.get("ftkit"), manifest.get("command")
    typed = f" It was started with `{shlex.join(map(str, command))}`." if isinstance(command, list) else ""
    facts = [
        ("ftkit", ftkit.get("version") if isinstance(ftkit, dict) else None),
        ("Image", manifest.get("container_image")),
        ("Cluster", manifest.get("cluster")),
        ("Data fingerprint", manifest.get("data_fingerprint")),
        ("Seed", recipe.training.seed),
    ]
    facts_text = _list([(name, value) for name, value in facts if value is not None])
    return f"[{RECIPE_FILE}]({RECIPE_FILE}) is the complete recipe: `ftkit run ./{RECIPE_FILE}`.{typed}\n\n{facts_text}"


def read_license(base: Path) -> str | None:
    """Return the license that the model card in a folder of weights states; None if there is none."""
    try:
        lines = read_small(base / CARD_FILE).decode(errors="replace").splitlines()
    except OSError:
        return None
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            return None
        key, _, value = line.partition(":")
        if key == "license" and value.strip():
            return value.strip().strip("\"'")
    return None


# --- The loss curve -----------------------------------------------------------------------------


def loss_curve(metrics: Path, last_step: int) -> str | None:
    """Draw the loss of training and of validation by step; None if fewer than two steps were recorded.

    Args:
        metrics: the records of the run.
        last_step: later steps are not drawn: the exported checkpoint does not include them.
    """
    trained: dict[float, float] = {}
    validated: dict[float, float] = {}
    for record in read_records(metrics):  # the last record of a step that was repeated after a restart
        if not isinstance(record, StepRecord | EvaluationRecord) or record.step > last_step:
            continue
        if math.isfinite(record.loss):
            (trained if isinstance(record, StepRecord) else validated)[record.step] = record.loss
    if len(trained) < 2:  # noqa: PLR2004 - a line has two ends
        return None
    return _draw(_averaged(sorted(trained.items())), sorted(validated.items()))


def _averaged(points: Sequence[Point]) -> list[Point]:
    """Downsample to the resolution of the picture; each point is the mean of its neighbors."""
    size = math.ceil(len(points) / _MAX_POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _draw(trained: Sequence[Point], validated: Sequence[Point]) -> str:
    steps = [x for x, _ in (*trained, *validated)]
    losses = [y for _, y in (*trained, *validated)]
    rows, columns = ticks(min(losses), max(losses)), ticks(min(steps), max(steps))
    low, high = min(rows[0], *losses), max(rows[-1], *losses)
    first, last = min(steps), max(*steps, min(steps) + 1)

    def place(point: Point) -> Point:
        x = _LEFT + (point[0] - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (high - point[1]) / ((high - low) or 1) * (_HEIGHT - _TOP - _BOTTOM)
        return x, y

    parts = []
    for value in rows:
        y = place((first, value))[1]
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in columns:
        x = place((value, low))[0]
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">step</text>')
    parts.append(_line("train", map(place, trained)))
    parts.append(_legend(_LEFT, "train", "training loss"))
    if validated:
        parts.append(_line("valid", map(place, validated)))
        parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in map(place, validated)]
        parts.append(_legend(_LEFT + 130, "valid", "validation loss"))
    label = f"training loss {trained[0][1]:.3g} to {trained[-1][1]:.3g}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"<style>{_STYLE}</style>" + "".join(parts) + "</svg>\n"
    )


def _line(kind: str, points: Iterable[Point]) -> str:
    return f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def _legend(x: int, kind: str, text: str) -> str:
    return f'<path class="{kind}" d="M{x} 16h18"/><text x="{x + 24}" y="20">{text}</text>'


def ticks(low: float, high: float) -> list[float]:
    """Return evenly spaced round numbers between two numbers, including these if they are round."""
    span = max(high - low, 1e-6 * max(1.0, abs(high)))
    unit = 10 ** math.floor(math.log10(span / _NUM_TICKS))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= _NUM_TICKS)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]
