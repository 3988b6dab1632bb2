"""Determine from a script's tensors which tokens its loss trains, and which inputs influence its logits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ftkit.runs.script_facts import CallFacts, ReplayFacts

MATRIX: Final = 2  # dimensions of a batch of token ids
_IGNORED: Final = -100  # label of a token that is not in the loss
_SAMPLE: Final = 1024  # elements of a parameter that are kept
_POSITIONS: Final = 256  # positions of a micro-batch whose logits are kept
_MASKS: Final = ("completion_mask", "assistant_masks", "assistant_mask", "response_mask", "loss_mask")
_MOST: Final = 0.95
_WRAPPERS: Final = {"DeepSpeedEngine", "OptimizedModule", "_FabricModule"}


@dataclass
class Call:
    """A call of an outermost module."""

    model: nn.Module  # the module, or the one within it that takes `input_ids` and returns logits
    facts: CallFacts
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    ids: Tensor | None = None
    vocab: int = 0
    logits: Tensor | None = None  # the last module output with the shape of logits
    hidden: Tensor | None = None  # the last module output with a vector per token
    output: Tensor | None = None
    changed: Tensor | None = None  # tokens whose embedding a replay changes


def read_labels(call: Call) -> None:
    """Count the targets of a model that computes the loss without logits."""
    labels = call.kwargs.get("labels")
    if isinstance(labels, Tensor) and call.ids is not None:
        following = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        call.facts.counts = count_targets(call, call.ids, following != _IGNORED, following)


def read_gradient(call: Call, ids: Tensor, sample: Tensor, gradient: Tensor) -> None:
    """Read the targets from the gradient of the logits: it is not 0 at trained positions, and raises the target."""
    least, targets = gradient.min(-1)
    trained = (least < 0) | (gradient.amax(-1) > 0)
    call.facts.counts = count_targets(call, ids, *(each.view(len(ids), -1) for each in (trained, targets)))
    some = some_rows(gradient).float()
    least, targets = some.min(-1)
    probability = sample.float().softmax(-1).gather(-1, targets[:, None])[:, 0]
    is_clear = (least < 0) & (probability < _MOST)  # otherwise the weight is a quotient of small numbers
    is_alone = least[is_clear] / some.clamp(max=0).sum(-1)[is_clear] > 1 - 4 * (1 - _MOST)  # as in cross-entropy
    if is_clear.any() and is_alone.float().mean() > _MOST:
        call.facts.weight = float((-least / (1 - probability))[is_clear].median())


def count_targets(call: Call, ids: Tensor, trained: Tensor, targets: Tensor) -> dict[str, int]:
    """Count the targets of a micro-batch; position p of `trained` and `targets` belongs to the logits at token p."""
    trained, targets, ids, length = trained.cpu(), targets.cpu(), ids.cpu(), trained.shape[1]
    config = config_of(call.model)
    ends, begin = _token_ids(config, "eos_token_id"), _token_ids(config, "bos_token_id")
    padding = _padding(ids, call)
    following = (targets[:, : length - 1] == ids[:, 1:length]) & trained[:, : length - 1]
    inner = trained[:, : length - 2]  # positions with two tokens after them
    is_end = torch.isin(ids[:, 2:length], torch.tensor(ends)) & ~padding[:, 2:length] & following[:, :-1]
    starts = [row[~hidden][:2].tolist() for row, hidden in zip(ids, padding, strict=True)]
    counts = {
        "rows": torch.ones(len(ids)),
        "empty rows": ~trained.any(1),
        "empty micro-batches": ~trained.any(),
        "targets": trained,
        "compared": inner,
        "same token": (targets[:, : length - 2] == ids[:, : length - 2]) & inner,
        "next token": following[:, :-1],
        "second token": (targets[:, : length - 2] == ids[:, 2:length]) & inner,
        "padding": following & padding[:, 1:length] & padding[:, : length - 1],
        "ends": is_end,
        "trained ends": is_end & trained[:, 1 : length - 1],
        "double beginnings": torch.tensor(
            [each[0] in begin and each[0] not in ends and each[:1] * 2 == each for each in starts]
        ),
    }
    counts |= {f"masked by {name}": following & mask[:, 1:length] for name, mask in _exclusions(ids, call.kwargs)}
    return {name: int(places.sum()) for name, places in counts.items()}


def _exclusions(ids: Tensor, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's arguments that exclude tokens from the loss, each with a mask of the excluded tokens."""
    given = {
        key: value.cpu() for key, value in kwargs.items() if isinstance(value, Tensor) and value.shape == ids.shape
    }
    labels = given.get("labels")
    if labels is not None and ((labels == ids) | (labels == _IGNORED)).all():  # otherwise they are shifted
        yield "labels", labels == _IGNORED
    yield from ((name, given[name] == 0) for name in _MASKS if name in given)


