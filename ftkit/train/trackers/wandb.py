"""Weights & Biases, online or offline as WANDB_MODE says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.errors import PrerequisiteError
from ftkit.train.trackers.sink import DEFAULT_PROJECT

if TYPE_CHECKING:
    from ftkit.train.trackers.sink import Outcome, TrackedRun


class WandbSink:
    """A run at W&B; what it keeps on disk lies in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # noqa: PLC0415 - an extra

        plan = run.plan
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=plan.recipe.tracking.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            id=plan.id,
            name=plan.id,
            resume="allow",
            dir=str(plan.layout.root),
            config=run.config(),
            settings=wandb.Settings(console="off"),  # the job's log is ftkit's, and stays in the run's folder
        )

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Hand numbers to W&B's own process."""
        self._run.log(scalars, step=step)

    def close(self, outcome: Outcome) -> None:
        """Wait until all is sent, or on disk when offline."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
        self._teardown()  # W&B's process writes its last when it ends; the trainer leaves without exit handlers


def check_wandb() -> None:
    """Check that W&B will know who this is.

    Raises:
        PrerequisiteError: it is to be online, and there is no key.
    """
    if os.environ.get("WANDB_MODE", "online") not in {"online", "shared"}:
        return
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or netrc.is_file():
        return
    raise PrerequisiteError(
        "tracking.sinks names wandb, and there is no key for it",
        meaning="WANDB_API_KEY was not set where the run was submitted; containers don't see ~/.netrc",
        fix="export WANDB_API_KEY before 'ftkit run', or WANDB_MODE=offline",
    )
