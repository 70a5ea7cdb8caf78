"""Sequences that begin with what was computed before.

Full-attention layers can begin at any token of a prefix: they share its blocks, and of a block that
matches in part they copy the page at their first write. Layers with a window hold their latest
tokens only, and recurrent layers one state, so these begin where somebody stopped: at a checkpoint,
which holds the rings and the states that there were. A ring can also be rolled back a little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.prefix_index import Match, Node
from paged_kv.kernels.page_format import PAGE_SIZE, PageFormat
from paged_kv.locked import locked
from paged_kv.lower_tier import LowerTier
from paged_kv.sequence import Sequence

if TYPE_CHECKING:
    from paged_kv.layer_group import LayerGroup
    from paged_kv.page_pool import PagePool


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is needed beside the blocks of full attention to go on behind a prefix.

    Attributes:
        rings: a sequence that holds the rings only.
        states: what layers hold that are not paged.
    """

    rings: Sequence
    states: Any

    def held(self) -> Iterator[tuple[BlockAllocator, int]]:
        """The blocks of the rings."""
        for group in self.rings.pool.groups:
            for block in self.rings.blocks(group):
                yield group.allocator, block


@dataclass(frozen=True)
class Prefix:
    """A prompt's beginning that was computed before.

    Attributes:
        sequence: holds it.
        num_tokens: how much that is.
        states: what layers hold that are not paged; None if all are.
    """

    sequence: Sequence
    num_tokens: int
    states: Any


