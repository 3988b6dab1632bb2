"""Private and undocumented names of peft, accelerate, bitsandbytes, flash-attn-4, and DeepSpeed."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftkit.data.imports import is_broken, without_packages
from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn


@cache
def import_peft() -> Any:
    """Import peft, even if packages whose layers it can adapt are broken or too old for it.

    peft always imports these packages, and fails if torchao is older than 0.16, as in many NVIDIA images, or if
    Transformer Engine finds no GPU driver. Within `faster_imports`, it imports none of them. Functions of
    `peft.import_utils` cache their results (peft 0.17 to 0.21).
    """
    broken = ("bitsandbytes",) if is_broken("bitsandbytes") else ()
    with without_packages("transformer_engine", *broken):
        import peft  # noqa: PLC0415 - takes seconds, and only adapters need it

        peft.import_utils.is_bnb_available()
    for name in ("torchao", "gptqmodel", "auto_gptq"):
        is_available = getattr(peft.import_utils, f"is_{name}_available", bool)  # not in every version
        try:
            is_available()
        except ImportError:
            with without_packages(name):
                is_available()
    return peft


def adapts_experts(config: LoraConfig, model: nn.Module) -> bool:
    """Return whether peft adapts parameters of experts instead of the linear layers that a configuration targets.

    Uses `peft.utils.transformers_weight_conversion`, which newer versions have for transformers 5.
    """
    try:
        from peft.utils import transformers_weight_conversion as conversion  # noqa: PLC0415 - not in every version
    except ImportError:
        return False
    targets = {*config.target_modules}
    try:
        conversion.convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # it needs the other half of the fused matrix
        return True
    return not targets <= {*config.target_modules}


def accelerate_environment(config: Path) -> dict[str, str]:
    """Return the environment variables that `accelerate launch` would set for a configuration file.

    accelerate's own launcher can't be used: it starts processes by its own rules, and only one on CPUs. These functions
    are undocumented, in 1.0 to 1.15. If they are removed, set the documented variables here.
    """
    from accelerate.commands import launch  # noqa: PLC0415 - few runs need it

    parsed = launch.launch_command_parser().parse_args(["--config_file", str(config), "script.py"])
    args, defaults, _ = launch._validate_launch_command(parsed)  # noqa: SLF001
    args.deepspeed_fields_from_accelerate_config = ",".join([*defaults.deepspeed_config, "mixed_precision"])
    # Act as a second machine: on the first one, it looks for a free port.
    args.num_machines, args.machine_rank, args.deepspeed_multinode_launcher = 2, 1, "standard"
    found = launch.prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else launch.prepare_multi_gpu_env(args)
    return {name: value for name, value in found.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


def load_offloaded(module: nn.Module) -> None:
    """Load the weights of a module that accelerate keeps on disk, as the module's forward does.

    `_hf_hook`, accelerate 1.0 to 1.15; transformers' `force_accelerate_hooks` uses it too.
    """
    module._hf_hook.pre_forward(module)  # type: ignore[operator, union-attr]  # noqa: SLF001


def free_offloaded(module: nn.Module) -> None:
    """Free the weights of `load_offloaded`."""
    module._hf_hook.post_forward(module, ())  # type: ignore[operator, union-attr]  # noqa: SLF001


@cache
def import_bitsandbytes(needed_by: str) -> Any:
    """Return bitsandbytes' functions: quantization to NF4, its tables, and the update of 8-bit optimizer states.

    `bitsandbytes.functional`, whose functions are undocumented, 0.46 to 0.50; importing it also defines the operators
    `torch.ops.bitsandbytes`. `tests/train/test_nf4.py` and `test_adamw8bit.py` have the formulas.
    """
    try:
        from bitsandbytes import functional  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PrerequisiteError(
            f"{needed_by} needs bitsandbytes, which is not installed", fix="pip install 'ftkit[qlora]'"
        ) from error
    return functional


def flash_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return flash-attn-4's forward and backward; its public function supports neither compilers nor checkpointing.

    `flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd`, flash-attn-4 4.0.0b. If they are removed,
    `choose_kernel` falls back to flex attention.
    """
    from flash_attn.cute import interface  # type: ignore[import-not-found] # noqa: PLC0415 - on GPUs

    return interface._flash_attn_fwd, interface._flash_attn_bwd  # noqa: SLF001


