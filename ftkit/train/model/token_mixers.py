"""Linear attention, state spaces, short convolutions: kernels of packages, which compiled layers call as operators.

transformers has a PyTorch function for each, and calls a package's kernel instead if it is installed. The compiler can
trace neither: the code that launches kernels breaks the graph, and some PyTorch functions loop over tokens or chunks,
so that their unrolled graph takes minutes to compile. In addition, with torch 2.11, transformers calls its own function
in compiled layers even if a kernel exists, because the compiler claims that the model is being exported.

So compiled layers call a custom operator, which the compiler does not trace. It saves its inputs, and its backward pass
recomputes the forward pass. This works for any function, and saves few activations.

Kernels of delta rules and convolutions are used only if a trial shows that they run here and compute the same as
PyTorch. Without a kernel, `packed_mixers` computes the gated delta rule and convolutions, and transformers the others.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ftkit.errors import one_line
from ftkit.train.model.attention import KERNEL_TOLERANCE, largest_difference
from ftkit.train.model.hf_model import text_part_of
from ftkit.train.model.packed_mixers import chunk_gated_delta_rule, convolve_documents
from ftkit.train.private_apis.transformers import KernelFunction, kernel_functions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftkit.train.private_apis.torch import Ctx
    from ftkit.train.world import World

log = logging.getLogger(__name__)

_Function = Callable[..., Any]  # computes the same as transformers' function, with the same arguments
_DELTA_RULE, _CONVOLUTION = "chunk_gated_delta_rule", "causal_conv1d_fn"
_DELTA_RULES = (_DELTA_RULE, "chunk_kda")
_OUTPUT_SHAPED_LIKE = dict.fromkeys(_DELTA_RULES, 2) | dict.fromkeys(
    (_CONVOLUTION, "mamba_chunk_scan_combined", "selective_scan_fn"), 0
)
"""Functions that compiled layers may call as operators, each with the index of the argument with the output's shape.
The output has the dtype of the first argument."""
_RETURNS_STATE = ("output_final_state", "return_final_states", "return_last_state")
"""Arguments that request a state in addition to the output; only generation needs it."""
_SEPARATES_DOCUMENTS = ("cu_seqlens", "seq_idx")
_CONVOLUTION_REACHES = 2**32
"""Elements that causal-conv1d 1.7.0 can address: its offsets are 32-bit unsigned integers (`index_t`)."""
_DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""Names of packages in package registries."""
_TEST_TOKENS = {"cpu": (70, 186), "cuda": (1030, 3066)}
"""Lengths of the documents on which kernels are tested; not multiples of the kernels' chunks of 64 tokens. Autotuned
kernels tune themselves on these, and training uses the result."""
_WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))
"""Versions of Triton, from the first to before the second, with which the gated delta rule's backward pass is wrong on
Hopper GPUs. fla 0.6.0 rejects them, but only after tuning its other kernels for 50 s (H200)."""


def choose_token_mixers(model: PreTrainedModel, world: World) -> list[str]:
    """Choose and log the implementations of a model's linear attention and convolutions. Collective.

    Returns:
        A line per function, in the order of the model's file; empty for models with attention only.
    """
    chosen = {}
    for function in kernel_functions(model):
        if function.name in _OUTPUT_SHAPED_LIKE:
            failures = world.gather_objects(_why_no_kernel(function, model, world.device))
            chosen[function.name] = _choose(function, next((one for one in failures if one is not None), None))
    for text, _ in chosen.values():
        log.info("%s", text)
    if any(is_slow for _, is_slow in chosen.values()):
        log.warning(
            "linear attention without a kernel is slow: install what is missing; images on 26.05 have "
            "flash-linear-attention"
        )
    return [text for text, _ in chosen.values()]


def _choose(function: KernelFunction, failure: str | None) -> tuple[str, bool]:
    """Replace a function; return a line for the log, and whether the replacement is a slow loop in PyTorch."""
    name, kernel, fallback, package = function.name, function.kernel, function.fallback, _package_of(function)
    if kernel is not None and failure is None:
        compute = _convolution(kernel, _CONVOLUTION_REACHES) if name == _CONVOLUTION else kernel
        _replace(function, compute, inspect.signature(kernel).parameters, is_traced=False)
        return f"{name}: {package} {_version_of(package)}", False
    accepted = {*inspect.signature(fallback).parameters, *_SEPARATES_DOCUMENTS}
    if name == _CONVOLUTION:
        _replace(function, _convolution(fallback), accepted, is_traced=True)
        return f"{name}: ftkit's in PyTorch, since {failure}", False
    if name == _DELTA_RULE:
        _replace(function, _delta_rule(fallback), accepted, is_traced=False)
        return f"{name}: ftkit's in PyTorch, which takes longer, since {failure}", False
    source = ast.parse(textwrap.dedent(inspect.getsource(fallback)))
    is_slow = any(isinstance(node, ast.For) for node in ast.walk(source))  # a compiler would unroll it
    _replace(function, _refusing_packs(function, package), accepted, is_traced=not is_slow)
    return f"{name}: transformers' in PyTorch, since {failure}", is_slow


