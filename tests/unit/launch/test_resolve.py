from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftkit.config.context import Context
from ftkit.errors import ConfigError, NotFoundError
from ftkit.launch.resolve import RunArgs, read_settings, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

CPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def ctx(project: Path, environment: Mapping[str, str] = CPU) -> Context:
    return Context(project, project.parent / "user", environment)


def test_a_local_run_needs_only_a_recipe(project: Path) -> None:
    plan = resolve(RunArgs(recipe="demo"), ctx(project))
    assert plan.cluster.name == "local"
    assert (plan.placement.device, plan.placement.world_size) == ("cpu", 2)
    assert plan.workspace == project
    assert plan.image is None


@pytest.mark.parametrize("num_nodes", [None, 2])
def test_an_image_without_a_cluster_is_planned_for_generic_slurm_with_a_note(
    project: Path, num_nodes: int | None
) -> None:
    plan = resolve(RunArgs(image="olmo3:25.02", num_nodes=num_nodes), ctx(project))
    assert (plan.cluster.name, plan.recipe.name, plan.image) == ("slurm", "olmo3-32b-malware-full", "olmo3:25.02")
    assert plan.notes[0].startswith("no cluster is set: this plan is for profile 'slurm'")


@pytest.mark.parametrize(
    ("teacher", "said"),
    [("./teach", r"there is no /.*/teach\n(?s:.*)'.*teacher'\?"), ("run:nobody", "no runs in")],
)
def test_a_teacher_that_does_not_exist_is_named_with_its_key_and_line(project: Path, teacher: str, said: str) -> None:
    (project / "teacher").mkdir()
    recipe = project / "mine.yaml"
    recipe.write_text(f"extends: demo\ntraining:\n  objective: distill\n  distill:\n    teacher: {teacher}\n")
    with pytest.raises(NotFoundError) as caught:
        resolve(RunArgs(recipe=str(recipe)), ctx(project))
    assert re.match(rf"{recipe}:5: training\.distill\.teacher: .*{said}", str(caught.value))


def test_an_explicit_cluster_is_never_replaced(project: Path) -> None:
    (project / "ftkit.yaml").write_text("cluster: local\n")
    with pytest.raises(ConfigError, match="runtime 'none'"):
        resolve(RunArgs(image="olmo3:25.02"), ctx(project))


def test_a_run_on_a_cluster_needs_only_an_image(project: Path) -> None:
    (project / "ftkit.yaml").write_text("cluster: a4-highgpu-8g\nworkspace: /shared/me\n")
    plan = resolve(RunArgs(image="olmo3:25.02", num_nodes=2), ctx(project))
    assert plan.recipe.name == "olmo3-32b-malware-full"
    assert plan.placement.world_size == 16
    assert plan.container_image is not None
    assert plan.container_image.startswith("/shared/me/images/")


def test_the_image_of_the_settings_is_used_if_the_cluster_has_containers(project: Path) -> None:
    (project / "ftkit.yaml").write_text("image: olmo3:25.02\n")
    assert resolve(RunArgs(recipe="demo"), ctx(project)).image is None
    plan = resolve(RunArgs(cluster="a4-highgpu-8g"), ctx(project))
    assert (plan.recipe.name, plan.image) == ("olmo3-32b-malware-full", "olmo3:25.02")


def test_the_image_of_the_recipe_is_the_default(project: Path) -> None:
    (project / "mine.yaml").write_text("extends: olmo3-7b-full\nname: mine\nimage: olmo3:26.05\n")
    words = RunArgs(recipe=str(project / "mine.yaml"), cluster="a4-highgpu-8g")
    assert resolve(words, ctx(project)).image == "olmo3:26.05"


def make_cluster(project: Path, extends: str, runtime: str) -> None:
    (project / "clusters").mkdir()
    (project / "clusters" / "mine.yaml").write_text(f"extends: {extends}\nname: mine\nruntime: {runtime}\n")


@pytest.mark.parametrize("typed", ["my.sqsh", "./my.sqsh", "my.sif", "./my.sif"])
def test_an_image_file_is_relative_to_the_current_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    make_cluster(project, "a4-highgpu-8g", "apptainer")
    monkeypatch.chdir(project)
    words = RunArgs(recipe="olmo3-7b-full", image=typed, cluster="mine")
    assert resolve(words, ctx(project)).container_image == str(project / Path(typed).name)


