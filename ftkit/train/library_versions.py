"""What differs between the versions of torch and transformers that ftkit runs on.

Everything else is written for the newest and works with the oldest too.
"""

from __future__ import annotations

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def complete_processor_streams() -> None:
    """Give torch's stand-in for streams on processors what FSDP2 calls of it; both do nothing there.

    torch 2.6 has forgotten them, so that FSDP2 fails in its first forward pass, but on GPUs.
    """
    for method in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, method):
            setattr(torch.cpu.Stream, method, lambda *_: None)
