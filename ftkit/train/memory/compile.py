"""Compile decoder layers, each as one graph; otherwise log a warning."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftkit.train.memory.joint_adapters import compile_with_joint_adapters
from ftkit.train.private_apis.torch import compile_failures, tag_compile_caches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.training import TrainingPlan

from ftkit.errors import PrerequisiteError, one_line

log = logging.getLogger(__name__)


Forward = Callable[..., Any]
"""The forward of a layer, as its family calls it."""


class CompiledForward:
    """A forward that is compiled as one graph (`fullgraph=True`).

    By default, torch breaks the graph: it compiles parts and silently runs the rest uncompiled, as slowly, and with as
    much memory, as without a compiler. Here that logs a warning, as does a forward that is called with too many shapes.
    """

    def __init__(self, forward: Forward, name: str, fallback: Forward | None = None) -> None:
        """Compile `forward` at its first call; warnings call it `name`.

        If it can't be one graph, `fallback`, which computes the same, is called instead; without one, `forward` is
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


def compiles(training: TrainingPlan, device: torch.device) -> bool:
    """Return whether layers are compiled: on GPUs unless the recipe disables it, on CPUs only if it enables it.

    Raises:
        PrerequisiteError: torch can't compile for CPUs here.
    """
    if training.compile == "layers" and device.type == "cpu":
        _check_cpu_compiler_paths()
    return training.compile == "layers" or (training.compile == "auto" and device.type == "cuda")


def _check_cpu_compiler_paths() -> None:
    """Check that torch can compile for CPUs here: it does not quote all paths in the command line of the C++ compiler.

    Raises:
        PrerequisiteError: a path has spaces, or other characters of the shell.
    """
    caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    for path, fix in (
        (str(Path(torch.__file__).parent), "move the virtual environment to a path without spaces"),
        (sys.base_prefix, "use a Python in a path without spaces"),
        (caches, "set TORCHINDUCTOR_CACHE_DIR to a folder without spaces in its path"),
    ):
        if not _is_one_word(path):
            raise PrerequisiteError(
                f"training.compile=layers can't compile for CPUs: a path has spaces or special characters: {path}",
                meaning="torch passes it to the C++ compiler without quotes, so the compiler finds nothing there",
                fix=f"set training.compile=auto, which compiles on GPUs only; or {fix}",
            )


def _is_one_word(path: str) -> bool:
    try:
        return shlex.split(path) == [path]
    except ValueError:  # a quote without its other half
        return False


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
