"""The priorities of a batch's sequences, and the order that follows from them."""

from __future__ import annotations

from collections.abc import Iterable


class Priorities:
    """The lowest priority comes first, and of several sequences the one that arrived first.

    Attributes:
        by_uid: those that are not 0.
    """

    def __init__(self) -> None:
        self.by_uid: dict[int, int] = {}

    def of(self, uid: int) -> int:
        """The priority of a sequence."""
        return self.by_uid.get(uid, 0)

    def order(self, uid: int) -> tuple[int, int]:
        """What sequences are sorted by."""
        return self.of(uid), uid

    def behind(self, priority: int, uids: Iterable[int]) -> list[int]:
        """Those of these sequences whose priority is worse, the last one last."""
        return sorted((uid for uid in uids if self.of(uid) > priority), key=self.order)
