"""Check a user's script: facts about the first steps of each rank in, findings out.

`ftkit.train.step_watch` observes the facts. A check yields findings with a change that fixes them, or raises
`NotCheckedError` with the reason why it can't be made.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any, Final

from ftkit.errors import plural
from ftkit.runs.script_facts import ParamFacts, RankFacts

ADAPTER: Final = re.compile(r"(^|[._])lora_")
_ADAPTER_PAIR: Final = re.compile(r"lora_(embedding_)?[AB](?=[._]|$)")
_EXPERT: Final = re.compile(r"(?<=experts\.)\d+")
_SAME: Final = 1.03  # sums of weights within this ratio are equal
_DIFFERENT: Final = 1.1  # weights of targets differ from this ratio on
_MOST: Final = 0.9
_HALF: Final = 0.5
_FEWEST: Final = 8  # minimum targets that show a shift
_SHOWN: Final = 3  # names in a finding


@dataclass(frozen=True)
class Finding:
    """A bug in the script: its description, its place, and a change that fixes it."""

    check: str
    what: str
    fix: str


@dataclass(frozen=True)
class Verdict:
    findings: list[Finding]
    passed: list[str]
    not_checked: dict[str, str]  # why, by the name of the check
    seconds: float


class NotCheckedError(Exception):
    """A check can't be made; the message is the reason."""


Ranks = Sequence[RankFacts]
Result = Iterator[tuple[str, str]]
CHECKS: Final[dict[str, Callable[[Ranks], Result]]] = {}


def judge(ranks: Ranks) -> Verdict:
    """Apply all checks to the facts of the ranks, those of rank 0 first."""
    verdict = Verdict([], [], {}, max(rank.seconds for rank in ranks))
    errors = [rank.error for rank in ranks if rank.error]
    for name, check in CHECKS.items():
        found: list[Finding] = []
        try:
            _need(not errors, *errors[:1])
            _need(ranks[0].num_steps > 0, "no optimizer step was seen")
            found.extend(Finding(name, *each) for each in check(ranks))
        except NotCheckedError as reason:
            if not found:
                verdict.not_checked[name] = str(reason)
                continue
        verdict.findings.extend(found)
        verdict.passed.extend([] if found else [name])
    return verdict


def _check(name: str) -> Callable[[Callable[[Ranks], Result]], None]:
    return partial(CHECKS.__setitem__, name)


def _need(condition: object, reason: str = "") -> None:
    if not condition:
        raise NotCheckedError(reason)


def _names(params: Sequence[ParamFacts]) -> str:
    names = [param.name for param in params]
    return ", ".join(names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], f"… {names[-1]}"])


def _merged(ranks: Ranks) -> list[ParamFacts]:
    """Merge the facts of all ranks into the parameters of rank 0, because ranks can hold different shards."""
    others = [{param.name: param for param in rank.params} for rank in ranks]
    keys = ("has_received", "is_nonzero", "is_nonfinite", "has_changed", "is_called", "in_optimizer")
    same = {param.name: [each[param.name] for each in others if param.name in each] for param in ranks[0].params}
    merged: list[dict[str, Any]] = [{key: any(getattr(o, key) for o in each) for key in keys} for each in same.values()]
    return [replace(param, **values) for param, values in zip(ranks[0].params, merged, strict=True)]


def _without_idle_experts(params: Sequence[ParamFacts]) -> list[ParamFacts]:
    """Leave out experts without a token if other experts of their layer had one."""
    busy = {_EXPERT.sub("", param.name) for param in params if param.is_nonzero and _EXPERT.search(param.name)}
    return [param for param in params if param.is_nonzero or _EXPERT.sub("", param.name) not in busy]


@_check("gradients")
def _check_gradients(ranks: Ranks) -> Result:
    trained = _without_idle_experts([param for param in _merged(ranks) if param.is_trained])
    adapters = [param for param in trained if ADAPTER.search(param.name)]
    if missing := [p for p in trained if not p.has_received and (p.is_called or p in adapters)]:
        kind = "adapter matrices" if all(param in adapters for param in missing) else "parameters to train"
        of = adapters if kind.startswith("adapter") else trained
        fix = "Look for no_grad(), detach(), kernels that bypass a module, and checkpoint(use_reentrant=True)."
        yield f"{len(missing):,} of {len(of):,} {kind} received no gradient: {_names(missing)}.", fix
    if bad := [param for param in trained if param.is_nonfinite]:
        fix = "Look for rows without targets (0/0), fp16 overflow, or a mask of -inf for a whole row."
        yield f"Gradients of {plural(len(bad), 'parameter')} are NaN or infinite: {_names(bad)}.", fix


@_check("zero gradients")
def _check_zero_gradients(ranks: Ranks) -> Result:
    received = [p for p in _merged(ranks) if p.is_trained and p.has_received and p.num_dims > 1]
    pairs = defaultdict(list)
    for param in received:
        pairs[_ADAPTER_PAIR.sub("", param.name)].append(param)
    starts = [param for param in received if param.began_zero and not ADAPTER.search(param.name)]
    zero = [param for param in _without_idle_experts(received) if not param.is_nonzero]
    _need(not zero or not starts, f"{_names(starts)} began at zero, and held back the gradients of others")
    zero = [p for p in zero if not any(o.was_zero for o in pairs[_ADAPTER_PAIR.sub("", p.name)] if o is not p)]
    if zero:
        fix = "The loss does not depend on them: check what their output is multiplied with, and that it is used."
        yield f"{len(zero):,} of {len(received):,} matrices only received gradients of zero: {_names(zero)}.", fix


@_check("optimizer")
def _check_optimizer(ranks: Ranks) -> Result:
    _need(not ranks[0].has_masters, "the optimizer holds copies of the parameters")
    trained = [param for param in _merged(ranks) if param.is_trained and param.is_nonzero]
    outside = [param for param in trained if not param.in_optimizer]
    if outside and len(outside) == len(trained):
        what = f"The optimizer's {plural(ranks[0].num_others, 'parameter')} are not the model's, which does not change."
        yield what, "Create the optimizer after the model is moved, wrapped, sharded, or resized."
    elif outside:
        what = f"{plural(len(outside), 'parameter')} received gradients but are in no optimizer: {_names(outside)}."
        yield what, "Give them to the optimizer, or freeze them with requires_grad_(False)."
    if ranks[0].is_untied:
        what = "The configuration ties the output layer to the embedding, but they are two tensors that move apart."
        yield what, "Call model.tie_weights() after loading and wrapping, or set tie_word_embeddings=False."


@_check("zero_grad")
def _check_zero_grad(ranks: Ranks) -> Result:
    facts = ranks[0]
    can_look = any(call.step and call.backward for call in facts.calls) and not facts.has_masters
    _need(can_look, "no second step of the model's own gradients was seen")
    if facts.keeps_gradients:
        yield "Gradients of step 1 are added to those of step 2.", "Call optimizer.zero_grad() in each step."
    elif facts.loses_gradients and not facts.moves_weights:
        what = "Gradients are cleared between the micro-batches of a step: only the last one trains."
        yield what, "Call optimizer.zero_grad() after optimizer.step(), not for each micro-batch."


@_check("adapters")
def _check_adapters(ranks: Ranks) -> Result:
    params = ranks[0].params
    adapters = [param for param in params if ADAPTER.search(param.name)]
    _need(adapters, "the model has no adapters")
    if base := [param for param in params if ".base_layer." in param.name and param.is_trained and param.in_optimizer]:
        what = f"The weights below the adapters train too: {plural(len(base), 'base layer')}, {_names(base)}."
        yield what, "Don't set requires_grad on the whole model after get_peft_model()."
    if not any(param.is_trained for param in adapters):
        what = f"All {len(adapters):,} adapter matrices are frozen: {_names(adapters)}."
        yield what, "Load the adapter with PeftModel.from_pretrained(…, is_trainable=True)."


@_check("frozen parameters")
def _check_frozen_parameters(ranks: Ranks) -> Result:
    frozen, names = [param for param in ranks[0].params if not param.is_trained], ranks[0].statistics
    _need(frozen, "no parameter is frozen")
    if changed := [param for param in frozen if param.has_changed]:
        fix = "Leave them out of the optimizer, whose weight decay moves them, and don't merge adapters while training."
        yield f"{plural(len(changed), 'frozen parameter')} changed: {_names(changed)}.", fix
    if names:
        what = f"Running statistics of {plural(len(names), 'frozen normalization')} changed: {names[0]}."
        yield what, "Call eval() on frozen modules after model.train()."


@_check("rounding")
def _check_rounding(ranks: Ranks) -> Result:
    facts = ranks[0]
    _need(not facts.has_masters and not facts.corrects_rounding, "the optimizer keeps copies or corrects rounding")
    seen = [param for param in facts.params if param.rounded is not None and param.num_dims > 1]
    _need(seen, "no step had gradients and a learning rate above 0")
    lost = {param.name: param.rounded for param in seen if param.rounded and param.rounded > _HALF}
    if len(lost) * 4 >= len(seen):
        what = f"Updates are below half a unit in the last place: a step left {fmean(lost.values()):.0%} of the "
        what += f"elements of {len(lost):,} matrices as they were ({next(iter(lost))}, …)."
        yield what, "Keep trained weights in fp32 and compute under autocast, or round stochastically."


@_check("learning rate")
def _check_learning_rate(ranks: Ranks) -> Result:
    facts = ranks[0]
    if len(facts.rates) > 1 and not any(facts.rates):
        fix = "Check the scheduler's warmup, its number of steps, and that it belongs to this optimizer."
        yield f"The learning rate was 0 in the first {len(facts.rates)} steps.", fix
    _need(facts.schedulers, "no scheduler of torch was found")
    num_backwards = max(call.backward for call in facts.calls)
    for num_steps, is_of_optimizer in facts.schedulers:
        if not is_of_optimizer:
            what = "The scheduler changes the learning rate of an optimizer that does not step."
            yield what, "Create the scheduler with the optimizer that trains."
        # accelerate's scheduler steps once per process.
        elif num_steps == num_backwards > facts.num_steps and num_steps != facts.num_steps * facts.world_size:
            what = f"The scheduler stepped {num_steps} times in {plural(facts.num_steps, 'optimizer step')}: "
            yield what + "once for each micro-batch.", "Call scheduler.step() after optimizer.step() only."


def _counts(ranks: Ranks) -> Counter[str]:
    """Sum what was counted in the losses of all micro-batches."""
    counts = [Counter(call.counts) for rank in ranks for call in rank.calls if call.counts]
    _need(counts, "neither logits with gradients nor labels of tokens were seen")
    return sum(counts, Counter())


@_check("targets")
def _check_targets(ranks: Ranks) -> Result:
    n = _counts(ranks)
    if n["empty micro-batches"] or n["empty rows"] * 2 >= n["rows"]:
        what = f"{n['empty rows']} of {plural(n['rows'], 'row')} have no target: nothing in them influences the loss."
        yield what, "Check the response template that labels are masked by, and that truncation keeps completions."
    for key, count in n.items():
        if key.startswith("masked by ") and count > max(1, n["targets"] * (_SAME - 1)):
            name = key.removeprefix("masked by ")
            what = f"{count:,} of {n['targets']:,} targets are tokens that '{name}' excludes, such as those of prompts."
            yield what, f"Compute the loss with '{name}', or set these labels to -100."
    if n["padding"]:
        fix = "Set the labels of padding to -100: where attention_mask is 0, but for the end of the sequence."
        yield f"{n['padding']:,} of {n['targets']:,} targets are padding.", fix


@_check("shift")
def _check_shift(ranks: Ranks) -> Result:
    n = _counts(ranks)
    _need(n["compared"] >= _FEWEST, f"fewer than {_FEWEST} targets can be compared with the input")
    same, following, second = (n[key] / n["compared"] for key in ("same token", "next token", "second token"))
    _need(max(same, following, second) > _HALF, "targets are not tokens of the input")
    if second > _MOST and following < _HALF:
        what = "The labels are shifted twice: the target of a position is the token two places later."
        yield what, "Shift them in the data or in the loss: transformers' models do so themselves."
    elif same > _MOST and following < _HALF:
        what = "The labels are not shifted: the target of a position is its own token, which the model sees."
        yield what, "Compare logits[:, :-1] with labels[:, 1:]."


@_check("ends of sequences")
def _check_ends_of_sequences(ranks: Ranks) -> Result:
    n = _counts(ranks)
    if n["double beginnings"]:
        what = f"{plural(n['double beginnings'], 'row')} begin with two beginning-of-sequence tokens."
        yield what, "The chat template has one already: tokenize with add_special_tokens=False."
    _need(n["ends"], "no end-of-sequence token follows a target, or the configuration has none")
    if n["ends"] > 1 and not n["trained ends"]:
        what = f"The model does not learn to stop: none of {n['ends']} end-of-sequence tokens is a target."
        yield what, "Use another token for padding, or mask labels by attention_mask, not by token."


@_check("accumulation")
def _check_accumulation(ranks: Ranks) -> Result:
    steps = defaultdict(list)
    for rank in ranks:
        for call in (call for call in rank.calls if call.backward):
            steps[rank.rank, call.step].append(call)
    backwards = {key: len({call.backward for call in calls}) for key, calls in steps.items()}
    _need(any(count > 1 for count in backwards.values()), "a step has one micro-batch")
    _need(not ranks[0].moves_weights, "the weights change between the backward passes of a step")
    weighed = []
    for key, calls in steps.items():
        found = [(call.counts["targets"], call.weight) for call in calls if call.counts and call.weight]
        weighed += [found] if len(found) == len(calls) == backwards[key] > 1 else []
    _need(weighed, "the gradient of the logits is not that of a cross entropy")
    for found in weighed[:1]:
        sums, counts, weights = [n * w for n, w in found], [n for n, _ in found], [w for _, w in found]
        ratio = max(weights) / min(weights)
        if min(max(counts) / min(counts), ratio) > _DIFFERENT and max(sums) < _SAME * min(sums):
            what = f"Each micro-batch is averaged by itself: a target of one counts {ratio:.1f} times as much as that "
            what += f"of another, because micro-batches have {min(counts):,} to {max(counts):,} targets."
            yield what, "Divide the summed loss by the targets of all micro-batches of a step (num_items_in_batch)."
    size, total = fmean(map(len, weighed)), fmean(sum(n * w for n, w in found) for found in weighed)
    if 1 / _SAME < total / size < _SAME:
        what = f"The gradient is {size:g} times too large: the loss is not divided by the micro-batches of a step."
        yield what, "Divide the loss by the number of micro-batches, or by the targets of all of them."
    elif 1 / _SAME < total * size < _SAME:
        what = f"The gradient is {size:g} times too small: the loss is divided by the micro-batches of a step twice."
        yield what, "accelerator.backward() and the Trainer divide the loss already."


