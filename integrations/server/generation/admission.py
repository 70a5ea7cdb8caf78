"""Which requests of a server may begin, so that no step of a batch ever runs out of memory.

A request is promised all that it may grow to, its prompt and `max_tokens` for each of its choices,
until it ends. Prompts that share pages need less than that, and cached pages are not counted: they
are evicted for what was promised.
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

# Tokens that no memory holds: where they fit, layers see windows only.
UNENDING = 1 << 50


class RequestImpossible(Exception):
    """A request that can never be served."""


@dataclass(frozen=True)
class GroupSize:
    """What a sequence takes in a group of layers.

    Attributes:
        block_bytes: bytes of a block.
        blocks_for: says how many blocks so many tokens take.
        is_ring: whether blocks are written over, so that sequences cannot share them for long.
    """

    block_bytes: int
    blocks_for: Callable[[int], int]
    is_ring: bool = False


@dataclass(frozen=True)
class PoolSize:
    """What a pool can promise.

    Attributes:
        budget: the bytes that it may map.
        slack: those of them that may lie idle, because memory is mapped in slabs.
        groups: all of the pool.
        page_size: tokens a block.
    """

    budget: int
    slack: int
    groups: tuple[GroupSize, ...]
    page_size: int = 256

    @property
    def promisable(self) -> int:
        """Bytes that can be promised in all."""
        return max(0, self.budget - self.slack)

    def bytes_for(self, tokens: int) -> int:
        """The most that a sequence of so many tokens takes."""
        return sum(group.block_bytes * group.blocks_for(tokens) for group in self.groups)

    def shared_bytes(self, tokens: int) -> int:
        """What of that all continuations of these tokens share to their end."""
        shared = [group for group in self.groups if not group.is_ring]
        return sum(group.block_bytes * (tokens // self.page_size) for group in shared)

    def tokens_in(self, nbytes: int) -> float:
        """The longest sequence for which so many bytes suffice; infinite if any would do."""
        if self.bytes_for(UNENDING) <= nbytes:
            return math.inf
        most = nbytes // min(group.block_bytes for group in self.groups) + 1
        lengths = range(0, (most + 1) * self.page_size, self.page_size)
        return lengths[bisect_right(lengths, nbytes, key=self.bytes_for) - 1]


@dataclass(frozen=True)
class Demand:
    """What a request may grow to.

    Attributes:
        prompt_tokens: of its prompt.
        max_tokens: the most that is generated for each choice.
        choices: how many continuations of the prompt are asked.
        drafted: tokens that a draft model may be ahead by.
        is_alone: whether it is computed while nothing else is.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    drafted: int = 0
    is_alone: bool = False

    def bytes_in(self, pool: PoolSize) -> int:
        """The most bytes that all choices take together."""
        one = pool.bytes_for(self.prompt_tokens + self.max_tokens + self.drafted)
        # The last token of a prompt is computed by each choice.
        shared = pool.shared_bytes(max(0, self.prompt_tokens - 1))
        return one + (self.choices - 1) * (one - shared)


@dataclass
class _Waiting(Generic[Request]):
    request: Request
    since: float


@dataclass
class Admission(Generic[Request]):
    """Lets requests begin one after the other, each when there is room for all that it may become.

    Attributes:
        demand_of: what a request may grow to; asked when it arrives, and when its turn has come.
        patience_s: how long a request may wait for its turn.
        places: the most choices that are computed at the same time. A request that asks for more
            begins alone.
        pools: in each of which there must be room.
    """

    demand_of: Callable[[Request], Demand]
    patience_s: float
    places: int = 1 << 30
    clock: Callable[[], float] = monotonic
    pools: list[PoolSize] = field(default_factory=list)
    _line: deque[_Waiting[Request]] = field(default_factory=deque)
    _begun: dict[Request, Demand] = field(default_factory=dict)

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._line)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is promised, and nobody waits."""
        return not self._line and not self._begun

    def arrive(self, request: Request) -> None:
        """Wait behind those that came before.

        Raises:
            RequestImpossible: there is no room for it even alone.
        """
        self._require_possible(self.demand_of(request))
        self._line.append(_Waiting(request, self.clock()))

    def next(self) -> Request | None:
        """The request whose turn it is, if it can begin now. It no longer waits, and is promised
        what it may grow to until `leave`."""
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
        """Promise a request that has begun what it may grow to by now.

        Raises:
            RequestImpossible: there is no room for it even alone.
        """
        demand = self.demand_of(request)
        self._require_possible(demand)
        self._begun[request] = demand

    def leave(self, request: Request) -> None:
        """Neither wait any more nor keep what was promised."""
        if self._begun.pop(request, None) is None:
            self._line = deque(each for each in self._line if each.request is not request)

    def late(self) -> list[Request]:
        """The requests that have waited too long; they no longer wait. Ask after `next`."""
        before = self.clock() - self.patience_s
        late = []
        while self._line and self._line[0].since <= before:
            late.append(self._line.popleft().request)
        return late

    def why_late(self) -> str:
        """What to tell those that are late."""
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
            f"{demand.max_tokens}, and {max(0, most)} are possible in all: shorten the prompt, "
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
