"""The exceptions of the pool's bookkeeping.

PagedKVError
├── PoolExhausted       the byte budget cannot hold the blocks that were asked for
├── BlockStateError     a block was used in a state that does not allow it
├── RollbackError       tokens that a trim would need were written over
└── NotPinned           a prompt was to be unpinned that nobody had pinned
"""

from __future__ import annotations


class PagedKVError(Exception):
    """The base of every exception that is this package's own."""


class PoolExhausted(PagedKVError):
    """The byte budget cannot hold the blocks that a step needs; nothing was changed.

    Attributes:
        needed: blocks that were asked for.
        free: blocks that could have been had, those of slabs still to be mapped included.
        evictable: blocks that no sequence holds and that could be evicted.
        budget: the pool's limit in bytes.
        block_bytes: bytes of one of these blocks.
        sufficient_budget: a limit in bytes under which everything that is held and this step fit;
            the smallest one where all blocks are of one size. None where that is not known: in the
            first step of a pool whose layers have different windows, and of a single allocator.
    """

    def __init__(
        self,
        needed: int,
        free: int,
        evictable: int,
        budget: int,
        block_bytes: int,
        sufficient_budget: int | None = None,
    ) -> None:
        super().__init__(needed, free, evictable, budget, block_bytes, sufficient_budget)
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.budget = budget
        self.block_bytes = block_bytes
        self.sufficient_budget = sufficient_budget

    def __str__(self) -> str:
        return (
            f"{self.shortage}: {self.remedy('max_bytes')}, drop caches that are no longer used, or "
            "ask can_admit(tokens) before starting a sequence"
        )

    @property
    def shortage(self) -> str:
        """What was needed and what there was."""
        return (
            f"{self.needed} blocks ({self.needed * self.block_bytes:,} bytes) were needed, "
            f"{self.free} ({self.free * self.block_bytes:,} bytes) are free and {self.evictable} "
            f"evictable within a budget of {self.budget:,} bytes"
        )

    def remedy(self, option: str) -> str:
        """What to do with the option that sets the budget."""
        known = self.sufficient_budget
        return f"raise {option}" if known is None else f"raise {option} to at least {known:,}"

    def with_sufficient_budget(self, nbytes: int | None) -> PoolExhausted:
        """The same, from who knows the whole pool."""
        return PoolExhausted(
            self.needed, self.free, self.evictable, self.budget, self.block_bytes, nbytes
        )


class BlockStateError(PagedKVError):
    """A block was used in a state that does not allow it, such as a second release.

    Attributes:
        block: the block's id.
        state: the state it was found in, in words.
    """

    def __init__(self, block: int, state: str) -> None:
        super().__init__(block, state)
        self.block = block
        self.state = state

    def __str__(self) -> str:
        return f"block {self.block} is {self.state}: it was released before, or is another pool's"


class RollbackError(PagedKVError, ValueError):
    """A sequence with a sliding window cannot be trimmed so far; nothing was changed.

    Attributes:
        asked: tokens that were to be trimmed.
        possible: the most that can be.
    """

    def __init__(self, asked: int, possible: int) -> None:
        super().__init__(asked, possible)
        self.asked = asked
        self.possible = possible

    def __str__(self) -> str:
        return (
            f"{self.asked} tokens were to be trimmed, and {self.possible} can be: tokens that the "
            "window would need behind those were written over. Ask can_trim(n) first, or begin "
            "again from a copy that was made before"
        )


class NotPinned(PagedKVError, ValueError):
    """A prompt was to be unpinned that is not pinned; nothing was changed.

    Attributes:
        num_tokens: how many tokens were named.
        pins: how many pins there are, of other prompts or salts.
    """

    def __init__(self, num_tokens: int, pins: int) -> None:
        super().__init__(num_tokens, pins)
        self.num_tokens = num_tokens
        self.pins = pins

    def __str__(self) -> str:
        return (
            f"this prompt of {self.num_tokens} tokens is not pinned under this salt; there are "
            f"{self.pins} pins of other prompts or salts: give unpin exactly the tokens and the "
            "salt that pin was given, and call it once for each pin"
        )
