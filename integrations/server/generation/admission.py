"""Decides which requests may begin, so that no step of a batch runs out of memory.

Until it ends, each request is promised the most memory that it may need: its prompt and
`max_tokens` for each choice. Prompts that share pages need less. Cached pages are not counted, as
the pool evicts them for promised memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

Request = TypeVar("Request", bound=Hashable)

# A length that no memory holds: it fits only if all layers have windows.
UNENDING = 1 << 50


class RequestImpossible(Exception):
    """A request that can never be served."""


@dataclass(frozen=True)
class GroupSize:
    """The memory of a sequence in a layer group.

    Attributes:
        block_bytes: bytes of a block.
        blocks_for: returns the number of blocks for a number of tokens.
        is_ring: whether blocks are overwritten, so that sequences cannot share them for long.
    """

    block_bytes: int
    blocks_for: Callable[[int], int]
    is_ring: bool = False


@dataclass(frozen=True)
class PoolSize:
    """The memory that a pool can promise.

    Attributes:
        budget: the bytes that it may map.
        slack: bytes of the budget that may stay unused, because memory is mapped in slabs.
        groups: all layer groups of the pool.
        page_size: tokens a block.
    """

    budget: int
    slack: int
    groups: tuple[GroupSize, ...]
    page_size: int = 256

    @property
    def promisable(self) -> int:
        """The total number of bytes that can be promised."""
        return max(0, self.budget - self.slack)

    def bytes_for(self, tokens: int) -> int:
        """The most bytes that a sequence of `tokens` tokens takes."""
        return sum(group.block_bytes * group.blocks_for(tokens) for group in self.groups)

    def shared_bytes(self, tokens: int) -> int:
        """The bytes of these tokens that all their continuations share to their end."""
        shared = [group for group in self.groups if not group.is_ring]
        return sum(group.block_bytes * (tokens // self.page_size) for group in shared)

    def tokens_in(self, nbytes: int) -> float:
        """The length of the longest sequence that fits in `nbytes`; infinite if any fits."""
        if self.bytes_for(UNENDING) <= nbytes:
            return math.inf
        most = nbytes // min(group.block_bytes for group in self.groups) + 1
        lengths = range(0, (most + 1) * self.page_size, self.page_size)
        return lengths[bisect_right(lengths, nbytes, key=self.bytes_for) - 1]


@dataclass(frozen=True)
class Demand:
    """The most that a request may need.

    Attributes:
        prompt_tokens: of its prompt.
        max_tokens: the most tokens generated for each choice.
        choices: the number of continuations of the prompt.
        drafted: the most tokens that a draft model may be ahead by.
        is_alone: whether it cannot run together with other requests.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    drafted: int = 0
    is_alone: bool = False

    def bytes_in(self, pool: PoolSize) -> int:
        """The most bytes that all choices take together."""
        one = pool.bytes_for(self.prompt_tokens + self.max_tokens + self.drafted)
        # Each choice computes the prompt's last token itself.
        shared = pool.shared_bytes(max(0, self.prompt_tokens - 1))
        return one + (self.choices - 1) * (one - shared)


@dataclass
class _Waiting(Generic[Request]):
    request: Request
    since: float


@dataclass
class Admission(Generic[Request]):
    """Lets requests begin in order, each when the pools can promise all that it may need.

    Attributes:
        demand_of: returns the most that a request may need; called on its arrival and its turn.
        patience_s: seconds that a request may wait for its turn.
        places: the most choices that run at the same time. A request with more begins alone.
        pools: each of them must have room.
    """

    demand_of: Callable[[Request], Demand]
    patience_s: float
    places: int = 1 << 30
    clock: Callable[[], float] = monotonic
    pools: list[PoolSize] = field(default_factory=list)
    _line: deque[_Waiting[Request]] = field(default_factory=deque)
    _begun: dict[Request, Demand] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of waiting requests."""
        return len(self._line)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or holds a promise."""
        return not self._line and not self._begun

    def arrive(self, request: Request) -> None:
        """Queue a request after the earlier ones.

        Raises:
            RequestImpossible: there is no room for it even alone.
        """
        self._require_possible(self.demand_of(request))
        self._line.append(_Waiting(request, self.clock()))

    def next(self) -> Request | None:
        """Dequeue the next request if it can begin now, and promise it what it may need until
        `leave`."""
        if not self._line:
            return None
        first = self._line[0].request
        demand = self.demand_of(first)
        if not self._can_begin(demand):
            return None
        self._line.popleft()
        self._begun[first] = demand
        return first

    def renew(self, request: Request) -> None:
        """Update the promise of a request that has begun to its present demand.

        Raises:
            RequestImpossible: there is no room for it even alone.
        """
        demand = self.demand_of(request)
        self._require_possible(demand)
        self._begun[request] = demand

    def leave(self, request: Request) -> None:
        """Remove a request from the queue, or release its promise."""
        if self._begun.pop(request, None) is None:
            self._line = deque(each for each in self._line if each.request is not request)

    def late(self) -> list[Request]:
        """Dequeue the requests that have waited too long. Call it after `next`."""
        before = self.clock() - self.patience_s
        late = []
        while self._line and self._line[0].since <= before:
            late.append(self._line.popleft().request)
        return late

    def why_late(self) -> str:
        """The error message for requests that have waited too long."""
        shares = [self._promised_bytes(pool) / max(1, pool.promisable) for pool in self.pools]
        return (
            f"the request could not begin in {self.patience_s:g} s: {len(self._begun)} others run, "
            f"which may still grow to {max(shares, default=0):.0%} of what the cache can promise. "
            "Ask again later or with a smaller max_tokens, or start the server with a larger "
            "--max-kv-bytes, --decode-concurrency or --admission-timeout"
        )

    def _require_possible(self, demand: Demand) -> None:
        if all(demand.bytes_in(pool) <= pool.promisable for pool in self.pools):
            return
        asked = demand.prompt_tokens + demand.max_tokens
        most = min(pool.tokens_in(pool.promisable) for pool in self.pools) - demand.drafted
        each = f" for each of {demand.choices} choices" if demand.choices > 1 else ""
        raise RequestImpossible(
            f"{asked} tokens were asked{each}, {demand.prompt_tokens} of the prompt and max_tokens="
            f"{demand.max_tokens}, and at most {max(0, most)} fit: shorten the prompt, "
            "lower max_tokens or n, or start the server with a larger --max-kv-bytes"
        )

    def _can_begin(self, demand: Demand) -> bool:
        if not self._begun:
            return True
        if demand.is_alone or any(each.is_alone for each in self._begun.values()):
            return False
        taken = sum(each.choices for each in self._begun.values())
        return taken + demand.choices <= self.places and all(
            self._promised_bytes(pool) + demand.bytes_in(pool) <= pool.promisable
            for pool in self.pools
        )

    def _promised_bytes(self, pool: PoolSize) -> int:
        return sum(demand.bytes_in(pool) for demand in self._begun.values())
