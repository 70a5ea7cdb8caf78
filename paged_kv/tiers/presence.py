"""What a tier has said to hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paged_kv.store.keys import Place


@dataclass
class Presence:
    """The entries that a tier holds. It is a `BlockLookup`.

    Attributes:
        sizes: bytes of each, by key.
        after: token counts and keys of those whose block follows one, by its digest.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    after: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, place: Place, nbytes: int) -> None:
        """Note that an entry is there."""
        self.sizes[place.key] = nbytes
        self.after.setdefault(place.link.parent, []).append((len(place.link.tokens), place.key))

    def children(self, parent: str) -> list[tuple[int, str]]:
        return self.after.get(parent, [])

    def closest(self, parent: str, tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
        return ()
