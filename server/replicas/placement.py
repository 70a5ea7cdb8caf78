"""A request as it goes from the front to a replica, and the choice of the replica: one where little
of its prompt is to be computed, and few others wait."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from starlette.types import Scope
from xxhash import xxh3_64

from paged_kv.lru import LRU
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.request_body import parsed_json

# What of a request decides its prompt, in the order in which most chat templates use it.
_BEFORE = ("cache_salt", "model", "adapters", "tools", "system", "instructions")
_TURNS = ("messages", "input", "prompt")

# The parts of a scope that a request needs; others belong to the process that received it.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)

# The ids that a server in a place gives to responses and their items: see `KeptResponses.new_name`.
_PLACED_ID = re.compile(r"[a-z]+_(?P<place>\w+)[0-9a-f]{32}(_\d+)?", re.ASCII)

LEAST_CUT = 256
CUT_SHARE = 16


@dataclass(frozen=True)
class Trail:
    """The beginnings of a prompt, by which replicas that know them are found."""

    digests: tuple[int, ...] = ()  # of the beginnings that end at `cuts`, the shortest first
    length: int = 0  # of the whole prompt in bytes of JSON, of which a token takes about four


@dataclass(eq=False)
class Progress:
    """How far an answer has come. The front notes it for the router, which is in its process: Ray
    Serve tells the router of an end when the client may ask again already."""

    has_begun: bool = False
    has_ended: bool = False


@dataclass(frozen=True)
class ForwardedRequest:
    """A request of HTTP."""

    scope: Scope
    body: bytes
    trail: Trail = Trail()
    # The replica that alone can answer it, as it keeps the response that is asked for; empty for
    # any.
    place: str = ""
    avoided: frozenset[str] = frozenset()  # replicas that have refused it
    progress: Progress = field(default_factory=Progress, compare=False)


def forwarded_request(scope: Scope, body: bytes) -> ForwardedRequest:
    """The request of a scope and its body, which is decoded. Takes a millisecond for each megabyte
    or so."""
    headers = dict(scope["headers"])
    fields = _fields(body) if scope["method"] == "POST" else {}
    sent = [each for each in scope["headers"] if each[0] != b"content-encoding"]
    matches = map(_PLACED_ID.fullmatch, _named_ids(scope["path"], fields))
    return ForwardedRequest(
        {name: scope[name] for name in _SCOPE if name in scope} | {"headers": sent},
        body,
        trail_of([headers.get(b"authorization", b""), *_prompt(fields)]),
        next((match["place"] for match in matches if match), ""),
    )


def trail_of(parts: Iterable[bytes]) -> Trail:
    """The trail of a prompt in parts: the first decides who shares it, the others follow each
    other."""
    first, *others = parts
    text = b"".join(others)
    digest, digests, begin = xxh3_64(first), [], 0
    for end in takewhile(lambda end: end <= len(text), cuts()):
        digest.update(text[begin:end])
        digests.append(digest.intdigest())
        begin = end
    return Trail(tuple(digests), len(text))


def cuts() -> Iterator[int]:
    """The lengths of the beginnings that are remembered: about 120 of a million bytes, each at most
    a sixteenth longer than the one before."""
    end = 0
    while True:
        end += max(LEAST_CUT, end // CUT_SHARE)
        yield end


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a body; none if a replica will refuse it."""
    try:
        return parsed_json(body)
    except APIError:
        return {}


def _prompt(fields: Mapping[str, Any]) -> Iterator[bytes]:
    for name in _BEFORE:
        yield json.dumps(fields.get(name), ensure_ascii=False).encode()
    for name in _TURNS:
        turns = fields.get(name, ())
        # A text or a list of tokens goes on as a longer one: without quotes or brackets.
        for turn in turns if isinstance(turns, list) else [turns]:
            yield (turn if isinstance(turn, str) else json.dumps(turn, ensure_ascii=False)).encode()
            yield b","


