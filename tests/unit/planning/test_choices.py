from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.config.context import Context, list_names
from ftkit.config.image_reference import NamedImage
from ftkit.config.load import load_cluster, load_image, load_recipe, shipped_config
from ftkit.config.recipe import RecipePlan
from ftkit.config.request import RunRequest
from ftkit.errors import ConfigError
from ftkit.models.vision import VisionPlan
from ftkit.planning.choices import (
    MODES,
    ROOM,
    choose_execution,
    fits_host,
    least_memory,
    with_sharding,
)
from ftkit.planning.fit import Fit
from ftkit.planning.planner import plan_model, plan_run
from ftkit.planning.step_time import predict_step_time
from ftkit.planning.suggestions import NUM_SUGGESTIONS, suggest_changes, suggest_faster
from ftkit.planning.training_setup import GPUS, Setup

if TYPE_CHECKING:
    from ftkit.config.cluster import ClusterProfile, GpuModel
    from ftkit.config.recipe import RecipeSpec
    from ftkit.config.training import EngineName, TrainingPlan
    from ftkit.planning.choices import ExecutionPlan
    from ftkit.planning.suggestions import Suggestion
    from ftkit.planning.training_setup import Gpu

NOWHERE = Context(Path("/nowhere/project"), Path("/nowhere/user"), {})
CLUSTER = load_cluster("slurm", NOWHERE)


def planned(spec: RecipeSpec) -> RecipePlan:
    """Resolve open settings to a micro-batch of one pack with full activation checkpointing."""
    return RecipePlan.extend(spec, model=plan_model(spec.model, None), training=least_memory(spec.training))


def recipe(*overrides: str) -> RecipePlan:
    return planned(load_recipe("olmo3-7b-full", NOWHERE, overrides))


BATCHES = (
    "training.activation_checkpointing=none", "training.micro_batch_size=4", "training.global_batch_size=128",
    "training.sequence_length=8192",
)  # fmt: skip


def total(spec: RecipePlan, num_shards: int) -> float:
    return Fit(Setup(spec.model.architecture, spec.training, num_shards)).memory.total


def setup(spec: RecipePlan, engine: EngineName = "fsdp2") -> Setup:
    return Setup(spec.model.architecture, spec.training, 16, engine, num_nodes=2)


def propose(spec: RecipePlan, capacity: float, cluster: ClusterProfile = CLUSTER) -> list[Suggestion]:
    return suggest_changes(setup(spec), cluster, capacity)


def taken(suggestion: Suggestion) -> tuple[RecipePlan, int]:
    """Return the recipe and the number of nodes after applying a suggestion."""
    words = suggestion.override.split()
    num_nodes = int(words[words.index("--nodes") + 1]) if "--nodes" in words else 2
    return recipe(*BATCHES, *(word for word in words if "=" in word)), num_nodes


@settings(max_examples=25)
@given(st.floats(0.1, 400))
def test_suggestions_are_valid_options_and_predicted_to_fit(capacity: float) -> None:
    suggestions = propose(recipe(*BATCHES), capacity)
    assert len(suggestions) <= NUM_SUGGESTIONS
    for suggestion in suggestions:
        spec, num_nodes = taken(suggestion)
        assert total(spec, 8 * num_nodes) == suggestion.total_gib <= capacity
        assert spec.training.global_batch_size % (spec.training.micro_batch_size * 8 * num_nodes) == 0
    assert len({suggestion.override for suggestion in suggestions}) == len(suggestions)


@settings(max_examples=25)
@given(st.floats(1, 200))
def test_every_part_of_a_suggestion_is_needed(capacity: float) -> None:
    spec = recipe(*BATCHES)
    if total(spec, 16) <= capacity:
        return
    for suggestion in propose(spec, capacity):
        words = suggestion.override.replace("--nodes ", "--nodes=").split()
        for left_out in words:
            if "checkpoint" in left_out and any("_layers=" in word or "offload=true" in word for word in words):
                continue  # one change with several options
            rest = recipe(*BATCHES, *(word for word in words if word != left_out and not word.startswith("--")))
            shards = 32 if any(word.startswith("--") and word != left_out for word in words) else 16
            assert total(rest, shards) > capacity


