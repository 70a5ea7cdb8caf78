"""What a request gets: its choices, as far as they are generated, and its token counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paged_kv.server.engine.jobs import HeldPrompt, ScoredToken, Token


@dataclass
class Usage:
    """The token counts of a request. `accepted_tokens` of the `draft_tokens` were accepted, and
    `held` says how many first tokens of a prompt stay cached, and how long. `max_tokens` is the
    most tokens of a choice where the request asked for more than fit."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_tokens: int = 0
    draft_tokens: int = 0
    reasoning_tokens: int = 0
    held: tuple[HeldPrompt, ...] = ()
    max_tokens: int | None = None

    @property
    def limit(self) -> dict[str, int]:
        """The field of usage objects that says how many tokens fit, where more were asked for."""
        return {} if self.max_tokens is None else {"max_tokens": self.max_tokens}

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({"completion_tokens_details": details} if (details := self._details) else {}),
            **self.limit,
        }

    @property
    def _details(self) -> dict[str, int]:
        """Tokens of thoughts; and drafted ones, as OpenAI counts those of predicted outputs."""
        details = {"reasoning_tokens": self.reasoning_tokens} if self.reasoning_tokens else {}
        if self.draft_tokens:
            details |= {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
            }
        return details


@dataclass
class Choice:
    """One choice, as far as it is generated.

    Attributes:
        index: its number.
        tokens: those not sent yet, with log probabilities, if the request asked for these.
        count: the number of all its tokens.
        reasoning_count: of these, the number of those of thoughts.
        stop_text: the stop text before which it ended, if it did.
        prompt: the log probabilities of its prompt, if they were asked for.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)
    count: int = 0
    reasoning_count: int = 0
    stop_text: str | None = None
    prompt: list[ScoredToken] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing yet, tokens aside."""
        return not (self.text or self.reasoning or self.tool_calls or self.finish_reason)

    def add(self, new: Choice) -> None:
        """Append a part that was generated since."""
        self.text += new.text
        self.reasoning += new.reasoning
        self.tool_calls += new.tool_calls
        self.tokens += new.tokens
        self.finish_reason = new.finish_reason
        self.stop_text = new.stop_text
        self.prompt = new.prompt or self.prompt
