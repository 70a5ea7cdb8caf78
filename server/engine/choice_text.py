"""Turns one choice's tokens into text with mlx-lm's detokenizer and its state machine, which
separates reasoning and tool calls from text.

This searches the text for stop words. mlx-lm searches for their tokens, and misses a stop word that
the model writes with other tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, StreamingDetokenizer

from paged_kv.server.engine.jobs import Token
from paged_kv.server.engine.paged_model_provider import LoadedModel

# Most lines are shorter. A longer one is shortened at this length; if that fails, when it is twice
# as long, and so on.
MOST_LINE_TOKENS = 128
KEPT_TOKENS = 32
# The bytes of a character, each of which may be a token.
MOST_CHARACTER_TOKENS = 4

_UNFINISHED = "\ufffd"


class LongLineDetokenizer(NaiveStreamingDetokenizer):
    """Decodes the end of a long line only, where the text before it can no longer change."""

    def add_token(self, token: int) -> None:
        super().add_token(token)  # type: ignore[no-untyped-call]
        length = len(self._current_tokens)
        if length >= MOST_LINE_TOKENS and length.bit_count() == 1:
            self._shorten()

    def _shorten(self) -> None:
        """Keep only the last tokens of the line, if they decode to the same text on their own: then
        any later text is the same too.

        Tokens that begin within a character decode differently. One of four neighbouring tokens
        begins a character.
        """
        tokens: list[int] = self._current_tokens
        line: str = self._tokenizer.decode(tokens)
        for kept in range(KEPT_TOKENS, KEPT_TOKENS - MOST_CHARACTER_TOKENS, -1):
            end: str = self._tokenizer.decode(tokens[-kept:])
            # Texts of unfinished characters alone look the same wherever they begin.
            if end.rstrip(_UNFINISHED) and line.endswith(end):
                self._text += line.removesuffix(end)
                self._current_tokens = tokens[-kept:]
                return


def linear_time(detokenizer: StreamingDetokenizer) -> Any:
    """A new detokenizer of mlx-lm, or one that makes the same text in linear time."""
    if type(detokenizer) is NaiveStreamingDetokenizer:
        return LongLineDetokenizer(detokenizer._tokenizer)  # type: ignore[no-untyped-call]
    return detokenizer


_TEXT = "text"
# mlx-lm's name for the state in which calls are written.
_TOOL = "tool"

# mlx-lm's detokenizers decode the bytes of an unfinished character again with every token. A
# character has at most 4, so what is unfinished after so many tokens will never be one.
MOST_UNFINISHED_TOKENS = 64


@dataclass
class Delta:
    """The part that a token adds to a choice."""

    text: str = ""  # of the answer
    reasoning: str = ""  # of a model that thinks before it answers
    is_reasoning: bool = False  # whether the token is one of thoughts
    calls: list[str] = field(default_factory=list)  # the texts between the marks of ended ones
    open_call: str | None = None  # what is written of the next one behind its mark
    finish_reason: str | None = None  # "stop" or "length" if the choice ends here
    stop_text: str | None = None  # the stop word before which it ends, if it does
    # With log probabilities, if these were asked for: those of which any text is known to be before
    # a stop word. The end token has none.
    tokens: list[Token] = field(default_factory=list)


def stop_machine(stop_words: Sequence[str]) -> TextStateMachine:
    """Finds stop words: a choice ends before any of them. All choices of a request share it, as it
    takes memory and time for each character."""
    # A stop word leads to the state None.
    return TextStateMachine({_TEXT: [(word, None) for word in stop_words]})


class ChoiceText:
    """Turns tokens into text, one by one.

    Args:
        initial_state: of the `Prompt`.
        stops: of `stop_machine`.
        has_tools: whether there is anything to call; if not, what looks like a call is text.
        lists_end: whether the token that ends the choice is listed with the others.
        min_tokens: the text of so many first tokens is not searched for stop words.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        initial_state: str,
        stops: TextStateMachine,
        min_tokens: int = 0,
        *,
        has_tools: bool = True,
        lists_end: bool = False,
    ) -> None:
        self._lists_end = lists_end
        self._unsearched = min_tokens
        self._hidden = frozenset(loaded.tokenizer.eos_token_ids)
        self._detokenizer = linear_time(loaded.tokenizer.detokenizer)
        machine = loaded.text_machine if has_tools else loaded.callless_machine
        self._state = machine.make_state(initial_state)
        self._unfinished = 0
        # Characters of all tokens, and of those before any stop word. Between the two begin the
        # tokens that are not listed yet.
        self._decoded_length = self._safe_length = 0
        self._unlisted: deque[tuple[int, Token]] = deque()
        self._stop = stops.make_state(_TEXT)
        self._was_tool = initial_state == _TOOL
        self._tool_text = ""

    def take(self, token: Token) -> Delta:
        """The part that the next token adds. The last one has a finish reason."""
        is_listed = token.finish_reason != "stop" or self._lists_end
        if token.logprob is not None and is_listed:
            self._unlisted.append((self._decoded_length, token))
        text, stop_text = self._up_to_stop(self._decoded(token), token.finish_reason)
        reason = token.finish_reason if stop_text is None else "stop"
        self._safe_length += len(text)
        is_whole = token.finish_reason is not None and stop_text is None
        delta = Delta(finish_reason=reason, stop_text=stop_text)
        before = self._state[0]
        self._state, segments = TextStateMachine.split(self._state, text)
        if reason is not None:
            self._state, held, state = TextStateMachine.flush(self._state)
            segments = [*segments, (state, held)]
        for state, part in segments:
            self._add(delta, state, part)
            delta.is_reasoning = state == "reasoning"
        is_text = before == self._state[0] == "normal"
        delta.tokens = [
            each if is_text else replace(each, is_text=False) for each in self._listed(is_whole)
        ]
        delta.open_call = self._tool_text if self._was_tool else None
        return delta

    def _decoded(self, token: Token) -> str:
        # The token that ends a choice is not part of the text; nor is an ignored end token.
        if token.finish_reason != "stop" and token.token not in self._hidden:
            self._detokenizer.add_token(token.token)
        if token.finish_reason is not None or self._unfinished == MOST_UNFINISHED_TOKENS:
            self._detokenizer.finalize()
        text: str = self._detokenizer.last_segment
        self._unfinished = 0 if text else self._unfinished + 1
        self._decoded_length += len(text)
        return text

    def _listed(self, is_whole: bool) -> Iterator[Token]:
        """The tokens that begin in text which is certainly before any stop word."""
        while self._unlisted and (is_whole or self._unlisted[0][0] < self._safe_length):
            yield self._unlisted.popleft()[1]

    def _up_to_stop(self, text: str, finish_reason: str | None) -> tuple[str, str | None]:
        """The part of a text that is certainly before any stop word, and the word, if one was
        found."""
        if self._unsearched > 0:
            self._unsearched -= 1
            return text, None
        searched = self._stop[3] + text  # what was held back before, too
        self._stop, segments = TextStateMachine.split(self._stop, text)
        safe = "".join(part for _, part in segments)
        if self._stop[0] is None:
            return safe, searched[len(safe) : len(searched) - len(self._stop[3])]
        if finish_reason is not None:
            self._stop, held, _ = TextStateMachine.flush(self._stop)
            safe += held
        return safe, None

    def _add(self, delta: Delta, state: str, part: str) -> None:
        if state == _TOOL:
            self._tool_text += part
        elif state == "reasoning":
            delta.reasoning += part
        elif state == "normal":
            if self._was_tool:
                delta.calls.append(self._tool_text)
                self._tool_text = ""
            delta.text += part
        self._was_tool = state == _TOOL
