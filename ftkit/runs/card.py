"""README.md of an export: a model card as the Hugging Face hub shows it, made from the files of the run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from ftkit.config.paths import is_path
from ftkit.files import read_json_if_valid
from ftkit.runs.summary import summarize

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.config.recipe import RecipePlan
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.records import EvaluationRecord

CARD_FILE = "README.md"


def model_card(
    layout: RunLayout,
    recipe: RecipePlan,
    step: int,
    kind: Literal["model", "adapters"],
    license_name: str | None = None,
) -> str:
    """Write the card of an export.

    Args:
        layout: the run's folder: its manifest and its records, as far as they are there.
        recipe: what was trained, and how.
        step: training steps that the weights have seen.
        kind: what is exported.
        license_name: the license of the base model, if it is known.
    """
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
        _list(_what(recipe, step, kind, base, license_name)),
        "## Measured on the validation split\n\n" + _metrics(layout),
        "## How to repeat it\n\n" + _repeat(manifest, recipe),
    ]
    return "\n\n".join(parts) + "\n"


def _what(
    recipe: RecipePlan, step: int, kind: str, base: str | None, license_name: str | None
) -> list[tuple[str, object]]:
    training, lora = recipe.training, recipe.training.adapters
    revision = f", revision {recipe.model.revision}" if recipe.model.revision else ""
    size = f", rank {lora.rank}, alpha {lora.alpha}" if lora else ""
    return [
        ("Content", "a whole model" if kind == "model" else "adapters, to be loaded onto the base model by peft"),
        ("Base model", f"{base}{revision}" if base else "none: training began with random weights"),
        ("License of the base model", license_name or "not stated in its files"),
        ("Recipe", recipe.name),
        ("Method", training.method + size),
        ("Steps", f"{step}, {training.global_batch_size} packs of {training.sequence_length} tokens each"),
        ("Learning rate", f"{training.learning_rate:g}"),
        ("Data", _data(recipe)),
    ]


def _data(recipe: RecipePlan) -> str:
    values = recipe.data.source.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    told = {key: value for key, value in values.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{key} {value}" for key, value in told.items()) or type(recipe.data.source).__name__


def _list(facts: list[tuple[str, object]]) -> str:
    return "\n".join(f"* {name}: {value}" for name, value in facts)


def _metrics(layout: RunLayout) -> str:
    summary = summarize(layout)
    rows = [("before", summary.before), ("after", summary.after)]
    lines = [_row(when, record) for when, record in rows if record]
    if not lines:
        return "Nothing was measured."
    return "\n".join(["| training | loss | perplexity | SQL execution |", "|---|---|---|---|", *lines])


def _row(when: str, record: EvaluationRecord) -> str:
    accuracy = "" if record.execution_accuracy is None else f"{record.execution_accuracy:.1%}"
    return f"| {when} | {record.loss:.4f} | {record.perplexity:.2f} | {accuracy} |"


def _repeat(manifest: dict[str, Any], recipe: RecipePlan) -> str:
    ftkit = manifest.get("ftkit")
    facts = [
        ("ftkit", ftkit.get("version") if isinstance(ftkit, dict) else None),
        ("Image", manifest.get("container_image")),
        ("Cluster", manifest.get("cluster")),
        ("Data fingerprint", manifest.get("data_fingerprint")),
        ("Seed", recipe.training.seed),
    ]
    return _list([(name, value) for name, value in facts if value is not None])


def read_license(base: Path) -> str | None:
    """Return the license that the model card in a folder of weights states; None if there is none."""
    try:
        lines = (base / CARD_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
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
