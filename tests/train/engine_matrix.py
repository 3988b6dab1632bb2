"""Every family, method and engine on two processes, started by torchrun; prints the trained weights of each.

One process for all cases, since starting it takes longer than a few steps of a tiny model.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from ftkit.config.execution import count_repeated_parameters, method_counts
from ftkit.config.training import (
    ActivationCheckpointing,
    EngineName,
    Method,
    Offload,
    Precision,
    TrainingPlan,
    TrainingPrecision,
)
from ftkit.data.packing import IGNORED
from ftkit.models.adapters import ALL_PROJECTIONS, LoraSpec
from ftkit.models.architecture import ArchitectureSpec
from ftkit.models.families import MEASURED
from ftkit.planning.choices import EnginePlan
from ftkit.planning.plan import PlacementPlan
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.distributed import fsdp2
from ftkit.train.distributed.collectives import AllGather, ReduceScatter, find_error
from ftkit.train.distributed.pack_parallel import whole_pack_attention
from ftkit.train.distributed.probe import run_probe
from ftkit.train.distributed.verification import verify_isolation, verify_logits, verify_sharding
from ftkit.train.model.hf_model import make_config
from ftkit.train.model.lora import init_adapters, prepare_method
from ftkit.train.param_count import count_method
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS
from ftkit.train.trainer import make_engine
from ftkit.train.world import DTYPES, ContextGroup, World, init_world, with_tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.engine import Engine

LENGTH, VOCABULARY, STEPS, ACCUMULATION = 24, 320, 2, 2
TRIED = (*MEASURED, "gpt_neox", "qwen2")
"""The four, and two that have what none of them has: fused projections, biases, names of their own."""
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BALANCE = 0.5
ADAPTED = {"gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")}


class Case(NamedTuple):
    """A training configuration."""

    family: str
    method: Method
    engine: EngineName
    offload: Offload = "none"
    precision: TrainingPrecision = "fp32"
    reduced: Precision = "fp32"
    weights: Literal["resharded", "unsharded"] = "resharded"
    collectives: Literal["auto", "copied"] = "auto"
    layers: Literal["whole", "divided"] = "whole"
    packs: Literal["whole", "halved"] = "whole"

    @property
    def name(self) -> str:
        """The non-default fields, as a name."""
        return " ".join(word for word in self if word not in {"none", "fp32", "resharded", "auto", "whole"})


class FileMemory:
    """Shared memory of the GPUs of one host, as a file shared by processes. Copies are synchronous."""

    num_bytes = 1024

    def __init__(self, path: Path, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        size = self.size * self.num_bytes
        self._memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def of(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        whole = self._memory[rank * self.num_bytes : (rank + 1) * self.num_bytes].view(dtype)
        return whole[offset : offset + numel]

    def barrier(self) -> None:
        torch.distributed.barrier()


class Gathers(TorchDispatchMode):  # type: ignore[misc] # torch has no types for it
    """Counts collectives that gather."""

    count = 0

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in operation.name()
        return operation(*args, **(kwargs or {}))


def cases() -> Iterator[Case]:
    yield from itertools.starmap(Case, product(TRIED, get_args(Method), get_args(EngineName)))
    if CONVERTS_WEIGHTS:
        yield from itertools.starmap(Case, product(["qwen3_moe"], get_args(Method), get_args(EngineName)))
        yield Case("qwen3_moe", "full", "fsdp2", packs="halved")
    for offload, engine in product(("optimizer", "all"), get_args(EngineName)):
        yield Case("llama", "full", engine, offload)
    for engine in get_args(EngineName):
        yield Case("olmo3", "qlora", engine, precision="bf16")
        yield from (Case("llama", "full", engine, precision="bf16", reduced=reduced) for reduced in get_args(Precision))
    yield from (Case(family, "full", "fsdp2", weights="unsharded") for family in ("llama", "olmo3"))
    yield from (Case("gemma3_text", method, "fsdp2", collectives="copied") for method in get_args(Method))
    for reduced in get_args(Precision):
        yield Case("llama", "full", "fsdp2", precision="bf16", reduced=reduced, collectives="copied")
    in_fp8 = Case("llama", "full", "fsdp2", precision="fp8")
    yield from (in_fp8, in_fp8._replace(offload="all"))  # the second one's weights are all-gathered in bf16
    yield from (in_fp8._replace(weights="unsharded"), in_fp8._replace(collectives="copied"))
    for family, method in product(MEASURED, ("full", "lora")):
        yield Case(family, method, "fsdp2", layers="divided")


def architecture(family: str) -> ArchitectureSpec:
    fields = {
        "family": family, "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": family == "gemma3_text",
    }  # fmt: skip
    if family in {"gemma3_text", "olmo3"}:
        fields |= {"sliding_window": 6, "full_attention_every": 2}
    return ArchitectureSpec.model_validate(fields)


def checkpointing(family: str, engine: EngineName) -> ActivationCheckpointing:
    if family == "olmo3" and engine == "fsdp2":
        return "selective"
    return "full" if family in {"olmo3", "qwen3"} else "none"


def batch(step: int, number: int, world: World) -> MicroBatch:
    """Return a micro-batch of a step; those of all ranks are the same, whoever has them."""
    accumulation, rank = divmod(number * world.data_size + world.data_rank, world.size)
    return packs_of(step, accumulation, rank, world.context)


def packs_of(step: int, accumulation: int, rank: int, context: ContextGroup) -> MicroBatch:
    generator = torch.Generator().manual_seed(100 * step + 10 * accumulation + rank)
    tokens = torch.randint(0, VOCABULARY, (2 * LENGTH,), generator=generator)
    labels = torch.cat([tokens[1:], torch.tensor([IGNORED])])
    positions = torch.arange(LENGTH).remainder(15).repeat(2)  # two documents in each pack
    packs = torch.stack([part.view(2, LENGTH) for part in (tokens, labels, positions)], dim=1)
    return to_micro_batch(packs.int().numpy(), torch.device("cpu"), context=context)


@contextmanager
def copied_collectives(training: TrainingPlan, world: World) -> Iterator[None]:
    """Make FSDP2 use copy-engine collectives, on memory shared through files."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.gather_objects(own)[0])
        memories = (FileMemory(folder / name, world) for name in ("gathered", "reduced"))
        gathered, reduced = memories
        averaged_in = DTYPES[training.reduce_precision]
        made = AllGather(gathered), ReduceScatter(reduced, averaged_in)
        assert not find_error(*made, world)  # both ranks have the files open: the files are unlinked, the memory stays
    with patch.object(fsdp2, "choose_collectives", lambda *_: made):
        yield


