"""Configurations of other tools, for `ftkit convert`: YAML, JSON, shell, Python, and notebooks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ftkit.config.other_tools import TOOLS
from ftkit.config.yaml_files import parse_bytes
from fuzzing.area import Area, Case
from fuzzing.command_line import command_line
from fuzzing.mutate import damaged_bytes, damaged_value

if TYPE_CHECKING:
    import random
    from pathlib import Path

_PYTHON = b"""
import torch
SIZE = 2 ** 3
model, _ = FastLanguageModel.from_pretrained("a/b", max_seq_length=512, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=SIZE * 2, target_modules=["q_proj"], lora_alpha=16 if SIZE else 8)
args = SFTConfig(per_device_train_batch_size=2, learning_rate=2e-4, **{"num_train_epochs": 3}, output_dir=f"x/{SIZE}")
trainer = SFTTrainer(model=model, train_dataset=load_dataset("a/c", split="train[:10%]"), args=args)
"""
_FILES = {
    "axolotl.yaml": b"""
base_model: a/b
datasets: [{path: a/c, type: chat_template, field_messages: conversations, split: "train[:10%]", roles_to_train: [x]}]
val_set_size: 0.05
sequence_len: 512
adapter: qlora
lora_r: 32
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
warmup_steps: 10
learning_rate: 2e-4
""",
    "llamafactory.yaml": b"""
model_name_or_path: a/b
stage: sft
finetuning_type: lora
lora_target: q_proj,v_proj
dataset: chats, pairs
cutoff_len: 2048
max_samples: 500
val_size: 100
num_train_epochs: 2.5
warmup_ratio: 0.1
""",
    "dataset_info.json": b'{"chats": {"hf_hub_url": "a/c", "formatting": "sharegpt", "columns": {"messages": "t"}}}',
    "train.sh": b"""#!/bin/bash
MODEL=a/b
accelerate launch --num_processes 4 sft.py --model_name_or_path $MODEL --dataset_name a/c \\
  --max_steps 200 --gradient_accumulation_steps=3 --lora_target_modules q_proj v_proj --report_to "wandb"
""",
    "accelerate.yaml": b"{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}, num_processes: 8}",
    "torchtune.yaml": b"""
model: {_component_: torchtune.models.llama3.lora_llama3_8b, lora_rank: 8, lora_attn_modules: [q_proj]}
checkpointer: {checkpoint_dir: /tmp/a}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: true}
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4}
batch_size: 2
epochs: 1
""",
    "automodel.yaml": b"""
recipe: TrainFinetuneRecipeForNextTokenPrediction
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: a/b}
dataset: {_target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset, dataset_name: a/c}
step_scheduler: {global_batch_size: 8, local_batch_size: 1, num_epochs: 1}
optimizer: {_target_: torch.optim.Adam, lr: 1e-5, betas: [0.9, 0.95]}
""",
    "train.py": _PYTHON,
    "notebook.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": _PYTHON.decode()}]}).encode(),
}
_PIECES = (
    b": ", b"- ", b"[", b"{", b"}", b"&x ", b"*x", b"${x}", b"$(id)", b"\\\n", b"'", b'"', b"--x=", b"<<EOF\n", b"# ",
    b"9" * 4301, b"[" * 90, b"-" * 500, b".nan", b"1e400", b"2 ** 10 ** 9", b"(lambda: 0)()", b"\0", b"\xff",
    b"!!python/x y", b"\t",
)  # fmt: skip


def _make(rng: random.Random) -> Case:
    names = rng.sample(list(_FILES), rng.choice((1, 1, 1, 2)))
    case = {name: _damaged(rng, name) for name in names}
    words = rng.choice(([], [], ["--gpus", "8"], ["--mean-length", "99"], ["--tool", rng.choice(TOOLS)]))
    return case | {"words.json": json.dumps(words).encode()}


def _damaged(rng: random.Random, name: str) -> bytes:
    content = _FILES[name]
    if rng.random() < 0.1:
        return content
    if rng.random() < 0.5 or not name.endswith(("yaml", "json")):
        return damaged_bytes(rng, content, _PIECES)
    return json.dumps(damaged_value(rng, parse_bytes(content, name).values)).encode()


def _run(case: Case, folder: Path) -> bool:
    names = [name for name in case if name != "words.json"]
    with command_line(folder) as call:
        for name in names:
            (folder / "project" / name).write_bytes(case[name])
        code, out = call("convert", *names, *json.loads(case["words.json"]))
        if code == 0:
            (folder / "project" / "recipe.yaml").write_text(out, encoding="utf-8")
            call("plan", "recipe.yaml")
    return code == 0


FOREIGN = Area("foreign", _make, _run)
