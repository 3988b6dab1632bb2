"""Check nodes of a Slurm cluster inside the image: one job from salloc, with a step for each node."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final

from ftkit import process
from ftkit.errors import PrerequisiteError, UnfitMachineError, one_line
from ftkit.files import InvalidJsonError, parse_json, remove
from ftkit.launch.render import NodeChecks, render_checks
from ftkit.launch.scheduler import explain_refusal
from ftkit.launch.slurm import clean_stderr

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ftkit.config.cluster import ClusterProfile

_QUEUE_SECONDS: Final = 24 * 3600.0
_JOB_MINUTES: Final = 10
_REPORT: Final = "ftkit-report "


@dataclass(frozen=True)
class NodeResult:
    """The result of one node: its report (`ftkit.health.node`), and why it can't be used; empty if it can."""

    host: str
    report: dict[str, Any] | None
    problem: str


def check_nodes(checks: NodeChecks, hosts: Sequence[str], environment: Mapping[str, str]) -> list[NodeResult]:
    """Wait for nodes, run the checks on them, and read the results.

    Args:
        checks: the checks.
        hosts: the nodes; any if empty.
        environment: variables of the job.

    Raises:
        SubmitError: Slurm refused the job.
        PrerequisiteError: salloc is not on this machine.
        UnfitMachineError: the script itself failed.
    """
    script = checks.folder / "checks.sh"
    script.write_text(render_checks(checks), encoding="utf-8")
    (checks.folder / "marker").touch()
    done = process.run_stoppable(
        [*salloc_command(checks, hosts), "bash", str(script)],
        timeout_seconds=_QUEUE_SECONDS,
        environment=process.slurm_environment(environment),
    )
    verdicts = checks.folder / "bad-nodes"
    if not verdicts.is_file():
        if "Granted job allocation" not in done.stderr:
            raise explain_refusal(done.stderr)
        raise UnfitMachineError(f"the checks did not run: {one_line(clean_stderr(done.stderr)[-200:])}")
    problems = dict(line.split("\t", 1) for line in verdicts.read_text(encoding="utf-8").splitlines())
    return [
        NodeResult(path.stem, _report(path), problems.get(path.stem, ""))
        for path in sorted(checks.folder.glob("*.out"))
    ]


def salloc_command(checks: NodeChecks, hosts: Sequence[str]) -> list[str]:
    """Return the command that allocates nodes as the profile's jobs do."""
    cluster, place = checks.cluster, checks.placement
    command = ["salloc", "--job-name=ftkit-doctor", f"--nodes={place.num_nodes}", "--ntasks-per-node=1"]
    command.append(f"--time={_JOB_MINUTES}")
    gpus = {"gpus-per-node": "--gpus-per-node=", "gres": "--gres=gpu:"}.get(cluster.gpu_request)
    if gpus:
        command.append(f"{gpus}{place.processes_per_node}")
    if cluster.cpus_per_node:
        command.append(f"--cpus-per-task={cluster.cpus_per_node}")
    if cluster.exclusive:
        command += ["--exclusive", "--mem=0"]
    if hosts:
        command.append(f"--nodelist={','.join(hosts)}")
    for option in ("partition", "account", "qos", "reservation"):
        value = getattr(cluster, option)
        if value:
            command.append(f"--{option}={value}")
    return command


def idle_nodes(cluster: ClusterProfile) -> tuple[list[str], int]:
    """Return the idle nodes of the profile's partition, and how many others there are.

    Raises:
        PrerequisiteError: Slurm can't be queried.
    """
    partition = [f"--partition={cluster.partition}"] if cluster.partition else []
    done = process.run(["sinfo", "--noheader", "--Node", "--format=%N %t", *partition])
    if done.returncode != 0:
        raise PrerequisiteError(f"Slurm can't be queried for nodes: {clean_stderr(done.stderr)}")
    states = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    idle = [host for host, state in states.items() if state.strip() == "idle"]
    return idle, len(states) - len(idle)


def _report(path: Path) -> dict[str, Any] | None:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(_REPORT):
            try:
                return parse_json(line.removeprefix(_REPORT).encode(), dict[str, Any])
            except InvalidJsonError:
                return None
    return None


@contextmanager
def checks_folder(workspace: Path) -> Iterator[Path]:
    """Yield a temporary folder in the workspace, which the nodes share.

    Raises:
        PrerequisiteError: the workspace can't be written to.
    """
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=".ftkit-doctor-", dir=workspace))
    except OSError as error:
        raise PrerequisiteError(
            f"can't write to the workspace {workspace}: {one_line(error)}",
            fix="set 'workspace:' in ftkit.yaml to a folder that you can write to",
        ) from error
    try:
        yield folder
    finally:
        remove(folder)
