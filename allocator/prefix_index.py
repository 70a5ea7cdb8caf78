"""Finds the blocks of prompts that were computed before, by their token ids.

A tree of blocks for each namespace: the path from the root to a node spells the tokens of a prefix,
a block's worth a node, and only a leaf may have fewer. Tokens are compared, never hashes alone: a
node's children are found by a dictionary of their tokens, which compares what it hashes, and the
child that goes along with a prompt for longest is a neighbour in the order of tokens.

    match     O(n + log c) for n tokens and c children of one node
    insert    the same
    evict     O(b log n) for b blocks, and the leaves that are in use before them

The index holds one reference to each of its blocks. A block that nobody else holds is cached: it
can be evicted, and is found again until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count

from sortedcontainers import SortedDict

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.prefix_node import Blocks, Checkpoint, Node, Windows


@dataclass(frozen=True)
class Match:
    """The longest computed prefix of a prompt.

    Attributes:
        nodes: its blocks, in order; of the last one maybe not all tokens match.
        num_tokens: how many tokens match.
    """

    nodes: tuple[Node, ...]
    num_tokens: int


class PrefixIndex:
    """Blocks by the tokens that they and all blocks before them hold.

    A namespace is anything hashable that names what else the contents depend on. Token ids are
    any integers. All methods may be called from any thread that uses the blocks' allocators under
    the same lock.
    """

    def __init__(self, page_size: int = 256, lock: threading.RLock | None = None) -> None:
        self.page_size = page_size
        self.lock = lock or threading.RLock()
        # Called with each node that is about to be let go of.
        self.leaving: Callable[[Node], None] | None = None
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[tuple[BlockAllocator, int], Node] = {}
        self._leaves: SortedDict[int, Node] = SortedDict()
        self._clock = count(1)
        self._size = 0

    def __len__(self) -> int:
        """Blocks' worth of tokens that are known."""
        return self._size

    @property
    def num_prompts(self) -> int:
        """Known prompts that are not the beginning of another."""
        return len(self._leaves)

    def nodes(self) -> list[Node]:
        """All that is known, parents before their children. O(nodes)."""
        with self.lock:
            found = list(self._roots.values())
            for node in found:
                found.extend(node.children.values())
            return found[len(self._roots) :]

    def match(self, namespace: Hashable, tokens: Sequence[int]) -> Match:
        """The longest prefix of a prompt that was inserted, without the prompt's last token, which
        must be computed to go on."""
        with self.lock:
            nodes, num_tokens = self._path(namespace, tokens, len(tokens) - 1)
            self._touch(nodes)
            return Match(nodes, num_tokens)

    def insert(
        self,
        namespace: Hashable,
        tokens: Sequence[int],
        blocks: Sequence[Blocks],
        windows: Sequence[Windows] = (),
        checkpoint: Checkpoint | None = None,
    ) -> tuple[Node, ...]:
        """Take a reference to the blocks that hold a prompt's tokens, a page's worth each, where
        no others are known that do; and to what groups with a window hold of each page, as far as
        `windows` goes. A checkpoint is kept for the end of the tokens. Returns the nodes that hold
        them now."""
        with self.lock:
            node = self._roots.setdefault(namespace, Node((), {}, None))
            path = []
            for start, theirs in zip(range(0, len(tokens), self.page_size), blocks, strict=True):
                page = tuple(tokens[start : start + self.page_size])
                child = self._child(node, page)
                if child is None and not self._nodes.keys().isdisjoint(theirs.items()):
                    # Known in another namespace: what follows was computed from what that one
                    # stands for. A block is kept once.
                    return ()
                node = child or self._add(node, page, theirs)
                path.append(node)
            self._touch(path)
            for node, held in zip(path, windows, strict=False):
                for allocator, parts in held.items():
                    for rows in parts:
                        node.hold(allocator, rows)
            if path and checkpoint is not None:
                at = len(tokens) - (len(path) - 1) * self.page_size
                checkpoint.pins = path[-1].pins
                path[-1].checkpoints[at] = checkpoint
            return tuple(path)

    def pin(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """Keep what is known of a prefix until `unpin`; returns how many tokens that is."""
        return self._pin(namespace, tokens, 1)

    def unpin(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """Undo one `pin` of the same prefix; returns how many tokens that is."""
        return self._pin(namespace, tokens, -1)

    def clear(self) -> int:
        """Forget everything that is not pinned; returns how many blocks' worth that was."""
        return self.forget(lambda: False)

    def forget(self, is_enough: Callable[[], bool]) -> int:
        """Let go of everything that is not pinned, the least recently used leaves first, until it
        is enough; returns how many blocks' worth that was. What others hold stays theirs."""
        with self.lock:
            before = len(self)
            self._evict(_is_pinned, is_enough)
            return before - len(self)

    def evict(self, is_enough: Callable[[], bool]) -> int:
        """Let go of blocks that nobody else holds, the least recently used leaves first, until it
        is enough; returns how many blocks' worth that was."""
        with self.lock:
            before = len(self)
            self._evict(_is_in_use, is_enough)
            return before - len(self)

    def evictable(self, allocator: BlockAllocator) -> list[int]:
        """Blocks of a group that nobody else holds and that are not pinned. O(blocks)."""
        with self.lock:
            return [
                block
                for (owner, block), node in self._nodes.items()
                if owner is allocator and not _is_in_use(node)
            ]

    def _path(
        self, namespace: Hashable, tokens: Sequence[int], most: int
    ) -> tuple[tuple[Node, ...], int]:
        """The nodes that hold the first tokens of a prompt, at most so many, and how many that
        is."""
        path: list[Node] = []
        node, matched = self._roots.get(namespace), 0
        while node is not None and matched < most:
            page = tuple(tokens[matched : min(most, matched + self.page_size)])
            node, common = _closest_child(node, page)
            if node is not None and common:
                path.append(node)
                matched += common
            if common < self.page_size:
                break
        return tuple(path), matched

    def _child(self, node: Node, page: tuple[int, ...]) -> Node | None:
        """The child that holds these tokens, or begins with them."""
        child, common = _closest_child(node, page)
        return child if common == len(page) else None

    def _add(self, parent: Node, page: tuple[int, ...], blocks: Blocks) -> Node:
        """A new child; one that holds only the beginning of its tokens goes."""
        shorter, common = _closest_child(parent, page)
        node = Node(page, dict(blocks), parent)
        if shorter is not None and common == len(shorter.tokens):
            node.inherit(shorter)
            if not shorter.pins:
                self._remove(shorter)
        for allocator, block in node.blocks.items():
            allocator.keep(block, self._follow)
            self._nodes[allocator, block] = node
        if parent.parent is not None and not parent.children:
            del self._leaves[parent.last_used]
        parent.children[page] = node
        node.last_used = next(self._clock)
        self._leaves[node.last_used] = node
        self._size += 1
        return node

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        del parent.children[leaf.tokens]
        del self._leaves[leaf.last_used]
        self._size -= 1
        if parent.parent is not None and not parent.children:
            self._leaves[parent.last_used] = parent
        leaf.let_go()
        for allocator, block in leaf.blocks.items():
            del self._nodes[allocator, block]
            allocator.let_go(block)

    def _follow(self, allocator: BlockAllocator, source: int, target: int) -> None:
        """Note that a page was moved to another block."""
        with self.lock:
            node = self._nodes.pop((allocator, source))
            node.blocks[allocator] = target
            self._nodes[allocator, target] = node

    def _touch(self, path: Sequence[Node]) -> None:
        """Note that a path was used: a node later than what comes after it."""
        for node in reversed(path):
            is_leaf = self._leaves.pop(node.last_used, None) is not None
            node.last_used = next(self._clock)
            if is_leaf:
                self._leaves[node.last_used] = node

    def _pin(self, namespace: Hashable, tokens: Sequence[int], change: int) -> int:
        with self.lock:
            nodes, num_tokens = self._path(namespace, tokens, len(tokens))
            if any(node.pins + change < 0 for node in nodes):
                raise ValueError(f"a prefix of {num_tokens} tokens was unpinned more than pinned")
            for node in nodes:
                node.add_pins(change)
            return num_tokens

    def _evict(self, stays: Callable[[Node], bool], is_enough: Callable[[], bool]) -> None:
        """Remove leaves that may go, the least recently used first. A parent becomes a leaf then,
        and was used later than its children."""
        passed = 0
        while passed < len(self._leaves) and not is_enough():
            _, leaf = self._leaves.peekitem(passed)
            if stays(leaf):
                passed += 1
            else:
                if self.leaving is not None:
                    self.leaving(leaf)
                self._remove(leaf)


def _closest_child(node: Node, page: tuple[int, ...]) -> tuple[Node | None, int]:
    """The child that has most first tokens in common with a page, and how many."""
    exact = node.children.get(page)
    if exact is not None:
        return exact, len(page)
    after = node.children.bisect_left(page)
    neighbours = node.children.keys()[max(0, after - 1) : after + 1]
    best = max(neighbours, key=lambda tokens: common_prefix(tokens, page), default=None)
    return (None, 0) if best is None else (node.children[best], common_prefix(best, page))


def common_prefix(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many first tokens are the same."""
    for at, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return at
    return min(len(tokens), len(others))


def _is_pinned(node: Node) -> bool:
    return node.pins > 0


def _is_in_use(node: Node) -> bool:
    """Whether somebody else holds one of its blocks too, or it is pinned."""
    shared = any(allocator.ref_count(block) > 1 for allocator, block in node.blocks.items())
    return shared or _is_pinned(node)
