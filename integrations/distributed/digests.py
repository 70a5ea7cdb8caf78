"""Compares what the ranks' prefix indexes hold, by a short text that differs where they differ."""

from __future__ import annotations

from hashlib import sha256

from paged_kv.integrations.distributed.connected_ranks import RanksDiffer
from paged_kv.pool.page_pool import PagePool
from paged_kv.ranks import Ranks
from paged_kv.sizes import counted


def require_same_prefixes(ranks: Ranks, pool: PagePool) -> None:
    """Raise RanksDiffer unless all ranks cache the same prefixes.

    Ranks whose blocks differ in size evict at other times, as those of a pipeline with unequal
    parts. They are not compared: a prefix hit is the shortest of all ranks' anyway.
    """
    if ranks.size == 1:
        return
    sizes = [group.block_bytes for group in pool.groups]
    held = ranks.gather("cached prefixes", (sizes, len(pool.index), digest(pool)))
    if len({text for its_sizes, _, text in held if its_sizes == held[0][0]}) > 1:
        each = [
            f"rank {rank} {counted(count, 'block')} ({text})"
            for rank, (_, count, text) in enumerate(held)
        ]
        raise RanksDiffer(f"the ranks cache different prefixes, {', '.join(each)}: start all again")


def digest(pool: PagePool) -> str:
    """A hash of the cached blocks' tokens, and of those before each block. O(cached tokens)."""
    with pool.lock:
        paths: dict[object, bytes] = {}
        for node in pool.index.nodes():
            before = paths.get(node.parent, b"")
            paths[node] = sha256(before + repr(node.tokens).encode()).digest()
    return sha256(b"".join(sorted(paths.values()))).hexdigest()[:16]
