"""manifest.json: the inputs of a run, for repeating it elsewhere, and its submissions and starts."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path

import ftkit
from ftkit.checkout import own_checkout, read_commit
from ftkit.errors import TrainingError, redact_command
from ftkit.files import mapping, read_json_if_valid, sha256_of, write_json
from ftkit.paths import is_path
from ftkit.planning.layout import DataLayout, RunLayout, Workspace
from ftkit.planning.plan import RunPlan, ScriptPlan, plan_to_json
from ftkit.runs.checkpoints import list_checkpoints
from ftkit.runs.ends import excluded_nodes, find_end
from ftkit.runs.job import own_job_id

Values = dict[str, object]  # values of a manifest, or of an object in it
Start = tuple[float, Values]  # with the time when its processes began
_PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "flash-attn-4", "nvidia-cudnn-frontend",
)  # fmt: skip
_MODEL_KEYS = {"weights", "revision", "requested_revision", "source", "adapter", "trained"}
DOCUMENT_NUMBERS = {"training documents": "num_train_documents", "documents longer than a pack": "num_too_long"}
"""Numbers of documents in manifests and comparisons, and in the manifest of prepared data."""
_IMAGE = Path("/opt/ftkit")  # metadata file in an image that ftkit built


def mappings(value: object) -> list[Values]:
    """Return the objects in a list of a manifest; other items, as in damaged files, are skipped."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def read_starts(layout: RunLayout) -> list[Start]:
    """Return the starts of a run in the order of time."""
    starts = mappings((read_json_if_valid(layout.manifest, Values) or {}).get("starts"))
    timed = [(time, start) for start in starts if isinstance(time := start.get("time"), float)]
    return sorted(timed, key=itemgetter(0))


def flat(values: Mapping[str, object], prefix: str = "", *, with_empty: bool = False) -> Iterator[tuple[str, object]]:
    """Yield the values of nested objects by dotted keys; also empty objects, if wanted."""
    for key, value in values.items():
        if isinstance(value, dict) and (value or not with_empty):
            yield from flat(value, f"{prefix}{key}.", with_empty=with_empty)
        else:
            yield f"{prefix}{key}", value


# --- Before a run is submitted -------------------------------------------------------------------


def build_manifest(plan: RunPlan | ScriptPlan, command: Sequence[str], project: Path) -> Values:
    """Return the content of manifest.json for a run that is about to be submitted."""
    return {
        "run": plan.id,
        "created": plan.created.isoformat(),
        "command": redact_command(command, os.environ),
        "project": {"folder": str(project), "git": _commit_of(project)},
        **_describe_plan(plan),
        "submissions": [_describe_submission(plan, command, {})],
    }


def add_submission(
    plan: RunPlan | ScriptPlan,
    command: Sequence[str],
    changes: Mapping[str, tuple[object, object]],
    facts: Mapping[str, object],
) -> None:
    """Add a submission of a run to its manifest, and update the values of the plan.

    Writes nothing if the run has no readable manifest. `changes` are values that differ from the previous plan, before
    and after; `facts` are more values, such as digests of the image, whose file depends on the cluster's format.
    Raises `OSError` if the manifest can't be written.
    """
    values = read_json_if_valid(plan.layout.manifest, Values)
    earlier = None if values is None else values.get("submissions", [])
    if values is None or not isinstance(earlier, list):
        return
    submission = _describe_submission(plan, command, changes)
    write_json(plan.layout.manifest, {**values, **_describe_plan(plan), **facts, "submissions": [*earlier, submission]})


def _describe_submission(
    plan: RunPlan | ScriptPlan, command: Sequence[str], changes: Mapping[str, tuple[object, object]]
) -> Values:
    place, checkpoints = plan.placement, list_checkpoints(plan.layout)
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "command": redact_command(command, os.environ),
        "ftkit": {"version": ftkit.__version__, "git": _commit_of(own_checkout())},
        "cluster": plan.cluster.name,
        "num_nodes": place.num_nodes,
        "processes_per_node": place.processes_per_node,
        "device": place.device,
        "container_image": plan.container_image,
        "from_step": checkpoints[-1][0] if checkpoints else 0,
        "changes": {key: {"before": before, "after": after} for key, (before, after) in changes.items()},
    }


