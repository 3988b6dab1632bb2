"""manifest.json: the inputs of a run, to repeat it elsewhere, and its submissions and starts."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ftkit
from ftkit.checkout import own_checkout, read_changes, read_commit
from ftkit.errors import TrainingError, redact_command
from ftkit.files import read_json_if_valid, write_json
from ftkit.paths import is_path
from ftkit.planning.layout import DataLayout, RunLayout, Workspace
from ftkit.planning.plan import RunPlan, plan_to_json
from ftkit.runs.ends import find_end
from ftkit.runs.progress import excluded_nodes, list_checkpoints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftkit.planning.plan import ScriptPlan
    from ftkit.runs.ends import End

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "flash-attn-4")
_MODEL_KEYS = {"weights", "revision", "requested_revision", "source", "adapter", "trained"}
DOCUMENT_NUMBERS = {"training documents": "num_train_documents", "documents longer than a pack": "num_too_long"}
"""Numbers of documents in manifests and comparisons, and in the manifest of prepared data."""
_IMAGE = Path("/opt/ftkit")
"""Metadata file in an image that ftkit built."""


def build_manifest(plan: RunPlan | ScriptPlan, command: Sequence[str], project: Path) -> dict[str, Any]:
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
    changes: Mapping[str, tuple[Any, Any]],
    facts: Mapping[str, Any],
) -> None:
    """Add a submission of a run to its manifest, which then has the values of the newest plan.

    Writes nothing if the run has no readable manifest.

    Args:
        plan: the new plan.
        command: the command line.
        changes: values that differ from the previous plan, each before and after.
        facts: more values, such as digests of the image, whose file depends on the cluster's format.

    Raises:
        OSError: it can't be written.
    """
    values = read_json_if_valid(plan.layout.manifest, dict[str, Any])
    earlier = None if values is None else values.get("submissions", [])
    if values is None or not isinstance(earlier, list):
        return
    submission = _describe_submission(plan, command, changes)
    write_json(plan.layout.manifest, {**values, **_describe_plan(plan), **facts, "submissions": [*earlier, submission]})


def _describe_submission(
    plan: RunPlan | ScriptPlan, command: Sequence[str], changes: Mapping[str, tuple[Any, Any]]
) -> dict[str, Any]:
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


def _describe_plan(plan: RunPlan | ScriptPlan) -> dict[str, Any]:
    """Return the manifest's values from the plan."""
    return {
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
        **(_describe_training(plan) if isinstance(plan, RunPlan) else _describe_script(plan)),
    }


def _describe_script(plan: ScriptPlan) -> dict[str, Any]:
    script = plan.script
    return {"script": {**asdict(script), "resources": script.resources.model_dump(mode="json")}}


def _describe_training(plan: RunPlan) -> dict[str, Any]:
    recipe = plan.recipe
    return {
        "recipe": recipe.name,
        "resolved_recipe": recipe.model_dump(mode="json"),
        "model": recipe.model.model_dump(include=_MODEL_KEYS),
        "engine": plan.engine.name,
        "data_fingerprint": plan.fingerprint,
        "execution": {
            "micro_batch_size": recipe.training.micro_batch_size,
            "activation_checkpointing": recipe.training.activation_checkpointing,
            "checkpointed_layers": recipe.training.checkpointed_layers,
            "offloaded_layers": recipe.training.offloaded_layers,
            **asdict(plan.execution),
        },
        "seeds": {"training": recipe.training.seed, "data": recipe.data.source.seed},
    }


def _commit_of(folder: Path | None) -> dict[str, Any] | None:
    commit = read_commit(folder) if folder else None
    return {"commit": commit.id, "has_uncommitted_changes": commit.has_changes} if commit else None


def uncommitted_changes() -> str:
    """Return the uncommitted changes of ftkit's own checkout, as `read_changes`; empty for an installed wheel."""
    checkout = own_checkout()
    return read_changes(checkout) if checkout else ""


