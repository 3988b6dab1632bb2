"""CUDA graphs on a CPU: a capture records operators, and a replay computes them again into the same memory.

As on a GPU, a replay sees new contents of tensors, but not new Python values, shapes or tensors.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class RecordedGraph:
    def __init__(self) -> None:
        self.recorder = _Recorder()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.recorder.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def _capture(graph: RecordedGraph, **_: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches, graph.recorder:
        for name in ("is_initialized", "is_current_stream_capturing"):
            patches.setattr(torch.cuda, name, lambda: True)
        yield


def use_recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's CUDA graphs."""
    for name, value in {
        "CUDAGraph": RecordedGraph,
        "graph": _capture,
        "graph_pool_handle": object,
        "Stream": object,
        "current_stream": object,
        "set_stream": lambda _: None,
        "mem_get_info": lambda _: (2**40, 2**40),
        "get_rng_state": lambda _: torch.get_rng_state(),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    fork_rng = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices=(), **options: fork_rng([], **options))  # noqa: ARG005
