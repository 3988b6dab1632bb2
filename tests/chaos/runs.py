"""The runs that faults are injected into, as their folders show them."""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from safetensors.numpy import load_file
from waiting import PATIENCE_SECONDS

from ftkit.planning.layout import RunLayout
from ftkit.runs.history import read_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

ValueT = TypeVar("ValueT")


@dataclass
class Run(ABC):
    """A run, given by its folder; subclasses know its processes.

    Attributes:
        folder: of the run.
        num_steps: after which it is completed.
        num_releases: how often Slurm held its job, and the command that `ftkit status` shows released it.
        poll_seconds: the pause between two looks at it.
    """

    folder: Path
    num_steps: int
    num_releases: int = field(default=0, kw_only=True)
    poll_seconds: ClassVar[float] = 0.1

    @abstractmethod
    def ranks(self) -> dict[str, int]:
        """Return the process ids of the ranks that are here, by rank."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether it has ended, and nothing will restart it."""

    @abstractmethod
    def output(self) -> str:
        """Return the end of what it printed."""

    def records(self, event: str) -> list[dict[str, Any]]:
        """Return its records of a kind; none while the file can't be read. Lines that were cut off are skipped."""
        found = []
        with contextlib.suppress(OSError):
            for line in (self.folder / "metrics.jsonl").read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    record = json.loads(line) if f'"event": "{event}"' in line else {}
                    found += [record] if record.get("event") == event else []
        return found

    def step(self) -> int:
        """Return its last step."""
        return max((record["step"] for record in self.records("step")[-1:]), default=0)

    def seconds_for_steps(self, number: int) -> float:
        """Return the duration of some steps, judged by the last one."""
        return number * sum(record["step_seconds"] for record in self.records("step")[-1:])

    def is_completed(self) -> bool:
        """Whether it has trained to its end."""
        return any(record["outcome"] == "completed" for record in self.records("end"))

    def seconds_to_notice(self, begun: float) -> list[float]:
        """Return the seconds from a fault to the job script's next line; empty without a log."""
        log = self.folder / "logs" / "job.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        times = [datetime.fromisoformat(line.split(" ")[0]).timestamp() for line in lines if "Z ftkit: " in line[:30]]
        return [time - begun for time in times if time >= begun - 1][:1]

    def restart_reasons(self) -> list[str]:
        """Return why each start but the first followed."""
        return [str(each.reason or "unknown") for each in read_summary(RunLayout(self.folder)).restarts]

    def checkpoints(self) -> list[Path]:
        """Return its complete checkpoints, oldest first."""
        return sorted((self.folder / "checkpoints").glob("step-*"))


def wait_for(run: Run, condition: Callable[[], ValueT]) -> ValueT:
    """Return what a condition returns once that is true; raise with what the run printed if it no longer trains."""
    deadline, last = time.monotonic() + PATIENCE_SECONDS, run.step()
    while not (found := condition()):
        if (step := run.step()) != last:
            deadline, last = time.monotonic() + PATIENCE_SECONDS, step
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run.folder.name}, at step {run.step()}: {run.output()}")
        time.sleep(run.poll_seconds)
    return found


class Site(Protocol):
    """Where runs train."""

    @property
    def faults(self) -> Mapping[str, Callable[[Any, Random], None]]:
        """The faults that can be injected here, by name."""

    def start(self, name: str) -> Run:
        """Start a run."""

    def resume(self, run: Run) -> None:
        """Restart a run that is over."""

    def abandon(self, run: Run) -> Path:
        """End a run that no longer trains; return a folder with its files and the site's logs."""

    def repair(self) -> None:
        """Repair nodes that faults have broken."""


def differences(run: Run, reference: Run, *, tolerance: float) -> list[str]:
    """Compare a completed run with an undisturbed one: the loss of every step, even if repeated, and the weights."""
    wrong = []
    usual = {each["step"]: each["loss"] for each in reference.records("step")}
    steps = run.records("step")
    if missing := set(usual) - {each["step"] for each in steps}:
        wrong.append(f"no record of steps {sorted(missing)}")
    wrong += [
        f"step {each['step']}: loss {each['loss']!r}, not {usual[each['step']]!r}"
        for each in steps
        if not abs(each["loss"] - usual[each["step"]]) <= tolerance
    ]
    own, theirs = (load_file(each.folder / "export" / "model.safetensors") for each in (run, reference))
    difference = max(float(abs(own[key].astype("f8") - theirs[key].astype("f8")).max()) for key in theirs)
    if not difference <= tolerance:
        wrong.append(f"weights differ by up to {difference:.1e}")
    return wrong
