"""Download or export a run's weights before its GPUs need them."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit import process
from ftkit.errors import NotFoundError, one_line
from ftkit.hub.access import check_weights, download_weights
from ftkit.hub.client import is_fetched
from ftkit.planning.layout import RunLayout, Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ftkit.models.architecture import TrainedWeights
    from ftkit.planning.plan import RunPlan

_EXPORT_SECONDS = 24 * 3600.0


def weights_to_export(plan: RunPlan) -> TrainedWeights | None:
    """Return the checkpoint of an earlier run that must be exported first; None if there is none."""
    trained = plan.recipe.model.trained
    return None if trained is None or Path(trained.folder).is_dir() else trained


def are_weights_here(plan: RunPlan, environment: Mapping[str, str]) -> bool:
    """Return whether all weights are present. The cluster profile's variables override the environment's."""
    variables = {**environment, **plan.cluster.environment}
    return weights_to_export(plan) is None and is_fetched(
        plan.recipe.model, variables, Workspace(plan.workspace).hub_home
    )


def fetch_weights(plan: RunPlan, environment: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Download the weights of a hub model, if missing.

    Raises:
        NotFoundError: they can't be downloaded, or contradict their configuration.
    """
    model, home = plan.recipe.model, Workspace(plan.workspace).hub_home
    if not is_fetched(model, {**environment, **plan.cluster.environment}, home):
        report(f"downloading the weights of {model.weights}")
        download_weights(model, environment, home)
        if warning := check_weights(model, environment, home):
            report(f"warning: {warning}")


def export_weights(plan: RunPlan, report: Callable[[str], None]) -> None:
    """Export the checkpoint that training continues from, if not yet exported.

    Raises:
        NotFoundError: the checkpoint is missing, was replaced, or can't be exported.
    """
    trained = weights_to_export(plan)
    if trained is None:
        return
    from ftkit.runs.checkpoints import MARKER  # noqa: PLC0415 - few runs continue from one

    layout = RunLayout(Path(trained.folder).parents[1])
    marker = layout.checkpoint(trained.step) / MARKER
    if not marker.is_file() or hashlib.sha256(marker.read_bytes()).hexdigest() != trained.sha256:
        raise NotFoundError(
            f"the checkpoint of step {trained.step} of {trained.run} no longer exists",
            meaning="the run deleted it (training.keep_checkpoints), or trained that step again, after this run's plan",
            fix=f"list its checkpoints, and submit again: ftkit runs checkpoints {trained.run}",
        )
    report(f"exporting the checkpoint of step {trained.step} of {trained.run}")
    command = [sys.executable, "-m", "ftkit", "export", trained.run, "--step", str(trained.step)]
    done = process.run_stoppable(
        [*command, "--to", trained.folder, "--no-verify"],
        timeout_seconds=_EXPORT_SECONDS,
        environment={**os.environ, "FTKIT_WORKSPACE": str(plan.workspace)},
    )
    if done.returncode:
        raise NotFoundError(
            f"the checkpoint of step {trained.step} of {trained.run} can't be exported: {one_line(done.stderr)}",
            fix=f"run it manually: ftkit export {trained.run} --step {trained.step} --to {trained.folder}",
        )
