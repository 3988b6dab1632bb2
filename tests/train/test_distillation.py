"""Distillation: equal to the formula on one row a document, packed or not, on any ranks; the stage of the teacher."""

from __future__ import annotations

import math
import re
import signal
import weakref
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from preference_samples import check_gradients
from transformers import LlamaConfig, LlamaForCausalLM

from ftkit.cli.main import main
from ftkit.cli.terminal.record_lines import measured
from ftkit.config.objectives import DISTILL_METRICS
from ftkit.config.training import TrainingPlan
from ftkit.data.packing import IGNORED, Document, build_pack
from ftkit.data.tokenizers import check_same_tokenizer, learn_tokenizer
from ftkit.errors import DataError, TrainingError
from ftkit.launch.model import resolve_model
from ftkit.models.architecture import ModelSpec
from ftkit.planning.layout import Workspace
from ftkit.runs.records import EvaluationRecord, StageRecord, StepRecord, VerificationRecord
from ftkit.train import trainer
from ftkit.train.causal_lm import CausalLM, SourceLosses
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.components.teacher import TeacherSplit, compute_distributions
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.model.lora import init_adapters, prepare_method

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.world import World

VOCABULARY = 61
BY_TEACHER, IN_STEP = (Path(__file__).with_name(f"killed_{what}.py") for what in ("by_teacher", "in_a_step"))


def draw_documents() -> list[list[tuple[list[int], list[int]]]]:
    """Return the documents of two packs: prompts and completions of uneven lengths."""
    rng = np.random.default_rng(3)
    sizes = [[(5, 4), (9, 1), (3, 7)], [(2, 11), (6, 3)]]
    return [[tuple(rng.integers(0, VOCABULARY, size).tolist() for size in pair) for pair in pack] for pack in sizes]  # type: ignore[misc]


def model_of(seed: int, width: int = 32) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa", use_cache=False,
        tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).train()


def engine_of(model: LlamaForCausalLM, world: World, method: str = "full", **options: Any) -> Fsdp2Engine:
    objective = {"objective": "distill", "distill": {"teacher": "/teacher", **options}} if options else {}
    training = TrainingPlan.model_validate(
        {**objective, "method": method, "precision": "fp32", "max_steps": 1, "micro_batch_size": 2,
         "activation_checkpointing": "none", "attention": "sdpa", "compile": "none"}
    )  # fmt: skip
    prepare_method(model, training, world.device)
    return Fsdp2Engine(model, training, world, lambda sharded: init_adapters(sharded, 1))


def change_adapters(engine: Fsdp2Engine) -> None:
    generator = torch.Generator().manual_seed(9)
    for name, parameter in engine.model.hf_model.named_parameters():
        if ".lora_B" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def pack_of(documents: list[tuple[list[int], list[int]]], length: int = 64) -> np.ndarray[Any, Any]:
    made = []
    for prompt, completion in documents:
        labels = np.full(len(prompt) + len(completion), IGNORED, np.int32)
        labels[len(prompt) - 1 : -1] = completion
        made.append(Document(np.array(prompt + completion, np.int32), labels))
    return np.concatenate([build_pack(made, length), np.zeros((1, length), np.int32)])


def batches_of(teacher: Fsdp2Engine, top_k: int, world: World) -> list[MicroBatch]:
    batches = [to_micro_batch(pack_of(pack)[None], world.device) for pack in draw_documents()]
    with teacher.inference() as model:
        return [
            replace(each, teacher=model(compute=CausalLM.top_log_probs, batch=each, vocabulary=VOCABULARY, top_k=top_k))
            for each in batches
        ]


# --- The formula, on one row for each document, in float64 ------------------------------------------