def test_the_cheapest_suggestion_comes_first() -> None:
    spec = recipe(*BATCHES)
    room = total(recipe(*BATCHES, "training.activation_checkpointing=selective"), 16)
    suggestions = propose(spec, room)
    assert [suggestion.override for suggestion in suggestions] == [
        "training.activation_checkpointing=selective",
        "training.micro_batch_size=2",
        "training.sequence_length=4096",
    ]
    assert str(suggestions[0]) == f"training.activation_checkpointing=selective (at least {room:.1f} GiB)"


def test_activation_offload_is_suggested_if_full_checkpointing_is_not_enough() -> None:
    spec = recipe(*BATCHES, "training.activation_checkpointing=full")
    room = total(recipe(*BATCHES, "training.activation_checkpointing=full", "training.activation_offload=true"), 16)
    assert propose(spec, room)[0].override == "training.activation_offload=true"
    assert propose(recipe(*BATCHES), room)[0].override == (
        "training.activation_checkpointing=full training.activation_offload=true"
    )


def test_zero3_supports_only_full_activation_checkpointing() -> None:
    suggestions = suggest_changes(setup(recipe(*BATCHES), "zero3"), CLUSTER, 70)
    assert suggestions[0].override.startswith("training.activation_checkpointing=full")


SMALL = ("training.activation_checkpointing=full", "training.micro_batch_size=1")


def test_8_bit_states_are_suggested_before_offload() -> None:
    rounded = total(recipe(*SMALL, "training.optimizer=adamw8bit"), 16)
    assert propose(recipe(*SMALL), rounded)[0].override == "training.optimizer=adamw8bit"
    offloaded = total(recipe(*SMALL, "training.offload=optimizer"), 16)
    assert offloaded < rounded
    assert propose(recipe(*SMALL), offloaded)[0].override == "training.offload=optimizer"
    rounding = recipe(*SMALL, "training.optimizer=adamw8bit")
    words = "training.optimizer=adamw training.offload=optimizer"
    assert words in [suggestion.override for suggestion in propose(rounding, offloaded)]


@pytest.mark.parametrize(
    ("changes", "engine"),
    [((), "zero3"), (("training.method=lora",), "fsdp2"), (("training.offload=optimizer",), "fsdp2")],
    ids=["zero3", "adapters", "offloaded already"],
)
def test_8_bit_states_are_not_suggested_if_unsupported_or_useless(changes: tuple[str, ...], engine: EngineName) -> None:
    for capacity in range(4, 100, 8):
        for suggestion in suggest_changes(setup(recipe(*BATCHES, *changes), engine), CLUSTER, capacity):
            assert "adamw8bit" not in suggestion.override


def test_changes_are_combined_if_none_is_sufficient() -> None:
    suggestions = propose(recipe(*BATCHES), 15)
    assert suggestions
    assert all(len(suggestion.override.split()) > 1 for suggestion in suggestions)


def test_nothing_is_suggested_if_nothing_helps() -> None:
    assert propose(recipe(*BATCHES), 0.1) == []


@pytest.mark.parametrize(
    "changes", [{"scheduler": "local"}, {"max_nodes": 3}, {"device": "cpu"}], ids=["one machine", "few nodes", "no GPU"]
)
def test_changes_that_the_cluster_lacks_are_not_suggested(changes: dict[str, object]) -> None:
    cluster = CLUSTER.model_copy(update=changes)
    absent = "offload" if "device" in changes else "--nodes"
    for capacity in range(4, 100, 8):
        assert not any(absent in suggestion.override for suggestion in propose(recipe(*BATCHES), capacity, cluster))


