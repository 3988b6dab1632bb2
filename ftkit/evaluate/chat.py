"""A conversation with a model, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import TextStreamer

from ftkit.data.conversations import Conversation, JsonObject, Message
from ftkit.data.prompts import encode_prompt, renderer_of
from ftkit.evaluate.generate import Decoding
from ftkit.evaluate.load import GeneratingModel

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Reply:
    """An assistant turn; `is_ended` tells whether it has its end token."""

    text: str
    is_ended: bool


@dataclass
class ChatSession:
    """A model and the turns so far.

    Attributes:
        options: variables for the chat template.
        tools: JSON schemas of the tools that the model may call; nothing is executed.
    """

    model: GeneratingModel
    decoding: Decoding
    options: Mapping[str, Any]
    system: str | None = None
    tools: tuple[JsonObject, ...] = ()
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        """Clear the conversation."""
        self.messages.clear()

    def ask(self, text: str, on_text: Callable[[str], None] | None = None) -> Reply:
        """Generate the completion of a user turn, and append both turns to the conversation.

        Args:
            text: the user's message.
            on_text: called with pieces of the completion during generation.

        Raises:
            DataError: the chat template rejects the conversation.
        """
        before = (Message("system", self.system),) if self.system else ()
        turns = (*self.messages, Message("user", text))
        prompt = encode_prompt(
            self.model, renderer_of(self.model, self.options), Conversation((*before, *turns), self.tools)
        )
        streamer = None if on_text is None else _Streamer(self.model, on_text, is_raw=bool(self.tools))
        (completion,) = self.model.complete([prompt], self.decoding.config(self.model), streamer=streamer)
        reply = Reply(self.model.text_of(completion, is_raw=bool(self.tools)), self.model.is_ended(completion))
        self.messages = [*turns, Message("assistant", reply.text)]
        return reply


class _Streamer(TextStreamer):  # type: ignore[misc] # transformers has no types
    """Passes on the text of the completion, without end tokens, and with other special tokens only on request."""

    def __init__(self, model: GeneratingModel, on_text: Callable[[str], None], *, is_raw: bool) -> None:
        super().__init__(model.tokenizer, skip_prompt=True, skip_special_tokens=not is_raw)
        self._on_text, self._ends = on_text, set(model.generation.end_tokens)

    def put(self, value: Any) -> None:
        if value.numel() > 1 or value.item() not in self._ends:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: FBT001, FBT002 - transformers'
        del stream_end
        if text:
            self._on_text(text)
