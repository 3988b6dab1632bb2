"""The chat templates that ftkit ships, for tokenisers that bring none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template in Hugging Face's dialect, and the special tokens that it uses."""

    template: str
    end_of_turn: str
    begin: str | None
    other_tokens: tuple[str, ...]

    @property
    def special_tokens(self) -> list[str]:
        """All tokens that a tokeniser must keep whole."""
        return [*([self.begin] if self.begin else []), self.end_of_turn, *self.other_tokens]


# Gemma knows no system turn: its text goes before the first user turn.
_GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set prefix = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% if turns and turns[0]['role'] == 'assistant' %}"
    "{{ raise_exception('after the system turn comes the user, in whose turn its text is') }}{% endif %}"
    "{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
    "{% for turn in turns %}"
    "<start_of_turn>{{ 'model' if turn['role'] == 'assistant' else turn['role'] }}\n"
    "{{ (prefix if loop.first else '') + turn['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

_CHATML = (
    "{% for turn in messages %}"
    "<|im_start|>{{ turn['role'] }}\n{{ turn['content'] | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATES: dict[str, ChatTemplate] = {
    "gemma": ChatTemplate(_GEMMA, "<end_of_turn>", "<bos>", ("<start_of_turn>",)),
    "chatml": ChatTemplate(_CHATML, "<|im_end|>", None, ("<|im_start|>",)),
}
