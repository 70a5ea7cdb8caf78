"""Chooses replicas for prompts: where little is to be computed, and few others wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from paged_kv.lru import LRU
from paged_kv.server.replicas.forwarded_request import (
    LEAST_CUT,
    ForwardedRequest,
    Progress,
    Trail,
    cuts,
)

# As much as a running request counts beside its prompt, in bytes of prompts: its answer takes time
# too, and slows other answers. Prompts find and wait as much with 2,000 as with 6,000
# (benches/simulated_replicas.py, where answers slow nothing), and 6,000 spreads requests better.
RUNNING = 6000

# A byte that a replica would have to compute counts three times: it holds up those that come after.
# Of Mooncake's first 8,000 conversations, on 16 replicas, 0.153 is found with 1, 0.168 with 2, and
# 0.180 with 3, after waits as long. At a load that is too much they wait 29 s with 1, 11 s with 3.
MISSING = 3

# A beginning takes about 280 bytes, and a conversation of 8,000 tokens has 50 of them.
MOST_BEGINNINGS = 1 << 17


@dataclass(slots=True)
class Beginning:
    """What is known of a beginning.

    Attributes:
        replicas: those that have computed it.
        continuations: in how many ways prompts went on, up to the next cut.
    """

    replicas: tuple[str, ...] = ()
    continuations: int = 0


class KnownBeginnings:
    """Which replicas have computed which beginnings of prompts. Beyond a limit, those go that were
    used least recently, and of these the longest first.

    Args:
        most: how many beginnings to know at most.

    Attributes:
        counts: how many each replica has.
    """

    def __init__(self, most: int = MOST_BEGINNINGS) -> None:
        self.counts: Counter[str] = Counter()
        self._beginnings: LRU[int, Beginning] = LRU(most)

    def __len__(self) -> int:
        return len(self._beginnings)

    def __contains__(self, digest: int) -> bool:
        return digest in self._beginnings

    def known(self, trail: Trail) -> dict[str, int]:
        """How many bytes of a prompt each replica has computed, for those that know any."""
        return _known(self._path(trail))

    def costs(self, trail: Trail, replicas: Collection[str]) -> dict[str, float]:
        """What it costs each of these replicas to compute what it does not know of a prompt.

        A byte costs `MISSING`, or n / k if that is less, where k prompts went on in different ways
        and there are n replicas: each gets a n-th of those that go on, and computes it once.
        """
        path = self._path(trail)
        known = _known(path)
        ends = [0, *(end for end, _ in path)]
        cost, sharing = float(trail.length - ends[-1]), 1 / MISSING
        costs = {ends[-1]: cost}
        for begin, (end, beginning) in zip(ends[-2::-1], reversed(path), strict=False):
            sharing = max(sharing, beginning.continuations / len(replicas))
            cost += (end - begin) / sharing
            costs[begin] = cost
        return {replica: costs[known.get(replica, 0)] for replica in replicas}

    def add(self, trail: Trail, replica: str) -> None:
        """Note that a replica computes a prompt."""
        goes_on = False
        for digest in reversed(trail.digests):
            is_new = digest not in self._beginnings
            beginning = self._beginnings.get(digest) or Beginning()
            beginning.continuations += goes_on
            if replica not in beginning.replicas:
                beginning.replicas += (replica,)
                self.counts[replica] += 1
            for _, gone in self._beginnings.put(digest, beginning):
                self.counts.subtract(gone.replicas)
            goes_on = is_new

    def forget(self, replica: str) -> None:
        """Forget all of a replica that is gone."""
        for digest, beginning in list(self._beginnings.items()):
            beginning.replicas = tuple(each for each in beginning.replicas if each != replica)
            if not beginning.replicas:
                del self._beginnings[digest]
        del self.counts[replica]

    def _path(self, trail: Trail) -> list[tuple[int, Beginning]]:
        """The known beginnings of a prompt, each with its length."""
        path = []
        for end, digest in zip(cuts(), trail.digests, strict=False):
            beginning = self._beginnings.get(digest)
            if beginning is None:
                break
            path.append((end, beginning))
        return path


def _known(path: Iterable[tuple[int, Beginning]]) -> dict[str, int]:
    known: dict[str, int] = {}
    for end, beginning in path:
        known |= dict.fromkeys(beginning.replicas, end)
    return known


@dataclass(frozen=True)
class Running:
    """A request that a replica has."""

    missing: int
    progress: Progress

    @property
    def cost(self) -> int:
        """What it has to do yet, in bytes of prompts."""
        if self.progress.has_ended:
            return 0
        return RUNNING if self.progress.has_begun else RUNNING + self.missing


class Placement:
    """Chooses replicas, and knows what each has to do.

    A replica costs what it has to do yet, and what it would have to compute of the prompt. So a
    conversation comes back to where it was, unless much waits there. A beginning costs less the
    more conversations share it: else the replica that has computed it would get them all. Among
    replicas whose costs differ by less than a cut, the one that knows least gets the next.

    Args:
        most_beginnings: how many beginnings of prompts to know at most.
    """

    def __init__(self, most_beginnings: int = MOST_BEGINNINGS) -> None:
        self._beginnings = KnownBeginnings(most_beginnings)
        self._running: defaultdict[str, dict[Hashable, Running]] = defaultdict(dict)
        self._homes: dict[Hashable, str] = {}
        self._replicas: set[str] = set()

    def __len__(self) -> int:
        """The number of beginnings that it knows."""
        return len(self._beginnings)

    def waiting(self, replica: str) -> int:
        """What a replica has to do, in bytes of prompts. O(its requests)."""
        return sum(each.cost for each in self._running[replica].values())

    def ranked(self, trail: Trail, replicas: Collection[str]) -> list[str]:
        """Replicas by their costs for a prompt, the cheapest first."""
        missing = self._beginnings.costs(trail, replicas)
        costs = {each: self.waiting(each) + missing[each] for each in replicas}
        least = min(costs.values(), default=0)

        def rank(replica: str) -> tuple[float, int]:
            return (costs[replica] - least) // LEAST_CUT, self._beginnings.counts[replica]

        return sorted(replicas, key=rank)

    def begin(self, name: Hashable, request: ForwardedRequest, replica: str) -> None:
        """Note that a replica has taken a request. It is not counted again if it has ended: where
        many come at once, Ray Serve tells the router of a short answer's end before this."""
        if name in self._homes:
            self.expect(name, request, replica)
        self._beginnings.add(request.trail, replica)

    def expect(self, name: Hashable, request: ForwardedRequest, replica: str) -> None:
        """Count a request as a replica's that is about to take it, and not as another's any more:
        those that come at once shall not all go there."""
        self.end(name)
        missing = request.trail.length - self._beginnings.known(request.trail).get(replica, 0)
        self._homes[name] = replica
        self._running[replica][name] = Running(missing, request.progress)

    def end(self, name: Hashable) -> None:
        """Count a request no longer; one that is not counted is ignored."""
        if name in self._homes:
            self._running[self._homes.pop(name)].pop(name, None)

    def use(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""
        for gone in self._replicas.difference(replicas):
            self._beginnings.forget(gone)
            self._running.pop(gone, None)
        self._replicas = set(replicas)
