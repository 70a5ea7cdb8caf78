"""Copies pages out of the pool as bytes and loads them back, for the tier below memory."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageLayout, page_format_named
from paged_kv.pool.layer_group import LayerGroup
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.sequence import Sequence

Words = npt.NDArray[np.uint16]


def block_bytes(group: LayerGroup, block: int, unused: slice) -> dict[str, Words]:
    """A block's page of every layer, uint16 [page_units, unit_words]. Unused slots are zeros, not
    their earlier content."""
    views = {layer: pages.page(block) for layer, pages in group.pages.items()}
    mx.eval(list(views.values()))
    contents = {}
    for layer, view in views.items():
        content = np.array(view)
        _clear_slots(content, group.pages[layer].layout_of(block), unused)
        contents[f"layer.{layer}"] = content
    return contents


def load_blocks(
    pool: PagePool,
    group: LayerGroup,
    sequence: Sequence,
    formats: abc.Sequence[str],
    contents: abc.Sequence[Mapping[str, Words]],
) -> None:
    """Append blocks to a sequence, with pages that `block_bytes` returned.

    Raises:
        ValueError: the pages do not have the layers' shapes.
        PoolExhausted: the budget does not hold the blocks.
    """
    for name, content in zip(formats, contents, strict=True):
        _require_pages(group, name, content)
    table = sequence.table(group)
    first = len(table.blocks)
    pool.append_blocks(group, table, list(formats))
    for layer, pages in group.pages.items():
        arrays = [mx.array(content[f"layer.{layer}"]) for content in contents]
        pages.load(dict(zip(table.blocks[first:], arrays, strict=True)))


def _clear_slots(content: Words, layout: PageLayout, unused: slice) -> None:
    flat = content.reshape(-1)
    for plane, offset in zip(layout.planes, layout.offsets, strict=True):
        slots = flat[offset : offset + plane.words]
        slots.reshape(plane.heads, PAGE_SIZE, plane.slot_words)[:, unused] = 0


def _require_pages(group: LayerGroup, page_format: str, content: Mapping[str, Words]) -> None:
    known = page_format_named(page_format)
    layouts = {
        f"layer.{layer}": PageLayout(known, pages.geometry) for layer, pages in group.pages.items()
    }
    shapes = {name: (layout.page_units, layout.unit_words) for name, layout in layouts.items()}
    found = {name: array.shape for name, array in content.items()}
    if found != shapes:
        raise ValueError(f"pages of shapes {shapes} are needed, got {found}")
