"""Dropout of adapters is the same however a step is divided: among processes, micro-batches, layers and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ftkit.runs.records import VerificationRecord
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Run

    from ftkit.train.world import World

WORDS = (
    "training.method=lora",
    "training.precision=fp32",
    "training.lora={rank: 4, dropout: 0.1}",
    "training.learning_rate=0.02",
    "training.global_batch_size=12",
    "training.micro_batch_size=1",
    "training.max_steps=2",
    "training.checkpoint_every_steps=1",
    "evaluation.generation=null",
)
PADDED = ("data.packing=off",)
EXPERTS = (
    "model.architecture.family=mixtral",  # of 8 small experts, where others have 128
    "model.architecture.intermediate_size=32",
    "training.lora={rank: 2, dropout: 0.1, targets: [q_proj, w1, w2, w3]}",
)
QUANTIZED = ("training.method=qlora", "training.lora={rank: 4, dropout: 0.1, use_dora: true}")


@pytest.fixture(scope="module")
def whole(make_run: Callable[..., Run], world: World) -> Callable[..., Run]:
    """Two steps on one process, in micro-batches of one pack; a run for each set of words. Tests copy them."""
    trained: dict[tuple[str, ...], Run] = {}

    def train(*words: str) -> Run:
        if words not in trained:
            trained[words] = make_run(f"whole-dropout-{len(trained)}", *WORDS, *words, processes=1)
            trained[words].train_here(world)
        return trained[words]

    return train


def assert_equal(run: Any, expected: Any, step: int) -> None:
    """Compare a step's loss and norm of gradients. Without dropout, they differ by up to 1e-6."""
    assert run.losses()[step] == pytest.approx(expected.losses()[step], rel=3e-6), step


@pytest.mark.parametrize(
    ("words", "changes", "processes"),
    [
        pytest.param((), ("training.micro_batch_size=2",), 1, id="micro-batches of two packs"),
        pytest.param((), (), 2, id="two processes"),
        pytest.param((), ("training.micro_batch_size=2",), 3, id="three processes"),
        pytest.param((), ("training.shard_degree=2",), 4, id="replicas"),
        pytest.param((), ("training.activation_checkpointing=full",), 1, id="recomputed layers"),
        pytest.param((), ("training.context_parallel=2",), 2, id="tokens divided"),
        pytest.param((), ("training.tensor_parallel=2",), 2, id="layers divided"),
        pytest.param((), ("training.tensor_parallel=2", "training.context_parallel=2"), 4, id="both divided"),
        pytest.param((), PADDED, 1, id="padded rows"),
        pytest.param(PADDED, ("training.micro_batch_size=2",), 2, id="padded rows, two processes"),
        pytest.param(QUANTIZED, ("training.micro_batch_size=2",), 2, id="DoRA on 4 bits, two processes"),
        pytest.param(EXPERTS, ("training.micro_batch_size=2",), 2, id="experts, two processes"),
        pytest.param(EXPERTS, ("training.context_parallel=2",), 2, id="experts, tokens divided"),
        pytest.param(EXPERTS, PADDED, 2, id="experts, padded rows"),
    ],
)
def test_a_run_continues_with_the_same_dropout_however_its_steps_are_divided(
    words: tuple[str, ...],
    changes: tuple[str, ...],
    processes: int,
    whole: Callable[..., Run],
    make_run: Callable[..., Run],
    request: pytest.FixtureRequest,
) -> None:
    if words is EXPERTS and not CONVERTS_WEIGHTS:
        pytest.skip("in transformers 4, experts are linear layers")
    expected = whole(*words)
    divided = make_run(f"dropout-{request.node.callspec.id}", *WORDS, *words, *changes, processes=processes)
    expected.copy_to(divided.plan.id)
    divided.forget_after(1)
    divided.train()
    assert_equal(divided, expected, 2)


@pytest.mark.parametrize("words", [(), QUANTIZED, EXPERTS], ids=["LoRA", "DoRA on 4 bits", "experts"])
def test_both_engines_draw_the_same_dropout(
    words: tuple[str, ...], whole: Callable[..., Run], make_run: Callable[..., Run], request: pytest.FixtureRequest
) -> None:
    if words is EXPERTS and not CONVERTS_WEIGHTS:
        pytest.skip("in transformers 4, zero3 refuses experts")
    name = f"dropout-zero3-{request.node.callspec.id}"
    run = make_run(name, *WORDS, *words, "training.engine=zero3", "training.max_steps=1", processes=2)
    run.train()
    assert_equal(run, whole(*words), 1)
    assert run.records(VerificationRecord)
