"""Linear attention, state spaces, short convolutions: kernels of packages, which compiled layers call as operators.

transformers has a function in PyTorch for each, and calls the kernel of a package instead where one is installed.
Compilers can trace neither: kernels are launched by code that breaks the graph, and some functions in PyTorch have
loops over tokens or chunks of them, whose unrolled graph takes minutes to compile. Besides, torch 2.11 makes
transformers call its own function in compiled layers although a kernel is there: its compiler says that the model is
being exported.

So compiled layers call an operator that the compiler does not look into. It saves its inputs, and its backward pass
computes the forward pass again: any function can be called like this, and few activations are saved.
"""

from __future__ import annotations

import functools
import inspect
import json
import textwrap
from ast import For, parse, walk
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ftkit.train.model.packed_mixers import (
    CONVOLUTION,
    DELTA_RULE,
    DELTA_RULES,
    chunk_gated_delta_rule,
    convolve_documents,
    package_of,
    version_of,
    why_no_kernel,
)
from ftkit.train.private_apis.transformers import KernelFunction, kernel_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from transformers import PreTrainedModel

    from ftkit.train.private_apis.torch import Ctx
    from ftkit.train.world import World

_OUTPUT_SHAPED_LIKE = dict.fromkeys(DELTA_RULES, 2) | {
    CONVOLUTION: 0,
    "mamba_chunk_scan_combined": 0,
    "selective_scan_fn": 0,
}
"""Functions that compiled layers may call as operators, each with the argument that has the shape of its output. The
output's dtype is that of the first argument."""
_Function: TypeAlias = "Callable[..., Any]"
"""Computes what transformers' function of a name computes, from the same arguments."""
_RETURNS_STATE = ("output_final_state", "return_final_states", "return_last_state")
"""Arguments that ask for a state besides the output; generation alone needs it."""
_SEPARATES_DOCUMENTS = ("cu_seqlens", "seq_idx")
_CONVOLUTION_REACHES = 2**32
"""Elements that causal-conv1d 1.7.0 can tell apart: its offsets are 32-bit unsigned integers (`index_t`)."""


@dataclass(frozen=True)
class MixerChoice:
    """What computes a function of a model.

    Attributes:
        text: what, and why, for the log.
        is_slow: whether it is a loop in PyTorch over tokens or chunks of them.
    """

    text: str
    is_slow: bool = False


def choose_token_mixers(model: PreTrainedModel, world: World) -> list[MixerChoice]:
    """Let a model compute linear attention and convolutions by kernels that run here. Collective.

    Returns:
        What computes each function, in the order of the model's file; nothing for models with attention only.
    """
    choices = {}
    for function in kernel_functions(model):
        if function.name not in _OUTPUT_SHAPED_LIKE:
            continue
        failures = world.gather_objects(why_no_kernel(function, model, world.device))
        failure = next((one for one in failures if one is not None), None)
        choices[function.name] = _choose(function, failure)
    return list(choices.values())


def _choose(function: KernelFunction, failure: str | None) -> MixerChoice:
    """Replace a function by its kernel, or by what computes it if the kernel can't be used."""
    kernel, package = function.kernel, package_of(function)
    if kernel is not None and failure is None:
        compute = _convolution(kernel, _CONVOLUTION_REACHES) if function.name == CONVOLUTION else kernel
        _replace(function, compute, inspect.signature(kernel).parameters, is_traced=False)
        return MixerChoice(f"{function.name}: {package} {version_of(package)}")
    accepted = {*inspect.signature(function.fallback).parameters, *_SEPARATES_DOCUMENTS}
    if function.name == CONVOLUTION:
        _replace(function, _convolution(function.fallback), accepted, is_traced=True)
        return MixerChoice(f"{function.name}: ftkit's in PyTorch, since {failure}")
    if function.name == DELTA_RULE:
        _replace(function, _delta_rule(function.fallback), accepted, is_traced=False)
        return MixerChoice(f"{function.name}: ftkit's in PyTorch, which takes longer, since {failure}")
    is_slow = _has_loop(function.fallback)
    _replace(function, _refusing_packs(function, package), accepted, is_traced=not is_slow)
    return MixerChoice(f"{function.name}: transformers' in PyTorch, since {failure}", is_slow)


def _has_loop(function: _Function) -> bool:
    """Tell whether a function has a loop, which a compiler would unroll."""
    source = textwrap.dedent(inspect.getsource(function))
    return any(isinstance(node, For) for node in walk(parse(source)))


def _refusing_packs(function: KernelFunction, package: str) -> _Function:
    """Wrap transformers' function in PyTorch, which ignores where packed documents end."""

    @functools.wraps(function.fallback)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(key) is not None for key in _SEPARATES_DOCUMENTS):
            raise ValueError(f"without a kernel of {package}, `{function.name}` can't keep packed documents apart")
        return function.fallback(*args, **kwargs)

    return compute


