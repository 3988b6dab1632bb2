"""`PYTHON compress.py EXPORT FORMAT CALIBRATION FOLDER`: quantize an export with llm-compressor.

This is a standalone program for the environment of llm-compressor, which need not have ftkit. CALIBRATION is a JSON
list of tokenized documents.
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM

_KEPT = ["lm_head", r"re:.*(router|gate)$"]
"""The output projection and routers of experts: they have few weights, but much depends on them."""


def main(export: str, form: str, calibration: str, folder: str) -> None:
    """Quantize the linear layers.

    `fp8`: weights per channel, activations dynamically per token, without calibration. `w4a16`: 4-bit weights in groups
    of 128 with GPTQ (Frantar et al. 2022).
    """
    model = AutoModelForCausalLM.from_pretrained(export, dtype="auto")
    documents = json.loads(Path(calibration).read_text(encoding="utf-8"))
    if form == "fp8":
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=_KEPT))
    else:
        rows = Dataset.from_list([{"input_ids": each, "attention_mask": [1] * len(each)} for each in documents])
        recipe = GPTQModifier(targets="Linear", scheme="W4A16", ignore=_KEPT)
        oneshot(model=model, recipe=recipe, dataset=rows, num_calibration_samples=len(documents))
    model.save_pretrained(folder, save_compressed=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:  # noqa: BLE001 - print the reason in one line instead of a stack
        sys.exit(f"ERROR: {' '.join(str(error).split())}")