def test_more_nodes_are_not_suggested_for_a_small_batch() -> None:
    spec = recipe(*BATCHES, "training.global_batch_size=64")
    for capacity in range(4, 100, 8):
        assert not any("--nodes" in suggestion.override for suggestion in propose(spec, capacity))


def test_the_largest_micro_batch_that_fits_is_suggested() -> None:
    small = planned(
        load_recipe(
            "gemma3-1b-dolly-lora", NOWHERE, ["training.activation_checkpointing=none", "training.cuda_graphs=false"]
        )
    )
    suggestion = suggest_faster(small.training, replace(setup(small), num_shards=1, num_nodes=1), GPUS["h100-80gb"])
    assert suggestion is not None
    assert suggestion.override.startswith("training.micro_batch_size=")
    assert suggestion.speedup > 1.1
    assert suggestion.total_gib <= GPUS["h100-80gb"].usable_gib


@pytest.mark.parametrize(
    "overrides",
    [("model.architecture=llama3-8b", "training.sequence_length=8192", "training.activation_offload=true"),
     ("training.micro_batch_size=1", "training.method=lora", "training.sequence_length=512"),
     ("training.activation_checkpointing=full",)],
)  # fmt: skip
def test_what_is_suggested_to_be_faster_is_as_fast_when_it_is_typed(overrides: tuple[str, ...]) -> None:
    """An `auto` value that the suggestion did not name would be chosen again."""
    here = {"scheduler": "local", "runtime": "none", "device": "cuda"}
    cluster = CLUSTER.model_copy(update={"gpu": "b200", "gpus_per_node": 1, **here})
    request = RunRequest(
        None, None, None, None, False, Path("/shared/me"), "python", datetime(2026, 1, 2, tzinfo=UTC), "ab12"
    )
    words = ("training.global_batch_size=64", *overrides)
    before = plan_run(load_recipe("olmo3-7b-full", NOWHERE, words), cluster, None, request)
    notes = [note for note in before.notes if "to be faster" in note]
    assert notes
    for note in notes:
        typed, _, predicted = note.partition(": ")[2].partition(" (")
        after = plan_run(load_recipe("olmo3-7b-full", NOWHERE, (*words, *typed.split())), cluster, None, request)
        assert before.speed
        assert after.speed
        speedup = before.speed.step_seconds / after.speed.step_seconds
        assert speedup == pytest.approx(float(predicted.split()[0]), abs=0.05)


def test_only_settings_that_a_recipe_may_have_are_suggested() -> None:
    in_fp8 = ("training.method=lora", "training.base_precision=fp8")
    for words in (("training.precision=fp8",), ("training.sync_gradients=last_micro_batch",), in_fp8):
        spec = recipe(*BATCHES, *words)
        for room in range(4, 120, 8):
            for suggestion in propose(spec, room):
                changes = [word for word in suggestion.override.split() if "=" in word]
                recipe(*BATCHES, *words, *changes)
    full = setup(recipe(*BATCHES))
    assert not any("method" in str(each) for each in suggest_changes(full, CLUSTER, 12, {"method"}.isdisjoint))


def test_disabling_unneeded_activation_checkpointing_is_suggested() -> None:
    checkpointed = recipe("training.global_batch_size=16")
    suggestion = suggest_faster(checkpointed.training, setup(checkpointed), GPUS["h200"])
    assert suggestion is not None
    assert "training.activation_checkpointing=none" in suggestion.override


LONG = "training.sequence_length=65536"