def _named_ids(path: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """The ids of kept responses and items that a request names, among others."""
    items = fields.get("input")
    listed = [each for each in items if isinstance(each, dict)] if isinstance(items, list) else []
    ids = (each.get("id") for each in listed if "role" not in each)
    named = (*path.split("/"), fields.get("previous_response_id"), *ids)
    return (each for each in named if isinstance(each, str))


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
    """What is known of a beginning."""

    replicas: tuple[str, ...] = ()  # those that have computed it
    continuations: int = 0  # in how many ways prompts went on, up to the next cut


@dataclass(frozen=True)
class Running:
    """A request that a replica has, and the bytes of its prompt that it had to compute."""

    missing: int
    progress: Progress

    @property
    def cost(self) -> int:
        """What there is to do yet, in bytes of prompts."""
        if self.progress.has_ended:
            return 0
        return RUNNING if self.progress.has_begun else RUNNING + self.missing


class Placement:
    """Chooses replicas. It knows what each has to do, and which have computed which beginnings of
    prompts. Beyond a limit, those beginnings go that were used least recently, and of these the
    longest first.

    A replica costs what it has to do yet, and what it would have to compute of the prompt. So a
    conversation comes back to where it was, unless much waits there. A beginning costs less the
    more conversations share it: else the replica that has computed it would get them all. Among
    replicas whose costs differ by less than a cut, the one that knows least gets the next.

    Args:
        most_beginnings: how many beginnings to know at most.

    Attributes:
        beginnings: what is known of each, by its digest.
        counts: how many beginnings each replica knows.
    """

    def __init__(self, most_beginnings: int = MOST_BEGINNINGS) -> None:
        self.beginnings: LRU[int, Beginning] = LRU(most_beginnings)
        self.counts: Counter[str] = Counter()
        self._running: defaultdict[str, dict[Hashable, Running]] = defaultdict(dict)
        self._homes: dict[Hashable, str] = {}
        self._replicas: set[str] = set()

    def waiting(self, replica: str) -> int:
        """What a replica has to do, in bytes of prompts. O(its requests)."""
        return sum(each.cost for each in self._running[replica].values())

    def ranked(self, trail: Trail, replicas: Collection[str]) -> list[str]:
        """Replicas by their costs for a prompt, the cheapest first."""
        missing = self._missing(trail, replicas)
        costs = {each: self.waiting(each) + missing[each] for each in replicas}
        least = min(costs.values(), default=0)
        return sorted(
            replicas, key=lambda each: ((costs[each] - least) // LEAST_CUT, self.counts[each])
        )

    def begin(self, name: Hashable, request: ForwardedRequest, replica: str) -> None:
        """Note that a replica has taken a request. It is not counted again if it has ended: where
        many come at once, Ray Serve tells the router of a short answer's end before this."""
        if name in self._homes:
            self.expect(name, request, replica)
        self.add(request.trail, replica)

    def expect(self, name: Hashable, request: ForwardedRequest, replica: str) -> None:
        """Count a request as a replica's that is about to take it, and not as another's any more:
        those that come at once shall not all go there."""
        self.end(name)
        missing = request.trail.length - self.known(request.trail).get(replica, 0)
        self._homes[name] = replica
        self._running[replica][name] = Running(missing, request.progress)

    def end(self, name: Hashable) -> None:
        """Count a request no longer; one that is not counted is ignored."""
        if name in self._homes:
            self._running[self._homes.pop(name)].pop(name, None)

    def use(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""
        for gone in self._replicas.difference(replicas):
            self._running.pop(gone, None)
            for digest, beginning in list(self.beginnings.items()):
                beginning.replicas = tuple(each for each in beginning.replicas if each != gone)
                if not beginning.replicas:
                    del self.beginnings[digest]
            del self.counts[gone]
        self._replicas = set(replicas)

    def add(self, trail: Trail, replica: str) -> None:
        """Note that a replica computes a prompt."""
        goes_on = False
        for digest in reversed(trail.digests):
            is_new = digest not in self.beginnings
            beginning = self.beginnings.get(digest) or Beginning()
            beginning.continuations += goes_on
            if replica not in beginning.replicas:
                beginning.replicas += (replica,)
                self.counts[replica] += 1
            for _, gone in self.beginnings.put(digest, beginning):
                self.counts.subtract(gone.replicas)
            goes_on = is_new

    def known(self, trail: Trail) -> dict[str, int]:
        """How many bytes of a prompt each replica has computed, for those that know any."""
        known: dict[str, int] = {}
        for end, beginning in self._path(trail):
            known |= dict.fromkeys(beginning.replicas, end)
        return known

    def _missing(self, trail: Trail, replicas: Collection[str]) -> dict[str, float]:
        """What it costs each of these replicas to compute what it does not know of a prompt.

        A byte costs `MISSING`, or n / k if that is less, where k prompts went on in different ways
        and there are n replicas: each gets a n-th of those that go on, and computes it once.
        """
        path, known = self._path(trail), self.known(trail)
        ends = [0, *(end for end, _ in path)]
        cost, sharing = float(trail.length - ends[-1]), 1 / MISSING
        costs = {ends[-1]: cost}
        for begin, (end, beginning) in zip(ends[-2::-1], reversed(path), strict=False):
            sharing = max(sharing, beginning.continuations / len(replicas))
            cost += (end - begin) / sharing
            costs[begin] = cost
        return {replica: costs[known.get(replica, 0)] for replica in replicas}

    def _path(self, trail: Trail) -> list[tuple[int, Beginning]]:
        """The known beginnings of a prompt, each with its length."""
        path = []
        for end, digest in zip(cuts(), trail.digests, strict=False):
            beginning = self.beginnings.get(digest)
            if beginning is None:
                break
            path.append((end, beginning))
        return path
