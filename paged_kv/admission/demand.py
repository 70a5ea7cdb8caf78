"""Describes what a request may need."""

from __future__ import annotations

from dataclasses import dataclass

from paged_kv.admission.pool_size import PoolSize


@dataclass(frozen=True)
class Demand:
    """The tokens of a request.

    Attributes:
        prompt_tokens: of its prompt.
        max_tokens: the most tokens generated for each choice.
        choices: the number of continuations of the prompt.
        is_alone: whether it cannot run together with other requests.
        shared_tokens: tokens of the first full pages of its prompt that running requests hold.
        awaits_prefix: whether a running request will soon have computed what its prompt begins
            with, so that it would only compute the same again.
        priority: of requests that run, those with a higher one may be preempted for it.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    is_alone: bool = False
    shared_tokens: int = 0
    awaits_prefix: bool = False
    priority: int = 0

    def bytes_in(self, pool: PoolSize) -> int:
        """The most bytes that all choices take together."""
        one = pool.bytes_for(self.prompt_tokens + self.max_tokens)
        return self._of_all_choices(one, pool)

    def bytes_to_begin(self, pool: PoolSize) -> int:
        """Bytes that all choices take until each has generated a few tokens, see `growth`, beside
        those that running requests hold already."""
        generated = min(self.max_tokens, pool.lookahead)
        all_choices = self._of_all_choices(pool.bytes_for(self.prompt_tokens + generated), pool)
        return all_choices - pool.shared_bytes(min(self.shared_tokens, self.prompt_tokens - 1))

    def _of_all_choices(self, one: int, pool: PoolSize) -> int:
        """The bytes of all choices, of which each alone takes `one`."""
        # Each choice computes the prompt's last token itself.
        shared = pool.shared_bytes(max(0, self.prompt_tokens - 1))
        return one + (self.choices - 1) * (one - shared)
