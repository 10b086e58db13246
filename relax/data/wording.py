"""How a prompt is worded: the text that the model reads, from what a line of data holds under the input key."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from relax.errors import RelaxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from relax.data.tokenizer import TextCodec

Wording = Callable[[object], str]
"""From a value to its text. Errors: ValueError that goes on after the value's name."""


def as_it_stands(value: object) -> str:
    """The value, which must be a text that is not empty."""
    if isinstance(value, list):
        raise ValueError("must be a non-empty text, got a list; --apply-chat-template renders lists of messages")
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a non-empty text, got {value!r}")
    return value


@attrs.frozen
class ChatTemplate:
    """Renders messages with a tokenizer's own template, up to where the answer begins. A text is one user message."""

    tokenizer: "PreTrainedTokenizerBase"

    @classmethod
    def of(cls, codec: "TextCodec") -> "ChatTemplate":
        """Errors: `RelaxError` where the tokenizer has none."""
        try:
            codec.tokenizer.get_chat_template()
        except ValueError as error:
            raise RelaxError(
                f"--apply-chat-template: the tokenizer of {codec.origin} has no chat template, or several and no "
                "default; leave the flag out, or name another tokenizer with --tokenizer"
            ) from error
        return cls(codec.tokenizer)

    def __call__(self, value: object) -> str:
        messages = [{"role": "user", "content": as_it_stands(value)}] if isinstance(value, str) else _messages(value)
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program of somebody else's
            raise ValueError(f"is refused by the chat template: {type(error).__name__}: {error}") from error


def asked(value: object) -> str:
    """What a reader is shown of a prompt: the text, or what the last message says."""
    return value if isinstance(value, str) else str(_messages(value)[-1]["content"])


def _messages(value: object) -> Sequence[dict[str, object]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a non-empty text or list of messages, got {value!r}")
    for number, message in enumerate(value, start=1):
        texts = [message.get("role"), message.get("content")] if isinstance(message, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"must hold messages with texts as 'role' and 'content'; message {number} is {message!r}")
    return value
