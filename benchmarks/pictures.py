"""Benchmark training on pictures: ftkit's trainer, and TRL's on the same model, rows and processor.

    python benchmarks/pictures.py --case gemma3-4b [--peer trl] [--steps 12] [--record DIR] [key=value …]

Random weights; each row is a question about one drawn picture of 896 x 896 pixels, and an answer. ftkit packs the rows
of `data.sequence_length`; TRL pads as many of them, and its processor prepares them for each batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from recording import Row, record_of, write_record
from tokenizers import Tokenizer, models, pre_tokenizers
from train import Step
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
)

from ftkit.data.prepared_data import PreparedData
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import read_plan
from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import StepRecord

SIDE, ANSWER_WORDS = 896, 100
TEMPLATE = (
    "{% for turn in messages %}<start>{{ turn.role }}\n{% if turn.content is string %}{{ turn.content }}{% else %}"
    "{% for part in turn.content %}{% if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def tokenizer_of(picture: str, special: list[str], **named: str) -> Any:
    """Return a byte-level tokenizer with the special tokens of a family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=named)
    tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<pad>"})
    tokenizer.add_tokens(["<start>", *special], special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("PICTURE", picture)
    return tokenizer


def gemma3_4b() -> tuple[Any, Any]:
    """Return configuration and processor of Gemma 3 4B."""
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = tokenizer_of("<start_of_image>", [], **names)
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}), tokenizer, image_seq_length=256
    )
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "vocab_size": 262_208,
    }  # fmt: skip
    vision = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": SIDE, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(names[name]) for name in ("boi_token", "eoi_token")}
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=256,
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"), **ids,
    )  # fmt: skip
    return config, processor


def qwen2_5_vl_7b() -> tuple[Any, Any]:
    """Return configuration and processor of Qwen2.5-VL 7B."""
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = tokenizer_of("<|vision_start|><|image_pad|><|vision_end|>", special)
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    image_processor = transformers.Qwen2VLImageProcessor(size=pixels)  # needs torchvision
    processor = Qwen2_5_VLProcessor(image_processor, tokenizer, transformers.Qwen2VLVideoProcessor())
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(special), strict=True))
    text = {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "rope_theta": 1_000_000.0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0},
    }  # fmt: skip
    vision = {"hidden_size": 1280, "out_hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids), processor


CASES: dict[str, Callable[[], tuple[Any, Any]]] = {"gemma3-4b": gemma3_4b, "qwen2.5-vl-7b": qwen2_5_vl_7b}


def save_model(case: str, folder: Path, layers: int | None) -> None:
    """Save a model with random weights in bf16, and its processor."""
    config, processor = CASES[case]()
    if layers:
        config.text_config.num_hidden_layers = layers
        config.text_config.layer_types = config.text_config.layer_types[:layers]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        for name, weight in model.named_parameters():
            if "mm_input_projection" in name:  # transformers initializes Gemma 3's projector with zeros
                torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def write_rows(folder: Path, number: int) -> Path:
    """Draw pictures, and write a row of a question and an answer about each."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for row in range(number):
            picture = Image.effect_noise((SIDE, SIDE), 40).convert("RGB")
            ImageDraw.Draw(picture).ellipse([row, row, 400 + row, 300 + row], fill=(row * 7 % 256, 90, 200))
            picture.save(folder / f"{row}.jpg", quality=90)
            answer = " ".join(f"{(row * 31 + word) % 997:03}" for word in range(ANSWER_WORDS))
            turns = [
                {"role": "user", "content": [{"type": "image", "image": f"{row}.jpg"}, {"type": "text", "text": "?"}]},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def run_ftkit(model: Path, rows: Path, options: argparse.Namespace) -> Path:
    """Run ftkit as a user does; return the run's folder."""
    recipe = rows.parent / "recipe.yaml"
    recipe.write_text(
        f"model: {model}\ndata: {{source: {rows}}}\n"
        "training: {method: lora, learning_rate: 1e-4, micro_batch_size: 1, global_batch_size: 1, schedule: constant,\n"
        f"  warmup_ratio: 0, checkpoint_every_steps: 1000, log_every_steps: 1, max_steps: {options.steps},\n"
        f"  sequence_length: {options.length}}}\n"
    )
    command = [sys.executable, "-m", "ftkit", "run", str(recipe), "--name", "pictures", *options.overrides]
    subprocess.run(command, cwd=rows.parent, check=True)
    return next((rows.parent / "runs").glob("pictures-*"))


def steps_of_ftkit(run: Path) -> list[Step]:
    """Return the steps of a run of ftkit."""
    records = [record for record in read_records(RunLayout(run).metrics) if isinstance(record, StepRecord)]
    return [
        Step(each.step, each.step_seconds, each.loss, each.memory_gib or 0.0, each.data_wait_ratio) for each in records
    ]


def run_trl(run: Path, model: Path, rows: Path, batch: int, options: argparse.Namespace) -> list[Step]:
    """Run TRL on the same rows, and return its steps."""
    results = rows.parent / "trl.jsonl"
    program = [
        str(Path(__file__).parent / "peers" / "trl_pictures.py"),
        str(RunLayout(run).plan),
        str(model),
        str(rows),
    ]
    program += [f"--results={results}", f"--steps={options.steps}", f"--warm-up-steps={options.warm_up_steps}"]
    program += [f"--batch={batch}", f"--output={rows.parent / 'trl'}", *["--no-liger"] * options.no_liger]
    subprocess.run([options.peer_python, *program], check=True)
    return [Step(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines()]


def measure_case(case: str, options: argparse.Namespace, root: Path) -> None:
    """Measure ftkit, then TRL."""
    model = root / "model"
    save_model(case, model, options.layers)
    rows = write_rows(root, options.rows)
    run = run_ftkit(model, rows, options)
    plan = read_plan(RunLayout(run))
    store = PreparedData(plan.data.root).read_train()
    batch = round(store.num_documents / len(store))
    measured = {"ftkit": steps_of_ftkit(run)}
    if options.peer:
        measured[f"TRL {version('trl')}"] = run_trl(run, model, rows, batch, options)
    print(f"{batch} rows in a pack of {options.length}; planned {plan.memory.total:.1f} GiB")
    found = []
    for trainer, steps in measured.items():
        steady = steps[options.warm_up_steps :]
        rates = [batch / step.seconds for step in steady]
        medians = {
            "rows/s": statistics.median(rates),
            "rows in a step": float(batch),
            "peak GiB": max(step.memory_gib for step in steady),
            "loss of step 1": steps[0].loss,
            "waiting for data": steady[-1].data_wait_ratio,
        }
        print(case, trainer, {name: value and round(value, 4) for name, value in medians.items()}, flush=True)
        found.append(Row({"row": trainer}, medians, {"rows/s": rates}, None))
    if options.record:
        print(write_record(options.record, f"pictures-{case}", record_of(found, python=options.peer_python)))


def main() -> None:
    """Measure the requested cases in sequence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, choices=CASES)
    parser.add_argument("--peer", choices=("trl",))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a pack")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--layers", type=int, help="fewer decoder layers, to try it")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up-steps", type=int, default=4)
    parser.add_argument("--no-liger", action="store_true", help="TRL without Liger's kernels")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write a record of each trainer there")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    for case in options.case:
        with tempfile.TemporaryDirectory() as folder:
            measure_case(case, options, Path(folder))


if __name__ == "__main__":
    main()
