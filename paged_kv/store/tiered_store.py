"""All tiers of a store, quickest first: a folder on disk, and servers that machines share.

Reads go through the tiers, and what a slower one holds is kept in the quicker ones too. Writes go
to all of them, each behind its own queue.
"""

from __future__ import annotations

import threading
import weakref
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paged_kv.extras import extra_module
from paged_kv.lru import LRU
from paged_kv.store.blob_store import BlobStore
from paged_kv.store.entry_file import UNSEALED, Entry, Seal, Sealing
from paged_kv.store.folder_store import FolderStore
from paged_kv.store.keys import EntryPlace, LookupCounts, Stored, Wanted, find
from paged_kv.store.options import Address, RedisAddress, RemoteAddress, StoreOptions
from paged_kv.store.tier import Sized, Source, Tier, Waits
from paged_kv.store.writer import StoreStats

LEAST_SECRET_BYTES = 32
_MOST_PREFETCHED_BYTES = 1 << 30
# A process that is killed loses so many look-ups. Saving them writes 128 kB.
_MOST_UNSAVED = 1000


@dataclass(frozen=True)
class Offer:
    """Stored blocks that a prompt can begin with, and who holds them.

    Attributes:
        tier: the slowest tier that is needed.
        held: the bytes of what each source holds, by key, of those up to that one, quickest first.
        is_prefetched: whether some of it is in memory, and need not be waited for.
        waits: how long its prompt may still wait.
    """

    stored: Stored
    tier: str
    held: Mapping[Source, Mapping[str, int]]
    is_prefetched: bool = False
    waits: Waits = field(default_factory=Waits)


class PrefetchBuffer:
    """The quickest `Source`: entries that were read from servers before the prompt that needs them
    begins, each until it is read. Threads may share it.

    Attributes:
        label: the tier that the latest entries came from.
    """

    def __init__(self) -> None:
        self.label = ""
        self._entries: LRU[str, Entry] = LRU(_MOST_PREFETCHED_BYTES, lambda _, entry: entry.nbytes)
        self._lock = threading.Lock()

    def put(self, entry: Entry, label: str) -> None:
        """Keep an entry that was read from a tier."""
        with self._lock:
            self.label = label
            self._entries[entry.place.key] = entry

    def discard(self, keys: Iterable[str]) -> None:
        """Forget entries, if they are there."""
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)

    def ask(self, wanted: Wanted, waits: Waits) -> Mapping[str, int]:
        with self._lock:
            return {key: entry.nbytes for key, entry in self._entries.items()}

    def read(self, wanted: Sequence[Sized], waits: Waits) -> Iterator[Entry | None]:
        for place, _ in wanted:
            with self._lock:
                entry = self._entries.pop(place.key, None)
            yield entry


