"""Compile each decoder layer as one graph, with a joint matmul for adapters with the same input."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch.nn import functional

from ftkit.errors import one_line
from ftkit.train.private_apis.torch import (
    VIEWS,
    cache_autograd_functions,
    compile_failures,
    inductor,
    recompute_matmul_inputs,
    tag_compile_caches,
)

if TYPE_CHECKING:
    from ftkit.config.training import TrainingPlan

log = logging.getLogger(__name__)

WIDE = 256
"""Minimum inner dimension of a compute-bound bf16 matmul. A narrower one is memory-bound, like element-wise operations,
so recomputing it is cheap."""
Forward = Callable[..., object]  # the forward of a layer, as its family calls it


class CompiledForward:
    """A forward that is compiled as one graph (`fullgraph=True`).

    By default, torch breaks the graph: it compiles parts and silently runs the rest in eager mode, which is slower and
    takes more memory. Here, graph breaks and too many recompilations log a warning.
    """

    def __init__(self, forward: Forward, name: str, fallback: Forward | None = None) -> None:
        """Compile `forward` at its first call; `name` is its name in warnings.

        If it can't be one graph, `fallback` is called instead, which must compute the same. Without a fallback,
        `forward` is compiled in parts.
        """
        self._forward = forward
        self._name = name
        self._fallback = fallback
        self._failures = compile_failures()
        self._was_called = False
        self._compiled = torch.compile(forward, fullgraph=True, backend=compile_with_joint_adapters)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the compiled forward; if it can't be one graph, use the fallback from then on."""
        pauses_collection = gc.isenabled() and not self._was_called
        self._was_called = True
        if pauses_collection:  # garbage collection takes a quarter of Dynamo's tracing time
            gc.disable()
        try:
            return self._compiled(*args, **kwargs)
        except self._failures as error:
            is_limit = isinstance(error, self._failures[1])
            reason = "It was recompiled too often (torch's recompile limit)." if is_limit else one_line(error)
            if self._fallback is None:
                warn_once(f"{self._name} can't be compiled as one graph: it is slower and takes more memory", reason)
                self._compiled = torch.compile(self._forward, backend=compile_with_joint_adapters)
            else:
                warn_once(f"{self._name} can't be compiled with its recomputation: the backward is slower", reason)
                self._compiled = self._fallback
        finally:
            if pauses_collection:
                gc.enable()
        return self._compiled(*args, **kwargs)


def compiles(training: TrainingPlan, device: torch.device) -> bool:
    """Return whether layers are compiled: on GPUs unless the recipe disables it, on CPUs only if it enables it."""
    return training.compile == "layers" or (training.compile == "auto" and device.type == "cuda")


@cache
def tag_with_sources() -> None:
    """Invalidate the compiler's caches for another version of ftkit.

    The cache keys have the traced graphs, but not the code behind some of their nodes: the backward of custom
    operators, and policies of activation checkpointing.
    """
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    tag_compile_caches(hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest())


@cache
def warn_once(message: str, reason: str) -> None:
    """Warn once instead of once per layer."""
    log.warning("%s. %s", message, reason)


# --- Adapters of layers with the same input (q, k, v; gate, up) --------------------------------------
#
# One matmul with all their `lora_A` replaces one each. These are so narrow that each takes no longer than reading the
# input, or launching the kernel (3.9% of a step of Gemma 3 12B at 2,048 tokens on an H200). The compiler differentiates
# the joint matmul, so the backward pass also reads the input once for all weight gradients. Dropout keeps them apart.


def compile_with_joint_adapters(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
    """Compile a graph with Inductor after joining its adapters; a `backend` for `torch.compile`.

    The backward pass of layers with adapters recomputes the inputs of matmuls that come from element-wise operations
    (norms, activations). Only the adapters' gradients read them, so saving them would cost a third of all activations
    to avoid little arithmetic.
    """
    parts = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    for module in parts:  # selective checkpointing puts a layer into a nested graph
        _join(module.graph)
        module.recompile()
    dequantizes = any("nf4_matrix" in str(node.target) for module in parts for node in module.graph.nodes)
    has_adapters = any("lora_b" in node.name.lower() for node in graph.graph.find_nodes(op="placeholder"))
    with cache_autograd_functions(), recompute_matmul_inputs() if has_adapters else nullcontext():
        return inductor(_add_in_place, makes_matrices=dequantizes)(graph, inputs)


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


# --- Adapters' products, added in place in the backward pass ------------------------------------------
#
# The compiler adds the outputs of a layer and its adapter where it reads the sum, in fp32, and keeps both until then:
# in a backward pass, six tensors of the widest size instead of three. There, the adapter's matmul adds to the layer's
# output. The forward pass keeps the sum in fp32: rounded to bf16, it would lose an adapter's first changes (Llama 3 8B,
# loss of 12 steps at 1e-4: from 12.574 to 12.385; rounded, to 12.485, as with Unsloth).

_OPERATORS = torch.library.Library("ftkit", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATORS.define("add_product_(Tensor(a!) sums, Tensor left, Tensor right) -> ()")  # type: ignore[no-untyped-call]
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@torch.library.impl(_OPERATORS, "add_product_", "CompositeExplicitAutograd")
def _add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    sums.addmm_(left, right)


def _add_in_place(graph: fx.Graph) -> None:
    """Replace sums of a matmul and one with a narrow inner dimension in a backward graph; nothing else reads them."""
    if not any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder")):
        return
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        terms = [_only_used_here(each) for each in node.args]
        pairs = [pair for pair in (terms, terms[::-1]) if _can_add_to(*pair)]
        if not pairs:
            continue
        total, product = cast("list[fx.Node]", pairs[0])
        with graph.inserting_before(node):
            graph.call_function(torch.ops.ftkit.add_product_.default, (total, *product.args))
            shown = graph.call_function(torch.ops.aten.reshape.default, (total, list(node.meta["val"].shape)))
        shown.meta = dict(node.meta)
        node.replace_all_uses_with(shown)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _can_add_to(total: fx.Node | None, product: fx.Node | None) -> bool:
    if total is None or product is None or total.target not in _MATMULS or product.target is not _MATMULS[0]:
        return False
    kept, added = total.meta["val"], product.meta["val"]
    width = product.all_input_nodes[-1].meta["val"].shape[0]  # may be symbolic
    return isinstance(width, int) and width < WIDE and (kept.shape, kept.dtype) == (added.shape, added.dtype)


def _only_used_here(node: object) -> fx.Node | None:
    """Return the node whose result is shown by views, or by none, if nothing else reads it."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target not in VIEWS:
            return node
        node = node.args[0]
    return None
