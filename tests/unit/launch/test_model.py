"""A model's shape and param count, resolved at planning time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.errors import ConfigError, NotFoundError
from ftkit.files import to_json
from ftkit.launch import model as launch_model
from ftkit.launch.model import CountedModel, resolve_model
from ftkit.models.architecture import MULTIMODAL, NO_CAUSAL_CLASS, UNKNOWN_FAMILY, ModelSpec
from ftkit.models.parameters import count_by_config
from ftkit.planning.layout import Workspace
from ftkit.process import ProgramOutput

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.models.architecture import ModelPlan

MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
UNKNOWN = MIXTRAL | {"model_type": "phimoe", "head_dim": 128}


class Program:
    """A fake of the subprocess that counts parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.output = ProgramOutput(1, "", "no such architecture")
        monkeypatch.setattr(launch_model, "find_spec", lambda _: True)
        monkeypatch.setattr(launch_model.process, "run", self.run)

    def run(self, *_: Any, **__: Any) -> ProgramOutput:
        self.calls += 1
        return self.output


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


def resolve(folder: Path, config: dict[str, Any], home: Path | None = None, **fields: Any) -> ModelPlan:
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelSpec(weights=str(folder), **fields)
    return resolve_model(model, {"XDG_CACHE_HOME": str(home or folder)}, Workspace(folder))


def test_a_family_with_a_formula_needs_only_the_folders_config(tmp_path: Path, program: Program) -> None:
    model = resolve(tmp_path, MIXTRAL)
    assert model.architecture.head_dim == 128
    assert model.architecture.rope_theta == 1e6  # the class's default: the file has no such key
    assert model.architecture.counts is not None
    assert model.architecture.counts.total == 46_702_792_704
    assert program.calls == 0


def test_other_families_are_counted_by_a_subprocess_once_or_estimated_if_it_fails(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated = resolve(tmp_path, UNKNOWN).architecture.counts
    assert estimated is not None
    assert (program.calls, estimated.source) == (1, "config")
    assert resolve(tmp_path, UNKNOWN).count_error == "no such architecture"
    real = count_by_config(MIXTRAL)
    answer = json.dumps(json.loads(to_json(CountedModel(UNKNOWN | {"rms_norm_eps": 1e-3}, real))))
    program.output = ProgramOutput(0, f"a warning\n{answer}\n", "")
    for _ in range(2):  # the second iteration reads the cache
        model = resolve(tmp_path, UNKNOWN)
        assert model.architecture.counts == real
        assert model.architecture.rms_norm_eps == 1e-3
    assert program.calls == 3
    assert model.count_error is None
    program.output = ProgramOutput(0, "nonsense", "")
    assert resolve(tmp_path, UNKNOWN | {"vocab_size": 31000}).architecture.counts is not None
    monkeypatch.setattr(launch_model, "find_spec", lambda _: None)
    home = tmp_path / "other"
    found = resolve(tmp_path, UNKNOWN, home).architecture.counts
    assert found == estimated
    assert program.calls == 4
    assert not home.exists()


def test_a_plan_that_needs_counts_says_why_there_are_none(tmp_path: Path, program: Program) -> None:
    program.output = ProgramOutput(1, "", "Traceback\n  a line\nKeyError: 'nonsense'\n")
    with pytest.raises(ConfigError, match=r"head_dim .*KeyError: 'nonsense'"):
        resolve(tmp_path, MIXTRAL | {"model_type": "starcoder2"})


@pytest.mark.parametrize(
    ("code", "what", "fix"),
    [
        (UNKNOWN_FAMILY, "does not have the family 'llamma'", "Use deepseek_v2, "),
        (NO_CAUSAL_CLASS, "no causal language", ""),
        (MULTIMODAL, "text model is of another family", "Use llamma_text."),
    ],
)
def test_random_weights_of_a_family_that_cannot_be_trained_are_rejected(
    program: Program, tmp_path: Path, code: int, what: str, fix: str
) -> None:
    program.output = ProgramOutput(code, "llamma_text", "")
    shape = {"family": "llamma", "head_dim": 128} | {key: MIXTRAL[key] for key in MIXTRAL if "experts" not in key}
    shape.pop("model_type")
    model = ModelSpec.model_validate(
        {"weights": "random", "architecture": shape, "tokenizer": {"source": "trained", "vocab_size": 32000}}
    )
    with pytest.raises(ConfigError, match=f"{what}.*") as error:
        resolve_model(model, {"XDG_CACHE_HOME": str(tmp_path)}, Workspace(tmp_path))
    assert error.value.problems[0].key == "model.architecture.family"
    assert fix in str(error.value)


def test_a_configuration_in_the_hub_cache_is_read(tmp_path: Path, program: Program) -> None:
    snapshot = tmp_path / "hub" / "models--x--y" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(MIXTRAL))
    model = ModelSpec(weights="x/y")
    found = resolve_model(model, {"HF_HOME": str(tmp_path)}, Workspace(tmp_path / "none"))
    assert found.architecture.counts is not None
    assert found.architecture.counts.source == "formula"
    assert program.calls == 0


