"""The context of a run: machine, files, git, secrets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

from ftkit.checkout import read_commit
from ftkit.config.context import Context
from ftkit.config.load import load_cluster, load_recipe
from ftkit.config.recipe import RecipePlan
from ftkit.errors import DataError, MemoryExhaustedError, NotFoundError, PrerequisiteError
from ftkit.launch.inputs import data_stamp, describe_detected
from ftkit.launch.preflight import Findings, check_memory, check_precision, check_trackers, run_checks, source_checks
from ftkit.launch.resolve import detect_hardware
from ftkit.runs.manifest import build_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftkit.config.recipe import RecipeSpec
    from ftkit.planning.plan import RunPlan

NOWHERE = Context(Path("/nowhere/project"), Path("/nowhere/user"), {})
LOCAL = load_cluster("local", NOWHERE)


def machine(root: Path, num_gpus: int, model: str = "NVIDIA H100 80GB HBM3") -> Path:
    (root / "dev").mkdir()
    for name in [*(f"nvidia{index}" for index in range(num_gpus)), "nvidiactl", "nvidia-uvm"]:
        (root / "dev" / name).touch()
    driver = root / "proc/driver/nvidia/gpus/0000:01:00.0"
    driver.mkdir(parents=True)
    (driver / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")
    return root


def test_a_machine_with_gpus_trains_on_all_of_them(tmp_path: Path) -> None:
    found = detect_hardware(LOCAL, {}, machine(tmp_path, 4))
    assert (found.device, found.gpus_per_node, found.gpu) == ("cuda", 4, "h100-80gb")


@pytest.mark.parametrize(("visible", "num_gpus"), [("0,2", 2), ("1", 1), ("0,-1,2", 1), ("0,1,2,3,4,5", 4)])
def test_gpus_hidden_from_cuda_do_not_count(tmp_path: Path, visible: str, num_gpus: int) -> None:
    found = detect_hardware(LOCAL, {"CUDA_VISIBLE_DEVICES": visible}, machine(tmp_path, 4))
    assert found.gpus_per_node == num_gpus


def test_a_machine_without_gpus_uses_the_number_of_processes_in_the_profile(tmp_path: Path) -> None:
    found = detect_hardware(LOCAL, {}, tmp_path)
    assert (found.device, found.processes_per_node) == ("cpu", 2)
    assert found.cpus_per_node == len(os.sched_getaffinity(0))
    hidden = detect_hardware(LOCAL, {"CUDA_VISIBLE_DEVICES": ""}, machine(tmp_path, 2))
    assert hidden.device == "cpu"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA L40S", None),
    ],
)
def test_a_gpu_is_recognized_by_its_driver_name(tmp_path: Path, name: str, model: str | None) -> None:
    assert detect_hardware(LOCAL, {}, machine(tmp_path, 1, name)).gpu == model


def test_a_profile_with_a_device_is_unchanged(tmp_path: Path) -> None:
    profile = load_cluster("a4-highgpu-8g", NOWHERE)
    assert detect_hardware(profile, {}, tmp_path) is profile


def check_sources(plan: RunPlan, environment: Mapping[str, str]) -> list[str]:
    return [warning for check in source_checks(plan, environment) for warning in check()]


def with_recipe(plan: RunPlan, recipe: RecipeSpec) -> RunPlan:
    """Make a plan for another recipe, whose model differs only in the tokenizer."""
    model = plan.recipe.model.model_copy(update={"tokenizer": recipe.model.tokenizer})
    return replace(plan, recipe=RecipePlan.extend(recipe, model=model, training=plan.recipe.training))


def with_weights(plan: RunPlan, weights: str, **changes: object) -> RunPlan:
    """Make a plan for weights in a folder, on a modified cluster."""
    model = plan.recipe.model.model_copy(update={"weights": weights})
    recipe = plan.recipe.model_copy(update={"model": model})
    return replace(plan, recipe=recipe, cluster=plan.cluster.model_copy(update=changes))


QUESTION = json.dumps({"sql_context": "CREATE TABLE t (a)", "sql_prompt": "How many?", "sql": "SELECT 1"}) + "\n"


@pytest.mark.parametrize(
    ("place", "error"),
    [("gs://team/a.jsonl", None), ("s3://team/a.jsonl", PermissionError("Unable to locate credentials")),
     ("s3://team/*.jsonl", TimeoutError()), ("hf://datasets/team/chats/a.jsonl", socket.gaierror(-2, "unknown"))],
)  # fmt: skip
def test_data_at_an_address_is_not_checked_without_a_network(
    place: str, error: Exception | None, demo_plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def glob(self, _: str) -> list[str]:
            raise RuntimeError("library's own error") from error

        isdir = glob

    def look_up(*_: object) -> None:
        if is_offline:
            raise socket.gaierror(-2, "Name or service not known")

    is_offline = True
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda _: Driver)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    spec = load_recipe("demo", NOWHERE, ["data.source=" + place, "data.format=auto", "evaluation.generation=null"])
    (warning,) = check_sources(with_recipe(demo_plan, spec), {})
    assert place in warning
    assert data_stamp(spec) != data_stamp(spec)  # prepared data may be of other files
    is_offline = False
    if not isinstance(error, OSError) or isinstance(error, PermissionError):  # not the network's
        with pytest.raises(PrerequisiteError, match="library's own error"):
            check_sources(with_recipe(demo_plan, spec), {})
        with pytest.raises(PrerequisiteError):
            data_stamp(spec)


def recipe_with_files(folder: Path) -> RecipeSpec:
    (folder / "train.jsonl").write_text(101 * QUESTION)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "tokenizer.json").write_text("{}")
    return load_recipe(
        "demo",
        NOWHERE,
        [
            f"data.source={{kind: files, train: {folder}/train.jsonl, num_heldout: 100}}",
            f"model.weights={folder}/model",
            "model.tokenizer={source: model, vocab_size: null}",
        ],
    )


def test_the_stamp_changes_only_with_the_files_that_packs_are_made_from(tmp_path: Path) -> None:
    recipe = recipe_with_files(tmp_path)
    before = data_stamp(recipe)
    (tmp_path / "model" / "model.safetensors").write_text("weights")
    assert data_stamp(recipe) == before
    (tmp_path / "model" / "tokenizer.json").write_text("{} ")
    changed = data_stamp(recipe)
    assert changed != before
    (tmp_path / "train.jsonl").write_text("{}\n{}\n")
    assert data_stamp(recipe) != changed


def recipe_with_source(**source: object) -> RecipeSpec:
    return load_recipe("demo", NOWHERE, [f"data.source={json.dumps(source)}"])


def test_a_folder_without_data_files_and_a_device_file_are_rejected(plan: RunPlan, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "README.md").touch()
    recipe = recipe_with_source(kind="files", train=str(tmp_path), num_heldout=100)
    with pytest.raises(NotFoundError, match=r"data\.source\.train: .*data files"):
        data_stamp(recipe)
    (tmp_path / "inner" / "rows.jsonl.gz").touch()
    assert str(tmp_path / "inner" / "rows.jsonl.gz") in data_stamp(recipe)
    device = recipe_with_source(kind="files", train="/dev/zero", num_heldout=100)
    with pytest.raises(NotFoundError, match=r"data\.source\.train: /dev/zero "):
        check_sources(with_recipe(plan, device), {})


def test_a_folder_with_too_many_files_for_a_data_set_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("{}")
    recipe = recipe_with_source(kind="hub", dataset=str(tmp_path), num_heldout=100)
    assert data_stamp(recipe).count("rows.jsonl") == 3
    monkeypatch.setattr("ftkit.data.source_files.MAX_FILES", 5)
    with pytest.raises(NotFoundError, match=r"data\.source\.dataset: .* 5 files"):
        data_stamp(recipe)


def test_an_unreadable_path_is_reported_with_its_key(tmp_path: Path) -> None:
    deep = "/".join([str(tmp_path), *["x" * 200] * 30])
    recipe = recipe_with_source(kind="files", train="rows.jsonl", num_heldout=100)
    source = recipe.data.source.model_copy(update={"train": deep})
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": source})})
    with pytest.raises(NotFoundError, match=r"data\.source\.train: .*File name too"):
        data_stamp(recipe)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (101 * '{"sql": 1}\n', r"train\.jsonl:1: no column 'sql_context', 'sql_prompt'"),
        (QUESTION + "{]\n", r"train\.jsonl:2: not valid JSON"),
        (3 * QUESTION, r"has 3 examples, the recipe asks for 101"),
        ("", r"has 0 examples"),
    ],
)
def test_invalid_rows_stop_a_run_before_submission(plan: RunPlan, tmp_path: Path, rows: str, message: str) -> None:
    here = with_recipe(plan, recipe_with_files(tmp_path).model_copy(update={"model": plan.recipe.model}))
    (tmp_path / "train.jsonl").write_text(rows)
    with pytest.raises(DataError, match=message):
        check_sources(here, {})


NAMED_TEMPLATES = '{"chat_template": [{"name": "rag", "template": "{{ a }}"}]}'
ONLY_IM_END = '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<|im_end|>"}]}'


@pytest.mark.parametrize(
    ("files", "template", "message"),
    [
        ({}, "chatml", "has no tokenizer"),
        ({"tokenizer.json": "{}"}, "model", "has no 'model', so it holds no vocabulary"),
        ({"tokenizer.json": "version https://git-lfs"}, "model", r"can't read .*tokenizer\.json: .*\n.*Git LFS"),
        ({"tokenizer.json": '{"model": {}}'}, "model", "has no chat template"),
        ({"tokenizer.json": '{"model": {}}', "tokenizer_config.json": '{"chat_template": "{{ a }}"}'}, "model", None),
        ({"tokenizer_config.json": '{"eos_token": "</s>"}'}, "model", "but no vocabulary"),
        ({"tokenizer.model": "", "chat_template.jinja": ""}, "model", "can't load the tokenizer"),
        ({"vocab.json": "{}"}, "chatml", "can't load the tokenizer"),
        ({"tokenizer.json": '{"model": {"vocab": {"a": 0}}}'}, "gemma", "lacks <bos>, <end_of_turn>, <start_of_turn>"),
        ({"tokenizer.json": ONLY_IM_END}, "chatml", r"lacks <\|im_start\|> of the"),
        ({"tokenizer.json": '{"model": {"vocab": [["<|im_start|>", 0], ["<|im_end|>", 0]]}}'}, "chatml", None),
        ({"tekken.json": "{}"}, "model", "has no chat template"),
        ({"tekken.json": "{}", "chat_template.jinja": "{{ a }}"}, "model", None),
        ({"tokenizer.json": '{"model": {}}', "chat_template.json": "{}"}, "model", None),
        ({"tokenizer.json": '{"model": {}}', "tokenizer_config.json": NAMED_TEMPLATES}, "model", "the default: rag"),
        (
            {"tokenizer.json": '{"model": {}}', "additional_chat_templates/rag.jinja": "{{ a }}"},
            "model",
            "several chat templates, and none of them is the default: rag",
        ),
        ({"tokenizer_config.json": "half of"}, "model", r"can't read .*tokenizer_config\.json"),
    ],
)
def test_a_missing_tokenizer_or_template_stops_a_run_before_submission(
    plan: RunPlan, tmp_path: Path, files: dict[str, str], template: str, message: str | None
) -> None:
    (tmp_path / "tokenizer").mkdir()
    for name, content in files.items():
        (tmp_path / "tokenizer" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "tokenizer" / name).write_text(content)
    overrides = [
        f"model.tokenizer={{source: {tmp_path}/tokenizer, vocab_size: null}}",
        f"data.chat_template={template}",
    ]
    here = with_recipe(plan, load_recipe("demo", NOWHERE, overrides))
    if message is None:
        assert check_sources(here, {}) == []
    else:
        with pytest.raises(DataError, match=message):
            check_sources(here, {})


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_a_warning(plan: RunPlan, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 2000000}}}')
    (tmp_path / "chat_template.jinja").write_text("")
    overrides = [f"model.tokenizer={{source: {tmp_path}, vocab_size: null}}", "data.chat_template=model"]
    (warning,) = check_sources(with_recipe(plan, load_recipe("demo", NOWHERE, overrides)), {})
    assert "2,000,001 tokens" in warning


def test_a_template_with_tokens_missing_from_a_cached_hub_tokenizer_stops_a_run(plan: RunPlan, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--x--y" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    overrides = ["model.tokenizer={source: x/y, vocab_size: null}", "data.chat_template=gemma"]
    here = with_recipe(plan, load_recipe("demo", NOWHERE, overrides))
    assert check_sources(here, {"HF_HOME": str(tmp_path)}) == []
    (snapshot / "tokenizer.json").write_text(ONLY_IM_END)
    with pytest.raises(DataError, match="<bos>, <end_of_turn>, <start_of_turn>"):
        check_sources(here, {"HF_HOME": str(tmp_path)})


def test_a_missing_template_is_reported_for_a_detected_format(plan: RunPlan, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"model": {}}')
    for row, message in (({"question": "q", "answer": "a"}, "has no chat template"), ({"text": "t"}, None)):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        tokenizer = f"model.tokenizer={{source: {tmp_path}/tokenizer, vocab_size: null}}"
        source = f"data.source={{kind: files, train: {tmp_path}/rows.jsonl}}"
        overrides = [tokenizer, source, "data.format=auto", "data.chat_template=model", "evaluation.generation=null"]
        here = with_recipe(plan, load_recipe("demo", NOWHERE, overrides))
        if message is None:
            assert check_sources(here, {}) == []
        else:
            with pytest.raises(DataError, match=message):
                check_sources(here, {})


def test_conversations_that_would_be_split_stop_a_run_before_submission(plan: RunPlan, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    source = f"data.source={{kind: files, train: {tmp_path}/rows.jsonl}}"
    overrides = [source, "data.format=auto", "data.too_long=split", "evaluation.generation=null"]
    with pytest.raises(DataError, match=r"data\.too_long is 'split'"):
        check_sources(with_recipe(plan, load_recipe("demo", NOWHERE, overrides)), {})


def test_generated_data_has_no_stamp() -> None:
    assert data_stamp(load_recipe("demo", NOWHERE)) == ""


def test_a_missing_data_file_stops_a_run_before_submission(plan: RunPlan, tmp_path: Path) -> None:
    here = with_recipe(plan, recipe_with_files(tmp_path).model_copy(update={"model": plan.recipe.model}))
    assert check_sources(here, {}) == []
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(NotFoundError, match=r"data\.source\.train: .*train\.jsonl"):
        check_sources(here, {})


@pytest.mark.parametrize("mounts", [(), ("/nowhere:/nowhere:ro",)], ids=["not mounted", "mounted by the profile"])
def test_a_model_folder_that_may_exist_only_on_nodes_is_a_warning(plan: RunPlan, mounts: tuple[str, ...]) -> None:
    elsewhere = with_weights(plan, "/nowhere/models/olmo", scheduler="slurm", mounts=mounts)
    (warning,) = check_sources(elsewhere, {})
    assert "/nowhere/models/olmo is not visible" in warning
    with pytest.raises(NotFoundError, match=r"model\.weights: /nowhere/models/olmo "):
        check_sources(replace(elsewhere, cluster=plan.cluster), {})


def test_a_misspelled_model_in_an_existing_folder_is_rejected(plan: RunPlan, tmp_path: Path) -> None:
    misspelt = with_weights(plan, f"{tmp_path}/modle", scheduler="slurm")
    with pytest.raises(NotFoundError, match=r"model\.weights: .*/modle "):
        check_sources(misspelt, {})
    mounted = with_weights(plan, f"{tmp_path}/modles/olmo", scheduler="slurm", mounts=(str(tmp_path),))
    with pytest.raises(NotFoundError, match=r"model\.weights: .*/modles/olmo "):
        check_sources(mounted, {})


@pytest.mark.parametrize(
    ("sinks", "environment", "said"),
    [
        (["wandb"], {}, "export WANDB_API_KEY"),
        (["mlflow"], {}, "MLFLOW_TRACKING_URI"),
        (["wandb"], {"WANDB_API_KEY": "any"}, None),
        (["wandb"], {"WANDB_MODE": "offline"}, None),
        (["mlflow"], {"MLFLOW_TRACKING_URI": "http://mlflow"}, None),
        (["mlflow"], {"MLFLOW_TRACKING_URI": "databricks"}, None),
        (["mlflow"], {"MLFLOW_TRACKING_URI": "file:///shared/mlruns"}, "MLFLOW_ALLOW_FILE_STORE"),
        (["mlflow"], {"MLFLOW_TRACKING_URI": "./mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}, None),
        (["tensorboard"], {}, None),
    ],
)
def test_a_missing_tracker_key_is_reported_before_submission(
    plan: RunPlan, sinks: list[str], environment: dict[str, str], said: str | None, tmp_path: Path
) -> None:
    here = with_recipe(plan, load_recipe("demo", NOWHERE, [f"tracking.sinks={sinks}"]))
    slurm = replace(here, cluster=here.cluster.model_copy(update={"scheduler": "slurm", "runtime": "pyxis"}))
    (tmp_path / ".netrc").touch()  # not visible in containers
    if said is None:
        assert check_trackers(slurm, {"HOME": str(tmp_path), **environment}) == []
        return
    with pytest.raises(PrerequisiteError) as caught:
        check_trackers(slurm, {"HOME": str(tmp_path), **environment})
    assert said in caught.value.fix
    (warning,) = check_trackers(slurm, {"HOME": str(tmp_path), **environment}, is_preview=True)
    assert said in warning
    of_the_site = slurm.cluster.model_copy(update={"environment": {"WANDB_API_KEY": "x", "MLFLOW_TRACKING_URI": "x"}})
    assert check_trackers(replace(slurm, cluster=of_the_site), {}) == []
    (warning,) = check_trackers(
        replace(slurm, cluster=slurm.cluster.model_copy(update={"setup": ("source keys",)})), {}
    )
    assert "under 'setup'" in warning


def test_without_a_container_the_key_in_the_home_folder_is_enough(plan: RunPlan, tmp_path: Path) -> None:
    here = with_recipe(plan, load_recipe("demo", NOWHERE, ["tracking.sinks=[wandb]"]))
    on_slurm = replace(here, cluster=here.cluster.model_copy(update={"scheduler": "slurm"}))
    with pytest.raises(PrerequisiteError):
        check_trackers(on_slurm, {"HOME": str(tmp_path)})
    (tmp_path / ".netrc").touch()
    assert check_trackers(on_slurm, {"HOME": str(tmp_path)}) == []


def test_a_missing_tracker_package_is_reported_without_a_container(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.config.recipe.find_spec", lambda _: None)
    here = with_recipe(plan, load_recipe("demo", NOWHERE, ["tracking.sinks=[tensorboard]"]))
    with pytest.raises(PrerequisiteError, match="not installed"):
        check_trackers(here, {})


def test_all_missing_packages_of_a_recipe_are_reported_without_a_container(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ftkit.launch.preflight.find_spec", lambda name: None if name in {"peft", "bitsandbytes"} else 1
    )
    assert run_checks(plan, {}).errors == ()
    recipe = plan.recipe.model_copy(update={"training": plan.recipe.training.model_copy(update={"method": "qlora"})})
    (error,) = run_checks(replace(plan, recipe=recipe), {}).errors
    assert error.what.startswith("peft, bitsandbytes are not installed")
    assert error.fix == "pip install 'ftkit[train,qlora]'"


def test_everything_missing_is_reported_together(plan: RunPlan, tmp_path: Path) -> None:
    recipe = recipe_with_files(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    here = with_weights(replace(plan, recipe=plan.recipe.model_copy(update={"data": recipe.data})), "/nowhere/model")
    findings = run_checks(here, {})
    assert [error.what.partition(":")[0] for error in findings.errors] == ["model.weights", "data.source.train"]
    with pytest.raises(ExceptionGroup, match="the run would fail"):
        findings.raise_errors()
    assert run_checks(plan, {}) == Findings((), ())


@pytest.mark.parametrize(("main_gib", "fits", "warns"), [(30.0, True, False), (15.0, True, True), (9.0, False, False)])
def test_a_model_too_large_for_this_machine_is_rejected(
    plan: RunPlan, main_gib: float, fits: bool, warns: bool
) -> None:
    large = replace(plan, memory=replace(plan.memory, parameters=10.0))
    if fits:
        assert bool(check_memory(large, main_gib)) == warns
    else:
        with pytest.raises(MemoryExhaustedError, match=r"21 GiB .* 9 GiB"):
            check_memory(large, main_gib)
    elsewhere = replace(large, cluster=plan.cluster.model_copy(update={"scheduler": "slurm"}))
    assert check_memory(elsewhere, main_gib) == []


@pytest.mark.parametrize(
    ("cpu_info", "is_slow"),
    [("flags : fpu avx2 fma", True), ("flags\t: avx2 avx512bw amx_bf16", False), ("Features : fp bf16", False),
     ("Features : fp asimd", True), ("model name : bf16\nflags : sse4_2", True)],
)  # fmt: skip
def test_bf16_is_warned_of_on_cpus_without_its_instructions(plan: RunPlan, cpu_info: str, is_slow: bool) -> None:
    assert check_precision(plan, cpu_info) == []  # fp32
    training = plan.recipe.training.model_copy(update={"precision": "bf16"})
    in_bf16 = replace(plan, recipe=plan.recipe.model_copy(update={"training": training}))
    assert any("training.precision=fp32" in warning for warning in check_precision(in_bf16, cpu_info)) == is_slow
    elsewhere = replace(in_bf16, cluster=plan.cluster.model_copy(update={"scheduler": "slurm"}))
    on_gpus = replace(in_bf16, placement=replace(plan.placement, device="cuda"))
    assert check_precision(elsewhere, cpu_info) == check_precision(on_gpus, cpu_info) == []


def test_a_model_more_than_twice_too_large_for_a_gpu_is_rejected(plan: RunPlan) -> None:
    placement = replace(plan.placement, device="cuda")
    cluster = plan.cluster.model_copy(update={"gpu": "h200", "device": "cuda"})
    here = replace(plan, placement=placement, cluster=cluster)
    assert check_memory(replace(here, memory=replace(plan.memory, parameters=200.0)), 1.0) == []
    with pytest.raises(MemoryExhaustedError, match=r"a GPU \(h200\) has 133 GiB"):
        check_memory(replace(here, memory=replace(plan.memory, parameters=999.0)), 1.0)
    unknown = replace(here, cluster=cluster.model_copy(update={"gpu": None}))
    assert check_memory(replace(unknown, memory=replace(plan.memory, parameters=999.0)), 1.0) == []


def test_the_manifest_records_the_inputs_of_a_run(plan: RunPlan, tmp_path: Path) -> None:
    manifest = build_manifest(plan, ["ftkit", "run", "demo", "hub.token=hf_abcdefghijkl"], tmp_path)
    assert manifest["command"] == ["ftkit", "run", "demo", "hub.token=***"]
    assert manifest["run"] == plan.id
    assert manifest["data_fingerprint"] == plan.fingerprint
    assert manifest["seeds"] == {"training": 1, "data": 1}
    assert len(manifest["plan_sha256"]) == 64
    assert manifest["project"] == {"folder": str(tmp_path), "git": None}
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org", *words], check=True
        )
    (tmp_path / "new").touch()
    recorded = build_manifest(plan, ["ftkit"], tmp_path)["project"]["git"]
    commit = read_commit(tmp_path)
    assert recorded == {"commit": commit and commit.id, "has_uncommitted_changes": True}


def test_the_format_is_described_although_another_check_of_the_data_fails(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "q"}]}\n')
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')

    def describe(data: str) -> str:
        recipe = tmp_path / "mine.yaml"
        recipe.write_text(f"model: org/model\ndata: {data}\n")
        return describe_detected(load_recipe(str(recipe), Context(tmp_path, tmp_path / "user", {})).data)

    assert "'messages'" in describe("{source: ./chats.jsonl, validation: {count: 9}}")
    assert "'messages'" in describe("{source: ./chats.jsonl, validation: {file: ./missing.jsonl}}")
    assert "no known format" in describe("./other.jsonl")
    assert "no known format" not in describe("./missing.jsonl")
