"""What differs between the versions of torch that ftkit runs on: all else is written alike for all of them."""

from __future__ import annotations

import torch
import transformers
from torch.distributed.fsdp import FSDPModule

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

FSDP2_ON_PROCESSORS = hasattr(torch.cpu.Stream, "record_event")
"""Whether FSDP2 is made for several processes without GPUs.

Not in torch 2.6, nor in NGC's 2.7.0a0, which is of its line: autograd refuses weights that are gathered again, and gloo
sums gradients where NCCL averages them. It is told by the third thing that is missing there.
"""

COPY_ENGINE_COLLECTIVES = hasattr(FSDPModule, "set_custom_all_gather") and TORCH >= (2, 11)
"""Whether FSDP2 takes collectives from outside, and its symmetric memory was tried with them."""

CONVERTS_WEIGHTS = int(transformers.__version__.split(".")[0]) >= 5  # noqa: PLR2004
"""Whether transformers has some tensors in other pieces than files on the hub have."""


def complete_processor_streams() -> None:
    """Give torch's stand-in for streams on processors what FSDP2 calls of it; both do nothing there.

    torch 2.6 has forgotten them, so that FSDP2 fails in its first forward pass, but on GPUs.
    """
    for method in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, method):
            setattr(torch.cpu.Stream, method, lambda *_: None)


def compile_failures() -> tuple[type[Exception], type[Exception]]:
    """Return what a compiled function raises if it can't be one graph, and if it is called in too many ways."""
    from torch._dynamo import exc  # noqa: PLC0415 - loads the compiler

    return exc.Unsupported, exc.FailOnRecompileLimitHit


def raise_recompile_limit(num_layers: int) -> None:
    """Let torch compile a layer's code once per layer, and a few times more.

    torch 2.6 does so for layers with selective checkpointing, and would leave the ninth and all others uncompiled.
    """
    from torch._dynamo import config  # noqa: PLC0415 - loads the compiler

    config.cache_size_limit = max(config.cache_size_limit, num_layers + 8)
