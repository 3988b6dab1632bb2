"""Write the export of an untrained model to `FOLDER/export` and its validation rows to `FOLDER/data`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from ftkit.data.prepared_data import DataManifest, PreparedData
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.models.architecture import ArchitectureSpec
from ftkit.models.folder import EXPORT_RECORD
from ftkit.train.components.generation import Generation
from ftkit.train.model.hf_model import make_config

(folder,) = map(Path, sys.argv[1:])
tokenizer = learn_tokenizer(["CREATE TABLE pets (name TEXT)"], 300, "mistral")
shape = ArchitectureSpec(
    family="qwen3", vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
)  # fmt: skip
AutoModelForCausalLM.from_config(make_config(shape, tokenizer)).save_pretrained(folder / "export")
tokenizer.save_pretrained(folder / "export")
Generation.of(tokenizer, None).save(folder / "export")
(folder / "export" / EXPORT_RECORD).write_text(json.dumps({"step": 1}), encoding="utf-8")
data = PreparedData(folder / "data")
data.root.mkdir()
row = {"sql_context": "CREATE TABLE pets (name TEXT)", "sql_prompt": "How many pets are there?", "sql": "SELECT 1"}
data.validation_rows.write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
data.validation_sources.write_text("0\n" * 4, encoding="ascii")
data.write_manifest(DataManifest("untrained", 256, 0, 0, 0, 0, 4, 1, 0, 256))