def build(family: str, **options: Any) -> Any:
    ids = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(5)
    config = make_config(architecture(family), ids)
    if family == "qwen3_moe":
        config.update(MIXTURE)
    model = AutoModelForCausalLM.from_config(config, **options)
    model.config.use_cache = False
    return model


def first_step_of_transformers(world: World) -> dict[str, float]:
    """Return the loss, balance and gradient norm of the first step of the mixture by transformers alone."""
    model = build("qwen3_moe").train()
    num_targets = (2 * LENGTH - 1) * ACCUMULATION * world.size
    entropy = balance = 0.0
    for accumulation, rank in product(range(ACCUMULATION), range(world.size)):
        whole = packs_of(0, accumulation, rank, ContextGroup())
        for pack in range(2):
            is_own = whole.label_index // LENGTH == pack
            positions = whole.position_ids[pack : pack + 1]
            output = model(whole.input_ids[pack : pack + 1], position_ids=positions, output_router_logits=True)
            logits = output.logits[0, whole.label_index[is_own] % LENGTH]
            loss = torch.nn.functional.cross_entropy(logits, whole.labels[is_own], reduction="sum")
            balanced = output.aux_loss * is_own.sum()
            ((loss + BALANCE * balanced) / num_targets).backward()
            entropy, balance = entropy + float(loss.detach()), balance + float(balanced.detach())
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
    return {"loss": entropy / num_targets, "balance": balance / num_targets, "norm": float(norm)}


