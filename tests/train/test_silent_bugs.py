"""Published bugs that train without an error, each in a small script: the watch finds them before step 3."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from script_models import (
    BOS,
    EOS,
    PAD,
    VOCAB,
    Decoder,
    batches,
    gpt2,
    llama,
    lora,
    next_token_loss,
    packed,
    rows,
    run_trainer,
    train,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Trainer
from watched import observe

from ftkit.runs.script_checks import judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from script_models import Batch

    from ftkit.runs.script_facts import RankFacts

    Script = Callable[[], object]

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the scripts

CASES: dict[str, tuple[Script, str, str]] = {}


def silent(issue: str, check: str, words: str) -> Callable[[Script], Script]:
    """A script with the bug of a public issue, the check that finds it, and words of its sentence."""

    def register(script: Script) -> Script:
        assert issue not in CASES
        CASES[issue] = script, check, words
        return script

    return register


class Experts(nn.Module):
    """A mixture whose kernel reads the base weights, not the adapters beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, width, width) / 8, requires_grad=False)
        self.lora_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(4, width, 2) / 8)})
        self.lora_B = nn.ParameterDict({"default": nn.Parameter(torch.zeros(4, 2, width))})

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.einsum("btd,edh->bth", hidden, self.weight)


@silent(
    "unslothai/unsloth-zoo#606",
    "gradients",
    "2 of 10 adapter matrices received no gradient: base_model.model.model.layers.1.mlp",
)
def _() -> object:
    model = lora(llama())
    model.base_model.model.model.layers[1].mlp = Experts(32)
    return train(model)


def without_gradients(layer: nn.Module) -> None:
    """Cut the layer's own part of the graph, not the residual stream."""
    forward = layer.forward
    layer.forward = lambda hidden, **other: hidden + (forward(hidden, **other) - hidden).detach()


@silent("meta-pytorch/torchforge#592", "gradients", "12 of 16 adapter matrices received no gradient")
def _() -> object:
    model = lora(llama(num_hidden_layers=4))
    for layer in model.base_model.model.model.layers[1:]:
        without_gradients(layer)
    return train(model)


@silent("locuslab/open-unlearning#178", "gradients", "8 of 8 adapter matrices received no gradient")
def _() -> object:
    model = lora(llama(), modules_to_save=["lm_head"])
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.base_model.model.disable_input_require_grads()
    return train(model)


class WithPictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = Decoder()
        self.vision_tower = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, VOCAB))

    def forward(self, ids: Tensor) -> Tensor:
        seen = checkpoint(self.vision_tower, torch.ones(len(ids), 1, 8), use_reentrant=True)
        return self.text(ids) + seen


@silent(
    "unslothai/unsloth#5039", "gradients", "4 of 33 parameters to train received no gradient: vision_tower.0.weight"
)
def _() -> object:
    return train(WithPictures(), loss=next_token_loss)


@silent("unslothai/unsloth#1282", "zero gradients", "only received gradients of zero")
def _() -> object:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = model(**batch).loss
        return value.detach() + 0 * value

    return train(llama(), loss=loss)


def renew_parameters(*modules: nn.Module) -> None:
    """Replace the parameters by new ones with the same values, as wrapping and moving a model can."""
    for module in modules:
        for owner in module.modules():
            for name, value in list(owner.named_parameters(recurse=False)):
                setattr(owner, name, nn.Parameter(value.detach().clone()))


@silent("huggingface/accelerate#3209", "optimizer", "21 parameters are not the model's, which does not change")
def _() -> object:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    renew_parameters(model)
    return train(model, optimizer=optimizer)


@silent(
    "pytorch/pytorch#149205", "optimizer", "9 parameters received gradients but are in no optimizer: model.layers.1"
)
def _() -> object:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    renew_parameters(model.model.layers[1])
    return train(model, optimizer=optimizer)


@silent("zjunlp/HVPNeT#5", "optimizer", "1 parameter received gradients but are in no optimizer: head.weight")
def _() -> object:
    model = Decoder()
    named = [value for name, value in model.named_parameters() if "head" not in name]
    return train(model, optimizer=torch.optim.AdamW(named, lr=1e-3))


