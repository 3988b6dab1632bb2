"""Completions end with the trained end token: in evaluation, and in whatever loads the export."""

from __future__ import annotations

import json
import os
import shutil
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LogitsProcessorList

from ftkit.data.encoding import find_end_tokens
from ftkit.data.prepared_data import PreparedData
from ftkit.data.tokenizer_files import TEMPLATES
from ftkit.data.tokenizers import learn_tokenizer, load_saved_tokenizer, load_tokenizer
from ftkit.errors import DataError, NotFoundError
from ftkit.models.architecture import ArchitectureSpec, ModelSpec
from ftkit.train.components.evaluate import Evaluator
from ftkit.train.components.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.train.world import World

LLAMA3 = (
    "{{ bos_token }}{% for turn in messages %}<|start_header_id|>{{ turn['role'] }}<|end_header_id|>\n\n"
    "{{ turn['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
OLMO = (
    "{% for turn in messages %}<|{{ turn['role'] }}|>\n{{ turn['content'] }}"
    "{% if turn['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WITHOUT_END = (
    "{% for turn in messages %}### {{ turn['role'] }}:\n{{ turn['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
START, PAD, END_OF_TEXT, END_OF_TURN = "<bos>", "<pad>", "<eos>", "<end_of_turn>"
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.40.0"}


@pytest.fixture(scope="module")
def base_tokenizer() -> Any:
    """A base model's tokenizer: with an end-of-text token and chat tokens, without a template."""
    tokenizer = learn_tokenizer(["SELECT name FROM table WHERE how many"], 300, "gemma")
    chat = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": chat})
    tokenizer.add_special_tokens({"eos_token": END_OF_TEXT})
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
def saved(base_tokenizer: Any, tmp_path: Path) -> Path:
    base_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def model_in(folder: Path) -> ModelSpec:
    shape = ArchitectureSpec(
        family="llama", vocab_size=320, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=8,
    )  # fmt: skip
    return ModelSpec(weights=str(folder), architecture=shape)


def token(tokenizer: Any, text: str) -> int:
    return cast("int", tokenizer.convert_tokens_to_ids(text))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEMPLATES["gemma"].template, "<end_of_turn>"),
        (TEMPLATES["chatml"].template, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (OLMO, "<eos>"),
    ],
    ids=["gemma", "chatml", "llama 3", "olmo"],
)
def test_the_end_of_a_completion_is_the_token_that_the_template_appends(
    template: str, end: str, base_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_tokenizer, "chat_template", template)
    assert find_end_tokens(base_tokenizer) == [token(base_tokenizer, end)]


@pytest.mark.parametrize("template", [WITHOUT_END, TEMPLATES["chatml"].template.replace("im_end", "fin")])
def test_ordinary_text_is_not_an_end_token(template: str, base_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_tokenizer, "chat_template", template)
    assert find_end_tokens(base_tokenizer) == []


@pytest.mark.parametrize(("name", "end"), [("gemma", "<end_of_turn>"), ("chatml", "<|im_end|>")])
def test_a_base_tokenizer_with_a_shipped_template_ends_with_its_turns(name: str, end: str, saved: Path) -> None:
    tokenizer = load_tokenizer(model_in(saved), name)
    assert tokenizer.eos_token == end
    assert tokenizer.pad_token == PAD


def test_padding_with_the_end_of_texts_does_not_become_the_end_of_turns(saved: Path) -> None:
    stored = json.loads((saved / "tokenizer_config.json").read_text())
    (saved / "tokenizer_config.json").write_text(json.dumps(stored | {"pad_token": None}))
    assert load_tokenizer(model_in(saved), "chatml").pad_token == END_OF_TEXT