def notes_on(
    *overrides: str,
    cluster: str = "a3-megagpu-8g",
    image: str = "olmo3:26.05",
    gpu: str = "",
    vision: VisionPlan | None = None,
) -> list[str]:
    spec = load_recipe("olmo3-32b-malware-full", NOWHERE, (LONG, *overrides))
    created, named = datetime(2026, 1, 1, tzinfo=UTC), NamedImage(image)
    request = RunRequest(None, None, None, named, True, Path("/w"), "python", created, "a")
    model = plan_model(spec.model, shipped_config(spec.model.weights))
    site, defined = load_cluster(cluster, NOWHERE), load_image(named.reference, NOWHERE)
    site = site.model_copy(update={"gpu": gpu or site.gpu})
    model = model.model_copy(update={"vision": vision})
    return list(plan_run(spec, site, defined, replace(request, model=model)).notes)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (("training.learning_rate=1e-2",), ["training.learning_rate"]),
        (("training.learning_rate=1e-3", "training.method=lora"), []),
        (("training.learning_rate=5", "training.method=lora"), ["training.learning_rate"]),
        (("training.method=lora", "training.lora={rank: 9000}"), ["training.lora.rank"]),
        (("training.num_epochs=1000", "training.max_steps=null"), ["training.num_epochs"]),
        (("training.num_epochs=3", "training.max_steps=null"), []),
        (("training.learning_rate=1e-2", "model.weights=random", "model.tokenizer.source=org/tokens"), []),
    ],
)
def test_settings_far_from_usual_ones_are_noted(overrides: tuple[str, ...], keys: list[str]) -> None:
    noted = [note.split("=")[0] for note in notes_on(*overrides) if " usual " in note and "=" in note.split()[0]]
    assert noted == keys


def test_a_time_limit_is_not_noted_where_slurm_enforces_it() -> None:
    assert not any("resources.time_limit" in note for note in notes_on("resources.time_limit=1:00:00"))


def test_dividing_packs_is_suggested_and_the_plan_with_it_fits() -> None:
    (override,) = [note.split()[3] for note in notes_on() if "context_parallel=" in note]
    assert not any("out-of-memory" in note for note in notes_on(override))
    assert not any("out-of-memory" in note for note in notes_on("training.context_parallel=8"))
    with_pictures = [note for note in notes_on("data.pictures=true", vision=VisionPlan("olmo3")) if "to fit" in note]
    assert with_pictures
    assert not any("context_parallel=" in note for note in with_pictures)


@pytest.mark.parametrize(
    "changes",
    [
        {"overrides": ("data.packing=off",)}, {"overrides": ("training.attention=flex",)},
        {"overrides": ("training.engine=zero3",)},
        {"cluster": "a4-highgpu-8g"},
    ],
    ids=["padded rows", "a kernel that can't", "an engine that can't", "it fits already"],
)  # fmt: skip
def test_dividing_packs_is_suggested_only_where_the_trainer_can(changes: dict[str, Any]) -> None:
    assert not any("context_parallel" in note for note in notes_on(*changes.pop("overrides", ()), **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"image": "olmo3:25.02", "overrides": ("training.attention=flash4",)}, "olmo3:25.02 does not list"),
     ({"gpu": "a100-80gb"}, "can't use on NVIDIA A100"),
     ({"overrides": ("training.precision=fp32",)}, "can't use on NVIDIA H100")],
)  # fmt: skip
def test_a_plan_refuses_to_divide_packs_without_a_kernel_that_can(changes: dict[str, Any], reason: str) -> None:
    words = ("training.context_parallel=8", *changes.pop("overrides", ()))
    with pytest.raises(ConfigError, match=f"needs flash-attn-4.*, which .*{reason.removeprefix('which ')}"):
        notes_on(*words, **changes)
    notes_on(*words, "training.attention=sdpa", **changes)


def test_suggested_groups_divide_the_heads_and_the_gpus_of_a_node() -> None:
    spec = planned(load_recipe("olmo3-32b-malware-full", NOWHERE, (LONG,)))
    for per_node, heads in ((8, 40), (6, 40), (8, 12), (3, 40), (4, 6)):
        shape = spec.model.architecture.model_copy(update={"num_attention_heads": heads})
        wide = Setup(shape, spec.training, 2 * per_node, gpu=GPUS["h100-80gb"], num_nodes=2)
        for room in range(40, 400, 40):
            found = suggest_changes(wide, CLUSTER, room, lambda _: True)
            sizes = re.findall(r"context_parallel=(\d+)", " ".join(each.override for each in found))
            assert all(per_node % int(size) == 0 == heads % int(size) for size in sizes)


