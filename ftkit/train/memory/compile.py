"""Compile decoder layers, each as one graph; otherwise log a warning."""

from __future__ import annotations

import gc
import hashlib
import logging
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftkit.train.memory.joint_adapters import compile_with_joint_adapters
from ftkit.train.private_apis.torch import compile_failures, tag_compile_caches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

from ftkit.errors import one_line

log = logging.getLogger(__name__)


class CompiledForward:
    """A forward that is compiled as one graph (`fullgraph=True`).

    By default, torch breaks the graph: it compiles parts and silently runs the rest uncompiled, as slowly, and with as
    much memory, as without a compiler. Here that logs a warning, as does a forward that is called with too many shapes.
    """

    def __init__(self, forward: Callable[..., Any], name: str, fallback: Callable[..., Any] | None = None) -> None:
        """Compile `forward` at its first call; warnings call it `name`.

        Args:
            forward: what is called.
            name: of the forward.
            fallback: computes the same, and is called instead if `forward` can't be one graph. If None, `forward` is
                compiled in parts.
        """
        self._forward = forward
        self._name = name
        self._fallback = fallback
        self._failures = compile_failures()
        self._was_called = False
        self._compiled = torch.compile(forward, fullgraph=True, backend=compile_with_joint_adapters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled forward; if it can't be one graph, its fallback from then on."""
        try:
            if not self._was_called:
                self._was_called = True
                with _without_garbage_collection():
                    return self._compiled(*args, **kwargs)
            return self._compiled(*args, **kwargs)
        except self._failures as error:
            is_limit = isinstance(error, self._failures[1])
            reason = "It was recompiled too often (torch's recompile limit)." if is_limit else one_line(error)
            if self._fallback is None:
                _warn_once(f"{self._name} can't be compiled as one graph: it is slower and takes more memory", reason)
                self._compiled = torch.compile(self._forward, backend=compile_with_joint_adapters)
            else:
                _warn_once(f"{self._name} can't be compiled with its recomputation: the backward is slower", reason)
                self._compiled = self._fallback
        return self._compiled(*args, **kwargs)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while a layer is compiled: it takes a quarter of Dynamo's tracing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def tag_with_sources() -> None:
    """Have another version of ftkit compile anew.

    Keys of the compiler's caches have the traced graphs, but not the code behind some of their nodes: the gradients of
    custom operators, and policies of activation checkpointing.
    """
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    tag_compile_caches(hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest())


@cache
def _warn_once(message: str, reason: str) -> None:
    """Warn once, not for each of many equal layers."""
    log.warning("%s. %s", message, reason)
