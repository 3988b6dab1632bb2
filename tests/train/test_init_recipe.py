"""`ftkit init MODEL DATA`: a recipe for a model and data, planned before it is written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from ftkit.cli.main import main
from ftkit.config.context import Context
from ftkit.config.data_sources import FilesSource
from ftkit.config.load import load_recipe
from ftkit.data.tokenizers import learn_tokenizer


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "my project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def model(_in_a_project: None) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = learn_tokenizer(["river stone cloud"] * 9, 320, "chatml")
    tokenizer.save_pretrained("model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=512, **shape)  # type: ignore[arg-type]
    Qwen2ForCausalLM(config).save_pretrained("model")


def chats(num: int = 120) -> None:
    turns = [{"role": "user", "content": "river"}, {"role": "assistant", "content": "stone cloud " * 5}]
    Path("chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * num)


def test_a_recipe_for_a_folder_and_a_file_can_be_planned_and_explains_each_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats()
    assert main(["init", "model", "chats.jsonl"]) == 0
    lines = Path("chats.yaml").read_text().split("training:\n")[1].splitlines()
    assert all("# " in line for line in lines)
    recipe = load_recipe("./chats.yaml", Context.here())
    assert recipe.training.method == "full"
    assert recipe.data.validation is not None
    assert recipe.data.validation.count == 6
    capsys.readouterr()
    assert main(["plan", "chats.yaml"]) == 0
    assert "(default)" not in capsys.readouterr().out


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_a_base_model_without_a_chat_template_gets_one_whose_tokens_it_has(template: str) -> None:
    chats()
    learn_tokenizer(["river stone cloud"] * 9, 270, template).save_pretrained("model")
    Path("model/chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    Path("model/tokenizer_config.json").write_text(json.dumps(settings))
    assert main(["init", "model", "chats.jsonl"]) == 0
    assert load_recipe("./chats.yaml", Context.here()).data.chat_template == template
    assert main(["plan", "chats.yaml"]) == 0


def test_a_base_model_with_the_tokens_of_no_template_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    chats()
    tokenizer = learn_tokenizer(["river stone cloud"] * 9, 320, "chatml")
    content = tokenizer.backend_tokenizer.to_str().replace("<|im_start|>", "<|other|>")
    Path("model/tokenizer.json").write_text(content)
    Path("model/chat_template.jinja").unlink(missing_ok=True)
    Path("model/tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}')
    assert main(["init", "model", "chats.jsonl"]) == 8
    assert "<|im_start|> of the 'chatml'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "rows"),
    [
        ("dpo", [{"prompt": "river", "chosen": "stone " * 40, "rejected": "cloud " * 40}] * 120),
        ("kto", [{"prompt": "river", "completion": f"stone {i}", "label": i % 2 == 0} for i in range(120)]),
    ],
)
def test_preferences_get_an_objective_a_small_learning_rate_and_packs_that_hold_both_sides(
    objective: str, rows: list[dict[str, object]]
) -> None:
    Path("rated.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["init", "model", "rated.jsonl"]) == 0
    training = load_recipe("./rated.yaml", Context.here()).training
    assert (training.objective, training.learning_rate, training.num_epochs) == (objective, 5e-7, 1)
    num_tokens = max(sum(len(str(each).split()) for each in row.values()) for row in rows)
    assert training.sequence_length > num_tokens
    assert main(["plan", "rated.yaml"]) == 0


def test_columns_that_the_format_does_not_use_are_left_out_by_name() -> None:
    turns = [{"from": "human", "value": "river"}, {"from": "gpt", "value": "stone cloud"}]
    rows = [{"conversations": turns, "mood": 3, "note": ""}] * 99 + [{"conversations": turns, "place": "x"}]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["init", "model", "chats.jsonl"]) == 0
    recipe = load_recipe("./chats.yaml", Context.here())
    assert recipe.data.ignore_columns == ("mood", "place")
    assert main(["plan", "chats.yaml"]) == 0


def test_typed_settings_are_used_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pairs.csv").write_text("frage,antwort\n" + "river?,stone cloud\n" * 99)
    assert main(["init", "model", "pairs.csv"]) == 8
    advice = capsys.readouterr().err
    words = ["data.format.kind=prompt-completion", 'data.format.prompt="{frage}"', 'data.format.completion="{antwort}"']
    assert "{frage}" in advice
    assert "{antwort}" in advice
    assert main(["init", "model", "pairs.csv", *words, "training.learning_rate=1e-3", "tracking.project=mine"]) == 0
    recipe = load_recipe("./pairs.yaml", Context.here())
    assert (recipe.data.format.kind, recipe.training.learning_rate) == ("prompt-completion", 1e-3)
    assert recipe.tracking.project == "mine"
    assert main(["plan", "pairs.yaml"]) == 0


def test_keys_beside_a_short_form_are_written_with_it_and_steps_replace_the_epochs() -> None:
    chats()
    keys = ["model.tokenizer.source=./model", "data.source.num_train=50", "training.max_steps=7"]
    assert main(["init", "model", "chats.jsonl", *keys]) == 0
    recipe = load_recipe("./chats.yaml", Context.here())
    assert recipe.model.tokenizer.source == str(Path("model").resolve())
    assert isinstance(recipe.data.source, FilesSource)
    assert recipe.data.source.num_train == 50
    assert (recipe.training.max_steps, recipe.training.num_epochs) == (7, None)
    assert main(["plan", "chats.yaml"]) == 0


def test_the_only_data_file_of_the_folder_is_found() -> None:
    chats()
    assert main(["init", "./model", "--name", "mine"]) == 0
    assert "source: ./chats.jsonl" in Path("mine.yaml").read_text()


def test_an_existing_recipe_is_changed_only_on_request() -> None:
    chats()
    Path("chats.yaml").write_text("mine")
    assert main(["init", "model", "chats.jsonl"]) == 3
    assert Path("chats.yaml").read_text() == "mine"
    assert main(["init", "model", "chats.jsonl", "--force"]) == 0
    assert "learning_rate" in Path("chats.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["chats.jsonl"], 2),
        (["model"], 2),
        (["model", "none.jsonl"], 4),
        (["./nothing", "chats.jsonl"], 3),
        (["model", "empty.jsonl"], 8),
        (["model", "torn.jsonl"], 8),
    ],
)
def test_nothing_is_written_for_what_cannot_be_read(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    chats()
    Path("other.jsonl").write_text("{}\n")
    Path("empty.jsonl").touch()
    torn = Path("chats.jsonl").read_text().splitlines(keepends=True)
    Path("torn.jsonl").write_text("".join([torn[0], torn[1][:20] + "\n", *torn[2:]]))
    assert main(["init", *words]) == code
    assert not [each for each in Path().glob("*.yaml") if each.name != "ftkit.yaml"]
    assert tempfile.gettempdir() not in capsys.readouterr().err.replace(str(Path.cwd()), "")


def test_a_bad_row_is_refused_with_the_key_that_skips_it(capsys: pytest.CaptureFixture[str]) -> None:
    chats()
    with Path("chats.jsonl").open("a") as file:
        file.write('{"messages": []}\n')
    assert main(["init", "model", "chats.jsonl"]) == 8
    assert "data.skip_bad=N" in capsys.readouterr().err
    assert main(["init", "model", "chats.jsonl", "data.skip_bad=1"]) == 0
    assert "skip_bad: 1" in Path("chats.yaml").read_text()


def test_without_a_model_the_project_is_set_up_and_the_next_command_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats()
    assert main(["init", "--yes"]) == 0
    assert "ftkit init MODEL chats.jsonl" in capsys.readouterr().err


def test_a_recipe_of_a_model_and_data_alone_has_defaults_that_the_plan_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats()
    Path("short.yaml").write_text("model: ./model\ndata: {source: chats.jsonl}\ntraining: {sequence_length: 256}\n")
    assert main(["plan", "short.yaml", "--cluster", "local"]) == 0
    notes = " ".join(capsys.readouterr().out.split())
    assert "(default) method: full, global_batch_size: 16, learning_rate: 2e-05, num_epochs: 1;" in notes
    assert load_recipe(
        "./short.yaml", Context.here(), ["training.method=lora"]
    ).training.learning_rate == pytest.approx(2e-4)


@pytest.mark.parametrize(
    ("typed", "source", "validation"),
    [
        ("train.jsonl", "./train.jsonl", "./dev.jsonl"),
        ("sets", "./sets/train.jsonl", "./sets/test.jsonl"),
        ("parts/", "./parts/train*.jsonl", "./parts/validation*.jsonl"),
        ("", "./train.jsonl", "./dev.jsonl"),
    ],
)
def test_a_second_split_is_the_validation_split(typed: str, source: str, validation: str) -> None:
    chats()
    text = Path("chats.jsonl").read_text()
    Path("chats.jsonl").unlink()
    for name in ("train", "dev", "sets/train", "sets/test", "parts/train-0", "parts/train-1", "parts/validation-0"):
        Path(f"{name}.jsonl").parent.mkdir(exist_ok=True)
        Path(f"{name}.jsonl").write_text(text.replace("river", name.partition("/")[2] or name))
    assert main(["init", "./model", *([typed] if typed else []), "--name", "mine"]) == 0
    written = Path("mine.yaml").read_text()
    assert f"source: {source}\n" in written
    assert f"validation: {{file: {validation}}}" in written
    assert main(["plan", "mine.yaml"]) == 0


def test_on_a_slurm_machine_without_settings_the_cluster_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chats()
    answers = {
        "sinfo": '[ "$1" = --version ] && echo slurm 24.11.1 || echo "gpu*|up|2|192|gpu:h200:8(S:0-1)|4:00:00|1"',
        "srun": "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]'",
        "scontrol": "echo 'ClusterName             = mine'",
        **dict.fromkeys(("sbatch", "squeue", "scancel", "sacct", "sacctmgr"), "true"),
    }
    for name, answer in answers.items():
        program = tmp_path / "programs" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")
    assert main(["init", "model", "chats.jsonl"]) == 0
    assert "cluster: mine" in Path("ftkit.yaml").read_text()
    train = capsys.readouterr().err.splitlines()[-1].split("ftkit ")[1]
    assert main([*train.split(), "--dry-run"]) == 0
    assert "#SBATCH --gpus-per-node=8" in capsys.readouterr().out
