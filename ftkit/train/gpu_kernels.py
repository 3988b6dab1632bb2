"""Operations whose kernels in torch don't reach the memory bandwidth of GPUs, as Triton kernels.

CPUs, and GPUs without Triton, use torch's operators.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING or (torch.cuda.is_available() and importlib.util.find_spec("triton")):
    from ftkit.train import triton_kernels
else:
    triton_kernels = None

_SMALLEST_UPDATE = 2**21
"""Elements from which a parameter is worth a kernel of its own: its update takes about as long as the host's launch of
it. torch's kernel updates dozens of smaller ones at once."""
_ELEMENTS = 2048
"""Elements that a program handles, of vectors."""
_ROWS = 64
"""Rows and columns that a program handles, of matrices."""
_HASH_ROUNDS = ((17, 0xED5AD4BB - 2**32), (11, 0xAC4C1B51 - 2**32), (15, 0x31848BAB))
"""Right shifts and factors, int32, of `triple32` (https://github.com/skeeto/hash-prospector)."""


def average_rows(rows: torch.Tensor, averages: torch.Tensor) -> None:
    """Average rows, [N, K], into `averages`, [K], in its dtype, summed in fp32."""
    if triton_kernels is None or not rows.is_cuda:
        torch.mean(rows, dim=0, dtype=averages.dtype, out=averages)
        return
    num_rows, numel = rows.shape
    triton_kernels.average_rows[(_num_blocks(numel, _ELEMENTS),)](rows, averages, num_rows, numel, BLOCK=_ELEMENTS)


