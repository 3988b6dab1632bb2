"""Undocumented names of accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def accelerate_environment(config: Path) -> dict[str, str]:
    """Return the variables that `accelerate launch` would set for a configuration file.

    accelerate's own launcher can't be used: it starts processes by its own rules, and a single one on CPUs. These
    functions are undocumented; 1.0 to 1.15 have them. When they go: set the variables of its documentation here.
    """
    from accelerate.commands import launch  # noqa: PLC0415 - few runs need it
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env  # noqa: PLC0415

    parsed = launch.launch_command_parser().parse_args(["--config_file", str(config), "script.py"])
    args, defaults, _ = launch._validate_launch_command(parsed)  # noqa: SLF001
    args.deepspeed_fields_from_accelerate_config = ",".join([*defaults.deepspeed_config, "mixed_precision"])
    # As if on a second machine: on the first, it looks for a free port.
    args.num_machines, args.machine_rank, args.deepspeed_multinode_launcher = 2, 1, "standard"
    found = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return {name: value for name, value in found.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


def load_offloaded(module: nn.Module) -> None:
    """Load the weights of a module that accelerate keeps on the disk, as its forward would.

    `_hf_hook`, accelerate 1.0 to 1.15; transformers' `force_accelerate_hooks` uses it too. If it goes: refuse DoRA in
    `ftkit.evaluate.streamed_model`, the only caller.
    """
    module._hf_hook.pre_forward(module)  # type: ignore[operator, union-attr]  # noqa: SLF001


def free_offloaded(module: nn.Module) -> None:
    """Free the weights of `load_offloaded`."""
    module._hf_hook.post_forward(module, ())  # type: ignore[operator, union-attr]  # noqa: SLF001
