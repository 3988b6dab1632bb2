"""FSDP2 and ZeRO-3 train the same model for each family and method."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from waiting import PATIENCE_SECONDS

from ftkit.config.execution import method_counts
from ftkit.config.training import Method, TrainingPlan
from ftkit.errors import TrainingError
from ftkit.models.architecture import ArchitectureSpec
from ftkit.models.families import MEASURED
from ftkit.runs.records import EvaluationRecord, StartRecord, VerificationRecord
from ftkit.train.causal_lm import CausalLM
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.distributed import fsdp2
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.verification import verify_sharding
from ftkit.train.distributed.zero3 import Zero3Engine, hide_activations
from ftkit.train.model.hf_model import make_config
from ftkit.train.model.lora import init_adapters, prepare_method
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.train.world import World

MATRIX = Path(__file__).with_name("engine_matrix.py")
NO_QUESTIONS = "evaluation.generation=null"
SHAPE = ArchitectureSpec(
    family="llama", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip


def training(**changes: object) -> TrainingPlan:
    fields = {
        "sequence_length": 32, "global_batch_size": 4, "max_steps": 1, "learning_rate": 1e-3, "precision": "fp32",
    }  # fmt: skip
    return TrainingPlan.model_validate(fields | changes)


class Ids:
    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0


def build(spec: TrainingPlan) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(make_config(SHAPE, Ids()))  # type: ignore[arg-type]
    prepare_method(model, spec, torch.device("cpu"))
    return model


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    output = tmp_path_factory.mktemp("matrix") / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(MATRIX), str(output)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, dict[str, Any]] = json.loads(output.read_text())
    return results


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    # With one seed in six, norms and magnitudes differ by up to 5e-5, for 4-bit and other weights alike.
    for what, tolerance in {"losses": 2e-5, "held_out": 2e-5, "norms": 1e-4, "length": 1e-4}.items():
        assert one[what] == pytest.approx(other[what], rel=tolerance), what


@pytest.mark.oldest
@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("family", [*MEASURED, "gpt_neox", "qwen2"])
def test_both_engines_train_the_same_model(family: str, method: Method, matrix: dict[str, dict[str, Any]]) -> None:
    fsdp2_result, zero3_result = (matrix[f"{family} {method} {engine}"] for engine in ("fsdp2", "zero3"))
    assert_equal(fsdp2_result, zero3_result)
    assert fsdp2_result["checks"]["units"] == zero3_result["checks"]["units"] == 4
    is_quantized = zero3_result["checks"]["quantized parameters"] != 0
    assert is_quantized == (method == "qlora")


@pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="experts in one parameter are transformers 5's")
def test_both_engines_train_the_same_mixture_of_experts(matrix: dict[str, dict[str, Any]]) -> None:
    one, *others = (matrix[f"qwen3_moe full {how}"] for how in ("fsdp2", "zero3", "fsdp2 halved"))
    for other in others:
        assert_equal(one, other)
        for step, numbers in enumerate(one["routers"]):
            assert other["routers"][step] == pytest.approx(numbers, rel=1e-3), step
    for method in ("lora", "qlora"):
        assert_equal(*(matrix[f"qwen3_moe {method} {engine}"] for engine in ("fsdp2", "zero3")))
    plain = one["transformers"]
    assert (one["losses"][0], one["norms"][0]) == pytest.approx((plain["loss"], plain["norm"]), rel=2e-6)
    assert one["routers"][0][-1] / one["num_targets"] == pytest.approx(plain["balance"], rel=2e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as DeepSpeed is imported
@pytest.mark.parametrize("engine", [Fsdp2Engine, Zero3Engine])
def test_parameters_frozen_by_the_model_class_are_in_checkpoints_and_exports(
    engine: type[Fsdp2Engine | Zero3Engine], world: World, tmp_path: Path
) -> None:
    """Such as the biases of some routers."""
    frozen, spec = "model.norm.weight", training()

    def make(value: float) -> Fsdp2Engine | Zero3Engine:
        model = build(spec)
        model.model.norm.weight = torch.nn.Parameter(torch.full((32,), value), requires_grad=False)
        return engine(model, spec, world)

    save(make(0.25).state(), checkpoint_id=tmp_path)
    resumed = make(2.0)
    resumed.load(tmp_path)
    assert resumed.trained_weights()[frozen].tolist() == [0.25] * 32


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_run_resumes_although_a_trained_parameter_never_got_a_gradient(
    optimizer: str, world: World, tmp_path: Path
) -> None:
    """Such as adapters of a matrix that a kernel reads past them."""
    spec = training(optimizer=optimizer)

    def make() -> Fsdp2Engine:
        model = build(spec)
        model.model.layers[0].mlp.register_parameter("unused", torch.nn.Parameter(torch.ones(64, 8)))
        return Fsdp2Engine(model, spec, world)

    first = make()
    ids = np.arange(3, 19)
    batch = to_micro_batch(np.array([[ids, ids, np.arange(16)]], np.int32), world.device)
    first.backward(first.forward(batch), 16, is_last=True)
    first.step(1e-2, 1.0)
    save(first.state(), checkpoint_id=tmp_path)
    resumed = make()
    resumed.load(tmp_path)
    for engine in (first, resumed):
        engine.backward(engine.forward(batch), 16, is_last=True)
        engine.step(1e-2, 1.0)
    expected = first.trained_weights()
    for name, weight in resumed.trained_weights().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)


@pytest.mark.oldest
def test_a_step_with_a_non_finite_gradient_is_skipped_on_every_rank(matrix: dict[str, dict[str, Any]]) -> None:
    assert [name for name, case in matrix.items() if not case["unharmed"]] == []


@pytest.mark.parametrize(("engine", "copies", "gradients"), [("fsdp2", 1, 0), ("zero3", 2, 1)])
def test_an_engine_reports_its_memory_by_part(
    engine: str, copies: int, gradients: int, matrix: dict[str, dict[str, Any]]
) -> None:
    """Between steps FSDP2 has no gradients; ZeRO-3 keeps their memory, and master weights as well."""
    case = matrix[f"llama full {engine}"]
    held, parameters = case["held"], case["checks"]["parameters"]
    for part, count in {"parameters": copies, "gradients": gradients, "optimizer": 2}.items():
        assert held[part] == pytest.approx(count * parameters / 2, rel=0.02), part


def test_both_engines_train_fp32_adapters_equally_on_4_bit_weights(matrix: dict[str, dict[str, Any]]) -> None:
    results = [matrix[f"olmo3 qlora {engine} bf16"] for engine in ("fsdp2", "zero3")]
    # Not exactly: ZeRO-3 multiplies by adapters that are rounded to bf16.
    assert results[0]["losses"] == pytest.approx(results[1]["losses"], rel=2e-4)
    assert results[0]["norms"] == pytest.approx(results[1]["norms"], rel=0.01)
    assert results[0]["losses"] != matrix["olmo3 qlora fsdp2"]["losses"]


@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_offloaded_optimizer_states_do_not_change_training(
    engine: str, offload: str, matrix: dict[str, dict[str, Any]]
) -> None:
    assert_equal(matrix[f"llama full {engine} {offload}"], matrix["llama full fsdp2"])


@pytest.mark.parametrize("family", ["llama", "olmo3"])
def test_layers_that_stay_unsharded_are_gathered_once_and_train_the_same(
    family: str, matrix: dict[str, dict[str, Any]]
) -> None:
    unsharded, resharded = matrix[f"{family} full fsdp2 unsharded"], matrix[f"{family} full fsdp2"]
    assert_equal(unsharded, resharded)
    layers, micro_batches = 3, 2
    assert resharded["gathered"] - unsharded["gathered"] == layers * micro_batches


@pytest.mark.parametrize("how", ["all fp8", "fp8 unsharded", "fp8 copied"])
def test_weights_all_gathered_in_fp8_train_as_those_that_are_rounded_later(
    how: str, matrix: dict[str, dict[str, Any]]
) -> None:
    """Offloaded weights are all-gathered in bf16."""
    expected, found = matrix["llama full fsdp2 fp8"], matrix[f"llama full fsdp2 {how}"]
    assert_equal(found, expected)
    assert found["held_out"] != matrix["llama full fsdp2 bf16"]["held_out"]


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_gradients_reduced_in_bf16_train_nearly_the_same(engine: str, matrix: dict[str, dict[str, Any]]) -> None:
    exact, rounded = matrix[f"llama full {engine} bf16"], matrix[f"llama full {engine} bf16 bf16"]
    assert rounded["losses"] == pytest.approx(exact["losses"], rel=2e-3)
    assert rounded["norms"] == pytest.approx(exact["norms"], rel=5e-2)
    assert rounded["norms"] != exact["norms"]


@pytest.mark.parametrize("method", get_args(Method))
def test_peer_to_peer_copies_do_not_change_training(method: Method, matrix: dict[str, dict[str, Any]]) -> None:
    copied = matrix[f"gemma3_text {method} fsdp2 copied"]
    assert_equal(copied, matrix[f"gemma3_text {method} fsdp2"])
    assert copied["gathered"] == 0


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", MEASURED)
def test_layers_divided_among_ranks_do_not_change_training(
    family: str, method: Method, matrix: dict[str, dict[str, Any]]
) -> None:
    divided, whole = matrix[f"{family} {method} fsdp2 divided"], matrix[f"{family} {method} fsdp2"]
    assert_equal(divided, whole)
    for what in ("losses", "norms"):  # before the first step of AdamW, which amplifies rounding
        assert divided[what][0] == pytest.approx(whole[what][0], rel=1e-6)
    # Beside the layers' norms, one matrix of each adapter is whole on both ranks.
    norms = divided["held"]["parameters"] - whole["held"]["parameters"] - divided["repeated"] // 2
    assert 0 < norms < 0.02 * whole["held"]["parameters"]


def test_copied_bf16_gradients_are_summed_in_fp32_unless_the_recipe_overrides_it(
    matrix: dict[str, dict[str, Any]],
) -> None:
    exact, rounded = matrix["llama full fsdp2 bf16"], matrix["llama full fsdp2 bf16 bf16"]
    assert_equal(matrix["llama full fsdp2 bf16 copied"], exact)
    copied = matrix["llama full fsdp2 bf16 bf16 copied"]
    assert copied["norms"] == pytest.approx(rounded["norms"], rel=1e-3)
    assert copied["norms"] != exact["norms"]


def test_a_zero3_run_equals_the_fsdp2_run_and_resumes_on_fewer_processes(
    finished_run: Any, make_run: Callable[..., Any]
) -> None:
    straight = finished_run.losses()
    run = make_run("zero3", "training.engine=zero3")
    run.train()
    for step, (loss, _) in run.losses().items():
        assert loss == pytest.approx(straight[step][0], abs=1e-4)
    assert [record.engine for record in run.records(StartRecord)] == ["zero3"]
    assert run.memory_stages() == finished_run.memory_stages()
    assert run.records(VerificationRecord)[0].checks["sharded layers"] == 2
    answered = finished_run.records(EvaluationRecord)[0].samples, run.records(EvaluationRecord)[0].samples
    assert answered[0] == answered[1]
    run.copy_to("zero3-alone").forget_after(10)
    alone = make_run("zero3-alone", "training.engine=zero3", NO_QUESTIONS, processes=1)
    alone.train()
    assert [record.resumed_from for record in alone.records(StartRecord)] == [10]
    for step, (loss, _) in alone.losses().items():
        assert loss == pytest.approx(straight[step][0], abs=1e-4)


@pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="experts are separate modules in transformers 4, which zero3 refuses")
def test_modules_that_zero3_calls_do_not_depend_on_the_experts_of_the_tokens() -> None:
    """DeepSpeed's ranks would wait for each other forever; experts of odd sizes are computed one by one."""
    config = make_config(SHAPE.model_copy(update={"family": "qwen3_moe"}), Ids())  # type: ignore[arg-type]
    config.update({"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 34})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    hide_activations(model)
    called: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    calls = []
    for tokens in (torch.tensor([[5]]), torch.arange(6, 38)[None]):
        called.clear()
        model(tokens)
        calls.append(tuple(called))
    assert calls[0] == calls[1]


def test_zero3_without_partitioning_is_rejected_with_both_numbers(world: World) -> None:
    engine = Zero3Engine.__new__(Zero3Engine)
    engine._world, engine.model = world, CausalLM(build(training()))
    with pytest.raises(TrainingError, match=r"units: found 0, expected 3.*: found 0, expected 2"):
        verify_sharding(engine.sharding_stats(), training(), method_counts(SHAPE, training()))


def test_zero3_partitions_over_too_few_ranks_are_rejected(world: World) -> None:
    engine = Zero3Engine.__new__(Zero3Engine)
    engine._world, engine.model = world, CausalLM(build(training()))
    for parameter in engine.model.parameters():
        parameter.ds_shape, parameter.ds_persist = parameter.shape, False
        parameter.ds_tensor = parameter.detach().flatten()
        parameter.data = torch.empty(0)
    assert verify_sharding(engine.sharding_stats(), training(), method_counts(SHAPE, training()))["units"] == 3
    object.__setattr__(world, "size", 2)
    try:
        with pytest.raises(TrainingError, match=r"units: found 0.*rank: found 39,072, "):
            verify_sharding(engine.sharding_stats(), training(), method_counts(SHAPE, training()))
    finally:
        object.__setattr__(world, "size", 1)


@pytest.mark.parametrize(
    ("built", "planned", "message"),
    [
        ("full", "lora", "trainable parameters: found 39,072, expected 16,384 "),
        ("lora", "full", "trainable parameters: found 16,384, expected 39,072 "),
        ("lora", "qlora", "quantized parameters: found 0, expected 18,432"),
    ],
)
def test_a_model_with_other_trainable_parameters_than_planned_is_rejected(
    built: str, planned: str, message: str, world: World
) -> None:
    engine = Fsdp2Engine(build(training(method=built)), training(), world)
    with pytest.raises(TrainingError, match=message):
        verify_sharding(engine.sharding_stats(), training(), method_counts(SHAPE, training(method=planned)))


def test_a_torch_that_cannot_shard_mixed_dtypes_is_rejected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "TORCH", (2, 6))
    spec = training(method="lora", precision="bf16")
    two = dataclasses.replace(world, size=2)
    with pytest.raises(TrainingError, match=r"torch 2\.6.*\n.*\n.*zero3"):
        Fsdp2Engine(build(spec), spec, two)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_checkpoints_and_exports_use_the_familys_parameter_names(mode: str, world: World) -> None:
    spec = training(activation_checkpointing=mode)
    model = build(spec)
    names = [name for name, _ in model.named_parameters()]
    engine = Fsdp2Engine(model, spec, world)
    assert list(engine.state()["model"]) == names
    assert set(engine.state()["optimizer"]["state"]) == set(names)
    assert list(engine.trained_weights()) == names


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_on_one_process_are_not_sharded_and_train_in_bf16(method: Method, world: World) -> None:
    spec = training(method=method, precision="bf16")
    model = build(spec)
    init_adapters(model, seed=0)
    engine = Fsdp2Engine(model, spec, world)
    assert verify_sharding(engine.sharding_stats(), spec, method_counts(SHAPE, spec))["units"] == 0
    packs = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (1, 3, 16)).astype(np.int32)
    packs[:, 2] = np.arange(16)
    batch = to_micro_batch(packs, world.device)
    losses = []
    for _ in range(5):
        loss = engine.forward(batch)
        engine.backward(loss, 16, is_last=True)
        engine.step(1e-2, 1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert not any(isinstance(parameter, DTensor) for parameter in trained)
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    with engine.inference() as answering:
        new = {"max_new_tokens": 2, "do_sample": False}
        assert answering(compute=CausalLM.generate, inputs=batch.input_ids, **new).shape == (1, 18)