class PrefixCache:
    """Prefixes of one pool.

    Args:
        pool: where the pages are.
        has_states: whether the model has layers whose caches are not paged.

    Attributes:
        tokens_asked: tokens of all prompts that were looked up.
        tokens_found: those of them that did not have to be computed again.
    """

    def __init__(self, pool: PagePool, *, has_states: bool) -> None:
        self.pool = pool
        self.lock = pool.lock
        self.tokens_asked = 0
        self.tokens_found = 0
        self.has_states = has_states
        self._lower: LowerTier | None = None

    def __len__(self) -> int:
        """Known prompts that are not the beginning of another."""
        return self.pool.index.num_prompts

    @property
    @locked
    def nbytes(self) -> int:
        """Bytes of the pages that nobody else holds. O(known blocks)."""
        self._drain()
        held: Counter[tuple[BlockAllocator, int]] = Counter()
        for node in self.pool.index.nodes():
            held.update(node.blocks.items())
            for checkpoint in node.checkpoints.values():
                held.update(checkpoint.held())
        return sum(
            allocator.format_of(block).block_bytes
            for (allocator, block), count in held.items()
            if allocator.ref_count(block) == count
        )

    @locked
    def trim(self, *, max_prompts: int | None = None, max_bytes: int | None = None) -> int:
        """Evict what was least recently used, and nobody else holds, until there are at most so
        many prompts and `nbytes`; returns how many blocks' worth that was."""
        most = self._bytes_used()
        if max_bytes is not None:
            most -= max(0, self.nbytes - max_bytes)
        return self.pool.index.evict(
            lambda: (max_prompts is None or len(self) <= max_prompts) and self._bytes_used() <= most
        )

    @locked
    def fetch(
        self, namespace: Hashable, tokens: Tokens[int], page_format: PageFormat
    ) -> Prefix | None:
        """A new sequence that holds as much of a prompt as is known, without its last token; None
        if that is nothing. O(tokens). The pages that it gets later are of `page_format`."""
        match = self.pool.index.match(namespace, tokens)
        num_tokens, checkpoint = self._usable(match)
        if num_tokens < len(tokens) - 1 and self._bring_up(namespace, tokens, match, num_tokens):
            match = self.pool.index.match(namespace, tokens)
            num_tokens, checkpoint = self._usable(match)
        self.tokens_asked += len(tokens)
        self.tokens_found += num_tokens
        if not num_tokens:
            return None
        sequence = Sequence(self.pool) if checkpoint is None else checkpoint.rings.copy_rings()
        sequence.page_format = page_format
        held = match.nodes[: -(-num_tokens // PAGE_SIZE)]
        for group in self._shared_groups():
            sequence.adopt(group, [node.blocks[group.allocator] for node in held])
        sequence.begin_at(num_tokens)
        return Prefix(sequence, num_tokens, checkpoint.states if checkpoint else None)

    @locked
    def insert(
        self, namespace: Hashable, tokens: Tokens[int], sequence: Sequence, states: Any
    ) -> int:
        """Let others find what a sequence holds of these tokens; returns how many that is. No page
        is copied. `states` is what the layers hold that are not paged, when all tokens that the
        sequence holds are known; it must not change any more."""
        self.pool.commit([sequence])
        num_tokens = min(len(tokens), sequence.length)
        known = tokens[:num_tokens]
        groups = self._shared_groups()
        tables = [(group.allocator, sequence.blocks(group)) for group in groups]
        blocks = [
            {allocator: table[page] for allocator, table in tables}
            for page in range(-(-num_tokens // PAGE_SIZE))
        ]
        checkpoint = self._checkpoint(sequence, num_tokens, states)
        nodes = self.pool.index.insert(namespace, known, blocks, checkpoint)
        if self._lower is not None:
            self._lower.keep(namespace, nodes)
        return num_tokens

    @locked
    def put_below(self, lower: LowerTier) -> None:
        """Keep in `lower` what is known from now on, and look there for what is not."""
        self._lower = lower
        self.pool.index.leaving = lower.leaving

    def _bring_up(
        self, namespace: Hashable, tokens: Tokens[int], match: Match, beyond: int
    ) -> bool:
        lower = self._lower
        return lower is not None and lower.bring_up(namespace, tokens, match, beyond)

    def _checkpoint(self, sequence: Sequence, num_tokens: int, states: Any) -> Checkpoint | None:
        """What to go on with behind these tokens, if that is still there."""
        if not self.has_states and not self.pool.windows:
            return None
        if self.has_states and sequence.length != num_tokens:
            return None
        if num_tokens < sequence.length - sequence.rollback:
            return None
        rings = sequence.copy_rings()
        rings.begin_at(num_tokens)
        return Checkpoint(rings, states)

    def _usable(self, match: Match) -> tuple[int, Checkpoint | None]:
        """How much of a match all layers can begin with, and what they need for it."""
        if not self.has_states and not self.pool.windows:
            return match.num_tokens, None
        for at in reversed(range(len(match.nodes))):
            start = at * PAGE_SIZE
            matched = min(PAGE_SIZE, match.num_tokens - start)
            found = self._latest(match.nodes[at], start, matched)
            if found is not None:
                return found
        return 0, None

    def _latest(self, node: Node, start: int, matched: int) -> tuple[int, Checkpoint] | None:
        """Where in a node that begins at a position, and matches so far, one can begin."""
        best: tuple[int, Checkpoint] | None = None
        for position, checkpoint in node.checkpoints.items():
            num_tokens = start + min(position, matched)
            back = start + position - num_tokens
            possible = 0 if self.has_states else checkpoint.rings.rollback
            if back <= possible and (best is None or num_tokens > best[0]):
                best = num_tokens, checkpoint
        return best

    def _shared_groups(self) -> list[LayerGroup]:
        """The groups whose sequences hold all their tokens."""
        return [group for group in self.pool.groups if group.is_open and group.window is None]

    def _open_groups(self) -> list[LayerGroup]:
        return [group for group in self.pool.groups if group.is_open]

    def _drain(self) -> None:
        for group in self._open_groups():
            group.allocator.drain()

    def _bytes_used(self) -> int:
        """Bytes of the pages of all blocks that are not free. O(slabs)."""
        self._drain()
        formats = [each for group in self._open_groups() for each in group.allocator.formats]
        return sum(sum(each.used.values()) * each.block_bytes for each in formats)
