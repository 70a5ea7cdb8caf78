"""Decides before each step which sequences run, and which parts of their prompts it computes.

Sequences run in the order of their priorities, if they have any, and of their arrival. A sequence
is named by its number, which counts arrivals. The line of waiting sequences is sorted by that
order, so a preempted sequence, which came before those that have never run, is at the head of those
of its priority.

    begins      the head of the line, while there is room for it and a place
    preempted   the last of the running sequences, while the next step of all does not fit; and
                those of worse priorities than the head of the line, if that makes room for it

The first running sequence is never preempted for those behind it, so it ends at some time, and the
next one becomes the first: no sequence waits for ever while none of a better priority comes. It is
preempted only for sequences that cannot be: these end, and it is the next to begin. A sequence that
has come back is spared until it has generated a token, while there is another one to preempt.

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

This knows no model and no arrays. What it asks and commands is a `Runner`, so several machines can
follow the decisions of one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence, Set
from math import log2
from typing import Any, NamedTuple, Protocol


class Runner(Protocol):
    """Runs the sequences that a `Scheduler` chooses."""

    def reserve(self, running: list[int]) -> bool:
        """Reserve memory for the next step of these sequences; false if the pool does not hold it,
        after eviction and requantisation."""
        ...

    def preempt(self, number: int) -> None:
        """Take a sequence out of the batch, and cache its pages for its return."""
        ...

    def awaits(self, number: int, running: list[int]) -> bool:
        """Whether it is not a waiting sequence's turn, or a running one computes what both begin
        with; others may begin before it until then."""
        ...

    def has_room(self, number: int, running: list[int]) -> bool:
        """Whether a waiting sequence may begin beside the running ones."""
        ...

    def would_have_room(self, number: int, running: list[int], victims: list[int]) -> bool:
        """Whether it could if these were preempted."""
        ...

    def begin(self, number: int) -> bool:
        """Let a waiting sequence run, and reserve memory for its first step; false, and no effect,
        if the pool does not hold it."""
        ...


# Sequences that may begin before others in the line, which await what a running one computes.
HEAD = 8


class Scheduler:
    """Chooses the sequences of each step.

    Args:
        runner: runs them.
        order: what sequences are sorted by: their priority, the lowest of which comes first, and
            their arrival.
    """

    def __init__(self, runner: Runner, order: Callable[[int], tuple[int, Any]]) -> None:
        self._runner = runner
        self._order = order
        self._preempted: set[int] = set()
        self._returned: set[int] = set()
        self.preemptions = 0

    def schedule(
        self,
        running: list[int],
        waiting: list[int],
        places: int,
        fixed: Set[int] = frozenset(),
    ) -> bool:
        """Choose the sequences of the next step: moves numbers between these lists. `running` is
        sorted, and of `waiting` the first may begin first. `places` is the number of sequences that
        may begin, and `fixed` those that cannot be preempted. False if memory does not hold the
        next step of the first and of these.

        O(running sequences) if nothing is preempted and nothing waits.
        """
        if self._preempted or self._returned:  # forget those that have ended
            self._preempted &= set(waiting)
            self._returned &= set(running)
        while not self._runner.reserve(running):
            victim = self._victim(running, fixed)
            if victim is None:
                return False
            self._preempt(victim, running)
            waiting.insert(0, victim)
        while waiting and places > 0:
            preempted = self.preemptions
            head = (each for each in waiting[:HEAD] if not self._runner.awaits(each, running))
            number = next(head, None)
            if number is None or not self._begin(number, running, waiting, fixed):
                break
            waiting.remove(number)
            insort(running, number, key=self._order)
            places += self.preemptions - preempted - 1
        return bool(running) or not waiting or places <= 0

    def _preempt(self, number: int, running: list[int]) -> None:
        """Take a running sequence out of the batch; it comes back when it is its turn."""
        self._runner.preempt(number)
        self._preempted.add(number)
        self._returned.discard(number)
        self.preemptions += 1
        running.remove(number)

    def note_token(self, number: int) -> None:
        """Note that a sequence has generated a token: it may be preempted again."""
        self._returned.discard(number)

    def _victim(self, running: list[int], fixed: Set[int]) -> int | None:
        others = [number for number in running if number not in fixed]
        if len(others) == len(running):
            others = running[1:]
        return next(
            (number for number in reversed(others) if number not in self._returned),
            others[-1] if others else None,
        )

    def _begin(self, number: int, running: list[int], waiting: list[int], fixed: Set[int]) -> bool:
        """Let a waiting sequence run, if there is or can be made room for it."""
        if running and not self._make_room(number, running, waiting, fixed):
            return False
        if not self._runner.begin(number):
            return False
        if number in self._preempted:
            self._preempted.remove(number)
            self._returned.add(number)
        return True

    def _make_room(
        self, number: int, running: list[int], waiting: list[int], fixed: Set[int]
    ) -> bool:
        """Whether there is room for a waiting sequence, if need be in the place of sequences of
        worse priorities: of none if that would not be enough."""
        if self._runner.has_room(number, running):
            return True
        (priority, _), spared = self._order(number), fixed | self._returned
        victims = [
            each for each in running if self._order(each)[0] > priority and each not in spared
        ]
        if not victims or not self._runner.would_have_room(number, running, victims):
            return False
        while victims:
            waiting.append(victims[-1])
            self._preempt(victims.pop(), running)
            if self._runner.has_room(number, running):
                return True
        return False


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
        most_tokens, most_prompts: the most tokens of prompts, and prompts, in a step.
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
            step_s, token_s: seconds of a step without prompts, and of a token of a prompt; 0 if
                that was not measured.
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
        order = prompt.arrival if self._is_for_oldest else (prompt.left, prompt.arrival)
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
                    # The part ends at the border of a page, or of an equal part of one.
                    unit = min(self.part, self._page_size)
                    end = (prompt.computed + self.part) // unit * unit
                    tokens[prompt.number] = end - prompt.computed
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
