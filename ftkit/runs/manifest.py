"""What a run was made from, so that it can be repeated elsewhere: what manifest.json holds."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ftkit
from ftkit import process
from ftkit.errors import FtkitError, command_without_secrets
from ftkit.planning.plan import plan_to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.planning.plan import RunPlan


def describe(plan: RunPlan, command: Sequence[str], project: Path) -> dict[str, Any]:
    """Return what manifest.json holds of a run that is about to be submitted."""
    recipe = plan.recipe
    return {
        "run": plan.id,
        "created": plan.created.isoformat(),
        "command": command_without_secrets(command, os.environ),
        "ftkit": {"version": plan.ftkit_version, "git": _own_commit()},
        "project": {"folder": str(project), "git": git_commit(project)},
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "plan_sha256": hashlib.sha256(plan_to_json(plan).encode()).hexdigest(),
        "recipe": recipe.name,
        "model": {"weights": recipe.model.weights, "revision": recipe.model.revision},
        "cluster": plan.cluster.name,
        "image": plan.image,
        "container_image": plan.container_image,
        "data_fingerprint": plan.fingerprint,
        "execution": {
            "micro_batch_size": recipe.training.micro_batch_size,
            "activation_checkpointing": recipe.training.activation_checkpointing,
            **asdict(plan.execution),
        },
        "seeds": {"training": recipe.training.seed, "data": recipe.data.source.seed},
    }


def git_commit(folder: Path) -> dict[str, Any] | None:
    """Return commit and cleanness of the git checkout around `folder`; None if there is none."""
    try:
        head = process.run(["git", "-C", str(folder), "rev-parse", "HEAD"])
        changes = process.run(["git", "-C", str(folder), "status", "--porcelain"])
    except FtkitError:
        return None
    if head.returncode != 0 or changes.returncode != 0:
        return None
    return {"commit": head.stdout.strip(), "has_uncommitted_changes": bool(changes.stdout.strip())}


def _own_commit() -> dict[str, Any] | None:
    """Return the commit of the checkout that ftkit runs from; an installed wheel has none of its own."""
    checkout = Path(ftkit.__file__).resolve().parents[1]
    return git_commit(checkout) if (checkout / ".git").exists() else None
