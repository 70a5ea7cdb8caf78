"""Turns one choice's tokens into text with mlx-lm's detokenizer and its state machine, which
separates reasoning and tool calls from text.

This searches the text for stop words. mlx-lm searches for their tokens, and misses a stop word that
the model writes with other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import ToolCallFormatter

from paged_kv.integrations.server.generation.jobs import Token
from paged_kv.integrations.server.generation.paged_model_provider import LoadedModel

_TEXT = "text"


@dataclass
class Delta:
    """The part that a token adds to a choice.

    Attributes:
        text: of the answer.
        reasoning: of a model that thinks before it answers.
        tool_calls: in OpenAI's form.
        finish_reason: why the choice ends here; None if it continues.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)


class ChoiceText:
    """Turns tokens into text, one by one.

    Args:
        loaded: the model that generates them.
        initial_state: the kind of text that it writes first.
        stop_words: the choice ends before any of these texts.
        tools: the tools in the request.
        is_streamed: whether to number tool calls, as in streams.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        initial_state: str,
        stop_words: Sequence[str],
        tools: Any,
        is_streamed: bool,
    ) -> None:
        self._detokenizer = loaded.tokenizer.detokenizer
        self._state = loaded.text_machine.make_state(initial_state)
        # A stop word leads to the state None.
        ends = {_TEXT: [(word, None) for word in stop_words]} if stop_words else None
        self._stop = TextStateMachine(ends).make_state(_TEXT)
        self._format = ToolCallFormatter(loaded.tokenizer.tool_parser, tools, is_streamed)
        self._was_tool = initial_state == "tool"
        self._tool_text = ""
        self._made_call = False

    def take(self, token: Token) -> Delta:
        """The part that the next token adds. The last one has a finish reason."""
        # The end token is not part of the text.
        if token.finish_reason != "stop":
            self._detokenizer.add_token(token.token)
        if token.finish_reason is not None:
            self._detokenizer.finalize()
        text, is_stopped = self._up_to_stop(self._detokenizer.last_segment, token.finish_reason)
        reason = "stop" if is_stopped else token.finish_reason
        delta = Delta(finish_reason=reason)
        calls: list[str] = []
        for state, part in self._segments(text, reason):
            self._add(delta, calls, state, part)
        if reason is not None and self._tool_text:
            calls.append(self._tool_text)
        delta.tool_calls = self._format(calls)
        self._made_call |= bool(calls)
        if reason == "stop" and self._made_call:
            delta.finish_reason = "tool_calls"
        return delta

    def _up_to_stop(self, text: str, finish_reason: str | None) -> tuple[str, bool]:
        """The part of a text that is certainly before any stop word, and whether one was found."""
        self._stop, segments = TextStateMachine.split(self._stop, text)
        safe = "".join(part for _, part in segments)
        is_stopped = self._stop[0] is None
        if finish_reason is not None and not is_stopped:
            self._stop, held, _ = TextStateMachine.flush(self._stop)
            safe += held
        return safe, is_stopped

    def _segments(self, text: str, reason: str | None) -> list[tuple[str, str]]:
        self._state, segments = TextStateMachine.split(self._state, text)
        if reason == "length":
            self._state, held, state = TextStateMachine.flush(self._state)
            segments.append((state, held))
        return list(segments)

    def _add(self, delta: Delta, calls: list[str], state: str, part: str) -> None:
        if state == "tool":
            self._tool_text += part
        elif state == "reasoning":
            delta.reasoning += part
        elif state == "normal":
            if self._was_tool:
                calls.append(self._tool_text)
                self._tool_text = ""
            delta.text += part
        self._was_tool = state == "tool"