def _padding(ids: Tensor, call: Call) -> Tensor:
    """Return a mask of padding: from the attention mask, or runs of the padding token at either end of a row."""
    mask = call.kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return (mask == 0).cpu()
    is_pad = torch.isin(ids, torch.tensor(_token_ids(config_of(call.model), "pad_token_id")))
    runs = (is_pad.cumprod(1).bool(), is_pad.flip(1).cumprod(1).flip(1).bool())
    return torch.stack([run & (run.sum(1, keepdim=True) > 1) for run in runs]).any(0)


def _documents(ids: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the number of each token's document in its row, from the arguments that mark packs; 0 without them."""
    for key in ("cu_seq_lens_q", "cu_seqlens"):
        if isinstance(kwargs.get(key), Tensor):
            return torch.bucketize(torch.arange(ids.numel()), kwargs[key].cpu()[1:], right=True).view(ids.shape)
    for key in ("seq_idx", "position_ids"):
        marks = kwargs.get(key)
        if isinstance(marks, Tensor) and marks.shape[-1] == ids.shape[1] and marks.ndim == MATRIX:
            steps = marks.cpu().expand(ids.shape).diff(dim=1)
            return functional.pad((steps < 0 if key == "position_ids" else steps != 0).cumsum(1), (1, 0))
    return torch.zeros_like(ids, device="cpu")


def compare_inputs(call: Call, run: Callable[..., Tensor]) -> ReplayFacts:
    """Compare the logits of the first batch before and after changing the embeddings of some tokens."""
    base, ids = run(0), call.ids
    facts = ReplayFacts(max(base.abs().max().item(), 1e-3) * torch.finfo(base.dtype).eps ** 0.75)
    if ids is None or not base.ndim or base.numel() != base.shape[-1] * ids.numel():
        return facts
    facts.bound = max(facts.bound, 4 * difference_of(base, run(0)).max().item())
    padding = _padding(ids.cpu(), call)
    documents = _documents(ids, call.kwargs).masked_fill(padding, -1)
    row = int(documents.amax(1).argmax())
    found = documents[row]
    places = (found == found[~padding[row]][:1]).nonzero()[:, 0]
    changed = torch.zeros_like(padding)
    changed[row, places[len(places) // 2 :]] = True
    difference = difference_of(base, run(0, changed.to(ids.device))).view(ids.shape).cpu()[row]
    earlier, later = difference[places[: len(places) // 2]], difference[found > found[places[0]]]
    facts.effect = difference[changed[row]].max().item()
    facts.earlier_tokens = earlier.max().item() if len(earlier) else None
    facts.later_documents = later.max().item() if len(later) else None
    # Run on every rank, with or without padding: the forward pass of a sharded model is collective.
    difference = difference_of(base, run(0, padding.to(ids.device))).view(ids.shape).cpu()
    facts.padding = difference[~padding].max().item() if padding.any() else None
    return facts


def _token_ids(config: Any, name: str) -> list[int]:
    """Return the ids of a special token from a transformers configuration; empty if it has none."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, name, None)
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)]


def is_logits(output: object, call: Call) -> TypeGuard[Tensor]:
    is_float = isinstance(output, Tensor) and output.ndim > 1 and output.is_floating_point()
    if call.ids is None or not call.vocab or not isinstance(output, Tensor) or not is_float:
        return False
    return output.shape[-1] >= call.vocab and output.numel() == call.ids.numel() * output.shape[-1]


def unwrapped(root: nn.Module) -> nn.Module:
    while isinstance(root, DistributedDataParallel) or type(root).__name__ in _WRAPPERS:
        root = next(root.children())
    return root


def config_of(module: nn.Module) -> Any:
    """Return the `config` attribute of a model, normally transformers' configuration; None without one."""
    return getattr(unwrapped(module), "config", None)


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)


def _local(value: Tensor) -> Tensor:
    local: Tensor = value.to_local() if isinstance(value, DTensor) else getattr(value, "ds_tensor", value)
    values: Tensor = local.coalesce().values() if local.is_sparse else local
    return values.detach()


def sample_of(value: Tensor) -> Tensor:
    flat = _local(value).reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE)].clone()


def some_rows(logits: Tensor) -> Tensor:
    rows = logits.detach().reshape(-1, logits.shape[-1])
    return rows[:: max(1, len(rows) // _POSITIONS)]


def largest_in(gradient: Tensor) -> Tensor:
    elements = functional.pad(_local(gradient).reshape(-1), (0, 1))  # at least one element
    largest: Tensor = torch.linalg.vector_norm(elements.float(), float("inf"))
    return largest


def digest_of(value: Tensor) -> str:
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def difference_of(one: Tensor, other: Tensor) -> Tensor:
    """Return the largest absolute difference of two outputs over their last dimension."""
    rows = [torch.split(each.reshape(-1, each.shape[-1]), _POSITIONS) for each in (one, other)]
    return torch.cat([(a.float() - b.float()).abs().amax(-1) for a, b in zip(*rows, strict=True)])