def test_nothing_is_suggested_for_an_optimal_run() -> None:
    fast = recipe("training.activation_checkpointing=none", "training.global_batch_size=16")
    assert suggest_faster(fast.training, setup(fast), GPUS["h200"]) is None


# --- Values of `auto` ----------------------------------------------------------------------------

H100, H200, L4 = GPUS["h100-80gb"], GPUS["h200"], GPUS["l4"]


def choose(
    spec: RecipeSpec, gpu: Gpu | None, num_processes: int = 8, engine: EngineName = "fsdp2"
) -> tuple[TrainingPlan, ExecutionPlan]:
    lightest = Setup(spec.model.architecture, least_memory(spec.training), num_processes, engine, gpu=gpu)
    return choose_execution(spec.training, lightest)


def predicted(spec: RecipeSpec, training: TrainingPlan, gpu: Gpu, num_processes: int = 8) -> tuple[float, float]:
    """Return the predicted seconds per step and GiB."""
    asked = with_sharding(Setup(spec.model.architecture, training, num_processes, gpu=gpu))
    return predict_step_time(asked, gpu).step_seconds, Fit(asked).memory.total


def test_auto_selects_large_micro_batches_of_small_packs_and_leaves_memory_free() -> None:
    spec = load_recipe("gemma3-12b-sql-qlora", NOWHERE)
    training, execution = choose(spec, H200)
    assert execution.chosen == ("micro_batch_size", "activation_checkpointing")
    assert "times as fast" in execution.reason
    chosen, lightest = (predicted(spec, each, H200) for each in (training, least_memory(spec.training)))
    assert lightest[0] > 3 * chosen[0]
    assert chosen[1] <= ROOM * H200.usable_gib


def test_auto_selects_smaller_micro_batches_on_a_smaller_gpu() -> None:
    spec = load_recipe("qwen3-8b-tools-lora", NOWHERE, ("training.method=qlora",))
    large, small = (choose(spec, gpu, 1)[0] for gpu in (H200, L4))
    assert small.micro_batch_size < large.micro_batch_size
    assert predicted(spec, small, L4, 1)[1] <= ROOM * L4.usable_gib


@given(
    name=st.sampled_from(["olmo3-7b-full", "qwen3-8b-tools-lora", "gemma3-12b-sql-qlora", "llama3.3-70b-full"]),
    gpu=st.sampled_from(sorted(GPUS)),
    num_processes=st.sampled_from([1, 2, 3, 8, 24]),
    accumulation=st.integers(1, 36),
)
@settings(max_examples=25)
def test_the_micro_batch_always_divides_the_global_batch(
    name: str, gpu: GpuModel, num_processes: int, accumulation: int
) -> None:
    spec = load_recipe(name, NOWHERE, (f"training.global_batch_size={num_processes * accumulation}",))
    training, _ = choose(spec, GPUS[gpu], num_processes)
    assert training.global_batch_size % (training.micro_batch_size * num_processes) == 0
    assert training.global_batch_size == num_processes * accumulation


def test_values_set_by_the_recipe_are_kept() -> None:
    both = load_recipe(
        "olmo3-7b-full", NOWHERE, ("training.micro_batch_size=1", "training.activation_checkpointing=full")
    )
    training, execution = choose(both, H200)
    assert (training.micro_batch_size, training.activation_checkpointing, execution.chosen) == (1, "full", ())
    size = load_recipe("olmo3-7b-full", NOWHERE, ("training.micro_batch_size=1",))
    training, execution = choose(size, H200)
    assert (training.micro_batch_size, execution.chosen) == (1, ("activation_checkpointing",))
    offloaded = load_recipe("olmo3-7b-full", NOWHERE, ("training.activation_offload=true",))
    assert choose(offloaded, H200)[0].activation_checkpointing != "none"


