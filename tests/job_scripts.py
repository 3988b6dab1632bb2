"""Plans to render, and a machine on which rendered scripts run against stand-ins that record their calls."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from ftkit import process
from ftkit.config.context import Context
from ftkit.config.image_reference import NamedImage
from ftkit.config.load import load_cluster, load_image, load_recipe
from ftkit.config.request import RunRequest
from ftkit.launch.render import render_job
from ftkit.planning.plan import SweepPlan
from ftkit.planning.planner import plan_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.planning.plan import RunPlan

SHIPPED_ONLY = Context(Path("/nonexistent"), Path("/nonexistent"), {})

RECORD = """#!/bin/bash
call=0
until mkdir "$RECORD/${0##*/}.$call" 2>/dev/null; do call=$((call + 1)); done
printf '%s\\0' "$@" >"$RECORD/${0##*/}.$call/words"
echo $$ >"$RECORD/${0##*/}.$call/pid"
env -0 >"$RECORD/${0##*/}.$call/environment"
"""

STAND_INS = {
    # Starts the task of a node as srun would, without srun's options; in an outage of Slurm's controller, nothing.
    "srun": (
        'if [[ " ${FAKE_OUTAGE-} " == *" $call "* ]]; then echo "${FAKE_WORDS-}" | tee -a logs/job.log >&2\n'
        "exit 1; fi\n"
        'for node in ${FAKE_DEAD-}; do case "$*" in *--overlap*--nodelist="$node "*) exit 1 ;; esac; done\n'
        'case "$*" in *--overlap*sinfo*) exit 0 ;; *--overlap*--nodes=1*" true") exit "${FAKE_PROBE_HERE:-0}" ;;\n'
        '*--overlap*" true") exit "${FAKE_PROBE_ALL:-0}" ;; esac\n'
        'while [[ ${1-} == -* ]]; do shift; done\nSLURM_NODEID=${FAKE_NODEID:-0} exec "$@"\n'
    ),
    # All nodes are this machine.
    "sbcast": '[[ -z ${FAKE_FULL_DISK-} ]] && cp "$2" "$3"',
    "scontrol": (
        'if [[ "$1 $2" == "show job" ]]; then echo "${FAKE_JOB:-PreemptTime=None}"\n'
        'elif [[ $1 == ping ]]; then echo "Slurmctld(primary) at n0 is UP"\n'
        'elif [[ $1 == requeue && -n ${FAKE_WORDS-} ]] && mkdir "$RECORD/no-answer" 2>/dev/null; then\n'
        'echo "$FAKE_WORDS" | tee -a logs/job.log >&2; exit 1\n'
        'elif [[ "$1 $2" == "show config" ]]; then echo "${FAKE_CONFIG:-}"\n'
        'elif [[ "$1 $2" == "show node" ]]; then echo "${FAKE_NODE:-}"\n'
        'elif [[ $1 == show ]]; then printf "%s\\n" ${FAKE_NODES:-n1 n2}\n'
        'else exit "${FAKE_REQUEUE_CODE:-0}"; fi\n'
    ),
    "sacct": 'printf "%s\\n" ${FAKE_ACCOUNTING-}',
    "python3": 'case "$*" in *ftkit.train*) eval "${FAKE_TRAINER-}" ;; *) eval "${FAKE_PREPARE-}" ;; esac\n',
}


class PlanMaker:
    """Makes plans with a fixed id and date, on shipped or modified profiles."""

    workspace: Path | str = "/shared/ftkit"
    python = "/opt/ftkit/bin/python3"
    recipe = load_recipe("olmo3-7b-full", SHIPPED_ONLY, ("resources.preflight=false",))
    image = load_image("olmo3:25.02", SHIPPED_ONLY)

    def __call__(self, cluster: str, num_nodes: int = 2, **changes: object) -> RunPlan:
        profile = load_cluster("slurm" if cluster in ("dev", "apptainer") else cluster, SHIPPED_ONLY)
        profile = profile.model_copy(update={**KNOWN_CHANGES.get(cluster, {}), **changes})
        request = RunRequest(
            name=None,
            num_nodes=num_nodes,
            gpus_per_node=None,
            image=NamedImage("olmo3:25.02") if profile.runtime != "none" else None,
            image_is_explicit=False,
            workspace=Path(self.workspace),
            python=self.python,
            created=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            suffix="4f2a",
        )
        return plan_run(self.recipe, profile, self.image, request)

    def in_sweep(self, cluster: str, number: int, **changes: object) -> RunPlan:
        """Return the plan of a run of a sweep."""
        plan = self(cluster, **changes)
        run_id = plan.id.replace(plan.name, f"{plan.name}-{number}") + str(number)
        sweep = SweepPlan(plan.id.rpartition("-")[0], plan.name, {"training.seed": str(number)})
        return replace(plan, id=run_id, name=f"{plan.name}-{number}", sweep=sweep)


KNOWN_CHANGES: dict[str, dict[str, object]] = {
    "local": {"device": "cpu"},
    "docker": {"device": "cpu"},
    "apptainer": {"name": "apptainer", "runtime": "apptainer"},
    # As in scripts/dev-cluster: Slurm without containers, with fake GPUs.
    "dev": {"name": "dev", "runtime": "none", "device": "cpu", "partition": "dev", "processes_per_node": 2},
}


@pytest.fixture
def make_plan() -> PlanMaker:
    """Return a plan maker; set its attributes for another workspace, Python or recipe."""
    return PlanMaker()


@dataclass
class Call:
    """One call of a stand-in."""

    words: list[str]
    environment: dict[str, str]
    pid: int


@dataclass
class Machine:
    """A folder with stand-ins for srun, scontrol and Python, in which scripts run."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def local_disk(self) -> str:
        """A node's local disk."""
        return str(self.root / "local-disk")

    def start(self, plan: RunPlan, *, with_image: bool = True, prepares: bool = True) -> subprocess.Popen[str]:
        """Start the script of a plan in a new process group, as schedulers do."""
        layout = plan.layout
        layout.logs.mkdir(parents=True, exist_ok=True)
        if plan.container_image and with_image:
            image = Path(plan.container_image)
            image.parent.mkdir(exist_ok=True)
            image.touch()
        layout.script.write_text(render_job(plan, prepares=prepares), encoding="utf-8")
        job = subprocess.Popen(
            ["bash", str(layout.script)],
            env=self._environment(),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(job)
        return job

    def end(self) -> None:
        """End processes that a failed test has left running."""
        for job in self.started:
            if job.returncode is None:
                process.signal_group(job.pid, signal.SIGKILL)
                job.communicate()

    def run(self, plan: RunPlan, *, with_image: bool = True, prepares: bool = True) -> tuple[int, str]:
        """Run the script of a plan; return its exit status and its output."""
        with self.start(plan, with_image=with_image, prepares=prepares) as job:
            _, said = job.communicate(timeout=PATIENCE_SECONDS)
        return job.returncode, said

    def job_id(self, plan: RunPlan) -> str:
        """Return the id of the last job."""
        is_slurm = plan.cluster.scheduler == "slurm"
        return self._environment()["SLURM_JOB_ID"] if is_slurm else str(self.started[-1].pid)

    def exit_code(self, plan: RunPlan) -> int | None:
        """Return the exit code that the last job has written."""
        path = plan.layout.job_exit_code(self.job_id(plan))
        return int(path.read_text(encoding="utf-8")) if path.exists() else None

    def wait_for_call(self, number: int, name: str = "python3") -> None:
        """Wait until a stand-in is called for the `number`-th time, counted from 0."""
        environment = self.root / "record" / f"{name}.{number}" / "environment"
        wait_until(environment.exists, lambda: f"{name} was not called")

    def calls(self, name: str) -> list[Call]:
        """Return the calls of a stand-in."""
        folders = sorted((self.root / "record").glob(f"{name}.*"))
        return [
            Call(
                _split(folder / "words"),
                dict(pair.split("=", 1) for pair in _split(folder / "environment")),
                int((folder / "pid").read_text(encoding="utf-8")),
            )
            for folder in folders
        ]

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.root / 'bin'}:{os.defpath}",
            "HOME": str(self.root / "home"),
            "RECORD": str(self.root / "record"),
            "TESTS": str(os.getpid()),
            "SLURMD_NODENAME": "n1",
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "1",
            **self.environment,
        }


def _split(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\0")[:-1]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Yield a machine whose programs record their calls."""
    for folder in ("bin", "record", "home", "local-disk"):
        (tmp_path / folder).mkdir()
    for name, rest in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.write_text(RECORD + rest, encoding="utf-8")
        program.chmod(0o755)
    made = Machine(tmp_path)
    yield made
    made.end()
