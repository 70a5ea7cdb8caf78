"""Keeps the blocks of the prefix index in a page store: the tier below memory.

Insertion writes blocks; eviction does not. So a process that is killed has already stored its
blocks, and no copy is made while memory is short. For full-attention layers insertion writes full
blocks only, as a continued conversation rewrites the last block; that one is stored when it is
evicted, or when the factory closes.

Layers with a window can resume after a block if all blocks of a ring are stored. Cached
out-of-window blocks are therefore written like others. The last block of an inserted sequence's
ring is written at once, with the slots that it still holds of the block before it. The states of
layers without pages are written at once too, with the block that they end.

Stored blocks enter the index like computed ones, once all of them are read and verified. Where
several ranks share a model, each has a store with its shard: blocks are loaded that all ranks have
and can read. They are left on disk where `Rates` estimates that computing them is quicker. The last
block may hold tokens that the prompt does not have; the index matches the part that it has, unless
the page is quantised.

What is written depends on the `WriteRule`: by default everything, or only what several prompts have
begun with. Prompts that no store may keep have nodes like others. So each node notes how many of
its tokens are from prompts that a store may keep.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import abc
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeGuard

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.prefix_node import Node
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.window import Window
from paged_kv.prefix.keeping import Keeping
from paged_kv.prefix.node_pages import NodePage, block_bytes, load_blocks, node_page, path_to
from paged_kv.prefix.prefix_cache import PrefixCache
from paged_kv.prefix.snapshots import Snapshot
from paged_kv.steps.sequence import Sequence
from paged_kv.store.entry_file import Entry
from paged_kv.store.keys import EntryPlace, Identity, Link
from paged_kv.store.lookup import CHECKPOINT, READ_AHEAD, Stored, Wanted
from paged_kv.store.sights import WRITE_ALL, WriteRule
from paged_kv.tiers.tiered_store import Offer, TieredStore
from paged_kv.tiers.waits import Waits


class StateCodec(Protocol):
    """Packs the states of layers that are not paged into bytes, and unpacks them."""

    def pack(self, states: Any) -> tuple[Any, dict[str, Any]]:
        """Notes for JSON, and the states' arrays as uint8, by name."""
        ...

    def unpack(self, notes: Any, arrays: Mapping[str, Any]) -> Any:
        """The states that `pack` was given.

        Raises:
            ValueError: the notes or arrays are not `pack`'s.
        """
        ...


