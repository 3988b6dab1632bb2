"""The texts of errors of `ftkit.train.model`: tests/golden/errors/train_model.txt.

`FTKIT_UPDATE_GOLDEN=1` rewrites the file: read the diff.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ftkit.config.training import TrainingPlan
from ftkit.errors import FtkitError
from ftkit.models.adapters import LoraSpec
from ftkit.models.architecture import ArchitectureSpec, ExpertMatrix, RopeScalingSpec
from ftkit.train.model.attention import choose_kernel
from ftkit.train.model.expert_adapters import check_expert_targets
from ftkit.train.model.float8 import check_fp8
from ftkit.train.model.hf_model import check_positions, find_decoder_layers, read_config
from ftkit.train.model.routers import Routers
from ftkit.train.param_count import find_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftkit.train.world import World

GOLDEN = Path(__file__).parents[1] / "golden" / "errors" / "train_model.txt"
TRAINING = {"sequence_length": 8, "global_batch_size": 1, "max_steps": 1, "learning_rate": 1e-3}

SMALL_EXPERTS = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_local_experts": 2} | {
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4
}  # fmt: skip


def shape(family: str = "llama") -> ArchitectureSpec:
    fields = {
        "family": family, "vocab_size": 9, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 8,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return ArchitectureSpec.model_validate(fields)


def tiny(family: str, **fields: object) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))


def failures(folder: Path, world: World) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, fields in {
        "unknown architecture": {"model_type": "llama9"},
        "quantized": {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
        "another shape": {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2},
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(fields))
        yield name, partial(read_config, folder / name, shape())
    flat = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    flat.config = PretrainedConfig(num_hidden_layers=3)  # type: ignore[assignment]
    yield "no decoder layers", partial(find_decoder_layers, flat)
    gpt = tiny("gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=9)
    yarn = RopeScalingSpec.model_validate({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8})
    yield "no rotary positions", partial(check_positions, gpt, shape().model_copy(update={"rope_scaling": yarn}))
    yield "missing projection", partial(find_targets, gpt, ["q_proj"])
    yield "missing projection of experts", partial(find_targets, tiny("gpt_oss", **SMALL_EXPERTS), ["gate_proj"])
    experts = [ExpertMatrix("gate_up_proj", ("gate_proj", "up_proj"), 4, 8, 16, 1)]
    yield "half of an experts' parameter", partial(check_expert_targets, experts, LoraSpec(targets=("gate_proj",)))
    dora = LoraSpec(targets=("gate_proj", "up_proj"), use_dora=True)
    yield "DoRA of experts", partial(check_expert_targets, experts, dora)
    capped = AutoConfig.for_model("gemma2", attn_logit_softcapping=50.0)
    for attention in ("sdpa", "flex"):
        plan = TrainingPlan.model_validate(TRAINING | {"attention": attention})
        yield f"attention {attention}", partial(choose_kernel, plan, capped, world)
    balanced = TrainingPlan.model_validate(TRAINING | {"router_aux_loss_coef": 0.1})
    yield "balance of a dense model", partial(Routers.of, gpt, balanced, world)
    for has_experts in (False, True):
        yield f"FP8, experts {has_experts}", partial(check_fp8, torch.device("cuda"), has_experts=has_experts)


def test_golden_error_texts(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    texts = []
    for name, fail in failures(tmp_path, world):
        with pytest.raises(FtkitError) as caught:
            fail()
        text = str(caught.value).replace(str(tmp_path), "/project").replace(transformers.__version__, "VERSION")
        texts.append(f"## {name}\n{type(caught.value).__name__}: {text}\n")
    if os.environ.get("FTKIT_UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text("\n".join(texts), encoding="utf-8")
    assert "\n".join(texts) == GOLDEN.read_text(encoding="utf-8")