class TieredStore:
    """Reads and writes tiers without blocking on writes and without raising.

    Args:
        tiers: the tiers, quickest first; at most one is a folder. `close` closes them.

    Attributes:
        prefetched: what was read from servers in advance. If it is set, `offers` asks no server
            unless it is told to.
        lookups: how often blocks of prompts were looked up; with a folder, in earlier processes
            too.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = list(tiers)
        self.prefetched: PrefetchBuffer | None = None
        saved = b""
        try:
            saved = self.tiers[0].blobs.saved_lookups()
        except (OSError, MemoryError) as error:
            self.tiers[0].counts.record_error(error)
        self.lookups = LookupCounts(saved)
        kinds = [tier.label for tier in self.tiers]
        for at, tier in enumerate(self.tiers):
            if before := kinds[:at].count(tier.label):
                tier.label = f"{tier.label} {before + 1}"
        # At interpreter exit too, so that queued entries are written.
        self._close = weakref.finalize(self, _close, self.tiers, self.lookups)

    def close(self) -> None:
        """Write what is queued and close all tiers. Later calls do nothing."""
        self._close()

    @property
    def servers(self) -> list[Tier]:
        return [tier for tier in self.tiers if tier.is_shared]

    @property
    def is_reachable(self) -> bool:
        """Whether some server may be asked now."""
        return not all(server.is_paused for server in self.servers)

    def flush(self) -> bool:
        """Wait until every queued entry is written or dropped; false if that takes too long."""
        done = [tier.queue.flush() for tier in self.tiers]
        return all(done)

    def tiers_missing(self, place: EntryPlace, nbytes: int, *, servers: bool = False) -> list[Tier]:
        """The tiers, or only the servers, that lack an entry and have room for it now. Those
        without room count a drop."""
        return _missing(self.servers if servers else self.tiers, place, nbytes)

    def save(self, entry: Entry, tiers: Sequence[Tier], path: Sequence[str] = ()) -> None:
        """Queue an entry for these tiers. `path` are the keys of entries that are needed together
        with it: storing it does not evict them."""
        for tier in tiers:
            tier.queue.save(entry, path)

    def touch(self, keys: Sequence[str]) -> None:
        """Record entries as used, the first of them most recently."""
        for tier in self.tiers:
            tier.touch(keys)

    def record_lookup(self, digest: str) -> None:
        """Count that a block was looked up."""
        self.lookups.record(digest)
        if self.lookups.num_unsaved >= _MOST_UNSAVED:
            _save_lookups(self.tiers[0], self.lookups)

    def offers(
        self,
        wanted: Wanted,
        without: Sequence[str] = (),
        waits: Waits | None = None,
        *,
        ask: bool | None = None,
    ) -> list[Offer]:
        """What a prompt can begin with, the longest first: from all tiers, and from the quicker
        ones alone if that is shorter. A tier is asked only if those before it hold less than all
        full blocks. Whoever asks again for the same prompt gives the same `waits`."""
        waits = Waits() if waits is None else waits
        found: list[Offer] = []
        held: dict[Source, Mapping[str, int]] = {}
        longest, full = 0, len(wanted.tokens) // wanted.page_size * wanted.page_size
        buffer = self.prefetched
        asks = buffer is None if ask is None else ask
        sources: list[Source] = [] if buffer is None else [buffer]
        sources += [tier for tier in self.tiers if asks or not tier.is_shared]
        for source in sources:
            if longest >= full:
                break
            held[source] = source.ask(wanted, waits)
            stored = find(wanted, ChainMap(*map(dict, held.values())), without)
            if stored is not None and stored.num_tokens > longest:
                longest = stored.num_tokens
                is_ready = buffer is not None and not held[buffer].keys().isdisjoint(stored.keys)
                label = buffer.label if buffer is not None and is_ready else source.label
                found.insert(0, Offer(stored, label, dict(held), is_ready, waits))
        return found

    def prefetch(self, offer: Offer, is_cancelled: threading.Event) -> list[str]:
        """Read what only servers hold of an offer, for a prompt that begins later, until that is
        cancelled; returns the keys of what was read. Another thread may use the store meanwhile."""
        assert self.prefetched is not None, "somebody takes what is read"
        shared = set[Source](self.servers)
        remote = [place for place in offer.stored.places if _holders(place, offer)[0] in shared]
        keys = []
        for entry in self._read(remote, offer):
            if entry is None or is_cancelled.is_set():
                break
            self.prefetched.put(entry, offer.tier)
            keys.append(entry.place.key)
        return keys

    def read(self, offer: Offer) -> Iterator[Entry | None]:
        """The entries of an offer, in order, read ahead. Yields None for one that no tier can
        give, and ends."""
        return self._read(offer.stored.places, offer)

    def record_found(self, num_tokens: int, label: str) -> None:
        """Count tokens of a prefix hit that came from the tier of an offer."""
        for tier in self.tiers:
            if tier.label == label:
                tier.counts.sums["tokens_found"] += num_tokens

    def record_drop(self, reason: str) -> None:
        """Count an entry that was not stored."""
        self.tiers[0].counts.record_drop(reason)

    def stats(self) -> StoreStats:
        """The counts of all tiers so far."""
        return sum([tier.stats() for tier in self.tiers], StoreStats())

    def counts_by_tier(self) -> dict[str, dict[str, int]]:
        """Columns of `PoolStats`, by tier."""
        stats = {tier.label: tier.stats() for tier in self.tiers}
        columns = {"store_hits": "tokens_found"}
        columns |= {f"store_{each}": each for each in ("bytes_read", "bytes_today", "bytes_in_all")}
        return {
            column: {label: getattr(each, name) for label, each in stats.items()}
            for column, name in columns.items()
        }

    def _read(self, places: Sequence[EntryPlace], offer: Offer) -> Iterator[Entry | None]:
        holders = {place: _holders(place, offer) for place in places}

        def reading(source: Source, places: Sequence[EntryPlace]) -> Iterator[Entry | None]:
            sizes = offer.held[source]
            return source.read([(place, sizes[place.key]) for place in places], offer.waits)

        first = {
            source: reading(source, [each for each in places if holders[each][0] is source])
            for source in offer.held
        }
        for place in places:
            source, *others = holders[place]
            entry = next(first[source])
            while entry is None and others:
                source = others.pop(0)
                entry = next(reading(source, [place]))
            if entry is not None and source in self.tiers:
                quicker = self.tiers[: self.tiers.index(source)]
                self.save(entry, _missing(quicker, place, entry.nbytes), offer.stored.keys)
            yield entry
            if entry is None:
                return


def open_tiers(addresses: Sequence[Address], max_bytes: int, options: StoreOptions) -> TieredStore:
    """Open all tiers. A server that does not answer counts as one that holds nothing.

    Raises:
        ValueError: a package is missing, or a server lacks a secret; the message says which.
        OSError: the secret cannot be read.
        StoreError: the folder cannot be used.
    """
    has_servers = not all(isinstance(each, Path) for each in addresses)
    seal = read_seal(options) if has_servers else UNSEALED
    daily_bytes = None if options.daily_bytes is None else int(options.daily_bytes)
    tiers: list[Tier] = []
    try:
        for address in addresses:
            if isinstance(address, Path):
                folder = FolderStore(address, max_bytes, daily_bytes=daily_bytes)
                tiers.append(folder_tier(folder))
            else:
                tiers.append(Tier(open_blobs(address, seal)))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return TieredStore(tiers)


def folder_tier(folder: FolderStore) -> Tier:
    """The tier of a folder, which this brings below its cap if it was higher before."""
    tier = Tier(folder)
    tier.queue.do(partial(folder.shrink, folder.max_bytes))
    tier.queue.flush()
    return tier


def open_blobs(address: RemoteAddress, seal: Sealing) -> BlobStore:
    """A client of a server, whose entries have this seal; it connects at its first call.

    Raises:
        ValueError: the package is missing; the message names the extra.
    """
    if isinstance(address, RedisAddress):
        module = extra_module("paged_kv.store.redis_blobs", "redis")
        blobs: BlobStore = module.RedisBlobs(address, seal)
    else:
        module = extra_module("paged_kv.store.s3_blobs", "s3")
        blobs = module.S3Blobs(address, seal)
    return blobs


def read_seal(options: StoreOptions) -> Seal:
    """What makes and verifies entries on servers.

    Raises:
        ValueError: there is no secret, or it is too short.
        OSError: its file cannot be read.
    """
    if options.secret is not None:
        file = Path(options.secret).expanduser()
        secret = file.read_bytes().strip()
        if len(secret) < LEAST_SECRET_BYTES:
            raise ValueError(
                f"the secret in {file} has {len(secret)} bytes, and at least {LEAST_SECRET_BYTES} "
                f"are needed: head -c 32 /dev/urandom | base64 > {file}"
            )
        return Seal(secret)
    if not options.unauthenticated:
        raise ValueError(
            "a store on a server needs a secret, or whoever can write there could change answers: "
            "give --store-secret FILE (StoreOptions(secret=...)), the same on all machines; or "
            "--store-unauthenticated (unauthenticated=True) if everybody there is trusted"
        )
    return Seal(b"")


def _holders(place: EntryPlace, offer: Offer) -> list[Source]:
    """What holds an entry, quickest first."""
    return [source for source, held in offer.held.items() if place.key in held]


def _missing(tiers: Sequence[Tier], place: EntryPlace, nbytes: int) -> list[Tier]:
    lacking = [tier for tier in tiers if not tier.queue.knows(place.key)]
    return [tier for tier in lacking if tier.queue.has_room(nbytes)]


def _save_lookups(tier: Tier, lookups: LookupCounts) -> None:
    tier.queue.do(partial(tier.blobs.save_lookups, lookups.unsaved()))


def _close(tiers: Sequence[Tier], lookups: LookupCounts) -> None:
    if lookups.num_unsaved:
        _save_lookups(tiers[0], lookups)
    for tier in tiers:
        tier.close()
