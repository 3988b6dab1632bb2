"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.train.components.trackers.tracker import Outcome, TrackerRun


class TensorBoardTracker:
    """Event files in the run's folder; each time the run is resumed, it begins another one."""

    def __init__(self, run: TrackerRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        resumed_from = run.start.resumed_from
        # Steps after the last checkpoint are repeated: viewers drop the earlier ones.
        self._writer = SummaryWriter(
            str(run.plan.layout.tensorboard), purge_step=resumed_from + 1 if resumed_from else 0
        )
        # Markdown shows indented text verbatim.
        text = "".join(f"    {line}\n" for line in json.dumps(run.config(), indent=2).splitlines())
        self._writer.add_text("config", text, resumed_from)

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Add the scalars of a step; the file is written every few seconds."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002 - TensorBoard has no outcome
        """Flush the event file."""
        self._writer.close()