def plain_logits(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all trained tokens, [N, V], and these tokens, [N]."""
    logits, labels = [], []
    for prompt, completion in (document for pack in draw_documents() for document in pack):
        found = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
        logits.append(found[len(prompt) - 1 : -1])
        labels += completion
    return torch.cat(logits), torch.tensor(labels)


def plain_kl(student: torch.Tensor, teacher: torch.Tensor, top_k: int, temperature: float, direction: str) -> Any:
    """Return the divergence of each token, from logits."""
    likely = teacher.topk(top_k).indices

    def outcomes(logits: torch.Tensor) -> torch.Tensor:
        top = logits.softmax(-1).gather(1, likely)
        every = top if top_k == VOCABULARY else torch.cat([top, 1 - top.sum(1, keepdim=True)], dim=1)
        powers = every ** (1 / temperature)
        return powers / powers.sum(1, keepdim=True)

    p, q = outcomes(teacher), outcomes(student)
    if direction == "reverse":
        p, q = q, p
    return (p * (p / q).log()).sum(1)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("top_k", [5, VOCABULARY])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_loss_and_gradient_are_those_of_the_formula_on_unpacked_rows(
    direction: str, temperature: float, top_k: int, method: str, world: World
) -> None:
    options = {"top_k": top_k, "temperature": temperature, "alpha": 0.7, "direction": direction}
    large = model_of(1, 48)
    exact_teacher = deepcopy(large).double().eval()
    batches = batches_of(engine_of(large, world), top_k, world)
    engine = engine_of(model_of(0), world, method, **options)
    change_adapters(engine)
    exact = deepcopy(engine.model.hf_model).double()
    logits, labels = plain_logits(exact)
    with torch.no_grad():
        teacher, _ = plain_logits(exact_teacher)
    kl = plain_kl(logits, teacher, top_k, temperature, direction)
    next_token = torch.nn.functional.cross_entropy(logits, labels)
    if top_k == VOCABULARY:
        p, q = ((each / temperature).log_softmax(-1) for each in (teacher, logits))
        p, q = (p, q) if direction == "forward" else (q, p)
        torch.testing.assert_close(kl, (p.exp() * (p - q)).sum(1))
    expected = 0.7 * temperature**2 * kl.mean() + 0.3 * next_token
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}

    sums, losses = SourceLosses(0, world.device, len(DISTILL_METRICS)), []
    for number, batch in enumerate(batches, start=1):  # two micro-batches
        loss = engine.forward(batch, sums)
        engine.backward(loss, len(labels), is_last=number == len(batches))
        losses.append(float(loss.detach()))
    assert sum(losses) / len(labels) == pytest.approx(float(expected.detach()), rel=1e-5)
    agreement = (logits.argmax(1) == teacher.argmax(1)).double().mean()
    metrics = [float(each.detach()) for each in (kl.mean(), next_token, agreement)]
    assert (sums.metrics / len(labels)).tolist() == pytest.approx(metrics, rel=1e-5)
    check_gradients(engine, gradients)


def test_a_batch_without_the_teachers_distributions_is_refused(world: World) -> None:
    engine = engine_of(model_of(0), world, top_k=5)
    with pytest.raises(TypeError, match="no distributions of the teacher"):
        engine.forward(to_micro_batch(pack_of(draw_documents()[0])[None], world.device))


# --- Runs ------------------------------------------------------------------------------------------


@pytest.fixture
def distill(finished_run: Any, make_run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a run that distills the finished run's export, into a new model or the model that is given."""
    export = finished_run.layout.export

    def make(name: str, *overrides: str, processes: int = 1) -> Any:
        run = make_run(
            name, f"model.tokenizer={{source: {export}, vocab_size: null}}", "training.objective=distill",
            f"training.distill={{teacher: {export}, top_k: 20, alpha: 0.8}}", "evaluation.generation=null",
            "training.max_steps=6", "training.precision=fp32", *overrides, processes=processes,
        )  # fmt: skip
        model = resolve_model(ModelSpec(weights=str(export)), {}, Workspace(run.plan.workspace))
        return replace(run, plan=replace(run.plan, recipe=run.plan.recipe.model_copy(update={"teacher": model})))

    return make


def test_one_and_two_processes_distill_the_same(
    distill: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (
        distill(f"distill-{size}-20260102T030405Z-ab12", f"training.micro_batch_size={3 - size}", processes=size)
        for size in (1, 2)
    )
    one.train()
    (folder,) = (one.plan.data.root / "teachers").iterdir()
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {path.name for path in files} == {"train-0000000.topk", "validation-0000000.topk"}
    two.train()
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files
    losses, others = one.losses(), two.losses()
    assert len(losses) == 6
    for step, (loss, norm) in losses.items():
        assert others[step] == pytest.approx((loss, norm), rel=2e-5 * step)
    before, after = one.records(EvaluationRecord)
    assert after.scores["kl"] < before.scores["kl"]
    assert re.match(r"loss .*, kl .*, next token loss .*, agreement with the teacher \d+%, perplexity", measured(after))
    monkeypatch.setenv("FTKIT_WORKSPACE", str(one.plan.workspace))
    assert main(["report", one.plan.id, "--output", str(tmp_path / "report.html")]) == 0
    assert "Divergence from the teacher" in (tmp_path / "report.html").read_text()
    assert after.perplexity == pytest.approx(math.exp(after.scores["next_token_loss"]))
    assert one.records(StepRecord)[-1].scores.keys() == set(DISTILL_METRICS)
    stages = [record.stage for record in one.records(StageRecord)]
    assert stages[0] == "computing the teacher's distributions"
    assert re.fullmatch(r"computing the teacher's distributions: 0 of \d+ packs", stages[1])


def test_zero3_distills_what_one_process_distills(distill: Callable[..., Any]) -> None:
    one, two = (
        distill(f"zero3-distill-{size}", f"training.engine={engine}", f"training.micro_batch_size={3 - size}",
                processes=size)
        for size, engine in ((1, "fsdp2"), (2, "zero3"))
    )  # fmt: skip
    two.train()
    one.train()
    losses, others = one.losses(), two.losses()
    assert len(losses) == 6
    for step, (loss, norm) in losses.items():
        assert others[step] == pytest.approx((loss, norm), rel=2e-5 * step)


def test_a_killed_teacher_continues_and_damaged_shards_are_refused(distill: Callable[..., Any]) -> None:
    settings = ("training.distill.top_k=19",)  # distributions of its own
    first = distill("killed-teacher", *settings)
    folders = first.plan.data.root / "teachers"
    known = set(folders.glob("*"))
    first.train(str(BY_TEACHER), "3", expect=-signal.SIGKILL)
    assert not first.layout.checkpoints.exists()
    (folder,) = {*folders.iterdir()} - known
    written = {path: path.read_bytes() for path in folder.glob("train-*")}
    assert len(written) == 3
    second = distill("continued-teacher", *settings, processes=2)
    second.train(str(BY_TEACHER), "-1")
    assert all(path.read_bytes() == content for path, content in written.items())
    assert len([*folder.glob("train-*")]) > len(written)
    assert not [*folder.glob(".*")] or all(first.plan.id in path.name for path in folder.glob(".*"))
    first.train(str(BY_TEACHER), "-1")
    one, two = ({step: loss for step, (loss, _) in run.losses().items()} for run in (first, second))
    assert one == pytest.approx(two, rel=1e-4)

    damaged = min(written)
    content = bytearray(damaged.read_bytes())
    content[1000] ^= 1
    damaged.write_bytes(content)
    third = distill("damaged-teacher", *settings)
    with pytest.raises(AssertionError, match="distributions of pack"):
        third.train(str(BY_TEACHER), "-1")


def test_a_run_killed_in_training_resumes_bit_equal(distill: Callable[..., Any]) -> None:
    settings = ("training.method=lora", "training.checkpoint_every_steps=2", "training.distill.temperature=2")
    whole, killed = (distill(name, *settings) for name in ("distilled-whole", "distilled-killed"))
    whole.train()
    killed.train(str(IN_STEP), "5", "at once", expect=-signal.SIGKILL)
    killed.train()
    losses = whole.losses()
    assert {step: losses[step] for step in (5, 6)} == {step: killed.losses()[step] for step in (5, 6)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_is_its_own_teacher_has_no_divergence_at_first(
    precision: str, distill: Callable[..., Any], finished_run: Any
) -> None:
    run = distill(
        f"own-teacher-{precision}", f"model.weights={finished_run.layout.export}", "model.tokenizer.source=model",
        f"training.precision={precision}", "training.max_steps=1",
    )  # fmt: skip
    run.train()
    (checks,) = run.records(VerificationRecord)
    assert float(checks.checks["divergence from itself"]) < (1e-5 if precision == "fp32" else 1e-2)


def test_the_teacher_is_freed_before_the_student_is_built(
    distill: Callable[..., Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers = []

    def compute(plan: Any, data: Any, world: World, build: Callable[[], Any], report: Any) -> Any:
        def build_watched() -> Any:
            engine = build()
            teachers.append(weakref.ref(engine.model.hf_model.get_input_embeddings().weight))
            return engine

        found = compute_distributions(plan, data, world, build_watched, report)
        assert [each() for each in teachers] == [None]
        return found

    monkeypatch.setattr(trainer, "compute_distributions", compute)
    distill("freed", "training.distill.top_k=7", "training.max_steps=1").train_here(world)


class FewPacks(list[Any]):
    """Packs with the interface of a `PackStore`."""

    sequence_length = 64
    num_targets = np.array([12, 14])

    def read(self, packs: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.stack([self[pack] for pack in packs])


def test_what_is_not_a_number_is_named_by_its_document(world: World, tmp_path: Path) -> None:
    store = FewPacks([pack_of(pack) for pack in draw_documents()])
    split = TeacherSplit(store, tmp_path, "train", VOCABULARY, 5)  # type: ignore[arg-type]
    plan = SimpleNamespace(id="run", recipe=SimpleNamespace(training=SimpleNamespace(micro_batch_size=2)))
    engine = engine_of(model_of(1), world)
    compute = partial(split.compute, engine, plan, world, range(2), 2, writes=True)
    compute()
    assert split.missing() == []
    whole = [each.teacher for each in batches_of(engine, 5, world)]
    stored = torch.from_numpy(split.read([1, 0]))
    expected = torch.cat([each for each in reversed(whole) if each is not None], dim=1)
    assert torch.equal(stored[1], expected[1])
    torch.testing.assert_close(stored[0].view(torch.float32), expected[0].view(torch.float32), rtol=2**-16, atol=0)
    damaged = stored.clone()
    damaged[0, -1, 2] = torch.tensor(float("nan")).view(torch.int32)  # the last label, of the second document
    engine = SimpleNamespace(inference=lambda: nullcontext(lambda **_: damaged))  # type: ignore[assignment]
    compute = partial(split.compute, engine, plan, world, range(2), 2, writes=True)
    with pytest.raises(TrainingError, match="NaN or infinity in document 2 of pack 1 of the split 'train'"):
        compute()


def test_a_teacher_with_another_tokenizer_is_refused_by_the_first_difference() -> None:
    texts = ["select name from users where age > 30", "what is the number of users?"]
    one, same, other = (learn_tokenizer(texts[:number], 300, "chatml") for number in (2, 2, 1))
    check_same_tokenizer(one, same, "teacher")
    with pytest.raises(DataError, match=r"has token \d+ '.*'"):
        check_same_tokenizer(one, other, "teacher")
    same.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    with pytest.raises(DataError, match=r"the teacher's has token \d+ '<\|tool\|>', the model's has not"):
        check_same_tokenizer(one, same, "teacher")
