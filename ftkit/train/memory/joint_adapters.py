"""Adapters of layers with the same input (q, k, v; gate, up) in compiled layers: one product by all their `lora_A`.

Each `lora_A` is so narrow that its product takes no longer than reading the input, or than launching the kernel. The
compiler differentiates the joint product, so the backward pass also reads the input once for all weight gradients, and
adds one summand to the input's gradient instead of one for each adapter.

The joint product is formed in the graph that the compiler gets, where it is visible which layers read the same tensor:
modules call each other in the order of each family's code. Inputs with dropout differ, so they are not joined.

Layers with adapters recompute the inputs of their matmuls in the backward pass, where element-wise operations made them
(norms, activations). Only the adapters' gradients read them, so saving them costs a third of all activations for little
arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.nn import functional

from ftkit.train.private_apis.torch import cache_autograd_functions, inductor, recompute_matmul_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def compile_with_joint_adapters(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph by Inductor after joining its adapters; `backend` of `torch.compile`."""
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