def _describe_plan(plan: RunPlan | ScriptPlan) -> Values:
    values = {
        "ftkit": {"version": plan.ftkit_version, "git": _commit_of(own_checkout())},
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "plan_sha256": hashlib.sha256(plan_to_json(plan).encode()).hexdigest(),
        "cluster": plan.cluster.name,
        "cluster_profile": plan.cluster.model_dump(mode="json"),
        "placement": asdict(plan.placement),
        "image": plan.image,
        "container_image": plan.container_image,
        "code": {code.name: asdict(code) for code in plan.code},
    }
    if not isinstance(plan, RunPlan):
        resources = plan.script.resources.model_dump(mode="json")
        return {**values, "script": {**asdict(plan.script), "resources": resources}}
    recipe, training = plan.recipe, plan.recipe.training
    return {
        **values,
        "recipe": recipe.name,
        "resolved_recipe": recipe.model_dump(mode="json"),
        "model": recipe.model.model_dump(include=_MODEL_KEYS),
        "engine": plan.engine.name,
        "data_fingerprint": plan.fingerprint,
        "execution": {
            "micro_batch_size": training.micro_batch_size,
            "activation_checkpointing": training.activation_checkpointing,
            "checkpointed_layers": training.checkpointed_layers,
            "offloaded_layers": training.offloaded_layers,
            **asdict(plan.execution),
        },
        "seeds": {"training": training.seed, "data": recipe.data.source.seed},
    }


def _commit_of(folder: Path | None) -> Values | None:
    commit = read_commit(folder)
    return {"commit": commit.id, "has_uncommitted_changes": commit.has_changes} if commit else None


# --- In a run's job ------------------------------------------------------------------------------


def record_start(manifest: Path, image: Path = _IMAGE, *, num_restarts: int = 0, launched: float | None = None) -> None:
    """Add this start to the `starts` of a run's manifest, if there is one. Requires the run's lease.

    `image` is the folder with the image's metadata in the container; `num_restarts` counts restarts of training within
    this job; its processes were `launched` then, or now. Raises `TrainingError` if the container's image differs from
    the manifest's, or if the last two starts of this job failed in the same way at the same step.
    """
    values = read_json_if_valid(manifest, Values)
    earlier = None if values is None else values.get("starts", [])
    if values is None or not isinstance(earlier, list):
        return
    layout = RunLayout(manifest.parent)
    former, end, failure = mapping(earlier[-1]) if earlier else {}, None, None
    if earlier:
        began = former.get("time")
        end, failure = find_end(layout, began if isinstance(began, float) else 0.0)
    layout.end_reason.unlink(missing_ok=True)
    prepared = describe_data(layout, values.get("data_fingerprint"))
    # A run without a checkpoint has trained on nothing yet.
    trained = trained_data(earlier).get("train")
    has_other_data = trained not in (None, prepared["data"].get("train", trained)) and bool(layout.list_checkpoints())
    start: Values = {
        "time": launched or time.time(),
        "job_id": own_job_id(),
        "host": socket.gethostname(),
        "container_image": os.environ.get("FTKIT_CONTAINER_IMAGE", ""),
        "ftkit_version": ftkit.__version__,
        "image": _describe_image(image),
        "restart": num_restarts,
        "versions": _installed_versions(),
        **prepared,
        **({"data": {}} if has_other_data else {}),  # it does not train on it
        "after": end and asdict(end),
        "failure": failure,
        "excluded_nodes": excluded_nodes(layout),
    }
    write_json(manifest, {**values, "starts": [*earlier, start]})
    _check_inputs(values, start, prepared["data"], has_other_data=has_other_data)
    if num_restarts > 1 and failure and failure == former.get("failure"):
        raise TrainingError(
            f"{failure['where']}, twice in a row: {end}",
            meaning="the same failure at the same step is rarely chance: the data, the code, or a node is the cause",
            fix=f"see the logs of the ranks; once the cause is fixed: ftkit resume {layout.root.name}",
            name="repeated-failure",
        )


