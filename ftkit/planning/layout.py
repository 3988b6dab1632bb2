"""Every path of a run. All files of a run are in its folder, and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ftkit.config.image_reference import ImageFormat, NamedImage


SCRIPT_CODE: Final = "script"
"""Name of the copy of a script's folder, in the run's `code`."""


@dataclass(frozen=True)
class DataLayout:
    """The folder of prepared data."""

    root: Path

    @property
    def manifest(self) -> Path:
        """The manifest, written last: trainer, planner and job script treat the data as prepared if it exists."""
        return self.root / "manifest.json"

    @property
    def is_prepared(self) -> bool:
        """Whether preparation is complete."""
        return self.manifest.is_file()


@dataclass(frozen=True)
class Workspace:
    """The folder on the shared file system that holds all runs, prepared data and imported images."""

    root: Path

    @property
    def runs(self) -> Path:
        """One folder for each run."""
        return self.root / "runs"

    @property
    def data(self) -> Path:
        """Tokenized and packed data, one folder for each fingerprint."""
        return self.root / "data"

    @property
    def images(self) -> Path:
        """Imported images, named by digest, with readable links."""
        return self.root / "images"

    @property
    def hub_home(self) -> Path:
        """Jobs' downloads from the Hugging Face hub, unless HF_HOME is set."""
        return self.root / "huggingface"

    def image_file(self, image: NamedImage, image_format: ImageFormat) -> Path:
        """Return the path of an imported image's file, or of the link to it."""
        return self.images / image.file_name(image_format)


