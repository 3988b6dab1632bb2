"""Configurations of other tools become recipes; each of their keys has a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftkit import assets
from ftkit.config.context import Context
from ftkit.config.convert import Converted, convert, detect_tool
from ftkit.config.data import DataSpec
from ftkit.config.foreign_files import read_foreign
from ftkit.config.layers import Layers
from ftkit.config.load import load_recipe
from ftkit.config.other_tools import LAUNCHERS, TOOLS, read_tool, read_values
from ftkit.config.problems import validate
from ftkit.config.recipe import RecipeSpec
from ftkit.config.yaml_files import read_yaml
from ftkit.data.conversations import Conversation
from ftkit.data.row_formats import read_example
from ftkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

CALLS = {name: names for tool in (*TOOLS, LAUNCHERS) for name, names in read_tool(tool).calls.items()}

AXOLOTL = """
base_model: org/model
datasets: [{path: org/chats, type: chat_template, field_messages: conversations, split: "train[:10%]",
            message_property_mappings: {role: from, content: value}, roles_to_train: [assistant]}]
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
peft_use_dora: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_steps: 10
eval_steps: 50
saves_per_epoch: 1
wandb_project: chats
wandb_name: first-try
flash_attention: true
special_tokens: {pad_token: "<|end|>"}
"""
LLAMAFACTORY = """
model_name_or_path: org/model
stage: sft
finetuning_type: lora
lora_target: q_proj,v_proj
dataset: chats, pairs
template: llama3
cutoff_len: 2048
max_samples: 500
val_size: 100
train_on_prompt: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 2.5
lr_scheduler_type: cosine_with_restarts
warmup_ratio: 0.1
eval_steps: 200
bf16: true
report_to: none
output_dir: saves
"""
DATASET_INFO = json.dumps({
    "chats": {"hf_hub_url": "org/chats", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
    "pairs": {"file_name": "pairs.json", "columns": {"prompt": "question", "response": "answer"}},
    "unused": {"file_name": "unused.json"},
})  # fmt: skip
TRL_SCRIPT = """#!/bin/bash
# doesn't matter
MODEL=org/model
export CUDA_VISIBLE_DEVICES=0,1
accelerate launch --config_file zero2.yaml --num_processes 4 sft.py \\
  --model_name_or_path $MODEL --dataset_name org/chats --dataset-config en --packing \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps=3 --learning_rate 2.0e-5 --max_steps 200 \\
  --warmup_steps 20 --use_peft --lora_target_modules q_proj v_proj --run_name $JOB --report_to wandb tensorboard
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu, offload_param_device: none}
num_machines: 1
num_processes: 8
mixed_precision: bf16
"""
DEEPSPEED = json.dumps({
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlap_comm": True},
    "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.5,
})  # fmt: skip
TRL_YAML = """
model_name_or_path: org/model
datasets: [{path: org/a}, {path: org/b, split: train_sft}]
max_length: 8192
assistant_only_loss: true
per_device_train_batch_size: 4
num_train_epochs: 1
learning_rate: 1e-5
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
"""
TRAINER = """
import torch
from trl import SFTConfig, SFTTrainer
NAME, LENGTH = "org/model", 2048
rank = int(input())
dataset = load_dataset("json", data_files="chats.jsonl", split="train").map(lambda row: row)
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(NAME, quantization_config=quantization, attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained(NAME)
peft_config = LoraConfig(r=rank, lora_alpha=64, target_modules="all-linear", modules_to_save=["lm_head"])
args = SFTConfig(
    max_length=LENGTH, learning_rate=LEARNING_RATE, per_device_train_batch_size=4, packing=True, num_train_epochs=1,
    lr_scheduler_type="constant", adam_beta2=0.95, fp16=True, neftune_noise_alpha=5, full_determinism=True,
    **more,
)
SFTTrainer(model=model, args=args, train_dataset=dataset, peft_config=peft_config)
"""
UNSLOTH = json.dumps({"cells": [
    {"cell_type": "markdown", "source": ["# A notebook"]},
    {"cell_type": "code", "source": ["%%capture\n", "!pip install unsloth\n", "import os"]},
    {"cell_type": "code", "source": [
        "max_seq_length = 2048\n",
        "model, tokenizer = FastLanguageModel.from_pretrained('unsloth/model-bnb-4bit', load_in_4bit=True,\n",
        "    max_seq_length=max_seq_length)\n",
        "model = FastLanguageModel.get_peft_model(model, r=16, target_modules=['q_proj', 'embed_tokens'])"]},
    {"cell_type": "code", "source": [
        "tokenizer = get_chat_template(tokenizer, chat_template='llama-3.1')\n",
        "dataset = load_dataset('org/chats', split='train')\n",
        "trainer = SFTTrainer(model=model, train_dataset=dataset, args=SFTConfig(per_device_train_batch_size=2,\n",
        "    gradient_accumulation_steps=4, warmup_steps=5, max_steps=60, learning_rate=2e-4, optim='adamw_8bit'))\n",
        "trainer = train_on_responses_only(trainer)\n",
        "if False:\n",
        "    FastLanguageModel.from_pretrained('lora_model')"]},
]})  # fmt: skip
TORCHTUNE = """
output_dir: /tmp/out
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, output_proj],
        apply_lora_to_mlp: true, apply_lora_to_output: false, lora_rank: 8, lora_alpha: 16, lora_dropout: 0.0}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /models/t.model, max_seq_len: 4096}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /models/llama,
               output_dir: "${output_dir}"}
dataset: {_component_: torchtune.datasets.chat_dataset, source: org/chats, conversation_column: dialog,
          conversation_style: openai, train_on_input: true, packed: true}
batch_size: 2
gradient_accumulation_steps: 8
epochs: 2
max_steps_per_epoch: 100
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, fused: true}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 20}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
clip_grad_norm: null
dtype: bf16
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, project: mine}
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 8, num_epochs: 1, ckpt_every_steps: 100}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: org/model}
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, target_modules: "*_proj", dim: 8}
dataset: {_target_: nemo_automodel.components.datasets.llm.ColumnMappedTextInstructionDataset,
          path_or_dataset_id: org/pairs, column_mapping: {question: prompt, answer: response},
          answer_only_loss_mask: true}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5, betas: [0.9, 0.99], weight_decay: 0.1}