def test_only_as_many_layers_are_checkpointed_as_memory_requires() -> None:
    spec = load_recipe("llama3.3-70b-lora", NOWHERE, ("training.sequence_length=8192",))
    training, _ = choose(spec, H200, 2)
    assert training.activation_checkpointing == "full"
    assert training.checkpointed_layers is not None
    room = ROOM * H200.usable_gib
    seconds, size = predicted(spec, training, H200, 2)
    fewer = training.model_copy(update={"checkpointed_layers": training.checkpointed_layers - 1})
    whole = training.model_copy(update={"checkpointed_layers": None})
    assert size <= room < predicted(spec, fewer, H200, 2)[1]
    assert seconds < predicted(spec, whole, H200, 2)[0]
    explicit = load_recipe("llama3.3-70b-lora", NOWHERE, ("training.activation_checkpointing=full",))
    assert choose(explicit, H200, 2)[0].checkpointed_layers is None


def test_fewer_checkpointed_layers_are_suggested_with_their_mode() -> None:
    changes = ("training.sequence_length=8192", "training.base_precision=fp8", "training.activation_checkpointing=full")
    spec = load_recipe("llama3.3-70b-lora", NOWHERE, changes)
    setup = Setup(spec.model.architecture, least_memory(spec.training), 2, gpu=H200, node_memory_gib=16)
    faster = suggest_faster(setup.training, setup, H200)
    assert faster is not None
    assert "training.activation_checkpointing=full training.checkpointed_layers=" in faster.override
    assert load_recipe("llama3.3-70b-lora", NOWHERE, faster.override.split()).training.checkpointed_layers


def test_offload_is_suggested_where_host_memory_makes_it_worthwhile() -> None:
    changes = ("training.sequence_length=8192", "training.activation_checkpointing=full")
    spec = load_recipe("llama3.3-70b-lora", NOWHERE, changes)
    setup = Setup(spec.model.architecture, least_memory(spec.training), 2, gpu=H200, node_memory_gib=256)
    faster = suggest_faster(setup.training, setup, H200)
    assert faster is not None
    suggested = load_recipe("llama3.3-70b-lora", NOWHERE, faster.override.split()).training
    assert suggested.activation_offload
    assert suggested.offloaded_layers
    assert faster.total_gib <= H200.usable_gib


@pytest.mark.parametrize(("node_gib", "is_offloaded"), [(256, True), (None, True), (16, False)])
def test_as_many_selective_layers_are_offloaded_as_host_memory_and_copies_allow(
    node_gib: float | None, *, is_offloaded: bool
) -> None:
    changes = ("training.sequence_length=8192", "training.activation_offload=true")
    spec = load_recipe("llama3.3-70b-lora", NOWHERE, changes)
    setup = Setup(spec.model.architecture, least_memory(spec.training), 2, gpu=H200, node_memory_gib=node_gib)
    training, _ = choose_execution(spec.training, setup)
    assert bool(training.offloaded_layers) == is_offloaded
    found = setup.with_training(**vars(training))
    assert Fit(found).memory.total <= ROOM * H200.usable_gib
    assert fits_host(found, H200) == is_offloaded  # inputs of layers are offloaded in any case
    set_by_recipe = spec.training.model_copy(update={"offloaded_layers": 3})
    fixed = replace(setup, training=least_memory(set_by_recipe))
    assert choose_execution(set_by_recipe, fixed)[0].offloaded_layers == 3


