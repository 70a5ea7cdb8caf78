"""Which requests of a server may begin, so that no step of a batch ever runs out of memory.

A request is promised all that it may grow to, its prompt and `max_tokens`, until it ends. Prompts
that share pages need less than that, and cached pages are not counted: they are evicted for what
was promised.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

Request = TypeVar("Request")

# Tokens that no memory holds: where they fit, layers see windows only.
UNENDING = 1 << 50


class RequestRefused(Exception):
    """A request that was not begun; `status` is what HTTP says then."""

    status = 400


class RequestImpossible(RequestRefused):
    """There is something in the request that can never be served."""


class ServerBusy(RequestRefused):
    """There was no memory for a request in time.

    Attributes:
        retry_after_s: when it makes sense to ask again.
    """

    status = 503

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class GroupSize:
    """What a sequence takes in a group of layers.

    Attributes:
        block_bytes: bytes of a block.
        blocks_for: says how many blocks so many tokens take.
    """

    block_bytes: int
    blocks_for: Callable[[int], int]


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

    def tokens_in(self, nbytes: int) -> float:
        """The longest sequence for which so many bytes suffice; infinite if any would do."""
        if self.bytes_for(UNENDING) <= nbytes:
            return math.inf
        most = nbytes // min(group.block_bytes for group in self.groups) + 1
        lengths = range(0, (most + 1) * self.page_size, self.page_size)
        return lengths[bisect_right(lengths, nbytes, key=self.bytes_for) - 1]


@dataclass
class _Waiting(Generic[Request]):
    request: Request
    since: float


@dataclass
class Admission(Generic[Request]):
    """Lets requests begin one after the other, each when there is room for all that it may become.

    Attributes:
        tokens_of: the most tokens that a request may hold, or None if it needs no promise; asked
            when it is the request's turn.
        patience_s: how long a request may wait for memory.
        pools: in each of which there must be room.
    """

    tokens_of: Callable[[Request], int | None]
    patience_s: float
    clock: Callable[[], float] = monotonic
    pools: list[PoolSize] = field(default_factory=list)
    _line: deque[_Waiting[Request]] = field(default_factory=deque)
    _promised: dict[Hashable, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._line)

    def arrive(self, request: Request) -> None:
        """Wait behind those that came before."""
        self._line.append(_Waiting(request, self.clock()))

    def next(self) -> Request | None:
        """The request whose turn it is, if there is room for it now; it no longer waits.

        One that can never begin has its turn at once, and is refused by `require_possible`.
        """
        if not self._line:
            return None
        first = self._line[0].request
        tokens = self.tokens_of(first)
        if tokens is None or self._possible() < tokens or self._fits(tokens):
            return self._line.popleft().request
        return None

    def late(self) -> list[Request]:
        """The requests that have waited too long; they no longer wait."""
        before = self.clock() - self.patience_s
        late = []
        while self._line and self._line[0].since <= before:
            late.append(self._line.popleft().request)
        return late

    def busy(self) -> ServerBusy:
        """What to tell those that are late."""
        shares = [self._promised_bytes(pool) / max(1, pool.promisable) for pool in self.pools]
        return ServerBusy(
            f"no memory became free in {self.patience_s:g} s: {len(self._promised)} requests may "
            f"still grow to {max(shares, default=0):.0%} of what the cache can promise. Ask again "
            "later or with a smaller max_tokens, or start the server with a larger "
            "--max-kv-bytes or --admission-timeout",
            max(1, math.ceil(self.patience_s)),
        )

    def require_possible(self, prompt_tokens: int, max_tokens: int, extra: int = 0) -> None:
        """Raise a RequestImpossible if there is no room for this even alone."""
        possible = self._possible()
        asked = prompt_tokens + max_tokens
        if asked + extra > possible:
            raise RequestImpossible(
                f"{asked} tokens were asked, {prompt_tokens} of the prompt and max_tokens="
                f"{max_tokens}, and {max(0, possible - extra)} are possible: shorten the prompt, "
                "lower max_tokens, or start the server with a larger --max-kv-bytes"
            )

    def promise(self, key: Hashable, tokens: int) -> None:
        """Keep room for a request that begins, until `end`."""
        self._promised[key] = tokens

    def end(self, key: Hashable) -> None:
        """Note that a request is over; one that is not known was over before."""
        self._promised.pop(key, None)

    def _possible(self) -> float:
        """The most tokens that any one request can hold."""
        return min((pool.tokens_in(pool.promisable) for pool in self.pools), default=math.inf)

    def _fits(self, tokens: int) -> bool:
        return all(
            self._promised_bytes(pool) + pool.bytes_for(tokens) <= pool.promisable
            for pool in self.pools
        )

    def _promised_bytes(self, pool: PoolSize) -> int:
        return sum(map(pool.bytes_for, self._promised.values()))
