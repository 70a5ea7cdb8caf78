"""Sequences that share pages which GPU kernels read on this CPU."""

from collections.abc import Sequence
from typing import Any

from paged_kv.kernels.pages.page_format import PAGE_SIZE, FormatName
from tests.support.gpu_on_cpu.emulated import Device
from tests.support.gpu_pages import STRIDE, Batch, backend_on, same, sharing

Table = tuple[int, ...]

# Of the slabs, in turn.
FORMATS: list[Sequence[FormatName]] = [
    ["fp16"],
    ["q8"],
    ["q4"],
    ["fp16", ("q8", "q4"), "q8", "q4"],
]


def tables_behind(pages: int, own: Sequence[int], slabs: int = 1) -> list[Table]:
    """Tables of sequences that share so many pages, and then have so many of their own. With
    several slabs, they follow each other in turn."""
    numbers = iter([slab * STRIDE + page for page in range(STRIDE) for slab in range(slabs)])
    shared = tuple(next(numbers) for _ in range(pages))
    return [(*shared, *(next(numbers) for _ in range(count))) for count in own]


def lengths_of(tables: Sequence[Table], tails: Sequence[int]) -> list[int]:
    """Lengths of sequences whose last page has so many tokens."""
    return [(len(table) - 1) * PAGE_SIZE + tail for table, tail in zip(tables, tails, strict=True)]


def names(device: Device) -> list[str]:
    found = [launch.name for launch in device.launches]
    return ["groups" if "in_groups" in name else name.split("_")[2] for name in found]


def batch_of(
    device: Device,
    dialect: str,
    tables: Sequence[Table],
    tails: Sequence[int],
    formats: Sequence[FormatName] = ("fp16",),
    geometry: Any = None,
    **options: Any,
) -> Batch:
    backend = backend_on(device, dialect)
    lengths = lengths_of(tables, tails)
    return sharing(backend, geometry or same(64), formats, tables, lengths, **options)
