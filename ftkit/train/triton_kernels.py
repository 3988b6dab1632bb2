"""Triton kernels. `gpu_kernels` starts them, and describes their arguments."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def average_rows(rows, averages, num_rows, numel, BLOCK: tl.constexpr):
    """Average the columns of one block."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(num_rows):
        total += tl.load(rows + row * numel + column, mask=inside).to(tl.float32)
    tl.store(averages + column, (total / num_rows).to(averages.dtype.element_ty), mask=inside)


@triton.jit
def drop(
    inputs, dropped, rows, key, width, first, first_kept, scale,
    SHIFT1: tl.constexpr, FACTOR1: tl.constexpr, SHIFT2: tl.constexpr, FACTOR2: tl.constexpr,
    SHIFT3: tl.constexpr, FACTOR3: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Drop elements of one block of a row by hashes of their features, in the arithmetic of int32."""
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


@triton.jit
def round_and_transpose(
    matrix, scale, rounded, transposed, num_rows, num_columns, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    """Round one square block, and write it twice."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = row[:, None] * num_columns + column[None, :]
    scaled = tl.load(matrix + place, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
    numbers = tl.clamp(scaled, -LARGEST, LARGEST).to(rounded.dtype.element_ty)
    tl.store(rounded + place, numbers, mask=inside)
    tl.store(transposed + column[:, None] * num_rows + row[None, :], tl.trans(numbers), mask=tl.trans(inside))


@triton.jit
def round_elements(values, scale, rounded, numel, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Round one block of a vector to bf16, and then to FP8."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    scaled = tl.load(values + index, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32) / tl.load(scale)
    tl.store(rounded + index, tl.clamp(scaled, -LARGEST, LARGEST).to(rounded.dtype.element_ty), mask=inside)


@triton.jit
def transpose(matrix, transposed, num_rows, num_columns, BLOCK: tl.constexpr):
    """Transpose one square block."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    block = tl.load(matrix + row[:, None] * num_columns + column[None, :], mask=inside)
    tl.store(transposed + column[:, None] * num_rows + row[None, :], tl.trans(block), mask=tl.trans(inside))


@triton.jit
def update_adamw(
    parameter, gradient, average, square, num_steps, divisor, is_skipped,
    learning_rate, weight_decay, eps, rate1, rate2, log2_beta1, log2_beta2, numel, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the elements of one block."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.where(tl.load(is_skipped) == 0, numel, 0)
    step = tl.load(num_steps).to(tl.float64)  # 1 - beta^n would lose digits in fp32
    correction1 = (1 - tl.exp2(step * log2_beta1)).to(tl.float32)
    correction2 = tl.sqrt((1 - tl.exp2(step * log2_beta2)).to(tl.float32))
    gradients = tl.load(gradient + index, mask=inside) / tl.load(divisor)
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
