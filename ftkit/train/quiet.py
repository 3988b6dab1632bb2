"""Silence warnings of indirectly imported libraries, without importing them."""

from __future__ import annotations

import logging
import warnings

_OF_CHECKPOINTS = "Detected that context_fn is passed to torch.utils.checkpoint under torch.compile."


def silence_training() -> None:
    """Drop two warnings that users can ignore. Call it after other filters of warnings are set.

    * torch's compiler mentions in-place operations whenever checkpointing is selective; ftkit's layers have none on
      tensors that are saved.
    * fla misses flash-attn, for layers of its own that transformers does not use.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_kept)
    warnings.filterwarnings("ignore", "Flash Attention is not installed", ImportWarning, r"fla\.")


def _is_kept(record: logging.LogRecord) -> bool:
    return not record.getMessage().lstrip().startswith(_OF_CHECKPOINTS)