def _refusing_packs(function: KernelFunction, package: str) -> _Function:
    """Wrap transformers' PyTorch function, which ignores document boundaries, so that it rejects packs."""

    @functools.wraps(function.fallback)
    def compute(*args: object, **kwargs: object) -> object:
        if any(kwargs.get(key) is not None for key in _SEPARATES_DOCUMENTS):
            raise ValueError(f"without a kernel of {package}, `{function.name}` can't keep packed documents apart")
        return function.fallback(*args, **kwargs)

    return compute


def _delta_rule(fallback: _Function) -> _Function:
    """Return the gated delta rule: ftkit's in training, transformers' with a state, in generation."""

    def compute(*args: Any, **kwargs: Any) -> object:
        has_state = kwargs.get("initial_state") is not None or kwargs.get("output_final_state")
        return (fallback if has_state else chunk_gated_delta_rule)(*args, **kwargs)

    return compute


def _convolution(function: _Function, reach: int = 0) -> _Function:
    """Return a causal convolution; for packs with more than `reach` elements, ftkit's.

    `reach` is what causal-conv1d's offsets can address. transformers' PyTorch function would mix packed documents.
    """

    def convolve(hidden_states: torch.Tensor, *args: Any, seq_idx: torch.Tensor | None = None, **kwargs: Any) -> object:
        if seq_idx is None:
            return function(hidden_states, *args, **kwargs)
        compute = function if hidden_states.numel() <= reach else convolve_documents
        return compute(hidden_states, *args, seq_idx=seq_idx, **kwargs)

    return convolve


# --- Trials of kernels ---------------------------------------------------------------------------


def _why_no_kernel(function: KernelFunction, model: PreTrainedModel, device: torch.device) -> str | None:
    """Return why a package's kernel can't be used on a device; None if it can."""
    package = _package_of(function)
    if importlib.util.find_spec(function.package) is None and function.kernel is None:
        return f"{package} is not installed"
    named, on = f"{package} {_version_of(package)}", _name(device)
    if function.kernel is None:
        try:
            importlib.import_module(function.package)
        except Exception as error:  # noqa: BLE001 - imports of packages for GPUs fail in many ways
            return f"{package} can't be imported: {type(error).__name__}: {one_line(error)}"
        return f"{named} does not have it"
    if (known := _known_failure(function, device)) is not None:
        return f"{named} {known}"
    try:
        difference = _difference(function, function.kernel, model, device)
    except Exception as error:  # noqa: BLE001 - each package has its own errors
        return f"{named} fails on {on}: {type(error).__name__}: {one_line(error)}"
    return f"{named} computes it wrongly on {on}: off by {difference:.0%}" if difference > KERNEL_TOLERANCE else None


def _known_failure(function: KernelFunction, device: torch.device) -> str | None:
    """Return why a kernel would fail, for failures that a trial finds slowly or not at all."""
    if torch.are_deterministic_algorithms_enabled():
        return "may not repeat, as training.deterministic asks"
    if function.name != _DELTA_RULE or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:  # noqa: PLR2004
        return None
    version = _version_of("triton")
    first, fixed = _WRONG_ON_HOPPER
    is_wrong = first <= tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < fixed
    if is_wrong and importlib.util.find_spec("tilelang") is None:
        return f"needs Triton 3.7.1 or newer, or tilelang, on {_name(device)}; here is Triton {version}"
    return None


def _package_of(function: KernelFunction) -> str:
    return _DISTRIBUTIONS.get(function.package, function.package)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def _difference(function: KernelFunction, kernel: _Function, model: PreTrainedModel, device: torch.device) -> float:
    """Return the largest difference of a kernel from PyTorch on two packed documents, relative to PyTorch's norm.

    Compare outputs and gradients. Return zero for kernels without a test.
    """
    lengths = _TEST_TOKENS[device.type]
    if function.name == _CONVOLUTION:
        tensors, options = _convolution_inputs(lengths, device)
    elif function.name in _DELTA_RULES:
        tensors, options = _delta_rule_inputs(function.name, model, lengths, device)
    else:
        return 0.0
    own: dict[str, _Function] = {_CONVOLUTION: convolve_documents, _DELTA_RULE: chunk_gated_delta_rule}
    if function.name in own:
        expected = _output(own[function.name](*tensors, **options))
    else:
        documents = zip(*(torch.split(one, list(lengths), dim=1) for one in tensors), strict=True)
        parts = [_output(function.fallback(*each, use_qk_l2norm_in_kernel=True)) for each in documents]
        expected = torch.cat(parts, dim=1)
    return largest_difference(_output(kernel(*tensors, **options)), expected, tensors)


