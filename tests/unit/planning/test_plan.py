from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit import assets
from ftkit.config.cluster import profile_of_gpu
from ftkit.config.context import Context, list_images
from ftkit.config.execution import FP8_MULTIPLE, GIB
from ftkit.config.image import BaseImageSpec, ImageSpec
from ftkit.config.image_reference import ImageFile, NamedImage, parse_reference
from ftkit.config.load import load_cluster, load_image, load_recipe, read_cluster, read_recipe, shipped_config
from ftkit.config.objectives import DpoSpec, KtoSpec, ObjectiveSpec
from ftkit.config.recipe import shares_prompts
from ftkit.config.request import Origins, RunRequest
from ftkit.config.training import TrainingPlan
from ftkit.errors import ConfigError, FtkitError
from ftkit.models.adapters import ALL_PROJECTIONS
from ftkit.models.architecture import ArchitecturePlan, Linear
from ftkit.models.parameters import count_model
from ftkit.models.vision import Vision, VisionPlan, read_vision
from ftkit.planning.fit import Fit
from ftkit.planning.layout import DataLayout, RunLayout, Workspace
from ftkit.planning.plan import (
    PREPARATION_VERSION,
    RunPlan,
    parse_plan,
    plan_to_json,
    read_plan,
    read_plan_to_use,
)
from ftkit.planning.planner import count_steps, fingerprint, plan_for_counts, plan_model, plan_run
from ftkit.planning.step_time import predict_step_time, vision_seconds
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from conftest import RunMaker

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.recipe import RecipeSpec

HERE = Context(Path("/nowhere/project"), Path("/nowhere/user"), {})
DEMO = load_recipe("demo", HERE)
LOCAL = load_cluster("local", HERE).model_copy(update={"device": "cpu", "cpus_per_node": 8})
A4 = load_cluster("a4-highgpu-8g", HERE)
IMAGE = ImageSpec(
    name="olmo3",
    tag="25.02",
    description="d",
    base=BaseImageSpec(reference="b"),
    families=("olmo3",),
    default_recipe="olmo3-7b-full",
)
OLMO3 = NamedImage("olmo3:25.02")
REQUEST = RunRequest(
    None,
    None,
    None,
    None,
    False,
    Path("/shared/me"),
    "/venv/bin/python",
    datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "ab12",
)


def plan(
    recipe: RecipeSpec = DEMO,
    cluster: ClusterProfile = LOCAL,
    image: ImageSpec | None = None,
    request: RunRequest = REQUEST,
) -> RunPlan:
    return plan_run(recipe, cluster, image, request)


def problems(
    recipe: RecipeSpec = DEMO,
    cluster: ClusterProfile = LOCAL,
    image: ImageSpec | None = None,
    request: RunRequest = REQUEST,
) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(recipe, cluster, image, request)
    return "\n".join(str(problem) for problem in caught.value.problems)


def demo(*overrides: str) -> RecipeSpec:
    return load_recipe("demo", HERE, overrides)


def print_of(recipe: RecipeSpec, stamp: str) -> str:
    return fingerprint(recipe, plan_model(recipe.model, None), stamp)


SDPA = "training.attention=sdpa"
"""The kernel that divides packs in fp32."""
DPO = ("training.objective=dpo", "training.method=lora", "evaluation.generation=null")


STORED = DpoSpec(reference="stored")


def test_prompts_are_shared_only_where_the_plan_knows_that_attention_can() -> None:
    def shared(*overrides: str) -> bool | None:
        recipe = demo(*overrides)
        return shares_prompts(recipe, plan_model(recipe.model, None).architecture)

    assert shared() is False
    assert shared(*DPO) is None
    assert shared(*DPO, "training.attention=cudnn") is False
    assert shared(*DPO, "model.architecture.family=olmo3", "model.architecture.sliding_window=64") is False
    assert shared(*DPO, "data.share_prompts=true") is True
    names = {
        print_of(demo(*DPO, *each), "")
        for each in ((), ("data.share_prompts=true",), ("data.share_prompts=false",), ("data.contradictions=drop",))
    }
    assert len(names) == 4
    assert print_of(demo(*DPO, "training.attention=cudnn"), "") == print_of(demo(), "")


VISION = VisionPlan("gemma3")
RECORDS = Path(__file__).resolve().parents[3] / "benchmarks" / "records"


