"""Starts sequences with the longest cached prefix of a prompt.

Full-attention layers can resume from any token of a prefix: they share its blocks, and copy a
partly matching page at their first write. If that page is quantised, they resume from its first
token instead: a token attends to its own page in 16 bits. Layers with a window can resume where all
pages of a ring are cached: cached out-of-window blocks, and the ring that an inserted sequence
ended with. Recurrent layers have one state, and resume only where a snapshot of it was taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, takewhile
from typing import Any, NamedTuple
from weakref import WeakMethod

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import locked
from paged_kv.allocator.errors import PoolExhausted
from paged_kv.allocator.prefixes.prefix_node import Match, Node, Owner, WindowSlots
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, PageFormat
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.prefix.keeping import LowerTier, Nodes, Rates, StorePolicy, Tokens
from paged_kv.prefix.snapshots import Snapshot, Snapshots, live_snapshots
from paged_kv.prefix.window_prefixes import WindowPrefix, held_slots, supersede_rings, window_prefix
from paged_kv.ranks import ALONE, Ranks
from paged_kv.steps.blocks import recode_sequence
from paged_kv.steps.sequence import Sequence

# Snapshots of recurrent layers may take up to max_bytes / SNAPSHOT_SHARE besides the budget. Of a
# model without pages they may take all of it.
SNAPSHOT_SHARE = 4


class Prefix(NamedTuple):
    """A cached prefix of a prompt: a new sequence that holds it, its length, and the states of
    layers that are not paged; None if there is no snapshot."""

    sequence: Sequence
    num_tokens: int
    states: Any


class Expected(NamedTuple):
    """What a prompt would find: the length of its longest cached prefix, and the tokens of its
    first full pages that sequences hold: these take no memory."""

    num_tokens: int
    in_use: int


class _Start(NamedTuple):
    """The position from which all layers can resume, with the rings and snapshot that they need."""

    num_tokens: int
    rings: Mapping[LayerGroup, WindowPrefix]
    snapshot: Snapshot | None = None


class PrefixCache:
    """The cached prefixes of one pool.

    Attributes:
        has_states: whether the model has layers whose caches are not paged.
        ranks: the processes that share the model.
        snapshots: the states of those layers.
        rates: how quickly prompts are computed, and read from a lower tier.
        lower: keeps inserted prefixes too, and is asked for missing ones.
    """

    def __init__(self, pool: PagePool, *, has_states: bool, ranks: Ranks = ALONE) -> None:
        self.pool = pool
        self.ranks = ranks
        self.lock = pool.lock
        most = pool.budget.max_bytes // (SNAPSHOT_SHARE if pool.num_layers else 1)
        self.snapshots = Snapshots(most, pool.eviction_policy)
        pool.snapshots.add(self.snapshots)
        self.has_states = has_states
        self.rates = Rates()
        self.lower: LowerTier | None = None
        if has_states or pool.windows:
            pool.index.can_resume = WeakMethod(self._can_resume_within)

    def __len__(self) -> int:
        """Cached prompts that are not a prefix of another."""
        return self.pool.index.num_prompts

    @property
    @locked
    def nbytes(self) -> int:
        """Bytes of the pages that only this cache holds, and of snapshots. O(formats)."""
        return self.pool.bytes_retained + self.snapshots.nbytes

    @locked
    def trim(self, *, max_prompts: int | None = None, max_bytes: int | None = None) -> int:
        """Evict what is worth least and no sequence holds, until at most `max_prompts`
        prompts and `max_bytes` of `nbytes` are left; returns how many blocks were evicted."""
        # Counting first releases the blocks of collected sequences, so they cost no eviction.
        most = self._bytes_held()
        if max_bytes is not None:
            most -= max(0, self.nbytes - max_bytes)

        def is_small_enough() -> bool:
            return self._bytes_held() <= most

        def is_enough() -> bool:
            return (max_prompts is None or len(self) <= max_prompts) and is_small_enough()

        evicted = self.pool.out_of_window.evict(is_small_enough)
        evicted += self.pool.index.evict(is_enough)
        self.pool.counts.evictions["limit"] += evicted
        return evicted

    @locked
    def hold(self, namespace: Hashable, tokens: Tokens, until: float, most: float) -> None:
        """Evict the cached prefix of a prompt after all that is not held, until a time: see
        `Holds`. All that is held may take a share `most` of the memory, 0 to 1."""
        index = self.pool.index
        path = index.known(namespace, tokens).nodes
        index.holds.hold(namespace, path, until, self._share_of, most)

    @locked
    def fetch(
        self,
        namespace: Hashable,
        tokens: Tokens,
        page_format: PageFormat,
        *,
        policy: StorePolicy = StorePolicy.DEFAULT,
    ) -> Prefix:
        """A new sequence that holds the longest cached prefix of a prompt, without the prompt's
        last token. O(tokens). Its full pages get `page_format`. `policy` says what the tier below
        may learn of the prompt, and whether it counts."""
        if self.lower is not None:
            self.lower.load(namespace, tokens, policy)
        is_new, index = policy is not StorePolicy.KNOWN, self.pool.index
        match = (index.match if is_new else index.peek)(namespace, tokens)
        start = self._common_start(match)
        if is_new:
            self.pool.counts.prefix_queries += len(tokens)
            self.pool.counts.prefix_hits += start.num_tokens
        sequence = Sequence(self.pool, page_format)
        sequence.prompt_tokens, sequence.caches_out_of_window = len(tokens), True
        sequence.canonical_tokens = start.num_tokens
        if start.num_tokens:
            self._share(sequence, match, start)
        return Prefix(sequence, start.num_tokens, start.snapshot and start.snapshot.states)

    @locked
    def insert(
        self,
        namespace: Hashable,
        tokens: Tokens,
        sequence: Sequence,
        states: Any,
        *,
        policy: StorePolicy = StorePolicy.DEFAULT,
        owner: Owner | None = None,
    ) -> int:
        """Cache what a sequence holds of these tokens; returns how many of them a longer prompt can
        now reuse. Copies no page, but recodes full ones, as the sequence's next step would: so what
        is found is what the sequence itself goes on with. `states` are the states of the layers
        that are not paged, after all tokens of the sequence; the caller must not change them later.
        If the sequence went on behind these tokens, the states are kept that it had when its prompt
        ended.
        `policy` says what the tier below gets, and `owner` whose prompt it is; None if it is
        nobody's, and may go with whoever's prompts use it.
        """
        sequence.commit()
        # If memory is too short, the next step recodes them, of this sequence or of one that finds
        # them.
        with suppress(PoolExhausted):
            recode_sequence(self.pool, sequence)
        num_tokens = self._reusable(len(tokens), sequence)
        num_pages = -(-num_tokens // PAGE_SIZE)
        tables = [(group.allocator, sequence.blocks(group)) for group in self.shared_groups()]
        blocks = [
            {allocator: table[page] for allocator, table in tables} for page in range(num_pages)
        ]
        windows: list[dict[BlockAllocator, list[WindowSlots]]] = [{} for _ in range(num_pages)]
        for group in self.window_groups():
            for page, slots in held_slots(sequence, group, num_tokens):
                windows[page].setdefault(group.allocator, []).append(slots)
        known = tokens[:num_tokens]
        nodes = self.pool.index.insert(namespace, known, blocks, windows)
        is_answer = 0 < sequence.prompt_tokens <= num_tokens
        if not is_answer:
            for group in self.window_groups():
                supersede_rings(nodes, windows, group)
        prompt = sequence.prompt_states
        if prompt is not None:
            self.snapshots.forget(prompt.batch)  # The index may keep them from now on.
        if self.has_states and sequence.length == num_tokens > 0:
            self._keep_states(nodes, num_tokens, states, is_answer=is_answer)
        elif self.has_states and prompt is not None and 0 < prompt.num_tokens <= num_tokens:
            path = nodes[: -(-prompt.num_tokens // PAGE_SIZE)]
            self._keep_states(path, prompt.num_tokens, prompt.states(), is_answer=False)
        if owner is not None:
            self.pool.index.owners.mark(nodes, owner)
        if not self.pool.num_layers:
            self.pool.index.prune(live_snapshots)  # no block of the others holds anything
        if self.lower is not None and policy is not StorePolicy.NEVER:
            self.lower.keep(namespace, nodes, num_tokens, policy)
        return self._start(Match(nodes, num_tokens)).num_tokens

    @locked
    def forget(self, namespace: Hashable, tokens: Tokens) -> int:
        """See `PrefixIndex.forget_prompt`. O(tokens)."""
        return self._forgotten(self.pool.index.forget_prompt(namespace, tokens))

    @locked
    def end_session(self, owner: Owner) -> int:
        """See `PrefixIndex.end_session`.

        Raises:
            UnknownSession: no prompt has this owner; nothing was changed.
        """
        return self._forgotten(self.pool.index.end_session(owner))

    @locked
    def peek(self, namespace: Hashable, tokens: Tokens) -> Expected:
        """What `fetch` would find in memory now. Nothing counts as used. O(tokens)."""
        for group in self.shared_groups():
            group.allocator.drain()  # what sequences held that are gone is not in use
        match = self.pool.index.peek(namespace, tokens)
        num_tokens = self._start(match).num_tokens
        pages = takewhile(self._is_in_use, match.nodes[: num_tokens // PAGE_SIZE])
        return Expected(num_tokens, PAGE_SIZE * sum(1 for _ in pages))

    @locked
    def has_room(self, namespace: Hashable, tokens: Tokens) -> bool:
        """Whether what is not cached of a prompt fits beside all that is worth more than a new
        prompt. O(tokens), and O(nodes) if not all of it fits into free memory."""
        match, size = self.pool.index.peek(namespace, tokens), self.pool.size
        known = self._start(match).num_tokens
        nbytes = size.bytes_for(len(tokens)) - size.shared_bytes(known)
        free = size.promisable - self.pool.bytes_active - self.pool.bytes_retained
        return nbytes <= free or nbytes <= free + self.pool.index.bytes_worth_less(match.nodes)

    @locked
    def parting(self, namespace: Hashable, tokens: Tokens) -> int:
        """After how many tokens of a prompt its states are worth keeping, because other prompts
        have these tokens and then others, and the index holds no state so far along; 0 if there is
        no such place a page or more from where the prompt can resume. O(tokens)."""
        if not self.has_states:
            return 0
        match = self.pool.index.peek(namespace, tokens)
        place = match.num_tokens // PAGE_SIZE * PAGE_SIZE
        is_worth = place - self._start(match).num_tokens >= PAGE_SIZE
        return self.ranks.all_min("parting", place if is_worth else 0)

    @locked
    def known(self, namespace: Hashable, tokens: Tokens) -> int:
        """How many tokens of a prompt all layers can reuse, without its last token. Nothing counts
        as used, and nothing is released. O(tokens)."""
        return self._start(self.pool.index.peek(namespace, tokens)).num_tokens

    def shared_groups(self) -> list[LayerGroup]:
        """The groups without a window: their sequences hold all their tokens."""
        return [group for group in self.pool.reclaimer.open_groups() if group.window is None]

    def window_groups(self) -> list[LayerGroup]:
        return [group for group in self.pool.reclaimer.open_groups() if group.window is not None]

    def _forgotten(self, blocks: int) -> int:
        """Count so many blocks' worth of tokens, and free out-of-window blocks that went with
        them."""
        self.pool.out_of_window.drain()
        self.pool.counts.evictions["forgotten"] += blocks
        return blocks

    def _reusable(self, num_tokens: int, sequence: Sequence) -> int:
        """How many of the first `num_tokens` tokens of a sequence prompts can reuse: none within a
        page that the sequence has filled, if that is quantised or will be; and in a reproducible
        pool only what was computed as it would be for any prompt."""
        length, in_page = sequence.length, num_tokens % PAGE_SIZE
        if self.pool.is_reproducible:
            return min(num_tokens, sequence.canonical_tokens) // PAGE_SIZE * PAGE_SIZE
        is_filled = num_tokens - in_page + PAGE_SIZE <= length
        if is_filled and any(group.recodes for group in self.shared_groups()):
            return num_tokens - in_page
        return min(num_tokens, length)

    def _keep_states(self, path: Nodes, num_tokens: int, states: Any, *, is_answer: bool) -> None:
        """Keep the states after the last token of a path, if there is room."""
        nbytes = sum(cache.nbytes for cache in states)
        if nbytes > self.snapshots.max_bytes:
            return
        end = num_tokens - (len(path) - 1) * PAGE_SIZE
        keep = partial(self.snapshots.keep, path, end, states, nbytes, is_answer=is_answer)
        if not keep():
            any(keep() for _ in self.pool.index.holds.ending())

    def _share_of(self, node: Node) -> float:
        """The share of the memory that a node's pages take, and that of its snapshots."""
        pages = list(node.blocks.items())
        for allocator, windows in node.windows.items():
            slots = [each.out_of_window.block for each in windows.values()]
            pages += [(allocator, block) for block in set(slots) if block is not None]
        nbytes = sum(allocator.format_of(block).block_bytes for allocator, block in pages)
        states = sum(each.nbytes for _, each in live_snapshots(node))
        return nbytes / self.pool.budget.max_bytes + states / max(1, self.snapshots.max_bytes)

    def _share(self, sequence: Sequence, match: Match, start: _Start) -> None:
        held = match.nodes[: -(-start.num_tokens // PAGE_SIZE)]
        for group in self.shared_groups():
            blocks = [node.blocks[group.allocator] for node in held]
            sequence.adopt(group, blocks, start.num_tokens)
        for group, ring in start.rings.items():
            blocks = [page.block for page in ring.pages if page.block is not None]
            assert len(blocks) == len(ring.pages), "a page was given up while it was looked for"
            sequence.adopt(group, blocks, start.num_tokens)
            for page in ring.pages:
                self.pool.out_of_window.touch(page)
        if start.snapshot is not None:
            self.snapshots.touch(start.snapshot)
        written = {group: ring.written for group, ring in start.rings.items()}
        sequence.begin_at(start.num_tokens, written)

    def _common_start(self, match: Match) -> _Start:
        """The longest part of a match that all layers can reuse on every rank."""
        while True:
            start = self._start(match)
            known = self.ranks.gather("prefix", start.num_tokens)
            if len(set(known)) == 1:
                return start
            match = Match(match.nodes[: -(-min(known) // PAGE_SIZE)], min(known))

    def _can_resume_within(self, node: Node) -> bool:
        """Whether prompts can resume behind some of a node's tokens. O(nodes before it)."""
        path = node.path()
        slots = (node.slots_of(group.allocator) for group in self.window_groups())
        ends = {len(node.tokens), *(each.last for each in chain.from_iterable(slots))}
        begin = node.use.position - len(node.tokens)
        return any(self._start(Match(tuple(path), begin + end), begin).num_tokens for end in ends)

    def _start(self, match: Match, least: int = 0) -> _Start:
        """The longest part of a match that all layers can reuse, if it is longer than `least`."""
        for num_tokens, snapshot in self._candidates(match):
            if num_tokens <= least:
                break
            rings = {}
            for group in self.window_groups():
                assert group.window is not None
                ring = window_prefix(match.nodes, num_tokens, group.window, group.allocator)
                if ring is None:
                    break
                rings[group] = ring
            else:
                return _Start(num_tokens, rings, snapshot)
        return _Start(0, {})

    def _candidates(self, match: Match) -> Iterator[tuple[int, Snapshot | None]]:
        """Positions to resume from, the longest first, with the snapshot there if the model needs
        one."""
        for page in reversed(range(len(match.nodes))):
            node, begin = match.nodes[page], page * PAGE_SIZE
            tokens = min(match.num_tokens - begin, PAGE_SIZE)
            ends: list[tuple[int, Snapshot | None]] = [
                (tokens - tokens % self.pool.group_tokens, None)
            ]
            if self.has_states:
                ends = [each for each in reversed(live_snapshots(node)) if each[0] <= tokens]
            for end, snapshot in ends:
                if end and self._can_resume(node, end):
                    yield begin + end, snapshot

    def _can_resume(self, node: Node, end: int) -> bool:
        """Whether layers with pages can resume after the first `end` tokens of a node: not within a
        page that must be computed in one piece, nor within one of which any layer's has not 16
        bits, or loses them with the next step of a sequence that fills it: memory was too short
        when it was inserted."""
        is_whole = self.pool.is_reproducible or any(
            group.allocator.format_of(node.blocks[group.allocator]).name != FP16.name
            or (group.recodes and len(node.tokens) == PAGE_SIZE)
            for group in self.shared_groups()
            if group.allocator in node.blocks
        )
        return end == PAGE_SIZE or not is_whole

    def _is_in_use(self, node: Node) -> bool:
        """Whether a sequence holds a node's page, in all layers without a window."""
        allocators = [group.allocator for group in self.shared_groups()]
        return bool(allocators) and all(
            allocator in node.blocks and allocator.refs.holders(node.blocks[allocator])
            for allocator in allocators
        )

    def _bytes_held(self) -> int:
        """Bytes of all blocks that are not free, and of snapshots. O(formats)."""
        return self.pool.bytes_active + self.nbytes
