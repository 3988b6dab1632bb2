"""Names of a text model's tensors where it is a part of a multimodal one, as Gemma 3's is from 4B on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_WRAPPED = "model.language_model."
"""Where the wrapper's class has the text model."""

_STORED = {
    "language_model.model.": "model.",  # as files on the hub have them
    "language_model.lm_head.": "lm_head.",
    _WRAPPED: "model.",  # as the class has them, and some versions of transformers save them
}


def text_name(stored: str) -> str:
    """Return what the text model calls a tensor of the files; one that is not of the text model keeps its name."""
    for prefix, own in _STORED.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def wrapped_name(name: str) -> str:
    """Return what the wrapper's class calls a tensor of the text model."""
    return _WRAPPED + name.removeprefix("model.") if name.startswith("model.") else name


def wrapped_targets(projections: Iterable[str]) -> str:
    """Return a pattern for the wrapper's modules that have adapters: its vision tower may have layers so called."""
    return rf"{re.escape(_WRAPPED)}.*\.({'|'.join(map(re.escape, projections))})"
