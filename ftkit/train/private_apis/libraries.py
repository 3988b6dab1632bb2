"""Private and undocumented names of peft, accelerate, bitsandbytes and flash-attn-4."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.data.imports import is_broken, without_packages
from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn


@cache
def import_peft() -> Any:
    """Import peft, also where packages with layers that it adapts are broken or too old for it.

    It imports them whatever it adapts, and fails if torchao is older than 0.16, as in many images of NVIDIA, or if
    Transformer Engine finds no GPU driver. Called in `faster_imports`, it imports none. Functions of
    `peft.import_utils` remember their results, peft 0.17 to 0.21.
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

    `peft.utils.transformers_weight_conversion`, in newer versions, for transformers 5.
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
    """Return the variables that `accelerate launch` would set for a configuration file.

    accelerate's own launcher can't be used: it starts processes by its own rules, and a single one on CPUs. These
    functions are undocumented; 1.0 to 1.15 have them. If they go: set the variables of its documentation here.
    """
    from accelerate.commands import launch  # noqa: PLC0415 - few runs need it

    parsed = launch.launch_command_parser().parse_args(["--config_file", str(config), "script.py"])
    args, defaults, _ = launch._validate_launch_command(parsed)  # noqa: SLF001
    args.deepspeed_fields_from_accelerate_config = ",".join([*defaults.deepspeed_config, "mixed_precision"])
    # As if on a second machine: on the first, it looks for a free port.
    args.num_machines, args.machine_rank, args.deepspeed_multinode_launcher = 2, 1, "standard"
    found = launch.prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else launch.prepare_multi_gpu_env(args)
    return {name: value for name, value in found.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


def load_offloaded(module: nn.Module) -> None:
    """Load the weights of a module that accelerate keeps on the disk, as its forward would.

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
    """Return flash-attn-4's forward and backward; its public function is opaque to compilers and to checkpointing.

    `flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd`, flash-attn-4 4.0.0b. If they go,
    `choose_kernel` falls back to flex attention.
    """
    from flash_attn.cute import interface  # type: ignore[import-not-found] # noqa: PLC0415 - on GPUs

    return interface._flash_attn_fwd, interface._flash_attn_bwd  # noqa: SLF001
