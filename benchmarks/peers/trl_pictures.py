"""Train on rows with pictures with TRL's `SFTTrainer`: `benchmarks/pictures.py` starts this.

    torchrun benchmarks/peers/trl_pictures.py PLAN MODEL ROWS --batch N --steps N --results FILE --output DIR

The same model, adapters and rows as ftkit's; TRL's own collator runs the model's processor on each batch. The vision
tower is frozen, as in ftkit's plan. Liger's kernels, unless their version does not fit that of
transformers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig, SFTTrainer
from trl_sft import StepWriter

from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import read_plan
from ftkit.train.model.lora import peft_config


def read_rows(path: Path) -> Dataset:
    """Return the rows as TRL takes them: messages with parts, and a column of pictures."""
    rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    pictures, prompts, completions = [], [], []
    for user, assistant in rows:
        pictures.append([str(path.parent / part["image"]) for part in user["content"] if part["type"] == "image"])
        text = "".join(part.get("text", "") for part in user["content"])
        prompts.append([{"role": "user", "content": text}])
        completions.append([{"role": "assistant", "content": assistant["content"]}])
    columns = {"images": pictures, "prompt": prompts, "completion": completions}
    return Dataset.from_dict(columns).cast_column("images", [Image()])


def main() -> None:
    """Train for a number of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("plan", "model", "rows"):
        parser.add_argument(name, type=Path)
    for name in ("--results", "--output"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up-steps", type=int, default=4)
    parser.add_argument("--no-liger", action="store_true")
    options = parser.parse_args()
    training = read_plan(RunLayout(options.plan.parent)).recipe.training
    lora = training.adapters
    if lora is None:
        raise SystemExit("the plan has no adapters")
    model: Any = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.bfloat16)
    adapters = peft_config(lora)
    adapters.target_modules = rf".*language_model.*\.({'|'.join(lora.targets)})"
    recomputes = training.activation_checkpointing == "full"
    settings = SFTConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=True,
        use_liger_kernel=not options.no_liger,
        gradient_checkpointing=recomputes,
        max_length=None,
        completion_only_loss=True,
        dataloader_num_workers=4,
        dataloader_prefetch_factor=2,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=training.seed,
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=read_rows(options.rows),
        processing_class=AutoProcessor.from_pretrained(options.model),
        peft_config=adapters,
        callbacks=[StepWriter(options.results, options.warm_up_steps)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
