"""Train an ftkit plan on preferences with TRL: `benchmarks/train.py` starts this under torchrun.

    torchrun --nproc-per-node=1 benchmarks/peers/trl_preferences.py PLAN --steps 16 --results FILE

As in `trl_sft.py`, the model and the pairs are those of ftkit's trainer; objectives dpo and ipo are TRL's `DPOTrainer`,
kto its `KTOTrainer`, with ftkit's mismatched completions, orpo its `ORPOTrainer`, and simpo its `CPOTrainer`. A batch
has the documents of a micro-batch of packs, padded as TRL does. The reference is the model without adapters, or
log-probabilities that TRL computes beforehand.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, load_from_disk
from transformers.utils import is_flash_attn_4_available
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_sft import StepWriter, build_model, make_settings

from ftkit.data.packing import IGNORED, mismatch_completions, pack_at
from ftkit.data.prepared_data import PreparedData
from ftkit.data.tokenizers import load_saved_tokenizer
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import RunPlan, read_plan
from ftkit.train.model.lora import init_adapters, peft_config

if TYPE_CHECKING:
    from numpy.typing import NDArray


Prompted = tuple[list[int], list[int]]
"""The tokens of a document: its prompt, and its completion."""


def read_documents(packs: NDArray[np.int32]) -> list[Prompted]:
    """Return the documents of packs, int32 [P, 4, L]."""
    documents = []
    for tokens, labels, positions, _ in packs:
        for begin, end in pairwise([*np.flatnonzero(positions == 0).tolist(), len(tokens)]):
            first = begin + 1 + int(np.flatnonzero(labels[begin:end] != IGNORED)[0])
            documents.append((tokens[begin:first].tolist(), tokens[first:end].tolist()))
    return documents


def read_rows(plan: RunPlan, num_steps: int) -> list[dict[str, Any]]:
    """Return the rows in ftkit's training order, as tokens."""
    store = PreparedData(plan.data.root).read_train()
    seed = plan.recipe.training.seed
    packs = store.read([pack_at(index, len(store), seed) for index in range(num_steps * plan.batch.global_batch_size)])
    documents = read_documents(packs)
    if plan.recipe.training.objective == "kto":
        others = read_documents(mismatch_completions(packs))
        return [
            {"prompt_ids": prompt, "completion_ids": own, "KL_completion_ids": other, "label": number % 2 == 0}
            for number, ((prompt, own), (_, other)) in enumerate(zip(documents, others, strict=True))
        ]
    pairs = zip(documents[::2], documents[1::2], strict=True)
    return [{"prompt_ids": prompt, "chosen_ids": one, "rejected_ids": other} for (prompt, one), (_, other) in pairs]


class TokenizedDpo(DPOTrainer):
    """Takes pairs as tokens."""

    def _prepare_dataset(self, dataset: Dataset, *_settings: Any) -> Dataset:
        return dataset


class TokenizedKto(KTOTrainer):
    """Takes completions as tokens, with those of other prompts."""

    def _prepare_dataset(self, dataset: Dataset, *_settings: Any) -> Dataset:
        return dataset


def tokenized_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that TRL's older trainers make of a row."""
    prompt, columns = row["prompt_ids"], {}
    for side in ("chosen", "rejected"):
        ids = prompt + row[f"{side}_ids"]
        columns[f"{side}_input_ids"], columns[f"{side}_attention_mask"] = ids, [1] * len(ids)
        columns[f"{side}_labels"] = [IGNORED] * len(prompt) + row[f"{side}_ids"]
    return columns | {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}


class TokenizedOrpo(ORPOTrainer):
    """Takes pairs as tokens."""

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        del model
        return tokenized_row(feature)


class TokenizedCpo(CPOTrainer):
    """Takes pairs as tokens."""

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        del model
        return tokenized_row(feature)


def as_dataset(rows: list[dict[str, Any]], folder: Path) -> Dataset:
    """Return rows as a data set in files: processes exchange log-probabilities of the reference by files beside it."""
    with PartialState().main_process_first():
        if not folder.exists():
            Dataset.from_list([{"prompt": "", "chosen": "", "rejected": ""} | row for row in rows]).save_to_disk(folder)
    return load_from_disk(folder)


def make_trainer(plan: RunPlan, model: Any, options: argparse.Namespace) -> Any:
    """Return TRL's trainer of the plan's objective."""
    training = plan.recipe.training
    rows = read_rows(plan, options.steps)
    per_pack = len(rows) // (options.steps * plan.batch.global_batch_size)
    sft = make_settings(plan, "", options.results.parent / "output", options)
    shared = {field.name: getattr(sft, field.name) for field in dataclasses.fields(sft) if field.init}
    del shared["loss_type"]  # that of next tokens
    shared |= {
        "per_device_train_batch_size": per_pack * plan.batch.micro_batch_size,
        "max_length": training.sequence_length,
        "remove_unused_columns": False,
        "use_liger_kernel": False,  # deprecated there: it computes log-probabilities in chunks by itself
    }
    chosen: Any = training.preferences
    match training.objective:
        case "dpo" | "ipo":
            own: dict[str, Any] = {
                "loss_type": ["sigmoid" if training.objective == "dpo" else "ipo"],
                "precompute_ref_log_probs": training.adapters is None,
            }
            kinds: tuple[Any, Any] = (DPOConfig, TokenizedDpo)
        case "kto":
            own, kinds = {"precompute_ref_log_probs": training.adapters is None}, (KTOConfig, TokenizedKto)
        case "orpo":
            own, kinds = {}, (ORPOConfig, TokenizedOrpo)
        case "simpo":
            own = {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": chosen.gamma}
            kinds = (CPOConfig, TokenizedCpo)
        case other:
            raise SystemExit(f"no trainer for objective {other}")
    known = {field.name for field in dataclasses.fields(kinds[0])}
    settings = {name: value for name, value in (shared | own | {"beta": chosen.beta}).items() if name in known}
    trainer = kinds[1](
        model=model,
        args=kinds[0](**settings),
        train_dataset=as_dataset(rows, options.results.parent / "rows"),
        processing_class=load_saved_tokenizer(PreparedData(plan.data.root).tokenizer),
        peft_config=None if training.adapters is None else peft_config(training.adapters),
        callbacks=[StepWriter(options.results, options.warm_up_steps)],
    )
    if training.adapters is not None:
        init_adapters(trainer.model.get_base_model(), training.seed)
    return trainer


def main() -> None:
    """Train for a number of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up-steps", type=int, default=4)
    parser.add_argument("--attention", help="default: flash_attention_4 if installed, else sdpa")
    parser.add_argument("--checkpointing", choices=("none", "full"), help="default: the plan's")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    plan = read_plan(RunLayout(options.plan.parent))
    attention = options.attention or ("flash_attention_4" if is_flash_attn_4_available() else "sdpa")
    trainer = make_trainer(plan, build_model(plan, attention, sharded=False), options)
    sys.stdout.write(f"attention: {attention}, compiled: {options.compile}, {torch.__version__}\n")
    trainer.train()


if __name__ == "__main__":
    main()
