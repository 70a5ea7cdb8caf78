"""The content of all pools of a process at one moment, as it is shown, sent and saved.

As JSON:

    {"paged_kv": 1, "pid": 71, "command": "...", "time": 1760000000.0, "pools": [
      {"name": "llama", "number": 0, "stats": {...},
       "slabs": [[group, slab, "fp16", "u3.c12"], ...],
       "sequences": [["3f2a9c01", tokens, blocks, shared, bytes], ...]}],
      "ranks": [[0, budget, mapped, active], ...]}

"stats" is what `PoolStats.as_dict` gives; the states of blocks are written as `packed` says.
Sequences are the largest ones. "ranks", in bytes, is there where several processes share the model.
There is nothing of what tokens say, and nothing made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from paged_kv.allocator.block_allocator import SlabMap, packed, unpacked
from paged_kv.pool.stats import PoolStats
from paged_kv.ranks import RankMemory

VERSION = 1


class SequenceView(NamedTuple):
    """A sequence of a pool.

    Attributes:
        name: the beginning of its uid.
        tokens: its context length.
        blocks: entries of its block tables, in all groups.
        shared: those of them that other sequences hold too.
        nbytes: bytes of the pages of all of them.
    """

    name: str
    tokens: int
    blocks: int
    shared: int
    nbytes: int


@dataclass(frozen=True)
class PoolView:
    """One pool.

    Attributes:
        number: unique within the process.
        slabs: the group and the block map of each slab.
        sequences: the largest sequences, the largest first.
    """

    name: str
    number: int
    stats: PoolStats
    slabs: tuple[tuple[int, SlabMap], ...] = ()
    sequences: tuple[SequenceView, ...] = ()


@dataclass(frozen=True)
class ProcessView:
    """All pools of one process.

    Attributes:
        time: seconds since 1970.
        pools: in the order of their creation.
        ranks: the memory of each process that computes the model with this one; empty if none does.
    """

    pid: int
    command: str
    time: float
    pools: tuple[PoolView, ...]
    ranks: tuple[tuple[int, RankMemory], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON form that the module describes."""
        shared = {"ranks": [[rank, *memory] for rank, memory in self.ranks]} if self.ranks else {}
        return {
            "paged_kv": VERSION,
            "pid": self.pid,
            "command": self.command,
            "time": self.time,
            "pools": [_pool_as_dict(pool) for pool in self.pools],
            **shared,
        }

    @classmethod
    def from_dict(cls, content: Any) -> ProcessView:
        """The view from its JSON form.

        Raises:
            ValueError: it is none, or of another version.
        """
        version = content.get("paged_kv") if isinstance(content, dict) else None
        if version != VERSION:
            raise ValueError(
                f"this is no snapshot of this paged_kv: it has version {version!r}, and {VERSION} "
                "is read. `paged-kv stats --json` of the version that is installed makes one"
            )
        try:
            pools = tuple([_pool_from_dict(each) for each in content["pools"]])
            ranks = tuple([(rank, RankMemory(*each)) for rank, *each in content.get("ranks", [])])
            return cls(
                int(content["pid"]), content["command"], float(content["time"]), pools, ranks
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this snapshot is broken: {error!r}") from None


def _pool_as_dict(pool: PoolView) -> dict[str, Any]:
    return {
        "name": pool.name,
        "number": pool.number,
        "stats": pool.stats.as_dict(),
        "slabs": [
            [group, each.slab, each.page_format, packed(each.states)] for group, each in pool.slabs
        ],
        "sequences": [list(each) for each in pool.sequences],
    }


def _pool_from_dict(content: Any) -> PoolView:
    return PoolView(
        content["name"],
        content["number"],
        PoolStats.from_dict(content["stats"]),
        tuple([(g, SlabMap(slab, name, unpacked(m))) for g, slab, name, m in content["slabs"]]),
        tuple([SequenceView(*each) for each in content["sequences"]]),
    )
