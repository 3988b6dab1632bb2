from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from pydantic import ValidationError

from ftkit.config.cluster import ClusterProfile
from ftkit.config.context import Context, list_names
from ftkit.config.load import load_cluster, load_image, load_recipe
from ftkit.config.request import load_settings
from ftkit.errors import ConfigError, NotFoundError, Problem
from ftkit.paths import absolute_path, is_path
from ftkit.spec import Spec

if TYPE_CHECKING:
    from ftkit.config.data_sources import FilesSource


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    for folder in ("project/recipes", "project/clusters", "user/clusters"):
        (tmp_path / folder).mkdir(parents=True)
    return Context(tmp_path / "project", tmp_path / "user", {})


def found_problems(ctx: Context, *overrides: str, recipe: str = "demo") -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, ctx, overrides)
    return caught.value.problems


def problems(ctx: Context, *overrides: str, recipe: str = "demo") -> list[str]:
    return [str(problem) for problem in found_problems(ctx, *overrides, recipe=recipe)]


def places(ctx: Context, *overrides: str, recipe: str = "demo") -> set[tuple[str, str]]:
    return {(problem.where, problem.key) for problem in found_problems(ctx, *overrides, recipe=recipe)}


def test_all_problems_are_reported_together_with_suggestions(ctx: Context) -> None:
    typed = ("training.learning_rat=1", "training.num_epochs=x", "data.source.num_trian=3")
    found = {problem.key: problem for problem in found_problems(ctx, *typed)}
    assert found.keys() == {each.partition("=")[0] for each in typed}
    assert {problem.where for problem in found.values()} == {"command line"}
    assert "'learning_rate'" in found["training.learning_rat"].fix
    assert "'num_train'" in found["data.source.num_trian"].fix
    assert "'x'" in found["training.num_epochs"].message


def test_a_problem_in_a_file_is_reported_with_file_and_line(ctx: Context) -> None:
    path = ctx.project / "recipes" / "mine.yaml"
    path.write_text("extends: demo\nname: mine\ntraining:\n  learning_rate: fast\n  typo: 1\n")
    found = problems(ctx, recipe="mine")
    assert found[0].startswith(f"{path}:4: training.learning_rate: ")
    assert found[1].startswith(f"{path}:5: training.typo: unknown key.")


def test_a_wrong_choice_suggests_the_nearest(ctx: Context) -> None:
    (found,) = found_problems(ctx, "training.schedule=cosin")
    assert (found.where, found.key) == ("command line", "training.schedule")
    assert "'constant', 'cosine' or 'linear'" in found.message
    assert "'cosine'" in found.fix


def test_a_boolean_for_activation_checkpointing_lists_the_allowed_values(ctx: Context) -> None:
    (found,) = problems(ctx, "training.activation_checkpointing=true")
    for mode in ("auto", "none", "selective", "except_attention", "full"):
        assert mode in found


def test_a_micro_batch_is_a_number_or_auto(ctx: Context) -> None:
    for wrong in ("many", "0", "-1", "1.5", "true"):
        (found,) = problems(ctx, f"training.micro_batch_size={wrong}")
        for fact in ("training.micro_batch_size", "65,536", "'auto'"):
            assert fact in found


def test_an_unknown_kind_of_source_lists_the_known_ones(ctx: Context) -> None:
    (found,) = found_problems(ctx, "data.source.kind=hubb")
    assert "'generated', 'files', 'hub', 'mixture'" in found.message
    assert "'hub'" in found.fix


def test_a_missing_key_is_reported(ctx: Context) -> None:
    (found,) = problems(ctx, "data.source.kind=files")
    assert "data.source.train: required" in found


def test_checks_of_several_keys_are_reported_at_one_of_them(ctx: Context) -> None:
    (found,) = problems(ctx, "training.num_epochs=3", "training.max_steps=9")
    assert found.startswith("command line: training: ")
    assert "max_steps and num_epochs" in found
    path = ctx.project / "recipes" / "mine.yaml"
    path.write_text("extends: demo\nname: mine\ntraining:\n  seed: 2\n  lora: {rank: 4}\n")
    (found,) = problems(ctx, recipe="mine")
    assert found.startswith(f"{path}:5: training: lora has no effect")


