"""Every path of a run. All files of a run are in its folder, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ftkit.config.image_reference import ImageFormat, NamedImage


SCRIPT_CODE: Final = "script"  # name of the copy of a script's folder, in the run's `code`


class FilePath:
    """The path of a file or folder within the root of a layout: an attribute of the layout."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, layout: DataLayout | Workspace | RunLayout, owner: type) -> Path:
        return layout.root / self._place


class NumberedPath:
    """The path of a file per rank, step or job: the attribute is a function of its number or id."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, layout: RunLayout, owner: type) -> Callable[[int | str], Path]:
        return lambda number: layout.root / self._place.format(number)


@dataclass(frozen=True)
class DataLayout:
    root: Path

    manifest = FilePath("manifest.json")
    """The manifest, written last: trainer, planner and job script treat the data as prepared if it exists."""

    @property
    def is_prepared(self) -> bool:
        return self.manifest.is_file()


@dataclass(frozen=True)
class Workspace:
    """The folder on the shared file system that holds all runs, prepared data and imported images."""

    root: Path

    runs = FilePath("runs")
    data = FilePath("data")  # tokenized and packed data, one folder for each fingerprint
    images = FilePath("images")  # imported images, named by digest, with readable links
    hub_home = FilePath("huggingface")  # jobs' downloads from the Hugging Face hub, unless HF_HOME is set

    def image_file(self, image: NamedImage, image_format: ImageFormat) -> Path:
        """Return the path of an imported image's file, or of the link to it."""
        return self.images / image.file_name(image_format)


@dataclass(frozen=True)
class RunLayout:
    root: Path

    plan = FilePath("plan.json")
    script = FilePath("job.sbatch")
    preparation_script = FilePath("prepare.sbatch")
    """The script of the job that prepares data and weights, if one was needed."""
    array_script = FilePath("array.sbatch")  # of a sweep's job array, in the folder of the first of its runs
    preparation_array = FilePath("prepare-array.sbatch")
    submission = FilePath("submission.json")
    manifest = FilePath("manifest.json")  # the inputs of the run, with which it can be repeated elsewhere
    code_changes = FilePath("code.diff")
    """The diff of ftkit's code from its commit, for `git apply`; missing if there is none."""
    code = FilePath("code")  # the run's copies of the user's code: a folder for each
    accelerate_config = FilePath("accelerate.json")  # accelerate's configuration for the script, if it has one
    proof = FilePath("proof.json")  # the checks of a script's first steps
    original = FilePath("original.json")  # data of the run that this one repeats, as needed for the comparison
    logs = FilePath("logs")
    job_log = FilePath("logs/job.log")  # the output of the job script and of its processes
    rank_log = NumberedPath("logs/rank-{:05d}.log")
    rank_error = NumberedPath("logs/error-{:05d}.json")
    rank_steps = NumberedPath("logs/steps-{:05d}.json")  # observations of a script's rank in its first steps
    rank_timing = NumberedPath("logs/timing-{:05d}.json")
    hang_report = NumberedPath("logs/hang-{:05d}.json")
    stacks = NumberedPath("logs/stacks-{:05d}.txt")
    collectives = NumberedPath("logs/collectives-{:05d}.pickle")
    """Dump of torch's flight recorder on a hanging rank, with its last collectives."""
    silent_nodes = FilePath("silent")
    """Files named by nodes: last heartbeat, in seconds since the epoch, a tab, and the node that misses it."""
    metrics = FilePath("metrics.jsonl")
    """The records of the run. `metrics.index` beside it has the offsets of those that are not steps."""
    report = FilePath("report.html")
    evaluations = FilePath("evaluations.jsonl")
    """The records of jobs that evaluate checkpoints. Only these jobs write it; the trainer copies the records."""
    preflight = FilePath("preflight")
    """The results of the checks before training: a folder for each start of a job, with files for each node."""
    gpu_samples = FilePath("gpus")  # samples of the GPUs' load: a file for each node
    excluded_nodes = FilePath("excluded-nodes.tsv")
    """The excluded nodes, one per line: time, job, node and reason, separated by tabs."""
    stragglers = FilePath("stragglers.tsv")
    """The slow node that the next requeue excludes, and the reason, separated by a tab."""
    tensorboard = FilePath("tensorboard")
    profile = FilePath("profile")
    memory_snapshot = NumberedPath("profile/rank-{}.memory.pickle")
    checkpoints = FilePath("checkpoints")
    checkpoint = NumberedPath("checkpoints/step-{:06d}")
    export = FilePath("export")  # the trained model in Hugging Face's layout
    exports = FilePath("exports")  # the exports of `ftkit export`: a folder for each checkpoint and format
    stop_request = FilePath("stop-requested")  # a file whose existence asks the trainer to write a checkpoint and stop
    job_stop_request = NumberedPath("stop-requested-{}")
    """Stop request for the trainer of one job (a Slurm job or a process)."""
    no_restart = FilePath("no-restart")  # prefix of the name of a file that a rank writes if its failure would repeat
    job_no_restart = NumberedPath("no-restart-{}")
    """The file that a rank of one job (a Slurm job or a process) writes if its failure would repeat."""
    job_exit_code = NumberedPath("exit-code-{}")  # the exit code of the script of one job (a Slurm job or a process)
    leases = FilePath("leases")  # the lease of the process that trains here: `ftkit.runs.lease`
    disk_full = FilePath("disk-full")
    """An empty file that marks a run that ended on a full disk, where nothing else can be written."""
    sync = FilePath("sync.json")  # the progress of the run's copy at its `sync` destination: `ftkit.runs.sync`
    sync_log = FilePath("logs/sync.log")
    state = FilePath("state.json")  # the final state of the run, written by the first command that observed it
    canceled = FilePath("canceled")
    end_reason = FilePath("end-reason")
    """Why the last start ended, as text, if its ranks could not report it; the next start records it."""

    @property
    def is_script(self) -> bool:
        """Whether the run's job starts a user's script."""
        return (self.code / SCRIPT_CODE).is_dir()

    def profile_trace(self, rank: int, cycle: int) -> Path:
        """Return the Chrome trace of one rank in one cycle of the profiler."""
        return self.profile / f"rank-{rank}-cycle-{cycle}.trace.json.gz"

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """Return the checkpoints with their steps, oldest first; OSError if the folder exists but can't be read."""
        try:
            folders = list(self.checkpoints.iterdir())
        except FileNotFoundError:
            return []
        named = [(re.fullmatch(r"step-(\d{1,18})", folder.name), folder) for folder in folders]
        return sorted((int(match[1]), folder) for match, folder in named if match)
