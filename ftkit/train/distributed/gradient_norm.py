"""The norm of sharded gradients."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ftkit.train.model.local_shard import local_tensor
from ftkit.train.private_apis.torch import find_norms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the norm of all gradients, sharded in one or several ways: a scalar on the device. Collective.

    DTensor's own norm plans collectives in time quadratic in the number of gradients: a second in step 1 of 48 layers.
    """
    groups: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[torch.Tensor]] = defaultdict(list)
    for gradient in (each.grad for each in parameters if each.grad is not None):
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        groups[layout].append(gradient if layout is None else local_tensor(gradient))
    norms = []
    for layout, group in groups.items():
        norm = torch.linalg.vector_norm(torch.stack(find_norms(group, 2.0)))
        if layout is not None:
            mesh, placements = layout
            norm.square_()
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(norm, group=mesh.get_group(dimension))
            norm.sqrt_()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