@pytest.mark.parametrize("name", list_names("recipe", Context(Path("/nowhere"), Path("/nowhere"), {})))
def test_an_override_of_the_training_length_replaces_that_of_the_recipe(ctx: Context, name: str) -> None:
    by_steps = load_recipe(name, ctx, ["training.max_steps=100"]).training
    assert (by_steps.max_steps, by_steps.num_epochs) == (100, None)
    by_epochs = load_recipe(name, ctx, ["training.num_epochs=3"]).training
    assert (by_epochs.max_steps, by_epochs.num_epochs) == (None, 3)


def test_the_training_length_of_a_recipe_replaces_that_of_its_parent(ctx: Context) -> None:
    path = ctx.project / "recipes" / "mine.yaml"
    path.write_text("extends: demo\nname: mine\ntraining:\n  num_epochs: 2\n")
    assert load_recipe("mine", ctx).training.max_steps is None
    path.write_text("extends: demo\nname: mine\ntraining:\n  num_epochs: 2\n  max_steps: 3\n")
    (found,) = problems(ctx, recipe="mine")
    assert found.startswith(f"{path}:5: training: give exactly one")


def test_a_missing_key_is_reported_at_its_mapping(ctx: Context) -> None:
    path = ctx.project / "recipes" / "mine.yaml"
    path.write_text("# mine\nname: mine\ntraining:\n  max_steps: 2\n")
    found = places(ctx, "training.seed=1", "data.source.kind=hub", recipe="mine")
    assert (f"{path}:2", "model") in found
    assert ("command line", "data.source.dataset") in found


def test_missing_keys_are_reported_at_the_mapping_that_replaced_them(ctx: Context) -> None:
    (found,) = problems(ctx, "data.source={kind: files}")
    assert found.startswith("command line: data.source.train: required")


WRONG: dict[str, object] = {
    "training.learning_rate": "fast", "training.max_steps": 1.5, "training.seed": -1, "training.betas": [0.9],
    "training.lora": {"rank": 0}, "training.warmup_ratio": 2, "training.global_batch_size": None,
    "profile.enabled": "maybe", "profile.ranks": 0, "evaluation": "x", "name": 5, "data.source.kind": 3,
    "resources.time_limit": "a day", "model.architecture": ["x"], "training.max_grad_norm": float("inf"),
    "tracking.sinks": "wandb", "model.architecture.family": "a b", "data.format.kind": "vicuna",
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG.items(), ids=WRONG)
def test_each_problem_is_a_readable_sentence(ctx: Context, key: str, value: object) -> None:
    tree = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    (ctx.project / "recipes" / "mine.yaml").write_text(json.dumps({"extends": "demo", "name": "mine"} | tree))  # type: ignore[operator]
    for found in problems(ctx, recipe="mine"):
        assert f"{key}" in found
        assert not re.search(r"Input should|[Tt]uple|dictionary|discriminator|should match|instance of|None", found)


def test_unquoted_text_in_braces_is_reported_with_how_to_quote_it(ctx: Context) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe("demo", ctx, ["data.format.prompt={column}"])
    assert """data.format.prompt='"{column}"'""" in str(error.value)
    load_recipe("demo", ctx, ['data.format.prompt="{sql_prompt}"'])


def test_a_long_list_of_problems_is_truncated(ctx: Context) -> None:
    keys = "".join(f"typo{n}: 1\n" for n in range(200))
    (ctx.project / "recipes" / "mine.yaml").write_text(f"extends: demo\n{keys}")
    found = problems(ctx, recipe="mine")
    assert len(found) == 21
    assert found[-1] == "180 more problems not shown."


def test_a_named_architecture_sets_its_fields_which_can_be_overridden(ctx: Context) -> None:
    overrides = ["model.architecture=olmo3-7b", "model.architecture.num_hidden_layers=8"]
    shape = load_recipe("demo", ctx, overrides).model.architecture
    assert (shape.family, shape.hidden_size, shape.num_hidden_layers) == ("olmo3", 4096, 8)


def test_a_named_architecture_replaces_the_inherited_one(ctx: Context) -> None:
    assert load_recipe("demo", ctx).model.architecture.tie_word_embeddings
    assert not load_recipe("demo", ctx, ["model.architecture=llama3-8b"]).model.architecture.tie_word_embeddings


def test_a_recipe_can_override_a_field_of_its_parents_named_architecture(ctx: Context) -> None:
    path = ctx.project / "recipes" / "small.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("extends: olmo3-7b-full\nname: small\nmodel:\n  architecture:\n    num_hidden_layers: 8\n")
    shape = load_recipe("small", ctx).model.architecture
    assert (shape.num_hidden_layers, shape.hidden_size) == (8, 4096)


