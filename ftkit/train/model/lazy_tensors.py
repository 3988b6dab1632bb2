"""Tensors that are read or computed on access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name. Subclasses compute one on access; iterating and looking for a name compute none.

    `Mapping` itself gets an item to tell whether it is there.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Take the names, in the order of iteration."""
        self._names = dict.fromkeys(names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
