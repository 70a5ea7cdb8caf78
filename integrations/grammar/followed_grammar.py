"""Follows one sequence through its grammar.

A sequence is *free* before its grammar begins, as while a model thinks; then any token may come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_kv.integrations.grammar.grammars import one_line


class Trigger:
    """The text after which a grammar begins, such as `</think>`. Tokens may end within it, or go
    on behind it.

    Args:
        text: not empty.
        tokens: llguidance's tokenizer.
    """

    def __init__(self, text: str, tokens: Any) -> None:
        self._text = text.encode()
        self._tokens = tokens
        self._last = b""

    def take(self, token: int) -> list[int] | None:
        """Take the next token. If the text ends in it, returns the tokens of what the token says
        behind it."""
        said = self._last + bytes(self._tokens.decode_bytes([token]))
        _, found, rest = said.partition(self._text)
        if not found:
            self._last = said[max(0, len(said) - len(self._text) + 1) :]
            return None
        self._last = b""
        behind: list[int] = self._tokens.tokenize_bytes(rest) if rest.strip() else []
        return behind

    def before(self, tokens: list[int], barred: Sequence[int]) -> int:
        """How many of these tokens come before the text ends, or before a barred one."""
        last = self._last
        try:
            for count, token in enumerate(tokens):
                if token in barred or self.take(token) is not None:
                    return count
            return len(tokens)
        finally:
            self._last = last


class FollowedGrammar:
    """A sequence within its grammar.

    Args:
        matcher: llguidance's, at the beginning of the grammar. It belongs to this sequence alone.
        tokens: llguidance's tokenizer.
        after: the text after which the grammar begins; None means at once.
        opening: a token that may come first in place of the grammar's; then the grammar begins
            after that text. Models that may think write `<think>`. None: the text must come.
        repeats: whether the sequence is free again after the grammar's end; else it ends there.
        is_required: whether the sequence must not end before the grammar begins.

    Attributes:
        is_free: whether the grammar has not begun, and any token may come that is not barred.
        taken: how many tokens were generated and taken.
        error: why the matcher could not go on; None if all is well. Any token may come then, and
            the sequence should be dropped.
        barred: tokens that must not come before the grammar begins.
        vocab_size: the number of tokens that the matcher knows.
        matcher: as given.
    """

    def __init__(
        self,
        matcher: Any,
        tokens: Any,
        *,
        after: str | None = None,
        opening: int | None = None,
        repeats: bool = False,
        is_required: bool = False,
    ) -> None:
        self.is_free = after is not None and opening is None
        self.taken = 0
        self.error: str | None = None
        self.barred: Sequence[int] = tokens.eos_tokens if is_required else ()
        self.vocab_size: int = tokens.vocab_size
        self.matcher = matcher
        self._trigger = None if after is None else Trigger(after, tokens)
        self._repeats = repeats
        self._opening = opening
        self._forced: list[int] | None = None

    @property
    def is_masking(self) -> bool:
        """Whether some tokens must not come next."""
        return (not self.is_free or len(self.barred) > 0) and self.error is None

    @property
    def opening(self) -> int | None:
        """A token that may come next besides those of the grammar."""
        return self._opening if self.taken == 0 else None

    def take(self, token: int, at: int) -> None:
        """Take the generated token number `at`, unless it is taken already."""
        assert at <= self.taken, f"token {at} comes after {self.taken} tokens"
        if at < self.taken:
            return
        is_opening = token == self.opening
        self.taken += 1
        self._forced = None
        if is_opening:
            self.is_free = True
        elif self.is_free:
            self._look_for_trigger(token)
        elif self.error is None:
            self._match([token])

    def allowed(self, tokens: list[int]) -> int:
        """How many of these tokens may come next, one after the other. Those by which a sequence
        would become free, or be free no more, do not count: masks change there."""
        if self.is_free:
            assert self._trigger is not None, "free sequences have a trigger"
            return self._trigger.before(tokens, self.barred)
        if self.error is not None or self.opening is not None or self.matcher.is_stopped():
            return 0
        return self._before_end(tokens) if self._repeats else self.matcher.validate_tokens(tokens)

    @property
    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice of the text. Others may stand for
        the same text."""
        if self._forced is None:
            can_force = self.is_masking and not self.is_free and self.opening is None
            self._forced = self.matcher.compute_ff_tokens() if can_force else []
        return self._forced

    def drafted(self, proposed: list[int], most: int) -> list[int]:
        """At most so many tokens that may come next: those that the grammar forces, or the
        beginning of those that are proposed, whichever is longer."""
        fitting = proposed[: self.allowed(proposed)]
        forced = self.forced[: self.allowed(self.forced)]
        return max(fitting, forced, key=len)[:most]

    def record_errors(self) -> None:
        """Record why the matcher could not go on, if so."""
        if self.matcher.is_error():
            self.error = one_line(self.matcher.get_error())

    def _before_end(self, tokens: list[int]) -> int:
        count = 0
        while count < len(tokens) and self.matcher.try_consume_tokens(tokens[count : count + 1]):
            count += 1
            if self.matcher.is_stopped():
                self.matcher.rollback(count)
                return count - 1
        self.matcher.rollback(count)
        return count

    def _look_for_trigger(self, token: int) -> None:
        assert self._trigger is not None, "free sequences have a trigger"
        behind = self._trigger.take(token)
        if behind is None:
            return
        if not behind or self.matcher.validate_tokens(behind) == len(behind):
            self.is_free = False
            self._match(behind)

    def _match(self, tokens: list[int]) -> None:
        if self.matcher.is_stopped():
            return  # only the token that ends a text can come, and a stopped matcher refuses it
        if tokens and not self.matcher.consume_tokens(tokens):
            self.record_errors()
        elif self._repeats and self.matcher.is_stopped():
            self.matcher.reset()
            self.is_free = True