@dataclass(frozen=True)
class RunLayout:
    """The folder of one run."""

    root: Path

    @property
    def plan(self) -> Path:
        """The plan: the only contract between submitting and training."""
        return self.root / "plan.json"

    @property
    def script(self) -> Path:
        """The job script as it was submitted."""
        return self.root / "job.sbatch"

    @property
    def preparation_script(self) -> Path:
        """The script of the job that prepares data and weights, if one was needed."""
        return self.root / "prepare.sbatch"

    @property
    def submission(self) -> Path:
        """The scheduler of the job, and its id there."""
        return self.root / "submission.json"

    @property
    def manifest(self) -> Path:
        """The inputs of the run, with which it can be repeated elsewhere."""
        return self.root / "manifest.json"

    @property
    def code_changes(self) -> Path:
        """The diff of ftkit's code from its commit, for `git apply`; missing if there is none."""
        return self.root / "code.diff"

    @property
    def code(self) -> Path:
        """The run's copies of the user's code: a folder for each."""
        return self.root / "code"

    @property
    def is_script(self) -> bool:
        """Whether the run's job starts a user's script."""
        return (self.code / SCRIPT_CODE).is_dir()

    @property
    def accelerate_config(self) -> Path:
        """The script's configuration for accelerate, if it has one."""
        return self.root / "accelerate.json"

    @property
    def original(self) -> Path:
        """The data of the run that this one repeats, as far as a comparison needs it."""
        return self.root / "original.json"

    @property
    def logs(self) -> Path:
        """The job's log and one log for each rank."""
        return self.root / "logs"

    @property
    def job_log(self) -> Path:
        """The output of the job script and of its processes."""
        return self.logs / "job.log"

    def rank_log(self, rank: int) -> Path:
        """Return the log of one rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def rank_error(self, rank: int) -> Path:
        """Return the file to which a failed rank writes its exception and traceback."""
        return self.logs / f"error-{rank:05d}.json"

    def rank_timing(self, rank: int) -> Path:
        """Return the file to which a rank writes the durations of its steps."""
        return self.logs / f"timing-{rank:05d}.json"

    def hang_report(self, rank: int) -> Path:
        """Return the file to which a hanging rank writes its step."""
        return self.logs / f"hang-{rank:05d}.json"

    def stacks(self, rank: int) -> Path:
        """Return the file to which a hanging rank writes its Python stacks."""
        return self.logs / f"stacks-{rank:05d}.txt"

    def collectives(self, rank: int) -> Path:
        """Return the file to which a hanging rank writes torch's flight recorder, with its last collectives."""
        return self.logs / f"collectives-{rank:05d}.pickle"

    @property
    def metrics(self) -> Path:
        """The records of the run, one JSON object per line."""
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The HTML report about the run."""
        return self.root / "report.html"

    @property
    def evaluations(self) -> Path:
        """The records of jobs that evaluate checkpoints: only they write it, and the trainer copies the records."""
        return self.root / "evaluations.jsonl"

    @property
    def evaluation_script(self) -> Path:
        """The script of the job that evaluates checkpoints during training, if requested."""
        return self.root / "evaluate.sbatch"

    @property
    def serving_script(self) -> Path:
        """The script of the job that serves the trained model, if requested."""
        return self.root / "serve.sbatch"

    @property
    def preflight(self) -> Path:
        """The results of the checks before training: a folder for each start of a job, with files for each node."""
        return self.root / "preflight"

    @property
    def gpu_samples(self) -> Path:
        """Samples of the GPUs' load: a file for each node."""
        return self.root / "gpus"

    @property
    def excluded_nodes(self) -> Path:
        """The excluded nodes, one per line: time, job, node and reason, separated by tabs."""
        return self.root / "excluded-nodes.tsv"

    @property
    def stragglers(self) -> Path:
        """The slow node that the next requeue excludes, and the reason, separated by a tab."""
        return self.root / "stragglers.tsv"

    @property
    def tensorboard(self) -> Path:
        """Event files, if the recipe asks for TensorBoard."""
        return self.root / "tensorboard"

    @property
    def profile(self) -> Path:
        """Traces and snapshots of the profiler, if the recipe asks for them."""
        return self.root / "profile"

    def profile_trace(self, rank: int, cycle: int) -> Path:
        """Return the Chrome trace of one rank in one cycle of the profiler."""
        return self.profile / f"rank-{rank}-cycle-{cycle}.trace.json.gz"

    def memory_snapshot(self, rank: int) -> Path:
        """Return the snapshot of one GPU's memory."""
        return self.profile / f"rank-{rank}.memory.pickle"

    @property
    def checkpoints(self) -> Path:
        """One folder for each complete checkpoint."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint that was written after `step` steps."""
        return self.checkpoints / f"step-{step:06d}"

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """Return the step and the folder of each checkpoint with its final name, oldest first.

        Raises:
            OSError: the folder exists but can't be read.
        """
        try:
            folders = list(self.checkpoints.iterdir())
        except FileNotFoundError:
            return []
        named = [(re.fullmatch(r"step-(\d{1,18})", folder.name), folder) for folder in folders]
        return sorted((int(match[1]), folder) for match, folder in named if match)

    @property
    def export(self) -> Path:
        """The trained model in Hugging Face's layout."""
        return self.root / "export"

    @property
    def exports(self) -> Path:
        """The exports of `ftkit export`: a folder for each checkpoint and format."""
        return self.root / "exports"

    @property
    def stop_request(self) -> Path:
        """A file whose existence asks the trainer to write a checkpoint and stop."""
        return self.root / "stop-requested"

    def job_stop_request(self, job_id: str) -> Path:
        """Return the stop request for the trainer of one job (a Slurm job or a process)."""
        return self.root / f"{self.stop_request.name}-{job_id}"

    @property
    def no_restart(self) -> Path:
        """Prefix of the name of a file that a rank writes if its failure would repeat."""
        return self.root / "no-restart"

    def job_no_restart(self, job_id: str) -> Path:
        """Return the file that a rank of one job (a Slurm job or a process) writes if its failure would repeat."""
        return self.root / f"{self.no_restart.name}-{job_id}"

    @property
    def leases(self) -> Path:
        """The lease of the process that trains here: `ftkit.runs.lease`."""
        return self.root / "leases"

    def job_exit_code(self, job_id: str) -> Path:
        """Return the file to which the script of one job (a Slurm job or a process) writes its exit code."""
        return self.root / f"exit-code-{job_id}"

    @property
    def disk_full(self) -> Path:
        """An empty file that marks a run that ended on a full disk, where nothing else can be written."""
        return self.root / "disk-full"

    @property
    def sync(self) -> Path:
        """The progress of the run's copy at its `sync` destination: `ftkit.runs.storage.sync`."""
        return self.root / "sync.json"

    @property
    def sync_log(self) -> Path:
        """The output of the process that copies the run while it trains."""
        return self.logs / "sync.log"

    @property
    def state(self) -> Path:
        """The final state of the run, written by the first command that observed it."""
        return self.root / "state.json"

    @property
    def canceled(self) -> Path:
        """A file that marks a run that the user canceled."""
        return self.root / "canceled"

    @property
    def end_reason(self) -> Path:
        """A text file with why the last start ended, if its ranks could not tell; the next start records it."""
        return self.root / "end-reason"
