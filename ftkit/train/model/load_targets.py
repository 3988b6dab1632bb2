"""Where the tensors of files go: this rank's shards of parameters, as they are or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ftkit.errors import TrainingError
from ftkit.train.model.expert_adapters import GroupedExperts
from ftkit.train.model.float8 import Fp8Experts
from ftkit.train.model.linears import QuantizedLinear, WeightLayout, is_transposed
from ftkit.train.model.local_shard import LocalShard, local_shard
from ftkit.train.model.lora import DORA_MAGNITUDE, is_adapter
from ftkit.train.model.weight_conversion import TensorSource

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class LoadTarget:
    """A parameter that is loaded from the files.

    Attributes:
        shard: this rank's shard of it.
        layout: the layout of its quantized form; None if it is not quantized.
        magnitude: DoRA's magnitude of the layer's outputs, initialized with the norms of their pretrained weights.
        is_transposed: whether the files have a matrix as [inputs, outputs].
    """

    shard: LocalShard
    layout: WeightLayout | None
    magnitude: LocalShard | None
    is_transposed: bool

    @property
    def expected_shape(self) -> list[int]:
        """The expected shape of the tensor in the files."""
        if self.layout is None:
            return [*self.shard.shape]
        shape = [self.layout.num_outputs, self.layout.num_inputs]
        return shape[::-1] if self.is_transposed else shape

    def check(self, source: TensorSource, name: str) -> None:
        """Raise unless a tensor of the files has the expected shape."""
        shape = list(source.get_shape())
        if shape != self.expected_shape:
            raise TrainingError(
                f"'{name}' has shape {shape} in the files and {self.expected_shape} in the model",
                fix="check model.architecture against the weights' config.json, and copy or download both again",
            )

    def load(self, source: TensorSource, name: str) -> None:
        """Read this rank's rows of a tensor; all rows if every shard depends on them."""
        self.check(source, name)
        device, by_output = self.shard.values.device, _TransposedTensor(source) if self.is_transposed else source
        if self.layout is None:
            self.shard.copy_rows(lambda first, last: source[first:last])
            if self.magnitude is not None:
                self.magnitude.copy_rows(lambda first, last: _row_norms(by_output[first:last].to(device)))
            return
        quantized = self.layout.quantize(by_output[:].to(device))
        self.shard.copy_from(quantized)
        if self.magnitude is not None:
            self.magnitude.copy_from(_row_norms(self.layout.dequantize(quantized)))


@dataclass(frozen=True)
class _Fp8ExpertsTarget(LoadTarget):
    """Experts that are stored in FP8, each in one row of the parameter."""

    experts: Fp8Experts

    @property
    def expected_shape(self) -> list[int]:
        """The expected shape of the tensor in the files."""
        sizes = [self.experts.num_outputs, self.experts.num_inputs]
        return [self.experts.num_experts, *(sizes[::-1] if self.is_transposed else sizes)]

    def quantized(self, source: TensorSource, first: int, last: int) -> torch.Tensor:
        """Read and quantize some experts."""
        weights = source[first:last].to(self.shard.values.device)
        return self.experts.quantize(weights.mT if self.is_transposed else weights)

    def load(self, source: TensorSource, name: str) -> None:
        """Read this rank's experts."""
        self.check(source, name)
        self.shard.copy_rows(lambda first, last: self.quantized(source, first, last))


@dataclass(frozen=True)
class _TransposedTensor:
    """A matrix of the files, transposed. All of it is read for any of its rows."""

    source: TensorSource

    def get_shape(self) -> list[int]:
        return self.source.get_shape()[::-1]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.source[:].T[rows]


def _row_norms(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.norm(rows.float(), dim=1)
    return norms


def load_targets(model: nn.Module) -> dict[str, LoadTarget]:
    """Return the target of each tensor of the files. Adapters are in no file, and add a level to the base's names."""
    parameters = dict(model.named_parameters())  # lists a tied parameter once, under its first name
    found: dict[str, LoadTarget] = {}
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        owner, _, own_name = name.rpartition(".")
        module = model.get_submodule(owner)
        layout, turned = None, own_name == "weight" and is_transposed(module)
        if isinstance(module, QuantizedLinear) and own_name == "quantized":
            layout, turned = module.layout, module.is_transposed
        is_matrix = own_name in ("quantized", "weight")
        magnitude = parameters.get(owner.removesuffix("base_layer") + DORA_MAGNITUDE) if is_matrix else None
        stored = name.replace(".base_layer.", ".").replace(".quantized", ".weight")
        if isinstance(module, GroupedExperts) and own_name in module.layouts:
            turned = bool(cast("Any", module).is_transposed)
            found[stored] = _Fp8ExpertsTarget(local_shard(parameter), None, None, turned, module.layouts[own_name])
            continue
        found[stored] = LoadTarget(
            local_shard(parameter), layout, None if magnitude is None else local_shard(magnitude), turned
        )
    return found
