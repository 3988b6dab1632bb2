"""The number of documents that fit a plan's packs, known before a job is submitted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from malware import generate

from ftkit.cli.terminal.plan_view import plan_facts
from ftkit.config.context import Context
from ftkit.data.prepare import prepare
from ftkit.data.prepared_data import PreparedData
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.launch import inputs
from ftkit.launch.inputs import count_documents
from ftkit.launch.resolve import RunArgs
from ftkit.launch.sweep import expand, find_other_documents, plan_sweep

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.planning.plan import RunPlan

NUM_TRAIN = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of the task: about two tokens per byte of a binary."""
    texts = [text for row in generate(1, 4, 0, smallest=1024, largest=2048)[0] for text in row.values()]
    folder = tmp_path_factory.mktemp("tokenizer")
    learn_tokenizer(texts, 400, "chatml").save_pretrained(folder)
    return folder


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    environment = {"FTKIT_WORKSPACE": str(tmp_path / "w"), "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    return Context(tmp_path, tmp_path / "user", environment)


def rows_file(ctx: Context) -> Path:
    path = ctx.project / "rows.jsonl"
    rows, _ = generate(1, NUM_TRAIN, 0, smallest=1024, largest=2048)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rungs(ctx: Context, tokenizer: Path | str, *overrides: str) -> list[RunPlan]:
    small = (
        "model.weights=random", "model.architecture={num_hidden_layers: 1, vocab_size: 512}",
        "model.tokenizer=" + json.dumps({"source": str(tokenizer)}), "training.global_batch_size=16",
        f"data.source={{kind: files, train: {rows_file(ctx)}}}",
        "data.format={kind: prompt-completion, prompt: '{binary}', completion: '{analysis}'}",
        "evaluation.every_steps=null",
    )  # fmt: skip
    args = RunArgs("olmo3-32b-malware-full", (*small, *overrides), cluster="local", num_nodes=1)
    return plan_sweep(expand(args, ctx), ctx)


LADDER = "training.sequence_length=1024,3328,8192"


def test_a_plan_counts_the_documents_that_preparation_keeps(ctx: Context, tokenizer: Path) -> None:
    plans = rungs(ctx, tokenizer, LADDER)
    planned = [plan.documents for plan in count_documents(plans, {})]
    kept = []
    for plan, found in zip(plans[1:], planned[1:], strict=True):
        assert found is not None
        manifest = PreparedData(prepare(plan, lambda _: None, 1).root).read_manifest()
        kept.append(manifest.num_train_documents)
        assert (found.num_read, found.num_fitting, found.is_complete) == (NUM_TRAIN, kept[-1], False)
    assert planned[0] is not None
    assert planned[0].num_fitting == 0 < kept[0] < kept[1] == NUM_TRAIN
    complete = [plan.documents for plan in count_documents(plans[1:], {})]
    assert [(each.num_read, each.is_complete) for each in complete if each] == [(NUM_TRAIN, True)] * 2
    longer = rungs(ctx, tokenizer, "training.sequence_length=8192,16384")  # of which one is prepared
    assert find_other_documents(count_documents(longer, {})) is None


def test_a_plan_counts_tokens_as_the_model_class_splits_words(ctx: Context, tokenizer: Path) -> None:
    """transformers loads a tokenizer of a Qwen 2 as Qwen2Tokenizer, which splits numbers unlike this tokenizer.json."""
    (tokenizer / "config.json").write_text('{"model_type": "qwen2"}')
    plans = rungs(ctx, tokenizer, "training.sequence_length=3328")
    (found,) = [plan.documents for plan in count_documents(plans, {})]
    kept = PreparedData(prepare(plans[0], lambda _: None, 1).root).read_manifest().num_train_documents
    (tokenizer / "config.json").unlink()
    assert found is not None
    assert found.num_fitting == kept


def test_a_plan_says_what_happens_with_documents_that_do_not_fit(ctx: Context, tokenizer: Path) -> None:
    (ctx.project / "texts.jsonl").write_text('{"text": "short"}\n' + json.dumps({"text": "long " * 2000}) + "\n")
    texts = (
        f"data.source={ctx.project}/texts.jsonl",
        "data.format=auto",
        "data.too_long=auto",
        "training.sequence_length=1024",
    )
    (plan,) = count_documents(rungs(ctx, tokenizer, *texts), {})
    assert plan.documents is not None
    assert (plan.documents.num_read, plan.documents.num_fitting, plan.documents.too_long) == (2, 1, {"split": 1})
    assert "1 of the first 2 documents fit" in str(dict(plan_facts(plan))["documents"])
    assert "1 split" in str(dict(plan_facts(plan))["documents"])
    (unread,) = rungs(ctx, tokenizer, *texts)
    assert "longer ones are split" in str(dict(plan_facts(unread))["documents"])
    (refusing,) = count_documents(rungs(ctx, tokenizer, *texts, "data.too_long=error"), {})
    assert refusing.documents is not None
    assert refusing.documents.too_long == {"error": 1}
    prepare(plan, lambda _: None, 1)
    (prepared,) = count_documents([plan], {})
    assert prepared.documents is not None
    assert (prepared.documents.is_complete, prepared.documents.too_long) == (True, {"split": 1})


def test_a_plan_counts_documents_that_lose_all_their_turns_as_dropped_and_not_as_truncated(
    ctx: Context, tokenizer: Path
) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "long " * 2000), ("assistant", "a"))]
    rows = [{"messages": turns}, {"messages": [{"role": "user", "content": "q"}, turns[1], *turns]}]
    (ctx.project / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"data.source={ctx.project}/chats.jsonl", "data.format=auto", "data.too_long=truncate")
    (plan,) = count_documents(rungs(ctx, tokenizer, *words, "training.sequence_length=1024"), {})
    assert plan.documents is not None
    assert plan.documents.too_long == {"truncate": 1, "drop": 1}
    prepare(plan, lambda _: None, 1)
    (prepared,) = count_documents([plan], {})
    assert prepared.documents is not None
    assert prepared.documents.too_long == plan.documents.too_long


