"""Chooses replicas for prompts: where little is to be computed, and few others wait."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from paged_kv.server.replicas.forwarded_request import ForwardedRequest, Progress, Trail, cuts

# As much as a running request counts beside its prompt, in bytes of prompts: its answer takes time
# too, about as many steps as a prompt of 500 tokens takes milliseconds.
RUNNING = 2000

# A beginning takes about 280 bytes, and a conversation of 8,000 tokens has 50 of them.
MOST_BEGINNINGS = 1 << 17


class Known(NamedTuple):
    """What a replica has computed of a prompt.

    Attributes:
        length: in bytes.
        ends: whether an earlier prompt ended there, so that this one may go on with its answer.
    """

    length: int
    ends: bool


UNKNOWN = Known(0, False)


class KnownBeginnings:
    """Which replicas have computed which beginnings of prompts. Beyond a limit, those go that were
    used least recently, and of these the longest first.

    Args:
        most: how many beginnings to know at most.

    Attributes:
        counts: how many each replica has.
    """

    def __init__(self, most: int = MOST_BEGINNINGS) -> None:
        self._most = most
        # For each replica that has computed one, whether a prompt ended there.
        self._replicas: OrderedDict[int, dict[str, bool]] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, digest: int) -> bool:
        return digest in self._replicas

    def known(self, trail: Trail) -> dict[str, Known]:
        """What each replica has computed of a prompt, for those that know any."""
        known: dict[str, Known] = {}
        for digest, end in zip(trail.digests, cuts(), strict=False):
            replicas = self._replicas.get(digest)
            if replicas is None:
                break
            known |= {replica: Known(end, ends) for replica, ends in replicas.items()}
        return known

    def add(self, trail: Trail, replica: str) -> None:
        """Note that a replica computes a prompt."""
        ends = True
        for digest in reversed(trail.digests):
            replicas = self._replicas.setdefault(digest, {})
            self.counts[replica] += replica not in replicas
            replicas[replica] = ends or replicas.get(replica, False)
            ends = False
            self._replicas.move_to_end(digest)
        while len(self._replicas) > self._most:
            self.counts.subtract(self._replicas.popitem(last=False)[1])

    def forget(self, replica: str) -> None:
        """Forget all of a replica that is gone."""
        for digest, replicas in list(self._replicas.items()):
            replicas.pop(replica, None)
            if not replicas:
                del self._replicas[digest]
        del self.counts[replica]


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
    conversation comes back to where it was, unless much waits there, and a beginning that many
    prompts share spreads as they come at once. What is known counts if it is half of the prompt, or
    the whole of an earlier one: else it is another conversation, and the replica with the beginning
    that both share would get them all. Among equals the one that knows least gets the next.

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
        known = self._beginnings.known(trail)
        counts = self._beginnings.counts

        def cost(replica: str) -> tuple[int, int]:
            missing = _missing(trail, known.get(replica, UNKNOWN))
            return self.waiting(replica) + missing, counts[replica]

        return sorted(replicas, key=cost)

    def begin(self, name: Hashable, request: ForwardedRequest, replica: str) -> None:
        """Note that a replica has taken a request."""
        self.expect(name, request, replica)
        self._beginnings.add(request.trail, replica)

    def expect(self, name: Hashable, request: ForwardedRequest, replica: str) -> None:
        """Count a request as a replica's that is about to take it, and not as another's any more:
        those that come at once shall not all go there."""
        self.end(name)
        known = self._beginnings.known(request.trail).get(replica, UNKNOWN)
        self._homes[name] = replica
        self._running[replica][name] = Running(_missing(request.trail, known), request.progress)

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


def _missing(trail: Trail, known: Known) -> int:
    goes_on = known.ends or 2 * known.length >= trail.length
    return trail.length - (known.length if goes_on else 0)
