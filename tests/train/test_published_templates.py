"""Chat templates of model families, reimplemented: texts and trained spans match the published templates.

`⟦` and `⟧` mark trained spans. Where a published template contains sentences (tool instructions, a default system
turn), ours has a placeholder in capitals; everything else is identical.

The texts were compared in November 2026 with the output of the published templates, as stored by these projects:
Llama 3.1, 3.2, 3.3: TRL 1.16 and llama.cpp; Qwen 3: TRL, llama.cpp (Qwen3-0.6B); Gemma 3: TRL; gpt-oss: TRL, llama.cpp
(gpt-oss-120b); Mistral: llama.cpp (plain turns: Small 3.2; tools: Nemo, and Small 3.1 read); Phi-4-mini: the Berkeley
function calling leaderboard; OLMo 3 Think: open-instruct. OLMo 3 Instruct: Ollama's and rLLM's renderers, read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from ftkit.config.data import DataSpec, MessagesFormat
from ftkit.data.encoding import RowEncoder, find_end_tokens
from ftkit.data.packing import IGNORED
from ftkit.data.rows import Row
from ftkit.data.template_probes import find_unread
from ftkit.data.tokenizers import learn_tokenizer

SPECIAL = (  # noqa: SIM905 - one per line is harder to read
    "<|im_start|> <|im_end|> <|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|return|> <|call|> <bos> "
    "<start_of_turn> <end_of_turn> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <s> </s> [INST] "
    "[/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS] "
    "[/AVAILABLE_TOOLS] <|system|> <|user|> <|assistant|> <|im_sep|>"
).split()

LLAMA = """
{{- bos_token }}
{%- macro turn(role, text) %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + text + '<|eot_id|>' }}
{%- endmacro %}
{%- set has_system = messages[0].role == 'system' %}
{%- set env = 'Environment: ipython\n' if tools else '' %}
{%- set dates = 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' %}
{{- turn('system', env + dates + (messages[0].content | trim if has_system else '')) }}
{%- for m in messages[1 if has_system else 0:] %}
    {%- if m.role == 'user' and loop.first and tools %}
        {{- turn('user', 'TOOLS' + tools | tojson + m.content | trim) }}
    {%- elif m.tool_calls is defined %}
        {%- set f = m.tool_calls[0].function %}
        {{- turn('assistant', '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}') }}
    {%- elif m.role == 'tool' %}
        {{- turn('ipython', m.content | tojson) }}
    {%- else %}
        {{- turn(m.role, m.content | trim) }}
    {%- endif %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt }}