@pytest.mark.parametrize("shares", [True, False])
def test_a_plan_of_pairs_counts_those_whose_sides_fit_a_pack_together(
    ctx: Context, tokenizer: Path, shares: bool
) -> None:
    rows = [{"prompt": "q\n" * num, "chosen": "b", "rejected": "c"} for num in (5, 300, 2000)]
    (ctx.project / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        f"data.source={ctx.project}/pairs.jsonl", "data.format=auto", "data.too_long=drop", "training.objective=dpo",
        "training.method=lora", f"data.share_prompts={json.dumps(shares)}", "training.sequence_length=1024",
        "model.architecture.sliding_window=null", "model.architecture.family=llama",
    )  # fmt: skip
    (plan,) = count_documents(rungs(ctx, tokenizer, *words), {})
    assert plan.documents is not None
    num_fitting = 2 if shares else 1  # only a shared prompt of about 600 tokens fits with both sides
    assert (plan.documents.num_read, plan.documents.num_fitting) == (3, num_fitting)
    assert f"{num_fitting} of the first 3 pairs fit" in str(dict(plan_facts(plan))["documents"])
    prepare(plan, lambda _: None, 1)
    (prepared,) = count_documents([plan], {})
    assert prepared.documents is not None
    assert (prepared.documents.num_read, prepared.documents.num_fitting) == (3, num_fitting)
    assert prepared.documents.longest == plan.documents.longest


@pytest.mark.parametrize("by", ["draw", "hash"])
def test_preparation_and_the_plan_after_it_say_which_validation_documents_are_also_trained_on(
    ctx: Context, tokenizer: Path, by: str
) -> None:
    path = ctx.project / "twice.jsonl"
    path.write_text(rows_file(ctx).read_text() * 2)
    split = f"data.validation={{fraction: 0.5, by: {by}}}"
    (plan,) = rungs(ctx, tokenizer, f"data.source={path}", split, "training.sequence_length=8192")
    reports: list[str] = []
    manifest = PreparedData(prepare(plan, reports.append, 1).root).read_manifest()
    assert manifest.num_validation_documents > 0
    assert (manifest.num_in_both > 0) == (by == "draw")
    (prepared,) = count_documents([plan], {})
    for texts in (reports, prepared.notes):
        (*found,) = (text for text in texts if "also trained on" in text)
        assert all("data.validation.by=hash" in text and str(manifest.num_in_both) in text for text in found)
        assert len(found) == (by == "draw")
    assert "also trained on" not in " ".join(plan.notes)


def test_a_ladder_that_drops_documents_is_warned_about(ctx: Context, tokenizer: Path) -> None:
    warning = find_other_documents(count_documents(rungs(ctx, tokenizer, LADDER), {}))
    assert warning is not None
    assert "olmo3-32b-malware-full-1 0" in warning
    assert f"olmo3-32b-malware-full-3 {NUM_TRAIN}" in warning
    whole = count_documents(rungs(ctx, tokenizer, "training.sequence_length=8192,16384"), {})
    assert find_other_documents(whole) is None
    assert find_other_documents(rungs(ctx, tokenizer, "training.learning_rate=1e-5,2e-5")) is None
    assert find_other_documents(rungs(ctx, tokenizer, "data.source.seed=1,2")) is not None


def test_documents_are_not_counted_without_a_tokenizer_that_can_be_read(ctx: Context, tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    for source in (tmp_path / "damaged", "org/not-in-the-cache"):
        assert [plan.documents for plan in count_documents(rungs(ctx, source, LADDER), {})] == [None] * 3


def test_long_documents_are_counted_only_up_to_a_limit(
    ctx: Context, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_CHARACTERS", 9000)
    (plan, _) = count_documents(rungs(ctx, tokenizer, "training.sequence_length=8192,16384"), {})
    assert plan.documents is not None
    assert 0 < plan.documents.num_read < NUM_TRAIN


def test_a_plan_says_what_prompts_computed_once_save(ctx: Context, tokenizer: Path) -> None:
    for name, words in (("long", ("a long prompt " * 20, "yes", "no")), ("short", ("short", "yes " * 90, "no " * 90))):
        columns = dict(zip(("prompt", "chosen", "rejected"), words, strict=True))
        rows = [columns | {"prompt": f"{columns['prompt']} {number}"} for number in range(8)]
        (ctx.project / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pairs = (
            f"data.source={ctx.project}/{name}.jsonl", "data.format=preferences", "training.objective=orpo",
            "evaluation.generation=null", "training.sequence_length=1024",
            "model.architecture={family: llama, sliding_window: null, full_attention_every: 1}",
        )  # fmt: skip
        (plan,) = count_documents(rungs(ctx, tokenizer, *pairs), {})
        manifest = PreparedData(prepare(plan, lambda _: None, 1).root).read_manifest()
        (prepared,) = count_documents([plan], {})
        assert plan.documents is not None
        assert prepared.documents is not None
        if name == "short":
            assert (plan.documents.saved, prepared.documents.saved, manifest.num_shared_tokens) == (None, None, 0)
            continue
        share = manifest.num_shared_tokens / (manifest.num_shared_tokens + manifest.num_train_tokens)
        assert share > 0.4
        assert [plan.documents.saved, prepared.documents.saved] == pytest.approx([share, share], abs=0.05)
        assert f"{share:.0%} fewer tokens" in str(dict(plan_facts(prepared))["prompts"])