def record_start(manifest: Path, image: Path = _IMAGE, *, num_restarts: int = 0) -> None:
    """Add this start to the `starts` of a run's manifest. Requires the run's lease.

    Args:
        manifest: the run's manifest.json; without one nothing is written.
        image: the folder with the image's metadata in the container.
        num_restarts: how often training was restarted within this job.

    Raises:
        TrainingError: the container has another image than the manifest; or the last two starts of this job failed in
            the same way at the same step.
    """
    values = read_json_if_valid(manifest, dict[str, Any])
    earlier = None if values is None else values.get("starts", [])
    if values is None or not isinstance(earlier, list):
        return
    layout = RunLayout(manifest.parent)
    end, failure = _find_end(layout, earlier)
    layout.end_reason.unlink(missing_ok=True)
    start = _describe_start(image) | {
        "restart": num_restarts,
        "versions": _installed_versions(),
        **describe_data(layout, values.get("data_fingerprint")),
        "after": end and end.to_json(),
        "failure": failure,
        "excluded_nodes": excluded_nodes(layout),
    }
    has_other_data = _has_other_data(layout, earlier, start["data"])
    if has_other_data:
        start["data"] = {}  # it does not train on it
    write_json(manifest, {**values, "starts": [*earlier, start]})
    expected, found = values.get("image_lock_sha256"), start["image"].get("lock_sha256")
    if expected and found != expected:
        raise TrainingError(
            f"the container's image is not the one that the run was submitted with: {start['container_image']}",
            meaning=f"the digest of its lock is {found or 'missing'}, the run's manifest has {expected}",
            fix="check the file with 'ftkit verify', and import the image again",
        )
    if has_other_data:
        raise TrainingError(
            "the prepared data is not the one that the run's checkpoints were trained on",
            meaning="it was prepared again, after a data file, the tokenizer, or a library that tokenizes had changed",
            fix="restore the data and delete the prepared one; or start a new run, with 'model: run:NAME'",
        )
    _check_repeats(values.get("repeats"), start["data"])
    if num_restarts > 1 and failure and failure == _mapping(earlier[-1]).get("failure"):
        raise TrainingError(
            f"{failure['where']}, twice in a row: {end}",
            meaning="the same failure at the same step is rarely chance: the data, the code, or a node is the cause",
            fix=f"see the logs of the ranks; once the cause is fixed: ftkit resume {layout.root.name}",
        )


def _find_end(layout: RunLayout, earlier: Sequence[Any]) -> tuple[End | None, dict[str, str] | None]:
    """Determine how the previous start ended, if there was one, and the failure that ended it."""
    if not earlier:
        return None, None
    began = _mapping(earlier[-1]).get("time")
    return find_end(layout, began if isinstance(began, float) else 0.0)


def _has_other_data(layout: RunLayout, starts: Sequence[Any], found: Mapping[str, str]) -> bool:
    """Return whether the packs are not those of the last start, and there is a checkpoint to continue from."""
    trained = trained_data(starts).get("train")
    return trained is not None and found.get("train", trained) != trained and bool(layout.list_checkpoints())


