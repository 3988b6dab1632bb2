"""Private and undocumented names of transformers: in 4.57 to 5.23, unless an entry says otherwise."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import masking_utils

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

CONVERTS_WEIGHTS = int(transformers.__version__.split(".")[0]) >= 5  # noqa: PLR2004
"""Whether transformers stores some tensors in another layout than files on the hub: 5 does, 4 does not."""

if CONVERTS_WEIGHTS:
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.integrations.moe import _grouped_linear


@dataclass(frozen=True)
class WeightConversions:
    """transformers' conversions of the tensors in files when it loads a model class; none in transformers 4."""

    renamings: list[Any]  # for tensors that only have another name in files
    converters: list[Any]  # for tensors that are assembled from several tensors of the files

    @classmethod
    def of(cls, model: PreTrainedModel) -> WeightConversions:
        if not CONVERTS_WEIGHTS:
            return cls([], [])
        known = get_model_conversion_mapping(model, add_legacy=False)
        kinds = (core_model_loading.WeightRenaming, core_model_loading.WeightConverter)
        return cls(*([one for one in known if isinstance(one, kind)] for kind in kinds))

    def rename(self, stored: str) -> tuple[str, str | None]:
        """Return the name of the tensor that a stored one is converted to, and the pattern of its part."""
        if not self.renamings and not self.converters:
            return stored, None
        renamed: tuple[str, str | None] = core_model_loading.rename_source_key(stored, self.renamings, self.converters)
        return renamed