# --- ZeRO-3, in DeepSpeed 0.19 -------------------------------------------------------------------
#
# If one is removed, `deepspeed.utils.safe_get_local_*` can read weights, masters and states parameter by parameter.


@dataclass(frozen=True)
class Zero3Partition:
    """This rank's partition of a parameter that DeepSpeed partitioned."""

    shape: torch.Size  # of the full parameter
    values: torch.Tensor  # flat view of the partition, padded on the last rank; writing to it changes the parameter
    is_persistent: bool  # every rank also has the full parameter, since it is small


def zero3_partition(parameter: torch.Tensor) -> Zero3Partition | None:
    """Return this rank's partition of a parameter; None if DeepSpeed did not partition it."""
    ds: Any = parameter
    if not hasattr(ds, "ds_tensor"):
        return None
    return Zero3Partition(ds.ds_shape, ds.ds_tensor, bool(getattr(ds, "ds_persist", False)))


class Zero3Optimizer:
    """The attributes of DeepSpeed's ZeRO-3 optimizer that have no public name."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer

    @property
    def masters(self) -> list[torch.Tensor]:
        """This rank's fp32 weights, one flat tensor per parameter group."""
        return list(self._optimizer.fp32_partitioned_groups_flat)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The buffer of this rank's gradients; empty until it exists."""
        buffer = self._optimizer.grad_partitions_flat_buffer
        return [] if buffer is None else [buffer]

    @property
    def states(self) -> Mapping[torch.Tensor, dict[str, torch.Tensor]]:
        """The states of the wrapped torch optimizer, by master."""
        states: Mapping[torch.Tensor, dict[str, torch.Tensor]] = self._optimizer.optimizer.state
        return states

    @property
    def grad_norm(self) -> Any:
        """The global gradient norm of the last step; None if DeepSpeed skipped the step."""
        return None if self._optimizer.overflow else self._optimizer._global_grad_norm  # noqa: SLF001

    def set_step(self, learning_rate: float, max_norm: float) -> None:
        self._optimizer.clip_grad = max_norm
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def init_states(self, names: tuple[str, ...]) -> None:
        """Create the states that torch creates in the first step, so that a checkpoint can be loaded into them."""
        for master in self.masters:
            states = {name: torch.zeros_like(master) for name in names}
            self._optimizer.optimizer.state[master] = states | {"step": torch.zeros((), device=master.device)}

    def gather_persistent(self) -> None:
        """All-gather the persistent parameters again, after their partitions were written."""
        if persistent := self._optimizer.persistent_parameters:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


def forget_pending_gradients(model: nn.Module) -> None:
    """Make DeepSpeed expect no gradients for a forward pass without a backward pass.

    It counts the pending output gradients of each module, and frees the weights after the last one.
    """
    for module in model.modules():
        if hasattr(module, "ds_grads_remaining"):
            module.ds_grads_remaining = 0  # type: ignore[assignment]


def import_deepspeed(device: torch.device) -> Any:
    """Return DeepSpeed, set up for a device, without compiling operators at startup.

    Without the change of `__compatible_ops__`, it would compile its shared memory for gloo for a minute on CPUs.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        import deepspeed  # noqa: PLC0415 - it looks for the accelerator when it is imported
    except ImportError as error:
        raise PrerequisiteError(
            "engine 'zero3' needs DeepSpeed, which is not installed", fix="pip install 'ftkit[deepspeed]'"
        ) from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(lambda record: "leaf module configuration" not in record.getMessage())  # deliberately none
    # torch 2.13 warns at each of DeepSpeed's collectives, several times per step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed
