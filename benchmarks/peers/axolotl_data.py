"""Axolotl's preparation of the chats of `benchmarks/data.py`: what its `train` does before the trainer."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"

import axolotl.cli.preprocess  # noqa: F401 - in the order of Axolotl's commands
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.utils.dict import DictDefault
from preparation import Cost, Stopwatch, print_cost

LENGTH = 4096


def measure(folder: Path, source: Path, workers: int) -> Cost:
    """Load, tokenize and save a file, and assign its rows to packs, which the trainer would concatenate."""
    with tempfile.TemporaryDirectory() as output:
        rows = {"path": str(source), "ds_type": "json", "type": "chat_template", "field_messages": "messages",
                "roles_to_train": ["assistant"], "train_on_eos": "turn"}  # fmt: skip
        options = load_cfg(
            DictDefault(
                {"base_model": str(folder / "tokenizer"), "sequence_len": LENGTH, "sample_packing": True,
                 "datasets": [rows], "chat_template": "tokenizer_default", "dataset_num_proc": workers,
                 "dataset_prepared_path": f"{output}/prepared", "output_dir": f"{output}/run", "val_set_size": 0,
                 "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1, "learning_rate": 1e-5,
                 "optimizer": "adamw_torch", "bf16": False, "attn_implementation": "flex_attention", "use_cpu": True}
            )
        )  # fmt: skip
        watch = Stopwatch()
        load_datasets(cfg=options)
        watch.stop()
        return watch.cost(options.total_num_tokens, options.sample_packing_eff_est)


if __name__ == "__main__":
    print_cost(measure(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[5])))
