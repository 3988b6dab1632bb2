"""TRL's preparation of the chats of `benchmarks/data.py`: what the constructor of `SFTTrainer` does."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from datasets import disable_caching, load_dataset
from preparation import Cost, Stopwatch, print_cost
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


def measure(folder: Path, source: Path, workers: int) -> Cost:
    """Load, tokenize and pack a file."""
    disable_caching()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "tokenizer"))
    with tempfile.TemporaryDirectory() as output:
        options = SFTConfig(
            output_dir=output, packing=True, packing_strategy="bfd", assistant_only_loss=True, max_length=LENGTH,
            dataset_num_proc=workers if workers > 1 else None, report_to=[], use_cpu=True, bf16=False,
            disable_tqdm=True,
        )  # fmt: skip
        watch = Stopwatch()
        rows = load_dataset("json", data_files=str(source), split="train", cache_dir=output)
        packs = SFTTrainer(model, options, train_dataset=rows, processing_class=tokenizer).train_dataset
        watch.stop()
        num_tokens = sum(map(len, packs["input_ids"]))
        return watch.cost(num_tokens, num_tokens / (len(packs) * LENGTH))


if __name__ == "__main__":
    print_cost(measure(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[5])))
