"""Triton kernels for operations whose kernels in torch don't reach the GPU's memory bandwidth.

CPUs, and GPUs without Triton, use torch's operators. Kernels have the arguments of the functions that launch them.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING or (torch.cuda.is_available() and importlib.util.find_spec("triton")):
    import triton
    import triton.language as tl

    _jit = triton.jit
else:
    triton = None

    def _jit(kernel):
        return kernel


_SMALLEST_UPDATE = 2**21
"""Minimum elements of a parameter that gets its own kernel: the update takes about as long as its launch. torch's fused
kernel updates dozens of smaller parameters at once."""
_ELEMENTS = 2048  # elements of a vector per program
_ROWS = 64  # rows and columns of a matrix per program
_HASH_ROUNDS = ((17, 0xED5AD4BB - 2**32), (11, 0xAC4C1B51 - 2**32), (15, 0x31848BAB))
"""Right shifts and factors, int32, of `triple32` (https://github.com/skeeto/hash-prospector)."""


def average_rows(rows: torch.Tensor, averages: torch.Tensor) -> None:
    """Average rows, [N, K], into `averages`, [K], in its dtype, summed in fp32."""
    if triton is None or not rows.is_cuda:
        torch.mean(rows, dim=0, dtype=averages.dtype, out=averages)
        return
    num_rows, numel = rows.shape
    _average_rows_kernel[(triton.cdiv(numel, _ELEMENTS),)](rows, averages, num_rows, numel, BLOCK=_ELEMENTS)


def round_and_transpose(
    matrix: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide a matrix, [M, K], by a scale, fp32 [], and cast it to an FP8 dtype; return it and its transpose."""
    largest = torch.finfo(dtype).max
    if triton is None or not matrix.is_cuda:
        rounded = (matrix.float() / scale).clamp(-largest, largest).to(dtype)
        return rounded, transpose(rounded)
    matrix = matrix.contiguous()
    rounded, transposed = torch.empty_like(matrix, dtype=dtype), matrix.new_empty(matrix.shape[::-1], dtype=dtype)
    _round_and_transpose_kernel[_blocks_of(matrix)](
        matrix, scale, rounded, transposed, *matrix.shape, LARGEST=largest, BLOCK=_ROWS
    )
    return rounded, transposed


def round_shard(values: torch.Tensor, scale: torch.Tensor, rounded: torch.Tensor) -> None:
    """Cast fp32 values to bf16, divide them by a scale, fp32 [], and cast the result to FP8, into `rounded`.

    A single process casts a bf16 matrix to FP8; casting to bf16 first gives shards the same numbers.
    """
    largest = torch.finfo(rounded.dtype).max
    if triton is None or not values.is_cuda:
        rounded.copy_((values.bfloat16().float() / scale).clamp(-largest, largest))
        return
    if numel := values.numel():
        grid = (triton.cdiv(numel, _ELEMENTS),)
        _round_elements_kernel[grid](values, scale, rounded, numel, LARGEST=largest, BLOCK=_ELEMENTS)


def transpose(matrix: torch.Tensor) -> torch.Tensor:
    """Copy a matrix, [M, K], into its transpose.

    A compiler would fuse the copy with the computation of the matrix and with reductions of its inputs, row by row.
    Row-wise writes to a transposed matrix are 20 times slower than block-wise ones (measured on an H200).
    """
    if triton is None or not matrix.is_cuda:
        return matrix.t().contiguous()
    matrix = matrix.contiguous()
    transposed = matrix.new_empty(matrix.shape[::-1])
    _transpose_kernel[_blocks_of(matrix)](matrix, transposed, *matrix.shape, BLOCK=_ROWS)
    return transposed


def drop(inputs: torch.Tensor, rows: torch.Tensor, key: torch.Tensor, probability: float, first: int) -> torch.Tensor:
    """Set elements of inputs, [..., K], to zero with a probability, and divide the others by the probability to keep.

    A hash of an element's feature and of both keys decides whether it is kept, so the mask is reproducible everywhere.
    Inputs may be the gradient of dropped inputs, which has zeros at the same places.

    Args:
        inputs: N rows.
        rows: int64 [N], random bits per row.
        key: int64 [], random bits shared by all rows.
        probability: below 1.
        first: index of the first of the K features; other ranks may have the features before it.
    """
    if triton is None or not inputs.is_cuda or torch.compiler.is_compiling():
        # A compiler fuses these operators. It would save inputs that are scaled first, which don't depend on the key.
        return torch.where(_is_kept(inputs, rows, key, probability, first), inputs, 0) * (1 / (1 - probability))
    inputs = inputs.contiguous()
    dropped = torch.empty_like(inputs)
    width = inputs.shape[-1]
    block = min(_ELEMENTS, 1 << (width - 1).bit_length())
    _drop_kernel[(len(rows), triton.cdiv(width, block))](
        inputs, dropped, rows, key, width, first, _first_kept(probability), 1 / (1 - probability),
        *itertools.chain(*_HASH_ROUNDS), BLOCK=block,
    )  # fmt: skip
    return dropped


def _is_kept(
    inputs: torch.Tensor, rows: torch.Tensor, key: torch.Tensor, probability: float, first: int
) -> torch.Tensor:
    keys = (rows ^ key)[:, None]
    columns = torch.arange(first, first + inputs.shape[-1], device=inputs.device)
    # Triton code of torch < 2.13 gives positions the dtype of indices (int64 if sizes are symbolic, and from 2^31
    # elements), and drops their casts. It keeps casts of loaded values, such as keys.
    hashes, added = (columns ^ keys).int(), (keys >> 32).int()
    for shift, factor in _HASH_ROUNDS:  # each round mixes in half of the keys' bits
        # Products of int32 wrap. Right shifts copy the sign, which a bit mask removes.
        hashes = (hashes ^ (hashes >> shift & (1 << 32 - shift) - 1)) * factor + added
    return (hashes >= _first_kept(probability)).view(inputs.shape)


def _first_kept(probability: float) -> int:
    """Return the smallest hash, int32, of an element that is kept."""
    return round(probability * 2**32) - 2**31


def has_kernels(tensor: torch.Tensor) -> bool:
    return triton is not None and tensor.is_cuda


def cross_entropy(
    products: torch.Tensor, targets: torch.Tensor, vocabulary: int, scale: float, cap: float | None
) -> torch.Tensor:
    """Return the losses of logits, fp32 [N], and overwrite `products`, [N, V], with the gradient of the losses' sum.

    Logits are products times `scale`, then soft-capped if `cap`; columns from `vocabulary` on are padding. The products
    are read twice and written once.
    """
    num_rows, num_columns = products.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=products.device)
    _cross_entropy_kernel[(num_rows,)](
        products, targets, losses, num_columns, vocabulary, scale, cap or 1.0, IS_CAPPED=cap is not None,
        BLOCK=2 * _ELEMENTS, num_warps=8,
    )  # fmt: skip
    return losses


def can_update(parameter: torch.Tensor) -> bool:
    """Return whether `update_adamw` updates a parameter, or a rank's shard of it, faster than torch's fused kernel."""
    return (
        triton is not None
        and parameter.numel() >= _SMALLEST_UPDATE
        and parameter.is_cuda
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
    )


def update_adamw(
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

    All tensors are fp32; the gradient may be bf16. It is divided by `divisor`, [], and not changed. `num_steps`, [],
    includes this update; if `is_skipped`, [], is 1, nothing changes. `group` has the optimizer's constants.
    """
    beta1, beta2 = group["betas"]
    log2_beta1, log2_beta2 = (math.log2(beta) if beta else -math.inf for beta in (beta1, beta2))
    _update_adamw_kernel[(triton.cdiv(parameter.numel(), _ELEMENTS),)](
        parameter, gradient, *moments, num_steps, divisor, is_skipped,
        group["lr"], group["weight_decay"], group["eps"], 1 - beta1, 1 - beta2, log2_beta1, log2_beta2,
        parameter.numel(), BLOCK=_ELEMENTS,
    )  # fmt: skip


def update_adamw8bit(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    average: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    square: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_steps: torch.Tensor,
    *,
    group: dict[str, Any],
    divisor: torch.Tensor,
    is_skipped: torch.Tensor,
) -> None:
    """Update a parameter as `update_adamw` does, with moments of one byte, and a scale per block of 256.

    A moment is a tuple: uint8 codes, one per element; fp32 scales; and bitsandbytes' dynamic map of the 256 values that
    a code stands for, signed for the average. bitsandbytes searches the whole map for the nearest value, which takes
    five times as long as reading and writing (36 instead of 7 ms for 1.2 billion elements on an H100).
    """
    beta1, beta2 = group["betas"]
    log2_beta1, log2_beta2 = (math.log2(beta) if beta else -math.inf for beta in (beta1, beta2))
    _update_adamw8bit_kernel[(triton.cdiv(parameter.numel(), _ELEMENTS),)](
        parameter, gradient, *average, *square, num_steps, divisor, is_skipped,
        group["lr"], group["weight_decay"], group["eps"], 1 - beta1, 1 - beta2, log2_beta1, log2_beta2,
        parameter.numel(), ROWS=_ELEMENTS // 256, SCALED=256,
    )  # fmt: skip


def _blocks_of(matrix: torch.Tensor) -> tuple[int, ...]:
    return tuple(triton.cdiv(size, _ROWS) for size in matrix.shape)


# --- Kernels -----------------------------------------------------------------------------------------


@_jit
def _average_rows_kernel(rows, averages, num_rows, numel, BLOCK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(num_rows):
        total += tl.load(rows + row * numel + column, mask=inside).to(tl.float32)
    tl.store(averages + column, (total / num_rows).to(averages.dtype.element_ty), mask=inside)


@_jit
def _logits_of(products, scale, cap, IS_CAPPED: tl.constexpr):
    logits = products.to(tl.float32) * scale
    if IS_CAPPED:
        logits = cap - 2 * cap / (tl.exp(2 * logits / cap) + 1)  # cap * tanh(logits / cap)
    return logits


@_jit
def _cross_entropy_kernel(
    products, targets, losses, num_columns, vocabulary, scale, cap, IS_CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    products += row * num_columns
    target = tl.load(targets + row)
    largest = tl.full((BLOCK,), -1e30, tl.float32)  # finite, so that columns without values give no NaN
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocabulary
        logits = _logits_of(tl.load(products + column, mask=inside, other=0.0), scale, cap, IS_CAPPED)
        logits = tl.where(inside, logits, -1e30)
        larger = tl.maximum(largest, logits)
        total = total * tl.exp(largest - larger) + tl.exp(logits - larger)
        largest = larger
    maximum = tl.max(largest, axis=0)
    lse = maximum + tl.log(tl.sum(total * tl.exp(largest - maximum), axis=0))
    tl.store(losses + row, lse - _logits_of(tl.load(products + target), scale, cap, IS_CAPPED))
    tl.debug_barrier()  # the target's product is overwritten below
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logits = _logits_of(tl.load(products + column, mask=column < num_columns, other=0.0), scale, cap, IS_CAPPED)
        gradient = (tl.exp(logits - lse) - tl.where(column == target, 1.0, 0.0)) * scale
        if IS_CAPPED:
            gradient *= 1 - (logits / cap) * (logits / cap)
        gradient = tl.where(column < vocabulary, gradient, 0.0).to(products.dtype.element_ty)
        tl.store(products + column, gradient, mask=column < num_columns)


@_jit
def _drop_kernel(
    inputs, dropped, rows, key, width, first, first_kept, scale,
    SHIFT1: tl.constexpr, FACTOR1: tl.constexpr, SHIFT2: tl.constexpr, FACTOR2: tl.constexpr,
    SHIFT3: tl.constexpr, FACTOR3: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    keys = tl.load(rows + row) ^ tl.load(key)
    added = (keys >> 32).to(tl.int32)
    hashes = (column + first) ^ keys.to(tl.int32)
    hashes = (hashes ^ (hashes >> SHIFT1 & ((1 << (32 - SHIFT1)) - 1))) * FACTOR1 + added
    hashes = (hashes ^ (hashes >> SHIFT2 & ((1 << (32 - SHIFT2)) - 1))) * FACTOR2 + added
    hashes = (hashes ^ (hashes >> SHIFT3 & ((1 << (32 - SHIFT3)) - 1))) * FACTOR3 + added
    values = tl.load(inputs + row * width + column, mask=inside).to(tl.float32) * scale
    kept = tl.where(hashes >= first_kept, values, 0.0).to(dropped.dtype.element_ty)
    tl.store(dropped + row * width + column, kept, mask=inside)


@_jit
def _round_and_transpose_kernel(
    matrix, scale, rounded, transposed, num_rows, num_columns, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = row[:, None] * num_columns + column[None, :]
    scaled = tl.load(matrix + place, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
    numbers = tl.clamp(scaled, -LARGEST, LARGEST).to(rounded.dtype.element_ty)
    tl.store(rounded + place, numbers, mask=inside)
    tl.store(transposed + column[:, None] * num_rows + row[None, :], tl.trans(numbers), mask=tl.trans(inside))


@_jit
def _round_elements_kernel(values, scale, rounded, numel, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    scaled = tl.load(values + index, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32) / tl.load(scale)
    tl.store(rounded + index, tl.clamp(scaled, -LARGEST, LARGEST).to(rounded.dtype.element_ty), mask=inside)


@_jit
def _transpose_kernel(matrix, transposed, num_rows, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    block = tl.load(matrix + row[:, None] * num_columns + column[None, :], mask=inside)
    tl.store(transposed + column[:, None] * num_rows + row[None, :], tl.trans(block), mask=tl.trans(inside))


@_jit
def _update_adamw_kernel(
    parameter, gradient, average, square, num_steps, divisor, is_skipped,
    learning_rate, weight_decay, eps, rate1, rate2, log2_beta1, log2_beta2, numel, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.where(tl.load(is_skipped) == 0, numel, 0)
    step = tl.load(num_steps).to(tl.float64)  # 1 - beta^n would lose digits in fp32
    correction1 = (1 - tl.exp2(step * log2_beta1)).to(tl.float32)
    correction2 = tl.sqrt((1 - tl.exp2(step * log2_beta2)).to(tl.float32))
    gradients = tl.load(gradient + index, mask=inside).to(tl.float32) / tl.load(divisor)
    averages = tl.load(average + index, mask=inside)
    averages += rate1 * (gradients - averages)
    squares = tl.load(square + index, mask=inside)
    squares += rate2 * (gradients * gradients - squares)
    values = tl.load(parameter + index, mask=inside)
    values -= learning_rate * weight_decay * values
    values -= learning_rate / correction1 * averages / (tl.sqrt(squares) / correction2 + eps)
    tl.store(average + index, averages, mask=inside)
    tl.store(square + index, squares, mask=inside)
    tl.store(parameter + index, values, mask=inside)


@_jit
def _update_adamw8bit_kernel(
    parameter, gradient, average, average_scale, average_code, square, square_scale, square_code,
    num_steps, divisor, is_skipped, learning_rate, weight_decay, eps, rate1, rate2, log2_beta1, log2_beta2, numel,
    ROWS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
    end = tl.where(tl.load(is_skipped) == 0, numel, 0)
    inside, has_scale = index < end, row * SCALED < end
    step = tl.load(num_steps).to(tl.float64)
    correction1 = (1 - tl.exp2(step * log2_beta1)).to(tl.float32)
    correction2 = tl.sqrt((1 - tl.exp2(step * log2_beta2)).to(tl.float32))
    gradients = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32) / tl.load(divisor)
    averages = tl.load(average_code + tl.load(average + index, mask=inside, other=0).to(tl.int32))
    averages *= tl.load(average_scale + row, mask=has_scale, other=0.0)[:, None]
    averages = tl.where(inside, averages + rate1 * (gradients - averages), 0.0)
    squares = tl.load(square_code + tl.load(square + index, mask=inside, other=0).to(tl.int32))
    squares *= tl.load(square_scale + row, mask=has_scale, other=0.0)[:, None]
    squares = tl.where(inside, squares + rate2 * (gradients * gradients - squares), 0.0)
    values = tl.load(parameter + index, mask=inside)
    values -= learning_rate * weight_decay * values
    values -= learning_rate / correction1 * averages / (tl.sqrt(squares) / correction2 + eps)
    tl.store(parameter + index, values, mask=inside)
    largest = tl.max(tl.abs(averages), axis=1)
    nearest = _nearest_code(tl.abs(averages) / tl.where(largest > 0, largest, 1.0)[:, None], 1)
    nearest = tl.where(averages < 0, 127 - tl.minimum(nearest, 127), 127 + nearest)
    tl.store(average + index, nearest.to(tl.uint8), mask=inside)
    tl.store(average_scale + row, largest, mask=has_scale)
    largest = tl.max(squares, axis=1)
    nearest = _nearest_code(squares / tl.where(largest > 0, largest, 1.0)[:, None], 2)
    tl.store(square + index, nearest.to(tl.uint8), mask=inside)
    tl.store(square_scale + row, largest, mask=has_scale)


@_jit
def _nearest_code(ratios, CELLS: tl.constexpr):
    """Return the indices of a dynamic map's values nearest to ratios from 0 to 1; index 0 is 0, then ascending.

    The map divides each of seven decades evenly: 1e-7 to 1e-6 into `CELLS` cells, and each next decade into twice as
    many. Its values are 0, the centers of the cells, and 1. The point at a fifth of a decade's first cell is halfway
    between that cell's center and the last center of the decade before.
    """
    decade = (ratios > 1e-6).to(tl.int32)
    decade += (ratios > 1e-5).to(tl.int32)
    decade += (ratios > 1e-4).to(tl.int32)
    decade += (ratios > 1e-3).to(tl.int32)
    decade += (ratios > 1e-2).to(tl.int32)
    decade += (ratios > 1e-1).to(tl.int32)
    cells = CELLS << decade
    place = (ratios * tl.exp2((6 - decade).to(tl.float32) * 3.321928094887362) - 0.1) * (cells / 0.9)  # in cells
    cell = tl.minimum(tl.maximum(place, 0.0).to(tl.int32), cells - 1)
    lowest = tl.where(decade == 0, 0.25 - CELLS / 18, 0.2)  # half of the first center, from 0
    below = place < lowest
    above = (decade == 6) & (place >= cells - 0.25)
    return cells - CELLS + 1 + cell - below.to(tl.int32) + above.to(tl.int32)