"""
QWEN = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|im_start|>system\n' + system + ('\n\n' if system and tools else '') }}
    {{- ('TOOLS' + tools | tojson if tools else '') + '<|im_end|>\n' }}
{%- endif %}
{%- set asked = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set asked.last = messages.index(m) %}{% endfor %}
{%- for m in messages if m.role != 'system' %}
    {%- set place = messages.index(m) %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user' if messages[place - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if place + 1 == messages | length or messages[place + 1].role != 'tool' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' }}
        {%- set thinks = m.reasoning_content or place + 1 == messages | length %}
        {%- if m.role == 'assistant' and place > asked.last and thinks %}
            {{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- ('\n' if m.content or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name }}
            {{- '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}
{{- '<think>\n\n</think>\n\n' if add_generation_prompt and enable_thinking is false }}
"""
GEMMA = """
{{- bos_token }}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in messages[1 if system else 0:] %}
    {{- raise_exception('turns must alternate') if (m.role == 'user') != (loop.index0 is even) }}
    {{- '<start_of_turn>' + m.role.replace('assistant', 'model') + '\n' }}
    {{- (system if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{{- '<start_of_turn>model\n' if add_generation_prompt }}
"""
OLMO = """
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\nDEFAULT' + ('TOOLS' if tools else '') }}
    {{- '<functions>' + (tools | tojson if tools else '') + '</functions><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role.replace('tool', 'environment') + '\n' + m.content }}
    {{- '<functions>' + tools | tojson + '</functions>' if tools and m.role == 'system' }}
    {%- for call in m.tool_calls or [] %}
        {{- ('<function_calls>' if loop.first else '\n') + call.function.name + '(' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- ('' if loop.first else ', ') + name + '=' + value | tojson }}
        {%- endfor %}
        {{- ')' + ('</function_calls>' if loop.last else '') }}
    {%- endfor %}
    {{- eos_token if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}
"""
OLMO_THINK = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content }}
    {{- ' NO FUNCTIONS' if m.role == 'system' }}
    {{- eos_token if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n<think>' if add_generation_prompt }}
"""
MISTRAL = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' + ('TOOLS\n\n' if tools else '') + messages[0].content + '[/SYSTEM_PROMPT]' }}
{%- endif %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}
        {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and m == users[-1] }}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- raise_exception('nine letters') if call.id | length < 9 }}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id[-9:] + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- raise_exception('nine letters') if m.tool_call_id | length < 9 }}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id[-9:] + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- m.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
PHI_MINI = """
{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{{- '<|assistant|>' if add_generation_prompt else eos_token }}
"""
GPT_OSS = """
{{- '<|start|>system<|message|>TODAY ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- set first = messages[0] %}
{%- if first.role == 'system' or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- '# Instructions\n\n' + first.content + '\n\n' if first.role == 'system' }}
    {{- ('TOOLS' + tools | tojson if tools else '') + '<|end|>' }}
{%- endif %}
{%- set called = namespace(name='') %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- elif m.tool_calls %}
        {%- set later = messages[messages.index(m) + 1:] | selectattr('role', 'equalto', 'assistant') %}
        {%- if (m.thinking or m.content) and not later | rejectattr('tool_calls') | list %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}
        {%- endif %}
        {%- set called.name = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- else %}
        {%- set is_last = loop.last and not add_generation_prompt %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if is_last and m.thinking }}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if is_last else '<|end|>') }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}
