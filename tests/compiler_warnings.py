"""Warnings that torch.compile raises in torch 2.13."""

from __future__ import annotations

import pytest

COMPILER_WARNINGS = (
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.class 'torch.autograd.function.Function'. should not:DeprecationWarning"),
)
"""Marks of tests that compile layers: elsewhere these warnings are errors."""
