"""LLaMA-Factory's preparation of the chats of `benchmarks/data.py`: what its `train` does before the trainer."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
from preparation import Cost, Stopwatch, print_cost

LENGTH = 4096
_DATASETS = "dataset_info.json"
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
         "system_tag": "system"}  # fmt: skip


def measure(folder: Path, source: Path, workers: int) -> Cost:
    """Load, tokenize, pack and save a file; `neat_packing` keeps the documents of a pack apart."""
    with tempfile.TemporaryDirectory() as output:
        info = {"file_name": str(source), "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": _TAGS}
        Path(output, _DATASETS).write_text(json.dumps({"chats": info}))
        model, data, training, *_ = get_train_args(
            {"model_name_or_path": str(folder / "tokenizer"), "stage": "sft", "do_train": True, "template": "chatml",
             "finetuning_type": "full", "dataset": "chats", "dataset_dir": output, "cutoff_len": LENGTH,
             "packing": True, "neat_packing": True, "preprocessing_num_workers": workers, "overwrite_cache": True,
             "tokenized_path": f"{output}/tokenized", "output_dir": f"{output}/run", "use_cpu": True,
             "report_to": "none"}
        )  # fmt: skip
        loaded = load_tokenizer(model)
        template = get_template_and_fix_tokenizer(loaded["tokenizer"], data)
        watch = Stopwatch()
        packs = get_dataset(template, model, data, training, stage="sft", **loaded)["train_dataset"]
        watch.stop()
        num_tokens = sum(int((np.asarray(pack["attention_mask"]) > 0).sum()) for pack in packs)
        return watch.cost(num_tokens, num_tokens / (len(packs) * LENGTH))


if __name__ == "__main__":
    print_cost(measure(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[5])))
