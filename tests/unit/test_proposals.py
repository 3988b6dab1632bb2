from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.gpus import GPUS
from ftkit.memory import predict_memory
from ftkit.proposals import NUM_PROPOSALS, propose_changes, propose_faster
from ftkit.specs.load import Surroundings, load_cluster, load_recipe
from ftkit.speed import Network

if TYPE_CHECKING:
    from ftkit.proposals import Proposal
    from ftkit.specs.cluster import ClusterProfile
    from ftkit.specs.recipe import RecipeSpec
    from ftkit.specs.training import EngineName

NOWHERE = Surroundings(Path("/nowhere/project"), Path("/nowhere/user"), {})
CLUSTER = load_cluster("slurm", NOWHERE)


def recipe(*overrides: str) -> RecipeSpec:
    return load_recipe("olmo3-7b-full", NOWHERE, overrides)


BATCHES = (
    "training.activation_checkpointing=none", "training.micro_batch_size=4", "training.global_batch_size=128",
    "training.sequence_length=8192",
)  # fmt: skip


def total(spec: RecipeSpec, num_shards: int) -> float:
    return predict_memory(spec.model.architecture, spec.training, num_shards, "fsdp2").total


def propose(spec: RecipeSpec, capacity: float, cluster: ClusterProfile = CLUSTER) -> list[Proposal]:
    return propose_changes(spec, cluster, 2, 8, "fsdp2", capacity)


def taken(proposal: Proposal) -> tuple[RecipeSpec, int]:
    """Return the recipe and the number of nodes that one has who types what is proposed."""
    words = proposal.override.split()
    num_nodes = int(words[words.index("--nodes") + 1]) if "--nodes" in words else 2
    return recipe(*BATCHES, *(word for word in words if "=" in word)), num_nodes


@settings(deadline=None, max_examples=25)
@given(st.floats(0.1, 400))
def test_what_is_proposed_can_be_typed_and_is_predicted_to_fit(capacity: float) -> None:
    proposals = propose(recipe(*BATCHES), capacity)
    assert len(proposals) <= NUM_PROPOSALS
    for proposal in proposals:
        spec, num_nodes = taken(proposal)
        assert total(spec, 8 * num_nodes) == proposal.total_gib <= capacity
        assert spec.training.global_batch_size % (spec.training.micro_batch_size * 8 * num_nodes) == 0
    assert len({proposal.override for proposal in proposals}) == len(proposals)


@settings(deadline=None, max_examples=25)
@given(st.floats(1, 200))
def test_no_part_of_a_proposal_can_be_left_out(capacity: float) -> None:
    spec = recipe(*BATCHES)
    if total(spec, 16) <= capacity:
        return
    for proposal in propose(spec, capacity):
        words = proposal.override.replace("--nodes ", "--nodes=").split()
        for left_out in words:
            if left_out == "training.activation_checkpointing=full" and "training.activation_offload=true" in words:
                continue  # one change of two words
            rest = recipe(*BATCHES, *(word for word in words if word != left_out and not word.startswith("--")))
            shards = 32 if any(word.startswith("--") and word != left_out for word in words) else 16
            assert total(rest, shards) > capacity


def test_what_costs_least_comes_first() -> None:
    spec = recipe(*BATCHES)
    room = total(recipe(*BATCHES, "training.activation_checkpointing=selective"), 16)
    proposals = propose(spec, room)
    assert [proposal.override for proposal in proposals] == [
        "training.activation_checkpointing=selective",
        "training.micro_batch_size=2",
        "training.sequence_length=4096",
    ]
    assert str(proposals[0]) == f"training.activation_checkpointing=selective ({room:.1f} GiB)"


def test_a_layers_inputs_are_offloaded_where_recomputing_all_else_is_not_enough() -> None:
    spec = recipe(*BATCHES, "training.activation_checkpointing=full")
    room = total(recipe(*BATCHES, "training.activation_checkpointing=full", "training.activation_offload=true"), 16)
    assert propose(spec, room)[0].override == "training.activation_offload=true"
    assert propose(recipe(*BATCHES), room)[0].override == (
        "training.activation_checkpointing=full training.activation_offload=true"
    )