def round_and_transpose(
    matrix: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide a matrix, [M, K], by a scale, fp32 [], and round it to an FP8 dtype; return that, and its transpose."""
    largest = torch.finfo(dtype).max
    if triton_kernels is None or not matrix.is_cuda:
        rounded = (matrix.float() / scale).clamp(-largest, largest).to(dtype)
        return rounded, transpose(rounded)
    matrix = matrix.contiguous()
    num_rows, num_columns = matrix.shape
    rounded, transposed = torch.empty_like(matrix, dtype=dtype), matrix.new_empty(num_columns, num_rows, dtype=dtype)
    triton_kernels.round_and_transpose[_blocks_of(matrix)](
        matrix, scale, rounded, transposed, num_rows, num_columns, LARGEST=largest, BLOCK=_ROWS
    )
    return rounded, transposed


def round_shard(values: torch.Tensor, scale: torch.Tensor, rounded: torch.Tensor) -> None:
    """Round fp32 values to bf16, divide them by a scale, fp32 [], and round that to FP8, into `rounded`.

    A matrix of a single process is in bf16 before it is rounded to FP8: shards get the same numbers.
    """
    largest = torch.finfo(rounded.dtype).max
    if triton_kernels is None or not values.is_cuda:
        rounded.copy_((values.bfloat16().float() / scale).clamp(-largest, largest))
        return
    numel = values.numel()
    if numel:
        triton_kernels.round_elements[(_num_blocks(numel, _ELEMENTS),)](
            values, scale, rounded, numel, LARGEST=largest, BLOCK=_ELEMENTS
        )


def transpose(matrix: torch.Tensor) -> torch.Tensor:
    """Copy a matrix, [M, K], into its transpose.

    Compilers would recompute the matrix, together with sums of what it is computed from: row by row, whose writes to a
    transposed matrix are 20 times slower than those of blocks (measured on an H200).
    """
    if triton_kernels is None or not matrix.is_cuda:
        return matrix.t().contiguous()
    matrix = matrix.contiguous()
    num_rows, num_columns = matrix.shape
    transposed = matrix.new_empty(num_columns, num_rows)
    triton_kernels.transpose[_blocks_of(matrix)](matrix, transposed, num_rows, num_columns, BLOCK=_ROWS)
    return transposed


def drop(inputs: torch.Tensor, rows: torch.Tensor, key: torch.Tensor, probability: float, first: int) -> torch.Tensor:
    """Set elements of inputs, [..., K], to zero with a probability, and divide the others by that of being kept.

    The keys, and an element's feature, determine whether it is kept: everywhere and always the same.

    Args:
        inputs: to be dropped, or the gradient of dropped ones, which has zeros at the same places.
        rows: int64 [N], random bits of each of the N rows.
        key: int64 [], random bits of all of them.
        probability: below 1.
        first: index of the first of the K features; other ranks may have those before it.
    """
    if triton_kernels is None or not inputs.is_cuda or torch.compiler.is_compiling():
        # A compiler fuses these operators with others. It would save scaled inputs, which don't depend on the key.
        return torch.where(_is_kept(inputs, rows, key, probability, first), inputs, 0) * (1 / (1 - probability))
    inputs = inputs.contiguous()
    dropped = torch.empty_like(inputs)
    width = inputs.shape[-1]
    block = min(_ELEMENTS, 1 << (width - 1).bit_length())
    triton_kernels.drop[(len(rows), _num_blocks(width, block))](
        inputs, dropped, rows, key, width, first, _first_kept(probability), 1 / (1 - probability),
        *itertools.chain(*_HASH_ROUNDS), BLOCK=block,
    )  # fmt: skip
    return dropped


def _is_kept(
    inputs: torch.Tensor, rows: torch.Tensor, key: torch.Tensor, probability: float, first: int
) -> torch.Tensor:
    """Return a mask by hashes of features, and of the bits of both keys: half of them are mixed in in each round.

    Products of int32 wrap. Right shifts copy the sign, which a bit mask removes.
    """
    keys = (rows ^ key)[:, None]
    columns = torch.arange(first, first + inputs.shape[-1], device=inputs.device)
    # In Triton code of torch < 2.13, positions have the dtype of indices (int64 if sizes are symbolic, and from 2^31
    # elements), and casts of them are left out. Those of loaded values, such as keys, are not.
    hashes, added = (columns ^ keys).int(), (keys >> 32).int()
    for shift, factor in _HASH_ROUNDS:
        hashes = (hashes ^ (hashes >> shift & (1 << 32 - shift) - 1)) * factor + added
    return (hashes >= _first_kept(probability)).view(inputs.shape)


def _first_kept(probability: float) -> int:
    """Return the smallest hash, int32, of an element that is kept."""
    return round(probability * 2**32) - 2**31


def can_update(parameter: torch.Tensor) -> bool:
    """Return whether `update_adamw` updates a parameter, or a rank's shard of it, faster than torch's fused kernel."""
    return (
        triton_kernels is not None
        and parameter.numel() >= _SMALLEST_UPDATE
        and parameter.is_cuda
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
    )


def update_adamw(  # noqa: PLR0913 - operands of a kernel
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    num_steps: torch.Tensor,
    *,
    group: dict[str, Any],
    divisor: torch.Tensor,
    is_skipped: torch.Tensor,
) -> None:
    """Update a parameter and its moments in place (Loshchilov & Hutter 2019, algorithm 2, as torch computes it).

    Args:
        parameter: fp32, as the other tensors.
        gradient: divided by `divisor` before it is used, and not changed.
        moments: of first and second order.
        num_steps: [], number of updates with this one.
        group: the optimizer's constants.
        divisor: [].
        is_skipped: [], 1 to change nothing.
    """
    beta1, beta2 = group["betas"]
    log2_beta1, log2_beta2 = (math.log2(beta) if beta else -math.inf for beta in (beta1, beta2))
    triton_kernels.update_adamw[(_num_blocks(parameter.numel(), _ELEMENTS),)](
        parameter, gradient, *moments, num_steps, divisor, is_skipped,
        group["lr"], group["weight_decay"], group["eps"], 1 - beta1, 1 - beta2, log2_beta1, log2_beta2,
        parameter.numel(), BLOCK=_ELEMENTS,
    )  # fmt: skip


def _blocks_of(matrix: torch.Tensor) -> tuple[int, int]:
    num_rows, num_columns = matrix.shape
    return _num_blocks(num_rows, _ROWS), _num_blocks(num_columns, _ROWS)


def _num_blocks(numel: int, size: int) -> int:
    return -(-numel // size)
