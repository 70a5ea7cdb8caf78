"""Lets a prompt end within the assistant's last message, which the answer continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_kv.integrations.server.http.api_errors import wrong_value
from paged_kv.integrations.server.http.schema import ChatBody


def continues(body: ChatBody) -> bool:
    """Whether the answer to a chat continues its last message: unless the request says something
    else, one of the assistant's with a text and without calls.

    Raises:
        APIError: 400, the last message is to be continued and is no such message.
    """
    last = body.messages[-1]
    is_open = last["role"] == "assistant" and not last.get("tool_calls") and _has_text(last)
    if body.continue_final_message is None:
        return is_open and body.add_generation_prompt is not True
    if body.continue_final_message and not is_open:
        raise wrong_value(
            "continue_final_message: the last message must be the assistant's, with a text and "
            "without tool_calls",
            "continue_final_message",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise wrong_value(
            "continue_final_message and add_generation_prompt: an answer cannot continue the last "
            "message and begin another: leave out one of the two",
            "continue_final_message",
        )
    return body.continue_final_message


def _has_text(message: Any) -> bool:
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return any(part.get("text") for part in parts if part["type"] == "text")


class ContinuingTokenizer:
    """A tokenizer of mlx-lm whose chats end within their last message, or behind it.

    Args:
        tokenizer: mlx-lm's.
        last: the text of the last message, which the answer continues; None if the chat ends
            behind that message, and nothing says whose turn it is.
    """

    def __init__(self, tokenizer: Any, last: str | None) -> None:
        self._tokenizer = tokenizer
        self._last = last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **named: Any) -> Any:
        """The tokens of a chat without a template, in which every message is written out."""
        if self._last is not None:
            text = text[: text.rindex(self._last) + len(self._last)]
        return self._tokenizer.encode(text, **named)

    def apply_chat_template(self, messages: Sequence[Any], **named: Any) -> Any:
        """The tokens of a chat, or its text."""
        if named.get("add_generation_prompt"):
            named["add_generation_prompt"] = False
            if self._last is not None:
                named["continue_final_message"] = True
        return self._tokenizer.apply_chat_template(messages, **named)


def last_text(body: ChatBody) -> str:
    """The text of the last message, as mlx-lm writes its parts together."""
    content: Any = body.messages[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")