def _delta_rule(fallback: _Function) -> _Function:
    """Return the gated delta rule that ftkit computes in training, and transformers with a state, in generation."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        has_state = kwargs.get("initial_state") is not None or kwargs.get("output_final_state")
        return (fallback if has_state else chunk_gated_delta_rule)(*args, **kwargs)

    return compute


def _convolution(function: _Function, reach: int = 0) -> _Function:
    """Return a causal convolution; that of packs is ftkit's from more than `reach` elements on.

    causal-conv1d's offsets reach as far. transformers' in PyTorch would reach into the document before.
    """

    def convolve(hidden_states: torch.Tensor, *args: Any, seq_idx: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if seq_idx is None:
            return function(hidden_states, *args, **kwargs)
        compute = function if hidden_states.numel() <= reach else convolve_documents
        return compute(hidden_states, *args, seq_idx=seq_idx, **kwargs)

    return convolve


# Calls from compiled layers

_computed: dict[str, _Function] = {}
"""What computes each function, by the names of its file and of itself."""


def _replace(function: KernelFunction, compute: _Function, parameters: Iterable[str], *, is_traced: bool) -> None:
    """Let a model call `compute` instead of a function: in compiled layers as an operator, unless it `is_traced`.

    Keyword arguments that are not among its parameters are left out, as transformers does.
    """
    accepted = frozenset(parameters)
    key = f"{function.module}.{function.attribute}"
    index = _OUTPUT_SHAPED_LIKE[function.name]
    _computed[key] = compute

    @functools.wraps(function.original)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name in accepted}
        if is_traced or not torch.compiler.is_dynamo_compiling():
            return compute(*args, **kwargs)
        output = _call_operator(key, index, args, kwargs)
        returns_state = function.name in DELTA_RULES or any(kwargs.get(name) for name in _RETURNS_STATE)
        return (output, None) if returns_state else output

    function.replace(call)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _call_operator(key: str, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Call the operator: on the tensors among the arguments, and on all others as JSON.

    The compiler saves graphs in files, which other processes read: their constants must mean the same there.
    """
    tensors: list[torch.Tensor] = []

    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return [value]
        tensors.append(value)
        return len(tensors) - 1

    call = [key, [described(value) for value in args], {name: described(value) for name, value in kwargs.items()}]
    result: torch.Tensor = torch.ops.ftkit.token_mixer(tensors, index, json.dumps(call))
    return result


def _compute(tensors: Sequence[torch.Tensor], call: str) -> torch.Tensor:
    key, args, kwargs = json.loads(call)

    def value(described: Any) -> Any:
        return described[0] if isinstance(described, list) else tensors[described]

    result = _computed[key](*map(value, args), **{name: value(each) for name, each in kwargs.items()})
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output.to(tensors[0].dtype).contiguous()


# Not `custom_op`: it excludes autograd while it computes, which the backward pass needs.
torch.library.define("ftkit::token_mixer", "(Tensor[] tensors, int index, str call) -> Tensor")
torch.library.define(
    "ftkit::token_mixer_backward", "(Tensor gradient, Tensor[] tensors, bool[] needed, str call) -> Tensor[]"
)


@torch.library.impl("ftkit::token_mixer", ("cpu", "cuda"))
def _forward(tensors: list[torch.Tensor], _: int, call: str) -> torch.Tensor:
    with torch.no_grad():
        return _compute(tensors, call)


@torch.library.impl("ftkit::token_mixer_backward", ("cpu", "cuda"))
def _compute_again(
    gradient: torch.Tensor, tensors: list[torch.Tensor], needed: list[bool], call: str
) -> list[torch.Tensor]:
    """Return the gradients of the tensors that need them.

    The others keep their identity: fla remembers what it computed from `cu_seqlens`, which waits for the GPU.
    """
    inputs = [one.detach().requires_grad_() if need else one for one, need in zip(tensors, needed, strict=True)]
    wanted = [one for one, need in zip(inputs, needed, strict=True) if need]
    with torch.enable_grad():
        output = _compute(inputs, call)
    gradients = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
    return [
        torch.zeros_like(one) if of_one is None else of_one.contiguous()
        for one, of_one in zip(wanted, gradients, strict=True)
    ]


@torch.library.register_fake("ftkit::token_mixer")  # type: ignore[untyped-decorator]
def _(tensors: list[torch.Tensor], index: int, _: str) -> torch.Tensor:
    return tensors[0].new_empty(tensors[index].shape)


@torch.library.register_fake("ftkit::token_mixer_backward")  # type: ignore[untyped-decorator]
def _(_: torch.Tensor, tensors: list[torch.Tensor], needed: list[bool], __: str) -> list[torch.Tensor]:
    wanted = (one for one, need in zip(tensors, needed, strict=True) if need)
    return [one.new_empty(one.shape) for one in wanted]


def _save_inputs(ctx: Ctx, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    tensors, _, ctx.call = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[0])
    gradients = iter(
        torch.ops.ftkit.token_mixer_backward(gradient.contiguous(), list(ctx.saved_tensors), needed, ctx.call)
    )
    return [next(gradients) if need else None for need in needed], None, None


torch.library.register_autograd("ftkit::token_mixer", _backward, setup_context=_save_inputs)
