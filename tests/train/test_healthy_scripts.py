"""Scripts without a bug: loops, models and settings in which the watch finds nothing."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from script_models import (
    VOCAB,
    Decoder,
    batches,
    gpt2,
    llama,
    lora,
    model_loss,
    next_token_loss,
    packed,
    rows,
    run_trainer,
    train,
)
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GemmaConfig,
    GemmaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from watched import observe

from ftkit.runs.script_checks import judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from script_models import Batch

    Model = Callable[[], nn.Module]

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the scripts

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = LAYERS | {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCAB}
HEADS = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

MODELS: dict[str, Model] = {
    "decoder": Decoder,
    "llama": llama,
    "llama-eager": partial(llama, attn_implementation="eager"),
    "llama-tied": partial(llama, tie_word_embeddings=True),
    "gpt2": gpt2,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**HEADS)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**HEADS, sliding_window=4)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**HEADS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**HEADS, num_local_experts=8)),
}
ADAPTED: dict[str, Model] = {
    "lora": lambda: lora(llama()),
    "lora-dropout": lambda: lora(llama(), lora_dropout=0.1),
    "rslora-all": lambda: lora(
        llama(), "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", use_rslora=True
    ),
    "dora": lambda: lora(llama(), use_dora=True),
    "lora-head": lambda: lora(llama(), modules_to_save=["lm_head"]),
    "lora-embedding": lambda: lora(llama(), "embed_tokens", "q_proj"),
    "lora-gpt2": lambda: lora(gpt2(), "c_attn", fan_in_fan_out=True),
    "lora-bf16": lambda: lora(llama().bfloat16()),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda values: torch.optim.AdamW(values, lr=1e-4),
    "sgd": lambda values: torch.optim.SGD(values, lr=0.1),
    "momentum": lambda values: torch.optim.SGD(values, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda values: torch.optim.Adafactor(values, lr=1e-2),
    "rmsprop": lambda values: torch.optim.RMSprop(values, lr=1e-4),
    "lion": lambda values: torch.optim.NAdam(values, lr=1e-4),
}
DATA: dict[str, Callable[[int], Batch]] = {
    "full": rows,
    "prompt": partial(rows, prompt=6),
    "right": partial(rows, padded="right"),
    "right-prompt": partial(rows, padded="right", prompt=4),
    "left": partial(rows, padded="left"),
    "one-row": partial(rows, num_rows=1),
}


def alarms(script: Callable[[], object]) -> list[str]:
    verdict = judge([observe(script)])
    return [f"{finding.check}: {finding.what}" for finding in verdict.findings]


def loss_of(model: nn.Module) -> Callable[[nn.Module, Batch], Tensor]:
    return decoder_loss if isinstance(model, Decoder) else model_loss


def decoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize(("model", "data"), list(product(MODELS, DATA)))
def test_models_and_batches(model: str, data: str) -> None:
    def script() -> None:
        built = MODELS[model]()
        train(built, map(DATA[data], range(9)), loss_of(built))

    assert not alarms(script)


@pytest.mark.parametrize(("model", "data"), list(product(ADAPTED, ("full", "right-prompt"))))
def test_adapters(model: str, data: str) -> None:
    assert not alarms(lambda: train(ADAPTED[model](), map(DATA[data], range(9))))


@pytest.mark.parametrize(("optimizer", "model"), list(product(OPTIMIZERS, ("decoder", "llama"))))
def test_optimizers(optimizer: str, model: str) -> None:
    def script() -> None:
        built = MODELS[model]()
        train(built, optimizer=OPTIMIZERS[optimizer](built.parameters()))

    assert not alarms(script)


TRAINERS: dict[str, dict[str, Any]] = {
    "default": {},
    "warmup": {"warmup_steps": 10},
    "accumulation": {"gradient_accumulation_steps": 4},
    "cosine": {"lr_scheduler_type": "cosine", "weight_decay": 0.1},
    "bf16": {"bf16": True},
    "bf16-accumulation": {"bf16": True, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "adafactor": {"optim": "adafactor", "max_grad_norm": 0.5},
    "label-smoothing": {"label_smoothing_factor": 0.1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "neftune": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.parametrize(("settings", "model"), list(product(TRAINERS, ("llama", "gpt2", "lora"))))
def test_settings_of_transformers_trainer(settings: str, model: str) -> None:
    data = partial(rows, padded="right", prompt=3)
    assert not alarms(lambda: run_trainer((MODELS | ADAPTED)[model](), data, **TRAINERS[settings]))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_settings_of_accelerate(accumulate: int, precision: str) -> None:
    def script() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # or the precision can't change
        accelerator = Accelerator(gradient_accumulation_steps=accumulate, mixed_precision=precision, cpu=True)
        model, data = llama(), batches()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        model.train()
        for _ in range(3 * accumulate):
            with accelerator.accumulate(model):
                accelerator.backward(model(**next(data)).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    assert not alarms(script)


@pytest.mark.parametrize("accumulate", [2, 3, 4, 8])
def test_a_loss_divided_by_the_targets_of_all_micro_batches(accumulate: int) -> None:
    def script() -> None:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            micro = [rows(step * 9 + part, length=8 + 8 * (part % 3)) for part in range(accumulate)]
            total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro)
            for batch in micro:
                model(**batch, num_items_in_batch=torch.tensor(total)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert not alarms(script)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_isolated_packs(attention: str) -> None:
    assert not alarms(lambda: train(llama(attn_implementation=attention, use_cache=False), map(packed, range(9))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(4, 3))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.layers(pictures))


def loop(model: nn.Module, loss: Callable[[], Tensor], *, lr: float = 1e-2) -> None:
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=lr)
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def classify() -> None:
    model = Classifier()
    loop(model, lambda: functional.cross_entropy(model(torch.randn(8, 3, 8, 8)), torch.randint(3, (8,))))


def probe() -> None:
    model = Classifier()
    model.layers.requires_grad_(requires_grad=False).eval()
    loop(model, lambda: functional.cross_entropy(model(torch.randn(8, 3, 8, 8)), torch.randint(3, (8,))))


def regress() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    loop(model, lambda: functional.mse_loss(model(torch.randn(16, 4)), torch.randn(16, 1)))


def masked_lm() -> None:
    model = BertForMaskedLM(BertConfig(**SIZES))
    model.train()

    def loss() -> Tensor:
        ids = torch.randint(5, VOCAB, (4, 16))
        hidden = torch.rand(ids.shape) < 0.3
        return model(input_ids=ids.masked_fill(hidden, 3), labels=ids.masked_fill(~hidden, -100)).loss

    loop(model, loss)


def translate() -> None:
    config = {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
    model = T5ForConditionalGeneration(T5Config(**config, decoder_start_token_id=0))
    model.train()
    loop(model, lambda: model(input_ids=torch.randint(3, VOCAB, (4, 16)), labels=torch.randint(3, VOCAB, (4, 16))).loss)


def adversarial() -> None:
    maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    judge_ = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (maker, judge_)]
    for _ in range(3):
        optimizers[1].zero_grad()
        (judge_(maker(torch.randn(8, 4)).detach()).mean() - judge_(torch.randn(8, 4)).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-judge_(maker(torch.randn(8, 4))).mean()).backward()
        optimizers[0].step()


def preferences() -> None:
    """DPO with a reference that is only called without gradients."""
    model, reference = llama(), llama().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def score(of: nn.Module, ids: Tensor) -> Tensor:
        logits = of(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None])[..., 0].sum(-1)

    for step in range(3):
        better, worse = rows(2 * step)["input_ids"], rows(2 * step + 1)["input_ids"]
        with torch.no_grad():
            expected = score(reference, better) - score(reference, worse)
        (-functional.logsigmoid(score(model, better) - score(model, worse) - expected)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def distill() -> None:
    model, teacher = Decoder(), Decoder(width=32).requires_grad_(requires_grad=False).eval()

    def loss() -> Tensor:
        ids = rows()["input_ids"]
        with torch.no_grad():
            wanted = teacher(ids).softmax(-1)
        return functional.cross_entropy(model(ids).flatten(0, 1), wanted.flatten(0, 1))

    loop(model, loss)


def averaged() -> None:
    """A moving average of the weights beside training."""
    model, average = Decoder(), Decoder().requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        next_token_loss(model, rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.1)


def two_optimizers() -> None:
    model = Decoder()
    matrices = [value for value in model.parameters() if value.ndim > 1]
    rest = [value for value in model.parameters() if value.ndim < 2]
    optimizers = [torch.optim.SGD(matrices, lr=0.01), torch.optim.AdamW(rest, lr=1e-3)]
    schedulers = [torch.optim.lr_scheduler.ConstantLR(each) for each in optimizers]
    for step in range(3):
        next_token_loss(model, rows(step)).backward()
        for each in (*optimizers, *schedulers):
            each.step()
        model.zero_grad()


def scaled() -> None:
    """A loss that is scaled for float16, with its gradients unscaled before they are clipped."""
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            value = next_token_loss(model, rows(step)) / 2
        scaler.scale(value).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def with_closure() -> None:
    """Forward and backward inside optimizer.step(), as Lightning calls them."""
    model, data = Decoder(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def closure() -> Tensor:
        value = next_token_loss(model, next(data))
        optimizer.zero_grad()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)


def takes_turns() -> None:
    """Two models with optimizers of their own, which learn from each other's batches."""
    models = Decoder(), Decoder()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in models]
    for step in range(6):
        next_token_loss(models[step % 2], rows(step)).backward()
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad()