def test_an_unknown_architecture_suggests_the_nearest(ctx: Context) -> None:
    assert "did you mean 'olmo3-7b'?" in problems(ctx, "model.architecture=olmo-7b")[0]


def test_the_projects_recipe_takes_precedence_over_the_shipped_one(ctx: Context) -> None:
    (ctx.project / "recipes" / "demo.yaml").write_text("extends: demo\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_recipe("demo", ctx)
    (ctx.project / "recipes" / "other.yaml").write_text("name: other\n")
    assert list_names("recipe", ctx)[:2] == ["demo", "other"]


def test_unknown_names_suggest_the_nearest(ctx: Context) -> None:
    with pytest.raises(NotFoundError) as caught:
        load_cluster("a3-mega", ctx)
    assert "a3-megagpu-8g" in caught.value.fix
    with pytest.raises(NotFoundError) as caught:
        load_image("olmo3:25.03", ctx)
    assert "olmo3:25.02" in caught.value.fix


def test_a_recipe_in_a_pipe_a_device_or_a_folder_is_refused_with_the_reason(ctx: Context, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # without a writer
    for path in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        with pytest.raises(NotFoundError, match=f"{path} is not"):
            load_recipe(str(path), ctx)


def test_a_chat_template_in_a_pipe_is_refused(ctx: Context, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jinja")
    (problem,) = found_problems(ctx, f"data.chat_template={tmp_path}/a.jinja")
    assert problem.key == "data.chat_template"
    assert f"{tmp_path}/a.jinja" in problem.message


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-at-all/x.yaml", "a\0b", "/x" * 3000, "\x1b[2J"])
def test_a_name_that_is_not_a_valid_file_name_is_not_found(ctx: Context, name: str) -> None:
    for load in (load_recipe, load_cluster, load_image):
        with pytest.raises(NotFoundError) as caught:
            load(name, ctx)
        assert len(str(caught.value)) < 400


def test_a_name_and_a_tag_of_an_image_must_be_those_of_its_folder(ctx: Context) -> None:
    path = ctx.project / "containers" / "mine" / "1" / "image.yaml"
    path.parent.mkdir(parents=True)
    text = 'name: mine\ntag: "1"\nextends: ngc-26.05\ndescription: d\nfamilies: [qwen3]\ndefault_recipe: demo\n'
    path.write_text(text)
    assert load_image("mine:1", ctx).reference == "mine:1"
    for name, tag in (("other", "1"), ("mine", "2")):
        path.write_text(text.replace("mine", name).replace('"1"', f'"{tag}"'))
        with pytest.raises(ConfigError, match=f"are '{name}:{tag}', but the folder's are 'mine:1'"):
            load_image("mine:1", ctx)


def test_a_path_in_extends_is_relative_to_its_file(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ctx.project)
    recipes = ctx.project / "recipes"
    (recipes / "deep").mkdir()
    (recipes / "deep" / "mine.yaml").write_text("extends: ../base.yaml\nname: mine\n")
    (recipes / "base.yaml").write_text("extends: ./own.yaml\n")
    (ctx.project / "own.yaml").write_text("extends: demo\n")
    with pytest.raises(NotFoundError) as caught:
        load_recipe("recipes/deep/mine.yaml", ctx)
    assert caught.value.what == f"file {recipes / 'own.yaml'} not found"
    assert caught.value.meaning == f"{recipes / 'base.yaml'} extends './own.yaml', relative to its own folder"
    (recipes / "own.yaml").write_text("extends: demo\ntraining: {seed: 7}\n")
    assert load_recipe("recipes/deep/mine.yaml", ctx).training.seed == 7


def test_a_profile_extends_another(ctx: Context) -> None:
    (ctx.user / "clusters" / "ours.yaml").write_text(
        "name: ours\ndescription: d\nextends: a4-highgpu-8g\npartition: p\n"
    )
    ours, theirs = load_cluster("ours", ctx), load_cluster("a4-highgpu-8g", ctx)
    assert ours.partition == "p"
    assert ours.nccl == theirs.nccl


def test_options_override_variables_which_override_files(ctx: Context) -> None:
    (ctx.user / "config.yaml").write_text("cluster: from-user\nworkspace: /user\n")
    (ctx.project / "ftkit.yaml").write_text("cluster: from-project\n")
    loaded = load_settings(ctx)
    assert (loaded.settings.cluster, loaded.settings.workspace) == ("from-project", "/user")
    assert loaded.layers.origin(("cluster",)) == f"{ctx.project / 'ftkit.yaml'}:1"
    with_variable = Context(ctx.project, ctx.user, {"FTKIT_CLUSTER": "from-variable"})
    loaded = load_settings(with_variable)
    assert loaded.settings.cluster == "from-variable"
    assert loaded.layers.origin(("cluster",)) == "FTKIT_CLUSTER"


def test_an_unknown_setting_is_rejected(ctx: Context) -> None:
    (ctx.project / "ftkit.yaml").write_text("clutser: x\n")
    with pytest.raises(ConfigError, match="'cluster'"):
        load_settings(ctx)


def test_relative_paths_are_relative_to_their_file(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ctx.project / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (ctx.project / "recipes" / "mine.yaml").write_text(
        "extends: demo\nname: mine\ndata: {source: {kind: files, train: mine.jsonl}}\nmodel: {weights: ./w}\n"
    )
    recipe = load_recipe("mine", ctx, ["evaluation.generation=null"])
    source: FilesSource = recipe.data.source  # type: ignore[assignment]
    assert source.train == str(ctx.project / "recipes" / "mine.jsonl")
    assert recipe.model.weights == str(ctx.project / "recipes" / "w")
    recipe = load_recipe("mine", ctx, ["data.source.train=typed.jsonl"])
    assert recipe.data.source.train == str(elsewhere / "typed.jsonl")  # type: ignore[union-attr]
    recipe = load_recipe("mine", ctx, ["data.source={kind: hub, dataset: ./set, num_heldout: 100}"])
    assert recipe.data.source.dataset == str(elsewhere / "set")  # type: ignore[union-attr]


def test_a_typed_path_is_relative_to_the_current_folder_also_in_a_short_form(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = ctx.project / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (ctx.project / "recipes" / "mine.yaml").write_text("extends: demo\ndata: {source: mine.jsonl, format: auto}\n")
    for override in ("data.source=./typed.jsonl", "data.source={kind: files, train: typed.jsonl}"):
        recipe = load_recipe("mine", ctx, [override, "evaluation.generation=null"])
        assert recipe.data.files == [("data.source.train", str(elsewhere / "typed.jsonl"))]


def test_a_time_limit_may_be_a_number_of_minutes(ctx: Context) -> None:
    (ctx.project / "recipes" / "mine.yaml").write_text("extends: demo\nresources: {time_limit: 90}\n")
    (ctx.project / "clusters" / "ours.yaml").write_text("extends: slurm\nname: ours\ntime_limit: 120\n")
    assert load_recipe("mine", ctx).resources.time_limit == "90"
    assert load_recipe("demo", ctx, ["resources.time_limit=30"]).resources.time_limit == "30"
    assert load_cluster("ours", ctx).time_limit == "120"
    for wrong in ("true", "-5"):
        (problem,) = found_problems(ctx, f"resources.time_limit={wrong}")
        assert problem.key == "resources.time_limit"
        assert wrong in problem.message


def test_an_invalid_format_string_is_rejected_with_file_and_line(ctx: Context) -> None:
    path = ctx.project / "recipes" / "mine.yaml"
    path.write_text("extends: demo\nname: mine\ndata:\n  format:\n    prompt: '{question!q}'\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:5: data\.format\.prompt: \{question!q\}"):
        load_recipe("mine", ctx)


@pytest.mark.parametrize("address", ["gs://bucket/data", "s3://bucket/data", "https://host/data.jsonl", "file:///data"])
@pytest.mark.parametrize("key", ["model.weights", "model.tokenizer.source", "data.source.dataset"])
def test_an_address_in_place_of_a_path_is_rejected_by_the_plan(ctx: Context, key: str, address: str) -> None:
    (found,) = problems(ctx, f"{key}={address}", recipe="olmo3-7b-full")
    assert found.startswith(f"command line: {key}: addresses are not supported")


def test_data_addresses_must_have_a_known_scheme(ctx: Context) -> None:
    recipe = load_recipe("olmo3-7b-full", ctx, ["data.source=s3://bucket/*.parquet"])
    assert recipe.data.files == [("data.source.train", "s3://bucket/*.parquet")]
    (found,) = problems(ctx, "data.source=https://host/data.jsonl", recipe="olmo3-7b-full")
    assert "data.source.train: " in found
    assert "s3://…, gs://…, hf://…" in found


def test_short_forms_of_a_source_can_be_overridden(ctx: Context) -> None:
    recipe = load_recipe("olmo3-7b-full", ctx, ["data.source=chats.jsonl", "data.source.num_heldout=5"])
    source = recipe.data.source
    assert (source.kind, source.num_heldout) == ("files", 5)
    assert recipe.data.files == [("data.source.train", str(Path.cwd() / "chats.jsonl"))]
    assert load_recipe("olmo3-7b-full", ctx, ["data.source=org/set"]).data.sources[0].kind == "hub"
    mixed = load_recipe(
        "olmo3-7b-full", ctx, ["data.source=[{source: a.jsonl, weight: 3}, {source: org/b, weight: 1}]"]
    )
    assert [(source.kind, source.name, source.weight) for source in mixed.data.sources] == [
        ("files", "a.jsonl", 3.0),
        ("hub", "b", 1.0),
    ]
    (found,) = problems(ctx, "data.source=[{source: a.jsonl, weight: 3}, b.jsonl]", recipe="olmo3-7b-full")
    assert "only a.jsonl" in found


def test_a_hub_id_that_is_also_a_local_folder_is_rejected(ctx: Context) -> None:
    recipes = ctx.project / "recipes"
    (recipes / "mine.yaml").write_text("extends: demo\nmodel:\n  weights: model\n")
    assert load_recipe("mine", ctx).model.weights == "model"
    (recipes / "model").mkdir()
    (found,) = problems(ctx, recipe="mine")
    assert found.startswith(f"{recipes}/mine.yaml:3: model.weights: 'model' could be a hub id, or the folder in ")
    assert found.endswith("For the folder write ./model; for the hub id, rename the folder.")


def test_a_data_set_folder_is_relative_to_its_file(ctx: Context) -> None:
    path = ctx.project / "recipes" / "mine.yaml"
    path.write_text("extends: olmo3-7b-full\nname: mine\ndata: {source: {dataset: ./sets}}\n")
    assert load_recipe("mine", ctx).data.source.dataset == str(ctx.project / "recipes" / "sets")  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["~nobody-at-all/x", "/" + "x" * 300, "/x" * 3000])
def test_an_invalid_path_is_reported_with_its_key(ctx: Context, path: str) -> None:
    (found,) = problems(ctx, f"model.weights={path}", recipe="olmo3-7b-full")
    assert found.startswith("command line: model.weights: ")


def test_a_path_below_a_folder_that_is_not_utf8_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"UTF-8, got .*caf.udce9/data"):
        absolute_path("data", Path("/caf\udce9"), "x.yaml:1", "workspace")


@pytest.mark.parametrize(("text", "expected"), [("/a", True), ("./a", True), ("~/a", True), ("org/model", False)])
def test_folders_are_distinguished_from_hub_ids(text: str, expected: bool) -> None:
    assert is_path(text) is expected


def test_the_project_is_the_nearest_parent_folder_with_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "ftkit.yaml").write_text("")
    monkeypatch.chdir(inner)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    ctx = Context.here()
    assert (ctx.project, ctx.user) == (tmp_path, tmp_path / "xdg" / "ftkit")


def test_wrong_values_in_a_list_are_one_problem_each_with_their_index(ctx: Context) -> None:
    found = places(ctx, "data.source=[{source: ./a.jsonl, weight: -1}, {source: ./b.jsonl, weight: 0}]")
    assert found == {("command line", f"data.source.sources[{number}].weight") for number in range(2)}
    assert places(ctx, "data.source=[]") == {("command line", "data.source.sources")}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_steps=true", "training.max_steps: must be a whole number, got true."),
        ("training.seed=false", "training.seed: must be a whole number, got false."),
        ("training.learning_rate=true", "training.learning_rate: must be a number, got true."),
        ("training.weight_decay=false", "training.weight_decay: must be a number, got false."),
        ("training.warmup_ratio=true", "training.warmup_ratio: must be a number, got true."),
        ("training.betas=[true, 0.9]", "training.betas[0]: must be a number, got true."),
        ("profile.ranks=[false]", "profile.ranks[0]: must be a whole number, got false."),
    ],
)
def test_true_and_false_are_not_numbers(ctx: Context, override: str, message: str) -> None:
    assert problems(ctx, override)[0].startswith(f"command line: {message}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.num_epochs=0", "must be more than 0, got 0. Number of passes over the data"),
        ("training.warmup_ratio=5", "must be at most 1.0, got 5. Fraction of all steps during which the learning rate"),
        ("training.attention=flash3", "or 'eager'. Did you mean 'flash4'?"),
        ("training.attention=flash_attention_2", "or 'eager'. Did you mean 'auto'?"),
        ("training.optimizer=adamw_torch_fused", "Did you mean 'adamw'?"),
        ("training.schedule=constant_with_warmup", "Did you mean 'constant'?"),
        ("training.engine=deepspeed", "or 'zero3'. Engine that shards the model over processes"),
        ("data.validation=0.1", "must be a mapping, got 0.1. Its keys are count, fraction, by, file, seed."),
        ("data.train_on=asistant", "data.train_on: write assistant, last, completion, all, or a list of roles: ["),
        ("data.train_on=[]", "data.train_on: write assistant, last, completion, all, or a list of roles: ["),
        ("data.template_options={a: [1]}", "data.template_options.a: an option of a template is text, a number, true"),
        ("data.format=openai", "'openai' is not a format: write auto, messages, sharegpt, alpaca"),
        ("training.method=null", "training.method: null is none of 'full', 'lora' or 'qlora'."),
        ("training.compile=true", "training.compile: true is none of 'auto', 'layers' or 'none'."),
        ("training.seed=null", "training.seed: must be a whole number, got null."),
        ("training.betas=[0.9]", "training.betas: has too few values, got [0.9]."),
        ("training.lora={rank:8}", "training.lora.rank:8: unknown key. Put a space after the colon: 'rank: 8'."),
        ("tracking.sinks=wandb", "tracking.sinks: must be a list, got 'wandb'. Put it in brackets: [wandb]."),
        ("training.lr=1", "training.lr: unknown key. Here it is training.learning_rate."),
        ("learning_rate=1e-4", "learning_rate: unknown key. Here it is training.learning_rate."),
        ("data.sequence_length=512", "unknown key. Here it is training.sequence_length."),
        ("bf16=true", "bf16: unknown key. Here it is training.precision: bf16, the default on GPUs."),
        ("data.max_train_samples=9", "Here it is data.source: {kind: files, train: FILE, num_train: N}."),
        ("training.gradient_checkpointing=true", "unknown key. Leave it out: speed and memory only: ftkit predicts"),
        (
            "model.trust_remote_code=true",
            "unknown key. Leave it out: ftkit never runs code that comes with a model: choose",
        ),
    ],
)
def test_the_message_about_a_wrong_value_explains_what_to_write(ctx: Context, override: str, message: str) -> None:
    (found,) = problems(ctx, override)
    assert message in found