def test_an_image_file_in_the_settings_or_a_recipe_is_relative_to_that_file(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (project / "mine.yaml").write_text("extends: olmo3-7b-full\nname: mine\nimage: ./recipe.sqsh\n")
    words = RunArgs(recipe=str(project / "mine.yaml"), cluster="a4-highgpu-8g")
    assert resolve(words, ctx(project)).container_image == str(project / "recipe.sqsh")
    (project / "ftkit.yaml").write_text("image: settings.sqsh\n")
    assert resolve(words, ctx(project)).container_image == str(project / "settings.sqsh")


@pytest.mark.parametrize(
    ("runtime", "given"),
    [("pyxis", "docker://r.io#team/x:1"), ("apptainer", "docker://r.io/team/x:1"), ("docker", "r.io/team/x:1")],
)
@pytest.mark.parametrize("typed", ["r.io/team/x:1", "docker://r.io/team/x:1", "docker://r.io#team/x:1"])
def test_an_address_is_given_to_each_runtime_in_its_own_syntax(
    project: Path, runtime: str, given: str, typed: str
) -> None:
    make_cluster(project, "docker" if runtime == "docker" else "a4-highgpu-8g", runtime)
    words = RunArgs(recipe="demo", image=typed, cluster="mine", overrides=("training.global_batch_size=32",))
    assert resolve(words, ctx(project)).container_image == given


def test_pyxis_is_not_given_a_sif_file(project: Path) -> None:
    with pytest.raises(ConfigError, match="SIF file"):
        resolve(RunArgs(recipe="olmo3-7b-full", image="my.sif", cluster="a4-highgpu-8g"), ctx(project))


@pytest.mark.parametrize("words", [RunArgs(), RunArgs(image="docker://host#path:tag", cluster="a4-highgpu-8g")])
def test_a_run_without_recipe_and_image_is_rejected_with_a_fix(project: Path, words: RunArgs) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(words, ctx(project))
    assert "ftkit config recipes" in str(caught.value)


def test_all_problems_of_the_specs_are_shown_together(project: Path) -> None:
    (project / "clusters").mkdir()
    (project / "clusters" / "mine.yaml").write_text("extends: slurm\nname: mine\npartitoin: x\ngpus_per_node: 0\n")
    words = RunArgs(recipe="dmeo", cluster="mine", image="olmo3:24.01")
    with pytest.raises(ConfigError) as caught:
        resolve(words, ctx(project))
    text = str(caught.value)
    assert "4 problems" in text
    for part in ("'partition'", "gpus_per_node", "'olmo3:24.01'", "did you mean 'demo'?"):
        assert part in text


def test_a_single_missing_file_keeps_its_error(project: Path) -> None:
    with pytest.raises(NotFoundError, match="'dmeo' not found"):
        resolve(RunArgs(recipe="dmeo"), ctx(project))


def test_all_conflicts_between_specs_are_shown_together(project: Path) -> None:
    words = RunArgs(
        recipe="demo", cluster="local", num_nodes=3, image="olmo3:25.02", overrides=("training.global_batch_size=33",)
    )
    with pytest.raises(ConfigError) as caught:
        resolve(words, ctx(project))
    assert len(caught.value.problems) == 3


def places(words: RunArgs, project: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(words, ctx(project))
    return [f"{problem.where} {problem.key}" for problem in caught.value.problems]


def test_conflicting_settings_are_reported_at_their_line(project: Path) -> None:
    recipe = project / "mine.yaml"
    recipe.write_text("extends: demo\nname: mine\nresources:\n  num_nodes: 3\ntraining:\n  global_batch_size: 25\n")
    here = RunArgs(recipe=str(recipe))
    assert places(here, project) == [
        f"{recipe}:4 resources.num_nodes",
        f"{recipe}:6 training.global_batch_size",
    ]
    typed = RunArgs(recipe=str(recipe), num_nodes=2, overrides=("training.global_batch_size=25",))
    assert places(typed, project) == ["command line --nodes", "command line training.global_batch_size"]


def test_conflicts_are_reported_in_the_profile_or_settings_that_cause_them(project: Path) -> None:
    make_cluster(project, "a4-highgpu-8g", "pyxis")
    profile = project / "clusters" / "mine.yaml"
    profile.write_text(profile.read_text() + "mounts: [relative]\n")
    (project / "ftkit.yaml").write_text("workspace: /a,b\nimage: x.sif\ncluster: mine\n")
    assert places(RunArgs(recipe="olmo3-7b-full"), project) == [
        f"{project}/ftkit.yaml:2 image",
        f"{project}/ftkit.yaml:1 workspace",
        f"{profile}:4 mounts",
    ]


def test_a_missing_cluster_is_reported_with_the_file_that_refers_to_it(project: Path) -> None:
    (project / "ftkit.yaml").write_text("# ours\ncluster: ourz\n")
    with pytest.raises(NotFoundError, match=rf"{project}/ftkit.yaml:2: cluster: cluster 'ourz' not found"):
        resolve(RunArgs(recipe="demo"), ctx(project))


def test_an_option_overrides_the_environment_and_is_reported_as_the_origin(project: Path) -> None:
    place = ctx(project, {"FTKIT_CLUSTER": "slurm"})
    assert read_settings(RunArgs(), place).settings.cluster == "slurm"
    typed = read_settings(RunArgs(cluster="local"), place)
    assert (typed.settings.cluster, typed.layers.origin(("cluster",))) == ("local", "command line")


def test_a_relative_workspace_is_in_the_project(project: Path) -> None:
    (project / "ftkit.yaml").write_text("workspace: work\n")
    place = ctx(project)
    assert read_settings(RunArgs(), place).workspace_folder(place) == project / "work"


def test_the_number_of_steps_is_known_once_the_data_is_prepared(project: Path) -> None:
    epochs = ("training.max_steps=null", "training.num_epochs=2", "training.global_batch_size=32")
    words = RunArgs(recipe="demo", overrides=epochs)
    plan = resolve(words, ctx(project))
    assert plan.num_steps is None
    plan.data.root.mkdir(parents=True)
    (plan.data.root / "manifest.json").write_text(json.dumps({"num_train_packs": 320}))
    assert resolve(words, ctx(project)).num_steps == 20


def test_two_runs_in_the_same_second_have_different_ids(project: Path) -> None:
    ids = {resolve(RunArgs(recipe="demo"), ctx(project)).id for _ in range(3)}
    assert len(ids) == 3


def test_the_job_gets_the_current_target_of_a_readable_link(project: Path) -> None:
    images = project / "images"
    images.mkdir()
    (images / "sha256-1.sqsh").touch()
    (images / "olmo3+25.02.sqsh").symlink_to("sha256-1.sqsh")
    words = RunArgs(image="olmo3:25.02", cluster="slurm")
    plan = resolve(words, ctx(project))
    assert plan.container_image == str(images / "sha256-1.sqsh")
    assert plan.image == "olmo3:25.02"


def test_broken_links_are_left_to_the_image_check(project: Path) -> None:
    images = project / "images"
    images.mkdir()
    link = images / "olmo3+25.02.sqsh"
    link.symlink_to(link.name)
    plan = resolve(RunArgs(image="olmo3:25.02", cluster="slurm"), ctx(project))
    assert plan.container_image == str(link)


def test_the_default_length_is_that_of_a_model_with_few_positions_and_a_given_one_stays(project: Path) -> None:
    (project / "rows.jsonl").write_text('{"text": "a"}\n')
    (project / "short.yaml").write_text(
        "model: {weights: random, tokenizer: {source: trained, vocab_size: 512}, architecture: {family: qwen3,"
        " vocab_size: 512, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2, num_attention_heads: 4,"
        " num_key_value_heads: 4, head_dim: 32, max_position_embeddings: 500}}\n"
        "data: {source: {kind: files, train: ./rows.jsonl}, format: text, chat_template: mistral}\n"
    )
    recipe = str(project / "short.yaml")
    assert resolve(RunArgs(recipe=recipe), ctx(project)).recipe.training.sequence_length == 500
    with pytest.raises(ConfigError, match="2048 is longer than the model's 500 positions"):
        resolve(RunArgs(recipe=recipe, overrides=("training.sequence_length=2048",)), ctx(project))


SEEN = (
    '{"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "?"}]}]}'
)
READ = '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}'


@pytest.mark.parametrize(
    ("vision", "rows", "typed", "pictures"),
    [
        ({"patch_size": 14}, SEEN, (), True),
        ({"patch_size": 14}, '{"question": "?", "answer": "!", "image": "a.png"}', (), True),
        ({"patch_size": 14}, READ, (), False),
        ({"patch_size": 14}, READ, ("data.pictures=true",), True),
        ({"patch_size": 14}, SEEN, ("data.pictures=false",), False),
        ({"patch_size": 14}, None, (), None),
        (None, SEEN, (), False),
    ],
)
def test_a_multimodal_model_sees_the_pictures_that_the_first_rows_have(
    project: Path, vision: object, rows: str | None, typed: tuple[str, ...], pictures: bool | None
) -> None:
    model = project / "model"
    model.mkdir()
    small = {
        "num_key_value_heads": 1,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
    }
    config = {"model_type": "gemma3", "text_config": small, "vision_config": vision}
    (model / "config.json").write_text(json.dumps(config))
    (project / "rows.jsonl").write_text(f"{rows}\n" * 3)
    source = "./rows.jsonl" if rows else "org/rows"
    (project / "mine.yaml").write_text(f"model: ./model\ndata: {{source: {source}}}\n")
    plan = resolve(RunArgs(recipe=str(project / "mine.yaml"), overrides=typed), ctx(project))
    assert plan.recipe.data.pictures is pictures
    assert any("data.pictures=true" in note for note in plan.notes) == (pictures is None)
