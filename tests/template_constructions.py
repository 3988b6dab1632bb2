"""Chat templates of our own, each with a construction of published ones that decides which text is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ftkit.data.tokenizers import learn_tokenizer

MARKS = (
    "<|open|>", "<|close|>", "<|user|>", "<|bot|>", "<|tool|>", "<|system|>", "<|done|>", "<|text_done|>",
    "<|call_done|>", "<|bos|>",
)  # fmt: skip


@dataclass(frozen=True)
class Construction:
    """A template, and the tokens of its model.

    Attributes:
        about: what it does, for the reference page.
        like: models whose templates do so.
        eos: the tokenizer's end token.
        ends: end tokens of the model's generation configuration.
        trained: what is trained, for the reference page.
        refused: shapes of conversations that can't be trained on, of which rows are refused; `*` all.
    """

    about: str
    like: str
    template: str
    trained: str
    eos: str = "<|close|>"
    ends: tuple[str, ...] = ()
    refused: str = ""
    options: dict[str, Any] = field(default_factory=dict)


CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
)
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CLOSE = "<|close|>\n"
TOOLS = "{% if tools %}<|open|>tools{{ tools | tojson }}<|close|>\n{% endif %}"


def turns(assistant: str, *, opening: str = "", others: str = "{{ m.content }}<|close|>\n", last: str = "") -> str:
    """Return a template of turns with headers.

    Args:
        assistant: the assistant's turn after its header.
        opening: what the generation prompt has after the header.
        others: the other turns after their headers.
        last: what follows the conversation without a generation prompt.
    """
    return (
        f"{TOOLS}{{% for m in messages %}}{{% if m.role == 'assistant' %}}<|open|>bot\n{assistant}"
        f"{{% else %}}<|open|>{{{{ m.role }}}}\n{others}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|open|>bot\n{opening}{{% else %}}{last}{{% endif %}}"
    )


LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}"
)
AFTER_LAST = "{% if loop.index0 > ns.last %}" + THOUGHT + "{% endif %}"
REASONED = "ur sur urur urua uaur ururua suruaur uRta uRtr uRtRtr uRtRta suRtrur urct urr ura uar uruw uruk"
UNREASONED = (
    "ua sua uaua suaua uauaua urua uaur ururua suruaur uct ucta suctua uCta uptta suptta suctaua uctcta uRta uRtRta "
    "urct uauctaua uaa ura uar uua suua uuaa usua ssua uw Wa uwWw uk Ka ukKk uh Ha uhHh ui uruw uruk"
)

CONSTRUCTIONS = {
    "headers": Construction(
        "a header, the text, an end token", "ChatML, Llama 3, Qwen 2.5",
        turns(f"{THOUGHT}{{{{ m.content }}}}{CALLS}{CLOSE}"), "from the header to the end token",
    ),
    "earlier reasoning dropped": Construction(
        "writes the reasoning of turns after the last question only", "Qwen 3, DeepSeek R1, GLM 4.5",
        LAST_QUESTION + turns(f"{AFTER_LAST}{{{{ m.content }}}}{CALLS}{CLOSE}"),
        "each turn in a document of its own, with the earlier turns as inference sees them",
    ),
    "open thought": Construction(
        "the generation prompt opens a thought", "DeepSeek R1, QwQ, MiniMax M2, Spark 2.5, Cohere2-MoE",
        turns(f"{THOUGHT}{{{{ m.content }}}}{CALLS}{CLOSE}", opening="<think>"),
        "turns with reasoning, from its first word; a turn without it would have to close the thought first",
        refused=UNREASONED.replace("uh ", "").replace("uhHh ", ""),
    ),
    "closed thought": Construction(
        "the generation prompt has an empty thought, which the rendered turn lacks", "Gemma 4, Qwen 3 without thinking",
        turns(f"{THOUGHT}{{{{ m.content }}}}{CALLS}{CLOSE}", opening="<think>\n\n</think>\n\n"),
        "turns without reasoning, after the empty thought", refused=REASONED + " uh uhHh",
    ),
    "closed thought, end rendered": Construction(
        "the generation prompt has an empty thought, of which the rendered turn has only the end", "DeepSeek V3.2",
        turns(f"</think>{{{{ m.content }}}}{CALLS}{CLOSE}", opening="<think></think>"),
        "the turn without the second `</think>`", refused=REASONED + " uh uhHh",
    ),
    "no header": Construction(
        "nothing opens an assistant turn", "Mistral",
        TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}" + CALLS + "<|close|>"
        "{% else %}<|open|>{{ m.role }} {{ m.content }}<|user|>{% endif %}{% endfor %}",
        "from the end of the question", refused=REASONED,
    ),
    "end of conversation": Construction(
        "another token follows the end token of the last turn", "Phi 3, Phi 4 mini",
        turns(f"{THOUGHT}{{{{ m.content }}}}{CALLS}{CLOSE}", last="{{ eos_token }}"),
        "up to the end token that is also written between turns", eos="<|done|>",
    ),
    "end of conversation instead": Construction(
        "another token ends the last turn", "OLMo 3, gpt-oss",
        turns(f"{THOUGHT}{{{{ m.content }}}}{CALLS}{{{{ eos_token if loop.last else '<|close|>\n' }}}}"),
        "up to the token that ends the last turn, each turn in a document of its own; two assistant turns in a row "
        "have no such form", eos="<|done|>", refused="uaa urr ura uar uuaa urct",
    ),
    "two end tokens": Construction(
        "one token ends the text, another the turn", "Cohere2-MoE, Command A",
        turns(f"{THOUGHT}{{{{ m.content }}}}{CALLS}<|text_done|><|close|>\n"),
        "up to the second, at which generation stops",
    ),
    "end written by the next turn": Construction(
        "no token ends a turn; engines stop at the one that opens the next, as the generation configuration says",
        "GLM 4.6, GLM 4.7, GLM 5",
        TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}<|bot|>\n" + THOUGHT + "{{ m.content }}" + CALLS +
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>\n{% endif %}",
        "the text and the token that opens a question, or a tool's result", eos="<|done|>",
        ends=("<|done|>", "<|user|>", "<|tool|>"),
    ),
    "other end of calls": Construction(
        "tool calls end with another token than answers", "gpt-oss, Gemma 4",
        turns(f"{THOUGHT}{{{{ m.content }}}}{CALLS}{{{{ '<|call_done|>' if m.tool_calls else '<|close|>' }}}}"),
        "up to the one or the other; the export stops at both",
    ),
    "reasoning as a turn": Construction(
        "reasoning ends with the token that ends answers", "Solar Open",
        turns("{% if m.reasoning_content %}think {{ m.reasoning_content }}<|close|><|open|>bot\n{% endif %}"
              f"{{{{ m.content }}}}{CALLS}{CLOSE}"),
        "turns without reasoning; with it, generation would stop after the reasoning", refused=REASONED,
    ),
    "merged turns": Construction(
        "a second assistant turn in a row goes on in the first", "Gemma 4",
        TOOLS + "{% set ns = namespace(role='') %}{% for m in messages %}"
        "{% if m.role != ns.role or m.role != 'assistant' %}"
        "<|open|>{{ 'bot' if m.role == 'assistant' else m.role }}\n{% endif %}" + THOUGHT + "{{ m.content }}" + CALLS +
        "{% if m.role != 'assistant' or loop.last or loop.nextitem.role != 'assistant' %}<|close|>\n{% endif %}"
        "{% set ns.role = m.role %}{% endfor %}"
        "{% if add_generation_prompt %}<|open|>bot\n<think>\n\n</think>\n\n{% endif %}",
        "single turns; the second of two in a row has no start of its own", refused=REASONED + " uh uhHh uaa uuaa",
    ),
    "thought cut from contents": Construction(
        "writes what follows `</think>` in a content", "DeepSeek R1",
        turns("{{ m.content.split('</think>') | last }}" + CALLS + CLOSE),
        "contents without such marks; the rest would be dropped", refused=REASONED + " uh uhHh ui",
    ),
    "contents shortened": Construction(
        "changes the text of turns", "", turns("{{ m.content | upper }}" + CALLS + CLOSE),
        "nothing: the text is not the data's", refused="*",
    ),
    "no end": Construction(
        "no special token follows a turn, and the model has no generation configuration", "Vicuna, base models",
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}",
        "nothing: completions would never end", eos="<|done|>", refused="*",
    ),
}  # fmt: skip


@cache
def _learned() -> Any:
    return learn_tokenizer(["what a text"], 300, "chatml")


def tokenizer_of(construction: Construction) -> tuple[Any, list[int]]:
    """Return a tokenizer with a construction's template, and the ids of the model's end tokens."""
    tokenizer = _learned()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template, tokenizer.eos_token = construction.template, construction.eos
    return tokenizer, [tokenizer.convert_tokens_to_ids(token) for token in construction.ends]
