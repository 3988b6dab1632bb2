"""TRL's preparation of the chats of `benchmarks/data.py`: packed, loss on assistant turns, in one process."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from data import Result, cpu_seconds, peak_mib
from datasets import disable_caching, load_dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

LENGTH = 4096
TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n"
    "{% if turn['role'] == 'assistant' %}{% generation %}{{ turn['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ turn['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with the generation blocks that TRL needs for trained tokens."""


def measure(folder: Path, source: Path) -> Result:
    """Prepare a file as the constructor of `SFTTrainer` does."""
    disable_caching()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    shape = LlamaConfig(
        vocab_size=32_000, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(shape)
    with tempfile.TemporaryDirectory() as output:
        options = SFTConfig(
            output_dir=output, packing=True, packing_strategy="bfd", assistant_only_loss=True, max_length=LENGTH,
            report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        began, cpu = time.perf_counter(), cpu_seconds()
        rows = load_dataset("json", data_files=str(source), split="train", cache_dir=output)
        packs = SFTTrainer(model, options, train_dataset=rows, processing_class=tokenizer).train_dataset
        seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        num_tokens = sum(map(len, packs["input_ids"]))
        return Result(seconds, cpu, num_tokens, num_tokens / (len(packs) * LENGTH), peak_mib())


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[2]), Path(sys.argv[3])).__dict__))
