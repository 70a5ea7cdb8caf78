"""All tiers of a store, quickest first: folders on disk, and servers that machines share.

Reads go through the tiers, and what a slower one holds is kept in the quicker ones too. Writes go
to all of them, each behind its own queue.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Event

from paged_kv.store.background import BackgroundStore, StoreStats
from paged_kv.store.entry_file import Entry
from paged_kv.store.keys import EntryPlace
from paged_kv.store.lookup import Stored, Wanted, find, read_ahead
from paged_kv.store.lookup_counts import LookupCounts
from paged_kv.tiers.landing import Landing
from paged_kv.tiers.remote_tier import RemoteRead, RemoteTier
from paged_kv.tiers.waits import Waits

Tier = BackgroundStore | RemoteTier
Source = Tier | Landing


@dataclass(frozen=True)
class Offer:
    """Stored blocks that a prompt can begin with, and who holds them.

    Attributes:
        stored: the blocks.
        tier: the slowest tier that is needed.
        held: the bytes of what each holds, by key, of the tiers up to that one.
        has_landed: whether some of it has landed, and need not be waited for.
        waits: how long its prompt may still wait for servers.
    """

    stored: Stored
    tier: str
    held: Mapping[Source, Mapping[str, int]]
    has_landed: bool = False
    waits: Waits = field(default_factory=Waits)


class TieredStore:
    """Reads and writes tiers without blocking on writes and without raising.

    Args:
        tiers: the tiers, quickest first; at most one is a folder. `close` closes them.

    Attributes:
        folder: the tier on disk, if there is one.
        servers: the tiers that machines share.
        landing: what was read from servers in advance. If it is set, `offers` asks no server unless
            it is told to.
        lookups: how often blocks of prompts were looked up; without a folder, in this process.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = list(tiers)
        folders = [tier for tier in tiers if isinstance(tier, BackgroundStore)]
        self.folder = folders[0] if folders else None
        self.servers = [tier for tier in tiers if isinstance(tier, RemoteTier)]
        self.landing: Landing | None = None
        self.lookups = self.folder.lookups if self.folder else LookupCounts()
        self._labels = {tier: _label(tier, at, self._tiers) for at, tier in enumerate(tiers)}
        self._tokens_found: Counter[str] = Counter()

    def close(self) -> None:
        """Write what is queued and close all tiers. Later calls do nothing."""
        for tier in self._tiers:
            tier.close()

    @property
    def is_reachable(self) -> bool:
        """Whether some server may be asked now."""
        return not all(server.is_paused for server in self.servers)

    def flush(self) -> bool:
        """Wait until every queued entry is written or dropped; false if that takes too long."""
        done = [tier.queue.flush() for tier in self._tiers]
        return all(done)

    def takers(self, place: EntryPlace, nbytes: int, *, servers: bool = False) -> list[Tier]:
        """The tiers, or only the servers, that lack an entry and have room for it now. Those
        without room count a drop."""
        return _takers(self.servers if servers else self._tiers, place, nbytes)

    def save(self, entry: Entry, takers: Sequence[Tier], path: Sequence[str] = ()) -> None:
        """Queue an entry for these tiers. `path` are the keys of entries that are needed together
        with it: storing it does not evict them."""
        for tier in takers:
            tier.queue.save(entry, path)

    def touch(self, keys: Sequence[str]) -> None:
        """Note entries as used, the first of them most recently. Servers note it themselves."""
        if self.folder is not None:
            self.folder.queue.touch(keys)

    def record(self, digest: str) -> None:
        """Count that a block was looked up."""
        (self.folder or self.lookups).record(digest)

    def offers(
        self,
        wanted: Wanted,
        without: Sequence[str] = (),
        waits: Waits | None = None,
        *,
        ask: bool | None = None,
    ) -> list[Offer]:
        """What a prompt can begin with, the longest first: from all tiers, and from the quicker
        ones alone if that is shorter. A server is asked only if the tiers before it hold less than
        all full blocks. Whoever asks again for the same prompt gives the same `waits`."""
        waits = waits or Waits()
        found: list[Offer] = []
        held: dict[Source, Mapping[str, int]] = {}
        asks = self.landing is None if ask is None else ask
        landing = [] if self.landing is None else [self.landing]
        for source in (*landing, *self._tiers):
            if isinstance(source, RemoteTier) and not asks:
                continue
            held[source] = source.ask(wanted, waits)
            stored = find(wanted, ChainMap(*map(dict, held.values())), without)
            longest = found[0].stored.num_tokens if found else 0
            if stored is not None and stored.num_tokens > longest:
                landed = _landed(stored, held)
                label = landed.label if landed else self._labels[source]  # type: ignore[index]  # not a landing that has landed nothing
                found.insert(0, Offer(stored, label, dict(held), landed is not None, waits))
                longest = stored.num_tokens
            if longest >= len(wanted.tokens) // wanted.page_size * wanted.page_size:
                break
        return found

    def land(self, offer: Offer, is_cancelled: Event) -> list[str]:
        """Read what only servers hold of an offer, for a prompt that begins later, until that is
        cancelled; returns the keys of what was read. Another thread may use the store meanwhile."""
        landing = self.landing
        assert landing is not None, "somebody takes what lands"
        local = {place for place in offer.stored.places if _is_local(self._holders(place, offer))}
        remote = [place for place in offer.stored.places if place not in local]
        landed = []
        for entry in self._read(remote, offer):
            if entry is None or is_cancelled.is_set():
                break
            landing.put(entry, offer.tier)
            landed.append(entry.place.key)
        return landed

    def read(self, offer: Offer) -> Iterator[Entry | None]:
        """The entries of an offer, in order, read ahead. Yields None for one that no tier can
        give, and ends."""
        return self._read(offer.stored.places, offer)

    def _read(self, places: Sequence[EntryPlace], offer: Offer) -> Iterator[Entry | None]:
        holders = {place: self._holders(place, offer) for place in places}
        reads = {
            server: _read([place for place in places if holders[place][0] is server], server, offer)
            for server in self.servers
        }

        def start(place: EntryPlace) -> Future[Entry] | None:
            first = holders[place][0]
            return (reads[first] if isinstance(first, RemoteTier) else first).start(place)

        def finish(future: Future[Entry] | None, place: EntryPlace) -> Entry | None:
            first, *others = holders[place]
            entry, source = first.finish(future, place, offer.waits), first
            for tier in others:
                if entry is None:
                    again = _read([place], tier, offer) if isinstance(tier, RemoteTier) else tier
                    entry, source = tier.finish(again.start(place), place, offer.waits), tier
            if entry is not None and not isinstance(source, Landing):
                quicker = self._tiers[: self._tiers.index(source)]
                self.save(entry, _takers(quicker, place, entry.nbytes), offer.stored.keys)
            return entry

        return read_ahead(places, start, finish)

    def note_found(self, num_tokens: int, tier: str) -> None:
        """Count tokens of a prefix hit that came from a tier."""
        self._tokens_found[tier] += num_tokens

    def drop(self, reason: str) -> None:
        """Count an entry that was not stored."""
        self._tiers[0].faults.drop(reason)

    def stats(self) -> StoreStats:
        """The counts of all tiers so far."""
        first, *others = [self._stats_of(tier) for tier in self._tiers]
        return sum(others, first)

    def counts_by_tier(self) -> dict[str, dict[str, int]]:
        """Columns of `PoolStats`, by tier."""
        stats = {self._labels[tier]: self._stats_of(tier) for tier in self._tiers}
        return {
            "store_hits": {name: each.tokens_found for name, each in stats.items()},
            "store_bytes_read": {name: each.bytes_read for name, each in stats.items()},
            "store_bytes_today": {name: each.bytes_today for name, each in stats.items()},
            "store_bytes_in_all": {name: each.bytes_in_all for name, each in stats.items()},
        }

    def _stats_of(self, tier: Tier) -> StoreStats:
        return replace(tier.stats(), tokens_found=self._tokens_found[self._labels[tier]])

    def _holders(self, place: EntryPlace, offer: Offer) -> list[Source]:
        """The tiers that hold an entry, quickest first."""
        return [source for source, held in offer.held.items() if place.key in held]


def _landed(stored: Stored, held: Mapping[Source, Mapping[str, int]]) -> Landing | None:
    """Where some of these blocks have landed."""
    for source, theirs in held.items():
        if isinstance(source, Landing) and not theirs.keys().isdisjoint(stored.keys):
            return source
    return None


def _is_local(holders: Sequence[Source]) -> bool:
    return not isinstance(holders[0], RemoteTier)


def _read(places: Sequence[EntryPlace], server: RemoteTier, offer: Offer) -> RemoteRead:
    """A read of what a server has said to hold."""
    wanted = [(place, offer.held[server][place.key]) for place in places]
    return server.read(wanted, offer.waits)


def _takers(tiers: Sequence[Tier], place: EntryPlace, nbytes: int) -> list[Tier]:
    lacking = [tier for tier in tiers if not tier.queue.knows(place.key)]
    return [tier for tier in lacking if tier.queue.has_room(nbytes)]


def _label(tier: Tier, at: int, tiers: Sequence[Tier]) -> str:
    """The name of a tier's kind, with a number if there are several of the kind before it."""
    before = sum(each.label == tier.label for each in tiers[:at])
    return f"{tier.label} {before + 1}" if before else tier.label
