"""What the prefix cache tells whoever keeps prefixes below memory. It knows nothing of files."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from paged_kv.allocator.prefixes.prefix_node import Node


class LowerTier(Protocol):
    """Keeps what the index knows, and gives it back. Nothing here raises because of a disk."""

    def bring_up(self, namespace: Hashable, tokens: Sequence[int]) -> None:
        """Bring what is kept of a prompt into the index, if one can begin with more of it then.
        Others may be evicted for it."""
        ...

    def keep(self, namespace: Hashable, nodes: Sequence[Node]) -> None:
        """Note that these nodes, one behind the other from a root, are known."""
        ...

    def leaving(self, node: Node) -> None:
        """Note that the index is about to forget a node."""
        ...