def test_with_zero3_only_whole_layers_are_recomputed() -> None:
    proposals = propose_changes(recipe(*BATCHES), CLUSTER, 2, 8, "zero3", 70)
    assert proposals[0].override.startswith("training.activation_checkpointing=full")


SMALL = ("training.activation_checkpointing=full", "training.micro_batch_size=1")


def test_states_of_8_bits_are_proposed_before_offload() -> None:
    rounded = total(recipe(*SMALL, "training.optimizer=adamw8bit"), 16)
    assert propose(recipe(*SMALL), rounded)[0].override == "training.optimizer=adamw8bit"
    offloaded = total(recipe(*SMALL, "training.offload=optimizer"), 16)
    assert offloaded < rounded
    assert propose(recipe(*SMALL), offloaded)[0].override == "training.offload=optimizer"
    rounding = recipe(*SMALL, "training.optimizer=adamw8bit")
    words = "training.optimizer=adamw training.offload=optimizer"
    assert words in [proposal.override for proposal in propose(rounding, offloaded)]


@pytest.mark.parametrize(
    ("changes", "engine"),
    [((), "zero3"), (("training.method=lora",), "fsdp2"), (("training.offload=optimizer",), "fsdp2")],
    ids=["zero3", "adapters", "offloaded already"],
)
def test_states_of_8_bits_are_not_proposed_where_they_have_no_place(
    changes: tuple[str, ...], engine: EngineName
) -> None:
    for capacity in range(4, 100, 8):
        for proposal in propose_changes(recipe(*BATCHES, *changes), CLUSTER, 2, 8, engine, capacity):
            assert "adamw8bit" not in proposal.override


def test_changes_are_put_together_where_none_is_enough() -> None:
    proposals = propose(recipe(*BATCHES), 15)
    assert proposals
    assert all(len(proposal.override.split()) > 1 for proposal in proposals)


def test_nothing_is_proposed_where_nothing_helps() -> None:
    assert propose(recipe(*BATCHES), 0.1) == []


@pytest.mark.parametrize(
    "changes", [{"scheduler": "local"}, {"max_nodes": 3}, {"device": "cpu"}], ids=["one machine", "few nodes", "no GPU"]
)
def test_what_the_cluster_has_not_is_not_proposed(changes: dict[str, object]) -> None:
    cluster = CLUSTER.model_copy(update=changes)
    absent = "offload" if "device" in changes else "--nodes"
    for capacity in range(4, 100, 8):
        assert not any(absent in proposal.override for proposal in propose(recipe(*BATCHES), capacity, cluster))


def test_a_batch_too_small_for_more_nodes_is_left_as_it_is() -> None:
    spec = recipe(*BATCHES, "training.global_batch_size=64")
    for capacity in range(4, 100, 8):
        assert not any("--nodes" in proposal.override for proposal in propose(spec, capacity))


def test_small_micro_batches_are_proposed_to_grow_as_far_as_they_fit() -> None:
    small = load_recipe("gemma3-1b-dolly-lora", NOWHERE)
    proposal = propose_faster(small, "fsdp2", GPUS["h100-80gb"], Network(1, 1, None))
    assert proposal is not None
    assert proposal.override.startswith("training.micro_batch_size=")
    assert proposal.speedup > 1.1
    assert proposal.total_gib <= GPUS["h100-80gb"].usable_gib


def test_checkpointing_that_nothing_asks_for_is_proposed_to_go() -> None:
    checkpointed = recipe("training.global_batch_size=16")
    proposal = propose_faster(checkpointed, "fsdp2", GPUS["h200"], Network(2, 16, None))
    assert proposal is not None
    assert "training.activation_checkpointing=none" in proposal.override


def test_nothing_is_proposed_to_a_run_that_is_as_fast_as_it_can_be() -> None:
    fast = recipe("training.activation_checkpointing=none", "training.global_batch_size=16")
    assert propose_faster(fast, "fsdp2", GPUS["h200"], Network(2, 16, None)) is None
