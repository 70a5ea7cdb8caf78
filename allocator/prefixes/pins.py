"""Records the pinned prompts, by tokens and salt.

Later insertions may change the nodes that match a prompt. So each pin records its own nodes, and
`unpin` releases those.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paged_kv.allocator.errors import NotPinned
from paged_kv.allocator.prefixes.prefix_index import Match, PrefixIndex


class Pins:
    """The pins of one prefix index. All methods may be called from any thread.

    Args:
        index: whose prefixes are pinned.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._pinned: dict[tuple[Hashable, tuple[int, ...]], list[Match]] = {}

    def pin(self, salt: Hashable, namespace: Hashable, tokens: Sequence[int]) -> int:
        """Protect the cached prefix of a prompt in a namespace from eviction until `unpin` with the
        same salt. Returns the number of pinned tokens, possibly 0. Pins nest."""
        with self._index.lock:
            pinned = self._index.pin(namespace, tokens)
            self._pinned.setdefault((salt, tuple(tokens)), []).append(pinned)
            return pinned.num_tokens

    def unpin(self, salt: Hashable, tokens: Sequence[int]) -> int:
        """Undo the latest `pin` of exactly these tokens with the same salt. Returns the number of
        tokens that it had pinned.

        Raises:
            NotPinned: there is no such pin; nothing was changed.
        """
        with self._index.lock:
            pin = salt, tuple(tokens)
            if pin not in self._pinned:
                raise NotPinned(len(tokens), sum(map(len, self._pinned.values())))
            pinned = self._pinned[pin].pop()
            if not self._pinned[pin]:
                del self._pinned[pin]
            self._index.unpin(pinned)
            return pinned.num_tokens
