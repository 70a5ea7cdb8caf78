"""Finds the cached blocks of prompts by their token ids.

A tree of blocks for each namespace: the path from the root to a node spells the tokens of a prefix,
a block's worth a node, and only a leaf may have fewer. Tokens are compared, never hashes alone: a
node's children are found by a dictionary of their tokens, which compares what it hashes, and the
child that goes along with a prompt for longest is a neighbour in the order of tokens.

    match     O(n + log c) for n tokens and c children of one node
    insert    the same
    evict     O(b log n) for b blocks, and the leaves that are in use before them

The index holds one reference to each of its blocks, and gives it back with the last node that has
the block: a cache that was inserted into several namespaces has nodes in each. A block that nobody
else holds is cached: it can be evicted, and is found again until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from weakref import WeakMethod

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.prefixes.eviction import (
    BETTER_OF_TWO,
    BetterOfTwo,
    Duel,
    EvictionOrder,
    EvictionPolicy,
    Use,
)
from paged_kv.allocator.prefixes.prefix_node import Blocks, Match, Node, Owner, Windows
from paged_kv.allocator.prefixes.retention import Holds, Owners


class PrefixIndex:
    """Blocks by the tokens that they and all blocks before them hold.

    A namespace is anything hashable that names what else the contents depend on. Token ids are
    any integers. All methods may be called from any thread that uses the blocks' allocators under
    the same lock.
    """

    def __init__(
        self,
        page_size: int = 256,
        lock: threading.RLock | None = None,
        policy: EvictionPolicy = BETTER_OF_TWO,
    ) -> None:
        self.page_size = page_size
        self.lock = lock or threading.RLock()
        self.holds = Holds(self.lock)
        # Whether a prompt can resume within a node; one that is left without any behind it and
        # cannot goes first. Held weakly: whoever says so holds the index.
        self.can_resume: WeakMethod[Callable[[Node], bool]] | None = None
        self._roots: dict[Hashable, Node] = {}
        # The nodes that have a block: several where it was inserted into several namespaces, or
        # as the end of one prompt and in the middle of another.
        self._nodes: dict[tuple[BlockAllocator, int], set[Node]] = {}
        self._duel = Duel(policy) if isinstance(policy, BetterOfTwo) else None
        self._leaves: EvictionOrder[Node] = EvictionOrder(
            policy if self._duel is None else self._duel.policy
        )
        self.owners = Owners()
        self._size = 0

    def __len__(self) -> int:
        """Cached blocks' worth of tokens."""
        return self._size

    @property
    def num_prompts(self) -> int:
        """Cached prompts that are not a prefix of another."""
        return len(self._leaves)

    def nodes(self) -> list[Node]:
        """All nodes, parents before their children. O(nodes)."""
        with self.lock:
            found = list(self._roots.values())
            for node in found:
                found.extend(node.children.values())
            return found[len(self._roots) :]

    def match(self, namespace: Hashable, tokens: Sequence[int]) -> Match:
        """The longest prefix of a prompt that was inserted, without the prompt's last token, which
        the model must compute again."""
        with self.lock:
            found = self.peek(namespace, tokens)
            self._record_use(found.nodes, self._leaves.history.again)
            if self._duel is not None:
                self._duel.use(node.path_hash for node in reversed(found.nodes))
            return found

    def peek(self, namespace: Hashable, tokens: Sequence[int]) -> Match:
        """As `match`, but nothing counts as used: the prompt is not computed yet."""
        return self._match(namespace, tokens, len(tokens) - 1)

    def known(self, namespace: Hashable, tokens: Sequence[int]) -> Match:
        """As `peek`, the prompt's last token included."""
        return self._match(namespace, tokens, len(tokens))

    def insert(
        self,
        namespace: Hashable,
        tokens: Sequence[int],
        blocks: Sequence[Blocks],
        windows: Sequence[Windows] = (),
    ) -> tuple[Node, ...]:
        """Take a reference to the blocks that hold a prompt's tokens, a page's worth each, where
        no others are known that do; and to what groups with a window hold of each page, as far as
        `windows` goes. Returns the nodes that hold them now."""
        with self.lock:
            node, path = self._roots.get(namespace), []
            if node is None:
                node = Node((), {}, None, path_hash=hash(namespace), namespace=namespace)
                if tokens:
                    self._roots[namespace] = node
            for start, theirs in zip(range(0, len(tokens), self.page_size), blocks, strict=True):
                page = tuple(tokens[start : start + self.page_size])
                closest, common = _closest_child(node, page)
                if closest is None or common < len(page):
                    node = self._add(node, page, theirs, closest, common)
                else:
                    node = closest
                path.append(node)
            self._record_use(path, self._leaves.history.stored)
            if self._duel is not None:
                self._duel.store([node.path_hash for node in reversed(path)], len(self))
                if self._duel.policy is not self._leaves.policy:
                    self._leaves.rank_by(self._duel.policy)
            for node, held in zip(path, windows, strict=False):
                for allocator, parts in held.items():
                    for slots in parts:
                        node.hold(allocator, slots)
            return tuple(path)

    def end_session(self, owner: Owner) -> int:
        """Remove what only prompts of a session use: the last nodes of each, up to one that is
        pinned, that another owner's prompt ends with, or that has other children. Returns how many
        blocks' worth that was. Other holders keep their blocks. O(nodes of its prompts).

        Raises:
            UnknownSession: no prompt has this owner; nothing was changed.
        """
        with self.lock:
            before = len(self)
            for end in self.owners.release(owner):
                node: Node | None = end
                while node is not None and self._is_unused(node):
                    self._drop(node)
                    node = node.parent
            return before - len(self)

    def forget_prompt(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """Remove what only this prompt and its prefixes use, if they are of no session: its last
        nodes, up to one that is pinned, that a session's prompt ends with, or that has other
        children. Returns how many blocks' worth that was, 0 if a longer prompt goes through all of
        it. Other holders keep their blocks. O(tokens)."""
        with self.lock:
            found, before = self.known(namespace, tokens), len(self)
            is_whole = sum(len(node.tokens) for node in found.nodes) == found.num_tokens
            for node in reversed(found.nodes) if is_whole else ():
                for owner in list(node.owners):
                    if owner.session is None:
                        self.owners.unmark(node, owner)
                if not self._is_unused(node):
                    break
                self._drop(node)
            return before - len(self)

    def pin(self, salt: Hashable, namespace: Hashable, tokens: Sequence[int]) -> int:
        """Protect the cached prefix of a prompt in a namespace from eviction, its last token
        included, until `Holds.unpin` with the same salt. Returns the number of pinned tokens,
        possibly 0."""
        with self.lock:
            found = self.known(namespace, tokens)
            self.holds.pin(salt, tokens, found)
            return found.num_tokens

    def forget(self, is_enough: Callable[[], bool] = lambda: False) -> int:
        """Evict everything that is not pinned, in the order of the policy, until it is enough;
        returns how many blocks' worth that was. Other holders keep their blocks."""
        with self.lock:
            before = len(self)
            self._evict(lambda node: node.is_pinned, is_enough)
            return before - len(self)

    def prune(self, is_needed: Callable[[Node], object]) -> None:
        """Remove the ends of prompts that are neither needed nor pinned. O(leaves)."""
        with self.lock:
            for node in list(self._leaves):
                while node.parent is not None and not (
                    node.children or node.pins or is_needed(node)
                ):
                    self._drop(node)
                    node = node.parent

    def evict(self, is_enough: Callable[[], bool]) -> int:
        """Evict blocks that nobody else holds, in the order of the policy, until it is enough, and
        if it never is, end one hold after the other; returns how many blocks' worth that was."""
        with self.lock:
            before = len(self)
            if not self._evict(self._is_in_use, is_enough):
                any(self._evict(self._is_in_use, is_enough) for _ in self.holds.ending())
            return before - len(self)

    def evictable(self, allocator: BlockAllocator) -> list[int]:
        """Blocks of a group that nobody else holds and that are not pinned. O(blocks)."""
        with self.lock:
            return [
                block
                for (owner, block), nodes in self._nodes.items()
                if owner is allocator
                and owner.ref_count(block) == 1
                and not any(node.is_pinned for node in nodes)
            ]

    def bytes_worth_less(self, spared: Collection[Node]) -> int:
        """Bytes of the blocks that the policy would evict before those of a prompt that is stored
        now: nobody else holds them, and they are of none of the `spared` nodes. O(nodes)."""
        with self.lock:
            nodes = [each for each in self.nodes() if not self._is_in_use(each)]
            going = self._leaves.goes_first(node.use for node in nodes)
            blocks = {
                block
                for node, goes in zip(nodes, going, strict=True)
                if goes and node not in spared
                for block in node.blocks.items()
            }
        return sum(allocator.format_of(block).block_bytes for allocator, block in blocks)

    def _match(self, namespace: Hashable, tokens: Sequence[int], most: int) -> Match:
        """The nodes that hold the first tokens of a prompt, at most so many."""
        path: list[Node] = []
        with self.lock:
            node, matched = self._roots.get(namespace), 0
            while node is not None and matched < most:
                page = tuple(tokens[matched : min(most, matched + self.page_size)])
                node, common = _closest_child(node, page)
                if node is not None and common:
                    path.append(node)
                    matched += common
                if common < self.page_size:
                    break
        return Match(tuple(path), matched)

    def _add(
        self,
        parent: Node,
        page: tuple[int, ...],
        blocks: Blocks,
        closest: Node | None,
        common: int,
    ) -> Node:
        """A new child. The `closest` one, which has so many first tokens in `common` with it, goes
        if it has no others."""
        node = Node(page, dict(blocks), parent, path_hash=hash((parent.path_hash, page)))
        if closest is not None:
            node.inherit(closest, common)
        for allocator, block in node.blocks.items():
            if (allocator, block) not in self._nodes:
                allocator.refs.keep(block, partial(self._on_move, allocator))
            self._nodes.setdefault((allocator, block), set()).add(node)
        if parent.parent is not None and not parent.children:
            self._leaves.discard(parent)
        parent.children[page] = node
        if closest is not None and common == len(closest.tokens):
            self.holds.follow(closest, node)
            if not closest.pins:  # a pinned one stays
                self.owners.move(closest, node)
                self._drop(closest)
        position = parent.use.position + len(page)
        node.use = self._leaves.history.first(node.path_hash, position)
        self._leaves.put(node, node.use)
        self._size += 1
        if self._duel is not None:
            # Its prompt has not found it, but one of the policies might have kept it.
            self._duel.use([node.path_hash])
        return node

    def _drop(self, leaf: Node) -> None:
        """Remove a leaf that no policy has chosen."""
        if self._duel is not None:
            self._duel.discard(leaf.path_hash)
        self._remove(leaf)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        del parent.children[leaf.tokens]
        self._leaves.discard(leaf)
        self._size -= 1
        if not parent.children and parent.parent is None:
            del self._roots[parent.namespace]
        elif not parent.children:
            can_resume = self.can_resume() if self.can_resume else None
            saving = 1.0 if can_resume is None else float(can_resume(parent))
            self._leaves.put(parent, parent.use._replace(saving=saving))
        self.owners.move(leaf, None if parent.parent is None else parent)
        leaf.release_windows()
        for allocator, block in leaf.blocks.items():
            nodes = self._nodes[allocator, block]
            nodes.remove(leaf)
            if not nodes:
                del self._nodes[allocator, block]
                allocator.evict(block)

    def _on_move(self, allocator: BlockAllocator, source: int, target: int) -> None:
        with self.lock:
            nodes = self._nodes.pop((allocator, source))
            for node in nodes:
                node.blocks[allocator] = target
            self._nodes[allocator, target] = nodes

    def _record_use(self, path: Sequence[Node], used: Callable[[Use], Use]) -> None:
        """Record that a path was used: each node later than its children."""
        for node in reversed(path):
            node.use = used(node.use)
            if not node.children:
                self._leaves.put(node, node.use)

    def _is_unused(self, node: Node) -> bool:
        """Whether a node is a leaf that neither a pin nor a prompt of an owner needs; false for one
        that was removed."""
        return node in self._leaves and not node.pins and not node.owners

    def _is_in_use(self, node: Node) -> bool:
        """Whether somebody else holds one of a node's blocks, or a node that has it is pinned."""
        return node.is_pinned or any(
            allocator.ref_count(block) > 1
            or any(other.is_pinned for other in self._nodes[allocator, block])
            for allocator, block in node.blocks.items()
        )

    def _evict(self, stays: Callable[[Node], bool], is_enough: Callable[[], bool]) -> bool:
        """Evict leaves that may go, in the order of the policy. A parent becomes a leaf with its
        last child. Returns whether it is enough."""
        passed = 0
        while not is_enough():
            if passed == len(self._leaves):
                return False
            leaf = self._leaves[passed]
            if stays(leaf):
                passed += 1
                continue
            self._leaves.history.forget(leaf.path_hash, leaf.use, len(self))
            self._remove(leaf)
            if (parent := leaf.parent) is not None and parent in self._leaves:
                # It may rank before leaves that stay.
                passed = min(passed, self._leaves.index(parent))
        return True


def _closest_child(node: Node, page: tuple[int, ...]) -> tuple[Node | None, int]:
    """The child that has most first tokens in common with a page, and how many."""
    exact = node.children.get(page)
    if exact is not None:
        return exact, len(page)
    after = node.children.bisect_left(page)
    neighbours = node.children.keys()[max(0, after - 1) : after + 1]
    best = max(neighbours, key=lambda tokens: common_prefix(tokens, page), default=None)
    return (None, 0) if best is None else (node.children[best], common_prefix(best, page))


# Sequences of one type are compared so many tokens at a time, without Python.
_COMPARED_TOKENS = 1024


def common_prefix(tokens: Sequence[object], others: Sequence[object]) -> int:
    """How many first tokens, or characters, are the same."""
    for start in range(0, min(len(tokens), len(others)), _COMPARED_TOKENS):
        part = tokens[start : start + _COMPARED_TOKENS]
        other = others[start : start + _COMPARED_TOKENS]
        if part == other:
            continue
        for at, (one, another) in enumerate(zip(part, other, strict=False), start):
            if one != another:
                return at
    return min(len(tokens), len(others))
