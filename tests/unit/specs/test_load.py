from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftkit.errors import ConfigError, NotFoundError
from ftkit.specs.load import (
    Surroundings,
    is_path,
    list_names,
    load_cluster,
    load_image,
    load_recipe,
    load_settings,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.specs.data import FilesSource


@pytest.fixture
def around(tmp_path: Path) -> Surroundings:
    for folder in ("project/recipes", "project/clusters", "user/clusters"):
        (tmp_path / folder).mkdir(parents=True)
    return Surroundings(tmp_path / "project", tmp_path / "user", {})


def problems(around: Surroundings, *overrides: str, recipe: str = "demo") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, around, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_all_problems_are_named_at_once_with_suggestions(around: Surroundings) -> None:
    found = problems(around, "training.learning_rat=1", "training.num_epochs=x", "data.source.num_trian=3")
    assert len(found) == 3
    assert "command line: data.source.num_trian: unknown key. Did you mean 'num_train'?" in found
    assert "command line: training.learning_rat: unknown key. Did you mean 'learning_rate'?" in found
    assert any("training.num_epochs" in problem and "'x'" in problem for problem in found)


def test_a_problem_in_a_file_is_named_by_file_and_line(around: Surroundings) -> None:
    path = around.project / "recipes" / "mine.yaml"
    path.write_text("extends: demo\nname: mine\ntraining:\n  learning_rate: fast\n  typo: 1\n")
    found = problems(around, recipe="mine")
    assert found[0].startswith(f"{path}:4: training.learning_rate: ")
    assert found[1].startswith(f"{path}:5: training.typo: unknown key.")


def test_a_wrong_choice_suggests_the_nearest(around: Surroundings) -> None:
    assert problems(around, "training.schedule=cosin") == [
        ("command line: training.schedule: 'cosin' is none of 'constant', 'cosine' or 'linear'. "
        "Did you mean 'cosine'?")
    ]  # fmt: skip


def test_checkpointing_that_is_on_is_told_which_words_there_are(around: Surroundings) -> None:
    (found,) = problems(around, "training.activation_checkpointing=true")
    assert "take 'full': it is one of auto, none, selective and full" in found


def test_a_micro_batch_is_a_number_or_auto(around: Surroundings) -> None:
    for wrong in ("many", "0", "-1", "1.5", "true"):
        (found,) = problems(around, f"training.micro_batch_size={wrong}")
        assert "training.micro_batch_size: a micro-batch is a positive number of packs, or 'auto'" in found


def test_a_source_of_unknown_kind_names_the_known_ones(around: Surroundings) -> None:
    (found,) = problems(around, "data.source.kind=hubb")
    assert "'hubb' is none of 'generated', 'files', 'hub'. Did you mean 'hub'?" in found


def test_a_missing_key_is_named(around: Surroundings) -> None:
    (found,) = problems(around, "data.source.kind=files")
    assert "data.source.train: required, but not given." in found


def test_checks_over_several_keys_are_explained(around: Surroundings) -> None:
    (found,) = problems(around, "training.num_epochs=3")
    assert "give exactly one of max_steps and num_epochs" in found


def test_a_named_architecture_gives_its_fields_and_can_be_changed(around: Surroundings) -> None:
    overrides = ["model.architecture=olmo3-7b", "model.architecture.num_hidden_layers=8"]
    shape = load_recipe("demo", around, overrides).model.architecture
    assert (shape.family, shape.hidden_size, shape.num_hidden_layers) == ("olmo3", 4096, 8)


def test_a_named_architecture_replaces_all_of_the_one_below(around: Surroundings) -> None:
    assert load_recipe("demo", around).model.architecture.tie_word_embeddings
    assert not load_recipe("demo", around, ["model.architecture=llama3-8b"]).model.architecture.tie_word_embeddings


def test_a_recipe_can_change_a_field_of_the_architecture_that_the_one_it_extends_names(around: Surroundings) -> None:
    path = around.project / "recipes" / "small.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("extends: olmo3-7b-full\nname: small\nmodel:\n  architecture:\n    num_hidden_layers: 8\n")
    shape = load_recipe("small", around).model.architecture
    assert (shape.num_hidden_layers, shape.hidden_size) == (8, 4096)


def test_an_unknown_architecture_suggests_the_nearest(around: Surroundings) -> None:
    assert "did you mean 'olmo3-7b'?" in problems(around, "model.architecture=olmo-7b")[0]


def test_the_projects_recipe_goes_before_the_shipped_one(around: Surroundings) -> None:
    (around.project / "recipes" / "demo.yaml").write_text("extends: demo\n")
    with pytest.raises(ConfigError, match="circle"):
        load_recipe("demo", around)
    (around.project / "recipes" / "other.yaml").write_text("name: other\n")
    assert list_names("recipe", around)[:2] == ["demo", "other"]


def test_unknown_names_suggest_the_nearest(around: Surroundings) -> None:
    with pytest.raises(NotFoundError) as caught:
        load_cluster("a3-mega", around)
    assert "a3-megagpu-8g" in caught.value.fix
    with pytest.raises(NotFoundError) as caught:
        load_image("olmo3:25.03", around)
    assert "olmo3:25.02" in caught.value.fix


def test_a_profile_extends_another(around: Surroundings) -> None:
    (around.user / "clusters" / "ours.yaml").write_text(
        "name: ours\ndescription: d\nextends: a4-highgpu-8g\npartition: p\n"
    )
    ours, theirs = load_cluster("ours", around), load_cluster("a4-highgpu-8g", around)
    assert ours.partition == "p"
    assert ours.nccl == theirs.nccl


def test_settings_come_from_files_then_variables_then_options(around: Surroundings) -> None:
    (around.user / "config.yaml").write_text("cluster: from-user\nworkspace: /user\n")
    (around.project / "ftkit.yaml").write_text("cluster: from-project\n")
    loaded = load_settings(around)
    assert (loaded.settings.cluster, loaded.settings.workspace) == ("from-project", "/user")
    assert loaded.layers.origin(("cluster",)) == f"{around.project / 'ftkit.yaml'}:1"
    with_variable = Surroundings(around.project, around.user, {"FTKIT_CLUSTER": "from-variable"})
    loaded = load_settings(with_variable)
    assert loaded.settings.cluster == "from-variable"
    assert loaded.layers.origin(("cluster",)) == "FTKIT_CLUSTER"


def test_an_unknown_setting_is_refused(around: Surroundings) -> None:
    (around.project / "ftkit.yaml").write_text("clutser: x\n")
    with pytest.raises(ConfigError, match="Did you mean 'cluster'"):
        load_settings(around)


def test_relative_paths_belong_to_the_file_that_names_them(
    around: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = around.project / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (around.project / "recipes" / "mine.yaml").write_text(
        "extends: demo\nname: mine\ndata: {source: {kind: files, train: mine.jsonl}}\nmodel: {weights: ./w}\n"
    )
    recipe = load_recipe("mine", around, ["evaluation.sql_execution=null"])
    source: FilesSource = recipe.data.source  # type: ignore[assignment]
    assert source.train == str(around.project / "recipes" / "mine.jsonl")
    assert recipe.model.weights == str(around.project / "recipes" / "w")
    recipe = load_recipe("mine", around, ["data.source.train=typed.jsonl"])
    assert recipe.data.source.train == str(elsewhere / "typed.jsonl")  # type: ignore[union-attr]


@pytest.mark.parametrize(("text", "expected"), [("/a", True), ("./a", True), ("~/a", True), ("org/model", False)])
def test_folders_are_told_from_hub_ids(text: str, expected: bool) -> None:
    assert is_path(text) is expected


def test_the_project_is_the_nearest_folder_with_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "ftkit.yaml").write_text("")
    monkeypatch.chdir(inner)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    around = Surroundings.here()
    assert (around.project, around.user) == (tmp_path, tmp_path / "xdg" / "ftkit")
