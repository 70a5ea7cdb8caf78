"""Defines the exceptions of the allocator.

PagedKVError
├── PoolExhausted       the byte budget cannot hold the requested blocks
├── OutOfMemory         MLX cannot allocate what a step needs
├── BlockStateError     the state of a block forbids the call
├── RollbackError       later writes overwrote tokens that a trim would need
├── NotPinned           `unpin` names a prompt that is not pinned
├── UnknownSession      `end_session` names a session that no prompt had
└── NotReproducible     something asked for has results that depend on other requests
"""

from __future__ import annotations

from dataclasses import dataclass


class PagedKVError(Exception):
    """The base class of this package's exceptions."""


@dataclass(eq=False, repr=False)
class PoolExhausted(PagedKVError):
    """The byte budget cannot hold the blocks that a step needs; nothing was changed.

    Attributes:
        needed: requested blocks.
        free: available blocks, including those of slabs that could still be mapped.
        evictable: cached blocks that could be evicted.
        budget: the pool's limit in bytes.
        block_bytes: bytes of one of these blocks.
        sufficient_budget: a limit in bytes that fits all held blocks and this step, and the rest of
            prompts that `fetch_cache` was called for; the smallest such limit if all blocks have
            one size. None if unknown: in the first step of a pool whose layers have different
            windows, and for a single allocator.
        sufficient_tokens: how many tokens of the step's longest sequence it holds; None if unknown.
    """

    needed: int
    free: int
    evictable: int
    budget: int
    block_bytes: int
    sufficient_budget: int | None = None
    sufficient_tokens: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.shortage}: {self.remedy('max_bytes')}, drop caches that are no longer used, or "
            "ask can_admit(tokens) before starting a sequence"
        )

    @property
    def shortage(self) -> str:
        """States the needed, free and evictable blocks and the budget, and the cause, if any."""
        cause = "" if self.__cause__ is None else f" ({self.__cause__})"
        return (
            f"blocks needed: {self.needed:,} ({self.needed * self.block_bytes:,} bytes), "
            f"free: {self.free:,} ({self.free * self.block_bytes:,} bytes), "
            f"evictable: {self.evictable:,}, within a budget of {self.budget:,} bytes{cause}"
        )

    def remedy(self, option: str) -> str:
        """Advises how to set `option`, the name of the budget's option."""
        known, tokens = self.sufficient_budget, self.sufficient_tokens
        held = "" if tokens is None else f", which holds {tokens:,} tokens of the sequence"
        return f"raise {option}" if known is None else f"raise {option} to at least {known:,}{held}"


@dataclass(eq=False, repr=False)
class OutOfMemory(PagedKVError, MemoryError):
    """MLX cannot allocate what a step of one token of one sequence needs, also after everything
    that was cached is evicted.

    Attributes:
        why: what MLX's error says.
        uid: the sequence's number in its BatchGenerator, which has removed it; None elsewhere.
    """

    why: str
    uid: int | None = None

    def __str__(self) -> str:
        whose = (
            "" if self.uid is None else f" of sequence {self.uid}, which is removed: others go on"
        )
        return (
            f"MLX has no memory for the next token{whose} ({self.why}): give the pool a smaller "
            "max_bytes, run fewer or shorter sequences at once, or quantise pages"
        )


@dataclass(eq=False, repr=False)
class BlockStateError(PagedKVError):
    """The state of a block forbids the call, such as a second release.

    Attributes:
        block: the block's id.
        state: the block's state, in words.
    """

    block: int
    state: str

    def __str__(self) -> str:
        return f"block {self.block} is {self.state}: it was released before, or is another pool's"


@dataclass(eq=False, repr=False)
class RollbackError(PagedKVError, ValueError):
    """A sequence with a sliding window cannot be trimmed so far; nothing was changed.

    Attributes:
        asked: tokens that the caller asked to trim.
        possible: the most tokens that can be trimmed.
    """

    asked: int
    possible: int

    def __str__(self) -> str:
        return (
            f"cannot trim so far (tokens asked: {self.asked}, possible: {self.possible}): later "
            "writes overwrote earlier tokens that the window would need. Call can_trim(n) first, "
            "or start again from a copy that you made earlier"
        )


@dataclass(eq=False, repr=False)
class NotPinned(PagedKVError, ValueError):
    """`unpin` names a prompt that is not pinned; nothing was changed.

    Attributes:
        num_tokens: number of tokens in the prompt.
        pins: number of pins, all of other prompts or salts.
    """

    num_tokens: int
    pins: int

    def __str__(self) -> str:
        return (
            f"this prompt (tokens: {self.num_tokens:,}) is not pinned under this salt (pins of "
            f"other prompts or salts: {self.pins:,}): call unpin once for each pin, with exactly "
            "the same tokens and salt"
        )


@dataclass(eq=False, repr=False)
class UnknownSession(PagedKVError, LookupError):
    """`end_session` names a session that is not known; nothing was changed.

    Attributes:
        session: its name.
        sessions: number of known sessions, of all salts.
    """

    session: object
    sessions: int

    def __str__(self) -> str:
        return (
            f"there is no session {self.session!r} under this salt (sessions of all salts: "
            f"{self.sessions:,}): no prompt was inserted with it, or it was ended or forgotten "
            "since. Call end_session once, with the session and salt of insert_cache"
        )


class NotReproducible(PagedKVError, ValueError):
    """What a reproducible factory or server was asked for has results that depend on other
    requests, on this device or at all; the message says why."""
