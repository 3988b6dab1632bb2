"""Compile decoder layers, each as one graph, with a joint product for adapters of the same input."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import cache
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.nn import functional

from ftkit.errors import PrerequisiteError, one_line
from ftkit.train.private_apis.torch import (
    cache_autograd_functions,
    compile_failures,
    inductor,
    recompute_matmul_inputs,
    tag_compile_caches,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ftkit.config.training import TrainingPlan

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


# --- Adapters of layers with the same input (q, k, v; gate, up) --------------------------------------
#
# One product by all their `lora_A`: each is so narrow that its product takes no longer than reading the input, or than
# launching the kernel. The compiler differentiates the joint product, so the backward pass also reads the input once
# for all weight gradients, and adds one summand to the input's gradient. The product is formed in the graph that the
# compiler gets, where it is visible which layers read the same tensor. Inputs with dropout differ, and stay apart.


def compile_with_joint_adapters(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph by Inductor after joining its adapters; `backend` of `torch.compile`.

    Layers with adapters recompute the inputs of their matmuls in the backward pass, where element-wise operations made
    them (norms, activations). Only the adapters' gradients read them, so saving them costs a third of all activations
    for little arithmetic.
    """
    for module in graph.modules():  # selective checkpointing puts a layer into a graph of its own
        if isinstance(module, fx.GraphModule):
            _join(module.graph)
            module.recompile()
    has_adapters = any("lora_b" in node.name.lower() for node in graph.graph.find_nodes(op="placeholder"))
    with cache_autograd_functions(), recompute_matmul_inputs() if has_adapters else nullcontext():
        compiled: Callable[..., Any] = inductor()(graph, inputs)
    return compiled


def _join(graph: fx.Graph) -> None:
    products = defaultdict(list)
    for node in graph.nodes:
        if _multiplies_by_lora_a(node):
            products[node.args[0]].append(node)
    for inputs, nodes in products.items():
        if len(nodes) == 1:
            continue
        weights = [node.args[1] for node in nodes]
        ranks = [weight.meta["example_value"].shape[0] for weight in weights]
        with graph.inserting_before(nodes[0]):
            joint = graph.call_function(torch.cat, (weights,))
            product = graph.call_function(functional.linear, (inputs, joint))
            parts = graph.call_function(torch.split, (product, ranks, -1))
            outputs = [graph.call_function(getitem, (parts, index)) for index in range(len(nodes))]
        for node, output in zip(nodes, outputs, strict=True):
            node.replace_all_uses_with(output)
            graph.erase_node(node)


def _multiplies_by_lora_a(node: fx.Node) -> bool:
    """Return whether a node multiplies by a `lora_A` that is an input of the graph."""
    modules = node.meta.get("nn_module_stack", {})
    if node.target is not functional.linear or not any("lora_A" in path for path, _ in modules.values()):
        return False
    weight: Any = node.args[1]
    return bool(weight.op == "placeholder")
