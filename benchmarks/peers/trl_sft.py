"""Train an ftkit plan with TRL's `SFTTrainer`: `benchmarks/train.py` starts this under torchrun.

    torchrun --nproc-per-node=N benchmarks/peers/trl_sft.py PLAN --steps 16 --results FILE

The model's shape, initial weights and packs are those of ftkit's trainer, so that both compute the same;
everything else is TRL's, with the fastest settings in its documentation: pre-packed data without padding, flash-attn-4
if installed, Liger's kernels, fused AdamW, and FSDP2 through accelerate on several GPUs. Full fine-tuning keeps fp32
weights under bf16 autocast, as TRL loads a model by default; adapters are on bf16 weights, or on bitsandbytes' NF4 with
double quantization.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import BitsAndBytesConfig, TrainerCallback
from transformers.utils import is_flash_attn_4_available
from trl import SFTConfig, SFTTrainer

from ftkit.config.execution import GIB
from ftkit.data.packing import IGNORED, pack_at
from ftkit.data.prepared_data import PreparedData
from ftkit.data.tokenizers import load_saved_tokenizer
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import RunPlan, read_plan
from ftkit.train.model.hf_model import build_empty, find_decoder_layers, make_config
from ftkit.train.model.lora import peft_config
from ftkit.train.model.pretrained import init_weights, materialize


def packs_as_dataset(plan: RunPlan, num_steps: int) -> Dataset:
    """Return the packs in ftkit's training order, in the format of TRL's packing."""
    store = PreparedData(plan.data.root).read_train()
    seed = plan.recipe.training.seed
    order = [pack_at(index, len(store), seed) for index in range(num_steps * plan.batch.global_batch_size)]
    tokens, next_tokens, positions, _ = store.read(order).swapaxes(0, 1)
    labels = np.full_like(next_tokens, IGNORED)
    labels[:, 1:] = next_tokens[:, :-1]  # TRL shifts labels itself
    lengths = [np.diff(np.append(np.flatnonzero(row == 0), row.size)) for row in positions]
    return Dataset.from_dict({"input_ids": list(tokens), "labels": list(labels), "seq_lengths": lengths})


def build_model(plan: RunPlan, attention: str, *, sharded: bool) -> Any:
    """Build the model with its initial weights on this process's device.

    A model to be sharded stays in host memory, with weights only on rank 0, from which accelerate distributes them.
    """
    recipe, state = plan.recipe, PartialState()
    tokenizer = load_saved_tokenizer(PreparedData(plan.data.root).tokenizer)
    model: Any = build_empty(make_config(recipe.model.architecture, tokenizer), attention)
    in_bf16 = recipe.training.adapters is not None and recipe.training.compute_precision == "bf16"
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if in_bf16 else torch.float32)
    device = state.device if state.is_main_process or not sharded else torch.device("cpu")
    materialize(model, device, device)
    if sharded and not state.is_main_process:
        return model
    init_weights(model, recipe.model.architecture, recipe.training.seed)
    if recipe.training.method == "qlora":
        model = quantised(model, attention, device)
    return model.cpu() if sharded else model


def quantised(model: Any, attention: str, device: torch.device) -> Any:
    """Return the model as loaded by transformers in 4 bits."""
    dtype = model.dtype
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    return type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        quantization_config=four_bits,
        dtype=dtype,
        attn_implementation=attention,
        device_map={"": device},
    )


def make_settings(plan: RunPlan, layer: str, folder: Path, options: argparse.Namespace) -> SFTConfig:
    """Translate the plan into TRL's configuration."""
    training = plan.recipe.training
    on_gpus = plan.placement.device == "cuda"
    sharded = on_gpus and plan.placement.world_size > 1
    checkpointing = options.checkpointing or training.activation_checkpointing
    fsdp = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": [layer],
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": True,
        "activation_checkpointing": sharded and checkpointing == "full",
    }
    return SFTConfig(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=plan.batch.micro_batch_size,
        gradient_accumulation_steps=plan.batch.accumulation_steps,
        optim="adamw_torch_fused",
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        bf16=training.compute_precision == "bf16",
        use_cpu=not on_gpus,
        use_liger_kernel=on_gpus,
        torch_compile=options.compile,
        gradient_checkpointing=checkpointing != "none" and not fsdp["activation_checkpointing"],
        gradient_checkpointing_kwargs={"selective": checkpointing == "selective"},
        fsdp=sharded,
        fsdp_config=fsdp if sharded else None,
        packing=True,
        max_length=training.sequence_length,
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=training.seed,
    )


@dataclass
class StepWriter(TrainerCallback):
    """Appends a line for each step: its seconds, its loss, and the peak of memory since the warm-up."""

    results: Path
    num_warm_up_steps: int
    last: float = field(default_factory=time.perf_counter)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **unused: Any) -> None:
        """Record a step. TRL has just read its loss, so the device has finished the step."""
        del args, control, unused
        if "loss" not in logs or not state.is_world_process_zero:
            return
        now = time.perf_counter()
        peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
        step = {"number": state.global_step, "seconds": now - self.last, "loss": logs["loss"], "memory_gib": peak}
        step["grad_norm"] = logs.get("grad_norm")
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(step) + "\n")
        if state.global_step == self.num_warm_up_steps and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.last = now


def main() -> None:
    """Train for a number of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up-steps", type=int, default=4)
    parser.add_argument("--attention", help="default: flash_attention_4 if installed, else sdpa")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), help="default: the plan's")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    plan = read_plan(RunLayout(options.plan.parent))
    attention = options.attention or ("flash_attention_4" if is_flash_attn_4_available() else "sdpa")
    sharded = plan.placement.device == "cuda" and plan.placement.world_size > 1
    model = build_model(plan, attention, sharded=sharded)
    layer = type(find_decoder_layers(model)[0]).__name__
    lora = plan.recipe.training.adapters
    trainer = SFTTrainer(
        model=model,
        args=make_settings(plan, layer, options.results.parent / "output", options),
        train_dataset=packs_as_dataset(plan, options.steps),
        processing_class=load_saved_tokenizer(PreparedData(plan.data.root).tokenizer),
        peft_config=None if lora is None else peft_config(lora),
        callbacks=[StepWriter(options.results, options.warm_up_steps)],
    )
    if trainer.is_world_process_zero():
        sys.stdout.write(f"attention: {attention}, compiled: {options.compile}, sharded: {sharded}\n")
    trainer.train()


if __name__ == "__main__":
    main()
