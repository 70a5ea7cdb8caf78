"""The interface of a tier below memory, such as a store on disk, to the prefix cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from paged_kv.allocator.prefixes.prefix_node import Node


class LowerTier(Protocol):
    """Keeps the index's prefixes outside memory and loads them back. No method raises because of a
    disk."""

    def bring_up(self, namespace: Hashable, tokens: Sequence[int]) -> None:
        """Load a prompt's kept blocks into the index if they lengthen its prefix hit. Loading may
        evict other prefixes."""
        ...

    def keep(self, namespace: Hashable, nodes: Sequence[Node]) -> None:
        """Note that the index holds these nodes: a path from a root's child down."""
        ...

    def leaving(self, node: Node) -> None:
        """Note that the index is about to evict a node."""
        ...