"""

PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "A2"},
]
THINKING = [
    turn | ({"reasoning_content": f"R{n}"} if turn["role"] == "assistant" else {}) for n, turn in enumerate(PLAIN)
][1:]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
CALLING = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": None, "reasoning_content": "R", "tool_calls": [CALL]},
    {"role": "tool", "content": "12", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "A1"},
]
PARALLEL = [
    CALLING[0],
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL | {"id": "call_2"}]},
    CALLING[2],
    CALLING[2] | {"tool_call_id": "call_2"},
    CALLING[3],
]
SAYING = [CALLING[0], {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}, *CALLING[2:]]
SILENT = [CALLING[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, *CALLING[2:]]
TAGGED = [
    turn | ({"content": f"<think>R{n}</think>{turn['content']}"} if turn["role"] == "assistant" else {})
    for n, turn in enumerate(PLAIN)
]
TOOL = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": {"type": "object"}}}


TOOLS = f"TOOLS{json.dumps([TOOL])}"


@dataclass(frozen=True)
class Family:
    template: str
    eos: str
    bos: str = "<bos>"
    options: dict[str, Any] = field(default_factory=dict)
    end: str = ""


FAMILIES = {
    "llama3": Family(LLAMA, "<|eot_id|>", "<|begin_of_text|>"),
    "qwen3": Family(QWEN, "<|im_end|>"),
    "qwen3-no-thinking": Family(QWEN, "<|im_end|>", options={"enable_thinking": False}),
    "gemma3": Family(GEMMA, "<end_of_turn>"),
    "olmo3": Family(OLMO, "<|endoftext|>"),
    "olmo3-think": Family(OLMO_THINK, "<|endoftext|>"),
    "mistral": Family(MISTRAL, "</s>", "<s>"),
    "phi4-mini": Family(PHI_MINI, "<|endoftext|>", end="<|end|>"),
    "gpt-oss": Family(GPT_OSS, "<|return|>"),
}
L, LS = (
    "<|start_header_id|>{}<|end_header_id|>\n\n",
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
)
LU, LA, LT = L.format("user"), L.format("assistant"), L.format("ipython")
LLAMA_SYSTEM = "<|begin_of_text|>" + L.format("system")
QU, QA = "<|im_start|>user\n", "<|im_start|>assistant\n"
QC = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
QR = "<tool_response>\n12\n</tool_response>"
OLMO_SYSTEM = "<|im_start|>system\nBe brief. NO FUNCTIONS<|im_end|>\n"
OLMO_TOOLS = f"<|im_start|>system\nDEFAULTTOOLS<functions>{json.dumps([TOOL])}</functions><|im_end|>\n"
OLMO_CALLS = '<function_calls>weather(city="Ulm")\nweather(city="Ulm")</function_calls>'
NO_THINKING = "<think>\n\n</think>\n\n"
GS, GU, GA = "<|start|>system<|message|>TODAY 2025-01-01<|end|>", "<|start|>user<|message|>", "<|start|>assistant"
GD = "<|start|>developer<|message|>"

GOLDEN: list[tuple[str, str, list[str]]] = [
    ("llama3", "plain", [
        (f"{LLAMA_SYSTEM}{LS}Be brief.<|eot_id|>{LU}One?<|eot_id|>{LA}⟦A1<|eot_id|>⟧"
        f"{LU}Two?<|eot_id|>{LA}⟦A2<|eot_id|>⟧")]),
    ("qwen3", "plain", [
        f"<|im_start|>system\nBe brief.<|im_end|>\n{QU}One?<|im_end|>\n{QA}⟦{NO_THINKING}A1<|im_end|>⟧",
        (f"<|im_start|>system\nBe brief.<|im_end|>\n{QU}One?<|im_end|>\n{QA}A1<|im_end|>\n"
        f"{QU}Two?<|im_end|>\n{QA}⟦{NO_THINKING}A2<|im_end|>⟧")]),
    ("qwen3", "thinking", [
        f"{QU}One?<|im_end|>\n{QA}⟦<think>\nR2\n</think>\n\nA1<|im_end|>⟧",
        f"{QU}One?<|im_end|>\n{QA}A1<|im_end|>\n{QU}Two?<|im_end|>\n{QA}⟦<think>\nR4\n</think>\n\nA2<|im_end|>⟧"]),
    ("qwen3-no-thinking", "plain", [
        f"<|im_start|>system\nBe brief.<|im_end|>\n{QU}One?<|im_end|>\n{QA}{NO_THINKING}⟦A1<|im_end|>⟧",
        (f"<|im_start|>system\nBe brief.<|im_end|>\n{QU}One?<|im_end|>\n{QA}A1<|im_end|>\n"
        f"{QU}Two?<|im_end|>\n{QA}{NO_THINKING}⟦A2<|im_end|>⟧")]),
    ("qwen3", "calling", [
        (f"<|im_start|>system\n{TOOLS}<|im_end|>\n{QU}One?<|im_end|>\n{QA}⟦<think>\nR\n</think>\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>⟧\n'
        f"{QU}<tool_response>\n12\n</tool_response><|im_end|>\n{QA}⟦{NO_THINKING}A1<|im_end|>⟧")]),
    ("gemma3", "plain", [
        ("<bos><start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>\n<start_of_turn>model\n⟦A1<end_of_turn>⟧\n"
        "<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n⟦A2<end_of_turn>⟧")]),
    ("qwen3", "parallel", [
        (f"<|im_start|>system\n{TOOLS}<|im_end|>\n{QU}One?<|im_end|>\n{QA}⟦{NO_THINKING}Let me see.\n{QC}\n{QC}"
        "<|im_end|>⟧"),
        (f"<|im_start|>system\n{TOOLS}<|im_end|>\n{QU}One?<|im_end|>\n{QA}Let me see.\n{QC}\n{QC}<|im_end|>\n"
        f"{QU}{QR}\n{QR}<|im_end|>\n{QA}⟦{NO_THINKING}A1<|im_end|>⟧")]),
    ("olmo3", "plain", [
        f"<|im_start|>system\nBe brief.<|im_end|>\n{QU}One?<|im_end|>\n{QA}⟦A1<|endoftext|>⟧",
        (f"<|im_start|>system\nBe brief.<|im_end|>\n{QU}One?<|im_end|>\n{QA}A1<|im_end|>\n"
        f"{QU}Two?<|im_end|>\n{QA}⟦A2<|endoftext|>⟧")]),
    ("olmo3", "parallel", [
        f"{OLMO_TOOLS}{QU}One?<|im_end|>\n{QA}⟦Let me see.{OLMO_CALLS}<|endoftext|>⟧",
        (f"{OLMO_TOOLS}{QU}One?<|im_end|>\n{QA}Let me see.{OLMO_CALLS}<|im_end|>\n<|im_start|>environment\n12"
        f"<|im_end|>\n<|im_start|>environment\n12<|im_end|>\n{QA}⟦A1<|endoftext|>⟧")]),
    ("olmo3-think", "tagged", [
        f"{OLMO_SYSTEM}{QU}One?<|im_end|>\n{QA}<think>⟦R2</think>A1<|endoftext|>⟧",
        (f"{OLMO_SYSTEM}{QU}One?<|im_end|>\n{QA}<think>R2</think>A1<|im_end|>\n"
        f"{QU}Two?<|im_end|>\n{QA}<think>⟦R4</think>A2<|endoftext|>⟧")]),
    ("mistral", "plain", [
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]One?[/INST]⟦A1</s>⟧[INST]Two?[/INST]⟦A2</s>⟧"]),
    ("phi4-mini", "plain", [
        ("<|system|>Be brief.<|end|><|user|>One?<|end|><|assistant|>⟦A1<|end|>⟧"
        "<|user|>Two?<|end|><|assistant|>⟦A2<|end|>⟧")]),
    ("gpt-oss", "plain", [
        f"{GS}{GD}# Instructions\n\nBe brief.\n\n<|end|>{GU}One?<|end|>{GA}⟦<|channel|>final<|message|>A1<|return|>⟧",
        (f"{GS}{GD}# Instructions\n\nBe brief.\n\n<|end|>{GU}One?<|end|>{GA}<|channel|>final<|message|>A1<|end|>"
        f"{GU}Two?<|end|>{GA}⟦<|channel|>final<|message|>A2<|return|>⟧")]),
    ("gpt-oss", "thinking", [
        f"{GS}{GU}One?<|end|>{GA}⟦<|channel|>analysis<|message|>R2<|end|>{GA}<|channel|>final<|message|>A1<|return|>⟧",
        (f"{GS}{GU}One?<|end|>{GA}<|channel|>final<|message|>A1<|end|>"
        f"{GU}Two?<|end|>{GA}⟦<|channel|>analysis<|message|>R4<|end|>{GA}<|channel|>final<|message|>A2<|return|>⟧")]),
    ("gpt-oss", "calling", [
        (f"{GS}{GD}{TOOLS}<|end|>{GU}One?<|end|>{GA}⟦<|channel|>analysis<|message|>R<|end|>{GA} to=functions.weather"
        '<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>⟧<|start|>functions.weather to=assistant'
        f'<|channel|>commentary<|message|>"12"<|end|>{GA}⟦<|channel|>final<|message|>A1<|return|>⟧')]),
    ("gpt-oss", "saying", [
        (f"{GS}{GD}{TOOLS}<|end|>{GU}One?<|end|>{GA}⟦<|channel|>analysis<|message|>Let me see.<|end|>{GA} "
        'to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>⟧<|start|>functions.weather '
        f'to=assistant<|channel|>commentary<|message|>"12"<|end|>{GA}⟦<|channel|>final<|message|>A1<|return|>⟧')]),
]  # fmt: skip
TALKS = {
    "plain": PLAIN, "thinking": THINKING, "calling": CALLING, "parallel": PARALLEL, "saying": SAYING, "tagged": TAGGED,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    learned = learn_tokenizer(["what"], 300, "chatml")
    learned.add_special_tokens({"additional_special_tokens": SPECIAL})
    return learned


def rendered(tokenizer: Any, family: Family, talk: list[dict[str, Any]]) -> list[str]:
    """Encode a conversation; return its documents as text, with marks around trained spans."""
    tokenizer.chat_template, tokenizer.eos_token, tokenizer.bos_token = family.template.strip(), family.eos, family.bos
    data = DataSpec.model_validate({"source": {"kind": "files", "train": "/x"}, "template_options": family.options})
    encoder = RowEncoder.of(tokenizer, data, MessagesFormat(), len(tokenizer))
    columns = {"messages": talk} | ({"tools": [TOOL]} if any("tool_calls" in turn for turn in talk) else {})
    (documents,) = encoder.encode([Row(columns, "f:1")])
    assert isinstance(documents, list), documents
    texts = []
    for document in documents:
        text, was_trained = "", False
        for token, trained in zip(document.tokens, [False, *(document.labels[:-1] != IGNORED).tolist()], strict=True):
            text += (
                "⟦" * (trained and not was_trained) + "⟧" * (was_trained and not trained) + tokenizer.decode([token])
            )
            was_trained = trained
        texts.append(text + "⟧" * was_trained)
    return texts


@pytest.mark.parametrize(("name", "talk", "texts"), GOLDEN, ids=[f"{name}-{talk}" for name, talk, _ in GOLDEN])
def test_each_turn_is_trained_as_the_published_template_renders_it(
    tokenizer: Any, name: str, talk: str, texts: list[str]
) -> None:
    assert rendered(tokenizer, FAMILIES[name], TALKS[talk]) == texts


@pytest.mark.parametrize("name", FAMILIES)
def test_completions_end_with_the_last_trained_token(tokenizer: Any, name: str) -> None:
    family = FAMILIES[name]
    (*_, last) = rendered(tokenizer, family, TAGGED if name == "olmo3-think" else PLAIN)
    end = tokenizer.convert_ids_to_tokens(find_end_tokens(tokenizer)[0])
    assert end == (family.end or family.eos)
    assert last.endswith(f"{end}⟧")


@pytest.mark.parametrize("name", FAMILIES)
def test_published_templates_read_their_options(name: str) -> None:
    assert find_unread(FAMILIES[name].options, FAMILIES[name].template) == []


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        ("{% if thinking %}a{% endif %}", True),
        ("{% set thinking = thinking | default(true) %}{{ thinking }}", True),
        ("{% if thinking is not defined %}{% set thinking = true %}{% endif %}{{ thinking }}", True),
        ("{% macro turn() %}{{ thinking }}{% endmacro %}{{ turn() }}", True),
        ("{% generation %}{{ thinking }}{% endgeneration %}", True),
        ("{% set thinking = true %}{{ thinking }}", False),
        ("{# thinking #}{{ m.thinking }} thinking", False),
        ("{{ thinking | no_such_filter }}", True),
        ("{% if %}", True),  # unknown
    ],
)
def test_an_option_that_a_template_never_reads_is_found(template: str, is_read: bool) -> None:
    assert find_unread(["thinking"], template) == ([] if is_read else ["thinking"])


def test_tools_of_llama_and_mistral_are_rendered_with_ids_valid_for_mistral(tokenizer: Any) -> None:
    (llama,) = rendered(tokenizer, FAMILIES["llama3"], SILENT)
    assert (
        f'{LU}{TOOLS}One?<|eot_id|>{LA}⟦{{"name": "weather", "parameters": {{"city": "Ulm"}}}}<|eot_id|>⟧{LT}"12"'
        in llama
    )
    (mistral,) = rendered(tokenizer, FAMILIES["mistral"], SILENT)
    start = mistral.index('"id": "') + len('"id": "')
    call_id = mistral[start : start + 9]
    assert f'⟦[TOOL_CALLS] [{{"name": "weather", "arguments": {{"city": "Ulm"}}, "id": "{call_id}"}}]</s>⟧' in mistral
    assert f'[TOOL_RESULTS] {{"content": 12, "call_id": "{call_id}"}}[/TOOL_RESULTS]⟦A1</s>⟧' in mistral


def test_mistral_moves_tools_to_the_last_user_turn_so_each_answer_gets_its_own_document(tokenizer: Any) -> None:
    talk = [*PLAIN[1:4], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    texts = rendered(tokenizer, FAMILIES["mistral"], talk)
    assert [text.count("[AVAILABLE_TOOLS]") for text in texts] == [1, 1]
    assert texts[1].startswith("<s>[INST]One?[/INST]A1</s>[AVAILABLE_TOOLS]")