def trained_data(starts: Any) -> Mapping[str, Any]:
    """Return the digests of the data of a run's last start that had any: a start on other data is refused."""
    digests = [_mapping(_mapping(each).get("data")) for each in (starts if isinstance(starts, list) else ())]
    return next((each for each in reversed(digests) if each), {})


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a value of a manifest, which may be damaged, if it is an object; else an empty one."""
    return value if isinstance(value, dict) else {}


def _check_repeats(repeats: Any, found: Mapping[str, str]) -> None:
    """Check that the prepared data of a repetition is that of the original.

    Raises:
        TrainingError: the data differs, and that was not allowed.
    """
    if not isinstance(repeats, dict) or "data" in repeats.get("allowed", []):
        return
    expected = repeats.get("data")
    differing = [name for name, digest in (expected or {}).items() if found.get(name, digest) != digest]
    if differing:
        raise TrainingError(
            f"this is not the data of {repeats.get('run')}: {', '.join(differing)} differs",
            meaning="a data file, the tokenizer, or a library that reads and tokenizes has changed since",
            fix="restore the data; or run it anyway: ftkit rerun RUN --allow data",
        )


def _describe_start(image: Path) -> dict[str, Any]:
    return {
        "time": time.time(),
        "job_id": os.environ.get("SLURM_JOB_ID", ""),
        "host": socket.gethostname(),
        "container_image": os.environ.get("FTKIT_CONTAINER_IMAGE", ""),
        "ftkit_version": ftkit.__version__,
        "image": _describe_image(image),
    }


def _installed_versions() -> dict[str, str]:
    """Return the versions of the packages that a run's numbers depend on."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def describe_data(layout: RunLayout, fingerprint: object) -> dict[str, dict[str, Any]]:
    """Return the digests of the prepared data, and the numbers of its documents; an earlier version wrote none."""
    data = DataLayout(Workspace(layout.root.parents[1]).data / str(fingerprint))
    prepared = read_json_if_valid(data.manifest, dict[str, Any]) or {}
    return {
        "data": dict(_mapping(prepared.get("digests"))),
        "documents": {title: prepared[name] for title, name in DOCUMENT_NUMBERS.items() if name in prepared},
    }


def explain_missing_digests(layout: RunLayout) -> list[str]:
    """Return why a run can't be repeated exactly: the inputs without a digest in its manifest."""
    values = read_json_if_valid(layout.manifest, dict[str, Any])
    if values is None:
        return ["there is no manifest"]
    if "script" in values:
        inputs = "neither its data nor its weights have a digest: ftkit does not know what the script reads"
        return [inputs, *_doubts_about_code(values, has_changes=layout.code_changes.is_file())]
    return [
        *_doubts_about_model(values.get("model")),
        *_doubts_about_code(values, has_changes=layout.code_changes.is_file()),
        *(_doubts_about_data(trained_data(values["starts"])) if values.get("starts") else []),
    ]


def _doubts_about_model(model: Any) -> list[str]:
    weights, revision = (
        (str(model.get(key)) for key in ("weights", "revision")) if isinstance(model, dict) else ("", "")
    )
    has_digest = isinstance(model, dict) and model.get("trained") is not None and model.get("adapter") is None
    if weights == "random" or has_digest or (not is_path(weights) and re.fullmatch(r"[0-9a-f]{40}", revision)):
        return []
    return [f"no digest of the weights in {weights}" if is_path(weights) else "the model's commit is not known"]


def _doubts_about_code(values: Mapping[str, Any], *, has_changes: bool) -> list[str]:
    image = values.get("container_image")
    if image:
        has_digest = "sha256" in str(image) or values.get("image_sha256") or values.get("image_id")
        return [] if has_digest else ["no digest of the image"]
    doubts = ["no image: packages are those of the machine"]
    ftkit_code = values.get("ftkit")
    git = ftkit_code.get("git") if isinstance(ftkit_code, dict) else None
    if isinstance(git, dict) and git.get("has_uncommitted_changes") and not has_changes:
        doubts.append("ftkit had uncommitted changes")
    return doubts


def _doubts_about_data(digests: Any) -> list[str]:
    names = {"train": "data", "tokenizer": "tokenizer"}
    found = digests if isinstance(digests, dict) else {}
    return [f"no digest of the {name}" for key, name in names.items() if key not in found]


def _describe_image(image: Path) -> dict[str, str]:
    """Return the image's own record; empty if ftkit did not build it, or there is no image."""
    definition = read_json_if_valid(image / "image.json", dict[str, Any])
    if definition is None or not {"name", "tag"} <= definition.keys():
        return {}
    reference = f"{definition['name']}:{definition['tag']}"
    digests = {"lock_sha256": image / "requirements.lock", "sbom_sha256": image / "sbom.cdx.json"}
    return {"reference": reference} | {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in digests.items() if path.is_file()
    }