def test_every_numeric_field_of_a_spec_rejects_true() -> None:
    taken = [
        f"{spec.__name__}.{name}"
        for spec in _subclasses(Spec)
        for name, field in spec.model_fields.items()
        if not _names(field.annotation) & {"bool", "str"} and _names(field.annotation) & {"int", "float"}
        if _takes_true(spec, name)
    ]
    assert taken == []


def _subclasses(spec: type[Spec]) -> list[type[Spec]]:
    direct = spec.__subclasses__()
    return direct + [inner for one in direct for inner in _subclasses(one)]


def _names(annotation: Any) -> set[str]:
    """Return the names of the types in an annotation."""
    parts = get_args(annotation)
    return {name for part in parts for name in _names(part)} if parts else {getattr(annotation, "__name__", "")}


def _takes_true(spec: type[Spec], name: str) -> bool:
    """Return whether a spec accepts `true`, or a list of it, for a field."""
    for value in (True, [True, True]):
        try:
            spec.model_validate({name: value})
        except ValidationError as error:
            if any(detail["loc"][0] == name for detail in error.errors()):
                continue
        return True
    return False


def test_a_model_given_only_by_weights_replaces_the_inherited_model(ctx: Context) -> None:
    path = ctx.project / "recipes" / "mine.yaml"
    path.write_text("extends: qwen3-8b-tools-full\nname: mine\nmodel: ./mine\n")
    mine = load_recipe("mine", ctx).model
    assert mine.weights == str(ctx.project / "recipes" / "mine")
    assert not mine.architecture.model_fields_set
    scaling = "model.architecture.rope_scaling={rope_type: yarn, factor: 2}"
    typed = [load_recipe("mine", ctx, words).model for words in (["model=x/y", scaling], [scaling, "model=x/y"])]
    assert typed[0] == typed[1]
    assert typed[0].weights == "x/y"
    assert typed[0].architecture.model_fields_set == {"rope_scaling"}
    assert load_recipe("mine", ctx, ["model=run:earlier"]).model.weights == "run:earlier"
    kept = load_recipe("qwen3-8b-tools-full", ctx, ["model.revision=v1"]).model
    assert (kept.weights, kept.revision, kept.architecture.num_hidden_layers) == ("Qwen/Qwen3-8B", "v1", 36)


