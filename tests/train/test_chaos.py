"""A dozen faults of `scripts/chaos`, on forked ranks, which restart within a second."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chaos.campaign import Campaign
from chaos.faults import AWAY, FAULTS, hide_folder
from chaos.runs import Run
from forked_ranks import ForkedRanks
from waiting import PATIENCE_SECONDS

from ftkit.planning.plan import plan_to_json

NUM_FAULTS = 12
NUM_STEPS = 160
OPTIONS = (
    "training.micro_batch_size=1", "training.global_batch_size=2", "training.precision=fp32",
    "training.learning_rate=1e-3", "training.checkpoint_every_steps=5", "training.max_failed_checkpoints=1000",
    "evaluation.generation=null", f"training.max_steps={NUM_STEPS}",
)  # fmt: skip


@dataclass
class ForkedRun(Run):
    """A run whose ranks are restarted until it is completed, as by a job script."""

    trainer: ForkedRanks
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        while not super().is_completed():
            plan, output = (self.folder / name for name in ("plan.json", "output"))
            self.trainer.run(plan, 2, output, timeout=PATIENCE_SECONDS)

    def ranks(self) -> dict[str, int]:
        return {str(rank): pid for rank, pid in enumerate(self.trainer.pids())}

    def is_completed(self) -> bool:
        return self.is_over() and super().is_completed()  # its ranks have ended: the next run can start

    def is_over(self) -> bool:
        return not self.thread.is_alive()

    def output(self) -> str:
        return (self.folder / "output").read_text()[-3000:]


@dataclass
class ForkedSite:
    """Runs of two ranks on this machine."""

    make_run: Callable[..., Any]
    faults = FAULTS | {AWAY: partial(hide_folder, 1.0)}

    def start(self, name: str) -> ForkedRun:
        run = self.make_run(f"chaos-{name}", *OPTIONS)
        run.layout.root.mkdir(parents=True)
        run.layout.plan.write_text(plan_to_json(run.plan))
        return ForkedRun(run.layout.root, NUM_STEPS, run.ranks)

    def resume(self, run: Run) -> None:
        raise AssertionError(run.output())

    def abandon(self, run: Run) -> Path:
        raise AssertionError(run.output())

    def repair(self) -> None:
        pass


def test_disturbed_runs_end_with_the_losses_and_weights_of_an_undisturbed_run(make_run: Callable[..., Any]) -> None:
    campaign = Campaign(ForkedSite(make_run), random.Random(12), NUM_FAULTS)
    campaign.run(list(FAULTS))
    results = campaign.results
    assert results.is_passed, results.report()
    assert set(results.tallies) == set(FAULTS)
    assert results.num_faults == NUM_FAULTS