def test_at_a_million_tokens_layers_are_recomputed_without_their_attention() -> None:
    long = {"sequence_length": 2**20, "context_parallel": 4, "optimizer": "adamw8bit", "activation_offload": True}
    spec = load_recipe("qwen3-8b-tools-full", NOWHERE)
    training = spec.training.model_copy(update={**long, "global_batch_size": 1})
    chosen = {}
    for attention in ("auto", "eager"):
        open_settings = training.model_copy(update={"attention": attention})
        setup = Setup(spec.model.architecture, least_memory(open_settings), 4, gpu=H200)
        chosen[attention] = choose_execution(open_settings, setup)[0].activation_checkpointing
    assert chosen == {"auto": "except_attention", "eager": "full"}


def test_unsupported_settings_of_an_engine_are_not_chosen() -> None:
    for gpu in GPUS.values():
        spec = load_recipe("llama3.3-70b-lora", NOWHERE)
        assert choose(spec, gpu, engine="zero3")[0].activation_checkpointing in {"none", "full"}


def test_minimal_memory_is_used_on_an_unknown_gpu() -> None:
    training, execution = choose(load_recipe("olmo3-7b-full", NOWHERE), None)
    assert (training.micro_batch_size, training.activation_checkpointing) == (1, "full")
    assert "sets no GPU model" in execution.reason


def test_without_gpus_micro_batches_are_small_and_not_recomputed() -> None:
    spec = load_recipe("demo", NOWHERE)
    training, _ = choose_execution(
        spec.training, Setup(spec.model.architecture, least_memory(spec.training), 2, device="cpu")
    )
    assert (training.micro_batch_size, training.activation_checkpointing) == (8, "none")


def test_the_reason_without_gpus_does_not_say_what_the_recipe_contradicts() -> None:
    spec = load_recipe("demo", NOWHERE, ("training.activation_checkpointing=selective",))
    setup = Setup(spec.model.architecture, least_memory(spec.training), device="cpu")
    reason = choose_execution(spec.training, setup)[1].reason
    assert reason == "at most 2,048 tokens per micro-batch, because there is no GPU"


def test_minimal_memory_is_used_and_reported_if_nothing_fits() -> None:
    training, execution = choose(load_recipe("llama3.3-70b-full", NOWHERE), H100)
    assert (training.micro_batch_size, training.activation_checkpointing) == (1, "full")
    assert "no choice leaves 15%" in execution.reason


def test_a_huge_global_batch_is_resolved_quickly() -> None:
    spec = load_recipe("olmo3-7b-full", NOWHERE, ("training.global_batch_size=2000000000",))
    assert choose(spec, H200)[0].micro_batch_size <= 32


PROFILES = [load_cluster(name, NOWHERE) for name in list_names("cluster", NOWHERE)]
CLUSTERS = list({p.gpu: p.name for p in PROFILES if p.gpu and p.scheduler == "slurm"}.values())  # one for each GPU


@pytest.mark.parametrize("name", list_names("recipe", NOWHERE))
def test_nothing_faster_is_suggested_for_shipped_recipes_on_shipped_clusters(name: str) -> None:
    for cluster in (load_cluster(cluster, NOWHERE) for cluster in CLUSTERS):
        spec, gpu = load_recipe(name, NOWHERE), GPUS[cluster.gpu]
        image, created = NamedImage(spec.image or "any:1"), datetime(2026, 1, 2, tzinfo=UTC)
        request = RunRequest(None, None, None, image, False, Path("/w"), "python", created, "a")
        model = plan_model(spec.model, shipped_config(spec.model.weights))
        plan = plan_run(spec, cluster, None, replace(request, model=model))
        per_process = spec.training.global_batch_size // plan.placement.world_size
        best = 0.0
        for size, mode in product((n for n in range(1, per_process + 1) if per_process % n == 0), MODES):
            other = plan.setup.with_training(micro_batch_size=size, activation_checkpointing=mode)
            changed = with_sharding(other)
            if Fit(changed).memory.total <= ROOM * gpu.usable_gib:
                best = max(best, predict_step_time(changed, gpu).tokens_per_second)
        assert plan.speed is not None
        assert best, f"{name} on {cluster.name}: nothing fits"
        assert plan.speed.tokens_per_second >= 0.95 * best, f"{name} on {cluster.name}"