def test_fields_that_contradict_the_configuration_are_rejected_and_missing_ones_are_not(tmp_path: Path) -> None:
    same = {"rope_theta": 1e6, "num_hidden_layers": 32, "max_position_embeddings": 4096}
    assert resolve(tmp_path, MIXTRAL, architecture=same).architecture.max_position_embeddings == 4096
    with pytest.raises(ConfigError, match=r"rope_theta: 10000\.0 .*1000000\.0"):
        resolve(tmp_path, MIXTRAL, architecture={"rope_theta": 1e4})


def test_more_positions_need_rope_scaling(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more need rope_scaling"):
        resolve(tmp_path, MIXTRAL, architecture={"max_position_embeddings": 65536})
    scaling = {"rope_type": "yarn", "factor": 4.0}
    longer = resolve(tmp_path, MIXTRAL, architecture={"rope_scaling": scaling}).architecture
    assert longer.max_position_embeddings == 131072
    assert longer.rope_scaling is not None
    shipped = {"rope_scaling": scaling, "max_position_embeddings": 32768}  # as in the shape of a shipped recipe
    assert resolve(tmp_path, MIXTRAL, architecture=shipped).architecture == longer
    fewer = resolve(tmp_path, MIXTRAL, architecture={"rope_scaling": scaling, "max_position_embeddings": 100000})
    assert fewer.architecture.max_position_embeddings == 100000
    with pytest.raises(ConfigError, match="131072 with a rope_scaling of 4"):
        resolve(tmp_path, MIXTRAL, architecture={"rope_scaling": scaling, "max_position_embeddings": 200000})


@pytest.mark.parametrize("config", [{"model_type": "phimoe"}, {"model_type": "llama", "hidden_size": "wide"}])
def test_a_configuration_without_the_model_shape_is_rejected(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_model, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="hidden_size"):
        resolve(tmp_path, config)


def test_a_folder_without_a_config_is_rejected_with_the_keys_to_set_for_the_nodes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Correct the path"):
        resolve_model(ModelSpec(weights=str(tmp_path / "nowhere")), {}, Workspace(tmp_path))


def test_a_file_or_an_incomplete_folder_as_model_is_reported_as_such(tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    with pytest.raises(NotFoundError, match=r"config\.json .*model\.safetensors"):
        resolve_model(ModelSpec(weights=str(weights.parent)), {}, Workspace(tmp_path))
    weights.touch()
    (weights.parent / "config.json").touch()
    with pytest.raises(NotFoundError, match="is a file") as caught:
        resolve_model(ModelSpec(weights=str(weights)), {}, Workspace(tmp_path))
    assert f"model.weights={weights.parent}" in caught.value.fix


def test_added_tokens_use_free_rows_or_grow_the_embedding(tmp_path: Path, program: Program) -> None:
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "eos_token": "<s>"}))
    old = resolve(tmp_path, MIXTRAL | {"vocab_size": 5})
    free = resolve(tmp_path, MIXTRAL | {"vocab_size": 5}, added_tokens=("<s>", "<|t|>"))
    assert (free.new_tokens, free.vocab_size_of_weights, free.architecture) == (("<|t|>",), None, old.architecture)
    grown = resolve(tmp_path, MIXTRAL | {"vocab_size": 5}, added_tokens=("<|t|>", "b2", "<|u|>"))
    assert (grown.architecture.vocab_size, grown.vocab_size_of_weights) == (7, 5)
    assert grown.architecture_of_weights.vocab_size == 5
    counts, before = grown.architecture.counts, old.architecture.counts
    assert counts is not None
    assert before is not None
    assert counts.total - before.total == 2 * 2 * MIXTRAL["hidden_size"]  # type: ignore[operator]
    kept = resolve(tmp_path, MIXTRAL | {"vocab_size": 5}, added_tokens=("<s>",), architecture={"vocab_size": 5})
    assert kept.architecture.vocab_size == 5
    assert program.calls == 0
    (tmp_path / "tokenizer.json").write_text('{"model": []}')
    with pytest.raises(ConfigError, match="can't be counted"):
        resolve(tmp_path, MIXTRAL, added_tokens=("<|t|>",))