class StoredPrefixes:
    """See `LowerTier` for the operations.

    Args:
        prefixes: the prefix cache to store. Its pool must know all layers.
        store: the page store; the caller closes it.
        identify: returns the identity of a namespace's pages; None if they are not to be stored.
        codec: packs states.
        rule: which prefixes to write.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        store: TieredStore,
        identify: Callable[[Hashable], Identity | None],
        codec: StateCodec,
        rule: WriteRule = WRITE_ALL,
    ) -> None:
        self._prefixes = prefixes
        self._pool = prefixes.pool
        self._store = store
        self._identify = identify
        self._codec = codec
        self._rule = rule
        # How many first tokens of each cached block may be stored.
        self._storable: weakref.WeakKeyDictionary[Node, int] = weakref.WeakKeyDictionary()
        # Each cached block's link; for the index's roots, the root of their chain.
        self._links: weakref.WeakKeyDictionary[Node, Link] = weakref.WeakKeyDictionary()

    def load(self, namespace: Hashable, tokens: abc.Sequence[int], keeping: Keeping) -> None:
        """See `LowerTier`."""
        identity = self._identify(namespace)
        if identity is None:
            return
        if keeping is Keeping.AS_RULED and self._rule.after > 1:
            self._see(namespace, identity, tokens)
        known = self._prefixes.known(namespace, tokens)
        if known >= len(tokens) - 1:
            return
        failed: list[str] = []
        waits = Waits()
        most = len(tokens)
        while True:
            # A load that failed may have evicted blocks that were held before.
            held = self._held(namespace, tokens)
            wanted = self._wanted(Link.root(identity), tokens, most, len(held), known)
            offer = self._offer(wanted, failed, waits)
            end = None if offer is None else _end(offer.stored)
            ends = self._prefixes.ranks.gather("stored prefix", end)
            if offer is None or None in ends:
                return
            if len(set(ends)) > 1:
                # Blocks that end within a page can differ on each rank: look for full ones.
                shortest = min(each[0] for each in ends if each is not None)
                most = min(shortest, most - 1) // PAGE_SIZE * PAGE_SIZE
                continue
            began = time.perf_counter()
            if not self._is_readable(offer, failed):
                continue
            try:
                unusable = self._load(namespace, offer, held)
            except (PoolExhausted, MemoryError):
                return
            found = self._prefixes.known(namespace, tokens)
            if unusable is None and found > known:
                if not offer.has_landed:
                    reading = self._prefixes.rates.reading(offer.tier)
                    reading.note(found - known, time.perf_counter() - began)
                self._pool.counts.tokens_read += found - known
                self._store.note_found(found - known, offer.tier)
                self._store.touch(offer.stored.keys)
                return
            failed.append(unusable or offer.stored.end_key)

    def wanted(self, namespace: Hashable, tokens: abc.Sequence[int]) -> Wanted | None:
        """What to look up of a prompt in the tiers; None if nothing can be added to memory."""
        known = self._prefixes.known(namespace, tokens)
        identity = self._identify(namespace)
        if identity is None or known >= len(tokens) - 1:
            return None
        held = len(self._held(namespace, tokens))
        return self._wanted(Link.root(identity), tokens, len(tokens), held, known)

    def _offer(self, wanted: Wanted, failed: list[str], waits: Waits) -> Offer | None:
        """What this rank has stored, fits its pool and is quicker to read than to compute."""
        for offer in self._store.offers(wanted, failed, waits):
            if self._pool.can_admit(offer.stored.num_tokens) and (
                offer.has_landed or self.is_quicker(offer, wanted)
            ):
                return offer
        return None

    def is_quicker(self, offer: Offer, wanted: Wanted) -> bool:
        """Whether to read an offer instead of computing its tokens."""
        num_tokens = offer.stored.num_tokens - wanted.beyond
        return self._prefixes.rates.is_reading_quicker(num_tokens, offer.tier)

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
        return ranks.agree("readable", not damaged)

    def keep(
        self, namespace: Hashable, nodes: abc.Sequence[Node], num_tokens: int, keeping: Keeping
    ) -> None:
        """See `LowerTier`."""
        is_awaited = keeping is Keeping.AT_ONCE
        identity = self._identify(namespace)
        if identity is not None:
            self._name(Link.root(identity), nodes, num_tokens)
            parts = [
                part
                for at in range(len(nodes))
                for end in sorted(self._ends(nodes[at]))
                if self._is_due(nodes[at], end, num_tokens, is_awaited=is_awaited)
                for part in self._parts(nodes, at, end)
            ]
            self._store.touch(self._save(parts, to_servers=is_awaited))

    def on_evict(self, node: Node) -> None:
        """See `LowerTier`."""
        if node in self._links:
            path = path_to(node)
            ends = self._ends(node) | {self._storable[node]}
            num_tokens = (len(path) - 1) * PAGE_SIZE + self._storable[node]
            due = [end for end in ends if self._is_due(node, end, num_tokens)]
            self._save([part for end in due for part in self._parts(path, len(path) - 1, end)])

    def keep_all(self) -> None:
        """Store every cached block that is not stored yet. It waits for the queue, so none is
        dropped because the queue is full."""
        for node in self._pool.index.nodes():
            self.on_evict(node)
            if not self._store.flush():
                return

    @property
    def _groups(self) -> list[LayerGroup]:
        return [group for group in self._pool.groups if group.is_open]

    @property
    def _shared_groups(self) -> list[LayerGroup]:
        """The groups without a window: their sequences hold all their tokens."""
        return [group for group in self._groups if group.window is None]

    def _part(self, group: LayerGroup) -> str:
        return f"pages {self._pool.groups.index(group)}"

    def _held(self, namespace: Hashable, tokens: abc.Sequence[int]) -> list[Node]:
        """The blocks of a prompt that are in memory: full matching blocks that every group without
        a window holds."""
        match = self._pool.index.match(namespace, tokens)
        held = []
        for node in match.nodes[: match.num_tokens // PAGE_SIZE]:
            if not all(group.allocator in node.blocks for group in self._shared_groups):
                break
            held.append(node)
        return held

    def _wanted(
        self, root: Link, tokens: abc.Sequence[int], most: int, held: int, known: int
    ) -> Wanted:
        """What to look up of the first `most` tokens of a prompt."""
        has_states = self._prefixes.has_states
        windows = [(group, group.window) for group in self._groups]
        return Wanted(
            root=root,
            # A state cannot be rolled back, and the last token must be computed again.
            tokens=tokens[: min(most, len(tokens) - 1) if has_states else most],
            held=held * PAGE_SIZE,
            beyond=known,
            parts=tuple([self._part(group) for group in self._shared_groups]),
            needs_checkpoint=has_states,
            page_size=PAGE_SIZE,
            rings=tuple([(self._part(group), window.ring) for group, window in windows if window]),
            splits_full_blocks=not any(group.recodes for group in self._shared_groups),
        )

    def _ends(self, node: Node) -> set[int]:
        """The numbers of a node's tokens after which something is stored at insertion."""
        full = {PAGE_SIZE} if len(node.tokens) == PAGE_SIZE else set()
        if self._prefixes.has_states:
            return full | {end for end, each in node.checkpoints.items() if _is_there(each)}
        slots = [slots for allocator in node.windows for slots in node.slots_of(allocator)]
        return full | {each.last for each in slots if each.is_end and not each.first}

    def _name(self, root: Link, nodes: abc.Sequence[Node], num_tokens: int) -> None:
        """Note the links of a path of nodes, and what of them may be stored."""
        link = root
        for at, node in enumerate(nodes):
            assert node.parent is not None
            self._links[node.parent] = link
            link = self._links.setdefault(node, link.then(node.tokens))
            storable = min(PAGE_SIZE, num_tokens - at * PAGE_SIZE)
            self._storable[node] = max(storable, self._storable.get(node, 0))

    def _see(self, namespace: Hashable, identity: Identity, tokens: abc.Sequence[int]) -> None:
        """Count the blocks of a prompt as seen, and the ends within them that are in memory."""
        chain = [Link.root(identity)]
        for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
            chain.append(chain[-1].then(tokens[start : start + PAGE_SIZE]))
        seen = {link.digest for link in chain[1:]}
        match = self._pool.index.match(namespace, tokens)
        for at, node in enumerate(match.nodes):
            most = match.num_tokens - at * PAGE_SIZE
            ends = {end for end in self._ends(node) if end <= most}
            if at == len(match.nodes) - 1:
                ends.add(self._storable.get(node, len(node.tokens)))
            seen |= {chain[at].then(node.tokens[:end]).digest for end in ends}
        for digest in seen:
            self._store.see(digest)

    def _is_due(self, node: Node, end: int, num_tokens: int, *, is_awaited: bool = False) -> bool:
        """Whether to write the first `end` tokens of a node, in a prefix of `num_tokens` tokens."""
        if end > self._storable[node]:
            return False
        if self._rule.after == 1 or is_awaited:
            return True
        digest = self._link(node, end).digest
        if not self._store.sights[digest]:
            self._store.see(digest)
        return self._rule.is_due(self._store.sights[digest], num_tokens)

    def _link(self, node: Node, end: int) -> Link:
        """The block of the first `end` tokens of a named node."""
        if end == len(node.tokens):
            return self._links[node]
        assert node.parent is not None
        return self._links[node.parent].then(node.tokens[:end])

    def _save(self, parts: abc.Sequence[_Part], *, to_servers: bool = False) -> list[str]:
        """Store the parts that are not stored yet; returns the keys of all of them."""
        path = [part.place.key for part in parts]
        for part in parts:
            if takers := self._store.takers(part.place, part.nbytes, servers=to_servers):
                try:
                    entry = part.entry()
                except (MemoryError, TypeError) as error:
                    # A step may be running: drop the entry instead of failing the step.
                    self._store.drop(f"no bytes could be made of them: {error}")
                else:
                    self._store.save(entry, takers, path)
        return path

    def _parts(self, path: abc.Sequence[Node], at: int, end: int) -> Iterator[_Part]:
        """The parts to store for the first `end` tokens of node `path[at]`; none where no prompt
        can resume."""
        node = path[at]
        if not self._prefixes.can_resume(node, end):
            return
        link = self._link(node, end)
        for group in self._groups:
            page = node_page(group, path, at, end)
            if page is not None:
                place = EntryPlace(link, self._part(group))
                nbytes = group.allocator.format_of(page.block).block_bytes
                yield _Part(place, nbytes, partial(_page_entry, place, group, page))
        snapshot = node.checkpoints.get(end)
        if snapshot is not None and _is_there(snapshot):
            place = EntryPlace(link, CHECKPOINT)
            yield _Part(place, snapshot.nbytes, partial(self._state_entry, place, snapshot.states))

    def _state_entry(self, place: EntryPlace, states: Any) -> Entry:
        about, arrays = self._codec.pack(states)
        return Entry(place, arrays, json.dumps(about))

    def _load(self, namespace: Hashable, offer: Offer, held: list[Node]) -> str | None:
        """Load stored blocks into the index; returns the key of an entry that could not be used, or
        None."""
        stored, sequence = offer.stored, Sequence(self._pool)
        num_held = sum(len(node.tokens) for node in held)
        for group in self._shared_groups if held else []:
            sequence.adopt(group, [node.blocks[group.allocator] for node in held], num_held)
        states: Any = None
        written: dict[LayerGroup, int] = {}
        waiting: list[Entry] = []
        for place, entry in zip(stored.places, self._store.read(offer), strict=False):
            if entry is None:
                return place.key
            try:
                if place.part == CHECKPOINT:
                    states = self._codec.unpack(json.loads(entry.notes), entry.arrays)
                else:
                    waiting.append(entry)
                if len(waiting) >= READ_AHEAD or place is stored.places[-1]:
                    written |= self._append(sequence, stored.num_tokens, waiting)
                    waiting.clear()
            except (ValueError, KeyError, TypeError):
                # The checksum is right, but the content does not fit its notes.
                return place.key
        sequence.begin_at(stored.num_tokens, written)
        tokens = [token for link in stored.links for token in link.tokens]
        self._prefixes.insert(namespace, tokens, sequence, states)
        return None

    def _append(
        self, sequence: Sequence, num_tokens: int, entries: list[Entry]
    ) -> dict[LayerGroup, int]:
        """Load pages into fresh blocks of a sequence. For each ring whose last page is among them,
        returns how many tokens it was written with."""
        written = {}
        for group in self._groups:
            mine = [entry for entry in entries if entry.place.part == self._part(group)]
            notes = [json.loads(entry.notes) for entry in mine]
            formats = [each["page_format"] for each in notes]
            load_blocks(self._pool, group, sequence, formats, [entry.arrays for entry in mine])
            for entry, each in zip(mine, notes, strict=True):
                if group.window is not None and entry.place.link.end == num_tokens:
                    written[group] = _seen(each["written"], num_tokens, group.window)
        return written


