"""Tensors that are read or computed on access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, for subclasses that compute a tensor on access. Iterating and `in` compute none.

    `Mapping`'s own `in` would compute the tensor.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Store the names; their order is that of iteration."""
        self._names = dict.fromkeys(names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