def test_a_run_that_nothing_makes_fit_is_rejected_without_trying_every_combination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def count(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return Fit(*arguments, **options)

    monkeypatch.setattr("ftkit.planning.suggestions.Fit", count)
    spec = recipe(
        "training.micro_batch_size=55440", "training.global_batch_size=887040", "training.sequence_length=16777216",
        "model.architecture.max_position_embeddings=16777216", "training.reshard_after_forward=never",
    )  # fmt: skip
    assert propose(spec, 0.001) == []
    assert len(calls) < 200


@pytest.mark.parametrize("training", ["micro_batch_size", "global_batch_size", "sequence_length", "num_epochs"])
@pytest.mark.parametrize("value", [2**31, 10**10, 10**18])
def test_excessive_numbers_are_rejected(training: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"training.{training}: "):
        load_recipe("demo", NOWHERE, [f"training.{training}={value}"])


# --- How the model is sharded ---------------------------------------------------------------------


def sharding(num_nodes: int, gbps: float, *overrides: str, gpu: Gpu = H200) -> Setup:
    """Return the sharding of full training of a 7B model on nodes with eight GPUs and a network of `gbps` Gbit/s."""
    spec = recipe(f"training.global_batch_size={32 * num_nodes}", "training.sequence_length=2048", *overrides)
    return with_sharding(
        Setup(
            spec.model.architecture,
            spec.training,
            8 * num_nodes,
            gpu=gpu,
            num_nodes=num_nodes,
            node_bandwidth=gbps * 1e9 / 8,
        )
    )


def test_replicas_are_used_if_the_network_would_slow_steps_down() -> None:
    fast, slow = (sharding(4, gbps, "training.sync_gradients=every_micro_batch") for gbps in (3200, 100))
    assert (fast.num_replicas, slow.num_replicas, slow.num_shards) == (1, 4, 8)
    fully = replace(slow, num_replicas=1, num_shards=32)
    one, other = (predict_step_time(each, H200) for each in (slow, fully))
    assert (one.step_seconds * 2 < other.step_seconds, other.bound) == (True, "network")
    states = "parameters", "optimizer"
    less, more = (sum(Fit(each).memory.parts[name] for name in states) for each in (fully, slow))
    assert more == pytest.approx(4 * less, rel=0.02)  # the peak may be at another stage


def test_gradients_are_reduced_once_per_step_if_memory_allows() -> None:
    deferred = sharding(4, 100, "training.shard_degree=32")
    assert (deferred.defers_sync, deferred.keeps_weights, deferred.num_replicas) == (True, True, 1)
    each = replace(deferred, defers_sync=False)
    assert predict_step_time(deferred, H200).step_seconds * 2 < predict_step_time(each, H200).step_seconds
    more, less = (Fit(one).memory for one in (deferred, each))
    assert more.total > less.total
    tight = sharding(4, 100, "training.shard_degree=32", gpu=replace(H200, memory_gib=less.total / 0.9 / 0.8))
    assert not tight.defers_sync
    assert not sharding(1, 100).defers_sync  # copy engines cost nothing
    assert not sharding(4, 100, "training.global_batch_size=32").defers_sync  # one micro-batch


def test_a_shard_degree_that_does_not_divide_the_gpus_is_rejected() -> None:
    created = datetime(2026, 1, 1, tzinfo=UTC)
    request = RunRequest(None, 3, None, None, False, Path("/w"), "python", created, "a")
    spec = load_recipe("olmo3-7b-full", NOWHERE, ("training.shard_degree=16", "training.global_batch_size=24"))
    with pytest.raises(ConfigError, match="groups of 16"):
        plan_run(spec, CLUSTER, None, request)
