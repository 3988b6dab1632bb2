"""Weights & Biases, online or offline (WANDB_MODE)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ftkit.train.components.trackers.tracker import DEFAULT_PROJECT

if TYPE_CHECKING:
    from ftkit.train.components.trackers.tracker import Outcome, TrackerRun


class WandbTracker:
    """A run of W&B, whose local files are in the run's folder."""

    def __init__(self, run: TrackerRun) -> None:
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
        self._run.define_metric("job_eval/*", step_metric="job_eval/step")

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Send the scalars of a step to W&B's process, which drops those of steps before the newest one."""
        if any(name.startswith("job_eval/") for name in scalars):
            scalars, step = scalars | {"job_eval/step": step}, max(step, self._run.step)
        self._run.log(scalars, step=step)

    def close(self, outcome: Outcome) -> None:
        """Wait until everything is sent, or on disk when offline."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
        self._teardown()  # W&B's process flushes when it ends; the trainer exits without exit handlers