def _check_inputs(values: Values, start: Values, data: Values, *, has_other_data: bool) -> None:
    expected, found = values.get("image_lock_sha256"), mapping(start["image"]).get("lock_sha256")
    if expected and found != expected:
        raise TrainingError(
            f"the container's image is not the one that the run was submitted with: {start['container_image']}",
            meaning=f"the digest of its lock is {found or 'missing'}, the run's manifest has {expected}",
            fix="check the file with 'ftkit verify', and import the image again",
            name="other-image",
        )
    if has_other_data:
        raise TrainingError(
            "the prepared data is not the one that the run's checkpoints were trained on",
            meaning="it was prepared again, after a data file, the tokenizer, or a library that tokenizes had changed",
            fix="restore the data and delete the prepared one; or start a new run, with 'model: run:NAME'",
            name="other-data",
        )
    repeats = mapping(values.get("repeats"))
    allowed = repeats.get("allowed")
    if not (isinstance(allowed, list) and "data" in allowed):
        digests = mapping(repeats.get("data")).items()
        if differing := [name for name, digest in digests if data.get(name, digest) != digest]:
            raise TrainingError(
                f"this is not the data of {repeats.get('run')}: {', '.join(differing)} differs",
                meaning="a data file, the tokenizer, or a library that reads and tokenizes has changed since",
                fix="restore the data; or run it anyway: ftkit rerun RUN --allow data",
                name="data-of-rerun",
            )


def trained_data(starts: object) -> Values:
    """Return the data digests of a run's last start that has any; a start on other data is refused."""
    return next((data for each in reversed(mappings(starts)) if (data := mapping(each.get("data")))), {})


def describe_data(layout: RunLayout, fingerprint: object) -> dict[str, Values]:
    """Return the digests and document counts of the prepared data; empty before preparation."""
    data = DataLayout(Workspace(layout.root.parents[1]).data / str(fingerprint))
    prepared = read_json_if_valid(data.manifest, Values) or {}
    return {
        "data": mapping(prepared.get("digests")),
        "documents": {title: prepared[name] for title, name in DOCUMENT_NUMBERS.items() if name in prepared},
        "too_long": mapping(prepared.get("too_long")),
    }


def _installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _describe_image(image: Path) -> dict[str, str]:
    """Return the image's own metadata; empty if ftkit did not build it, or there is no image."""
    definition = read_json_if_valid(image / "image.json", Values) or {}
    if not {"name", "tag"} <= definition.keys():
        return {}
    files = {"lock_sha256": image / "requirements.lock", "sbom_sha256": image / "sbom.cdx.json"}
    digests = {name: sha256_of(path) for name, path in files.items() if path.is_file()}
    return {"reference": f"{definition['name']}:{definition['tag']}", **digests}


# --- Can it be repeated? -------------------------------------------------------------------------


def explain_missing_digests(layout: RunLayout) -> list[str]:
    """Return reasons why a run can't be repeated exactly: inputs without a digest in its manifest."""
    values = read_json_if_valid(layout.manifest, Values)
    if values is None:
        return ["there is no manifest"]
    code = _doubts_about_code(values, has_changes=layout.code_changes.is_file())
    if "script" in values:
        return ["neither its data nor its weights have a digest: ftkit does not know what the script reads", *code]
    doubts = [*doubts_about_weights(values), *code]
    if values.get("starts"):
        digests = trained_data(values["starts"])
        inputs = {"train": "data", "tokenizer": "tokenizer"}
        doubts += [f"no digest of the {name}" for key, name in inputs.items() if key not in digests]
    return doubts


def doubts_about_weights(values: Mapping[str, object]) -> list[str]:
    """Return why a manifest does not identify the weights that training began with; empty if it does."""
    model = mapping(values.get("model"))
    weights, revision = str(model.get("weights")), str(model.get("revision"))
    has_digest = model.get("trained") is not None and model.get("adapter") is None
    if weights == "random" or has_digest:
        return []
    if is_path(weights):
        return [f"no digest of the weights in {weights}"]
    return [] if re.fullmatch(r"[0-9a-f]{40}", revision) else ["the model's commit is not known"]


def _doubts_about_code(values: Values, *, has_changes: bool) -> list[str]:
    if image := values.get("container_image"):
        has_digest = "sha256" in str(image) or values.get("image_sha256") or values.get("image_id")
        return [] if has_digest else ["no digest of the image"]
    doubts = ["no image: packages are those of the machine"]
    git = mapping(mapping(values.get("ftkit")).get("git"))
    if git.get("has_uncommitted_changes") and not has_changes:
        doubts.append("ftkit had uncommitted changes")
    return doubts
