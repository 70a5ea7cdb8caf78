"""The two policies that say whether a request may begin."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from paged_kv.admission.demand import Demand
from paged_kv.admission.pool_size import PoolSize
from paged_kv.ranks import Ranks


class Policy(Protocol):
    """Says whether a request may begin, and whether it ever may."""

    def is_possible(self, demand: Demand, pool: PoolSize) -> bool:
        """Whether a pool could serve the request if no other ran."""
        ...

    def has_room(
        self, demand: Demand, begun: Collection[Demand], pools: Collection[PoolSize]
    ) -> bool:
        """Whether the request may begin beside the ones that have begun."""
        ...


class Reserve:
    """Promises each request all that it may need until it ends: its prompt and `max_tokens` for
    each choice. So nothing that has begun is ever preempted. Pages that requests share are promised
    to each of them, because the others may end first.

    Cached pages are not counted, as the pool evicts them for promised memory.
    """

    def is_possible(self, demand: Demand, pool: PoolSize) -> bool:
        return demand.bytes_in(pool) <= pool.promisable

    def has_room(
        self, demand: Demand, begun: Collection[Demand], pools: Collection[PoolSize]
    ) -> bool:
        return not demand.awaits_prefix and all(
            sum(each.bytes_in(pool) for each in begun) + demand.bytes_in(pool) <= pool.promisable
            for pool in pools
        )


@dataclass(frozen=True)
class Optimistic:
    """Lets a request begin when its prompt and a little more fit beside what is in use now, see
    `growth`. When memory gets short later, the latest sequences are preempted.

    The choices of a request are preempted one by one, so one of them alone must fit.

    Attributes:
        fits: says whether a request fits beside what is in use now.
    """

    fits: Callable[[Demand], bool]

    def is_possible(self, demand: Demand, pool: PoolSize) -> bool:
        return replace(demand, choices=1).bytes_in(pool) <= pool.promisable

    def has_room(
        self, demand: Demand, begun: Collection[Demand], pools: Collection[PoolSize]
    ) -> bool:
        return not demand.awaits_prefix and self.fits(demand)


@dataclass(frozen=True)
class Unanimous:
    """A policy of which every rank asks its own pools: a request begins where all have room.

    Attributes:
        policy: decides on this rank.
        ranks: the processes that share the model.
    """

    policy: Policy
    ranks: Ranks

    def is_possible(self, demand: Demand, pool: PoolSize) -> bool:
        return self.ranks.agree("possible", self.policy.is_possible(demand, pool))

    def has_room(
        self, demand: Demand, begun: Collection[Demand], pools: Collection[PoolSize]
    ) -> bool:
        return self.ranks.agree("room", self.policy.has_room(demand, begun, pools))