def with_pictures(*overrides: str, vision: VisionPlan | None = VISION) -> RunPlan:
    recipe = demo(*(() if any("data.pictures" in each for each in overrides) else ("data.pictures=true",)), *overrides)
    model = plan_model(recipe.model, None).model_copy(update={"vision": vision})
    return plan(recipe, request=replace(REQUEST, model=model))


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("training.context_parallel=2", "training.context_parallel: divides the tokens of a pack"),
        ("training.engine=zero3", "training.engine: 'zero3'"),
        ("data.packing=off", "data.packing: 'off'"),
        ("training.objective=dpo", "training.objective: 'dpo' with stored"),
        ("training.objective=orpo|data.share_prompts=true", "data.share_prompts: can't be true"),
        (
            "data.pictures=false|training.vision=full",
            "training.vision: 'full' trains on pictures, and the data has",
        ),
        ("data.pictures=null|training.vision=full", "training.vision: 'full' trains on pictures, and the first rows"),
        ("training.vision_learning_rate=1e-3", "vision_learning_rate has no effect with vision 'frozen'"),
    ],
)
def test_what_can_not_be_combined_with_pictures_is_refused_by_the_plan(override: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_pictures(*override.split("|"))
    assert any(found in str(problem) for problem in caught.value.problems)


def of_gemma3(method: str, vision: str, *more: str, tokens: int = 256) -> RunPlan:
    """Return the plan of Gemma 3 4B on one H200, with pictures of `tokens` tokens each; 0 if unknown."""
    config = shipped_config("google/gemma-3-4b-pt")
    assert config is not None
    base = ("model.weights=google/gemma-3-4b-pt", "model.architecture=gemma3-4b", "data.pictures=true")
    words = (f"training.vision={vision}", f"training.method={method}")
    recipe = load_recipe("gemma3-1b-dolly-lora", HERE, (*base, *words, *more))
    model = plan_model(recipe.model, config)
    found = read_vision(config, {})
    assert found is not None
    patches = found.patches if tokens else 0
    seen = replace(found, tower=417_000_000, projector=3_000_000, patches=patches, tokens=tokens)
    shape = model.architecture.model_copy(update={"vision": seen})
    model = model.model_copy(update={"vision": seen, "architecture": shape})
    return plan(recipe, profile_of_gpu("h200", 1), request=replace(REQUEST, model=model))


def test_the_tower_takes_memory_and_time_by_what_of_it_is_trained() -> None:
    frozen, projector, full = (of_gemma3("lora", vision) for vision in get_args(Vision))
    text = replace(frozen.setup, shape=frozen.recipe.model.architecture.model_copy(update={"vision": None}))
    assert frozen.num_parameters - count_model(text.shape).total == 420_000_000
    assert [each.num_trained - frozen.num_trained for each in (projector, full)] == [3_000_000, 420_000_000]
    # Frozen: the weights in bf16. Trained: weights, gradients and two states in fp32.
    states = [Fit(each).memory for each in (text, frozen.setup, full.setup)]
    assert states[1].parameters - states[0].parameters == pytest.approx(2 * 420e6 / GIB)
    assert states[2].optimizer - states[1].optimizer == pytest.approx(8 * 420e6 / GIB)
    assert states[2].total > states[1].total + 14 * 420e6 / GIB
    seconds = [predict_step_time(each, GPUS["h200"]).step_seconds for each in (text, frozen.setup, full.setup)]
    assert seconds[0] < seconds[1] < seconds[2]


def test_pictures_of_no_known_size_are_noted_and_take_no_memory_but_the_weights() -> None:
    known, unknown = (of_gemma3("lora", "frozen", tokens=tokens) for tokens in (256, 0))
    text = replace(known.setup, shape=known.recipe.model.architecture.model_copy(update={"vision": None}))
    assert Fit(text).memory.total < unknown.memory.total < known.memory.total
    assert [any("of the vision tower are not planned" in note for note in run.notes) for run in (known, unknown)] == [
        False, True,
    ]  # fmt: skip


def test_memory_and_time_with_pictures_are_within_8_percent_of_a_recorded_run() -> None:
    record = json.loads((RECORDS / "pictures-h200-gemma3-4b-lora.json").read_text())
    measured = next(row["medians"] for row in record["rows"] if row["labels"]["row"] == "ftkit")
    packs = ("training.sequence_length=4096", "training.micro_batch_size=1", "training.global_batch_size=1")
    run = of_gemma3("lora", "frozen", *packs)
    assert run.memory.total == pytest.approx(measured["peak GiB"], rel=0.08)
    setup, gpu, tokens_of_a_picture = run.setup, GPUS["h200"], 256
    text = replace(setup, shape=run.recipe.model.architecture.model_copy(update={"vision": None}))
    seconds = predict_step_time(text, gpu).step_seconds
    seconds += measured["rows in a step"] * tokens_of_a_picture * vision_seconds(setup, gpu)
    assert measured["rows in a step"] / seconds == pytest.approx(measured["rows/s"], rel=0.08)


def test_pictures_need_a_multimodal_model_and_other_data() -> None:
    with pytest.raises(ConfigError, match="has no vision tower"):
        with_pictures(vision=None)
    with pytest.raises(ConfigError, match="knows prompts by their tokens"):
        with_pictures("training.objective=kto", "training.method=lora")
    seen = with_pictures("training.vision=full", "training.vision_learning_rate=1e-5")
    assert seen.engine.name == "fsdp2"
    assert print_of(demo("data.pictures=true"), "") != print_of(demo(), "") == print_of(demo("data.pictures=false"), "")


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("training.tensor_parallel=2", "training.tensor_parallel: divides the tokens of a pack"),
        ("training.context_parallel=2", "training.context_parallel: divides the tokens of a pack"),
        ("data.packing=off", "'off' would separate the pairs"),
        ("data.format=alpaca", "'alpaca' has no pairs"),
        ("data.share_prompts=true|training.attention=eager", "'eager' takes documents, not masks"),
        (
            "data.share_prompts=true|model.architecture.sliding_window=64|model.architecture.family=olmo3",
            "sliding windows",
        ),
        ("training.simpo={beta: 1}", "simpo has no effect with objective 'dpo'"),
        ("training.dpo={label_smoothing: 0.5}", "label_smoothing"),
    ],
)
def test_what_can_not_be_combined_with_pairs_is_refused_by_the_plan(override: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(demo(*DPO, "data.format=preferences", *override.split("|")))
    assert any(found in str(problem) for problem in caught.value.problems)


DISTILL = ("training.objective=distill", "training.distill={teacher: /models/large, top_k: 64}")


def with_teacher(recipe: RecipeSpec, **changes: object) -> RunRequest:
    """Return a request with a teacher 32 times as deep as the recipe's model."""
    model = plan_model(recipe.model, None)
    shape = ArchitecturePlan.extend(
        model.architecture, counts=None, num_hidden_layers=32 * model.architecture.num_hidden_layers
    )
    return replace(REQUEST, teacher=model.model_copy(update={"architecture": shape, **changes}))


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("training.tensor_parallel=2", "training.tensor_parallel: divides the tokens of a pack"),
        ("training.context_parallel=2", "training.context_parallel: divides the tokens of a pack"),
        ("data.packing=off", "'off' would separate the pairs of objective 'distill'"),
        ("training.distill.top_k=100000", "training.distill.top_k: the vocabulary has"),
        ("training.objective=next_token", "distill has no effect with objective 'next_token'"),
        ("training.distill.teacher=random", "needs a trained teacher"),
    ],
)
def test_what_can_not_be_combined_with_a_teacher_is_refused_by_the_plan(override: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(demo(*DISTILL, override), request=with_teacher(DEMO))
    assert any(found in str(problem) for problem in caught.value.problems)


def test_a_teacher_with_adapters_is_refused_by_the_plan() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(demo(*DISTILL), request=with_teacher(DEMO, adapter="/adapters"))
    assert "ftkit export RUN --merge" in str(caught.value.problems[0])


def test_a_plan_has_disk_time_and_memory_of_a_teacher() -> None:
    settings = ("training.method=lora", "training.micro_batch_size=1", "training.activation_checkpointing=full")
    recipe = load_recipe("olmo3-7b-full", HERE, [*settings, *DISTILL])
    request = replace(with_teacher(recipe), image=OLMO3)
    unknown = plan(recipe, A4, IMAGE, request)
    (note,) = (note for note in unknown.notes if note.startswith("teacher"))
    assert f"{65 * 6 * 10**6 / 2**30:.2g} GiB next to the data and about" in note
    assert note.endswith("GPU hours before step 1, per million trained tokens")
    assert unknown.memory.moment == "teacher"
    student = plan(recipe, A4, IMAGE, replace(request, teacher=None))
    assert student.memory.total < unknown.memory.total
    assert unknown.memory.parameters == pytest.approx(2 * 32 * 7e9 / 8 / 2**30, rel=0.1)  # bf16 on eight GPUs
    prepared = replace(request, num_packs=1000, num_tokens=8_000_000, num_targets=5_000_000)
    (note,) = (note for note in plan(recipe, A4, IMAGE, prepared).notes if note.startswith("teacher"))
    assert note.startswith("teacher /models/large: 1.8 GiB next to the data and about ")
    assert note.endswith("once for all runs with this data")


def test_one_process_predicts_memory_again_for_a_counted_student_with_a_teacher() -> None:
    alone = LOCAL.model_copy(update={"processes_per_node": 1})
    recipe = demo(*DISTILL, "model.architecture.family=qwen2")
    planned = plan(recipe, alone, request=with_teacher(recipe))
    counts = replace(count_model(recipe.model.architecture), source="model")
    assert planned.placement.world_size == 1
    assert plan_for_counts(planned, counts).memory.total == pytest.approx(planned.memory.total, rel=0.2)


def test_notes_suggestions_and_host_memory_count_a_teacher_that_does_not_fit() -> None:
    settings = ("training.method=lora", "training.micro_batch_size=1", "training.activation_checkpointing=full")
    recipe = load_recipe("olmo3-7b-full", HERE, [*settings, *DISTILL])
    one = A4.model_copy(update={"gpu": "h100-80gb", "gpus_per_node": 1})
    request = replace(with_teacher(recipe), image=OLMO3)
    found = plan(recipe, one, IMAGE, request)
    assert (found.memory.moment, found.memory.total > 200) == ("teacher", True)
    assert any("while the teacher computes" in note and "out-of-memory" in note for note in found.notes)
    fitting = [note.split()[3] for note in found.notes if "to fit" in note]
    assert fitting
    assert {*fitting} <= {"training.offload=all"}
    recipe = load_recipe("olmo3-7b-full", HERE, [*settings, *DISTILL, "training.offload=all"])
    offloaded = plan(recipe, one, IMAGE, request)
    assert offloaded.memory.total < 80
    assert offloaded.host_memory is not None
    assert offloaded.host_memory.total > 2 * 32 * 7e9 / 2**30


def test_eager_attention_saves_its_scores() -> None:
    """Six bytes per head and pair of tokens: bf16 weights, and the softmax in fp32."""
    words = ("training.method=lora", "training.micro_batch_size=1", "training.activation_checkpointing=none",
             "training.compile=none", "training.sequence_length=4096", "training.global_batch_size=8")  # fmt: skip
    request = replace(REQUEST, image=OLMO3)
    eager, flex = (
        plan(load_recipe("olmo3-7b-full", HERE, [*words, f"training.attention={kernel}"]), A4, IMAGE, request).memory
        for kernel in ("eager", "flex")
    )
    scores = 6 * 32 * 32 * 4096**2 / GIB
    assert eager.activations - flex.activations == pytest.approx(scores, rel=0.1)


@pytest.mark.parametrize(
    ("words", "gpu", "found"),
    [
        (("training.attention=flash4",), "a100-80gb", "needs Hopper or newer"),
        (("training.attention=cudnn", "training.deterministic=true"), "h200", "does not repeat"),
        (
            ("training.deterministic=true", "model.architecture=qwen3.5-9b"),
            "h200",
            "attention of 'qwen3_5_text'",
        ),
        (("training.attention=flash4",), "b200", "flash-attn-4, which olmo3:25.02 does not list"),
        (("training.attention=flex", "training.sequence_length=64"), "h200", "needs packs of 128 tokens"),
        (("training.attention=sdpa", "model.architecture.family=gpt_oss"), "h200", "attention sinks of 'gpt_oss'"),
        (("training.context_parallel=2", "model.architecture.family=gpt_oss"), "h200", "attention sinks of 'gpt_oss'"),
        (("training.context_parallel=2", "model.architecture=qwen3.5-9b", SDPA), "h200", "carry a state"),
        (("training.context_parallel=2", "training.deterministic=true"), "h200", "which olmo3:25.02 does not list"),
        (("training.tensor_parallel=2",), "a100-80gb", "can't use on NVIDIA A100"),
        (("training.collectives=copy_engine", "training.shard_degree=4"), "h200", "makes several"),
        (("training.router_aux_loss_coef=0.1", "model.architecture.family=deepseek_v3"), "h200", "in another way"),
        (("training.method=lora",), "h200", "need torch 2.8, and olmo3:25.02 has 2.7.0a0"),
    ],
)
def test_settings_that_the_trainer_refuses_are_refused_by_the_plan(
    words: tuple[str, ...], gpu: str, found: str
) -> None:
    recipe = load_recipe("olmo3-7b-full", HERE, ["model.weights=random", "model.tokenizer.source=org/tokens", *words])
    cluster = A4.model_copy(update={"gpu": gpu})
    assert found in problems(recipe, cluster, load_image("olmo3:25.02", HERE), replace(REQUEST, image=OLMO3))


def test_a_plan_has_the_time_of_a_stored_reference() -> None:
    recipe = load_recipe("olmo3-7b-full", HERE, [*DPO, "training.method=full", "data.format=preferences"])
    found = {}
    for objective in ("dpo", "kto", "simpo"):
        changed = recipe.training.model_copy(update={"objective": objective})
        one = plan(recipe.model_copy(update={"training": changed}), A4, IMAGE, replace(REQUEST, image=OLMO3))
        notes = [note for note in one.notes if note.startswith("reference")]
        found[objective] = [float(note.split()[4]) for note in notes]
        assert all(note.endswith("GPU hours before step 1, per million trained tokens") for note in notes)
        assert one.speed is not None
        speed = one.speed.tokens_per_second / one.placement.world_size
    assert found["simpo"] == []
    assert found["dpo"] == [pytest.approx(0.33 * 1e6 / speed / 3600, rel=0.1)]
    assert found["kto"][0] == pytest.approx(2 * found["dpo"][0], rel=0.1)


def test_a_reference_without_adapters_to_turn_off_is_stored() -> None:
    assert plan(demo(*DPO, "data.format=preferences", "training.method=full")).recipe.training.stores_reference
    with pytest.raises(ConfigError) as caught:
        demo(*DPO, "data.format=preferences", "training.method=full", "training.dpo={reference: adapters_off}")
    assert "set 'stored'" in str(caught.value)


def test_a_reference_adds_a_forward_pass_to_a_planned_step_unless_it_is_stored() -> None:
    settings = ("training.method=lora", "training.micro_batch_size=1", "training.activation_checkpointing=full")
    lora = load_recipe("olmo3-7b-full", HERE, [*settings, "evaluation.generation=null", "data.format=preferences"])
    recipes = [
        lora.model_copy(update={"training": lora.training.model_copy(update={"objective": objective})})
        for objective in ("simpo", "dpo")
    ]
    recipes.append(lora.model_copy(update={"training": recipes[1].training.model_copy(update={"dpo": STORED})}))
    found = [plan(recipe, A4, IMAGE, replace(REQUEST, image=OLMO3)) for recipe in recipes]
    without, dpo, stored = (each.speed.step_seconds for each in found if each.speed)
    assert 1.3 < dpo / without < 1.5
    assert stored == without
    for number, spec in (
        (3, KtoSpec()),
        (1, KtoSpec(reference="stored")),
    ):  # of mismatched completions, one or two more
        training = lora.training.model_copy(update={"objective": "kto", "kto": spec})
        kto = plan(lora.model_copy(update={"training": training}), A4, IMAGE, replace(REQUEST, image=OLMO3))
        assert kto.speed
        assert kto.speed.step_seconds - without == pytest.approx(number * (dpo - without))


def test_pairs_are_packed_otherwise_for_kto() -> None:
    dpo, ipo, kto = (
        demo(*DPO, "data.format=preferences", f"training.objective={each}") for each in ("dpo", "ipo", "kto")
    )
    assert print_of(dpo, "") == print_of(ipo, "")
    assert print_of(kto, "") != print_of(dpo, "")


def test_kto_trains_padded_rows_unless_its_reference_is_stored() -> None:
    settings = (*DPO, "data.format={kind: messages, label: liked}", "training.objective=kto", "data.packing=off")
    assert plan(demo(*settings)).recipe.training.has_reference
    with pytest.raises(ConfigError) as caught:
        plan(demo(*settings, "training.kto={reference: stored}"))
    assert "what its stored reference is of" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        plan(demo(*settings, "data.format=messages"))
    assert "'messages' has no label for objective 'kto'" in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "numbers", "advice"),
    [
        ({}, (100, 100), None),
        ({}, (133, 100), None),
        ({}, (300, 100), "undesirable_weight=3"),
        ({"undesirable_weight": 2.5}, (300, 100), None),
        ({"desirable_weight": 0.5}, (100, 100), "desirable_weight=1"),
        ({"undesirable_weight": 0.25}, (10, 2), "undesirable_weight=5"),
        ({}, (0, 100), "0 desirable and 100 undesirable completions: it learns from the difference"),
    ],
)
def test_unbalanced_labels_are_warned_of_with_a_weight(
    weights: dict[str, float], numbers: tuple[int, int], advice: str | None
) -> None:
    training = ObjectiveSpec(objective="kto", kto=KtoSpec(**weights))
    found = training.warn_of_balance(*numbers)
    assert (advice in found) if advice else not found
    assert not ObjectiveSpec(objective="dpo").warn_of_balance(*numbers)