lr_scheduler: {lr_decay_style: cosine, min_lr: 1.0e-6}
distributed: {strategy: fsdp2, tp_size: 2}
"""
EDGES: dict[str, dict[str, str]] = {
    "an unknown key": {"a.yml": AXOLOTL + "frobnicate: 3"},
    "a list of everything": {"a.yml": AXOLOTL + "plugins: [a.b]\nrelora: true\nlora_target_modules: [q_proj, lm_head]"},
    "a regular expression": {
        "a.yml": AXOLOTL + r"lora_target_modules: 'model.layers.[\d]+.(mlp|self_attn).(up|q)_proj'"
    },
    "values of a wrong type": {
        "a.yml": "base_model: {a: 1}\nmicro_batch_size: [2]\nsequence_len: many\nlearning_rate: fast"
    },
    "nothing but a model": {"a.yml": "base_model: org/model"},
    "full training with LoRA's keys": {
        "a.yml": "base_model: org/model\nadapter:\nlora_r: 8\nlora_target_modules: [q_proj]"
    },
    "text": {"a.yml": "base_model: m\ndatasets: [{path: org/t, type: completion, field: body}]\ntrain_on_inputs: true"},
    "an own prompt": {
        "a.yml": "base_model: m\ndatasets: [{path: d.jsonl, type: {field_instruction: q, field_output: a}}]"
    },
    "files of a hub dataset": {
        "a.yml": "base_model: m\ndatasets: [{path: org/d, data_files: [a/b.jsonl], type: alpaca}]"
    },
    "two formats": {"a.yml": "base_model: m\ndatasets: [{path: o/a, type: alpaca}, {path: o/b, type: sharegpt}]"},
    "offload beside 8-bit states": {"t.sh": f"{TRL_SCRIPT.rstrip()} --optim adamw_8bit\n", "a.yaml": ACCELERATE},
    "8 bits": {"a.yml": "base_model: m\nadapter: lora\nload_in_8bit: true\nlora_r: 8"},
    "a file without defaults": {"t.py": "SFTConfig()"},
    "a task": {"d.yaml": "model_name_or_path: m\nfinetuning_type: full\nstage: pt\ndataset: x"},
}
CONFIGURATIONS = EDGES | {
    "Axolotl": {"chats.yml": AXOLOTL},
    "LLaMA-Factory": {"lora.yaml": LLAMAFACTORY},
    "LLaMA-Factory with its datasets": {"lora.yaml": LLAMAFACTORY, "dataset_info.json": DATASET_INFO},
    "TRL's command": {"train.sh": TRL_SCRIPT},
    "TRL's command and accelerate": {"train.sh": TRL_SCRIPT.replace("--num_processes 4", ""), "zero2.yaml": ACCELERATE},
    "TRL's YAML": {"sft.yaml": TRL_YAML},
    "TRL's YAML and DeepSpeed": {"sft.yaml": TRL_YAML, "zero3.json": DEEPSPEED},
    "a script with TRL": {"train.py": TRAINER},
    "Unsloth's notebook": {"notebook.ipynb": UNSLOTH},
    "torchtune": {"lora.yaml": TORCHTUNE},
    "AutoModel": {"peft.yaml": AUTOMODEL},
}  # fmt: skip


def read(folder: Path, files: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return {name: read_foreign(folder / name, CALLS) for name in files}


def converted(folder: Path, files: Mapping[str, str], **options: int) -> Converted:
    parts = read(folder, files)
    return convert(parts, detect_tool(parts), "mine", **options)


def training(found: Converted) -> dict[str, Any]:
    values: dict[str, Any] = found.recipe["training"]
    return values


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_key_has_a_row_and_the_recipe_loads(tmp_path: Path, name: str) -> None:
    parts = read(tmp_path, CONFIGURATIONS[name])
    found = convert(parts, detect_tool(parts), "mine")
    rows = {row.key for row in found.rows}
    keys = {key for part in parts.values() for key, value in part.items() if not (value is True and key in CALLS)}
    assert {key for key in keys - rows if not key.startswith("unused.")} == set()
    assert all(row.became or row.note for row in found.rows)
    (tmp_path / "mine.yaml").write_text(json.dumps(found.recipe))
    load_recipe(str(tmp_path / "mine.yaml"), Context(tmp_path, tmp_path, {}))


def test_axolotl_becomes_the_same_training(tmp_path: Path) -> None:
    found = converted(tmp_path, {"chats.yml": AXOLOTL}, num_gpus=2)
    values = training(found)
    assert (values["method"], values["lora"]) == ("qlora", {"rank": 32, "alpha": 16, "dropout": 0.05, "use_dora": True})
    assert (values["global_batch_size"], values["sequence_length"], values["num_epochs"]) == (2 * 4 * 2, 4096, 3)
    assert (values["learning_rate"], values["schedule"], values["optimizer"]) == (2e-4, "cosine", "adamw8bit")
    assert values["betas"] == [0.9, 0.999], "of torch, unlike ftkit's default"
    assert "warmup_ratio" not in values, "10 steps of an unknown number"
    assert found.recipe["data"] == {
        "source": {"kind": "hub", "dataset": "org/chats", "split": "train[:10%]"},
        "validation": {"fraction": 0.05},
        "format": {"kind": "messages", "column": "conversations", "style": "sharegpt"},
        "train_on": ["assistant"],
        "too_long": "drop",
    }
    assert found.recipe["tracking"] == {"sinks": ["wandb"], "project": "chats"}
    assert (found.recipe["name"], found.recipe["evaluation"]) == ("first-try", {"every_steps": 50})


def test_datasets_of_llamafactory_are_in_another_file(tmp_path: Path) -> None:
    alone = converted(tmp_path, {"lora.yaml": LLAMAFACTORY})
    assert alone.recipe["data"]["source"] == "OWNER/DATASET"
    found = converted(tmp_path, CONFIGURATIONS["LLaMA-Factory with its datasets"])
    assert found.recipe["data"]["source"] == [
        {"kind": "hub", "dataset": "org/chats", "num_train": 500},
        {"kind": "files", "train": "pairs.json", "num_train": 500},
    ]
    assert found.recipe["data"]["validation"] == {"count": 100}
    assert training(found)["lora"] == {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("settings", "weights", "status"),
    [
        ("mix_strategy: interleave_under\ninterleave_probs: 0.7,0.3", [0.7, 0.3], "converted"),
        ("mix_strategy: interleave_under", [1.0, 1.0], "converted"),
        ("mix_strategy: interleave_over\ninterleave_probs: .25, 1", [0.25, 1.0], "changed"),
        ("mix_strategy: interleave_under\ninterleave_probs: 0.7,0.2,0.1", None, "none"),
        ("mix_strategy: interleave_under\ninterleave_probs: 1,0", None, "none"),
        ("mix_strategy: interleave_under\nmax_samples: 9", None, "none"),
        ("mix_strategy: interleave_once", None, "none"),
        ("mix_strategy: concat", None, "none"),
    ],
)
def test_interleaved_datasets_of_llamafactory_have_weights_unless_that_differs(
    tmp_path: Path, settings: str, weights: list[float] | None, status: str
) -> None:
    text = LLAMAFACTORY.replace("max_samples: 500", settings)
    found = converted(tmp_path, {"lora.yaml": text, "dataset_info.json": DATASET_INFO})
    sources = found.recipe["data"]["source"]
    given = [source["weight"] for source in sources if isinstance(source, dict) and "weight" in source]
    assert given == (weights or [])
    rows = {row.key: row for row in found.rows if row.key in {"mix_strategy", "interleave_probs"}}
    assert {row.status for row in rows.values()} == {status}
    is_as_here = rows["mix_strategy"].value in {"concat", "interleave_once"}
    assert ("as here" in rows["mix_strategy"].note) == is_as_here
    assert ("weight: SHARE" in rows["mix_strategy"].note) == (weights is None and not is_as_here)
    assert ("no row repeats here" in rows["mix_strategy"].note) == (status == "changed")
    (tmp_path / "mine.yaml").write_text(json.dumps(found.recipe))
    load_recipe(str(tmp_path / "mine.yaml"), Context(tmp_path, tmp_path, {}))


@pytest.mark.parametrize("key", ["train_on_eos: all", "datasets: [{path: d.jsonl, train_on_eos: last}]"])
def test_which_end_tokens_axolotl_trains_is_compared(tmp_path: Path, key: str) -> None:
    found = converted(tmp_path, {"a.yml": f"base_model: m\nsequence_len: 64\n{key}"})
    (row,) = (row for row in found.rows if row.key.endswith("train_on_eos"))
    assert (row.status, row.became, "end token of each trained turn" in row.note) == ("none", "", True)


def test_the_command_of_an_objective_is_not_called_supervised(tmp_path: Path) -> None:
    for stage, is_supervised in (("sft", True), ("dpo", False)):
        command = f"llamafactory-cli train --stage {stage} --model_name_or_path m --finetuning_type full"
        found = converted(tmp_path, {"train.sh": command})
        (row,) = (row for row in found.rows if row.key == "command")
        assert ("supervised" in row.note) == is_supervised


def test_a_command_has_the_number_of_gpus_and_variables(tmp_path: Path) -> None:
    values = training(found := converted(tmp_path, {"train.sh": TRL_SCRIPT}))
    assert values["global_batch_size"] == 2 * 3 * 4
    assert (values["warmup_ratio"], values["max_steps"], values["lora"]["alpha"]) == (0.1, 200, 32)
    assert found.recipe["model"] == "org/model"
    assert found.recipe["data"]["source"] == {"kind": "hub", "dataset": "org/chats", "subset": "en"}
    assert found.recipe["tracking"]["sinks"] == ["wandb", "tensorboard"]
    with_accelerate = converted(tmp_path, CONFIGURATIONS["TRL's command and accelerate"])
    assert training(with_accelerate)["global_batch_size"] == 2 * 3 * 8
    assert training(with_accelerate)["offload"] == "optimizer"
    with_devices = {
        "train.sh": TRL_SCRIPT.replace("--num_processes 4", "").replace("export ", "").replace("0,1\n", "0,1 ")
    }
    assert training(converted(tmp_path, with_devices))["global_batch_size"] == 2 * 3 * 2


@pytest.mark.parametrize(
    "launcher",
    ["torchrun --nproc-per-node=4 -m trl.scripts.dpo", "accelerate launch --num_processes 4 -m trl.scripts.dpo",
     "accelerate launch --num_processes 4 --multi_gpu -m trl.scripts.dpo", "torchrun --nproc_per_node 4 dpo.py",
     "accelerate launch --num_processes 4 $(which trl) dpo", "accelerate launch --num_processes 4 `which trl` dpo",
     "accelerate launch --num_processes 4 --mixed_precision bf16 trl dpo"],
)  # fmt: skip
def test_processes_are_counted_however_a_launcher_names_the_program(launcher: str, tmp_path: Path) -> None:
    options = "--model_name_or_path org/m --dataset_name org/d --max_steps 30 --save_steps 0.25"
    script = f"{launcher} {options} --per_device_train_batch_size 2"
    values = training(converted(tmp_path, {"train.sh": script}))
    assert (values["global_batch_size"], values["objective"]) == (8, "dpo")
    assert values["checkpoint_every_steps"] == 8  # a fraction of the steps, rounded up


def test_processes_of_llama_factory_are_those_of_its_variables(tmp_path: Path) -> None:
    for variables, processes in (("NPROC_PER_NODE=4 NNODES=2", 8), ("NPROC_PER_NODE=4", 4)):
        command = f"FORCE_TORCHRUN=1 {variables} llamafactory-cli train lf.yaml"
        parts = {"train.sh": command, "lf.yaml": LLAMAFACTORY}
        alone = training(converted(tmp_path, {"lf.yaml": LLAMAFACTORY}))["global_batch_size"]
        assert training(converted(tmp_path, parts))["global_batch_size"] == alone * processes


def test_deepspeed_files_say_offload_and_leave_auto_to_the_trainer(tmp_path: Path) -> None:
    values = training(converted(tmp_path, CONFIGURATIONS["TRL's YAML and DeepSpeed"]))
    assert (values["offload"], values["max_grad_norm"], values["global_batch_size"]) == ("all", 0.5, 4)
    assert values["min_learning_rate_ratio"] == 0.1


def status_of_schedule(found: Converted) -> str:
    return next(row.status for row in found.rows if row.key == "lr_scheduler_type")


@pytest.mark.parametrize("lowest", ['{"min_lr_rate": 0.1}', '{"min_lr": 2e-6}'])
def test_json_on_a_command_line_is_read_as_in_yaml(tmp_path: Path, lowest: str) -> None:
    options = f"--learning_rate 2e-5 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{lowest}'"
    places = '[{"path": "org/a"}, {"path": "org/b"}]'
    script = f"trl sft --model_name_or_path org/model {options} --datasets '{places}' --unknown '{{text}}'"
    found = converted(tmp_path, {"train.sh": script})
    assert (training(found)["schedule"], training(found)["min_learning_rate_ratio"]) == ("cosine", 0.1)
    assert found.recipe["data"]["source"] == ["org/a", "org/b"]
    assert status_of_schedule(found) == "converted"
    assert next(row.value for row in found.rows if row.key == "unknown") == "{text}"


def test_a_schedule_whose_lowest_learning_rate_is_missing_is_not_exact(tmp_path: Path) -> None:
    found = converted(tmp_path, {"sft.yaml": TRL_YAML.replace("{min_lr_rate: 0.1}", "{}")})
    assert "min_learning_rate_ratio" not in training(found)
    assert status_of_schedule(found) == "changed"


def test_documents_become_packs_of_as_many_tokens(tmp_path: Path) -> None:
    documents = {"sft.yaml": TRL_YAML.replace("per_device_train_batch_size: 4", "per_device_train_batch_size: 64")}
    found = converted(tmp_path, documents)
    (row,) = (row for row in found.rows if row.key == "per_device_train_batch_size")
    assert (training(found)["global_batch_size"], row.status) == (64, "changed")
    assert training(converted(tmp_path, documents, mean_length=512))["global_batch_size"] == 64 * 512 // 8192
    on_three = training(converted(tmp_path, documents, mean_length=512, num_gpus=3))["global_batch_size"]
    assert (on_three, on_three % 3) == (64 * 3 * 512 // 8192, 0)
    on_seven = training(converted(tmp_path, documents, mean_length=500, num_gpus=7))["global_batch_size"]
    assert on_seven == 28, "27.3 packs are not divisible by 7 GPUs"
    packed = {"sft.yaml": documents["sft.yaml"] + "packing: true"}
    assert training(converted(tmp_path, packed, mean_length=512))["global_batch_size"] == 64


@pytest.mark.parametrize("name", ["qwen_25", "llama31", "mistral_v1", "gemma_chatml"])
def test_a_template_that_adds_to_a_shipped_one_is_the_tokenizers_own(tmp_path: Path, name: str) -> None:
    found = converted(tmp_path, {"chats.yml": f"{AXOLOTL}chat_template: {name}"})
    (row,) = (row for row in found.rows if row.key == "chat_template")
    assert (found.recipe["data"]["chat_template"], row.status) == ("model", "changed")


def test_more_steps_of_warmup_than_of_training_are_pointed_out(tmp_path: Path) -> None:
    found = converted(tmp_path, {"chats.yml": f"{AXOLOTL}max_steps: 5"})
    (row,) = (row for row in found.rows if row.key == "warmup_steps")
    assert (training(found)["warmup_ratio"], row.status) == (1, "changed")


def test_python_is_read_without_running_it(tmp_path: Path) -> None:
    found = converted(tmp_path, {"train.py": TRAINER})
    values = training(found)
    assert (found.recipe["model"], found.recipe["data"]["source"]) == ("org/model", "chats.jsonl")
    assert (values["method"], values["lora"], values["sequence_length"]) == ("qlora", {"alpha": 64}, 2048)
    assert (values["betas"], values["attention"], values["schedule"]) == ([0.9, 0.95], "sdpa", "constant")
    assert values["deterministic"]
    computed = {row.key for row in found.rows if "program computes" in row.note}
    assert {"LoraConfig.r", "SFTConfig.learning_rate"} <= computed
    assert "learning_rate" not in values, "TRL's default would be wrong"


def test_a_file_of_a_split_is_the_source(tmp_path: Path) -> None:
    files = TRAINER.replace('data_files="chats.jsonl"', 'data_files={"train": "chats.jsonl", "test": "others.jsonl"}')
    assert files != TRAINER
    data = converted(tmp_path, {"train.py": files}).recipe["data"]
    assert (data["source"], data["validation"]) == ("chats.jsonl", {"file": "others.jsonl"})


def test_of_several_splits_the_one_for_validation_is_the_validation_split(tmp_path: Path) -> None:
    given = '"org/rows", data_files={"train": "a.jsonl", "validation": "b.jsonl", "test": "c.jsonl"}'
    files = TRAINER.replace('"json", data_files="chats.jsonl"', given)
    assert files != TRAINER
    assert converted(tmp_path, {"train.py": files}).recipe["data"]["validation"] == {
        "file": "hf://datasets/org/rows/b.jsonl"
    }


def test_the_note_of_a_format_is_shown_if_the_tool_knows_the_place(tmp_path: Path) -> None:
    text = TORCHTUNE.replace("torchtune.datasets.chat_dataset, source: org/chats", "torchtune.datasets.alpaca_dataset")
    text = text.replace("conversation_column: dialog,", "").replace("conversation_style: openai,", "")
    rows = converted(tmp_path, {"a.yaml": text}).rows
    assert "### Instruction" in {row.key: row.note for row in rows}["dataset._component_"]


@pytest.mark.parametrize(
    ("loading", "method", "base_precision"),
    [
        ("", "qlora", None),
        (", load_in_4bit=False", "lora", None),
        (", load_in_16bit=True", "lora", None),
        (", load_in_8bit=True", "lora", "fp8"),
        (", load_in_fp8=True", "lora", "fp8"),
    ],
)
def test_a_program_that_loads_its_model_with_unsloth_has_its_defaults(
    tmp_path: Path, loading: str, method: str, base_precision: str | None
) -> None:
    text = f"""
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("org/model"{loading})
model = FastLanguageModel.get_peft_model(model)
SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(max_length=512)).train()
"""
    found = converted(tmp_path, {"train.py": text})
    values = training(found)
    assert (found.tool, values["method"], values["lora"]) == ("Unsloth", method, {"rank": 16, "alpha": 16})
    assert values.get("base_precision") == base_precision
    other = text.replace("FastLanguageModel.from", "AutoModelForCausalLM.from")
    other = other.replace("FastLanguageModel.get_peft_model(model)", "get_peft_model(model, LoraConfig(r=4))")
    assert not loading or training(converted(tmp_path, {"train.py": other}))["method"] == "lora"
    assert not [row.key for row in found.rows if row.status == "unknown"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_switch_that_is_off_does_not_hide_one_that_is_on(tmp_path: Path, order: int) -> None:
    switches = ", ".join(["assistant_only_loss=False", "completion_only_loss=True"][::order])
    found = converted(tmp_path, {"train.py": f"SFTTrainer(model='org/model', args=SFTConfig({switches}))"})
    assert found.recipe["data"]["train_on"] == "completion"


def test_the_loss_that_cpo_adds_to_simpo_is_pointed_out(tmp_path: Path) -> None:
    for text in ("base_model: m\nrl: simpo\nmicro_batch_size: 1", "base_model: m\nrl: simpo\ncpo_alpha: 0.5"):
        changed = [row for row in converted(tmp_path, {"a.yml": text}).rows if "cpo_alpha" in row.note]
        assert {row.key for row in changed} == {"rl", "cpo_alpha"}
    found = converted(tmp_path, {"a.yml": "base_model: m\nrl: simpo\ncpo_alpha: 0"})
    assert not [row for row in found.rows if "cpo_alpha" in row.note]
    kto = converted(tmp_path, {"a.yml": "base_model: m\nrl: kto\ncpo_alpha: 0.5"})
    assert {row.key: row.note for row in kto.rows}["rl"] == ""
    assert found.recipe["training"]["objective"] == "simpo"


def test_default_columns_of_llamafactory_are_those_that_are_written_out(tmp_path: Path) -> None:
    columns = {"prompt": "instruction", "query": "input", "response": "output"}
    spelled = converted(tmp_path, info(columns=columns)).recipe["data"]["format"]
    assert spelled["kind"] == "jinja"
    for about in ({}, {"formatting": "alpaca"}):
        assert converted(tmp_path, info(**about)).recipe["data"]["format"] == spelled
    assert "format" not in converted(tmp_path, info(ranking=True)).recipe["data"]
    of_texts = info()
    of_texts["a.yaml"] = of_texts["a.yaml"].replace("stage: sft", "stage: pt")
    assert "format" not in converted(tmp_path, of_texts).recipe["data"]


def test_a_notebook_is_read_to_its_first_model(tmp_path: Path) -> None:
    found = converted(tmp_path, {"notebook.ipynb": UNSLOTH})
    values = training(found)
    assert (found.tool, found.recipe["model"], found.recipe["data"]["train_on"]) == (
        "Unsloth",
        "unsloth/model",
        "assistant",
    )
    assert found.recipe["data"]["chat_template"] == "model", "Llama 3.1's adds a system turn with dates"
    assert (values["lora"], values["max_steps"]) == ({"rank": 16, "alpha": 16, "targets": ["q_proj"]}, 60)
    assert (values["warmup_ratio"], values["optimizer"], values["global_batch_size"]) == (0.0833, "adamw8bit", 8)


def test_torchtune_and_automodel_become_the_same_training(tmp_path: Path) -> None:
    found = converted(tmp_path, {"lora.yaml": TORCHTUNE})
    values = training(found)
    targets = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert values["lora"] == {"rank": 8, "alpha": 16, "dropout": 0, "targets": targets}
    assert (values["max_steps"], values["warmup_ratio"], values["max_grad_norm"]) == (200, 0.1, 10**9)
    assert (values["global_batch_size"], values["weight_decay"]) == (16, 0.01)
    assert found.recipe["data"]["format"] == {"kind": "messages", "column": "dialog", "style": "openai"}
    assert (found.recipe["data"]["train_on"], found.recipe["model"]) == ("all", "/models/llama")
    found = converted(tmp_path, {"peft.yaml": AUTOMODEL})
    values = training(found)
    assert (values["global_batch_size"], values["sequence_length"], values["lora"]["alpha"]) == (64, 4096, 32)
    assert (values["warmup_ratio"], values["min_learning_rate_ratio"], values["tensor_parallel"]) == (0.1, 0.1, 2)
    assert found.recipe["data"]["format"] == {
        "kind": "prompt-completion", "prompt": "{prompt}", "completion": "{response}"
    }  # fmt: skip
    assert (
        training(converted(tmp_path, {"peft.yaml": AUTOMODEL.replace("lr_scheduler:", "ci:")}))["schedule"]
        == "constant"
    )


def test_what_ftkit_refuses_is_left_out_with_its_reason(tmp_path: Path) -> None:
    found = converted(tmp_path, EDGES["offload beside 8-bit states"])
    (refused,) = (row for row in found.rows if row.note.startswith("ftkit refuses"))
    assert (refused.key, refused.became) in {("optim", ""), ("deepspeed_config.offload_optimizer_device", "")}
    full = converted(tmp_path, EDGES["full training with LoRA's keys"])
    assert "lora" not in training(full)
    odd = converted(tmp_path, EDGES["values of a wrong type"])
    assert odd.recipe["model"] == "OWNER/MODEL"
    assert sum(row.note.startswith("ftkit refuses") for row in odd.rows) == 2


def test_patterns_select_linear_layers(tmp_path: Path) -> None:
    text = EDGES["a regular expression"]["a.yml"].replace("lora_target_linear: true", "")
    found = converted(tmp_path, {"a.yml": text})
    assert training(found)["lora"]["targets"] == ["q_proj", "up_proj"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yml", "base_model: m\nrl: grpo"),
        ("b.yaml", "model_name_or_path: m\nstage: rm"),
        ("c.sh", "trl reward --model_name_or_path m --dataset_name d"),
        ("d.py", "DPOConfig(loss_type='hinge')"),
        ("e.yaml", "loss: {_component_: torchtune.rlhf.loss.PPOLoss}"),
        ("f.py", "GRPOTrainer(model='m')"),
        ("g.yaml", "model_name_or_path: m\nstage: dpo\npref_loss: kto_pair"),
        ("h.py", "KTOConfig(loss_type='apo_zero_unpaired')"),
        ("i.yaml", "recipe: TrainBiEncoderRecipe"),
        ("j.yaml", "recipe: TrainFinetuneRecipeForSequenceClassification"),
        ("k.yaml", "recipe: DiffusionLMSFTRecipe"),
    ],
)
def test_training_that_ftkit_does_not_have_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match="supervised"):
        converted(tmp_path, {name: text})


def test_cpo_is_refused_unless_it_is_simpo(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CPO, but simpo"):
        converted(tmp_path, {"a.py": "CPOConfig(beta=0.1)"})


@pytest.mark.parametrize(
    ("name", "text", "objective", "options"),
    [
        (
            "a.py",
            "DPOTrainer(model='m', args=DPOConfig(beta=0.2, label_smoothing=0.1, rpo_alpha=0.5))",
            "dpo",
            {"beta": 0.2, "label_smoothing": 0.1, "loss_weight_sft": 0.5},
        ),
        ("b.py", "DPOConfig(output_dir='x', loss_type=['ipo'])", "ipo", {"beta": 0.1}),
        ("c.py", "DPOConfig(loss_type='sigmoid')", "dpo", {"beta": 0.1}),
        ("d.py", "ORPOConfig(beta=0.4)", "orpo", {"beta": 0.4}),
        ("e.py", "CPOConfig(loss_type='simpo', cpo_alpha=0.0)", "simpo", {"beta": 0.1, "gamma": 0.5}),
        (
            "f.sh",
            "trl kto --model_name_or_path m --desirable_weight 1.3 --undesirable_weight 0.9",
            "kto",
            {"beta": 0.1, "desirable_weight": 1.3, "undesirable_weight": 0.9},
        ),
        ("g.sh", "accelerate launch scripts/dpo.py --model_name_or_path m --beta 0.3", "dpo", {"beta": 0.3}),
        ("h.yml", "base_model: m\nrl: dpo\nrl_beta: 0.2", "dpo", {"beta": 0.2}),
        ("i.yml", "base_model: m\nrl: ipo", "ipo", {"beta": 0.1}),
        ("j.yml", "base_model: m\nrl: orpo\norpo_alpha: 0.2", "orpo", {"beta": 0.2}),
        ("k.yml", "base_model: m\nrl: simpo\nsimpo_gamma: 1.5", "simpo", {"beta": 0.1, "gamma": 1.5}),
        (
            "l.yml",
            "base_model: m\nrl: kto\nkto_desirable_weight: 0.2",
            "kto",
            {"beta": 0.1, "desirable_weight": 0.2},
        ),
        ("m.yaml", "stage: dpo\npref_beta: 0.2\npref_ftx: 0.5", "dpo", {"beta": 0.2, "loss_weight_sft": 0.5}),
        ("n.yaml", "stage: dpo\npref_loss: simpo\nsimpo_gamma: 0.7", "simpo", {"beta": 0.1, "gamma": 0.7}),
        ("o.yaml", "stage: kto\nkto_rejected_weight: 2.0", "kto", {"beta": 0.1, "undesirable_weight": 2}),
        ("p.yaml", "loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.2}", "dpo", {"beta": 0.2}),
        (
            "q.yaml",
            """teacher_checkpointer: {checkpoint_dir: /large}
            kd_ratio: 0.7
            loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
            kd_loss: {_component_: torchtune.modules.loss.ForwardKLWithChunkedOutputLoss}
            """.replace("            ", ""),
            "distill",
            {"teacher": "/large", "alpha": 0.7},
        ),
        (
            "r.yaml",
            """recipe: KnowledgeDistillationRecipeForNextTokenPrediction
            kd_loss_fn: {temperature: 2.0}
            teacher_model: {pretrained_model_name_or_path: org/large}
            """.replace("            ", ""),
            "distill",
            {"teacher": "org/large", "temperature": 2},
        ),
    ],
)
def test_objectives_are_converted(
    tmp_path: Path, name: str, text: str, objective: str, options: dict[str, float]
) -> None:
    values = training(converted(tmp_path, {name: text}))
    assert (values["objective"], values[objective]) == (objective, options)


def test_pairs_of_torchtune_keep_their_columns(tmp_path: Path) -> None:
    data = "dataset: {_component_: torchtune.datasets.stack_exchange_paired_dataset, source: json, data_files: a.jsonl}"
    found = converted(tmp_path, {"a.yaml": f"loss: {{_component_: torchtune.rlhf.loss.DPOLoss}}\n{data}"})
    form = {"kind": "preferences", "prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    assert (found.recipe["data"]["source"], found.recipe["data"]["format"]) == ("a.jsonl", form)


def test_nested_keys_of_llamafactory_are_read(tmp_path: Path) -> None:
    text = """
