"""Compiled decoder layers: each as a whole, or the log says that it is not."""

from __future__ import annotations

import logging
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import config, exc

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


def raise_recompile_limit(num_layers: int) -> None:
    """Let torch compile a layer's code as often as there are layers, and some.

    torch 2.6 does so if they compute selectively again, and would leave the ninth and all that follow uncompiled.
    """
    config.cache_size_limit = max(config.cache_size_limit, num_layers + 8)


def compile_whole(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that is compiled as a whole.

    Left to itself, torch compiles what it can and says nothing of the rest, which then runs as slowly, and keeps as
    much, as without a compiler. Here that is a warning. A forward that has come in too many shapes is the same case.
    """
    chosen = torch.compile(forward, fullgraph=True)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal chosen
        try:
            return chosen(*args, **kwargs)
        except (exc.Unsupported, exc.FailOnRecompileLimitHit) as error:
            is_limit = isinstance(error, exc.FailOnRecompileLimitHit)
            reason = "It is called in more ways than torch compiles." if is_limit else str(error).splitlines()[0]
            _say_once(forward.__qualname__, reason)
            chosen = torch.compile(forward)
        return chosen(*args, **kwargs)

    return call


@cache
def _say_once(name: str, reason: str) -> None:
    """Warn, but not for each of many layers that are alike."""
    log.warning("%s can't be compiled as a whole: it is slower and takes more memory. %s", name, reason)
