"""The load-balancing loss and the statistics of routers, beside transformers' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from ftkit.config.training import TrainingPlan
from ftkit.data.packing import IGNORED
from ftkit.errors import TrainingError
from ftkit.models.architecture import ArchitectureSpec
from ftkit.runs.records import StepRecord
from ftkit.train.components.batches import pad_documents, to_micro_batch, to_padded_micro_batch
from ftkit.train.components.recorder import scalars_of
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.model.hf_model import make_config
from ftkit.train.model.routers import RouterSums, router_stats
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ftkit.train.world import World

pytestmark = pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="transformers 4 has other routers")

LENGTH, LAYERS, EXPERTS, CHOSEN, COEFFICIENT = 24, 3, 4, 2, 0.5
EXPERTS_OF = {
    "qwen3_moe": {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "sliding_window": 8},
    "phimoe": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "router_jitter_noise": 0.5},
    "minimax_m2": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
}


def build(family: str, **config: Any) -> Any:
    shape = ArchitectureSpec(
        family=family, vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    made = make_config(shape, SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0))  # type: ignore[arg-type]
    made.update(EXPERTS_OF.get(family, {}) | {"use_cache": False} | config)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "gate.weight" in name or "router.weight" in name:
            torch.nn.init.normal_(parameter, std=0.5)  # tokens are spread unevenly
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer)
    return model.train()


def make_engine(model: Any, world: World, **changes: Any) -> Fsdp2Engine:
    fields = {
        "sequence_length": LENGTH, "global_batch_size": 4, "max_steps": 1, "learning_rate": 1e-3, "precision": "fp32",
        "router_aux_loss_coef": COEFFICIENT,
    }  # fmt: skip
    return Fsdp2Engine(model, TrainingPlan.model_validate(fields | changes), world)


def packs_of(*lengths: int) -> NDArray[np.int32]:
    """Return packs of one document each, with padding behind it by a token whose embedding is not zero."""
    rng, packs = np.random.default_rng(3), np.full((len(lengths), 3, LENGTH), 9, np.int32)
    packs[:, 1] = IGNORED
    for pack, length in zip(packs, lengths, strict=True):
        pack[0, :length] = rng.integers(1, 320, length)
        pack[1, : length - 1] = pack[0, 1:length]
        pack[2] = [*range(length), *range(LENGTH - length)]
    return packs


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def assert_same_gradients(engine: Fsdp2Engine, plain: Any) -> None:
    expected = gradients(plain)
    for name, grad in gradients(engine.model.hf_model).items():
        torch.testing.assert_close(
            grad, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, of=name: f"{of}: {text}"
        )


def stats_of(sums: RouterSums, num_labels: int) -> Any:
    return router_stats(sums.summarize(sums.values).tolist(), num_labels)


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("qwen3_moe", "full"), ("mixtral", "selective"), ("olmoe", "none"), ("gpt_oss", "full"),
        ("phimoe", "full"),  # its routers draw experts while training
        ("minimax_m2", "none"),  # its routers add a bias to choose
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_transformers(family: str, checkpointing: str, world: World) -> None:
    own = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    plain = build(family, **own)
    packs = packs_of(LENGTH)
    tokens = torch.from_numpy(packs[:, 0]).long()
    torch.manual_seed(11)
    output = plain(tokens, labels=tokens)
    output.loss.backward()
    # The coefficient is the model's own: its configuration asks for the loss.
    engine = make_engine(build(family, **own), world, router_aux_loss_coef=None, activation_checkpointing=checkpointing)
    torch.manual_seed(11)
    loss = engine.forward(to_micro_batch(packs, world.device))
    engine.backward(loss, LENGTH - 1, is_last=True)
    stats = stats_of(engine.model.routers.take(), LENGTH - 1)
    assert stats.load_balancing_loss == pytest.approx(float(output.aux_loss.detach()), rel=1e-6)
    assert stats.load_balancing_loss > 1.01 * CHOSEN
    mean = float(loss.detach()) / (LENGTH - 1)
    assert mean + COEFFICIENT * stats.load_balancing_loss == pytest.approx(float(output.loss.detach()), rel=1e-6)
    assert_same_gradients(engine, plain)


def test_each_pack_is_balanced_over_its_own_tokens_in_any_micro_batches(world: World) -> None:
    lengths = (LENGTH, 17, LENGTH, 9)
    num_labels = sum(lengths) - len(lengths)
    plain, logits = build("qwen3_moe"), []
    for pack, length in zip(packs_of(*lengths), lengths, strict=True):
        tokens = torch.from_numpy(pack[None, 0, :length]).long()
        output = plain(tokens, labels=tokens, output_router_logits=True)
        balanced = output.loss + (COEFFICIENT - plain.router_aux_loss_coef) * output.aux_loss
        (balanced * (length - 1) / num_labels).backward()
        logits.append(torch.stack(output.router_logits).detach())
    sums = []
    for micro in (1, 2, 4):
        engine = make_engine(build("qwen3_moe"), world, micro_batch_size=micro)
        for first in range(0, 4, micro):
            batch = to_micro_batch(packs_of(*lengths)[first : first + micro], world.device)
            engine.backward(engine.forward(batch), num_labels, is_last=first + micro == 4)
        assert_same_gradients(engine, plain)
        sums.append(engine.model.routers.take())
    stats = stats_of(sums[0], num_labels)
    for other in sums[1:]:
        torch.testing.assert_close(other.values, sums[0].values)
    probability = torch.cat(logits, dim=1).softmax(-1)
    chosen = torch.nn.functional.one_hot(probability.topk(CHOSEN).indices, EXPERTS).sum((1, 2)).float()
    utilization = chosen / chosen.mean(1, keepdim=True)
    entropy = torch.distributions.Categorical(probability).entropy().mean() / np.log(EXPERTS)
    assert stats.max_utilization == pytest.approx(float(utilization.max()))
    assert stats.mean_max_utilization == pytest.approx(float(utilization.amax(1).mean()))
    assert stats.dead_expert_ratio == float((chosen == 0).float().mean())
    assert stats.router_entropy == pytest.approx(float(entropy))


@pytest.mark.parametrize("micro", [1, 2])
def test_each_padded_row_is_balanced_over_its_own_tokens_in_any_micro_batches(micro: int, world: World) -> None:
    lengths = (LENGTH, 17)
    num_labels = sum(lengths) - len(lengths)
    plain, engine = build("mixtral"), make_engine(build("mixtral"), world, micro_batch_size=micro)
    for pack, length in zip(packs_of(*lengths), lengths, strict=True):
        tokens = torch.from_numpy(pack[None, 0, :length]).long()
        output = plain(tokens, labels=tokens, output_router_logits=True)
        balanced = output.loss + (COEFFICIENT - plain.router_aux_loss_coef) * output.aux_loss
        (balanced * (length - 1) / num_labels).backward()
    batches = [each for first in range(0, 2, micro)
               for each in pad_documents(packs_of(*lengths)[first : first + micro], micro * LENGTH, 1)]  # fmt: skip
    for rows in batches:
        loss = engine.forward(to_padded_micro_batch(rows, world.device))
        engine.backward(loss, num_labels, is_last=rows is batches[-1])
    assert_same_gradients(engine, plain)


def test_without_a_coefficient_routers_are_counted_and_gradients_are_those_of_the_cross_entropy(world: World) -> None:
    plain, packs = build("olmoe"), packs_of(LENGTH)
    tokens = torch.from_numpy(packs[:, 0]).long()
    plain(tokens, labels=tokens).loss.backward()
    engine = make_engine(build("olmoe"), world, router_aux_loss_coef=None)
    batch = to_micro_batch(packs, world.device)
    engine.backward(engine.forward(batch), LENGTH - 1, is_last=True)
    assert_same_gradients(engine, plain)
    assert stats_of(engine.model.routers.take(), LENGTH - 1).max_utilization > 1
    with engine.inference() as model:
        model(batch=batch)
    assert not engine.model.routers.take().values.any()


def test_a_resumed_run_balances_its_routers_as_one_without_a_break(make_run: Callable[..., Any], world: World) -> None:
    run = make_run(
        "balanced", "model.architecture.family=mixtral", "training.router_aux_loss_coef=0.5", "training.max_steps=4",
        "training.checkpoint_every_steps=2", "training.activation_checkpointing=full", "evaluation.generation=null",
        processes=1,
    )  # fmt: skip
    run.train_here(world)
    before = {record.step: record for record in run.records(StepRecord)}
    run.forget_after(2)
    run.train_here(world)
    after = {record.step: record for record in run.records(StepRecord)}
    assert set(after) == {3, 4}
    for step, record in after.items():
        expected = before[step]
        assert (record.loss, record.grad_norm, record.routers) == (expected.loss, expected.grad_norm, expected.routers)
        assert scalars_of(record)["train/routers/load_balancing_loss"] == expected.routers.load_balancing_loss >= 1.9


def test_models_without_a_load_balancing_loss_are_refused(world: World) -> None:
    unusual = build("qwen3_moe")
    unusual.config.num_experts = EXPERTS - 1  # as of routers that may also choose no expert
    for model in (build("llama"), unusual):
        with pytest.raises(TrainingError, match=f"can't be computed for '{model.config.model_type}'"):
            make_engine(model, world)
    engine = make_engine(unusual, world, router_aux_loss_coef=None)
    engine.forward(to_micro_batch(packs_of(LENGTH), world.device))
    assert stats_of(engine.model.routers.take(), 1) is None
