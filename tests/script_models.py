"""Tiny models, data and loops for scripts that are watched."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.optim.lr_scheduler import LRScheduler

VOCAB, PAD, BOS, EOS = 64, 0, 1, 2
LENGTH = 16
Batch = dict[str, Tensor]


def llama(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return LlamaForCausalLM(LlamaConfig(**sizes | special | {"num_key_value_heads": 2} | config))


def gpt2(**config: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return GPT2LMHeadModel(GPT2Config(**sizes | special | config))


def lora(model: nn.Module, *targets: str, **config: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=list(targets) or ["q_proj", "v_proj"], **config))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)
        inner = 2 * width
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        heads = self.inputs(self.norm(hidden)).unflatten(-1, (3, 2, -1)).movedim(2, 0).transpose(2, 3)
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)
        hidden = hidden + self.dropout(self.outputs(mixed))
        return hidden + self.dropout(self.mlp(hidden))


class Decoder(nn.Module):
    """A decoder in plain torch, without a configuration; returns logits."""

    def __init__(self, width: int = 16, depth: int = 2, dropout: float = 0.0, *, is_causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_causal = is_causal
        self.tokens = nn.Embedding(VOCAB, width)
        self.places = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
        mask = mask.tril()[None] if self.is_causal else mask[None]
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None] | torch.eye(ids.shape[1], dtype=torch.bool)
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden, mask[:, None])
        return self.head(self.norm(hidden))


def rows(seed: int = 0, num_rows: int = 4, prompt: int = 0, *, padded: str = "", length: int = LENGTH) -> Batch:
    """Rows that begin with BOS and end with EOS; `padded` on the right or left, to their own lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (num_rows, length), generator=generator)
    ids[:, 0], ids[:, -1] = BOS, EOS
    mask = torch.ones_like(ids)
    for row in range(num_rows if padded else 0):
        short = row % 4 * 2
        kept = ids[row, : length - short].clone()
        kept[-1] = EOS
        padding, hidden = torch.full((short,), PAD), torch.zeros(short, dtype=torch.long)
        parts = (kept, padding) if padded == "right" else (padding, kept)
        masks = (torch.ones_like(kept), hidden) if padded == "right" else (hidden, torch.ones_like(kept))
        ids[row], mask[row] = torch.cat(parts), torch.cat(masks)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches(**shape: Any) -> Iterator[Batch]:
    return (rows(seed, **shape) for seed in count())


def packed(seed: int = 0) -> Batch:
    """Rows of three documents each, marked by position ids."""
    ids = rows(seed, length=24)["input_ids"]
    places = torch.cat([torch.arange(9), torch.arange(8), torch.arange(7)]).expand_as(ids)
    return {"input_ids": ids, "labels": ids.masked_fill(places == 0, -100), "position_ids": places.contiguous()}


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = model(batch["input_ids"]), batch["labels"]
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(  # noqa: PLR0913 - what loops differ in
    model: nn.Module,
    data: Iterable[Batch] | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    num_steps: int = 3,
    accumulate: int = 1,
    scheduler: LRScheduler | None = None,
) -> list[float]:
    """The usual loop: return the losses."""
    loss = loss or (next_token_loss if isinstance(model, Decoder) else model_loss)
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    model.train()
    feed = iter(data or batches())
    for _ in range(num_steps):
        for _ in range(accumulate):
            value = loss(model, next(feed)) / accumulate
            value.backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return losses


def run_trainer(model: nn.Module, data: Callable[[int], Batch] = rows, **settings: Any) -> Trainer:
    """Train with transformers' Trainer on the first rows of batches."""
    examples = [{key: value[0] for key, value in data(seed).items()} for seed in range(32)]
    known = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "report_to": [], "use_cpu": True}
    fixed = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "output_dir": "/nonexistent"}
    collator, kind = settings.pop("data_collator", None), settings.pop("trainer", Trainer)
    arguments = TrainingArguments(**known | fixed | settings)
    data = {"train_dataset": examples, "eval_dataset": examples[:4]}
    trainer = kind(model=model, args=arguments, data_collator=collator, **data)
    trainer.train()
    return trainer
