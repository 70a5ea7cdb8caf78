"""The tier below memory: what the prefix index knows, kept in a page store.

Blocks are written when they are inserted and not when they are evicted: a process that ends, or is
ended, has then stored what it computed, and eviction happens when memory is short, which is no time
for copies. Of layers that can begin anywhere only full blocks are written then, as the last block
will be written again when a conversation goes on; it is stored when it is evicted, or at the end. A
checkpoint is written at once, with the block that it ends in.

What is stored comes back as blocks of the index, when all of it is there and verified.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefix_index import Match, Node
from paged_kv.kernels.page_format import PAGE_SIZE
from paged_kv.page_bytes import block_bytes, load_blocks, load_rings, ring_bytes
from paged_kv.prefix_cache import Checkpoint, PrefixCache
from paged_kv.sequence import Sequence
from paged_kv.store.background import READ_AHEAD, BackgroundStore
from paged_kv.store.entry_file import Entry
from paged_kv.store.keys import Identity, Link, Place
from paged_kv.store.lookup import CHECKPOINT, Stored, Wanted

if TYPE_CHECKING:
    from paged_kv.layer_group import LayerGroup


class StateCodec(Protocol):
    """Turns what layers hold that are not paged into bytes, and back."""

    def pack(self, states: Any) -> tuple[Any, dict[str, Any]]:
        """What JSON can say of them, and their arrays as uint8, by name."""
        ...

    def unpack(self, notes: Any, arrays: Mapping[str, Any]) -> Any:
        """States again.

        Raises:
            ValueError: that is not what `pack` gave.
        """
        ...


class StoredPrefixes:
    """See `LowerTier` for the operations.

    Args:
        prefixes: whose blocks these are. All its layers must be known.
        store: is not closed with this.
        identify: what the content of pages of a namespace depends on; None if they are not to be
            stored.
        codec: for states.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        store: BackgroundStore,
        identify: Callable[[Hashable], Identity | None],
        codec: StateCodec,
    ) -> None:
        self._pool = prefixes.pool
        self._has_states = prefixes.has_states
        self._store = store
        self._identify = identify
        self._codec = codec
        # What each known block is stored as; of roots, what begins behind them.
        self._links: weakref.WeakKeyDictionary[Node, Link] = weakref.WeakKeyDictionary()

    def bring_up(self, namespace: Hashable, tokens: Tokens[int], match: Match, beyond: int) -> bool:
        """See `LowerTier`."""
        identity = self._identify(namespace)
        if identity is None:
            return False
        root, held = Link.root(identity), self._held(match)
        # A state is never rolled back, so one that ends with the prompt is of no use.
        last = len(tokens) - 1 if self._has_states else len(tokens)
        wanted = Wanted(
            root=root,
            tokens=tokens[:last],
            held=len(held) * PAGE_SIZE,
            beyond=beyond,
            parts=tuple([self._part(group) for group in self._groups]),
            needs_checkpoint=self._needs_checkpoint,
            page_size=PAGE_SIZE,
        )
        failed: list[str] = []
        while (stored := self._store.find(wanted, failed)) is not None:
            try:
                if not self._pool.can_admit(stored.num_tokens):
                    return False
                key = self._load(namespace, root, stored, held)
            except (PoolExhausted, MemoryError):
                return False
            if key is None:
                self._store.note_found(min(stored.num_tokens, len(tokens) - 1) - beyond)
                self._store.touch(stored.keys)
                return True
            failed.append(key)
        return False

    def keep(self, namespace: Hashable, nodes: Tokens[Node]) -> None:
        """See `LowerTier`."""
        identity = self._identify(namespace)
        if identity is not None:
            self._name(Link.root(identity), nodes)
            ends = [(node, end) for node in nodes for end in self._positions(node)]
            self._store.touch(self._save(ends))

    def leaving(self, node: Node) -> None:
        """See `LowerTier`."""
        if node in self._links:
            ends = {*self._positions(node), len(node.tokens)}
            self._save([(node, end) for end in sorted(ends)])

    def keep_all(self) -> None:
        """Store what is known and is not stored yet; nothing is dropped for want of room in a
        queue."""
        for node in self._pool.index.nodes():
            self.leaving(node)
            if not self._store.flush():
                return

    @property
    def _groups(self) -> list[LayerGroup]:
        """The groups whose sequences hold all their tokens."""
        return [group for group in self._pool.groups if group.is_open and group.window is None]

    @property
    def _needs_checkpoint(self) -> bool:
        return self._has_states or bool(self._pool.windows)

    def _part(self, group: LayerGroup) -> str:
        return f"pages {self._pool.groups.index(group)}"

    def _held(self, match: Match) -> list[Node]:
        """The nodes of a match that need not be read: all their tokens match, and all groups have
        their block."""
        held = []
        for node in match.nodes[: match.num_tokens // PAGE_SIZE]:
            if not all(group.allocator in node.blocks for group in self._groups):
                break
            held.append(node)
        return held

    def _positions(self, node: Node) -> list[int]:
        """Behind how many of a node's tokens something is stored as soon as it is known."""
        full = {PAGE_SIZE} if len(node.tokens) == PAGE_SIZE else set()
        return sorted(full | node.checkpoints.keys())

    def _name(self, root: Link, nodes: Tokens[Node]) -> None:
        """Note what nodes, one behind the other, are stored as."""
        link = root
        for node in nodes:
            assert node.parent is not None
            self._links[node.parent] = link
            link = self._links.setdefault(node, link.then(node.tokens))

    def _save(self, ends: Tokens[tuple[Node, int]]) -> list[str]:
        """Store what ends behind so many tokens of each node, if it is not stored; returns what it
        is found by."""
        parts = [part for node, end in ends for part in self._parts(node, end)]
        path = [part.place.key for part in parts]
        for part in parts:
            if not self._store.knows(part.place.key) and self._store.has_room(part.nbytes):
                try:
                    entry = part.entry()
                except (MemoryError, TypeError) as error:
                    # In the middle of a step, maybe: no reason to end it.
                    self._store.drop(f"no bytes could be made of them: {error}")
                else:
                    self._store.save(entry, path)
        return path

    def _parts(self, node: Node, end: int) -> Iterator[_Part]:
        """What is to be stored of a node's first tokens."""
        link = self._links[node]
        if end < len(node.tokens):
            assert node.parent is not None
            link = self._links[node.parent].then(node.tokens[:end])
        for group in self._groups:
            block = node.blocks.get(group.allocator)
            if block is not None:
                place = Place(link, self._part(group))
                nbytes = group.allocator.format_of(block).block_bytes
                yield _Part(place, nbytes, partial(_page_entry, place, group, block))
        checkpoint = node.checkpoints.get(end)
        if checkpoint is not None:
            place = Place(link, CHECKPOINT)
            held = [owner.format_of(block).block_bytes for owner, block in checkpoint.held()]
            yield _Part(place, sum(held), partial(self._checkpoint_entry, place, checkpoint))

    def _checkpoint_entry(self, place: Place, checkpoint: Checkpoint) -> Entry:
        rings, notes = ring_bytes(checkpoint.rings)
        about, arrays = self._codec.pack(checkpoint.states)
        return Entry(place, {**rings, **arrays}, json.dumps({**notes, "states": about}))

    def _load(
        self, namespace: Hashable, root: Link, stored: Stored, held: list[Node]
    ) -> str | None:
        """Bring stored blocks into the index; the key of what cannot be had, if anything cannot."""
        sequence = Sequence(self._pool)
        for group in self._groups:
            sequence.adopt(group, [node.blocks[group.allocator] for node in held])
        places = list(stored.places)
        if stored.checkpoint is not None:
            places.append(stored.checkpoint)
        checkpoint = None
        waiting: list[Entry] = []
        for place, entry in zip(places, self._store.read(places), strict=False):
            if entry is None:
                return place.key
            try:
                if place.part == CHECKPOINT:
                    checkpoint = self._checkpoint(entry)
                else:
                    waiting.append(entry)
                if len(waiting) >= READ_AHEAD or place is places[-1]:
                    self._append(sequence, waiting)
                    waiting.clear()
            except (ValueError, KeyError, TypeError):
                # A sound file that does not hold what it says, by another's or our own fault.
                return place.key
        self._insert(namespace, root, stored, sequence, checkpoint)
        return None

    def _append(self, sequence: Sequence, entries: list[Entry]) -> None:
        """Load pages into fresh blocks of a sequence."""
        for group in self._groups:
            part = self._part(group)
            mine = [entry for entry in entries if entry.place.part == part]
            formats = [json.loads(entry.notes)["page_format"] for entry in mine]
            load_blocks(self._pool, group, sequence, formats, [entry.arrays for entry in mine])

    def _checkpoint(self, entry: Entry) -> Checkpoint:
        notes = json.loads(entry.notes)
        rings = load_rings(self._pool, entry.place.link.end, entry.arrays, notes)
        return Checkpoint(rings, self._codec.unpack(notes["states"], entry.arrays))

    def _insert(
        self,
        namespace: Hashable,
        root: Link,
        stored: Stored,
        sequence: Sequence,
        checkpoint: Checkpoint | None,
    ) -> None:
        tables = [(group.allocator, sequence.blocks(group)) for group in self._groups]
        blocks = [
            {allocator: table[page] for allocator, table in tables}
            for page in range(len(stored.links))
        ]
        tokens = [token for link in stored.links for token in link.tokens]
        self._name(root, self._pool.index.insert(namespace, tokens, blocks, checkpoint))


@dataclass(frozen=True)
class _Part:
    """Something that is to be stored.

    Attributes:
        place: what it is found by.
        nbytes: about how large it is.
        entry: makes it.
    """

    place: Place
    nbytes: int
    entry: Callable[[], Entry]


def _page_entry(place: Place, group: LayerGroup, block: int) -> Entry:
    notes = {"page_format": group.allocator.format_of(block).name}
    return Entry(place, block_bytes(group, block, len(place.link.tokens)), json.dumps(notes))
