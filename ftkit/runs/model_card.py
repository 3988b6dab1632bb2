"""Describe an export from the files of the run: model card, loss curve, and recipe.

The card is README.md, which the Hugging Face hub displays.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ruamel.yaml import YAML

from ftkit.config.data import describe_too_long
from ftkit.config.objectives import OBJECTIVE_METRICS
from ftkit.config.training import TrainingSpec
from ftkit.errors import plural
from ftkit.files import mapping, read_json_if_valid, read_small
from ftkit.models.architecture import ArchitectureSpec, ModelSpec
from ftkit.paths import is_path
from ftkit.runs.manifest import Values, mappings
from ftkit.runs.metrics_file import read_evaluations, read_records
from ftkit.runs.records import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from ftkit.config.recipe import RecipePlan
    from ftkit.config.training import TrainingPlan
    from ftkit.planning.layout import RunLayout

CARD_FILE = "README.md"
CURVE_FILE = "loss.svg"
RECIPE_FILE = "recipe.yaml"

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_MAX_POINTS = 400
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.axis{fill:none;stroke:#d0d7de}"
    ".train{fill:none;stroke:#0969da;stroke-width:1.5}.valid{fill:none;stroke:#bc4c00;stroke-width:1.5}"
    ".dot{fill:#bc4c00}"
    "@media(prefers-color-scheme:dark){text{fill:#8d96a0}.axis{stroke:#30363d}}"
)


def write_card(
    folder: Path,
    layout: RunLayout,
    recipe: RecipePlan,
    step: int,
    kind: Literal["model", "adapters"],
    license_name: str | None = None,
) -> None:
    """Write the card of an export after `step` training steps, the picture of its loss, and its recipe.

    `license_name` is the license of the base model, if it is known.
    """
    curve = loss_curve(layout.metrics, step)
    if curve is not None:
        (folder / CURVE_FILE).write_text(curve, encoding="utf-8")
    yaml, text = YAML(typ="rt", pure=True), StringIO()  # "safe" sorts keys
    yaml.dump(_typed_recipe(recipe), text)
    (folder / RECIPE_FILE).write_text(text.getvalue(), encoding="utf-8")
    base = None if recipe.model.weights == "random" else recipe.model.weights
    head = {
        "library_name": "peft" if kind == "adapters" else "transformers",
        "pipeline_tag": "image-text-to-text" if recipe.data.pictures else "text-generation",
        "base_model": base if base is not None and not is_path(base) else None,
        "license": license_name,
        "tags": ["ftkit", recipe.training.method],
    }
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items() if value is not None)
    parts = [
        f"---\n{front}\n---\n\n# {layout.root.name}",
        _list([*_facts(recipe, step, kind, base, license_name), *_too_long(layout)]),
        "## Measured on the validation split\n\n" + _metrics(layout, step),
        *([f"## Loss\n\n![Loss by step]({CURVE_FILE})"] if curve is not None else []),
        "## How to repeat it\n\n" + _repeat(layout, recipe),
    ]
    (folder / CARD_FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _typed_recipe(recipe: RecipePlan) -> Values:
    """Return a recipe for `ftkit run FILE` with all values, since defaults may change between versions."""
    about_the_run = {"description", "image", "profile", "sync", "teacher", "tracking"}
    values = recipe.model_dump(mode="json", exclude=about_the_run)
    shape, model = values["model"].pop("architecture"), values["model"]
    kept: set[str] = set()  # pretrained weights define the shape
    if recipe.model.weights == "random":
        kept = set(ArchitectureSpec.model_fields)
    elif recipe.model.architecture.rope_scaling is not None:
        kept = {"rope_scaling", "max_position_embeddings"}
    values["model"] = {key: value for key, value in model.items() if key in ModelSpec.model_fields}
    values["model"]["architecture"] = {key: value for key, value in shape.items() if key in kept}
    values["training"] = {key: each for key, each in values["training"].items() if key in TrainingSpec.model_fields}
    return values


def _facts(
    recipe: RecipePlan, step: int, kind: str, base: str | None, license_name: str | None
) -> list[tuple[str, object]]:
    training, lora, source = recipe.training, recipe.training.adapters, recipe.data.source
    revision = f", revision {recipe.model.revision}" if recipe.model.revision else ""
    size = f", rank {lora.rank}, alpha {lora.alpha}" if lora else ""
    values = source.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    merged = ", with adapters merged into training's 4-bit base, dequantized" if training.method == "qlora" else ""
    data = [f"{key} {value}" for key, value in values.items() if isinstance(value, str | int | float)]
    if recipe.data.mixed_sources:
        data = [f"a mixture of {', '.join(recipe.data.mixed_sources)}"]
    return [
        ("Content", f"a full model{merged}" if kind == "model" else "adapters, which peft loads onto the base model"),
        ("Base model", f"{base}{revision}" if base else "none: training began with random weights"),
        ("License of the base model", license_name or "not stated in its files"),
        ("Recipe", recipe.name),
        ("Method", training.method + size),
        ("Objective", _objective(training)),
        ("Steps", f"{step}, {plural(training.global_batch_size, 'pack')} of {training.sequence_length} tokens each"),
        ("Learning rate", f"{training.learning_rate:g}"),
        ("Data", ", ".join(data) or type(source).__name__),
    ]


def _objective(training: TrainingPlan) -> str | None:
    """Describe another objective than the next-token loss, with its options."""
    if training.objective == "next_token":
        return None
    options = (training.preferences or training.distillation or training).model_dump(mode="json", exclude_none=True)
    return ", ".join([training.objective, *(f"{name.replace('_', ' ')} {value}" for name, value in options.items())])


def _too_long(layout: RunLayout) -> list[tuple[str, object]]:
    """Return the fact about documents longer than a pack, if the data had any."""
    starts = (read_json_if_valid(layout.manifest, Values) or {}).get("starts")
    start = mapping(starts[-1]) if isinstance(starts, list) and starts else {}
    counts = {outcome: number for outcome, number in mapping(start.get("too_long")).items() if isinstance(number, int)}
    return [("Documents longer than a pack", describe_too_long(counts))] if any(counts.values()) else []


def _list(facts: list[tuple[str, object]]) -> str:
    return "\n".join(f"* {name}: {value}" for name, value in facts if value is not None)


def _metrics(layout: RunLayout, step: int) -> str:
    """Return a table with the evaluation before training and the newest evaluation of these weights."""
    evaluations = read_evaluations(layout.metrics)
    before = [("before training", record) for record in evaluations if record.when == "before"]
    these = [(f"after {plural(step, 'step')}", record) for record in evaluations if record.step == step > 0]
    rows = [*before[:1], *these[-1:]]
    if not rows:
        return "Nothing was measured."
    scores = sorted({name for _, record in rows for name in record.scores})
    lines = [["", "loss", "perplexity", *(name.replace("_", " ") for name in scores)]]
    for weights, record in rows:
        own = record.scores
        measured = [_measured(name, own[name]) if name in own else "" for name in scores]
        lines.append([weights, f"{record.loss:.4f}", f"{record.perplexity:.2f}", *measured])
    table = _table(lines)
    return table if these else f"{table}\n\nThe weights after {plural(step, 'step')} were not evaluated."


def append_table(folder: Path, title: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = _table([[each.removeprefix("#") for each in titles], *rows])
    with (folder / CARD_FILE).open("a", encoding="utf-8") as card:
        card.write(f"\n{title}\n\n{table}\n")


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def _measured(name: str, value: float) -> str:
    is_fraction = name not in OBJECTIVE_METRICS or name in {"accuracy", "agreement", "desirable"}
    return f"{value:.1%}" if is_fraction else f"{value:.4g}"


def _repeat(layout: RunLayout, recipe: RecipePlan) -> str:
    manifest = read_json_if_valid(layout.manifest, Values) or {}
    command = manifest.get("command")
    typed = f" It was started with `{shlex.join(map(str, command))}`." if isinstance(command, list) else ""
    facts = [
        ("ftkit", mapping(manifest.get("ftkit")).get("version")),
        ("Image", manifest.get("container_image")),
        ("Cluster", manifest.get("cluster")),
        ("Data fingerprint", manifest.get("data_fingerprint")),
        ("Seed", recipe.training.seed),
    ]
    return (
        f"[{RECIPE_FILE}]({RECIPE_FILE}) is the complete recipe: `ftkit run ./{RECIPE_FILE}`.{typed}\n\n{_list(facts)}"
        + _changes(manifest)
    )


def _changes(manifest: Values) -> str:
    """Describe how resumes changed the recipe or the placement; empty if none did."""
    lines = [
        f"* From step {each.get('from_step')}: {key} = {values.get('after')} (before: {values.get('before')})"
        for each in mappings(manifest.get("submissions"))
        for key, values in ((key, mapping(change)) for key, change in mapping(each.get("changes")).items())
    ]
    title = "The run was resumed with other settings, which the recipe alone does not repeat:"
    return "\n\n".join(["", title, "\n".join(lines)]) if lines else ""


def read_license(base: Path) -> str | None:
    """Return the license that the model card in a folder of weights states; None if there is none."""
    try:
        text = read_small(base / CARD_FILE).decode(errors="replace")
    except OSError:
        return None
    front = re.match(r"---\s*\n(.*?)^---", text, re.DOTALL | re.MULTILINE)
    stated = front and re.search(r"^license:[ \t]*(\S.*)$", front[1], re.MULTILINE)
    return stated[1].strip().strip("\"'") if stated else None


# --- The loss curve -----------------------------------------------------------------------------


def loss_curve(metrics: Path, last_step: int) -> str | None:
    """Draw the loss of training and of validation up to the exported step; None if fewer than two were recorded."""
    trained: dict[int, float] = {}
    validated: dict[int, float] = {}
    known = (each for each in read_records(metrics) if isinstance(each, StepRecord | EvaluationRecord))
    for record in known:  # a step repeated after a restart keeps its last record
        if record.step <= last_step and math.isfinite(record.loss):
            (trained if isinstance(record, StepRecord) else validated)[record.step] = record.loss
    if len(trained) < 2:  # noqa: PLR2004 - a line has two ends
        return None
    points = sorted(trained.items())
    size = math.ceil(len(points) / _MAX_POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return _draw(means, sorted(validated.items()))


def _draw(trained: Sequence[tuple[float, float]], validated: Sequence[tuple[float, float]]) -> str:
    steps = [x for x, _ in (*trained, *validated)]
    losses = [y for _, y in (*trained, *validated)]
    first, last, low, high = min(steps), max(steps), min(losses), max(losses)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(points: Sequence[tuple[float, float]]) -> list[tuple[str, str]]:
        across, down = (right - _LEFT) / max(1, last - first), (bottom - _TOP) / ((high - low) or 1)
        return [(f"{_LEFT + (x - first) * across:.1f}", f"{_TOP + (high - y) * down:.1f}") for x, y in points]

    parts = [f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>']
    for y, value in ((_TOP, high), (bottom, low)):
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{value:.4g}</text>')
    for x, value in ((_LEFT, first), (right, last)):
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end">step</text>')
    curves = [("train", "training loss", trained), ("valid", "validation loss", validated)]
    for column, (kind, text, points) in enumerate(curves):
        if points:
            line, x = "L".join(f"{x} {y}" for x, y in place(points)), _LEFT + 130 * column
            parts.append(f'<path class="{kind}" d="M{line}"/><path class="{kind}" d="M{x} 16h18"/>')
            parts.append(f'<text x="{x + 24}" y="20">{text}</text>')
    parts += [f'<circle class="dot" cx="{x}" cy="{y}" r="3"/>' for x, y in place(validated)]
    label = f"training loss {trained[0][1]:.3g} to {trained[-1][1]:.3g}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )
