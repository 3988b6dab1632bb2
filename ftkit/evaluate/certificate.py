"""Certify that an engine's server matches the trained model in prompts, log-probabilities, and ends of turns.

The reference is the export in transformers in fp32, which `verify_export` has compared with the trained model. Bounds
are multiples of the difference between bf16 and fp32 in transformers, on the same tokens.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ftkit.data.cases import encode_text, prompt_of, read_evaluation_rows, renderer_of
from ftkit.data.completion_metrics import read_calls
from ftkit.data.conversations import Conversation, Message
from ftkit.data.limits import run_in_fork
from ftkit.data.preferences import conversations_of, with_pictures
from ftkit.data.template_probes import shapes
from ftkit.errors import DataError, plural
from ftkit.evaluate.engines import ENGINES, LARGEST_BIAS, Engine, EngineError, RefusedError, Setup, serve
from ftkit.evaluate.served_model import takes_vllm
from ftkit.evaluate.source import ModelFolder
from ftkit.evaluate.verify_export import CLOSER_THAN_BASE, base_of, loaded
from ftkit.models.config_json import text_part
from ftkit.models.folder import read_model_config
from ftkit.runs.certificate import Check, EngineResult
from ftkit.train.components.export_record import ExportRecord

if TYPE_CHECKING:
    from ftkit.planning.plan import RunPlan

_TIMES_NOISE = 3.0
"""Largest error of log-probabilities, in root-mean-square differences between bf16 and fp32 in transformers."""
_NUM_ROWS = 4
_NUM_COMPLETIONS = 8
_COMPLETION_TOKENS = 12
_CALL_TOKENS = 128
_END_TOKENS = 4  # maximum generated tokens in a request whose first token must end the turn
_LONG_TOKENS = 448
_MAX_WINDOW = 8192  # longest sliding window that a prompt exceeds
_EXPLAINED = 0.3  # largest fraction of an error that may remain after its explanation
_TEXTS = (
    "", " ", "Grüße, 世界! नमस्ते 🙂👩‍👩‍👧", "שלום عليكم", "a\tb\n\n\n  c\r\nd", "{{ messages }} {% raw %} <|x|> [INST]",
    "1234567890 3.14159 -42 1e-9", "def f(x):\n\treturn [x**2 for _ in range(3)]  # ok", "ﬁ é é Å Ⅷ ½",
    '{"a": [1, "2", null]}', "<b>x &amp; y</b>", "don't  can't  I'LL", "A" * 200,
)  # fmt: skip
_PROPERTIES = {
    "rope_parameters": "the scaling of rotary embeddings is not applied",
    "sliding_window": "the sliding window is not applied",
    "final_logit_softcapping": "logits are not capped",
}
_NAME_PART = re.compile(r"[^.]+(?:\.\d+)?")  # a part of a module's name, with its number if it is one of a list


@dataclass(frozen=True)
class _Sample:
    """A text with an engine's log-probabilities of its last tokens."""

    name: str
    tokens: list[int]
    logprobs: list[float]
    is_completion: bool


def held_out(plan: RunPlan) -> dict[str, Conversation]:
    """Return the prompts of a run's first validation rows; none if its data was removed, or has no conversations."""
    found, data = {}, plan.recipe.data
    with suppress(DataError):
        for _, row in read_evaluation_rows(plan, None, _NUM_ROWS):
            prompt = with_pictures(prompt_of(row.columns, data.format), row.columns, data)
            (found[f"validation row {row.where}"],) = conversations_of(prompt)
    return found


def chosen_engines(names: Sequence[str], folder: Path) -> list[str]:
    """Return the engines that serve an export: `auto` is vLLM on GPUs if it is installed; transformers is no server."""
    if "auto" in names and takes_vllm(ModelFolder(folder, str(folder)), "auto"):
        return ["vllm"]
    return [name for name in names if name in ENGINES]


def certify(  # noqa: PLR0913, PLR0917 - what the user gives
    name: str, folder: Path, record: ExportRecord, report: Callable[[str], None], options: tuple[str, ...], python: str,
    llama_cpp: Path | None, url: str, rows: Mapping[str, Conversation],
) -> EngineResult:  # fmt: skip
    """Serve an export with an engine, and compare it with the trained model, also on `rows`. See `Setup`."""
    base = folder if record.kind == "model" else base_of(record)
    with tempfile.TemporaryDirectory(prefix="ftkit-") as scratch:
        setup = Setup(folder, base, record.precision, options, python, llama_cpp, Path(scratch), url=url)
        engine, found = ENGINES[name](setup), ""
        prompts, samples = _Prompts(AutoTokenizer.from_pretrained(folder), base, rows), list[_Sample]()
        try:
            with serve(engine, prompts.length, report):
                found = engine.version()
                report(f"comparing {plural(len(prompts.expected), 'conversation')} with {name} {found}")
                checks = [_compare_prompts(engine, prompts, samples)]
                for number, prompt in enumerate(record.prompts, 1):
                    scores = engine.logprobs(prompt.tokens)
                    samples.append(_Sample(f"fixed prompt {number}", list(prompt.tokens), scores, is_completion=False))
                checks.append(_compare_ends(engine, record, prompts))
                checks += _compare_calls(engine, prompts, [name for name in rows if rows[name].tools])
        except EngineError as error:
            checks = [Check("serves", f"{error.what}: {error.last_line}".removesuffix(": "), passed=False)]
        else:
            report("computing the same log-probabilities in fp32, and in bf16, with transformers")
            checks += _Comparison(setup, record, samples, prompts.tokenizer, report).checks()
    return EngineResult(name, found, engine.dtype, options, tuple(checks))


# --- Prompts -------------------------------------------------------------------------------------


class _Prompts:
    """Conversations that the chat template accepts and that end before an assistant turn, with their training tokens.

    Conversations with pictures are only counted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, base: Path, rows: Mapping[str, Conversation]) -> None:
        self.tokenizer = tokenizer
        self._renderer = renderer_of(tokenizer, str(base), {}) if tokenizer.chat_template else None
        config = text_part(read_model_config(base))
        window, longest = config.get("sliding_window") or 0, config.get("max_position_embeddings") or _MAX_WINDOW
        wanted = max(_LONG_TOKENS, window + 64) if isinstance(window, int) and window < _MAX_WINDOW else _LONG_TOKENS
        words = tokenizer(" ".join(map(str, range(wanted))), add_special_tokens=False)["input_ids"]
        long = tokenizer.decode(words[: min(wanted, longest - 128)])
        special = next(iter(tokenizer.all_special_tokens), "")
        texts = {name: each for name, each in rows.items() if not any(turn.pictures for turn in each.messages)}
        self.num_with_pictures = len(rows) - len(texts)
        self.conversations = {**texts, "long": _asked(str(long)), **_conversations(special)}
        rendered = dict(zip(self.conversations, self._tokens_of(*self.conversations.values()), strict=True))
        self.length = min(longest, max(len(each or ()) for each in rendered.values()) + _LONG_TOKENS)
        room = self.length - _COMPLETION_TOKENS
        self.expected = {name: tokens for name, tokens in rendered.items() if tokens and len(tokens) <= room}

    def _tokens_of(self, *conversations: Conversation) -> list[list[int] | None]:
        renderer = self._renderer
        if renderer is None:
            return [None] * len(conversations)
        texts = run_in_fork(renderer, lambda: [renderer.try_render(each, open_turn=True) for each in conversations])
        return [None if text is None else encode_text(self.tokenizer, text) for text in texts]

    def why(self, name: str, found: list[int]) -> str:
        """Return the explanation for a prompt's tokens that differ from training."""
        conversation, expected = self.conversations[name], self.expected[name]
        bos = self.tokenizer.bos_token_id
        system = tuple(turn for turn in conversation.messages if turn.role == "system")
        others = tuple(turn for turn in conversation.messages if turn.role != "system")
        without_tools, without_system, system_last = self._tokens_of(
            replace(conversation, tools=()), replace(conversation, messages=others),
            replace(conversation, messages=(*others, *system)),
        )  # fmt: skip
        alternatives = {
            "BOS twice: the server adds one to that of the chat template": [bos, *expected],
            "BOS is missing": expected[1:] if expected[0] == bos else None,
            "an end token is appended to the prompt": [*expected, self.tokenizer.eos_token_id],
            "the tools are left out": without_tools,
            "the system turn is left out": without_system,
            "the system turn is in another place": system_last,
        }
        if self.tokenizer.decode(found) == self.tokenizer.decode(expected):
            return "the same text in other tokens: another vocabulary, or special tokens are read differently"
        return next((why for why, tokens in alternatives.items() if tokens == found), "another chat template")


def _asked(text: str) -> Conversation:
    return Conversation((Message("user", text),))


def _conversations(special_token: str) -> dict[str, Conversation]:
    """Return conversations of many shapes and contents that end before an assistant turn."""
    found = {f"text {number}": _asked(text) for number, text in enumerate(_TEXTS)}
    for shape, conversation in shapes(special_token).items():
        turns = conversation.messages
        while turns and turns[-1].role == "assistant":
            turns = turns[:-1]
        found[shape[: len(turns)]] = replace(conversation, messages=turns)
    tools = found["uct"].tools
    return found | {"tools": replace(found["u"], tools=tools), "system and tools": replace(found["su"], tools=tools)}


def _compare_prompts(engine: Engine, prompts: _Prompts, samples: list[_Sample]) -> Check:
    """Compare the tokens of prompts with those of training; add completions to `samples`."""
    same, refused, wrong = 0, [], ""
    for name, expected in prompts.expected.items():
        is_completed = len(samples) < _NUM_COMPLETIONS
        try:
            reply = engine.chat(prompts.conversations[name], _COMPLETION_TOKENS if is_completed else 1)
        except RefusedError as error:
            refused.append(f"'{name}': {error}")
            continue
        found = reply.prompt
        if is_completed and reply.logprobs:
            samples.append(
                _Sample(f"the completion of '{name}'", [*found, *reply.tokens], reply.logprobs, is_completion=True)
            )
        if found == expected:
            same += 1
        elif not wrong:
            place = next(number for number, (one, other) in enumerate(zip_longest(found, expected)) if one != other)
            texts = [repr(prompts.tokenizer.decode(each[place : place + 1])) for each in (found, expected)]
            wrong = f"; token {place + 1} of '{name}' is {texts[0]}, in training {texts[1]}: {prompts.why(name, found)}"
    text = f"{same} of {plural(len(prompts.expected), 'conversation')} have the tokens of training{wrong}"
    text += f"; it refuses {len(refused)}, such as {refused[0]}" if refused else ""
    if prompts.num_with_pictures:
        text += f"; left out: {plural(prompts.num_with_pictures, 'row')} with pictures"
    return Check("prompts", text, passed=not wrong and same >= len(refused))


def _compare_ends(engine: Engine, record: ExportRecord, prompts: _Prompts) -> Check:
    """Force the engine to generate only an end token; the first one must end the turn."""
    if not prompts.expected:
        return Check("end of turn", "not compared: there is no chat template", passed=True)
    asked = prompts.conversations[min(prompts.expected, key=lambda name: len(prompts.expected[name]))]

    def stops(end: int) -> bool:
        return engine.chat(asked, _END_TOKENS, logit_bias={str(end): LARGEST_BIAS}).stopped

    missed = [str(end) for end in record.end_tokens if not stops(end)]
    text = f"it does not stop at token {', '.join(missed)} of " if missed else "it stops at "
    return Check("end of turn", text + ", ".join(map(str, record.end_tokens)), passed=not missed)


def _compare_calls(engine: Engine, prompts: _Prompts, rows: Sequence[str]) -> list[Check]:
    """Compare the tool calls that the chat endpoint returns with those in its generated text."""
    asked = [name for name in rows if name in prompts.expected] if engine.parses_calls else []
    num_calls, wrong = 0, []
    for name in asked:
        reply = engine.chat(prompts.conversations[name], _CALL_TOKENS)
        calls = read_calls(prompts.tokenizer.decode(reply.tokens)) if reply.stopped else []
        num_calls += len(calls)
        if calls and calls != reply.calls:
            wrong.append(f"{calls} of '{name}' as {reply.calls or 'text'}")
    if not num_calls:
        return []
    text = f"the endpoint returns {wrong[0]}" if wrong else f"{plural(num_calls, 'call')} as generated"
    return [Check("tool calls", text, passed=not wrong)]