@_check("modes")
def _check_modes(ranks: Ranks) -> Result:
    count, calls = plural(ranks[0].num_dropouts, "dropout module"), ranks[0].calls
    if ranks[0].num_dropouts and any(call.backward and not call.is_training for call in calls):
        fix = "Call model.train() before the loop and after each evaluation, or set dropout to 0."
        yield f"The model trains in evaluation mode: {count} are inactive.", fix
    if ranks[0].num_dropouts and any(call.is_training and not call.has_grad for call in calls):
        fix = "Call model.eval() before an evaluation, and model.train() after it."
        yield f"A call without gradients, such as an evaluation, ran in training mode: {count} are active.", fix


def _check_replay(name: str, key: str, what: str, fix: str, missing: str) -> None:
    def check(ranks: Ranks) -> Result:
        replay = ranks[0].replay
        value = replay and getattr(replay, key)
        _need(replay, ranks[0].replay_error)
        _need(value is not None, missing)
        if key in {"later_documents", "earlier_tokens"}:
            _need(replay and (replay.effect or 0) > replay.bound, "a changed token has no effect on the logits")
        if key == "earlier_tokens":
            n = _counts(ranks)
            _need(n["next token"] > n["compared"] * _HALF, "the loss is not that of next tokens")
        if replay and value and value > replay.bound:
            yield f"{what}: a difference of {value:.2g}, {replay.bound:.1g} of them from rounding.", fix

    CHECKS[name] = check


_check_replay(
    "evaluation", "evaluation", "In evaluation mode, two calls with the same input differ",
    "Pass training=self.training to functional.dropout(), or use nn.Dropout.", "the output has no tensor",
)  # fmt: skip
_check_replay(
    "documents", "later_documents", "A change in a packed document moves logits of the next",
    "Use flash attention; in transformers, use_cache=False and no attention_mask; or don't pack.",
    "no position_ids or cu_seqlens mark packed documents",
)  # fmt: skip
_check_replay(
    "causality", "earlier_tokens", "The model sees tokens that it predicts: a change moves earlier logits",
    "Check the attention mask: is_causal was lost, or the mask is inverted.", "the input is not a row of tokens",
)  # fmt: skip
_check_replay(
    "influence of padding", "padding", "A change of padding moves logits of the tokens",
    "Pass attention_mask to the model.", "the first batch has no padding",
)  # fmt: skip


def _need_all(ranks: Ranks) -> None:
    _need(ranks[0].world_size > 1, "there is one process")
    missing = ranks[0].world_size - len(ranks)
    _need(not missing, f"{plural(missing, 'rank')} reported nothing")
    _need(not ranks[0].splits_samples, "several ranks may work on one sample")


@_check("samples of ranks")
def _check_samples_of_ranks(ranks: Ranks) -> Result:
    _need_all(ranks)
    rows = [{row for call in rank.calls if call.backward for row in call.rows} for rank in ranks]
    for one, other in combinations(range(len(ranks)), 2):
        if rows[one] and len(rows[one] & rows[other]) >= _MOST * len(rows[one]):
            fix = "Divide the data by rank: DistributedSampler, accelerator.prepare(loader), split_dataset_by_node()."
            yield f"Ranks {one} and {other} read the same {plural(len(rows[one]), 'sample')}.", fix
            break


@_check("replicas")
def _check_replicas(ranks: Ranks) -> Result:
    _need_all(ranks)
    own = {param.name: param.digest for param in ranks[0].params if param.is_comparable}
    _need(own, "the parameters are sharded")
    for rank in ranks[1:]:
        if differing := [param.name for param in rank.params if own.get(param.name, param.digest) != param.digest]:
            what = f"{plural(len(differing), 'parameter')} differ between ranks 0 and {rank.rank}: {differing[0]}."
            fix = "Wrap the model in DistributedDataParallel, call it and not its .module, and seed all ranks equally."
            yield what, fix
            break