@silent("meta-pytorch/torchforge#71", "zero_grad", "step 1 are added to those of step 2")
def _() -> None:
    model, data = llama(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(**next(data)).loss.backward()
        optimizer.step()


@silent("tatsu-lab/alpaca_farm#57", "zero_grad", "cleared between the micro-batches")
def _() -> None:
    model, data = llama(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for micro_batch in range(6):
        model.zero_grad()
        (model(**next(data)).loss / 2).backward()
        if micro_batch % 2:
            optimizer.step()


@silent("AetherCortex/Llama-X#30", "learning rate", "was 0 in the first 2 steps")
def _() -> object:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 100)
    return train(model, optimizer=optimizer, scheduler=scheduler)


@silent(
    "meta-pytorch/torchtune#2254",
    "rounding",
    "below half a unit in the last place: a step left 96% of the elements of 16 matrices",
)
def _() -> object:
    model = llama(initializer_range=0.1).bfloat16()
    return train(model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-5))


@silent(
    "huggingface/accelerate#963", "learning rate", "stepped 8 times in 2 optimizer steps: once for each micro-batch"
)
def _() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model, data = llama(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(12):
        with accelerator.accumulate(model):
            accelerator.backward(model(**next(data)).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@silent("Lightning-AI/pytorch-lightning#1476", "learning rate", "stepped 4 times in 2 optimizer steps")
def _() -> None:
    model, data = Decoder(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=16_000)
    for micro_batch in range(6):
        (next_token_loss(model, next(data)) / 2).backward()
        if micro_batch % 2:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


@silent("huggingface/peft#282", "adapters", "All 8 adapter matrices are frozen")
def _() -> object:
    model = lora(llama())
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = PeftModel.from_pretrained(llama(), folder)
    model.base_model.model.lm_head.requires_grad_()  # or nothing requires a gradient, which is an error
    return train(model)


@silent("huggingface/diffusers#4687", "adapters", "The weights below the adapters train too: 4 base layers")
def _() -> object:
    model = lora(llama())
    model.requires_grad_()
    return train(model)


@silent("kdexd/virtex#16", "frozen parameters", "Running statistics of 1 frozen normalization changed: 1")
def _() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*backbone.requires_grad_(requires_grad=False), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    model.train()
    for _ in range(3):
        functional.cross_entropy(model(torch.randn(8, 3, 8, 8)), torch.randint(3, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()


# The loss


def shifted(seed: int) -> Batch:
    batch = rows(seed)
    return batch | {"labels": functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


@silent("huggingface/transformers#32944", "shift", "shifted twice")
def _() -> object:
    return train(llama(), map(shifted, range(9)))


@silent("huggingface/transformers#47394", "shift", "shifted twice")
def _() -> object:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return train(Decoder(), loss=loss)


@silent("huggingface/transformers#35066", "shift", "not shifted")
def _() -> object:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    return train(Decoder(), loss=loss)


def collate_completions(examples: list[Batch]) -> Batch:
    """Mask what comes before a response template, which the tokenizer splits in another way in context."""
    batch = {key: torch.stack([example[key] for example in examples]) for key in examples[0]}
    template = torch.tensor([7, 7, 7])
    for row, ids in zip(batch["labels"], batch["input_ids"], strict=True):
        found = (ids.unfold(0, 3, 1) == template).all(1).nonzero()
        row[: int(found[0]) if len(found) else None] = -100
    return batch


@silent("huggingface/trl#1820", "targets", "have no target")
def _() -> object:
    return run_trainer(llama(), data_collator=collate_completions)


@silent("huggingface/trl#3484", "targets", "targets are tokens that 'completion_mask' excludes")
def _() -> object:
    class Model(Decoder):
        def forward(self, ids: Tensor, completion_mask: Tensor) -> Tensor:  # noqa: ARG002 - the bug
            return super().forward(ids)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mask = torch.ones_like(batch["input_ids"])
        mask[:, :8] = 0
        logits = model(batch["input_ids"], completion_mask=mask)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    return train(Model(), loss=loss)


@silent("huggingface/transformers#2759", "targets", "'labels' excludes")
def _() -> object:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**batch).logits  # the script computes its own loss, in which nothing is masked
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    return train(llama(), batches(prompt=6), loss=loss)


def unmasked(seed: int) -> Batch:
    batch = rows(seed, padded="right")
    return batch | {"labels": batch["input_ids"].clone()}


@silent("axolotl-ai-cloud/axolotl#2227", "targets", "targets are padding")
def _() -> object:
    return run_trainer(llama(), lambda seed: {key: value[3:] for key, value in unmasked(seed).items()})


@silent("huggingface/trl#1625", "targets", "targets are padding")
def _() -> object:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    return train(llama(), map(unmasked, range(9)), loss=loss)


def without_ends(seed: int) -> Batch:
    """Labels as collators make them that mask each padding token, which is the end-of-sequence token too."""
    batch = rows(seed, padded="right")
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == PAD, EOS)
    return batch | {"input_ids": ids, "labels": ids.masked_fill(ids == EOS, -100)}


@silent("huggingface/transformers#23530", "ends of sequences", "none of 8 end-of-sequence tokens is a target")
def _() -> object:
    return train(gpt2(pad_token_id=EOS, resid_pdrop=0.0), map(without_ends, range(9)))


@silent("huggingface/trl#976", "ends of sequences", "does not learn to stop")
def _() -> object:
    return run_trainer(lora(llama(pad_token_id=EOS)), without_ends)


def doubled(seed: int) -> Batch:
    batch = rows(seed)
    begin = torch.full((len(batch["labels"]), 1), BOS)
    ids = torch.cat([begin, batch["input_ids"]], 1)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@silent("huggingface/transformers#35950", "ends of sequences", "begin with two")
def _() -> object:
    return train(llama(), map(doubled, range(9)))


def uneven(seed: int) -> Batch:
    return rows(seed, length=8 if seed % 2 else 32)


@silent("huggingface/transformers#34191", "accumulation", "a target of one counts 4.4 times as much")
def _() -> object:
    return train(llama(), map(uneven, range(9)), accumulate=2)


@silent("huggingface/transformers#37197", "accumulation", "4 times too large")
def _() -> None:
    model, data = llama(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for micro_batch in range(12):
        model(**next(data)).loss.backward()
        if micro_batch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@silent("hiyouga/LlamaFactory#7443", "accumulation", "2 times too large")
def _() -> object:
    class OldTrainer(Trainer):
        """Averages each micro-batch, though nothing divides by their number any more."""

        def compute_loss(self, model: nn.Module, inputs: Batch, **_: object) -> Tensor:
            return model(**inputs).loss

    return run_trainer(llama(), trainer=OldTrainer, gradient_accumulation_steps=2)


@silent("huggingface/accelerate#3533", "accumulation", "4 times too small")
def _() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model, data = llama(), batches()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(12):
        with accelerator.accumulate(model):
            accelerator.backward(model(**next(data)).loss / 4)
            optimizer.step()
            optimizer.zero_grad()


# What influences a token


@silent("huggingface/trl#1230", "documents", "A change in a packed document moves logits of the next")
def _() -> object:
    data = ({**packed(seed), "attention_mask": torch.ones(4, 24)} for seed in range(9))
    return train(llama(attn_implementation="eager"), data)


@silent("facebookresearch/xformers#103", "causality", "The model sees tokens that it predicts")
def _() -> object:
    return train(Decoder(is_causal=False))


@silent("GCYZSL/MoLA#21", "causality", "The model sees tokens that it predicts")
def _() -> object:
    model = llama(attn_implementation="sdpa")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return train(model, ({**rows(seed), "attention_mask": torch.ones(4, 16)} for seed in range(9)))


@silent("getao/icae#23", "influence of padding", "A change of padding moves logits")
def _() -> object:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["input_ids"]).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    return train(llama(), batches(padded="left"), loss=loss)


# Modes


@silent("fartashf/vsepp#4", "modes", "trains in evaluation mode: 2 dropout modules are inactive")
def _() -> None:
    model, data = Decoder(dropout=0.1), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(3):
        next_token_loss(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            model.eval()
            with torch.no_grad():
                next_token_loss(model, next(data))


@silent("ipolharvard/ethos-ares#20", "modes", "ran in training mode: 2 dropout modules are active")
def _() -> None:
    model, data = Decoder(dropout=0.1), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.inference_mode():
        next_token_loss(model, next(data))
    train(model, data, optimizer=optimizer)


@silent("karpathy/nanoGPT#240", "evaluation", "two calls with the same input differ")
def _() -> object:
    class Model(Decoder):
        def embed(self, ids: Tensor) -> Tensor:
            return functional.dropout(super().embed(ids), 0.1)

    return train(Model())


@silent("verl-project/verl#7834", "optimizer", "they are two tensors")
def _() -> object:
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return train(model)


def ranks_of(data: Callable[[int], Batch], model: Callable[[int], nn.Module]) -> list[RankFacts]:
    """What two ranks see that train by themselves."""
    return [
        observe(lambda rank=rank: train(model(rank), (data(3 * rank + step) for step in range(3))), rank, 2)
        for rank in range(2)
    ]


def test_a_constant_learning_rate_of_zero_is_found_without_a_scheduler() -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    facts = observe(lambda: train(model, batches(), optimizer=optimizer))
    assert [finding.check for finding in judge([facts]).findings] == ["learning rate"]


def test_ranks_that_read_the_same_samples_are_found() -> None:
    """huggingface/datasets#5360: an iterable dataset that is not divided by rank."""
    verdict = judge(ranks_of(lambda number: rows(number % 3), lambda _: Decoder()))
    assert [finding.what for finding in verdict.findings] == ["Ranks 0 and 1 read the same 8 samples."]


def test_replicas_that_differ_are_found() -> None:
    """pytorch/pytorch#109191: gradients of ranks that are not averaged."""
    found = judge(ranks_of(rows, lambda _: Decoder())).findings
    assert [finding.check for finding in found] == ["replicas"]
    assert found[0].what == "29 parameters differ between ranks 0 and 1: tokens.weight."


class TakesBatches(nn.Module):
    """A module around the model that takes a whole batch, as those of Lightning do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch | None = None, **named: Tensor) -> object:
        return self.model(**(batch or named))


def all_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch).logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def unmarked(seed: int) -> Batch:
    batch = rows(seed, padded="left")
    return {name: batch[name] for name in ("input_ids", "labels")}


@pytest.mark.parametrize(
    ("check", "data", "loss"),
    [
        ("ends of sequences", doubled, None),
        ("ends of sequences", without_ends, None),
        ("targets", lambda seed: rows(seed, prompt=6), all_tokens),
        ("targets", unmasked, None),
        ("documents", lambda seed: {**packed(seed), "attention_mask": torch.ones(4, 24)}, None),
        ("influence of padding", unmarked, None),
    ],
)
def test_a_bug_is_found_in_a_model_below_another_module(
    check: str, data: Callable[[int], Batch], loss: Callable[[nn.Module, Batch], Tensor] | None
) -> None:
    model = TakesBatches(llama(attn_implementation="eager", pad_token_id=EOS if data is without_ends else PAD))
    facts = observe(lambda: train(model, map(data, range(9)), loss or (lambda model, batch: model(batch).loss)))
    assert [finding.check for finding in judge([facts]).findings] == [check]


def test_what_a_model_has_is_found_below_another_module() -> None:
    untied = llama(tie_word_embeddings=True)
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())

    class Sleeping(TakesBatches):
        def train(self, mode: bool = True) -> TakesBatches:  # noqa: FBT002 - torch's
            super().train(mode)
            self.model.eval()
            return self

    for model, data, check in (
        (TakesBatches(untied), rows, "optimizer"),
        (TakesBatches(llama()), doubled, "ends of sequences"),
        (Sleeping(gpt2()), rows, "modes"),
    ):
        facts = observe(lambda model=model, data=data: train(model, map(data, range(9))))
        assert [finding.check for finding in judge([facts]).findings] == [check]


@pytest.mark.parametrize("issue", CASES)
def test_the_bug_is_found_before_step_3(issue: str) -> None:
    script, check, words = CASES[issue]
    facts = observe(script)
    verdict = judge([facts])
    found = [finding for finding in verdict.findings if finding.check == check]
    assert any(words in finding.what and finding.fix for finding in found), verdict
    assert facts.num_steps <= 2
