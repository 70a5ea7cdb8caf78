"""A short text of what a pool's prefix index holds. It differs where ranks have come apart."""

from __future__ import annotations

from hashlib import sha256

from paged_kv.pool.page_pool import PagePool


def digest(pool: PagePool) -> str:
    """A hash of the cached blocks' tokens, and of those before each block. O(cached tokens)."""
    with pool.lock:
        nodes = pool.index.nodes()
        paths: dict[object, bytes] = {}
        for node in nodes:
            before = paths.get(node.parent, b"")
            paths[node] = sha256(before + repr(node.tokens).encode()).digest()
    return sha256(b"".join(sorted(paths.values()))).hexdigest()[:16]