def test_data_given_only_by_its_source_replaces_the_inherited_data(ctx: Context) -> None:
    path = ctx.project / "recipes" / "mine.yaml"
    path.write_text("extends: qwen3-8b-tools-full\nname: mine\ndata: ./mine.jsonl\n")
    data = load_recipe("mine", ctx).data
    assert data.model_fields_set == {"source"}
    assert data.files == [("data.source.train", str(ctx.project / "recipes" / "mine.jsonl"))]
    last = load_recipe("mine", ctx, ["data.train_on=last"]).data
    assert (last.train_on, last.source) == ("last", data.source)
    assert load_recipe("mine", ctx, ["data=other/set"]).data.source.dataset == "other/set"  # type: ignore[union-attr]


def test_a_wrong_value_is_the_only_problem_where_a_default_depends_on_it(ctx: Context) -> None:
    path = ctx.project / "recipes" / "mine.yaml"
    path.write_text("model: a/b\ndata: a/c\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe("mine", ctx, ["training.precision=fp16", "training.lora.rank=x"])
    assert [problem.key for problem in caught.value.problems] == ["training.lora.rank", "training.precision"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model=run:../x", "a run is given as run:NAME"),
        ("model={weights: run:x, revision: v1}", "revision has no effect"),
        ("model=random", "weights 'random' have no tokenizer"),
        (
            "model.architecture.rope_scaling={rope_type: linear, factor: 2, beta_fast: 3}",
            "beta_fast has no effect with",
        ),
        ("model.architecture.rope_scaling={rope_type: llama3, factor: 2}", "rope_type 'llama3' needs low_freq_factor"),
    ],
)
def test_impossible_models_are_rejected(words: str, message: str, ctx: Context) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("qwen3-8b-tools-full", ctx, [words])


