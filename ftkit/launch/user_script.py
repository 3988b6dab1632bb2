"""Turn the command line of `ftkit run --script` into the plan of a script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.config.image_reference import NamedImage
from ftkit.config.layers import COMMAND_LINE, Layers
from ftkit.config.load import load_image
from ftkit.config.problems import validate
from ftkit.config.recipe import ResourcesSpec
from ftkit.config.request import Origins
from ftkit.config.yaml_files import parse_override, read_yaml
from ftkit.errors import ConfigError, NotFoundError, Problem
from ftkit.launch.code import CodeCopy, copy_code
from ftkit.launch.resolve import (
    RunArgs,
    detect_hardware,
    load_place,
    new_request,
    read_settings,
    resolve,
    resolve_image_link,
)
from ftkit.planning.compatibility import check_mounts
from ftkit.planning.layout import SCRIPT_CODE, Workspace
from ftkit.planning.plan import CodePlan, JobPlan, PlacementPlan, RunPlan, Script, ScriptPlan, StopSignal
from ftkit.planning.planner import plan_script
from ftkit.spec import Spec, as_name

if TYPE_CHECKING:
    from ftkit.config.context import Context


@dataclass(frozen=True)
class ScriptArgs:
    path: Path
    args: tuple[str, ...] = ()  # arguments of the script, given after `--`
    accelerate_config: Path | None = None
    stop_signal: StopSignal = "TERM"
    can_restart: bool = False  # whether it continues from its own checkpoint when it is restarted
    is_proved: bool = False  # whether its first steps are watched and checked


class _OnlyResources(Spec):
    """The recipe keys that apply to a script without a recipe."""

    resources: ResourcesSpec = ResourcesSpec.model_construct()


def resolve_script(
    args: ScriptArgs, run_args: RunArgs, copies: Sequence[CodeCopy], ctx: Context
) -> tuple[ScriptPlan, list[CodeCopy]]:
    """Make the plan of a script, and copy its folder.

    With a recipe, accelerate's configuration is derived from the recipe's plan on the same cluster. `copies` are copies
    of other code, and of the script if another machine sent it.
    """
    base = resolve(run_args, ctx) if run_args.recipe else None
    if base and args.accelerate_config:
        problem = Problem(COMMAND_LINE, "--accelerate-config", "the configuration already comes from the recipe.")
        raise ConfigError([replace(problem, fix="Omit one of the two.")])
    workspace = Workspace(read_settings(run_args, ctx).workspace_folder(ctx))
    sent = next((copy for copy in copies if copy.plan.name == SCRIPT_CODE), None)
    everything = [sent or copy_script(args.path, workspace), *(copy for copy in copies if copy is not sent)]
    given = read_yaml(args.accelerate_config).values if args.accelerate_config else None
    script = Script(
        path=args.path.name,
        args=args.args,
        folder=str(workspace.runs if sent else Path.cwd()),
        accelerate=accelerate_config(base) if base else given,
        stop_signal=args.stop_signal,
        can_restart=args.can_restart,
        resources=base.resources if base else _resources(run_args.overrides),
        recipe=base.recipe.name if base else None,
        is_proved=args.is_proved,
    )
    code = tuple(copy.plan for copy in everything)
    if base:
        mounted = [(COMMAND_LINE, "--script", script.folder)]
        if problems := list(check_mounts(base.cluster, base.workspace, mounted)):
            raise ConfigError(problems)
        place = {field.name: getattr(base, field.name) for field in fields(JobPlan)}
        plan = ScriptPlan(**place | {"notes": (), "code": code}, script=script)
    else:
        plan = _without_recipe(script, code, run_args, ctx)
    if sent:  # the folder where the command was typed is on another machine
        plan = replace(plan, script=replace(script, folder=str(plan.layout.code / SCRIPT_CODE)))
    return resolve_image_link(plan), everything


def copy_script(path: Path, workspace: Workspace) -> CodeCopy:
    """Copy the folder of a script, without ftkit's own folders in it. Raises as `copy_code` does."""
    file = path.absolute()
    if not file.is_file():
        raise NotFoundError(f"--script: there is no file {file}", fix="give the path of a Python file")
    made = (workspace.runs, workspace.data, workspace.images, workspace.hub_home)
    return copy_code(file.parent, SCRIPT_CODE, "--script", needs=file.name, exclude=made)


def _without_recipe(script: Script, code: tuple[CodePlan, ...], run_args: RunArgs, ctx: Context) -> ScriptPlan:
    place = load_place(run_args, ctx)
    if isinstance(place.image, NamedImage) and place.cluster.runtime != "none":
        load_image(place.image.reference, ctx)  # raises an error if it is not defined
    name = run_args.name or as_name(Path(script.path).stem, "script", 255)
    workspace = Workspace(place.settings.workspace_folder(ctx))
    origins = Origins(settings=place.settings.layers)
    request = new_request(run_args._replace(name=name), place.image, workspace, origins)
    return plan_script(script, code, detect_hardware(place.cluster, ctx.environment, ctx.root), request)


def _resources(overrides: Sequence[str]) -> ResourcesSpec:
    layers = Layers()
    for override in overrides:
        layers = parse_override(override).over(layers)
    if unknown := sorted(key for key in layers.values if key != "resources"):
        what = "is a key of a recipe, and no recipe is given."
        fix = "Without a recipe, --script takes resources.KEY=VALUE; the script's own arguments follow '--'."
        raise ConfigError([Problem(COMMAND_LINE, unknown[0], what, fix)])
    return validate(_OnlyResources, layers).resources


def accelerate_config(plan: RunPlan) -> dict[str, object]:
    """Return an accelerate configuration that shards a model as ftkit's trainer would under this plan.

    The layers to wrap come from the model (`_no_split_modules`), since a wrong class name would silently match nothing.
    With FSDP2, accelerate can offload everything or nothing. The script sets batch, accumulation and clipping:
    DeepSpeed gets `auto` for them, which the Trainer and accelerate fill in.
    """
    training = plan.recipe.training
    precision = "no" if training.precision == "fp32" else "bf16"
    config: dict[str, object] = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": precision}
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


def accelerate_json(plan: ScriptPlan) -> str:
    """Return the content of accelerate.json; empty if the plan has no configuration for accelerate.

    It is JSON, because accelerate reads YAML 1.1, in which `no` is a boolean.
    """
    config = plan.script.accelerate
    return "" if config is None else json.dumps(placed(config, plan.placement), indent=2) + "\n"


def placed(config: Mapping[str, object], placement: PlacementPlan) -> dict[str, object]:
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