def files_of(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": [2, 3]}, SAMPLING | {"eos_token_id": [2, 3]}, [2, 3]),  # as Gemma 3
        ({"eos_token_id": [2, 3], "text_config": {"eos_token_id": 2}}, None, [2, 3]),  # in its wrapper
        ({"text_config": {"eos_token_id": 2}}, None, [2]),
        ({"eos_token_id": 1}, SAMPLING | {"eos_token_id": [1, 2, 3]}, [1, 2, 3]),  # as Llama 3
        ({"eos_token_id": [2, 106]}, None, [2]),  # in this tokenizer, 106 is text
        ({"eos_token_id": None}, {}, []),
        ({}, None, []),
    ],
)
def test_end_tokens_of_the_pretrained_model_are_kept_in_addition_to_the_trained_one(
    config: dict[str, Any], generation: dict[str, Any] | None, ends: list[int], saved: Path
) -> None:
    tokenizer = load_tokenizer(model_in(saved), "chatml")
    made = Generation.of(tokenizer, files_of(saved, config, generation))
    trained = token(tokenizer, "<|im_end|>")
    assert made.end_tokens == (trained, *ends)
    assert made.settings["eos_token_id"] == ([trained, *ends] if ends else trained)
    assert made.settings.items() >= {key: value for key, value in (generation or {}).items() if key in SAMPLING}.items()
    made.save(saved)
    assert GenerationConfig.from_pretrained(saved).eos_token_id == made.settings["eos_token_id"]


def test_an_export_does_not_derive_generation_settings_from_the_model_configuration(saved: Path) -> None:
    weights = files_of(saved, {"eos_token_id": 2}, {"_from_model_config": True, "eos_token_id": 2})  # as saved
    assert "_from_model_config" not in Generation.of(load_tokenizer(model_in(saved), "chatml"), weights).settings


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_an_invalid_configuration_file_of_the_weights_is_reported_before_training(
    name: str, content: str, saved: Path
) -> None:
    tokenizer = load_tokenizer(model_in(saved), "chatml")
    (files_of(saved, {}, {}) / name).write_text(content)
    with pytest.raises(NotFoundError, match=rf"{name}( has no model_type| is not a JSON object)?"):
        Generation.of(tokenizer, saved)


def test_no_end_token_is_exported_if_there_is_none(base_tokenizer: Any) -> None:
    tokenizer = deepcopy(base_tokenizer)
    tokenizer.eos_token, tokenizer.chat_template = None, WITHOUT_END
    made = Generation.of(tokenizer, None)
    assert (made.end_tokens, made.settings["eos_token_id"]) == ((), None)
    assert made.greedy(tokenizer, 3).eos_token_id is None
    assert made.up_to_end([1, 2]) == [1, 2]


def test_a_template_without_an_end_token_is_rejected_before_training(
    make_run: Callable[..., Any], base_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_tokenizer, "chat_template", WITHOUT_END)
    base_tokenizer.save_pretrained(tmp_path)
    source = f"model.tokenizer={{source: {tmp_path}, vocab_size: null}}"
    with pytest.raises(DataError, match="no special token"):
        make_run("endless", source, "data.chat_template=model")
    make_run("endless", source, "data.chat_template=model", "data.train_on=all", "data.too_long=drop")


class TalksOn:
    """Returns the correct completion, ends the turn, and continues generating up to the limit."""

    def __init__(self, answers: list[list[int]], end: int) -> None:
        self.config = LlamaConfig(attn_implementation="sdpa")
        self.hf_model = self
        self._rows = [[*answer, end, *answer, end] for answer in answers]

    def __call__(self, *, compute: Callable[..., torch.Tensor], **inputs: Any) -> torch.Tensor:
        """Compute as a `CausalLM` does."""
        return compute(self, **inputs)

    def set_attn_implementation(self, name: str) -> None:
        pass

    def generate(self, *, input_ids: torch.Tensor, generation_config: GenerationConfig, **_: Any) -> torch.Tensor:
        """Stop a row where transformers would, and pad it to the longest."""
        ends, pad = generation_config.eos_token_id, generation_config.pad_token_id
        rows = []
        for row in self._rows:
            stops = next((index for index, each in enumerate(row) if each in ends), len(row) - 1) + 1
            rows.append(row[:stops])
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        return torch.cat([input_ids, padded], dim=1)


