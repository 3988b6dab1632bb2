from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftkit.config.yaml_files import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Result

AXOLOTL = "base_model: org/model\ndatasets: [{path: org/rows, type: alpaca}]\nsequence_len: 1024\nlearning_rate: 1e-4\n"


@pytest.fixture
def axolotl(ftkit: Callable[..., Result]) -> str:
    """A configuration in the project of `ftkit`."""
    del ftkit
    Path("axolotl.yml").write_text(AXOLOTL)
    return "axolotl.yml"


def test_the_recipe_is_data_and_the_table_is_talk(ftkit: Callable[..., Result], axolotl: str) -> None:
    done = ftkit("convert", axolotl)
    recipe = parse_yaml(done.out, "stdout").values
    assert (done.code, recipe["model"], recipe["training"]["learning_rate"]) == (0, "org/model", 1e-4)
    assert {"base_model", "sequence_len"} <= set(done.err.split())
    assert ftkit("convert", axolotl, "--quiet").err == ""


def test_json_has_the_recipe_and_a_row_for_each_key(ftkit: Callable[..., Result], axolotl: str) -> None:
    found = json.loads(ftkit("convert", axolotl, "--json").out)
    assert (found["tool"], found["recipe"]["data"]["format"]) == ("Axolotl", "alpaca")
    rows = {row["key"]: row for row in found["rows"]}
    assert rows["learning_rate"]["became"] == "training.learning_rate: 0.0001"
    assert rows["num_epochs"]["is_default"]


def test_the_written_recipe_is_a_recipe_and_is_not_overwritten(ftkit: Callable[..., Result], axolotl: str) -> None:
    done = ftkit("convert", axolotl, "--output", "recipes/mine.yaml")
    assert (done.code, done.out) == (0, "")
    listed = json.loads(ftkit("config", "recipes", "--json").out)
    assert "mine" in {each["name"] for each in listed}
    before = Path("recipes/mine.yaml").read_text()
    Path("axolotl.yml").write_text(AXOLOTL.replace("1024", "2048"))
    assert ftkit("convert", axolotl, "-o", "recipes/mine.yaml").code == 3
    assert Path("recipes/mine.yaml").read_text() == before
    assert ftkit("convert", axolotl, "-o", "recipes/mine.yaml", "--yes").code == 0
    assert Path("recipes/mine.yaml").read_text() != before


def test_the_number_of_gpus_and_the_tool_can_be_given(ftkit: Callable[..., Result], axolotl: str) -> None:
    Path("axolotl.yml").write_text(f"{AXOLOTL}micro_batch_size: 2\nsample_packing: true\n")
    assert (
        json.loads(ftkit("convert", axolotl, "--gpus", "8", "--json").out)["recipe"]["training"]["global_batch_size"]
        == 16
    )
    Path("some.yaml").write_text("learning_rate: 1e-3\n")
    assert ftkit("convert", "some.yaml").code == 3
    assert json.loads(ftkit("convert", "some.yaml", "--tool", "trl", "--json").out)["tool"] == "TRL"


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("broken.yaml", "a: [1", 3),
        ("broken.py", "from trl import\n", 3),
        ("broken.ipynb", "not JSON", 3),
        ("other.yaml", "services: {web: {image: nginx}}", 3),
        ("grpo.yaml", "base_model: org/model\nrl: grpo", 3),
        ("binary.sh", "\udcff", 3),
        ("missing.yaml", None, 4),
    ],
)
def test_a_file_that_is_no_configuration_is_an_error_of_the_user(
    ftkit: Callable[..., Result], name: str, text: str | None, code: int
) -> None:
    if text is not None:
        Path(name).write_bytes(text.encode(errors="surrogateescape"))
    done = ftkit("convert", name)
    assert (done.code, done.out) == (code, "")
    assert name in done.err


def test_an_unknown_configuration_gets_the_list_of_tools(ftkit: Callable[..., Result]) -> None:
    Path("other.yaml").write_text("services: {web: {image: nginx}}")
    assert {"axolotl", "llamafactory", "trl", "torchtune", "unsloth", "automodel"} <= set(
        ftkit("convert", "other.yaml").err.replace(".", " ").split()
    )


@pytest.mark.parametrize(
    ("folder", "setting", "source"),
    [("data", "", "data/mine.json"), (".", "", "mine.json"), ("sets", "dataset_dir: sets", "sets/mine.json")],
)
def test_the_list_of_llama_factorys_data_is_found(
    ftkit: Callable[..., Result], folder: str, setting: str, source: str
) -> None:
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    Path("lora.yaml").write_text(f"model_name_or_path: org/model\nfinetuning_type: lora\ndataset: mine\n{setting}\n")
    found = ftkit("convert", "lora.yaml", "--json")
    assert json.loads(found.out)["recipe"]["data"]["source"] == source
    assert "dataset_info.json" in found.err
    assert "(others)" not in found.out