def searches_lines() -> None:
    """L-BFGS computes the loss at several weights in a step."""
    model = Decoder()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    ids = rows()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = next_token_loss(model, ids)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)


def climbs_first() -> None:
    """Gradients at the weights that are worst nearby, as sharpness-aware minimization computes them."""
    model, data = Decoder(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        batch, moved = next(data), [value.detach().clone() for value in model.parameters()]
        next_token_loss(model, batch).backward()
        with torch.no_grad():
            for value in model.parameters():
                value.add_(value.grad, alpha=0.1)
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        with torch.no_grad():
            for value, before in zip(model.parameters(), moved, strict=True):
                value.copy_(before)
        optimizer.step()
        optimizer.zero_grad()


def thaws() -> None:
    """The head trains by itself in the first step, and all of the model after it."""
    model, data = Decoder(), batches()
    model.requires_grad_(requires_grad=False)
    model.head.requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        next_token_loss(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_()


def evaluates_first() -> None:
    model, data = Decoder(dropout=0.1), batches()
    model.eval()
    with torch.no_grad():
        next_token_loss(model, next(data))
    train(model, data)


def compiled() -> None:
    model = torch.compile(Decoder(), backend="eager")
    train(model, loss=next_token_loss)


def zero_heads() -> None:
    """Projections that begin at zero hold gradients back for a step."""
    model = Decoder()
    for block in model.blocks:
        nn.init.zeros_(block.outputs.weight)
    nn.init.zeros_(model.head.weight)
    train(model)


def checkpointed() -> None:
    model = lora(llama())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    train(model)


def streams_of_text() -> None:
    """Text without ends or padding, cut where the window ends, as in nanoGPT."""
    text = torch.randint(3, VOCAB, (2000,))
    model = Decoder()

    def loss() -> Tensor:
        starts = torch.randint(1900, (4,))
        inputs, targets = (torch.stack([text[at + shift : at + shift + 32] for at in starts]) for shift in (0, 1))
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    loop(model, loss)


class FusedHead(nn.Module):
    """Log-probabilities without logits, as TRL's fused head; its loss is not what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.model.model(input_ids).last_hidden_state[:, :-1]
        logits = hidden @ self.model.lm_head.weight.T
        found = logits.log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0]
        return {"loss": -found.mean(), "log_probs": found}


def test_a_loss_from_another_output_than_the_models_loss() -> None:
    def script() -> None:
        model = FusedHead()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            for part in range(2):
                ids = rows(2 * step + part)["input_ids"]
                found = model(input_ids=ids, labels=ids)
                (-found["log_probs"].sum() / 90).backward()
            optimizer.step()
            optimizer.zero_grad()

    verdict = judge([observe(script)])
    assert not verdict.findings
    assert {"zero_grad", "causality", "evaluation"} <= set(verdict.passed)


OTHERS = [
    adversarial, averaged, checkpointed, classify, climbs_first, compiled, distill, evaluates_first, masked_lm,
    preferences, probe, regress, scaled, searches_lines, streams_of_text, takes_turns, thaws, translate,
    two_optimizers, with_closure, zero_heads,
]  # fmt: skip


@pytest.mark.parametrize("script", OTHERS)
def test_other_scripts(script: Callable[[], None]) -> None:
    assert not alarms(script)