def _output(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _delta_rule_inputs(
    name: str, model: PreTrainedModel, lengths: tuple[int, ...], device: torch.device
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return inputs with the model's heads, so that training reuses the kernels compiled for them."""
    config, length = text_part_of(model.config), sum(lengths)
    key_width, value_width = (getattr(config, f"linear_{of}_head_dim", None) or 64 for of in ("key", "value"))
    heads = getattr(config, "linear_num_value_heads", None) or 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (
        torch.randn(1, length, heads, width, dtype=dtype, device=device)
        for width in (key_width, key_width, value_width)
    )
    decays = (1, length, heads, key_width) if name != _DELTA_RULE else (1, length, heads)
    decay = -torch.rand(decays, dtype=torch.float32, device=device)
    beta = torch.rand(1, length, heads, dtype=dtype, device=device)
    cu_seqlens = torch.tensor([0, lengths[0], length], dtype=torch.int32, device=device)
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": cu_seqlens}
    return [one.requires_grad_() for one in (query, key, value, decay, beta)], options


def _convolution_inputs(lengths: tuple[int, ...], device: torch.device) -> tuple[list[torch.Tensor], dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = ((1, 64, sum(lengths)), (64, 4), (64,))
    tensors = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
    documents = [torch.full((1, length), index) for index, length in enumerate(lengths)]
    return tensors, {"activation": "silu", "seq_idx": torch.cat(documents, dim=1).int().to(device)}


# --- Calls from compiled layers ------------------------------------------------------------------

_computed: dict[str, _Function] = {}  # the implementation of each function, by its module and name


def _replace(function: KernelFunction, compute: _Function, parameters: Iterable[str], *, is_traced: bool) -> None:
    """Make a model call `compute` instead of a function; compiled layers call an operator unless it `is_traced`.

    Keyword arguments that are not in `parameters` are dropped, as in transformers.
    """
    accepted = frozenset(parameters)
    key = f"{function.module}.{function.attribute}"
    index = _OUTPUT_SHAPED_LIKE[function.name]
    _computed[key] = compute

    @functools.wraps(function.original)
    def call(*args: object, **kwargs: Any) -> object:
        kwargs = {name: value for name, value in kwargs.items() if name in accepted}
        if is_traced or not torch.compiler.is_dynamo_compiling():
            return compute(*args, **kwargs)
        output = _call_operator(key, index, args, kwargs)
        returns_state = function.name in _DELTA_RULES or any(kwargs.get(name) for name in _RETURNS_STATE)
        return (output, None) if returns_state else output

    function.replace(call)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _call_operator(key: str, index: int, args: tuple[object, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Call the operator with the tensors among the arguments, and with all others as JSON.

    The compiler caches graphs on disk for other processes, where their constants must have the same meaning.
    """
    tensors: list[torch.Tensor] = []

    def described(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return [value]
        tensors.append(value)
        return len(tensors) - 1

    call = [key, [described(value) for value in args], {name: described(value) for name, value in kwargs.items()}]
    result: torch.Tensor = torch.ops.ftkit.token_mixer(tensors, index, json.dumps(call))
    return result


def _compute(tensors: Sequence[torch.Tensor], call: str) -> torch.Tensor:
    key, args, kwargs = json.loads(call)

    def value(described: list[object] | int) -> object:
        return described[0] if isinstance(described, list) else tensors[described]

    result = _computed[key](*map(value, args), **{name: value(each) for name, each in kwargs.items()})
    return _output(result).to(tensors[0].dtype).contiguous()


# Not `custom_op`, which disables autograd in the operator: the backward pass needs it.
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

    The others keep their identity: fla caches values derived from `cu_seqlens`, whose computation is a host sync.
    """
    inputs = [one.detach().requires_grad_() if need else one for one, need in zip(tensors, needed, strict=True)]
    wanted = [one for one, need in zip(inputs, needed, strict=True) if need]
    with torch.enable_grad():
        output = _compute(inputs, call)
    gradients = torch.autograd.grad(output, wanted, gradient, allow_unused=True, materialize_grads=True)
    return [of_one.contiguous() for of_one in gradients]


@torch.library.register_fake("ftkit::token_mixer")  # type: ignore[untyped-decorator]
def _(tensors: list[torch.Tensor], index: int, _: str) -> torch.Tensor:
    return tensors[0].new_empty(tensors[index].shape)


@torch.library.register_fake("ftkit::token_mixer_backward")  # type: ignore[untyped-decorator]
def _(_: torch.Tensor, tensors: list[torch.Tensor], needed: list[bool], __: str) -> list[torch.Tensor]:
    return [one.new_empty(one.shape) for one, need in zip(tensors, needed, strict=True) if need]


def _save_inputs(ctx: Ctx, inputs: tuple[list[torch.Tensor], int, str], output: torch.Tensor) -> None:
    del output
    tensors, _, ctx.call = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[list[torch.Tensor | None], None, None]:
    needed, tensors = list(ctx.needs_input_grad[0]), list(ctx.saved_tensors)
    gradients = iter(torch.ops.ftkit.token_mixer_backward(gradient.contiguous(), tensors, needed, ctx.call))
    return [next(gradients) if need else None for need in needed], None, None


torch.library.register_autograd("ftkit::token_mixer", _backward, setup_context=_save_inputs)
