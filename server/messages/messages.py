"""Anthropic's Messages, on the same models and caches as OpenAI's completions."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, ClassVar

from starlette.types import Send

from paged_kv.server.completions.answering import Answering, send_json
from paged_kv.server.completions.conversation import Conversation
from paged_kv.server.completions.interface import Answers, Interface, ReadRequest
from paged_kv.server.http.known_fields import require_known
from paged_kv.server.http.request_body import (
    checked,
    parsed_json,
)
from paged_kv.server.http.schema import DEFAULT_MODEL, ChatBody
from paged_kv.server.messages.answers import MessageAnswers
from paged_kv.server.messages.requests import (
    ONLY,
    SHARED,
    WITHOUT_MEANING,
    MessagesBody,
    PromptBody,
)
from paged_kv.server.messages.translation import cache_marks, chat_of
from paged_kv.server.options import ServerOptions

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"


class Messages(Interface):
    """Messages.

    Args:
        kind: the schema of bodies.
        options: of the server: `skip_system_lines`.
    """

    fields: ClassVar = {
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    def __init__(self, kind: type[PromptBody], options: ServerOptions) -> None:
        self._kind = kind
        self._skipped = list(options.skip_system_lines)

    def read(self, content: bytes, key: str | None) -> ReadRequest:
        """See `Interface`."""
        fields = parsed_json(content)
        known = (*self._kind.model_fields, *SHARED)
        require_known(fields, known, without_meaning=WITHOUT_MEANING, only=ONLY)
        body = checked(fields, self._kind)
        chat = self.chat_body(chat_of(fields, body, self._skipped))
        return ReadRequest(
            chat,
            partial(_answers, body, chat),
            len(content),
            cache_marks(body, self._skipped),
            is_counted=not isinstance(body, MessagesBody),
        )


def _answers(body: PromptBody, chat: ChatBody, name: str, tokenizer: Any) -> Answers:
    thinking = body.thinking
    return MessageAnswers(
        name,
        chat.model or DEFAULT_MODEL,
        shows_thinking=thinking is None or thinking.display != "omitted",
    )


class TokenCounts(Answering):
    """Counts the tokens of the prompts that messages would have."""

    async def _answer(self, conversation: Conversation, send: Send) -> None:
        await self._read_prompt(conversation)
        count = {"input_tokens": conversation.usage.prompt_tokens}
        await send_json(json.dumps(count).encode(), send)
