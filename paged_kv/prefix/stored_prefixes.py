"""Keeps the full blocks of the prefix index in a page store: the tier below memory.

Insertion writes blocks; eviction does not. So a process that is killed has already stored its
blocks, and no copy is made while memory is short. A block that is not full stays in memory, as a
continued conversation goes on in it: the next process computes its tokens again.

Layers with a window can resume after a block if all blocks of a ring are stored. Cached
out-of-window blocks are therefore written like others. The states of layers without pages are
stored with the block that they end.

Stored blocks enter the index like computed ones, once all of them are read and verified. Where
several ranks share a model, each has a store with its shard: blocks are loaded that all ranks have
and can read. They are left on disk where `Rates` estimates that computing them is quicker.

What is written depends on `StoreOptions`: by default everything, or only what several prompts have
begun with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.prefix_node import Node
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageLayout, page_format_named
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.prefix.keeping import Nodes, StorePolicy, Tokens
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.prefix.snapshots import Snapshot
from paged_kv.steps.sequence import Sequence
from paged_kv.store.entry_file import Array, Entry
from paged_kv.store.keys import CHECKPOINT, EntryPlace, Identity, Link, Wanted
from paged_kv.store.options import WRITE_EVERYTHING, StoreOptions
from paged_kv.store.tier import Waits
from paged_kv.store.tiered_store import Offer, TieredStore

# Entries whose pages are loaded in one call.
_LOADED_AT_ONCE = 8


class StoredPrefixes:
    """See `LowerTier` for the operations.

    Args:
        prefixes: the prefix cache to store. Its pool must know all layers.
        store: the page store; the caller closes it.
        identify: returns the identity of a namespace's pages; None if they are not to be stored.
        pack: makes notes for JSON, and arrays of uint8 by name, of the states of layers without
            pages.
        unpack: makes the states again; raises ValueError, KeyError or TypeError if it cannot.
        options: which prefixes to write.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        store: TieredStore,
        identify: Callable[[Hashable], Identity | None],
        pack: Callable[[Any], tuple[Any, dict[str, Any]]],
        unpack: Callable[[Any, Mapping[str, Any]], Any],
        options: StoreOptions = WRITE_EVERYTHING,
    ) -> None:
        self._prefixes = prefixes
        self._pool = prefixes.pool
        self._store = store
        self._identify = identify
        self._pack = pack
        self._unpack = unpack
        self._options = options

    def load(self, namespace: Hashable, tokens: Tokens, policy: StorePolicy) -> None:
        """See `LowerTier`."""
        identity = self._identify(namespace)
        if identity is None:
            return
        root = Link.root(identity)
        if policy is StorePolicy.DEFAULT and self._options.after > 1:
            for link in self._wanted(root, tokens, 0, 0).links:
                self._store.record_lookup(link.digest)
        known = self._prefixes.known(namespace, tokens)
        if known >= len(tokens) - 1:
            return
        failed: list[str] = []
        waits = Waits()
        while True:
            # A load that failed may have evicted blocks that were held before.
            held = self._held(namespace, tokens)
            wanted = self._wanted(root, tokens, len(held), known)
            offer = self._offer_of_all(wanted, failed, waits)
            if offer is None:
                return
            began = time.perf_counter()
            if not self._is_readable(offer, failed):
                continue
            try:
                unusable = self._load(namespace, offer, held)
            except (PoolExhausted, MemoryError):
                return
            found = self._prefixes.known(namespace, tokens)
            if unusable is None and found > known:
                if not offer.is_prefetched:
                    reading = self._prefixes.rates.reading[offer.tier]
                    reading.record(found - known, time.perf_counter() - began)
                self._pool.counts.tokens_read += found - known
                self._store.record_found(found - known, offer.tier)
                self._store.touch(offer.stored.keys)
                return
            failed.append(unusable or offer.stored.end_key)

    def wanted(self, namespace: Hashable, tokens: Tokens) -> Wanted | None:
        """What to look up of a prompt in the tiers; None if nothing can be added to memory."""
        known = self._prefixes.known(namespace, tokens)
        identity = self._identify(namespace)
        if identity is None or known >= len(tokens) - 1:
            return None
        held = len(self._held(namespace, tokens))
        return self._wanted(Link.root(identity), tokens, held, known)

    def _offer_of_all(self, wanted: Wanted, failed: list[str], waits: Waits) -> Offer | None:
        """What every rank can load: the longest beginning that all have."""
        while True:
            offer = self._offer(wanted, failed, waits)
            end = None if offer is None else offer.stored.num_tokens
            ends = self._prefixes.ranks.gather("stored prefix", end)
            if offer is None or None in ends:
                return None
            if len(set(ends)) == 1:
                return offer
            shortest = min(each for each in ends if each is not None)
            wanted = replace(wanted, tokens=wanted.tokens[:shortest])

    def _offer(self, wanted: Wanted, failed: list[str], waits: Waits) -> Offer | None:
        """What this rank has stored, fits its pool and is quicker to read than to compute."""
        rates = self._prefixes.rates
        for offer in self._store.offers(wanted, failed, waits):
            num_tokens = offer.stored.num_tokens
            if self._pool.can_admit(num_tokens) and (
                offer.is_prefetched
                or rates.is_reading_quicker(num_tokens - wanted.beyond, offer.tier)
            ):
                return offer
        return None

    def _is_readable(self, offer: Offer, failed: list[str]) -> bool:
        """Whether every rank can read what it has stored; else adds this rank's damaged entry to
        `failed`. Only then pages are loaded: loading may evict, and all ranks evict the same."""
        ranks = self._prefixes.ranks
        if ranks.size == 1:
            return True  # `_load` finds out, and reads once
        # It is read once more, and waits for that as long.
        reading = self._store.read(replace(offer, waits=Waits()))
        entries = zip(offer.stored.places, reading, strict=False)
        damaged = [place.key for place, entry in entries if entry is None]
        failed += damaged
        return ranks.all_true("readable", not damaged)

    def keep(self, namespace: Hashable, nodes: Nodes, num_tokens: int, policy: StorePolicy) -> None:
        """See `LowerTier`."""
        identity = self._identify(namespace)
        if identity is None:
            return
        link, parts = Link.root(identity), list[_Part]()
        is_awaited = policy is StorePolicy.NOW
        for node in nodes[: num_tokens // PAGE_SIZE]:
            link = link.then(node.tokens)
            if is_awaited or self._is_due(link, num_tokens):
                parts += self._parts(link, node)
        self._store.touch(self._save(parts, to_servers=is_awaited))

    def _part(self, group: LayerGroup) -> str:
        return f"pages {self._pool.groups.index(group)}"

    def _held(self, namespace: Hashable, tokens: Tokens) -> list[Node]:
        """The blocks of a prompt that are in memory: full matching blocks that every group without
        a window holds."""
        match = self._pool.index.peek(namespace, tokens)
        held, groups = [], self._prefixes.shared_groups()
        for node in match.nodes[: match.num_tokens // PAGE_SIZE]:
            if not all(group.allocator in node.blocks for group in groups):
                break
            held.append(node)
        return held

    def _wanted(self, root: Link, tokens: Tokens, held: int, known: int) -> Wanted:
        has_states = self._prefixes.has_states
        windows = [(group, group.window) for group in self._pool.reclaimer.open_groups()]
        return Wanted(
            root=root,
            # A state cannot be rolled back, and the last token must be computed again.
            tokens=tokens[:-1] if has_states else tokens,
            held=held * PAGE_SIZE,
            beyond=known,
            parts=tuple([self._part(group) for group in self._prefixes.shared_groups()]),
            needs_checkpoint=has_states,
            page_size=PAGE_SIZE,
            rings=tuple([(self._part(group), window.ring) for group, window in windows if window]),
        )

    def _is_due(self, link: Link, num_tokens: int) -> bool:
        """Whether to write a block, in a prefix of `num_tokens` tokens."""
        if self._options.after == 1:
            return True
        if not self._store.lookups[link.digest]:
            self._store.record_lookup(link.digest)
        return self._options.is_due(self._store.lookups[link.digest], num_tokens)

    def _save(self, parts: list[_Part], *, to_servers: bool) -> list[str]:
        """Store the parts that are not stored yet; returns the keys of all of them."""
        path = [part.place.key for part in parts]
        for part in parts:
            if missing := self._store.tiers_missing(part.place, part.nbytes, servers=to_servers):
                try:
                    entry = part.entry()
                except (MemoryError, TypeError) as error:
                    # A step may be running: drop the entry instead of failing the step.
                    self._store.record_drop(f"no bytes could be made of them: {error}")
                else:
                    self._store.save(entry, missing, path)
        return path

    def _parts(self, link: Link, node: Node) -> Iterator[_Part]:
        for group in self._pool.reclaimer.open_groups():
            block = _full_page(group, node)
            if block is not None:
                place = EntryPlace(link, self._part(group))
                nbytes = group.allocator.format_of(block).block_bytes
                yield _Part(place, nbytes, partial(_page_entry, place, group, block))
        snapshot = node.checkpoints.get(PAGE_SIZE)
        if isinstance(snapshot, Snapshot) and snapshot.states is not None:
            place = EntryPlace(link, CHECKPOINT)
            yield _Part(place, snapshot.nbytes, partial(self._state_entry, place, snapshot.states))

    def _state_entry(self, place: EntryPlace, states: Any) -> Entry:
        about, arrays = self._pack(states)
        return Entry(place, arrays, json.dumps(about))

    def _load(self, namespace: Hashable, offer: Offer, held: list[Node]) -> str | None:
        """Load stored blocks into the index; returns the key of an entry that could not be used, or
        None."""
        stored, sequence = offer.stored, Sequence(self._pool)
        num_held = sum(len(node.tokens) for node in held)
        for group in self._prefixes.shared_groups() if held else []:
            sequence.adopt(group, [node.blocks[group.allocator] for node in held], num_held)
        states: Any = None
        waiting: list[Entry] = []
        for place, entry in zip(stored.places, self._store.read(offer), strict=False):
            if entry is None:
                return place.key
            try:
                if place.part == CHECKPOINT:
                    states = self._unpack(json.loads(entry.notes), entry.arrays)
                else:
                    waiting.append(entry)
                if len(waiting) >= _LOADED_AT_ONCE or place is stored.places[-1]:
                    self._append(sequence, waiting)
                    waiting.clear()
            except (ValueError, KeyError, TypeError):
                # The checksum is right, but the content does not fit its notes.
                return place.key
        rings = self._prefixes.window_groups()
        sequence.begin_at(stored.num_tokens, dict.fromkeys(rings, stored.num_tokens))
        tokens = [token for link in stored.links for token in link.tokens]
        self._prefixes.insert(namespace, tokens, sequence, states)
        return None

    def _append(self, sequence: Sequence, entries: list[Entry]) -> None:
        """Load pages into fresh blocks of a sequence.

        Raises:
            ValueError: the pages do not have the layers' shapes.
            PoolExhausted: the budget does not hold the blocks.
        """
        for group in self._pool.reclaimer.open_groups():
            mine = [entry for entry in entries if entry.place.part == self._part(group)]
            formats = [json.loads(entry.notes)["page_format"] for entry in mine]
            for name, entry in zip(formats, mine, strict=True):
                _require_pages(group, name, entry.arrays)
            table = sequence.table(group)
            first = len(table.blocks)
            self._pool.append_blocks(group, table, formats)
            for layer, pages in group.pages.items():
                arrays = [mx.array(entry.arrays[f"layer.{layer}"]) for entry in mine]
                pages.load(dict(zip(table.blocks[first:], arrays, strict=True)))


class _Part(NamedTuple):
    """An entry to store: its key, its approximate size, and what makes it."""

    place: EntryPlace
    nbytes: int
    entry: Callable[[], Entry]


def _page_entry(place: EntryPlace, group: LayerGroup, block: int) -> Entry:
    """A full block's page of every layer, uint16 [page_units, unit_words]."""
    views = {layer: pages.page(block) for layer, pages in group.pages.items()}
    mx.eval(list(views.values()))
    arrays = {f"layer.{layer}": np.array(view) for layer, view in views.items()}
    notes = {"page_format": group.content_format(block)}
    return Entry(place, arrays, json.dumps(notes))


def _require_pages(group: LayerGroup, page_format: str, content: Mapping[str, Array]) -> None:
    known = page_format_named(page_format)
    layouts = {
        f"layer.{layer}": PageLayout(known, pages.geometry) for layer, pages in group.pages.items()
    }
    shapes = {name: (layout.page_units, layout.unit_words) for name, layout in layouts.items()}
    found = {name: array.shape for name, array in content.items()}
    if found != shapes:
        raise ValueError(f"pages of shapes {shapes} are needed, got {found}")


def _full_page(group: LayerGroup, node: Node) -> int | None:
    """The block with the page of a full node; None if none is cached. In a group with a window, it
    is one that holds all of the node's tokens, in or out of the window."""
    if group.window is None:
        return node.blocks.get(group.allocator)
    for slots in node.slots_of(group.allocator):
        if (slots.first, slots.last) == (0, PAGE_SIZE):
            return slots.out_of_window.block
    return None