def revert_weight_conversion(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's weights in the layout of files (transformers 5)."""
    reverted: dict[str, torch.Tensor] = core_model_loading.revert_weight_conversion(model, dict(weights))
    return reverted


def router_classes(decoder_class: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return the classes of a decoder's routers that return logits, weights, and indices of the chosen experts.

    `_can_record_outputs` lists the modules that return `router_logits`, and its index in their output. Modules that
    return it first also return the other two. transformers 4 has other classes.
    """
    recorded = (getattr(decoder_class, "_can_record_outputs", None) or {}).get("router_logits", ())
    if not CONVERTS_WEIGHTS:
        return ()
    recorders = recorded if isinstance(recorded, list | tuple) else (recorded,)
    return tuple(one.target_class for one in recorders if getattr(one, "index", None) == 0)


def attention_implementation(config: PretrainedConfig) -> str:
    """Return the attention implementation of a model; only its setter is public."""
    name: str = config._attn_implementation  # noqa: SLF001
    return name


def attention_implementations(config: PretrainedConfig) -> list[tuple[PretrainedConfig, str]]:
    """Return the implementation of a model, then of each part of a multimodal one, for `set_attention`."""
    parts = (getattr(config, name) for name in config.sub_configs)
    return [(each, attention_implementation(each)) for each in (config, *parts) if each is not None]


def set_attention(chosen: Iterable[tuple[PretrainedConfig, str]]) -> None:
    """Set implementations; the public method refuses names with "flash" that transformers does not know."""
    for config, name in chosen:
        config._attn_implementation = name  # noqa: SLF001


def mask_documents_always() -> None:
    """Make masks of packs always separate documents, even in a pack with a single one.

    transformers checks for several documents, which is a host sync in each micro-batch. A mask of another structure
    also recompiles all layers.
    """
    masking_utils.find_packed_sequence_indices = _find_documents


def _find_documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's document in its row, int64 [B, T]; a jump of positions begins a document."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


@contextmanager
def masks_of_places() -> Iterator[None]:
    """Make masks of packs use indices in the pack instead of positions in a document.

    The distance of two tokens of a document is the same either way. Masks in which a picture's tokens attend to each
    other index the pictures by place in the pack, but transformers 5.23 looks them up by position.
    """
    remap = masking_utils.remap_positions_for_packed_sequence
    masking_utils.remap_positions_for_packed_sequence = lambda mask, _: mask
    try:
        yield
    finally:
        masking_utils.remap_positions_for_packed_sequence = remap


def changes_logits(model_class: type[nn.Module]) -> bool:
    """Return whether a class scales or caps its logits, judging by the names in its forward.

    Some multimodal classes, such as Aya Vision's, don't, although the configuration of their text model has a scale.
    """
    names = inspect.unwrap(model_class.forward).__code__.co_names
    return any("softcapping" in name or "logit_scale" in name or "logits_scaling" in name for name in names)


def sees_whole_pictures(model_class: type[nn.Module], config: PretrainedConfig) -> bool:
    """Return whether a picture's tokens attend to each other, including later ones, in a multimodal class.

    Check the masks that the class creates for generation, here for two tokens of a picture between two others.
    """
    create = getattr(model_class, "create_masks_for_generate", None)
    if create is None:
        return False
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # noqa: SLF001
    types = torch.tensor([[0, 1, 1, 0]])
    masks = create(
        config=config, inputs_embeds=torch.zeros(1, 4, 1), attention_mask=None, past_key_values=None,
        position_ids=torch.arange(4)[None], token_type_ids=types, mm_token_type_ids=types,
    )  # fmt: skip
    each = [mask for mask in (masks.values() if isinstance(masks, dict) else [masks]) if mask is not None]
    return any(bool(mask[0, 0, 1, 2] == 0) for mask in each)


def attention_backends(model_class: type[nn.Module]) -> set[str]:
    """Return the attention backends that a model class of transformers supports: `custom`, `flex`, `sdpa`.

    Models with a recurrent state are not marked as supporting `custom`, but support it if they pass documents to
    FlashAttention through the same registry (seen with those of 5.23 that take packs without mamba-ssm).
    """
    flags = {"custom": "_supports_attention_backend", "flex": "_supports_flex_attn", "sdpa": "_supports_sdpa"}
    supported = {backend for backend, flag in flags.items() if getattr(model_class, flag)}
    is_flash_for_state = model_class._is_stateful and model_class._supports_flash_attn  # type: ignore[attr-defined] # noqa: SLF001
    has_registry = hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")
    return supported | ({"custom"} if is_flash_for_state and has_registry else set())


def ignored_tensors(model: nn.Module) -> tuple[str, ...]:
    """Return patterns of the tensors in files that a model class of transformers deliberately ignores."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has stacked experts that transformers 5 computes by grouped products.

    `transformers.integrations.moe.use_experts_implementation` adds `_apply_gate`.
    """
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def apply_gate(experts: nn.Module, gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return the inner activations, [N, width], of experts for which `is_experts`."""
    activations: torch.Tensor = experts._apply_gate(gate_and_up)  # type: ignore[operator] # noqa: SLF001
    return activations


def computes_experts_one_by_one(config: PretrainedConfig) -> bool:
    """Return whether a model computes stacked experts sequentially, as for odd sizes."""
    return bool(config._experts_implementation == "eager")  # noqa: SLF001


def grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply sorted rows, [S, I], by the matrices of their experts, [E, I, O]; expert e has the rows before ends[e].

    Uses `torch._grouped_mm`, or a loop if torch or its compiler lacks it.
    """
    product: torch.Tensor = _grouped_linear(rows, matrices, offs=ends, is_transposed=True)
    return product


@dataclass(frozen=True)
class KernelFunction:
    """A function in a model's file in transformers for which a package may have a kernel, as for linear attention."""

    module: str  # module name of the file
    attribute: str  # name of the function in the file
    name: str  # name of the kernel, such as `chunk_gated_delta_rule`
    package: str  # import name of the package with the kernel
    original: Callable[..., Any]  # the function that transformers calls
    fallback: Callable[..., Any]  # transformers' own PyTorch function
    kernel: Callable[..., Any] | None  # the package's function; None if transformers did not find it

    def replace(self, replacement: Callable[..., Any]) -> None:
        """Make the model's file call another function; its classes look up the name at each call."""
        setattr(sys.modules[self.module], self.attribute, replacement)


def kernel_functions(model: nn.Module) -> list[KernelFunction]:
    """Return the functions with kernels in the files of a model's classes.

    Variables in `transformers.integrations.hub_kernels.use_kernel_func_from_hub_with_fallback`, transformers 5.17 to
    5.23; 4.57 has no such functions.
    """
    files = {type(module).__module__: None for module in model.modules()}
    found = [_kernel_function(file, *named) for file in files for named in vars(sys.modules[file]).items()]
    return [one for one in found if one is not None]


def _kernel_function(module: str, attribute: str, function: object) -> KernelFunction | None:
    """Return a function with a kernel, possibly wrapped by others; None for anything else."""
    variables = ("func_name", "package", "implementation", "torch_function")
    while isinstance(function, FunctionType):
        closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if {*variables} <= set(closed):
            name, package, kernel, fallback = (closed[key].cell_contents for key in variables)
            found = None if kernel is fallback else kernel
            return KernelFunction(module, attribute, name, package, function, fallback, found)
        function = getattr(function, "__wrapped__", None)
    return None
