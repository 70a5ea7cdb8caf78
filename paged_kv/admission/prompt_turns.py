"""Decides which prompts of a batch a step computes, and how many tokens of each.

Between two tokens of the answers that run, a step can compute a part of a prompt. Answers have a
right to a share of the time: what a step takes beyond that is owed to them, and a part of a long
prompt waits until it is paid for. The share is meant beside one prompt. Each one that waits has the
same right as that one, so beside many prompts answers have less, and a batch fills quickly.

    part    as many tokens as take `PART_STEPS` steps without prompts, by the speeds that were
            measured, for each prompt that waits: a part costs about one such step besides, as it
            reads the weights once more. While nobody answers, as many as a step may have.
    order   the prompt with the least left goes first, so that a short one does not wait for a long
            one. Every `OLDEST_TURN`-th part is for the oldest, so that a long one always moves.
    debt    a prompt that ends with the part is computed if answers are owed less than a part, and
            one with only its last token left at any time.

This knows no model: tokens and seconds go in, tokens come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Any, NamedTuple

PART_STEPS = 16
OLDEST_TURN = 4
_LEAST_PART = 16


class Prompt(NamedTuple):
    """A prompt that is not computed yet.

    Attributes:
        number: of its sequence.
        rank: those of a lower rank go first.
        arrival: what prompts of one rank are sorted by on the oldest one's turn.
        computed: how many of its tokens are computed or cached.
        left: how many are not.
    """

    number: int
    rank: Any
    arrival: Any
    computed: int
    left: int


class PromptTurns:
    """The turns of the prompts of one batch.

    Args:
        most_tokens: the most tokens of prompts in a step.
        most_prompts: the most prompts in a step.
        page_size: tokens of a page, at whose borders parts end.
        share: the share of the time that running answers have a right to beside one prompt, from 0
            to less than 1.

    Raises:
        ValueError: there is no such share.

    Attributes:
        part: the tokens of prompts that a step computes at most.
        owed_s: the seconds that answers are owed.
    """

    def __init__(self, most_tokens: int, most_prompts: int, page_size: int, share: float) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"decode_share is {share}: give a number from 0 to less than 1")
        self._most_tokens, self._most_prompts = most_tokens, most_prompts
        self._page_size, self._share = page_size, share
        self._share_now = self._step_s = self._part_s = 0.0
        self.owed_s = 0.0
        self._parts = 0  # that were computed while other prompts waited
        self.part = most_tokens

    def begin_step(
        self, answers: int, prompts: int, step_s: float, token_s: float, owed_s: float
    ) -> None:
        """Set the part of a step.

        Args:
            answers: how many run.
            prompts: how many are not computed yet.
            step_s: seconds of a step without prompts; 0 if that was not measured.
            token_s: seconds of a token of a prompt; 0 if that was not measured.
            owed_s: what these answers are owed by the steps before.
        """
        self._step_s = step_s
        self.part = self._most_tokens
        if not answers or not self._share:
            self._share_now = self._part_s = self.owed_s = 0.0
            return
        self._share_now = self._share / (self._share + (1 - self._share) * max(1, prompts))
        fitting = PART_STEPS * max(1, prompts) * step_s / token_s if token_s else 0
        part = 1 << int(log2(max(_LEAST_PART, fitting))) if fitting else self._page_size
        self.part = min(self._most_tokens, part)
        self._part_s = self.part * token_s
        self.owed_s = max(self._paid_for, owed_s)

    def sort_key(self, prompt: Prompt) -> tuple[Any, ...]:
        """What prompts are sorted by."""
        least_left = (prompt.left, prompt.arrival)
        order = prompt.arrival if self._is_for_oldest else least_left
        return prompt.left > 1, prompt.rank, order

    def chosen(self, prompts: Sequence[Prompt]) -> dict[int, int]:
        """The tokens of prompts that the step computes, by number."""
        tokens: dict[int, int] = {}
        longest = parts = 0
        for prompt in sorted(prompts, key=self.sort_key)[: self._most_prompts]:
            if prompt.left <= 1:
                tokens[prompt.number] = prompt.left
                continue
            # Prompts that are computed together are padded to the longest.
            longest, parts = max(longest, prompt.left), parts + 1
            if parts * longest <= self.part and self.owed_s <= self._part_s:
                tokens[prompt.number] = prompt.left
            else:
                if parts == 1 and self.owed_s <= self._paid_for:
                    tokens[prompt.number] = self._to_border(prompt)
                break
        return tokens

    def end_step(self, seconds: float, prompts: Sequence[Prompt], computed: dict[int, int]) -> None:
        """Take in a step.

        Args:
            seconds: it took.
            prompts: all, those that wait included.
            computed: what `chosen` has returned for those that could be computed.
        """
        has_part = any(count > 1 for count in computed.values())
        if prompts:
            paid = self._step_s - self._share_now * seconds
            # A slow step pays too: else no part would come where many are slow.
            least = (1 - self._share_now) * self._step_s / 2
            self.owed_s -= paid if has_part else max(paid, least)
        else:  # all of the time was that of answers
            self.owed_s = max(0.0, self.owed_s - seconds)
        if len(prompts) > 1 and has_part:
            oldest = min(prompts, key=lambda each: (each.rank, each.arrival))
            # The oldest keeps its turn until there is room for it.
            self._parts += not self._is_for_oldest or oldest.number in computed

    @property
    def _paid_for(self) -> float:
        """What answers owe when they have had the time for the next part."""
        return -self._share_now * self._part_s

    @property
    def _is_for_oldest(self) -> bool:
        return self._parts % OLDEST_TURN == OLDEST_TURN - 1

    def _to_border(self, prompt: Prompt) -> int:
        """The tokens of a part that ends at the border of a page, or of an equal part of one."""
        unit = min(self.part, self._page_size)
        return (prompt.computed + self.part) // unit * unit - prompt.computed