def test_a_plan_round_trips_through_plan_json() -> None:
    original = plan()
    assert parse_plan(plan_to_json(original), "plan.json") == original


def test_a_plan_written_before_auto_existed_can_be_read() -> None:
    old = json.loads(plan_to_json(plan(demo("training.micro_batch_size=2", "training.activation_checkpointing=full"))))
    del old["execution"]
    read = parse_plan(json.dumps(old), "plan.json")
    assert (read.recipe.training.micro_batch_size, read.batch.micro_batch_size) == (2, 2)
    assert read.recipe.training.activation_checkpointing == "full"
    assert read.execution.chosen == ()


def test_a_plan_of_another_version_is_rejected_with_a_fix() -> None:
    with pytest.raises(FtkitError) as caught:
        parse_plan("{}", "somewhere/plan.json")
    assert "somewhere/plan.json" in caught.value.what
    older = json.loads(plan_to_json(plan())) | {"version": 1}
    with pytest.raises(FtkitError, match="version") as caught:
        parse_plan(json.dumps(older), "somewhere/plan.json")
    assert "ftkit that submitted" in caught.value.fix


def test_planned_tokens_and_throughput_leave_out_the_padding_of_the_prepared_packs() -> None:
    recipe = DEMO.model_copy(
        update={"training": DEMO.training.model_copy(update={"max_steps": None, "num_epochs": 2, "compile": "none"})}
    )
    length, batch = recipe.training.sequence_length, recipe.training.global_batch_size
    request = replace(REQUEST, num_packs=3 * batch + 1, num_tokens=(3 * batch + 1) * length * 3 // 4)
    cluster = LOCAL.model_copy(update={"device": "cuda", "gpu": "h200"})
    unknown, known = (plan_run(recipe, cluster, None, each) for each in (REQUEST, request))
    assert (unknown.fill_ratio, unknown.num_tokens) == (None, None)
    assert (known.num_steps, known.num_tokens) == (7, 2 * request.num_tokens)  # the last step has fewer packs
    assert known.fill_ratio == pytest.approx(0.75, rel=1e-3)
    full, real = unknown.speed, known.speed
    assert (real.step_seconds, real.bound) == (full.step_seconds, full.bound)
    for one, two in ((real.tokens_per_second, full.tokens_per_second), (real.mfu, full.mfu)):
        assert one == pytest.approx(known.fill_ratio * two)


def test_the_run_folder_is_named_by_name_time_and_suffix() -> None:
    assert str(plan().layout.root) == "/shared/me/runs/demo-20260102T030405Z-ab12"
    assert plan(request=replace(REQUEST, name="mine")).id.startswith("mine-")


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_micro_batch_times_processes_times_accumulation_is_the_global_batch(
    processes: int, micro: int, accumulation: int
) -> None:
    total = processes * micro * accumulation
    recipe = DEMO.model_copy(
        update={"training": DEMO.training.model_copy(update={"micro_batch_size": micro, "global_batch_size": total})}
    )
    batch = plan(recipe, request=replace(REQUEST, processes_per_node=processes)).batch
    assert batch.accumulation_steps == accumulation


@given(*[st.integers(1, 6)] * 3, st.integers(1, 2), st.integers(1, 3), st.integers(1, 6))
def test_a_plan_on_the_nodes_that_are_left_is_that_of_a_run_on_as_many(
    num_nodes: int, num_left: int, least: int, per_node: int, micro: int, accumulation: int
) -> None:
    slurm = LOCAL.model_copy(update={"scheduler": "slurm"})
    least = min(least, num_nodes)
    batch = f"training.global_batch_size={num_nodes * per_node * micro * accumulation}"
    request = replace(REQUEST, num_nodes=num_nodes, processes_per_node=per_node)
    recipe = demo(batch, f"training.micro_batch_size={micro}", f"resources.min_nodes={least}")
    found = plan(recipe, slurm, request=request).on_nodes(num_left)
    try:
        whole = demo(batch, f"training.micro_batch_size={micro}")
        expected = plan(whole, slurm, request=replace(request, num_nodes=num_left))
    except ConfigError:  # they don't divide the batch
        assert found is None
    else:
        assert (found is not None) == (least <= num_left <= num_nodes)
        assert found is None or (found.placement, found.batch) == (expected.placement, expected.batch)


def test_copies_of_the_model_are_left_out_as_a_whole() -> None:
    recipe = load_recipe("olmo3-7b-full", HERE, ("resources.min_nodes=1", "training.global_batch_size=48",
                                                 "training.micro_batch_size=1"))  # fmt: skip
    whole = plan(recipe, A4, IMAGE, replace(REQUEST, num_nodes=2, image=OLMO3))
    four = replace(whole, placement=replace(whole.placement, num_nodes=4))
    copies = [replace(four, engine=replace(four.engine, num_replicas=num)) for num in (1, 2, 4)]
    left = [[each.on_nodes(num) for num in (1, 2, 3)] for each in copies]
    assert [[each and each.engine.num_replicas for each in counts] for counts in left] == [
        [1, 1, 1], [None, 1, None], [1, 2, 3]
    ]  # fmt: skip


def test_a_metric_that_neither_ftkit_nor_the_task_has_is_reported() -> None:
    found = problems(demo("evaluation.generation.metrics=[verdict]"))
    assert "metric 'verdict'" in found


def test_an_indivisible_batch_is_rejected_with_the_nearest_valid_ones() -> None:
    found = problems(demo("training.global_batch_size=33", "training.micro_batch_size=8"))
    assert "training.global_batch_size" in found
    assert "32 or 48" in found
    assert "32 or 34" in problems(demo("training.global_batch_size=33"))


def test_more_gpus_than_a_node_has_are_rejected() -> None:
    request = replace(REQUEST, gpus_per_node=16, image=ImageFile(Path("/x.sqsh")))
    assert "16 GPUs requested" in problems(cluster=A4, request=request)


def test_a_number_of_gpus_without_gpus_is_answered_with_the_key_for_processes() -> None:
    found = problems(demo("resources.gpus_per_node=2"), request=replace(REQUEST, gpus_per_node=2))
    assert "--gpus-per-node: 'local' trains on CPUs. Use --processes-per-node." in found
    assert "resources.gpus_per_node: 'local' trains on CPUs. Use resources.processes_per_node." in found


def test_a_number_of_processes_on_gpus_is_answered_with_the_key_for_gpus() -> None:
    request = replace(REQUEST, processes_per_node=2, image=ImageFile(Path("/x.sqsh")))
    found = problems(demo("resources.processes_per_node=2"), A4, request=request)
    assert "--processes-per-node: 'a4-highgpu-8g' trains on GPUs, one process each. Use --gpus-per-node." in found
    assert "Use resources.gpus_per_node." in found


def test_a_recipe_sets_the_number_of_processes_without_gpus() -> None:
    assert plan(demo("resources.processes_per_node=4")).placement.processes_per_node == 4


def test_a_local_cluster_has_only_one_node() -> None:
    assert "2 nodes" in problems(request=replace(REQUEST, num_nodes=2))


def test_an_image_without_effect_is_rejected() -> None:
    request = replace(REQUEST, image=OLMO3, image_is_explicit=True)
    assert "runtime 'none'" in problems(request=request)
    assert plan(request=replace(REQUEST, image=OLMO3)).image is None


def test_pyxis_without_an_image_is_rejected() -> None:
    assert "needs an image" in problems(cluster=A4)


def test_an_image_for_another_family_is_rejected() -> None:
    found = problems(cluster=A4, image=IMAGE, request=replace(REQUEST, image=OLMO3))
    assert "not qwen3" in found


SINKS = "tracking.sinks=[tensorboard,wandb,mlflow]"


def test_a_tracker_without_its_package_in_the_image_is_rejected() -> None:
    request = replace(REQUEST, image=OLMO3)
    image = IMAGE.model_copy(update={"families": ("qwen3",), "packages": ("wandb>=0.20",)})
    found = problems(demo(SINKS), A4, image, request)
    assert "package tensorboard" in found
    assert "package mlflow-skinny" in found
    assert "wandb" not in found
    whole = image.model_copy(
        update={"packages": ("WandB[media]==1", "mlflow_skinny ; python_version>'3'"), "provided": {"tensorboard": ""}}
    )
    assert plan(demo(SINKS), A4, whole, request).recipe.tracking.sinks == ("tensorboard", "wandb", "mlflow")


TRAINING_IMAGES = [name for name in list_images(HERE) if load_image(name, HERE).purpose == "training"]


@pytest.mark.parametrize("reference", TRAINING_IMAGES)
def test_every_shipped_training_image_contains_all_trackers(reference: str) -> None:
    image = load_image(reference, HERE).model_copy(update={"families": ("qwen3",)})
    assert plan(demo(SINKS), A4, image, replace(REQUEST, image=NamedImage(reference)))


def test_tracker_packages_are_not_checked_without_an_image() -> None:
    assert plan(demo(SINKS)).recipe.tracking.sinks


def test_an_unmeasured_family_is_planned_with_estimates_in_any_image_with_a_note() -> None:
    recipe = demo("model.architecture.family=starcoder2", "training.global_batch_size=32")
    request = replace(REQUEST, image=OLMO3)
    notes = " ".join(plan(recipe, A4, IMAGE, request).notes)
    assert "'starcoder2' is none of" in notes
    assert "not made for 'starcoder2'" in notes
    listed = IMAGE.model_copy(update={"families": ("olmo3", "starcoder2")})
    assert "not made for" not in " ".join(plan(recipe, A4, listed, request).notes)


def test_projections_missing_from_a_measured_family_are_rejected() -> None:
    asked = ("training.method=lora", "training.lora.targets=[q_proj, qkv_proj]")
    assert "q_proj, k_proj" in problems(demo(*asked))
    assert plan(demo(*asked, "model.architecture.family=phi3")).num_parameters


def test_projections_missing_from_the_counted_model_are_rejected_if_trained() -> None:
    recipe = demo(
        "training.method=lora", "training.lora.targets=[q_proj, gate_proj]", "model.architecture.family=mixtral"
    )
    counts = replace(count_model(recipe.model.architecture), source="model")
    model = plan_model(recipe.model, None, counts)
    found = problems(recipe, request=replace(REQUEST, model=model))
    assert "q_proj, k_proj, v_proj, o_proj" in found
    elsewhere = replace(REQUEST, model=model, image=OLMO3)
    assert plan(recipe, A4, IMAGE, elsewhere).num_parameters == counts.total


def test_adapters_that_experts_cannot_have_are_rejected_by_the_plan_of_a_counted_model() -> None:
    mixtral = ("training.method=lora", "model.architecture.family=mixtral")
    shape = demo(*mixtral).model.architecture
    counts = replace(count_model(shape), source="model")
    for lora, expected in {
        "{targets: [w1, w2]}": "w1 and w3 of the experts are adapted together: w3 is missing",
        "{targets: [w2], use_dora: true}": "down_proj of the experts has no DoRA",
    }.items():
        recipe = demo(*mixtral, f"training.lora={lora}")
        found = problems(recipe, request=replace(REQUEST, model=plan_model(recipe.model, None, counts)))
        assert expected in found


def test_a_load_balancing_loss_is_rejected_for_a_dense_model() -> None:
    asked = "training.router_aux_loss_coef=0.01"
    assert "router_aux_loss_coef: 0.01" in problems(demo(asked))
    assert plan(demo("training.router_aux_loss_coef=0")).num_parameters
    assert plan(demo(asked, "model.architecture.family=mixtral")).num_parameters


def test_the_plan_notes_that_experts_are_not_quantized() -> None:
    odd = "model.architecture.intermediate_size=100"
    for family, settings, expected in [
        ("mixtral", ["training.precision=fp8"], "not linear layers"),
        ("phi3", ["training.precision=fp8"], None),
        ("mixtral", ["training.method=qlora"], None),
        ("mixtral", ["training.method=qlora", odd], "multiples of 8"),
        ("phi3", ["training.method=qlora", odd], None),
        ("jamba", ["training.method=qlora"], "does not know their class"),
    ]:
        always = ("training.precision=bf16", f"model.architecture.family={family}", "training.global_batch_size=32")
        notes = plan(demo(*always, *settings), A4, IMAGE, replace(REQUEST, image=OLMO3)).notes
        found = [note for note in notes if "stay in bf16" in note]
        assert len(found) == (expected is not None)
        assert expected is None or expected in found[0]
    recipe = demo("model.architecture.family=mixtral", "training.method=qlora", "training.global_batch_size=32")
    request = replace(REQUEST, image=OLMO3)
    counted = count_model(plan(recipe, A4, IMAGE, request).recipe.model.architecture)
    counts = replace(counted, source="model", expert_matrices=())
    request = replace(request, model=plan_model(recipe.model, None, counts))
    assert any("a way of its own" in note for note in plan(recipe, A4, IMAGE, request).notes)


@pytest.mark.parametrize(
    ("linears", "num_experts", "expected"),
    [
        (("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "extra"), 0, ALL_PROJECTIONS),
        (("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"), 2, ("q_proj", "o_proj")),
        (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), 0, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ],
)
def test_adapters_target_the_linear_layers_of_the_model(
    linears: tuple[str, ...], num_experts: int, expected: tuple[str, ...]
) -> None:
    recipe = demo("training.method=lora", "model.architecture.family=starcoder2")
    counts = replace(
        count_model(recipe.model.architecture),
        source="model",
        experts_per_token=num_experts,
        linears=tuple(Linear(name, 8, 8, 2) for name in linears),
    )
    model = plan_model(recipe.model, None, counts)
    adapters = plan(recipe, request=replace(REQUEST, model=model)).recipe.training.lora
    assert adapters is not None
    assert adapters.targets == expected
    named = demo("training.method=lora", "training.lora.targets=[o_proj]", "model.architecture.family=starcoder2")
    adapters = plan(named, request=replace(REQUEST, model=model)).recipe.training.lora
    assert adapters is not None
    assert adapters.targets == ("o_proj",)


def test_the_output_projection_of_mamba_layers_gets_no_adapters() -> None:
    mamba = ("training.method=lora", "model.architecture.family=falcon_mamba")
    recipe = demo(*mamba)
    linears = tuple(Linear(name, 8, 8, 2) for name in ("in_proj", "x_proj", "dt_proj", "out_proj"))
    counts = replace(count_model(recipe.model.architecture), source="model", linears=linears)
    request = replace(REQUEST, model=plan_model(recipe.model, None, counts))
    adapters = plan(recipe, request=request).recipe.training.adapters
    assert adapters is not None
    assert adapters.targets == ("in_proj", "x_proj", "dt_proj")
    named = demo(*mamba, "training.lora.targets=[in_proj, out_proj]")
    assert "out_proj of a falcon_mamba" in problems(named, request=request)


def test_a_moe_model_with_unknown_experts_is_planned_for_many_with_a_note() -> None:
    found = plan(demo("model.architecture.family=newmoe"))
    assert "can't be read here" in " ".join(found.notes)
    assert found.num_parameters > 10 * plan().num_parameters


def test_the_shape_of_an_untrained_mixture_says_how_many_experts_it_has() -> None:
    mixture, experts = "model.architecture.family=qwen3_moe", "model.architecture.num_experts={}"
    few, many = (plan(demo(mixture, experts.format(number))) for number in (8, 80))
    assert many.num_parameters > few.num_parameters
    assert "can't be read here" not in " ".join(few.notes)
    with pytest.raises(ConfigError, match="passes through no experts"):
        plan(demo(experts.format(4)))
    with pytest.raises(ConfigError, match="passes through 8 experts"):
        plan(demo(mixture, experts.format(4)))


def test_paths_that_pyxis_cannot_mount_are_rejected() -> None:
    request = replace(REQUEST, image=ImageFile(Path("/x.sqsh")), workspace=Path("/shared/a,b"))
    cluster = A4.model_copy(update={"mounts": ("relative", "/ok:/ok:ro")})
    found = problems(cluster=cluster, request=request)
    assert "comma" in found
    assert "'relative'" in found
    assert "'/ok" not in found


FOLDERS_THAT_CANNOT_BE_MOUNTED = {
    "data.source": {"kind": "files", "train": "/data/a,b/train.jsonl"},
    "model.weights": "/models/a:b",
    "node_local_dir": "/local,disk",
}


@pytest.mark.parametrize("key", FOLDERS_THAT_CANNOT_BE_MOUNTED)
def test_a_folder_that_containers_cannot_mount_is_rejected_with_its_key_file_and_line(key: str, tmp_path: Path) -> None:
    ctx = Context(tmp_path, tmp_path / "user", {})
    value = json.dumps(FOLDERS_THAT_CANNOT_BE_MOUNTED[key])
    recipe, site = tmp_path / "recipes" / "mine.yaml", tmp_path / "clusters" / "mine.yaml"
    for path in (recipe, site):
        path.parent.mkdir()
    site.write_text("extends: a4-highgpu-8g\n", encoding="utf-8")
    recipe.write_text("extends: olmo3-7b-full\n", encoding="utf-8")
    if key == "node_local_dir":
        site.write_text(f"extends: a4-highgpu-8g\n{key}: {value}\n", encoding="utf-8")
    else:
        section, name = key.split(".")
        recipe.write_text(f"extends: olmo3-7b-full\n{section}:\n  {name}: {value}\n", encoding="utf-8")
    read, cluster = read_recipe("mine", ctx), read_cluster("mine", ctx)
    request = replace(
        REQUEST, image=ImageFile(Path("/x.sqsh")), origins=Origins(recipe=read.layers, cluster=cluster.layers)
    )

    found = problems(read.spec, cluster.spec, request=request)

    at = f"{site}:2: node_local_dir" if key == "node_local_dir" else f"{recipe}:3: {key}"
    assert f"{at}{'.train' if key == 'data.source' else ''}: pyxis can't mount" in found


def test_sequences_longer_than_the_models_positions_are_rejected() -> None:
    found = problems(demo("training.sequence_length=4096"))
    assert "512 positions" in found
    assert found.endswith("Use a shorter one, or set model.architecture.max_position_embeddings=4096.")
    plan(demo("training.sequence_length=4096", "model.architecture.max_position_embeddings=4096"))


@pytest.mark.parametrize("original", ["", ", original_max_position_embeddings: 32768"])
def test_the_advised_rope_scaling_gives_enough_positions_for_a_shipped_recipe(original: str) -> None:
    def qwen(*overrides: str) -> RecipeSpec:
        long = ("training.sequence_length=1048576", "training.global_batch_size=2")
        return load_recipe("qwen3-8b-tools-lora", HERE, (*long, *overrides))

    cluster = LOCAL.model_copy(update={"processes_per_node": 1})
    found = problems(qwen(), cluster)
    assert "40960 positions" in found
    advice = "model.architecture.rope_scaling='{rope_type: yarn, factor: 26}'"
    assert advice in found
    plan(qwen(advice.replace("'", "")), cluster)
    short = f"model.architecture.rope_scaling={{rope_type: yarn, factor: 4{original}}}"
    advice = f"model.architecture.rope_scaling.factor={32 if original else 26}"
    assert problems(qwen(short), cluster).endswith(f"Use a shorter one, or set {advice}.")
    positions = plan(qwen(short, advice), cluster).recipe.model.architecture.max_position_embeddings
    assert positions == (1_048_576 if original else 26 * 40960)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.chat_template=model", "a tokenizer that ftkit trains needs a template"),
        ("data.chat_template='{{ messages }}'", "a tokenizer that ftkit trains needs a template"),
        ("data.too_long=split", "a conversation can't be split"),
        ("data={format: sharegpt, train_on: completion}", "format 'messages' has no prompts and completions"),
    ],
)
def test_impossible_data_settings_are_reported_before_the_data_is_read(override: str, message: str) -> None:
    assert message in problems(demo(override))


def test_attention_kernels_without_effect_are_rejected() -> None:
    assert "'flash4' is a kernel" in problems(demo("training.attention=flash4"))
    assert "'flash4' computes only in bf16" in problems(demo("training.attention=flash4", "training.precision=fp32"))
    assert "engine 'zero3'" in problems(demo("training.compile=layers", "training.engine=zero3"))


def test_cost_is_gpus_times_time() -> None:
    recipe = load_recipe("olmo3-7b-full", HERE, ["training.max_steps=100"])
    priced = plan(recipe, A4.model_copy(update={"price_per_gpu_hour": 4.5}), IMAGE, replace(REQUEST, image=OLMO3))
    assert priced.training_seconds is not None
    assert priced.cost_of(priced.training_seconds) == pytest.approx(
        4.5 * priced.placement.world_size * priced.training_seconds / 3600
    )
    assert plan().cost_of(3600) is None


def test_padded_rows_are_planned_slower_by_their_padding_with_the_same_memory() -> None:
    def planned(packing: str, padding: float | None) -> RunPlan:
        batch = ("training.micro_batch_size=1", "training.global_batch_size=512", f"data.packing={packing}")
        recipe = load_recipe("olmo3-7b-full", HERE, batch)
        return plan(recipe, A4, IMAGE, replace(REQUEST, image=OLMO3, padding=padding))

    packed, assumed, counted = planned("auto", 2.5), planned("off", None), planned("off", 2.5)
    assert packed.speed
    assert assumed.speed
    assert counted.speed
    assert assumed.speed.step_seconds / packed.speed.step_seconds == pytest.approx(1.39, abs=0.03)
    assert counted.speed.step_seconds / packed.speed.step_seconds == pytest.approx(2.5, abs=0.05)
    assert counted.batch == packed.batch
    assert counted.memory == packed.memory
    assert any("1.39 times" in note for note in assumed.notes)
    assert any("2.50 times" in note for note in counted.notes)


def test_the_plan_notes_that_documents_may_be_padded() -> None:
    def notes(*overrides: str) -> str:
        return "\n".join(plan(demo(*overrides)).notes)

    assert "padded row" not in notes()
    assert "data.packing is 'off'" in notes("data.packing=off")
    assert "'kimi_linear' keeps packed" in notes("model.architecture.family=kimi_linear")


def test_the_plan_predicts_linear_attention_by_what_computes_it() -> None:
    words = (
        "training.method=lora", "training.learning_rate=1e-4", "training.sequence_length=8192",
        "training.micro_batch_size=1", "training.activation_checkpointing=full",
    )  # fmt: skip
    hybrid = load_recipe("qwen3.5-9b-tools-full", HERE, words)
    model = plan_model(hybrid.model, shipped_config("Qwen/Qwen3.5-9B"))
    request = replace(REQUEST, image=OLMO3, model=model)

    def linear(image: ImageSpec, gpu: str = "b200") -> tuple[RunPlan, str, str]:
        """Return the plan, its note on linear attention, and its predictions as in the note."""
        made = plan(hybrid, A4.model_copy(update={"gpu": gpu}), image, request)
        (note,) = [note for note in made.notes if "linear attention" in note]
        assert made.speed is not None
        predicted = f"about {made.speed.tokens_per_second / 8:,.0f} tokens/s per GPU and {made.memory.total:.1f} GiB"
        return made, note, predicted

    with_kernel = IMAGE.model_copy(update={"packages": ("flash-linear-attention==0.6.0",)})
    _, note, fast = linear(with_kernel)
    made, other, slow = linear(IMAGE)
    assert fast != slow
    assert note.startswith("the plan assumes a kernel for the linear attention of 'qwen3_5_text'")
    assert note.endswith(f": {fast}; where none runs, PyTorch computes it: {slow}")
    assert other.startswith("olmo3:25.02 does not list flash-linear-attention")
    assert other.endswith(f": {slow}; with a kernel that runs on the GPU: {fast}")
    assert linear(with_kernel, "h200")[1].endswith("0.6.0 needs Triton 3.7.1 or newer, or tilelang")
    assert not parse_plan(plan_to_json(made), "plan.json").setup.has_linear_kernel
    dense = demo("training.global_batch_size=32", "model.architecture.family=olmo3")
    on_cpus = demo("model.architecture.family=qwen3_5_text")
    for without in (plan(dense, A4, IMAGE, replace(REQUEST, image=OLMO3)), plan(on_cpus)):
        assert not [note for note in without.notes if "linear attention" in note]


def test_the_plan_says_where_weights_are_gathered_in_fp8() -> None:
    words = (
        "training.precision=fp8", "training.global_batch_size=32", "model.architecture.family=olmo3"
    )  # fmt: skip
    one, old, new = (
        plan(
            demo(*words),
            A4,
            IMAGE.model_copy(update={"provided": {"torch": version}}),
            replace(REQUEST, image=OLMO3, gpus_per_node=gpus),
        )
        for version, gpus in (("2.7.0a0", 1), ("2.7.0a0", 4), ("2.12.0a0", 4))
    )
    assert ["all-gathered in FP8" in each.engine.reason for each in (one, old, new)] == [False, True, True]
    assert [any("bf16 with torch 2.7" in note for note in each.notes) for each in (one, old, new)] == [
        False, True, False
    ]  # fmt: skip


def test_fp8_without_effect_is_rejected() -> None:
    a100 = A4.model_copy(update={"gpu": "a100-80gb"})
    on_a100 = problems(load_recipe("olmo3-7b-full", HERE, ["training.precision=fp8"]), a100)
    assert "training.precision: NVIDIA A100-SXM4-80GB" in on_a100
    for settings, message in (
        (("training.precision=fp8", "training.method=lora"), "set base_precision to 'fp8' instead"),
        (("training.base_precision=fp8",), "base_precision is for method 'lora'"),
        (("training.precision=fp32", "training.method=lora", "training.base_precision=fp8"), "precision 'fp32'"),
    ):
        with pytest.raises(ConfigError, match=message):
            demo(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ("training.precision=fp8",),
        ("training.method=lora", "training.precision=bf16", "training.base_precision=fp8"),
    ],
)
def test_fp8_on_a_model_without_a_matrix_for_it_is_rejected(settings: tuple[str, ...]) -> None:
    shape = {"hidden_size": FP8_MULTIPLE, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    words = [f"model.architecture.{key}={value}" for key, value in shape.items()]
    found = problems(demo(*settings, *words, "model.architecture.head_dim=8"))
    assert f"are multiples of {FP8_MULTIPLE}, as FP8 needs" in found
    plan(demo(*settings, *words, f"model.architecture.head_dim={FP8_MULTIPLE}"))


def test_a_setting_of_the_all_gather_without_fp8_is_rejected() -> None:
    found = problems(demo("training.precision=bf16", "training.fp8_all_gather=false"))
    assert "training.fp8_all_gather: " in found
    plan(demo("training.precision=fp8", "training.fp8_all_gather=false"))


def test_activation_offload_without_gpus_or_full_checkpointing_is_rejected() -> None:
    full = "training.activation_checkpointing=full"
    assert "no effect without GPUs" in problems(demo(full, "training.activation_offload=true"))
    with pytest.raises(ConfigError, match="activation_checkpointing 'none'"):
        demo("training.activation_checkpointing=none", "training.activation_offload=true")
    with pytest.raises(ConfigError, match="needs compiled layers"):
        demo("training.activation_checkpointing=selective", "training.activation_offload=true", "training.compile=none")


def test_a_number_of_checkpointed_layers_belongs_to_a_mode_and_to_existing_layers() -> None:
    full, number = "training.activation_checkpointing=full", "training.checkpointed_layers="
    assert plan(demo(full, number + "1")).recipe.training.checkpointing_label(2, "zero3") == "'full' in 1 of 2 layers"
    assert "2 decoder layers" in problems(demo(full, number + "3"))
    for mode in ("auto", "none"):
        with pytest.raises(ConfigError, match="of layers with"):
            demo(f"training.activation_checkpointing={mode}", number + "2")


def test_a_number_of_offloaded_layers_belongs_to_offload_and_to_existing_layers() -> None:
    offloaded = "training.activation_checkpointing=selective", "training.activation_offload=true"
    training = TrainingPlan.extend(
        demo(*offloaded, "training.offloaded_layers=1").training,
        micro_batch_size=1,
        activation_checkpointing="selective",
    )
    assert training.checkpointing_label(2, "fsdp2") == "'selective', 1 layer offloaded"
    part = training.model_copy(update={"activation_checkpointing": "full", "checkpointed_layers": 2})
    assert (
        part.checkpointing_label(6, "fsdp2")
        == "'full' in 2 of 6 layers, 'selective' in 4 of 6 layers, 3 layers offloaded"
    )
    assert "2 decoder layers" in problems(demo(*offloaded, "training.offloaded_layers=3"))
    with pytest.raises(ConfigError, match="no effect without activation_offload"):
        demo("training.offloaded_layers=1")


def test_settings_unsupported_by_zero3_are_rejected_and_auto_selects_fsdp2() -> None:
    selective = "training.activation_checkpointing=selective"
    assert "'selective' is not supported" in problems(demo(selective, "training.engine=zero3"))
    assert "'adamw8bit' is not supported" in problems(demo("training.optimizer=adamw8bit", "training.engine=zero3"))
    assert "'never' is" in problems(demo("training.reshard_after_forward=never", "training.engine=zero3"))
    with pytest.raises(ConfigError, match="offload 'optimizer'"):
        demo("training.optimizer=adamw8bit", "training.offload=optimizer")
    chosen = plan(demo(selective)).engine
    assert (chosen.name, "activation_checkpointing" in chosen.reason) == ("fsdp2", True)


def on_gpus(num: int) -> ClusterProfile:
    return A4.model_copy(update={"gpus_per_node": num, "scheduler": "local", "runtime": "none"})


def test_context_parallel_degree_must_divide_the_heads_within_a_node() -> None:
    divided = plan(demo(SDPA, "training.context_parallel=2", "training.micro_batch_size=1"), on_gpus(4))
    assert divided.batch.accumulation_steps * 2 == divided.batch.global_batch_size
    whole = plan(demo("training.micro_batch_size=1"), on_gpus(4))
    assert divided.memory.activations < 0.7 * whole.memory.activations
    assert "groups of 8" in problems(demo(SDPA, "training.context_parallel=8"), on_gpus(4))
    assert "among 5" in problems(demo(SDPA, "training.context_parallel=5", "training.sequence_length=510"), on_gpus(5))
    assert "data.packing is 'off'" in problems(
        demo(SDPA, "training.context_parallel=2", "data.packing=off"), on_gpus(2)
    )
    with pytest.raises(ConfigError, match="context_parallel 2"):
        demo(SDPA, "training.context_parallel=2", "training.sequence_length=511")
    assert plan(demo(SDPA, "training.context_parallel=2"), on_gpus(2)).engine.name == "fsdp2"
    assert "context_parallel" in problems(
        demo(SDPA, "training.context_parallel=2", "training.engine=zero3"), on_gpus(2)
    )


def test_layers_are_divided_among_gpus_of_a_node_that_divide_heads_and_feed_forward_layers() -> None:
    one, alone = "training.micro_batch_size=1", "evaluation.generation=null"
    divided = plan(demo("training.tensor_parallel=2", SDPA, one, alone), on_gpus(4))
    assert divided.batch.accumulation_steps * 2 == divided.batch.global_batch_size
    assert (divided.engine.name, "among 2 GPUs" in divided.engine.reason) == ("fsdp2", True)
    whole = plan(demo(SDPA, one, alone), on_gpus(4))
    assert divided.memory.activations < whole.memory.activations
    assert divided.memory.parameters == whole.memory.parameters
    in_parts = ("training.tensor_parallel=2", "training.context_parallel=2", SDPA, one, alone)
    both = plan(demo(*in_parts, "model.architecture={num_attention_heads: 8, num_key_value_heads: 2}"), on_gpus(4))
    assert both.batch.accumulation_steps == both.batch.global_batch_size
    assert both.memory.activations < divided.memory.activations
    six_heads = "model.architecture={num_attention_heads: 6, num_key_value_heads: 6}"
    assert "among 4" in problems(demo(*in_parts, six_heads), on_gpus(4))
    for words, problem in {
        ("training.tensor_parallel=2", "training.context_parallel=4", alone): "4 GPUs of a node can't be divided into "
        "groups of 8",
        ("training.tensor_parallel=8", alone): "groups of 8",
        ("training.tensor_parallel=4", "model.architecture.num_key_value_heads=2", alone): "2 key-value heads can't be",
        ("training.tensor_parallel=2", alone, "data.packing=off"): "data.packing is 'off'",
        ("training.tensor_parallel=2", alone, "training.engine=zero3"): "not supported by engine 'zero3'",
        ("training.tensor_parallel=2",): "can't generate completions for the evaluation",
        (
            "training.tensor_parallel=2",
            alone,
            "model.architecture.family=qwen2",
        ): "layers of a 'qwen2' can't be divided",
    }.items():
        assert problem in problems(demo(*words), on_gpus(4))
    for other in ("method=qlora", "offload=optimizer", "shard_degree=2"):
        with pytest.raises(ConfigError, match=f"tensor_parallel does not support {other.partition('=')[0]}"):
            demo("training.tensor_parallel=2", f"training.{other}")
    in_fp8 = ("training.method=lora", "training.precision=bf16", "training.base_precision=fp8")
    with pytest.raises(ConfigError, match=r"base_precision 'fp8'"):
        demo("training.tensor_parallel=2", *in_fp8)
    with pytest.raises(ConfigError, match="tensor_parallel 2"):
        demo("training.tensor_parallel=2", "training.sequence_length=511")


def test_divided_layers_take_less_memory_and_exchange_tokens_in_proportion_to_their_gpus() -> None:
    words = ("model.architecture=llama3-8b", "training.sequence_length=8192", "evaluation.generation=null", SDPA)
    setups = [
        plan(
            demo(
                *words,
                f"training.tensor_parallel={size}",
                "training.micro_batch_size=1",
                "training.global_batch_size=8",
            ),
            on_gpus(8),
        )
        for size in (1, 2, 8)
    ]
    communication, activations = (
        [getattr(each.memory, part) for each in setups] for part in ("communication", "activations")
    )
    assert communication == sorted(communication, reverse=True)
    assert activations == sorted(activations, reverse=True)
    seconds = [each.speed.step_seconds for each in setups if each.speed is not None]
    assert len(seconds) == 3
    assert seconds == sorted(seconds)


def test_copy_engines_need_several_gpus_of_one_node() -> None:
    recipe = demo("training.collectives=copy_engine")
    assert "1 x 2 processes" in problems(recipe)
    assert "'copy_engine' is not supported" in problems(
        demo("training.collectives=copy_engine", "training.engine=zero3")
    )
    with pytest.raises(ConfigError, match="offload 'all'"):
        demo("training.collectives=copy_engine", "training.offload=all")


def test_evaluations_without_validation_data_are_rejected() -> None:
    found = problems(demo("data.source.num_heldout=0", "evaluation.every_steps=5"))
    assert found.count("no validation split") == 2


def test_the_best_checkpoint_needs_a_metric_measured_during_training() -> None:
    every = "evaluation.every_steps=5"
    assert "loss, perplexity," in problems(demo(every, "evaluation.best.metric=accuracy"))
    assert "'sql' is not measured" in problems(demo(every, "evaluation.best.metric=sql"))
    mixed = (every, "data.source=[a.jsonl, b.jsonl]", "data.format=messages", "evaluation.best.metric=loss/a.jsonl")
    plan(demo(*mixed, "data.validation.count=5", "evaluation.generation=null"))
    found = problems(demo(*mixed, "data.validation.file=c.jsonl", "evaluation.generation=null"))
    assert "'loss/a.jsonl' is not measured" in found
    plan(demo(every, "evaluation.best.metric=sql", "evaluation.generation.num_rows_during=5"))
    plan(demo(every, "evaluation.early_stopping_patience=3"))
    with pytest.raises(ConfigError, match="set every_steps"):
        demo("evaluation.best.metric=loss")
    with pytest.raises(ConfigError, match="no effect without early_stopping_patience"):
        demo(every, "evaluation.early_stopping_threshold=0.1")


def test_an_impossible_profile_is_rejected() -> None:
    found = problems(demo("profile.enabled=true", "profile.ranks=[0,2,3]", "training.max_steps=27"))
    assert "profile.ranks: there is no rank 2, 3" in found
    assert "28 steps" in found
    plan(demo("profile.enabled=true", "training.max_steps=28"))
    plan(demo("profile.ranks=[9]"))


def test_all_problems_are_reported_together() -> None:
    request = replace(REQUEST, num_nodes=3, image=NamedImage("x:1"), image_is_explicit=True)
    assert (
        len(
            problems(
                demo("training.sequence_length=4096", "training.global_batch_size=7"), request=request
            ).splitlines()
        )
        == 4
    )


def test_an_imported_image_is_given_by_its_absolute_path() -> None:
    olmo = demo("model.architecture=olmo3-7b", "training.micro_batch_size=1", "training.global_batch_size=8")
    with_image = plan(olmo, A4, IMAGE, replace(REQUEST, image=OLMO3))
    assert with_image.container_image == "/shared/me/images/olmo3+25.02.sqsh"
    by_uri = plan(olmo, A4, None, replace(REQUEST, image=parse_reference("docker://host#path:tag")))
    assert by_uri.container_image == "docker://host#path:tag"


def test_the_engine_choice_has_a_reason() -> None:
    assert "2 processes" in plan().engine.reason
    assert "one process" in plan(request=replace(REQUEST, processes_per_node=1)).engine.reason


def test_a_plan_that_exceeds_gpu_memory_warns() -> None:
    llama = load_recipe("llama3.3-70b-full", HERE)
    request = replace(REQUEST, image=ImageFile(Path("/x.sqsh")), num_nodes=1)
    small = load_cluster("a3-megagpu-8g", HERE)
    note, *suggestions = plan(llama, small, None, request).notes
    assert "79.6 GiB" in note
    assert suggestions
    assert all(suggestion.startswith("predicted to fit: ") for suggestion in suggestions)


def test_steps_follow_from_epochs_once_the_packs_are_known() -> None:
    training = demo("training.max_steps=null", "training.num_epochs=3", "training.global_batch_size=16").training
    assert count_steps(training, None) is None
    assert count_steps(training, 100) == 19
    assert count_steps(DEMO.training, None) == DEMO.training.max_steps


@pytest.mark.parametrize(("epochs", "packs", "steps"), [(0.5, 100, 4), (2.25, 64, 9), (0.1, 480, 3), (1e-9, 5, 1)])
def test_the_last_pass_over_the_data_may_be_a_part(epochs: float, packs: int, steps: int) -> None:
    settings = ("training.max_steps=null", f"training.num_epochs={epochs}", "training.global_batch_size=16")
    training = demo(*settings).training
    assert count_steps(training, packs) == steps


def test_a_whole_number_of_epochs_stays_one() -> None:
    assert repr(demo("training.max_steps=null", "training.num_epochs=2.0").training.num_epochs) == "2"


def test_data_that_fills_fewer_packs_than_a_step_gets_a_note() -> None:
    recipe = demo("training.global_batch_size=16")
    for num_packs, is_noted in ((3, True), (16, False), (None, False)):
        notes = plan_run(recipe, LOCAL, None, replace(REQUEST, num_packs=num_packs)).notes
        assert any("fills 3 packs" in note for note in notes) == is_noted
    for epochs, repeats in ((1, False), (2, True)):
        once = demo("training.global_batch_size=16", "training.max_steps=null", f"training.num_epochs={epochs}")
        notes = plan_run(once, LOCAL, None, replace(REQUEST, num_packs=3)).notes
        assert any("repeats documents" in note for note in notes) == repeats


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (("resources.time_limit=1:00:00",), ["resources.time_limit has no effect"]),
        (("training.min_learning_rate_ratio=0.1", "training.schedule=constant"), ["min_learning_rate_ratio has no"]),
        (("training.min_learning_rate_ratio=0.1",), []),
        (("training.keep_every_steps=6", "training.checkpoint_every_steps=4"), ["only 12, 24"]),
        (("training.keep_every_steps=8", "training.checkpoint_every_steps=4"), []),
        (
            ("training.max_steps=40", "evaluation.every_steps=10", "evaluation.early_stopping_patience=3"),
            ["takes 4 eval"],
        ),
        (("training.max_steps=41", "evaluation.every_steps=10", "evaluation.early_stopping_patience=3"), []),
    ],
)
def test_keys_that_change_nothing_are_noted(overrides: tuple[str, ...], noted: list[str]) -> None:
    notes = [each for each in plan_run(demo(*overrides), LOCAL, None, REQUEST).notes
             if any(part in each for part in ("no effect", "no multiple", "can't end"))]  # fmt: skip
    assert len(notes) == len(noted)
    assert all(part in note for part, note in zip(noted, notes, strict=True))


