"""Where the text model lies in a multimodal model's class: exported adapters have the names of that class."""

from __future__ import annotations

import logging
import re
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ftkit.errors import one_line
from ftkit.model_folder import WRAPPED
from ftkit.train.model.build import auto_class_of, find_decoder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextPlace:
    """The decoder's place in two classes.

    Attributes:
        own: prefix of its tensors in the text model, with a period.
        wrapped: prefix in the multimodal model.
    """

    own: str = "model."
    wrapped: str = WRAPPED

    def rename(self, name: str) -> str:
        """Return the multimodal class's name of a tensor or module of the text model."""
        return self.wrapped + name.removeprefix(self.own) if name.startswith(self.own) else name

    def targets(self, projections: Iterable[str]) -> str:
        """Return peft's pattern for the adapted modules: the vision tower may have modules of the same names."""
        return rf"{re.escape(self.wrapped)}.*\.({'|'.join(map(re.escape, projections))})"


def find_text(model: nn.Module, wrapper: PretrainedConfig | None) -> TextPlace | None:
    """Return where a text model lies in the multimodal class that loads the weights, by the class of its decoder.

    Args:
        model: the text model, with or without adapters; it may be sharded.
        wrapper: the multimodal model's configuration; None if the model is not part of one.
    """
    if wrapper is None:
        return None
    decoder = find_decoder(model)
    own = next(name for name, module in model.named_modules() if module is decoder)
    try:
        with torch.device("meta"):
            # It sets the attention of the configuration, whose text part is the model's own.
            whole = auto_class_of(wrapper).from_config(deepcopy(wrapper), attn_implementation="eager")
    except Exception as error:  # noqa: BLE001 - a vision tower may need a package that training on text does not
        reason = f"{type(error).__name__}: {one_line(error)}"
    else:
        # FSDP2 makes a subclass of a sharded module's class.
        found = [name for name, module in whole.named_modules() if isinstance(decoder, type(module))]
        if len(found) == 1:
            return TextPlace(f"{own}.", f"{found[0]}.")
        reason = f"{type(whole).__name__} has {len(found)} modules of class {type(decoder).__name__}"
    log.warning("adapters are named for a text model at '%s', as in most multimodal models: %s", WRAPPED, reason)
    return TextPlace()
