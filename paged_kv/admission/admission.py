"""Decides which requests of a server may begin: those of the lowest priority first, in the order of
their arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Generic, TypeVar

from paged_kv.admission.demand import Demand
from paged_kv.admission.policies import Policy, Reserve
from paged_kv.admission.pool_size import PoolSize

Request = TypeVar("Request", bound=Hashable)


class RequestImpossible(Exception):
    """A request that can never be served.

    Attributes:
        is_long: whether its prompt alone has too many tokens.
    """

    def __init__(self, message: str, *, is_long: bool) -> None:
        super().__init__(message)
        self.is_long = is_long


@dataclass
class _Waiting(Generic[Request]):
    request: Request
    since: float
    priority: int


@dataclass
class Admission(Generic[Request]):
    """Lets requests begin in order, each when its policy finds room for it.

    Attributes:
        demand_of: returns the most that a request may need; called on its arrival and its turn.
        patience_s: seconds that a request may wait for its turn.
        places: the most choices that run at the same time. A request with more begins alone.
        pools: each of them must have room.
        policy: says whether there is room.
    """

    demand_of: Callable[[Request], Demand]
    patience_s: float
    places: int = 1 << 30
    clock: Callable[[], float] = monotonic
    pools: list[PoolSize] = field(default_factory=list)
    policy: Policy = field(default_factory=Reserve)
    _line: list[_Waiting[Request]] = field(default_factory=list)
    _begun: dict[Request, Demand] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of waiting requests."""
        return len(self._line)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._line and not self._begun

    def arrive(self, request: Request, priority: int = 0) -> None:
        """Queue a request after the earlier ones of its priority, and before those of higher ones.

        Raises:
            RequestImpossible: there is no room for it even alone.
        """
        self._require_possible(self.demand_of(request))
        waiting = _Waiting(request, self.clock(), priority)
        insort(self._line, waiting, key=lambda each: each.priority)

    def fitting_tokens(self, request: Request) -> int:
        """The most generated tokens, up to those that a request asks for, with which there is room
        for it alone; 0 if there is none even for one."""
        demand = self.demand_of(request)
        if self._is_possible(demand):
            return demand.max_tokens
        # The policies are asked 31 times at most: of several ranks, each asks as often.
        counts = range(1, demand.max_tokens)
        return bisect_left(
            counts,
            True,
            key=lambda count: not self._is_possible(replace(demand, max_tokens=count)),
        )

    def next(self) -> Request | None:
        """Dequeue the next request if it can begin now. It counts as running until `leave`."""
        if not self._line:
            return None
        first = self._line[0].request
        demand = self.demand_of(first)
        if not self._can_begin(demand):
            return None
        del self._line[0]
        self._begun[first] = demand
        return first

    def renew(self, request: Request) -> None:
        """Update the demand of a request that has begun.

        Raises:
            RequestImpossible: there is no room for it even alone.
        """
        demand = self.demand_of(request)
        self._require_possible(demand)
        self._begun[request] = demand

    def leave(self, request: Request) -> None:
        """Remove a request that waits or runs."""
        if self._begun.pop(request, None) is None:
            self._line = [each for each in self._line if each.request is not request]

    def late(self) -> list[Request]:
        """Dequeue the requests that have waited too long. Call it after `next`."""
        before = self.clock() - self.patience_s
        late = [each.request for each in self._line if each.since <= before]
        self._line = [each for each in self._line if each.since > before]
        return late

    def why_late(self) -> str:
        """The error message for requests that have waited too long."""
        begun = self._begun.values()
        shares = [
            sum(demand.bytes_in(pool) for demand in begun) / max(1, pool.promisable)
            for pool in self.pools
        ]
        return (
            f"the request could not begin in {self.patience_s:g} s: the requests that "
            f"run ({len(begun)}) may still grow to {max(shares, default=0):.0%} of what the cache "
            "can promise. "
            "Ask again later or with a smaller max_tokens, or start the server with a larger "
            "--max-kv-bytes, --decode-concurrency or --admission-timeout"
        )

    def _require_possible(self, demand: Demand) -> None:
        if self._is_possible(demand):
            return
        tokens = demand.prompt_tokens + demand.max_tokens
        most = max(0, min(pool.tokens_in(pool.promisable) for pool in self.pools))
        each = f" for each of {demand.choices} choices" if demand.choices > 1 else ""
        is_long = demand.prompt_tokens >= most
        # As for a prompt beyond the model's context: clients compact a conversation by these words.
        told = f"prompt is too long: {demand.prompt_tokens} tokens > {max(0, most - 1)} maximum: "
        raise RequestImpossible(
            f"{told if is_long else ''}{tokens} tokens were asked{each}, {demand.prompt_tokens} of "
            f"the prompt and max_tokens={demand.max_tokens}, and at most {most} fit: shorten the "
            "prompt, lower max_tokens or n, or start the server with a larger --max-kv-bytes",
            is_long=is_long,
        )

    def _is_possible(self, demand: Demand) -> bool:
        return all(self.policy.is_possible(demand, pool) for pool in self.pools)

    def _can_begin(self, demand: Demand) -> bool:
        if not self._begun:
            return True
        if demand.is_alone or any(each.is_alone for each in self._begun.values()):
            return False
        taken = sum(each.choices for each in self._begun.values())
        return taken + demand.choices <= self.places and self.policy.has_room(
            demand, self._begun.values(), self.pools
        )