def test_the_fingerprint_changes_only_with_inputs_of_the_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    same = print_of(demo("training.learning_rate=1", "training.global_batch_size=64"), "")
    assert same == print_of(DEMO, "")
    for other in ("training.sequence_length=256", "data.source.seed=9", "data.train_on=all"):
        assert print_of(demo(other), "") != same
    assert print_of(DEMO, "files changed") != same
    assert print_of(demo("model.architecture.vocab_size=5000"), "") != same
    monkeypatch.setattr("ftkit.planning.planner.PREPARATION_VERSION", PREPARATION_VERSION + 1)
    assert print_of(DEMO, "") != same


def test_added_tokens_change_the_data_and_need_a_trained_embedding() -> None:
    recipe = demo("model.added_tokens=['<|tool|>']")
    assert print_of(recipe, "") != print_of(DEMO, "")
    assert print_of(demo("model.added_tokens=[]"), "") == print_of(DEMO, "")
    model = plan_model(recipe.model, None)
    new = model.model_copy(update={"new_tokens": ("<|tool|>",), "vocab_size_of_weights": 10})
    notes = plan(recipe, request=replace(REQUEST, model=new)).notes
    assert any("from 10 to" in note for note in notes)
    lora = demo("model.added_tokens=['<|tool|>']", "training.method=lora")
    for refused in (new, new.model_copy(update={"vocab_size_of_weights": None})):
        found = problems(lora, request=replace(REQUEST, model=refused))
        assert "model.added_tokens: <|tool|>: method 'lora'" in found
    plan(lora, request=replace(REQUEST, model=model))  # the tokenizer has the token already
    for wrong in ("['<|a|>', '<|a|>']", "['']", "['two words']"):
        with pytest.raises(ConfigError, match="added_tokens"):
            demo(f"model.added_tokens={wrong}")


def test_a_run_in_a_moved_workspace_uses_the_data_that_is_there_now(make_run: RunMaker) -> None:
    run = make_run()
    submitted = read_plan(run.layout)
    data = DataLayout(submitted.data.root)
    data.manifest.parent.mkdir(parents=True)
    data.manifest.write_text("{}")
    moved = Workspace(submitted.workspace.rename(submitted.workspace.with_name("moved")))
    layout = RunLayout(moved.runs / submitted.id)
    assert read_plan(layout).workspace == submitted.workspace
    assert read_plan_to_use(layout).data.root == moved.data / submitted.fingerprint


def test_a_task_is_part_of_the_datas_identity_by_its_text_and_not_its_place(tmp_path: Path) -> None:
    text = (assets.EXAMPLES / "tasks/sql.py").read_text()
    for name, added in (("same", ""), ("other", "# changed\n")):
        (tmp_path / f"{name}.py").write_text(text + added)
    same, other = (plan(demo(f"data.task={tmp_path}/{name}.py")).fingerprint for name in ("same", "other"))
    assert same == plan(DEMO).fingerprint != other