# --- Log-probabilities ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Comparison:
    """Log-probabilities of an engine, compared with the same model in transformers in fp32 and bf16."""

    setup: Setup
    record: ExportRecord
    samples: list[_Sample]
    tokenizer: PreTrainedTokenizerBase
    report: Callable[[str], None]

    def checks(self) -> list[Check]:
        found = torch.tensor([score for sample in self.samples for score in sample.logprobs])
        is_completion = torch.tensor([sample.is_completion for sample in self.samples for _ in sample.logprobs])
        adapted = self.record.kind == "adapters"
        with loaded(self.setup.folder, self.record, self.report) as (model, _):
            given, best, lse = self._scores(model)
            base = given
            if adapted:
                with model.disable_adapter():
                    base = self._scores(model)[0]
        with loaded(self.setup.folder, self.record, self.report, dtype=torch.bfloat16) as (model, _):
            bound = _TIMES_NOISE * _rms(self._scores(model)[0] - given)
        error, gap = found - given, _rms((best - given)[is_completion])
        if adapted:
            bound = min(bound, CLOSER_THAN_BASE * _rms(base - given))
        text = f"differ by {_rms(error):.2g}, bound {bound:.2g}"
        if not (is_close := _rms(error) <= bound):
            text += f"; first at {self._first(error, bound)}: {self._why(found, given, base, lse)}"
        scores = Check("log-probabilities", f"of {plural(len(found), 'token')} {text}", passed=is_close)
        text = f"are {gap:.2g} less probable than the most probable ones, bound {bound:.2g}"
        return [scores, Check("greedy completions", text, passed=gap <= bound)]

    @torch.no_grad()
    def _scores(self, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each token's log-probability, the largest one at its position, and the log-sum-exp of the logits."""
        rows = []
        for sample in self.samples:
            tokens, num_scores = torch.tensor([sample.tokens]), len(sample.logprobs)
            logits = model(input_ids=tokens, use_cache=False).logits[0, -num_scores - 1 : -1].float()
            lse, given = logits.logsumexp(-1), logits.gather(1, tokens[0, -num_scores:, None])[:, 0]
            rows.append(torch.stack([given - lse, logits.amax(-1) - lse, lse]))
        given, best, lse = torch.cat(rows, 1)
        return given, best, lse

    def _first(self, error: torch.Tensor, bound: float) -> str:
        place = int((error.abs() > min(bound, float(error.abs().max()) / 2)).nonzero()[0])
        for sample in self.samples:
            if place < len(sample.logprobs):
                break
            place -= len(sample.logprobs)
        place += len(sample.tokens) - len(sample.logprobs)
        return f"token {place + 1} of {sample.name}, {self.tokenizer.decode(sample.tokens[place])!r}"

    def _why(self, found: torch.Tensor, given: torch.Tensor, base: torch.Tensor, lse: torch.Tensor) -> str:
        """Return the explanation for most of the error: a change of the model that reproduces the engine's values."""
        error, effect, most = found - given, base - given, _EXPLAINED * _rms(found - given)
        if _rms(found - base) <= most:
            return "the adapters are not applied"
        if self.record.kind == "adapters" and (lost := self._lost_adapters(found, most)):
            return f"the adapters of {lost} are not loaded"
        if float(error @ effect) > _EXPLAINED * float(error.norm() * effect.norm()) > 0:
            return "the adapters are applied only in part"
        padding = (-error).expm1() * lse.exp()  # number of tokens with logit 0 that would explain each error
        num_padded = float(padding.median())
        if num_padded > 1 and float(padding.std()) <= _EXPLAINED * num_padded:
            return f"the vocabulary is padded by {num_padded:.0f} tokens, whose logits are 0"
        for why, config in _changed_configs(self.setup.base):
            with suppress(ValueError), loaded(self.setup.folder, self.record, self.report, config=config) as (model, _):
                if _rms(found - self._scores(model)[0]) <= most:
                    return why
        return "other weights, a lower precision, or an operation that the engine computes differently"

    def _lost_adapters(self, found: torch.Tensor, most: float) -> str:
        """Return the layer or modules whose missing adapters reproduce the engine's values; empty if there are none."""
        with loaded(self.setup.folder, self.record, self.report) as (model, _):
            layers: dict[str, Any] = {name: each for name, each in model.named_modules() if hasattr(each, "lora_A")}
            parts = dict.fromkeys(part for name in layers for part in _NAME_PART.findall(name))
            # Among parts with the same name, keep the innermost.
            named = {tuple(name for name in layers if part in _NAME_PART.findall(name)): part for part in parts}
            for names, part in named.items():
                lost = [layers[name] for name in names]
                for each in lost:
                    each.enable_adapters(enabled=False)
                if _rms(found - self._scores(model)[0]) <= most:
                    return f"{part} ({len(lost)} of {plural(len(layers), 'module')})"
                for each in lost:
                    each.enable_adapters(enabled=True)
        return ""


def _rms(values: torch.Tensor) -> float:
    found = float(values.square().mean().sqrt()) if len(values) else 0.0
    return math.inf if math.isnan(found) else found


def _changed_configs(base: Path) -> Iterator[tuple[str, Any]]:
    """Yield configurations that each lack a property of the model, with the mistake of an engine that ignores it."""
    for key, why in _PROPERTIES.items():
        config = AutoConfig.from_pretrained(base)
        text = config.get_text_config(decoder=True)
        if not (value := getattr(text, key, None)):
            continue
        plain = None
        if key == "rope_parameters":
            plain = {name: value[name] for name in ("rope_theta", "partial_rotary_factor") if name in value}
            plain["rope_type"] = "default"
        setattr(text, key, plain)
        if key == "sliding_window" and getattr(text, "layer_types", None):
            text.layer_types = ["full_attention"] * len(text.layer_types)
        yield why, config
