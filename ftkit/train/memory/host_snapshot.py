"""Host snapshots of sharded state, from which checkpoints are written while training changes the state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ftkit.train.memory.host_memory import empty_pinned_like

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.world import World


class HostSnapshot:
    """Host snapshots of sharded state that training cannot modify while they are being written.

    There is one at a time: the next one reuses the buffers.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    @torch.no_grad()
    def take(self, state: Any) -> Any:
        """Copy `state`, nested dictionaries and lists, with each tensor in host memory."""
        copied = self._copy(state, ())
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # host sync: the next step would change tensors during their copy
        return copied

    def _copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._copy(inner, (*path, index)) for index, inner in enumerate(value)]
        if isinstance(value, DTensor):
            local = self._copy(value.to_local(), path)
            return DTensor.from_local(
                local,
                self._world.on_host(value.device_mesh),
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        if isinstance(value, torch.Tensor):
            return self._buffer(value, path).copy_(value, non_blocking=True)
        return value

    def _buffer(self, like: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        if path not in self._buffers:
            self._buffers[path] = empty_pinned_like(like)
        return self._buffers[path]


def state_bytes(state: Any) -> int:
    """Count the bytes of this rank's tensors in a state."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(state))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, torch.Tensor):
        yield value
