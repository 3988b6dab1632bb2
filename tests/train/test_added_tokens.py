"""Special tokens that a recipe adds: in the tokenizer, in the embedding, and in the export."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ftkit.data.tokenizer_files import read_vocabulary
from ftkit.data.tokenizers import add_tokens, learn_tokenizer
from ftkit.errors import TrainingError
from ftkit.train.model.pretrained import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

TEXT = "the weather in Oslo is cold and the weather in Rome is warm"
TOOL, RESULT = "<|tool|>", "<|result|>"
EMBEDDING, PROJECTION = "model.embed_tokens.weight", "lm_head.weight"


def learned() -> PreTrainedTokenizerBase:
    return learn_tokenizer([TEXT] * 20, 300, "chatml")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that adds two tokens to a model without free rows, and trains on texts with them."""
    folder = tmp_path_factory.mktemp("own")
    tokenizer = learned()
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"text": f"the weather in Oslo {TOOL} {number} {RESULT} is cold"} for number in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = {
        "name": "own",
        "model": {"weights": str(folder / "model"), "added_tokens": [TOOL, RESULT]},
        "data": {
            "source": str(folder / "texts.jsonl"),
            "format": {"kind": "text", "parse_special_tokens": True},
            "validation": {"count": 4},
        },
        "training": {
            "method": "full", "sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 2, "max_steps": 3,
            "learning_rate": 1e-2, "precision": "fp32",
        },
    }  # fmt: skip
    path = folder / "own.yaml"
    path.write_text(json.dumps(written))
    return path


def exported(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.layout.export / "model.safetensors")


def test_every_engine_trains_new_tokens_equally_and_exports_them(recipe: Path, make_run: Callable[..., Any]) -> None:
    before = load_file(recipe.parent / "model" / "model.safetensors")
    num_rows = before[EMBEDDING].shape[0]
    runs = {
        "alone": make_run("added-alone", base=recipe, processes=1),
        "fsdp2": make_run("added-fsdp2", base=recipe),
        "zero3": make_run("added-zero3", "training.engine=zero3", base=recipe),
        "initial": make_run("added-initial", "training.learning_rate=1e-30", "training.max_steps=1", base=recipe),
    }
    for run in runs.values():
        run.train()

    plan = runs["alone"].plan
    model = AutoModelForCausalLM.from_pretrained(runs["alone"].layout.export)
    assert plan.recipe.model.architecture.vocab_size == model.config.vocab_size == num_rows + 2
    assert plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())

    tokenizer = AutoTokenizer.from_pretrained(runs["alone"].layout.export)
    assert tokenizer(f"{TOOL}{RESULT}", add_special_tokens=False)["input_ids"] == [num_rows, num_rows + 1]
    assert tokenizer.decode([num_rows], skip_special_tokens=True) == ""

    initial = exported(runs["initial"])
    for name in (EMBEDDING, PROJECTION):
        assert torch.equal(initial[name][:num_rows], before[name])
        mean = before[name].double().mean(dim=0).float()
        assert torch.equal(initial[name][num_rows:], mean.expand(2, -1))
        trained = exported(runs["alone"])[name]
        assert (trained[num_rows:] - mean).abs().max() > 1e-3
        assert not torch.equal(trained[num_rows], trained[num_rows + 1])
        for engine in ("fsdp2", "zero3"):
            torch.testing.assert_close(exported(runs[engine])[name], trained, rtol=0, atol=2e-4)
    for engine in ("fsdp2", "zero3"):
        for step, values in runs["alone"].losses().items():
            assert runs[engine].losses()[step] == pytest.approx(values, rel=1e-4)


def test_plain_tokens_become_special_and_the_plan_knows_the_ids_from_the_files(tmp_path: Path) -> None:
    tokenizer, reports = learned(), list[str]()
    tokenizer.add_tokens(["plain"])
    tokenizer.save_pretrained(tmp_path / "before")
    known = read_vocabulary(tmp_path / "before")
    assert known is not None
    assert known.ids == tokenizer.get_vocab()
    add_tokens(tokenizer, ["eathe", "plain", "<|im_end|>", TOOL, RESULT], reports.append)
    kinds = ["was a plain token", "was a plain token", "already there", "added", "added"]
    assert [report.rpartition(", ")[2] for report in reports] == kinds
    tokenizer.save_pretrained(tmp_path / "after")
    again = AutoTokenizer.from_pretrained(tmp_path / "after")
    assert again.get_vocab() == known.with_tokens(["plain", TOOL, RESULT]).ids
    ids = again(f"eatheplain{RESULT}", add_special_tokens=False)["input_ids"]
    assert ids == [known.ids["eathe"], known.ids["plain"], len(known.ids) + 1]
    assert again.decode(ids, skip_special_tokens=True) == ""


def test_a_tied_embedding_grows_only_on_request(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    stored = LlamaForCausalLM(LlamaConfig(vocab_size=5, tie_word_embeddings=True, **sizes)).bfloat16()
    stored.save_pretrained(tmp_path)
    grown = LlamaForCausalLM(LlamaConfig(vocab_size=8, tie_word_embeddings=True, **sizes))
    with pytest.raises(TrainingError, match="has shape"):
        load_weights(grown, tmp_path)
    load_weights(grown, tmp_path, 5)
    rows = stored.model.embed_tokens.weight.detach()
    mean = rows.double().mean(dim=0).bfloat16()
    assert torch.equal(grown.lm_head.weight, torch.cat([rows, mean.expand(3, -1)]).float())
