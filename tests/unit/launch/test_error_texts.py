"""The texts of errors of `launch` and `planning`: tests/golden/errors/{launch,planning}.txt.

`FTKIT_UPDATE_GOLDEN=1` rewrites the files: read the diff.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from error_texts import check_error_texts

import ftkit
from ftkit.config.context import Context
from ftkit.launch.code import copy_code
from ftkit.launch.resolve import RunArgs, resolve
from ftkit.launch.scheduler import explain_refusal
from ftkit.launch.submission import read_resumable_plan
from ftkit.launch.sweep import expand
from ftkit.launch.user_script import ScriptArgs, resolve_script
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import parse_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftkit.errors import FtkitError

PACKAGE = Path(ftkit.__file__).parent

REFUSALS = {
    "limit": "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)",
    "partition": "sbatch: error: invalid partition specified: gpu",
    "nodes": "sbatch: error: Batch job submission failed: Requested node configuration is not available",
    "unknown": "sbatch: error: the moon is full",
    "controller": "sbatch: error: Unable to contact slurm controller (connect failure)",
}
OVERRIDES = {
    "batch": ("training.global_batch_size=33", "training.micro_batch_size=8"),
    "sequence length": ("training.sequence_length=4096",),
    "projection": ("training.method=lora", "training.lora.targets=[qkv_proj]"),
    "groups of GPUs": ("training.context_parallel=3",),
    "kernel": ("training.attention=flash4",),
    "offload": ("training.offload=all",),
    "rank of the profiler": ("profile.enabled=true", "profile.ranks=[9]"),
    "engine": ("training.engine=zero3", "training.compile=layers"),
    "metric": ("evaluation.generation.metrics=[nonsense]",),
    "best checkpoint": ("evaluation.best.metric=accuracy", "evaluation.every_steps=1"),
    "dense model": ("training.router_aux_loss_coef=0.01",),
}


def failures_of_launch(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    ctx = Context(folder, folder / "user", {"FTKIT_CLUSTER": "local"})
    yield "no recipe", partial(resolve, RunArgs(), ctx)
    yield "serving image", partial(resolve, RunArgs("demo", cluster="slurm", image="vllm:0.33"), ctx)
    yield "no such run", partial(resolve, RunArgs("demo", overrides=("model=run:nothing",)), ctx)
    yield "sweep with a value twice", partial(expand, RunArgs("demo", ("training.seed=1,1",)), ctx)
    yield "no folder of code", partial(copy_code, folder / "nowhere", "with-code", "--with-code")
    script = ScriptArgs(folder / "train.py")
    yield "no script", partial(resolve_script, script, RunArgs(), [], ctx)
    script.path.touch()
    yield "key of a recipe", partial(resolve_script, script, RunArgs(overrides=("training.seed=1",)), [], ctx)
    yield "run without a plan", partial(read_resumable_plan, RunLayout(folder / "runs" / "x"))
    for name, message in REFUSALS.items():
        yield name, partial(_raise, explain_refusal(message))


def failures_of_planning(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    ctx = Context(folder, folder / "user", {"FTKIT_CLUSTER": "local"})
    for name, overrides in OVERRIDES.items():
        yield name, partial(resolve, RunArgs("demo", overrides, processes_per_node=2), ctx)
    yield "nodes", partial(resolve, RunArgs("demo", num_nodes=2), ctx)
    yield "no image", partial(resolve, RunArgs("demo", cluster="a4-highgpu-8g"), ctx)
    yield "image without effect", partial(resolve, RunArgs("demo", image="olmo3:25.02", cluster="local"), ctx)
    yield "plan of another version", partial(parse_plan, '{"version": 1, "ftkit_version": "0.0.1"}', "plan.json")


def _raise(error: FtkitError) -> None:
    raise error


@pytest.mark.parametrize("failures", [failures_of_launch, failures_of_planning])
def test_golden_error_texts(
    failures: Callable[[Path], Iterator[tuple[str, Callable[[], object]]]], tmp_path: Path
) -> None:
    shown = {str(tmp_path): "/project", str(PACKAGE): "ftkit"}
    check_error_texts(failures.__name__.removeprefix("failures_of_"), failures(tmp_path), shown)
