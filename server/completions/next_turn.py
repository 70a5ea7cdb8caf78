"""What the next prompt of a chat begins with: the chat and its answer as the template writes them,
up to where the next message begins.

The next message is not known. So two chats are written, with two messages of its kind that begin
differently, and what both begin with is what any such message follows. The kind is known: results
follow calls, and otherwise the user speaks.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.prefix.keeping import inner_salt
from paged_kv.server.completions.chat_messages import thoughts, tool_call, tool_result
from paged_kv.server.completions.interface import APIRequest, Choice, Object
from paged_kv.server.completions.prompt_reader import read_chat
from paged_kv.server.engine.jobs import Job
from paged_kv.server.engine.next_turns import NextTurn
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.schema import ChatBody
from paged_kv.server.options import ServerOptions

# Contents of the next message, of which no tokenizer joins the beginnings to what is before them in
# the same way.
_CONTENTS = ("a", "1")


def next_turn(
    request: APIRequest, job: Job, answer: Choice, options: ServerOptions
) -> NextTurn | None:
    """What to prepare behind an answer; None if its next turn cannot be known: of a completion, of
    one of several choices, and of a chat that has images or whose last message was continued.

    Args:
        request: that was answered.
        job: of its only prompt.
        answer: as its client will send it back.
    """
    body = request.body
    if not isinstance(body, ChatBody) or job.choices > 1 or body.has_images:
        return None
    if body.messages[-1]["role"] == "assistant" or body.add_generation_prompt is False:
        return None
    read = partial(
        _tokens,
        body=body,
        answer=_message(answer),
        options=options,
        salt=inner_salt(job.salt),
    )
    return NextTurn(job.request_id, job.model, job.salt, job.session, read)


def _message(answer: Choice) -> Object:
    message: Object = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message |= thoughts(answer.reasoning)
    calls = [call for call in answer.calls if call.call_id]
    if calls:
        arguments = dict.fromkeys((call.index for call in calls), "")
        for piece in answer.calls:
            arguments[piece.index] += piece.arguments
        message["tool_calls"] = [
            tool_call(call.call_id, call.name, arguments[call.index]) for call in calls
        ]
    return message


def _tokens(
    loaded: LoadedModel, *, body: ChatBody, answer: Object, options: ServerOptions, salt: Hashable
) -> list[int]:
    """The tokens before the content of any next message. The `salt` is the one of `KeptTokens`.

    Raises:
        APIError: 400, the model's chat template refuses the chat, or it is too long.
    """
    first, second = (
        read_chat(loaded, _followed(body, answer, content), options, salt=salt)
        for content in _CONTENTS
    )
    if first.media is not None:
        return []
    return first.tokens[: common_prefix(first.tokens, second.tokens)]


def _followed(body: ChatBody, answer: Object, content: str) -> ChatBody:
    """The chat with an answer and a message of this content, or a result of each call."""
    following: list[Any] = [
        tool_result(call["id"], content) for call in answer.get("tool_calls", ())
    ] or [{"role": "user", "content": content}]
    return body.model_copy(update={"messages": [*body.messages, answer, *following]})