@pytest.mark.parametrize(("device", "key"), [("cpu", "processes_per_node"), ("cuda", "gpus_per_node")])
def test_a_profile_needs_the_number_of_processes_of_its_device(device: str, key: str) -> None:
    other = {"gpus_per_node": 2} if device == "cpu" else {"processes_per_node": 2}
    rest = {"name": "x", "description": "", "scheduler": "local", "runtime": "none", "device": device}
    with pytest.raises(ValueError, match=f"device '{device}' needs {key}"):
        ClusterProfile.model_validate(rest | other)


@pytest.mark.parametrize(
    "name", ["chats.jsonl", "chats.JSON", "chats.csv", "chats.parquet", "notes.md", "chats.jsonl.gz"]
)
@pytest.mark.parametrize("prefix", ["", "./"])
def test_a_data_file_in_place_of_a_recipe_is_answered_with_the_command_that_writes_one(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, name: str, prefix: str
) -> None:
    monkeypatch.chdir(ctx.project)
    (ctx.project / name).write_text('[{"text": "a"}]')
    with pytest.raises(NotFoundError) as caught:
        load_recipe(f"{prefix}{name}", ctx)
    assert f"ftkit init MODEL {prefix}{name}" in caught.value.fix
    assert "demo" not in str(caught.value)


def test_a_recipe_may_be_json(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ctx.project)
    (ctx.project / "mine.json").write_text('{"model": "org/model", "data": "org/chats"}')
    assert load_recipe("./mine.json", ctx).name == "mine"


@pytest.mark.parametrize(("wanted", "limit"), [("0", "1-00:00:00"), ("3-0", "1-00:00:00"), ("1:00:00", "1:00:00")])
def test_no_time_limit_exceeds_that_of_the_profile(wanted: str, limit: str, ctx: Context) -> None:
    cluster = load_cluster("slurm", ctx).model_copy(update={"max_time_limit": "1-00:00:00"})
    assert cluster.limit_time(wanted) == limit
