"""Attention kernels on GPUs, under torchrun: prints results of each kind of model, packed and sharded, and a reference.

The reference is transformers' model in fp32, unsharded, with one document at a time; its 4-bit weights are quantized
and dequantized by bitsandbytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch._dynamo
from bitsandbytes import functional as bitsandbytes
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ftkit.config.training import TrainingPlan
from ftkit.data.packing import IGNORED, Document, build_pack
from ftkit.models.adapters import LoraSpec
from ftkit.models.architecture import ArchitectureSpec
from ftkit.planning.plan import PlacementPlan
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.probe import run_probe
from ftkit.train.distributed.verification import verify_isolation, verify_logits
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import build_empty, find_decoder_layers, make_config
from ftkit.train.model.linears import QuantizedLinear
from ftkit.train.model.lora import init_adapters, prepare_method
from ftkit.train.model.pretrained import init_weights
from ftkit.train.world import World, init_world

if TYPE_CHECKING:
    from ftkit.config.training import AttentionChoice, Method

LENGTH, VOCABULARY, PACKS, WINDOW = 1024, 1000, 4, 200
DOCUMENTS = (130, 401, 3, 250, 200)  # longer and shorter than the window; the rest is padding
IDS = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)


class Case(NamedTuple):
    """A kind of model, and its trained part."""

    kernel: AttentionChoice
    num_key_value_heads: int
    window: int | None
    method: Method

    @property
    def name(self) -> str:
        heads = "MHA" if self.num_key_value_heads == 4 else "GQA"
        return f"{self.kernel} {heads} {'window' if self.window else 'full'} {self.method}"


def architecture(case: Case) -> ArchitectureSpec:
    """Head size 64 and large weights, so that attention affects the result."""
    fields: dict[str, Any] = {
        "family": "olmo3" if case.window else "llama", "vocab_size": VOCABULARY, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": case.num_key_value_heads, "head_dim": 64, "max_position_embeddings": LENGTH,
        "initializer_range": 0.08,
    }  # fmt: skip
    if case.window:
        fields |= {"sliding_window": case.window, "full_attention_every": 2}
    return ArchitectureSpec.model_validate(fields)


def documents(pack: int) -> list[Document]:
    generator = np.random.default_rng(pack)
    rows = [generator.integers(0, VOCABULARY, length).astype(np.int32) for length in DOCUMENTS]
    return [Document(row, np.append(row[1:], IGNORED).astype(np.int32)) for row in rows]


def build(case: Case, world: World) -> tuple[Any, TrainingPlan, ArchitectureSpec]:
    """Return the engine, built as in `ftkit.train.trainer`."""
    shape = architecture(case)
    training = TrainingPlan(
        method=case.method, lora=LoraSpec() if case.method != "full" else None, attention=case.kernel,
        precision="bf16", sequence_length=LENGTH, micro_batch_size=2, global_batch_size=PACKS, max_steps=3,
        learning_rate=1e-3,
    )  # fmt: skip
    config = make_config(shape, IDS)  # type: ignore[arg-type]
    kernel, _ = choose_kernel(training, config, world)
    assert case.kernel in {"auto", kernel}
    model = build_empty(config, register_kernel(kernel))
    prepare_method(model, training, world.device)

    def initialize(sharded: torch.nn.Module) -> None:
        init_weights(sharded, shape, 0)
        init_adapters(sharded, 0)

    return Fsdp2Engine(model, training, world, initialize), training, shape


def reference_loss(case: Case, world: World) -> float:
    """Return the loss of the same weights in transformers' class, without packs, shards or ftkit's kernels."""
    config = make_config(architecture(case), IDS)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    init_weights(model.to(world.device), architecture(case), 0)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    if case.method == "qlora":
        for layer in find_decoder_layers(model):
            for module in layer.modules():
                if type(module) is torch.nn.Linear:
                    packed, state = bitsandbytes.quantize_4bit(
                        module.weight.data, compress_statistics=True, quant_type="nf4"
                    )
                    module.weight.data = bitsandbytes.dequantize_4bit(packed, state)
    model = model.float().eval()
    total = 0.0
    with torch.no_grad():
        for pack in range(PACKS):
            for document in documents(pack):
                tokens = torch.from_numpy(document.tokens.astype(np.int64))[None].to(world.device)
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
                total += float(functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
    return total / num_targets()


def num_targets() -> int:
    return PACKS * sum(length - 1 for length in DOCUMENTS)


def differing_weights(case: Case, engine: Any, batch: Any) -> int:
    """Count gathered 4-bit matrices that differ from those of bitsandbytes in any bit."""
    if case.method != "qlora":
        return 0
    wrong: list[str] = []
    whole = AutoModelForCausalLM.from_config(make_config(architecture(case), IDS), dtype=torch.float32)  # type: ignore[arg-type]
    init_weights(whole.to(batch.input_ids.device), architecture(case), 0)
    matrices = dict(whole.named_parameters())

    def compare(name: str, module: Any) -> None:
        weight = matrices[name.replace(".base_layer", "") + ".weight"].data.bfloat16()
        packed, state = bitsandbytes.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
        if not torch.equal(bitsandbytes.dequantize_4bit(packed, state), module.weight):
            wrong.append(name)

    handles = [
        module.register_forward_pre_hook(lambda module, _, name=name: compare(name, module))
        for name, module in engine.model.hf_model.named_modules()
        if isinstance(module, QuantizedLinear)
    ]
    with engine.inference() as model, torch.compiler.set_stance("force_eager"):
        model(batch=batch)
    for handle in handles:
        handle.remove()
    return len(wrong)


def train(case: Case, world: World) -> dict[str, Any]:
    began = time.perf_counter()
    engine, training, _ = build(case, world)
    sizes = {"micro_batch_size": 2, "sequence_length": LENGTH}
    probe = run_probe(engine, world, VOCABULARY, **sizes)
    result: dict[str, Any] = {**verify_isolation(probe), **verify_logits(probe)}
    torch.cuda.synchronize()
    again = time.perf_counter()
    run_probe(engine, world, VOCABULARY, **sizes)
    torch.cuda.synchronize()
    result["probe_ms"] = round(1000 * (time.perf_counter() - again), 1)
    packs = np.stack([build_pack(documents(pack), LENGTH) for pack in range(PACKS)])
    own = packs[world.rank :: world.size]
    batches = [to_micro_batch(own[first : first + 2], world.device) for first in range(0, len(own), 2)]
    result["differing_weights"] = differing_weights(case, engine, batches[0])
    with engine.inference() as model:
        summed = sum(float(model(batch=batch)) for batch in batches)
    result["before"] = world.sum([summed])[0] / num_targets()
    result["reference"] = reference_loss(case, world)
    losses, norms = [], []
    for _ in range(3):
        total = 0.0
        for index, batch in enumerate(batches):
            loss = engine.forward(batch)
            engine.backward(loss, num_targets(), is_last=index == len(batches) - 1)
            total += float(loss)
        losses.append(world.sum([total])[0] / num_targets())
        norms.append(float(engine.step(training.learning_rate, max_norm=1e9)))
    return result | {"losses": losses, "norms": norms, "seconds": round(time.perf_counter() - began, 1)}


def main(kernel: AttentionChoice, output: Path) -> None:
    size = int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {}
    with init_world(PlacementPlan(1, size, "cuda", 1)) as world:
        for heads, window, method in product((4, 2), (None, WINDOW), ("full", "lora", "qlora")):
            case = Case(kernel, heads, window, method)
            torch._dynamo.reset()
            results[case.name] = train(case, world)
            if world.is_first:
                output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))  # type: ignore[arg-type]
    os._exit(0)  # as the trainer does: threads of the communication library can abort while the interpreter ends
