"""The plan of a run of a user's script, and accelerate's configuration for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ftkit.config.cluster import site_folders
from ftkit.config.layers import COMMAND_LINE
from ftkit.config.recipe import ResourcesSpec
from ftkit.errors import ConfigError
from ftkit.files import InvalidJsonError, parse_json
from ftkit.planning.checks import check_job, check_mounts
from ftkit.planning.plan import (
    JobPlan,
    PlanError,
    RunPlan,
    plan_from_json,
    read_header,
    read_plan_file,
)
from ftkit.planning.planner import plan_job

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.request import RunRequest
    from ftkit.planning.layout import RunLayout
    from ftkit.planning.plan import CodePlan, PlacementPlan

StopSignal = Literal["TERM", "USR1", "none"]
"""Signal for a script's processes when the run is asked to stop."""
RUN_FOLDER: Final = "{run}"
"""Placeholder for the run's folder in a script's arguments."""


@dataclass(frozen=True)
class Script:
    """The script that the processes of the run start."""

    path: str
    """Path of the script within the copy of its folder."""
    args: tuple[str, ...]
    folder: str
    """Working folder of its processes."""
    accelerate: dict[str, Any] | None
    """Content of accelerate's configuration; null without one."""
    stop_signal: StopSignal
    can_restart: bool
    """Whether it resumes from its own checkpoint when it is restarted."""
    resources: ResourcesSpec
    recipe: str | None = None
    """Name of the recipe that the configuration was made from; null without one."""

    @property
    def asks_for_sharding(self) -> bool:
        """Whether accelerate's configuration shards the model."""
        return self.accelerate is not None and self.accelerate.get("distributed_type") in {"FSDP", "DEEPSPEED"}


@dataclass(frozen=True, kw_only=True)
class ScriptPlan(JobPlan):
    """The plan of a run of a script."""

    script: Script

    @property
    def resources(self) -> ResourcesSpec:
        """Resources that the script requests from the scheduler."""
        return self.script.resources


def plan_script(
    script: Script, code: tuple[CodePlan, ...], cluster: ClusterProfile, request: RunRequest, *, ftkit_version: str
) -> ScriptPlan:
    """Make the plan of a script.

    Args:
        script: the script.
        code: copies of code, that of the script's folder first.
        cluster: the cluster.
        request: the other inputs.
        ftkit_version: version of this ftkit.

    Raises:
        ConfigError: with every reason why it can't be started there.
    """
    job = plan_job(cluster, request, script.resources, "script")
    folders = site_folders(cluster, request.workspace, job["placement"].num_nodes)
    owned = (("settings" if key == "workspace" else f"cluster {cluster.name}", key, folder) for key, folder in folders)
    problems = [
        *check_job(cluster, request, script.resources, job["placement"]),
        *check_mounts(cluster, request.workspace, (*owned, (COMMAND_LINE, "--script", script.folder))),
    ]
    if problems:
        raise ConfigError([request.origins.locate(problem) for problem in problems])
    return ScriptPlan(
        **job,
        ftkit_version=ftkit_version,
        notes=(),
        code=code,
        script=script,
    )


def accelerate_config(plan: RunPlan) -> dict[str, Any]:
    """Return the configuration with which accelerate shards a model like a plan of ftkit's trainer.

    The model itself defines the layers to wrap (`_no_split_modules`): a wrong class name would silently match none.
    With FSDP2, accelerate can offload everything or nothing. Batch, accumulation and clipping are the script's:
    DeepSpeed gets `auto` for them, which the Trainer and accelerate fill in.
    """
    training = plan.recipe.training
    precision = "no" if training.precision == "fp32" else "bf16"
    config: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": precision}
    if plan.engine.name == "zero3":
        return config | {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "zero_stage": 3,
                "zero3_init_flag": True,
                "zero3_save_16bit_model": True,
                "offload_optimizer_device": "none" if training.offload == "none" else "cpu",
                "offload_param_device": "cpu" if training.offload == "all" else "none",
            },
        }
    return config | {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": not plan.engine.keeps_weights,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": training.activation_checkpointing != "none",
            "fsdp_offload_params": training.offload != "none",
        },
    }


def placed(config: Mapping[str, Any], placement: PlacementPlan) -> dict[str, Any]:
    """Return accelerate's configuration with this run's number of nodes and processes."""
    return {
        **config,
        "num_machines": placement.num_nodes,
        "num_processes": placement.world_size,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": placement.device == "cpu",
        "main_training_function": "main",
    }


def read_job_plan(layout: RunLayout) -> RunPlan | ScriptPlan:
    """Read the plan of a run, for either kind of job.

    Raises:
        PlanError: it can't be read.
    """
    content = read_plan_file(layout)
    header = read_header(content)
    if header.script is None:
        return plan_from_json(content, str(layout.plan))
    try:
        return parse_json(content, ScriptPlan)
    except InvalidJsonError as error:
        raise PlanError(
            f"can't read the plan in {layout.plan}: {error}", meaning=f"{header.writer} wrote it under other rules"
        ) from error
