"""Train an ftkit plan with Unsloth: `benchmarks/train.py` starts this.

    python benchmarks/peers/unsloth_sft.py PLAN --steps 16 --results FILE

The model's shape, initial weights and packs are those of ftkit's trainer. The rest is as in Unsloth's documentation:
`FastLanguageModel`, its checkpointing where the plan recomputes, no dropout, TRL's `SFTTrainer` as Unsloth changes it.
A pack of one document is a plain causal row; several documents in a pack are isolated by Unsloth's own packing.
Full fine-tuning keeps weights in bf16 there, which loses small updates; `--fp32-weights` keeps fp32, as ftkit does.
"""

from __future__ import annotations

# ruff: noqa: I001 - Unsloth changes transformers and TRL, so it is imported before them
import unsloth
from unsloth import FastLanguageModel

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer
from trl_sft import StepWriter, packs_as_dataset

from ftkit.data.prepared_data import PreparedData
from ftkit.data.tokenizers import load_saved_tokenizer
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import RunPlan, read_plan
from ftkit.train.model.hf_model import build_empty, make_config
from ftkit.train.model.pretrained import init_weights, materialize


def save_initial_model(plan: RunPlan, folder: Path) -> None:
    """Save the model with its initial weights in bf16, from which Unsloth loads it."""
    recipe = plan.recipe
    tokenizer = load_saved_tokenizer(PreparedData(plan.data.root).tokenizer)
    model: Any = build_empty(make_config(recipe.model.architecture, tokenizer), "eager")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    device = torch.device("cuda")
    materialize(model, device, device)
    init_weights(model, recipe.model.architecture, recipe.training.seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_model(plan: RunPlan, folder: Path, checkpointing: str, *, in_fp32: bool) -> Any:
    """Load the model as Unsloth does, with adapters if the plan has some."""
    training = plan.recipe.training
    lora = training.adapters
    uses = {"none": False, "full": "unsloth"}[checkpointing]
    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=training.sequence_length,
        dtype=torch.bfloat16,
        load_in_4bit=training.method == "qlora",
        load_in_fp8=training.base_precision == "fp8",
        full_finetuning=lora is None,
        float32_mixed_precision=in_fp32 or None,
        use_gradient_checkpointing=uses,
    )
    if lora is None:
        return model
    return FastLanguageModel.get_peft_model(
        model,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        use_gradient_checkpointing=uses,
        random_state=training.seed,
    )


def make_settings(plan: RunPlan, folder: Path, steps: int, *, isolates: bool) -> SFTConfig:
    """Translate the plan into TRL's configuration."""
    training = plan.recipe.training
    return SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=plan.batch.micro_batch_size,
        gradient_accumulation_steps=plan.batch.accumulation_steps,
        optim="adamw_8bit" if training.optimizer == "adamw8bit" else "adamw_torch_fused",
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        bf16=True,
        packing=isolates,
        max_length=training.sequence_length,
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=training.seed,
    )


def main() -> None:
    """Train for a number of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up-steps", type=int, default=4)
    parser.add_argument("--fp32-weights", action="store_true", help="of full fine-tuning")
    options = parser.parse_args()
    plan = read_plan(RunLayout(options.plan.parent))
    folder = Path(tempfile.mkdtemp(prefix="unsloth-"))
    try:
        save_initial_model(plan, folder)
        torch.cuda.empty_cache()
        checkpointing = plan.recipe.training.activation_checkpointing
        model = load_model(plan, folder, checkpointing, in_fp32=options.fp32_weights)
    finally:
        shutil.rmtree(folder)
    data = packs_as_dataset(plan, options.steps)
    isolates = any(len(lengths) > 1 for lengths in data["seq_lengths"])
    if not isolates:
        data = data.remove_columns("seq_lengths")
    trainer = SFTTrainer(
        model=model,
        args=make_settings(plan, options.results.parent / "output", options.steps, isolates=isolates),
        train_dataset=data,
        processing_class=load_saved_tokenizer(PreparedData(plan.data.root).tokenizer),
        callbacks=[StepWriter(options.results, options.warm_up_steps)],
    )
    utilities = unsloth.models._utils  # noqa: SLF001  where Unsloth keeps what it found
    kernel = "flash" if utilities.HAS_FLASH_ATTENTION else "xformers" if utilities.xformers is not None else "sdpa"
    sys.stdout.write(f"attention: {kernel}\n")
    torch.cuda.reset_peak_memory_stats()
    trainer.train()


if __name__ == "__main__":
    main()