model: org/model
peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}
dist_config: {name: fsdp2}
train_dataset: data/v1.yaml
micro_batch_size: 2
cutoff_len: 512
"""
    found = converted(tmp_path, {"a.yaml": text})
    assert (found.tool, found.recipe["model"], training(found)["sequence_length"]) == (
        "LLaMA-Factory",
        "org/model",
        512,
    )
    assert (training(found)["global_batch_size"], training(found)["lora"]) == (2, {"rank": 16, "alpha": 32})
    assert "data.source" in {row.key: row.note for row in found.rows}["train_dataset"]


def test_of_a_multimodal_training_the_text_part_is_converted(tmp_path: Path) -> None:
    found = converted(tmp_path, {"a.yaml": "recipe: FinetuneRecipeForVLM\nfreeze_config: {freeze_vision_tower: true}"})
    assert {row.key: row.status for row in found.rows}["recipe"] == "changed"
    assert training(found).get("objective") is None


def test_a_name_that_only_the_tool_knows_is_replaced_by_that_of_the_file(tmp_path: Path) -> None:
    text = "step_scheduler: {global_batch_size: 8}\nwandb: {name: '<your_wandb_name>', project: '${oc.env:PROJECT,x}'}"
    found = converted(tmp_path, {"mine.yaml": text})
    assert found.recipe["name"] == "mine"
    assert "tracking" not in found.recipe


def test_what_preferences_do_not_have_is_explained(tmp_path: Path) -> None:
    text = (
        "trl dpo --model_name_or_path m --dataset_name d --max_length 512 --max_prompt_length 256 --beta 0.2 "
        "--precompute_ref_log_probs True --reference_free False --simpo_gamma 0.3"
    )
    found = converted(tmp_path, {"a.sh": text})
    notes = {row.key: row.note for row in found.rows}
    assert found.recipe["data"]["too_long"] == "drop"
    assert "train_on" not in found.recipe["data"]
    assert training(found)["sequence_length"] == 512
    assert training(found)["learning_rate"] == 1e-6
    assert "no part is cut" in notes["max_prompt_length"]
    assert "once, before step 1" in notes["precompute_ref_log_probs"]
    assert "orpo and simpo" in notes["reference_free"]
    assert notes["simpo_gamma"] == "objective dpo has no such option"
    supervised = converted(tmp_path, {"b.sh": "trl sft --model_name_or_path m --beta 0.2"})
    assert {row.key: row.note for row in supervised.rows}["beta"] == "objective next_token has no such option"
    assert training(supervised)["learning_rate"] == 2e-5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "a: [1"),
        ("b.py", "x = ("),
        ("c.sh", "trl sft --x 'y"),
        ("d.ipynb", "{}"),
        ("e.json", "{"),
        ("f.yaml", "k: v"),
    ],
)
def test_damaged_and_unknown_files_are_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError):
        converted(tmp_path, {name: text})


def test_tables_name_keys_of_recipes_and_conversions() -> None:
    values = read_values()["values"]
    for tool in (*TOOLS, LAUNCHERS):
        for target in set(read_tool(tool).keys.values()) | {table.get("key", key) for key, table in values.items()}:
            if "." not in target or target.startswith(("dataset.", "objective.")):
                continue
            value = {target.rpartition(".")[2]: object()}
            for section in reversed(target.split(".")[:-1]):
                value = {section: value}
            with pytest.raises(ConfigError) as caught:
                validate(RecipeSpec, Layers({"name": "a", **value}))
            assert not [each for each in caught.value.problems if "unknown key" in each.message], target


def test_no_word_of_a_table_has_two_meanings() -> None:
    for path in assets.OTHER_TOOLS.glob("*.yaml"):
        table = read_yaml(path).values
        words = [word for part in ("keys", "none") for each in table.get(part, {}).values() for word in each.split()]
        assert sorted(words) == sorted(set(words)), path.name


SFT = "stage: sft\nfinetuning_type: "


@pytest.mark.parametrize(
    ("text", "vision"),
    [
        (f"{SFT}full\nfreeze_multi_modal_projector: false\nfreeze_vision_tower: false", "full"),
        (f"{SFT}full\nfreeze_multi_modal_projector: false", "projector"),
        (f"{SFT}lora\nfreeze_multi_modal_projector: false\nfreeze_vision_tower: false", None),
        ("stage: sft\nfreeze_vision_tower: true\nimage_max_pixels: 262144", None),
        ("base_model: org/model\nfreeze_mm_modules: false\nimage_size: 512", "full"),
        ("base_model: org/model\nadapter: lora\nfreeze_mm_modules: false", None),
    ],
)
def test_the_parts_of_a_multimodal_model_that_another_tool_trains_are_trained(
    tmp_path: Path, text: str, vision: str | None
) -> None:
    found = converted(tmp_path, {"a.yaml": text})
    assert training(found).get("vision") == vision
    assert not [row.key for row in found.rows if row.status == "unknown"]
    trained = {row.key: row.note for row in found.rows if row.key.startswith("freeze") and row.value is False}
    assert all(("training.vision" in note) == (vision is None) for note in list(trained.values())[-1:]), trained


def info(**entry: object) -> dict[str, str]:
    text = "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: mine\n"
    return {"a.yaml": text, "dataset_info.json": json.dumps({"mine": {"file_name": "mine.json", **entry}})}


def test_the_columns_of_a_prompt_are_joined_in_the_tools_order_without_empty_ones(tmp_path: Path) -> None:
    found = converted(tmp_path, info(columns={"prompt": "task", "query": "body", "response": "ans"}))
    data = DataSpec.model_validate(found.recipe["data"])
    for body, prompt in (("Text.", "Sum up.\nText."), ("", "Sum up."), (None, "Sum up.")):
        row = {"task": "Sum up.", "body": body, "ans": "Short."}
        example = read_example(row, data, data.format)
        assert isinstance(example, Conversation)
        assert [message.content for message in example.messages] == [prompt, "Short."]
    columns = {"prompt": "the task", "query": "body", "response": "ans"}
    form = converted(tmp_path, info(columns=columns)).recipe["data"]["format"]
    assert form == {"kind": "prompt-completion", "prompt": "{the task}\n{body}", "completion": "{ans}"}
    listed = "[{path: d.jsonl, type: {field_instruction: q, field_input: c, field_output: a}}]"
    form = converted(tmp_path, {"a.yml": f"base_model: m\ndatasets: {listed}"}).recipe["data"]["format"]
    assert form["prompt"].startswith("{{ [q, c]")
    text = AUTOMODEL.replace("{question:", "{context: about, question:")
    form = converted(tmp_path, {"a.yaml": text}).recipe["data"]["format"]
    assert form["prompt"] == "{about}\n{prompt}"


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("a.yaml", "model_name_or_path: m\ndataset_name: ./d.jsonl\ndataset_train_split: train[:10]", 10),
        ("b.yaml", "model_name_or_path: m\ndataset_name: ./d.jsonl\ndataset_train_split: train[:10%]", None),
        ("c.py", "SFTConfig()\nload_dataset('json', data_files='d.jsonl', split='train[:80%]')", None),
        ("d.py", "SFTConfig()\nload_dataset('json', data_files='d.jsonl', split='train[:80]')", 80),
        ("e.py", "SFTConfig()\nload_dataset('json', data_files=['d.jsonl', 'e.jsonl'], split='train[:80]')", None),
        ("f.yml", "base_model: m\ndatasets: [{path: d.jsonl, split: 'train[:10]', type: alpaca}]", 10),
        ("g.yml", "base_model: m\ndatasets: [{path: d.jsonl, split: 'train[5:]', type: alpaca}]", None),
    ],
)
def test_a_slice_of_files_is_a_number_of_rows_or_lost(tmp_path: Path, name: str, text: str, number: int | None) -> None:
    found = converted(tmp_path, {name: text})
    (row,) = (row for row in found.rows if row.key.rpartition(".")[2] in {"split", "dataset_train_split"})
    source = found.recipe["data"]["source"]
    assert (source["num_train"] if isinstance(source, dict) else None) == number
    assert row.status == ("changed" if number else "none")
    assert "sample" in row.note


def test_a_refused_key_of_a_section_leaves_the_others(tmp_path: Path) -> None:
    text = "model_name_or_path: org/model\nmodel_revision: v1\nstage: sft\nrope_scaling: linear"
    found = converted(tmp_path, {"a.yaml": text})
    assert found.recipe["model"] == {"weights": "org/model", "revision": "v1"}
    assert {row.key: row.note for row in found.rows}["rope_scaling"].startswith("ftkit refuses model.architecture")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "model_name_or_path: m\ndataset_name: d\nmax_length: null"),
        ("b.py", "SFTConfig(max_length=None)"),
        ("c.yaml", TORCHTUNE.replace("max_seq_len: 4096", "max_seq_len: null")),
    ],
)
def test_no_truncation_is_not_the_default_length(tmp_path: Path, name: str, text: str) -> None:
    found = converted(tmp_path, {name: text})
    (row,) = (row for row in found.rows if row.key.endswith(("max_length", "max_seq_len")))
    assert "nothing is truncated" in row.note
    assert "sequence_length" not in training(found)
    assert "too_long" not in found.recipe["data"]


@pytest.mark.parametrize(
    ("loss", "note"),
    [
        ("dft", "ftkit trains with cross-entropy"),
        ("nll", "supervised fine-tuning, as here"),
        ("chunked_nll", "supervised fine-tuning, as here"),
    ],
)
def test_only_cross_entropy_is_the_loss_of_supervised_training(tmp_path: Path, loss: str, note: str) -> None:
    found = converted(tmp_path, {"a.yaml": f"model_name_or_path: m\ndataset_name: d\nloss_type: {loss}"})
    assert {row.key: row.note for row in found.rows}["loss_type"] == note
    for name in ("torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.CrossEntropyLoss"):
        found = converted(
            tmp_path, {"b.yaml": TORCHTUNE.replace("torchtune.modules.loss.LinearCrossEntropyLoss", name)}
        )
        assert {row.key: row.note for row in found.rows}["loss._component_"] == "supervised fine-tuning, as here"


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("model_name_or_path: m\ndataset_name: d\nchat_template_path: ./x.jinja", "./x.jinja"),
        ("model_name_or_path: m\ndataset_name: d\nchat_template_path: sub/x.jinja", "./sub/x.jinja"),
        ("model_name_or_path: m\ndataset_name: d\nchat_template_path: org/other", "model"),
        ("base_model: m\nchat_template: jinja\nchat_template_jinja: '{{ messages }}'", "{{ messages }}"),
        ("base_model: m\nchat_template: jinja\nchat_template_jinja: /t/x.jinja", "/t/x.jinja"),
    ],
)
def test_a_chat_template_may_be_a_file_or_text(tmp_path: Path, text: str, template: str) -> None:
    found = converted(tmp_path, {"a.yaml": text})
    assert found.recipe["data"]["chat_template"] == template
    kinds = {row.key: row.status for row in found.rows if row.key.startswith("chat_template")}
    assert list(kinds.values())[-1] == ("changed" if template == "model" else "converted")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yml", "base_model: m\nwandb_api_key: {}\nhub_token: {}\nspecial_tokens: {pad_token: <pad>}"),
        ("b.py", "SFTConfig(hub_token='{}')\nAutoModelForCausalLM.from_pretrained('m', '{}', token='{}')"),
        ("c.sh", "KEY={}\ntrl sft --model_name_or_path m --hub_token $KEY --unknown {}"),
    ],
)
def test_values_of_secrets_are_nowhere(tmp_path: Path, name: str, text: str) -> None:
    value = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
    found = converted(tmp_path, {name: text.replace("{}", value)})
    assert value not in str(found)
    assert [row.value for row in found.rows].count("***") >= 2
    assert {row.status for row in found.rows if "key" in row.key or "token" in row.key} == {"none"}


def test_the_smaller_limit_of_rows_counts(tmp_path: Path) -> None:
    files = info(num_samples=20)
    assert converted(tmp_path, files).recipe["data"]["source"] == {
        "kind": "files", "train": "mine.json", "num_train": 20
    }  # fmt: skip
    for number in (5, 50):
        limited = files | {"a.yaml": f"{files['a.yaml']}max_samples: {number}"}
        assert converted(tmp_path, limited).recipe["data"]["source"]["num_train"] == min(number, 20)


@pytest.mark.parametrize(
    ("files", "is_read_alike"),
    [
        ({"a.yml": "base_model: m\ndatasets: [{path: a.jsonl, split: 'train[:9]', type: alpaca}]\n"
                   "test_datasets: [{path: b.jsonl, ds_type: json, split: train, type: alpaca}]"}, True),
        ({"a.yml": "base_model: m\ndatasets: [{path: a.jsonl, type: chat_template, roles_to_train: [user]}]\n"
                   "test_datasets: [{path: json, data_files: [b.jsonl], type: chat_template, roles_to_train: [user]}]"},
         True),
        ({"a.yml": "base_model: m\ndatasets: [{path: a.jsonl, type: alpaca}]\n"
                   "test_datasets: [{path: b.jsonl, type: chat_template}]"}, False),
        ({"a.yml": "base_model: m\ndatasets: [{path: a.jsonl}]\ntest_datasets: [{path: b.jsonl, split: 'train[:9]'}]"},
         False),
        ({"a.yml": "base_model: m\ndatasets: [{path: a.jsonl}]\ntest_datasets: [{path: org/b, split: test}]"}, False),
        ({"a.yaml": "stage: sft\ndataset: x\neval_dataset: y",
          "dataset_info.json": '{"x": {"file_name": "a.jsonl", "num_samples": 9}, "y": {"file_name": "b.jsonl"}}'},
         True),
        ({"a.yaml": "stage: sft\ndataset: x\neval_dataset: y", "dataset_info.json":
          '{"x": {"file_name": "a.jsonl"}, "y": {"file_name": "b.jsonl", "num_samples": 9}}'}, False),
        ({"a.yaml": "stage: sft\ndataset: x\neval_dataset: y", "dataset_info.json":
          '{"x": {"file_name": "a.jsonl"}, "y": {"file_name": "b.jsonl", "formatting": "sharegpt"}}'}, False),
    ],
)  # fmt: skip
def test_a_file_that_is_read_like_the_training_data_is_the_validation_split(
    tmp_path: Path, files: dict[str, str], is_read_alike: bool
) -> None:
    found = converted(tmp_path, files)
    validation = found.recipe["data"].get("validation")
    assert validation == ({"file": "b.jsonl"} if is_read_alike else None)
    notes = [row.note for row in found.rows if row.key in {"test_datasets[0].path", "y.file_name"} and not row.became]
    assert all("is read like the data to train on" in note for note in notes)
    assert not [row.key for row in found.rows if row.status == "unknown"]


@pytest.mark.parametrize(
    ("files", "key", "word"),
    [
        ({"a.yaml": TORCHTUNE.replace("num_warmup_steps: 20", "num_cycles: 2")}, "lr_scheduler.num_cycles", "cosine"),
        ({"a.yaml": TORCHTUNE.replace("packed: true", "new_system_prompt: Hi")}, "dataset.new_system_prompt", "system"),
        ({"a.yml": f"{AXOLOTL.replace('sample_packing: true', 'sample_packing: false')}"}, "sample_packing", "off"),
    ],
)
def test_reasons_are_true(tmp_path: Path, files: dict[str, str], key: str, word: str) -> None:
    notes = {row.key: row.note for row in converted(tmp_path, files).rows}
    assert word in notes[key]
    assert "always" not in notes[key]


@pytest.mark.parametrize(
    ("tags", "style"),
    [
        ({"role_tag": "role", "content_tag": "content"}, "openai"),
        ({"role_tag": "from", "content_tag": "value"}, "sharegpt"),
        ({}, "sharegpt"),
        ({"role_tag": "role"}, None),
    ],
)
def test_the_tags_of_turns_decide_their_style(tmp_path: Path, tags: dict[str, str], style: str | None) -> None:
    found = converted(tmp_path, info(formatting="sharegpt", columns={"messages": "turns"}, tags=tags))
    form = {"kind": "messages", "column": "turns", "style": style} if style else None
    assert found.recipe["data"].get("format") == form


@pytest.mark.parametrize(
    ("setting", "size"),
    [("context_parallel_size: 2", 2), ("context_parallel_size: 2\ntensor_parallel_size: 2", 1), ("", 4)],
)
def test_gpus_that_share_a_sequence_count_once_in_a_batch(tmp_path: Path, setting: str, size: int) -> None:
    text = f"base_model: m\nsequence_len: 512\nmicro_batch_size: 1\n{setting}"
    found = converted(tmp_path, {"a.yml": text}, num_gpus=4)
    assert training(found)["global_batch_size"] == size


def test_gpus_that_share_a_sequence_are_at_least_assumed(tmp_path: Path) -> None:
    text = "base_model: m\nsequence_len: 512\nmicro_batch_size: 1\ncontext_parallel_size: 2"
    found = converted(tmp_path, {"a.yml": text})
    assert training(found)["global_batch_size"] == 1
    assert any("2 GPUs (assumed" in row.note for row in found.rows)
