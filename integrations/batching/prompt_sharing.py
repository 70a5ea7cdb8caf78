"""Lets prompts of a batch that begin alike compute their beginning once.

The prompt that begins first is cut where others part from it, also where they come later, and what
it has computed is cached there. Those that wait for that begin then, with what is cached.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from itertools import accumulate, chain, islice
from math import inf
from typing import Any

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.integrations.batching.prompt_segments import (
    WORTH_SHARING,
    Reuses,
    Tokens,
    cut_at,
    joined,
    shared_beyond,
)
from paged_kv.integrations.batching.rows import Requests, Waiting, WaitingQueue
from paged_kv.integrations.mlx_lm_internals import GeneratorParts
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.prefix.keeping import inner_salt


class PromptSharing:
    """The prompts of one BatchGenerator that are new or being computed.

    Args:
        generator: BatchGenerator.
        factory: finds and keeps the prompt caches of its model.
        queue: its sequences that wait.
        requests: of sequences, by uid.

    Attributes:
        new: waiting sequences whose prompts were not looked up yet.
    """

    def __init__(
        self,
        generator: Any,
        factory: Reuses,
        queue: WaitingQueue,
        requests: Requests,
    ) -> None:
        self._generator = generator
        self._parts = GeneratorParts(generator)
        self._factory = factory
        self._queue = queue
        self._requests = requests
        self.new: set[int] = set()
        # Of prompts that wait. To look all of them up in each step would take long.
        self._cached: dict[int, tuple[int, int]] = {}
        self._known_state = 0, 0
        # Where prompts that are being computed will be cached for others, in tokens.
        self._ends: dict[int, set[int]] = {}

    def forget_all_but(self, uids: set[int]) -> None:
        """Forget the sequences that have ended."""
        self.new &= uids
        self._ends = {uid: ends for uid, ends in self._ends.items() if uid in uids}

    def begin_step(self) -> None:
        """Forget what was cached before, if that may have changed."""
        state = len(self._factory.pool.index), self._factory.pool.bytes_active
        if state != self._known_state:
            self._known_state = state
            self._cached.clear()

    def cached(self, uid: int) -> tuple[int, int]:
        """How many tokens of a waiting prompt are cached, and how many of these are in use."""
        if uid not in self._cached:
            tokens = self._queue[uid].all_tokens
            self._cached[uid] = self._factory.peek(tokens, salt=self._requests.of(uid).salt)
        return self._cached[uid]

    def cut(self, waiting: Waiting) -> Waiting:
        """A sequence that begins, whose prompt is also cut where other prompts are known to part
        from it: what it shares with them is cached there."""
        uid, tokens, cached = waiting.uid, waiting.all_tokens, len(waiting.tokens)
        salt = self._requests.of(uid).salt
        others = (
            each.all_tokens
            for each in self._queue
            if each.uid in self.new - {uid} and self._is_of(each.uid, salt)
        )
        shared = max([common_prefix(tokens, other) for other in others], default=0)
        goals = {shared, self._factory.parting(tokens, salt=salt)}
        ends = {
            end
            for each in goals
            if (end := self._place(min(each, len(tokens) - 1))) >= cached + WORTH_SHARING
        }
        segments = cut_at(waiting.segments, [end - cached for end in ends])
        if self._requests.of(uid).keep is not None:
            ends.update(self._place(cached + end) for end in accumulate(map(len, segments[:-1])))
        self._ends[uid] = ends
        return waiting._replace(segments=segments)

    def awaits(self, number: int, running: list[int]) -> bool:
        """Whether a prompt that runs is about to have computed and cached what a waiting sequence
        begins with, beyond what is cached now.

        A prompt that waits for that is not computed twice, and begins at most one step later than
        it would have been computed.
        """
        tokens, salt = self._queue[number].all_tokens, self._requests.of(number).salt
        cached, _ = self.cached(number)
        step = self._generator.prefill_step_size
        for uid, parts, computed in self._prompts(running):
            # Before all of a long prompt is joined.
            begins_alike = tokens[:WORTH_SHARING] == [*islice(chain(*parts), WORTH_SHARING)]
            if not begins_alike or not self._is_of(uid, salt):
                continue
            missing = shared_beyond(cached, tokens, joined(parts)[:-1])
            if missing and self._end_near(uid, computed, cached + missing) <= missing + step:
                return True
        return False

    def _end_near(self, uid: int, computed: int, goal: int) -> float:
        """How many tokens of a prompt that runs must be computed until its first `goal` tokens are
        cached, but for a few. A prompt that is being computed is cut there; infinite if they are
        computed already, or if it begins in this step."""
        goal = self._place(goal)
        ends = self._ends.setdefault(uid, set())
        near = [end for end in ends if computed < end <= goal and goal - end < WORTH_SHARING]
        if near:
            return max(near) - computed
        reading = self._parts.reading.uids
        if computed >= goal or uid not in reading:
            return inf
        segments = self._parts.processing[reading.index(uid)][0]
        segments[:] = cut_at(segments, [goal - computed])
        ends.add(goal)
        return goal - computed

    def _place(self, tokens: int) -> int:
        """Where a prompt may be cut among its first tokens: of a reproducible one only where a page
        ends."""
        return tokens // PAGE_SIZE * PAGE_SIZE if self._factory.pool.is_reproducible else tokens

    def keep(self, response: Any) -> None:
        """Keep what is computed of a prompt where one of its segments ends."""
        ends = self._ends.get(response.uid)
        if not ends or response.end_of_prompt or not response.end_of_segment:
            return
        cache, tokens = self._generator.extract_cache([response.uid])[response.uid]
        # Of a prompt of two tokens there are no states yet.
        if len(tokens) in ends and len(tokens) > 1:
            request = self._requests.of(response.uid)
            salt, session = request.salt, request.session
            insert = partial(self._factory.insert_cache, salt=salt, session=session)
            (request.keep or insert)(tokens[:], cache)

    def _prompts(self, running: list[int]) -> Iterator[tuple[int, list[Tokens], int]]:
        """The prompts that are being computed: uid, tokens in parts, and how many are computed."""
        batch = self._parts.reading
        for uid, tokens, (segments, *_) in zip(
            batch.uids, batch.tokens, self._parts.processing, strict=True
        ):
            yield uid, [tokens, *segments], len(tokens)
        for each in self._queue:
            if each.uid in running:
                yield each.uid, [each.tokens, *each.segments], len(each.tokens)

    def _is_of(self, uid: int, salt: Hashable) -> bool:
        """Whether a sequence shares prompts with those of a salt."""
        return inner_salt(self._requests.of(uid).salt) == inner_salt(salt)
