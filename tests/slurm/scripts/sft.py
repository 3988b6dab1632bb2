"""A typical fine-tuning script with accelerate, the Trainer and LoRA by peft, independent of ftkit."""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Trainer, TrainingArguments


class Sequences(Dataset):
    """Sequences that count up from a start that depends on the index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) + index) % 128
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=3)
    args = parser.parse_args()
    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=4, target_modules="all-linear"))
    settings = TrainingArguments(
        output_dir=args.output_dir, max_steps=args.max_steps, per_device_train_batch_size=2, logging_steps=1,
        learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=Sequences())
    trainer.train()
    trainer.save_model(args.output_dir)
    print(f"rank {trainer.args.process_index} of {trainer.args.world_size} is done")  # noqa: T201 - a user's script


if __name__ == "__main__":
    main()