@dataclass(frozen=True)
class _Part:
    """An entry to store.

    Attributes:
        place: its key.
        nbytes: its approximate size.
        entry: makes it.
    """

    place: EntryPlace
    nbytes: int
    entry: Callable[[], Entry]


def _end(stored: Stored) -> tuple[int, tuple[int, ...]]:
    """The length of stored blocks, and the last one's tokens: two ranks may load them if these are
    equal. Their keys differ, as those name a rank's shard of the weights."""
    return stored.num_tokens, tuple(stored.links[-1].tokens)


def _page_entry(place: EntryPlace, group: LayerGroup, page: NodePage) -> Entry:
    page_format = group.content_format(page.block)
    notes = {"page_format": page_format, "written": page.written}
    return Entry(place, block_bytes(group, page.block, page.unused), json.dumps(notes))


def _seen(written: int, num_tokens: int, window: Window) -> int:
    """Check how many tokens a ring was written with.

    Raises:
        ValueError: after so many, the ring does not hold the window before `num_tokens`.
    """
    if not window.shortest_rollback(written) <= num_tokens <= written:
        raise ValueError(f"a ring written with {written} tokens cannot resume after {num_tokens}")
    return written


def _is_there(checkpoint: Any) -> TypeGuard[Snapshot]:
    return isinstance(checkpoint, Snapshot) and checkpoint.states is not None
