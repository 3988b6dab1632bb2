"""The gated delta rule and short convolutions on packed documents: in PyTorch, and trials of packages' kernels.

A trial finds out whether a kernel runs on this device and computes what PyTorch does. Where none does, PyTorch computes
the gated delta rule (Yang et al. 2024). With each token, the state of a head, [K, V], decays, and learns the token's
value for its key. Within chunks of tokens, matmuls compute all tokens at once (the UT transform of that paper). From
chunk to chunk, the state changes linearly, S' = A S + B, so groups of chunks are composed side by side, and only the
groups follow each other: about 2 sqrt(n) steps for n chunks, instead of n.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from ftkit.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftkit.train.private_apis.transformers import KernelFunction


CHUNK = 64
_EPSILON = 1e-6


def chunk_gated_delta_rule(  # noqa: PLR0913, PLR0917 - the interface is transformers'
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,  # noqa: FBT001, FBT002
    cu_seqlens: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the outputs, [B, T, H, V], in the dtype of the query; computed in fp32.

    Args:
        query: [B, T, G, K], of which each head serves H / G heads.
        key: as the query.
        value: [B, T, H, V].
        g: logarithms of the decay, [B, T, H].
        beta: [B, T, H].
        use_qk_l2norm_in_kernel: normalize queries and keys.
        cu_seqlens: int [D + 1], offsets of documents, if B is 1; None if each row is a document.
    """
    length, heads = value.shape[1:3]
    shared = heads // key.shape[2]
    q, k, v, decay, rate = (one.float().movedim(2, 1) for one in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + _EPSILON) for one in (q, k))
    q, k = ((one if shared == 1 else one.repeat_interleave(shared, dim=1)) for one in (q, k))
    q = q * k.shape[-1] ** -0.5

    places = torch.arange(length, device=value.device)
    document = torch.zeros_like(places) if cu_seqlens is None else torch.bucketize(places, cu_seqlens, right=True)
    padding = -length % CHUNK
    q, k, v = (_divided(functional.pad(one, (0, 0, 0, padding)), CHUNK) for one in (q, k, v))
    decay, rate = (_divided(functional.pad(one, (0, padding)), CHUNK) for one in (decay, rate))
    document = functional.pad(document, (0, padding), value=-1).view(-1, CHUNK)

    output = _attend(q, k, v, decay, rate[..., None], document)
    return output.flatten(2, 3)[:, :, :length].movedim(1, 2).to(query.dtype), None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, document: torch.Tensor
) -> torch.Tensor:
    """Compute outputs, [B, H, N, C, V], of N chunks of C tokens.

    Args:
        q: [B, H, N, C, K].
        k: as `q`.
        v: [B, H, N, C, V].
        decay: logarithms, [B, H, N, C].
        rate: [B, H, N, C, 1].
        document: of each token, [N, C].
    """
    last = document[:, -1]
    before = functional.pad(last[:-1], (1, 0), value=-2)
    continues = (document == before[:, None]).unsqueeze(-1)  # tokens of the document in which the chunk before ended
    remains = (document == last[:, None]).unsqueeze(-1)  # tokens of the document in which the chunk ends

    is_visible = (document[:, :, None] == document[:, None]).tril()
    # Sums of decays between two tokens, from their terms: as the difference of two sums from the first token, they and
    # their gradients would lose digits to cancellation.
    between = decay[..., None].expand(*decay.shape, decay.shape[-1]).tril(-1).cumsum(-2)
    weights = between.masked_fill(~is_visible, -math.inf).exp()
    total = decay.cumsum(-1)
    since_begin = total.exp().unsqueeze(-1) * continues
    until_end = between[..., -1, :].exp().unsqueeze(-1) * remains

    learned = rate * k
    system = (learned @ k.mT) * weights
    right = torch.cat([rate * v, learned * since_begin], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    kept = (k * until_end).mT
    passes = total[..., -1].exp()[..., None, None] * (last == before)[:, None, None]
    transition = passes * torch.eye(k.shape[-1], device=k.device) - kept @ read
    states = _states_before(transition, kept @ new)
    output: torch.Tensor = (q * since_begin) @ states + ((q @ k.mT) * weights) @ (new - read @ states)
    return output


def _divided(values: torch.Tensor, size: int) -> torch.Tensor:
    """Divide the third dimension into parts of a size: [B, H, T, …] to [B, H, T / size, size, …]."""
    return values.reshape(*values.shape[:2], -1, size, *values.shape[3:])


def _states_before(transition: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return the state before each chunk, [B, H, N, K, V], where S' = transition S + added.

    Chunk j of each group is composed with those before it in its group, for all groups at once.
    """
    count = transition.shape[2]
    size = math.isqrt(count - 1) + 1
    missing = -count % size
    padded = (functional.pad(one, (0, 0, 0, 0, 0, missing)) for one in (transition, added))
    of_groups = [_divided(one, size) for one in padded]
    steps = zip(*(one.unbind(3) for one in of_groups), strict=True)
    composed = [next(steps)]
    for step, add in steps:
        product, total = composed[-1]
        composed.append((step @ product, step @ total + add))

    group_product, group_total = composed[-1]
    state = torch.zeros_like(added[:, :, 0])
    at_begin = []
    for product, total in zip(group_product.unbind(2), group_total.unbind(2), strict=True):
        at_begin.append(state)
        state = product @ state + total
    begin = torch.stack(at_begin, dim=2)
    inside = [product @ begin + total for product, total in composed[:-1]]
    return torch.stack([begin, *inside], dim=3).flatten(2, 3)[:, :, :count]


def convolve_documents(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """Convolve each channel of [B, D, T] over the last K tokens of the same document.

    Compilers fuse the K products. Weight: [D, K]; `seq_idx`: [B, T], the document of each token.
    """
    width = weight.shape[-1]
    inputs = hidden_states.to(weight.dtype)
    total = inputs * weight[:, -1, None]
    for distance in range(1, width):
        shifted = functional.pad(inputs, (distance, 0))[..., : inputs.shape[-1]]
        before = functional.pad(seq_idx, (distance, 0), value=-1)[..., : inputs.shape[-1]]
        total = total + torch.where((before == seq_idx)[:, None], shifted, 0) * weight[:, -1 - distance, None]
    if bias is not None:
        total = total + bias[:, None]
    if activation is not None:
        total = ACT2FN[activation](total)
    return total.to(hidden_states.dtype)


DELTA_RULE, CONVOLUTION = "chunk_gated_delta_rule", "causal_conv1d_fn"
DELTA_RULES = (DELTA_RULE, "chunk_kda")

_DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
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


def why_no_kernel(function: KernelFunction, model: PreTrainedModel, device: torch.device) -> str | None:
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


def _difference(function: KernelFunction, model: PreTrainedModel, device: torch.device) -> float:
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


def _delta_rule_inputs(
    name: str, model: PreTrainedModel, device: torch.device
) -> tuple[list[torch.Tensor], dict[str, Any]]:
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