def train(case: Case, world: World) -> dict[str, Any]:
    family, method, engine_name, offload, precision, reduced, weights, collectives, layers, packs = case
    own_attention = {}
    if layers == "divided":
        world = with_tensor_parallel(world, world.size)
        own_attention = {"attn_implementation": whole_pack_attention("sdpa", world.exchange)}
    if packs == "halved":
        world = replace(world, context=ContextGroup(world.rank, world.size, torch.distributed.group.WORLD))
        own_attention = {"attn_implementation": whole_pack_attention("sdpa", world.context)}
    passes = world.size // world.data_size
    shape = architecture(family)
    adapters = LoraSpec(targets=ADAPTED.get(family, ALL_PROJECTIONS)) if method != "full" else None
    training = TrainingPlan(
        method=method, lora=adapters, engine=engine_name, offload=offload, precision=precision, sequence_length=LENGTH,
        global_batch_size=2 * ACCUMULATION * world.size, max_steps=STEPS, learning_rate=1e-2, weight_decay=0.1,
        activation_checkpointing=checkpointing(family, engine_name), reduce_precision=reduced,
        router_aux_loss_coef=BALANCE if family == "qwen3_moe" else None, tensor_parallel=world.tensor_parallel,
    )  # fmt: skip
    model = build(family, **own_attention)
    expected = count_method(model, training)
    if family in MEASURED:
        assert expected == method_counts(shape, training)
    prepare_method(model, training, world.device)
    with copied_collectives(training, world) if collectives == "copied" else nullcontext():
        engine = make_engine(
            EnginePlan(engine_name, "", keeps_weights=weights == "unsharded"), model, training, world,
            lambda sharded: init_adapters(sharded, 5),
        )  # fmt: skip
    checks = verify_sharding(engine.sharding_stats(), training, expected)
    probe = run_probe(engine, world, VOCABULARY, micro_batch_size=2, sequence_length=LENGTH)
    verify_isolation(probe, shares_scales=precision == "fp8")
    verify_logits(probe)
    num_targets = (2 * LENGTH - 1) * ACCUMULATION * world.size
    losses, norms, routers = [], [], []
    for step in range(STEPS):
        with Gathers() if step == STEPS - 1 else nullcontext(Gathers()) as gathers:
            loss = 0.0
            for number in range(last := ACCUMULATION * passes):
                summed = engine.forward(batch(step, number, world))
                engine.backward(summed, num_targets, is_last=number == last - 1)
                loss += float(summed.detach())
        losses.append(world.sum([loss])[0] / num_targets)
        norms.append(float(engine.step(1e-2, max_norm=0.5)))
        own = engine.model.routers.take().values.tolist()
        routers.append(world.sum(own) if own else [])
    with engine.inference() as trained:
        held_out = world.sum([sum(float(trained(batch=batch(STEPS, number, world))) for number in range(passes))])[0]
    trained_weights = engine.trained_weights().items()
    length = sum(float(weight.double().square().sum()) for name, weight in trained_weights if name != "lm_head.weight")
    unharmed = family != "llama" or world.sum([float(leaves_out_a_step(engine, world))])[0] == world.size
    held = {part: sum(tensor.numel() for tensor in tensors) for part, tensors in engine.tensors().items()}
    return {
        "losses": losses, "norms": norms, "held_out": held_out, "length": length, "checks": checks, "held": held,
        "gathered": gathers.count, "unharmed": unharmed, "routers": routers, "num_targets": num_targets,
        "repeated": count_repeated_parameters(shape, training),
    }  # fmt: skip


def leaves_out_a_step(engine: Engine, world: World) -> bool:
    """Return whether a non-finite gradient on one rank leaves this rank's state unchanged."""

    def state() -> list[torch.Tensor]:
        tensors = engine.tensors()
        parts = (tensor for part in ("parameters", "optimizer") for tensor in tensors[part])
        return [tensor.flatten().clone().view(torch.uint8) for tensor in parts]  # 4-bit weights may look like NaN

    before = state()
    loss = engine.forward(batch(STEPS, 0, world))
    engine.backward(loss * (torch.nan if world.rank == 1 else 1.0), 1, is_last=True)
    norm = engine.step(1e-2, max_norm=0.5)
    return not norm.isfinite() and all(map(torch.equal, before, state()))


def main() -> None:
    gc.freeze()  # DeepSpeed collects garbage for every model: without what was imported
    with init_world(PlacementPlan(1, 2, "cpu", 1)) as world:
        results = {case.name: train(case, world) for case in cases()}
        if CONVERTS_WEIGHTS:
            results["qwen3_moe full fsdp2"]["transformers"] = first_step_of_transformers(world)
        if world.is_first:
            Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)  # as the trainer does: gloo's threads can abort while the interpreter ends
