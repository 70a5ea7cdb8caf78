"""Finds out over which ranks a model is sharded, and what its cache is on each of them; compares
the prefixes that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.checks import counted
from paged_kv.integrations.distributed.connected_ranks import RanksDiffer, joined_ranks
from paged_kv.pool.options import chosen_bytes
from paged_kv.pool.page_pool import PagePool
from paged_kv.ranks import ALONE, Ranks

Tier = TypeVar("Tier")


def ranks_of(model: Module) -> Ranks:
    """The ranks that compute a model together; `ALONE` for a model that is whole in this process,
    also if mlx.launch has started several.

    Raises:
        ValueError: some of the processes share the model, and not all of them.
        NotConnected: the ranks cannot reach each other.
    """
    sizes = set(_sizes(model))
    if not sizes:
        return ALONE
    # Not earlier: it may start MPI, in programs that have nothing to do with it.
    everyone = mx.distributed.init().size()
    if sizes != {everyone}:
        raise ValueError(
            f"the model is sharded over {max(sizes)} of {everyone} processes: paged caches need "
            "one that all processes share, so start only these, or shard it over all"
        )
    return joined_ranks()


def agreed_budget(max_bytes: float | str | None, ranks: Ranks) -> int:
    """The smallest budget of all ranks', in bytes: with more, a rank would keep what others evict.

    Raises:
        TypeError, ValueError: `max_bytes` is no size.
    """
    return ranks.all_min("max_bytes", chosen_bytes(max_bytes))


def folder_of_rank(store: Tier, ranks: Ranks) -> Tier | Path:
    """The folder for this rank's pages, which hold its shard of each key and value. Servers tell
    ranks apart by the weights in their keys."""
    if not isinstance(store, Path):
        return store
    return store if ranks.size == 1 else store / f"rank-{ranks.rank}-of-{ranks.size}"


def require_same_prefixes(ranks: Ranks, pool: PagePool) -> None:
    """Raise RanksDiffer unless all ranks cache the same prefixes.

    Ranks whose blocks differ in size evict at other times, as those of a pipeline with unequal
    parts. They are not compared: a prefix hit is the shortest of all ranks' anyway.
    """
    if ranks.size == 1:
        return
    sizes = [group.size.block_bytes for group in pool.groups]
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


def _sizes(model: Module) -> Iterator[int]:
    """The sizes, above 1, of the groups over which parts of a model are sharded."""
    for module in model.modules():  # type: ignore[no-untyped-call]
        sizes = [each.size() for each in vars(module).values() if _is_group(each)]
        yield from [size for size in [*sizes, getattr(module, "pipeline_size", 1)] if size > 1]


def _is_group(value: object) -> bool:
    return isinstance(value, mx.distributed.Group)
