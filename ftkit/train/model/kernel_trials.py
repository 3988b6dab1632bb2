"""Kernels of packages for linear attention and convolutions: whether they run here, and compute what PyTorch does."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import re
from typing import TYPE_CHECKING, Any

import torch

from ftkit.errors import one_line
from ftkit.train.model.packed_mixers import chunk_gated_delta_rule, convolve_documents

if TYPE_CHECKING:
    from torch import nn

    from ftkit.train.private_apis.transformers import KernelFunction

DELTA_RULE, CONVOLUTION = "chunk_gated_delta_rule", "causal_conv1d_fn"
DELTA_RULES = (DELTA_RULE, "chunk_kda")

_DISTRIBUTIONS = {
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
}
"""Names of packages in package registries."""
_TOLERANCE = 0.05
"""Largest difference of outputs and gradients, relative to their norm, that rounding in bf16 explains."""
_TEST_TOKENS = {"cpu": (70, 186), "cuda": (1030, 3066)}
"""Lengths of the documents on which kernels are tested: not multiples of a kernel's chunks of 64 tokens. Kernels that
tune themselves at their first call do it on these, and training uses the result."""
_HOPPER = 9
_WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))
"""Versions of Triton, from the first to before the second, with which fla 0.6.0 refuses the backward pass of the gated
delta rule on Hopper GPUs, whose results would be wrong: after it has tuned its other kernels, for 50 s on an H200."""


def package_of(function: KernelFunction) -> str:
    """Return the name of a kernel's package in package registries."""
    return _DISTRIBUTIONS.get(function.package, function.package)


def why_no_kernel(function: KernelFunction, model: nn.Module, device: torch.device) -> str | None:
    """Return why a package's kernel can't be used on a device; None if it can."""
    package = package_of(function)
    if function.kernel is None:
        return _why_not_found(function)
    if (known := _known_failure(function, device)) is not None:
        return f"{package} {version_of(package)} {known}"
    try:
        difference = _difference(function, model, device)
    except Exception as error:  # noqa: BLE001 - each package has its own errors
        return f"{package} {version_of(package)} fails on {_name(device)}: {type(error).__name__}: {one_line(error)}"
    if difference > _TOLERANCE:
        return f"{package} {version_of(package)} computes it wrongly on {_name(device)}: off by {difference:.0%}"
    return None


def _why_not_found(function: KernelFunction) -> str:
    """Return why transformers did not find a kernel."""
    package = package_of(function)
    if importlib.util.find_spec(function.package) is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(function.package)
    except Exception as error:  # noqa: BLE001 - imports of packages for GPUs fail in many ways
        return f"{package} can't be imported: {type(error).__name__}: {one_line(error)}"
    return f"{package} {version_of(package)} does not have it"


def _known_failure(function: KernelFunction, device: torch.device) -> str | None:
    """Return why a kernel would fail, for failures that take long to find out."""
    first, fixed = _WRONG_ON_HOPPER
    if (
        function.name == DELTA_RULE
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == _HOPPER
        and first <= _triton_version() < fixed
        and importlib.util.find_spec("tilelang") is None
    ):
        return f"needs Triton 3.7.1 or newer, or tilelang, on {_name(device)}; here is Triton {version_of('triton')}"
    return None


def _triton_version() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version_of("triton"))[:3])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _difference(function: KernelFunction, model: nn.Module, device: torch.device) -> float:
    """Return the largest difference of a kernel from PyTorch on two packed documents, relative to its norm.

    Of outputs and gradients. Zero for kernels that are not tested.
    """
    if function.name in DELTA_RULES:
        tensors, options = _delta_rule_inputs(function.name, model, device)
    elif function.name == CONVOLUTION:
        tensors, options = _convolution_inputs(device)
    else:
        return 0.0
    kernel: Any = function.kernel
    computed = _first(kernel(*tensors, **options))
    expected = _expected(function, tensors, options)
    pairs = [(computed, expected)]
    gradient = torch.randn_like(expected)
    of_each = [torch.autograd.grad(one, tensors, gradient) for one in (computed, expected)]
    pairs += zip(*of_each, strict=True)
    ratios = [float(((one - other).float().norm() / other.float().norm()).detach()) for one, other in pairs]
    return math.inf if any(math.isnan(ratio) for ratio in ratios) else max(ratios)


def _expected(function: KernelFunction, tensors: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """Return what PyTorch computes."""
    if function.name == CONVOLUTION:
        hidden_states, weight, bias = tensors
        return convolve_documents(hidden_states, weight, bias, **options)
    if function.name == DELTA_RULE:
        query, key, value, decay, beta = tensors
        return _first(chunk_gated_delta_rule(query, key, value, decay, beta, **options))
    parts = zip(*(torch.split(one, list(_TEST_TOKENS[tensors[0].device.type]), dim=1) for one in tensors), strict=True)
    return torch.cat([_first(function.fallback(*part, use_qk_l2norm_in_kernel=True)) for part in parts], dim=1)


def _first(result: Any) -> torch.Tensor:
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _delta_rule_inputs(name: str, model: Any, device: torch.device) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return inputs with the model's heads: training reuses the kernels that are compiled for them."""
    config, lengths = model.config, _TEST_TOKENS[device.type]
    length = sum(lengths)
    key_width, value_width = (getattr(config, f"linear_{of}_head_dim", None) or 64 for of in ("key", "value"))
    heads = getattr(config, "linear_num_value_heads", None) or 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (
        torch.randn(1, length, heads, width, dtype=dtype, device=device)
        for width in (key_width, key_width, value_width)
    )
    decays = (1, length, heads, key_width) if name == "chunk_kda" else (1, length, heads)
    decay = -torch.rand(decays, dtype=torch.float32, device=device)
    beta = torch.rand(1, length, heads, dtype=dtype, device=device)
    tensors = [one.requires_grad_() for one in (query, key, value, decay, beta)]
    cu_seqlens = torch.tensor([0, lengths[0], length], dtype=torch.int32, device=device)
    return tensors, {"use_qk_l2norm_in_kernel": True, "cu_seqlens": cu_seqlens}


def _convolution_inputs(device: torch.device) -> tuple[list[torch.Tensor], dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = _TEST_TOKENS[device.type]
    shapes = ((1, 64, sum(lengths)), (64, 4), (64,))
    tensors = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
    documents = [torch.full((1, length), index) for index, length in enumerate(lengths)]
    return tensors, {"activation": "silu", "seq_idx": torch.cat(documents, dim=1).int().to(device)}
