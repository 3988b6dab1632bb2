"""Every path of a run. Everything about a run is in its folder, and nothing is elsewhere."""

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
        """Written last. Trainer, planner and job script take the data for prepared if this is a file."""
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
        """What jobs download from the Hugging Face hub, unless HF_HOME is set."""
        return self.root / "huggingface"

    def image_file(self, image: NamedImage, image_format: ImageFormat) -> Path:
        """Return where the file of an imported image is, or the link to it."""
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
        """The script of the job that prepares data and weights, where one was needed."""
        return self.root / "prepare.sbatch"

    @property
    def submission(self) -> Path:
        """The scheduler of the job, and its id there."""
        return self.root / "submission.json"

    @property
    def manifest(self) -> Path:
        """What the run was made from, to repeat it elsewhere."""
        return self.root / "manifest.json"

    @property
    def code_changes(self) -> Path:
        """How the code of ftkit differed from its commit, as `git apply` takes it; not there if it did not."""
        return self.root / "code.diff"

    @property
    def code(self) -> Path:
        """Copies of the user's code that the run carries: a folder for each."""
        return self.root / "code"

    @property
    def is_script(self) -> bool:
        """Whether the run's job starts a script of the user's."""
        return (self.code / SCRIPT_CODE).is_dir()

    @property
    def accelerate_config(self) -> Path:
        """What a script is told by accelerate, where the run has that."""
        return self.root / "accelerate.json"

    @property
    def original(self) -> Path:
        """The run that this one repeats, as far as it is needed to compare them."""
        return self.root / "original.json"

    @property
    def logs(self) -> Path:
        """The job's log and one log for each rank."""
        return self.root / "logs"

    @property
    def job_log(self) -> Path:
        """What the job script and everything under it printed."""
        return self.logs / "job.log"

    def rank_log(self, rank: int) -> Path:
        """Return the log of one rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def rank_error(self, rank: int) -> Path:
        """Return where a rank that fails leaves its exception and traceback."""
        return self.logs / f"error-{rank:05d}.json"

    def rank_timing(self, rank: int) -> Path:
        """Return where a rank leaves how long its steps take."""
        return self.logs / f"timing-{rank:05d}.json"

    def hang_report(self, rank: int) -> Path:
        """Return where a rank leaves the step that it hung in."""
        return self.logs / f"hang-{rank:05d}.json"

    def stacks(self, rank: int) -> Path:
        """Return where a rank that hangs leaves its Python stacks."""
        return self.logs / f"stacks-{rank:05d}.txt"

    def collectives(self, rank: int) -> Path:
        """Return where a rank that hangs leaves the collectives that torch remembers (its flight recorder)."""
        return self.logs / f"collectives-{rank:05d}.pickle"

    @property
    def metrics(self) -> Path:
        """The records of the run, one JSON object a line."""
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The page about the run, for a browser."""
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
        """What the checks before training found: a folder for each start of a job, in it files of each node."""
        return self.root / "preflight"

    @property
    def gpu_samples(self) -> Path:
        """How busy the GPUs were: a file of samples for each node."""
        return self.root / "gpus"

    @property
    def excluded_nodes(self) -> Path:
        """The nodes that did not pass, a line each: time, job, node and why, with tabs between them."""
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
        """Return the checkpoints that have their final names with their steps, oldest first.

        Raises:
            OSError: the folder is there but can't be read.
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
        """What `ftkit export` wrote: a folder for each checkpoint and form."""
        return self.root / "exports"

    @property
    def stop_request(self) -> Path:
        """A file whose existence asks the trainer to write a checkpoint and stop."""
        return self.root / "stop-requested"

    def job_stop_request(self, job_id: str) -> Path:
        """Return the file that asks the trainer of one job, a Slurm job or a process, as `stop_request` does."""
        return self.root / f"{self.stop_request.name}-{job_id}"

    @property
    def no_restart(self) -> Path:
        """Prefix of the name of a file that a rank writes if its failure would repeat."""
        return self.root / "no-restart"

    def job_no_restart(self, job_id: str) -> Path:
        """Return that file of one job, a Slurm job or a process."""
        return self.root / f"{self.no_restart.name}-{job_id}"

    @property
    def leases(self) -> Path:
        """The lease of the process that trains here: `ftkit.runs.lease`."""
        return self.root / "leases"

    @property
    def exit_code(self) -> Path:
        """Where job scripts of earlier versions wrote their exit code."""
        return self.root / "exit-code"

    def job_exit_code(self, job_id: str) -> Path:
        """Return where the script of one job, a Slurm job or a process, writes its exit code when it ends."""
        return self.root / f"{self.exit_code.name}-{job_id}"

    @property
    def disk_full(self) -> Path:
        """An empty file that marks a run that ended on a full disk, where nothing else can be written."""
        return self.root / "disk-full"

    @property
    def sync(self) -> Path:
        """How far the copy of the run elsewhere is: `ftkit.runs.storage.sync`."""
        return self.root / "sync.json"

    @property
    def sync_log(self) -> Path:
        """What the process prints that copies the run while it trains."""
        return self.logs / "sync.log"

    @property
    def state(self) -> Path:
        """How the run ended, written by the first command that observed it."""
        return self.root / "state.json"

    @property
    def cancelled(self) -> Path:
        """A file that marks a run that the user cancelled."""
        return self.root / "cancelled"