def test_a_correct_completion_scores_whatever_the_tokenizers_eos_token_is(finished_run: Any, world: World) -> None:
    data = PreparedData(finished_run.plan.data.root)
    tokenizer = load_saved_tokenizer(data.tokenizer)
    end = token(tokenizer, END_OF_TURN)
    tokenizer.eos_token = START
    evaluator = Evaluator(finished_run.plan, data, tokenizer, Generation.of(tokenizer, None), world)
    examples = [row.columns for _, row in data.read_validation_rows()[:5]]
    answers = [tokenizer(example["sql"], add_special_tokens=False)["input_ids"] for example in examples]
    scores, samples = evaluator._score(cast("Any", TalksOn(answers, end)), "after")
    assert [sample.answer for sample in samples] == [example["sql"] for example in examples]
    assert all(sample.correct for sample in samples)
    assert scores == {"sql": 1.0}


@pytest.fixture(scope="module")
def base(finished_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run's weights as a base model: with an end-of-text token, sampling, and no chat template."""
    folder = tmp_path_factory.mktemp("base") / "base"
    shutil.copytree(finished_run.layout.export, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token, tokenizer.chat_template = START, None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    files_of(folder, config | {"eos_token_id": tokenizer.eos_token_id}, SAMPLING | {"eos_token_id": [1]})
    return folder


def trained_on(base: Path, name: str, make_run: Callable[..., Any], *overrides: str) -> Any:
    run = make_run(
        name, f"model.weights={base}", "model.tokenizer={source: model, vocab_size: null}", "data.chat_template=gemma",
        "training.max_steps=1", "evaluation.generation=null", *overrides, processes=1,
    )  # fmt: skip
    run.train()
    return run


def length_of_answer(model: Any, export: Path) -> int:
    """Return how many tokens the model generates if each of them is its end of turn."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    end = token(tokenizer, END_OF_TURN)

    def say_end(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([end]), 0.0)

    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "How many?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    processors = LogitsProcessorList([cast("Any", say_end)])
    output = model.generate(**chat, max_new_tokens=8, logits_processor=processors)
    return int(output.shape[1] - chat["input_ids"].shape[1])


def test_an_export_of_a_chat_tuned_base_model_stops_after_its_turn(base: Path, make_run: Any) -> None:
    export = trained_on(base, "chatting", make_run).layout.export
    model = AutoModelForCausalLM.from_pretrained(export)
    assert length_of_answer(model, export) == 1
    assert model.generation_config.temperature == 0.6
    assert AutoTokenizer.from_pretrained(export).eos_token == END_OF_TURN
    ends = json.loads((export / "config.json").read_text())["eos_token_id"]
    assert ends == json.loads((export / "generation_config.json").read_text())["eos_token_id"]
    assert len(ends) == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_exported_adapters_contain_their_end_of_turn_token(base: Path, make_run: Any) -> None:
    lora = ("training.method=lora", "training.lora={rank: 4}")
    export = trained_on(base, "chatting-adapters", make_run, *lora).layout.export
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(export))
    assert length_of_answer(model, export) == 8
    model.generation_config = GenerationConfig.from_pretrained(export)
    assert length_of_answer(model, export) == 1


def test_exported_files_follow_the_umask(finished_run: Any, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    modes = {path.name: path.stat().st_mode for path in finished_run.layout.export.iterdir()}
    assert set(modes.values()) == {plain.stat().st_mode}
    assert os.access(finished_run.layout.export / "model.safetensors", os.R_OK)


def test_fp32_weights_whose_rows_do_not_divide_evenly_are_exported(make_run: Callable[..., Any]) -> None:
    sizes = ("model.architecture.vocab_size=513", "model.tokenizer.vocab_size=513", "training.max_steps=1")
    run = make_run("odd rows", *sizes, "evaluation.generation=null", "training.precision=fp32")
    run.train()
    assert AutoModelForCausalLM.from_pretrained(run.layout.export).get_input_embeddings().weight.shape[0] == 513
