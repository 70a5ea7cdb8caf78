"""Records which sessions use which nodes of the prefix index.

Each prompt marks the node that it ends with, and so uses this node and those before it. When the
node is evicted, its marks move to its parent, and when it is replaced, to the node in its place. So
marks show what is left of each prompt, without its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from paged_kv.allocator.errors import UnknownSession
from paged_kv.allocator.prefixes.prefix_node import Node, Owner
from paged_kv.lru import LRU

# A session takes some hundred bytes, and each of its prompts that is no prefix of another as much.
MOST_SESSIONS = 4096


class Owners:
    """The owners of one prefix index, which calls all of this under its lock.

    Args:
        most: sessions to know. Beyond that the least recently used one is forgotten: its prompts
            become those of no session.
    """

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        # The marked nodes of each session, the least recently used session first.
        self._ends: LRU[Owner, set[Node]] = LRU(most)

    def __len__(self) -> int:
        """Known sessions."""
        return len(self._ends)

    def mark(self, path: Sequence[Node], owner: Owner) -> None:
        """Record that a prompt of an owner ends with the last node of a path from a root's child.
        O(path)."""
        if owner.session is not None:
            ends = self._ends.get(owner, set())
            for gone, nodes in self._ends.put(owner, ends):
                for node in nodes:
                    self.unmark(node, gone)
                    self._put(node, Owner(gone.salt))
            # One mark is enough for all prompts of a session that are prefixes of the longest.
            for node in ends.intersection(path):
                self.unmark(node, owner)
        if path:
            self._put(path[-1], owner)

    def unmark(self, node: Node, owner: Owner) -> None:
        """Forget that a prompt of an owner ends with a node."""
        node.owners.remove(owner)
        if owner in self._ends:
            self._ends[owner].remove(node)

    def move(self, node: Node, target: Node | None) -> None:
        """Let the prompts that end with a node end with another, or with none."""
        for owner in list(node.owners):
            self.unmark(node, owner)
            if target is not None:
                self._put(target, owner)

    def release(self, owner: Owner) -> list[Node]:
        """Forget a session; returns the nodes that its prompts ended with.

        Raises:
            UnknownSession: no prompt of this owner was marked, or it was forgotten since.
        """
        if owner not in self._ends:
            raise UnknownSession(owner.session, len(self))
        nodes = list(self._ends[owner])
        for node in nodes:
            self.unmark(node, owner)
        del self._ends[owner]
        return nodes

    def _put(self, node: Node, owner: Owner) -> None:
        node.owners.add(owner)
        if owner.session is not None:
            self._ends[owner].add(node)
