"""Pages as bytes, for whoever keeps them elsewhere, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.page_format import PAGE_SIZE, PageLayout, page_format_named
from paged_kv.page_transfer import load_pages, page_formats, page_views
from paged_kv.sequence import Sequence as TokenSequence

if TYPE_CHECKING:
    from paged_kv.layer_group import LayerGroup
    from paged_kv.page_pool import PagePool

Words = npt.NDArray[np.uint16]


def block_bytes(group: LayerGroup, block: int, num_tokens: int) -> dict[str, Words]:
    """A block's page of every layer, uint16 [page_units, unit_words]; rows behind the first
    `num_tokens` are zeros, and not what was there before."""
    views = {layer: pages.page(block) for layer, pages in group.pages.items()}
    mx.eval(list(views.values()))
    contents = {}
    for layer, view in views.items():
        content = np.array(view)
        _clear_rows(content, group.pages[layer].layout_of(block), num_tokens)
        contents[f"layer.{layer}"] = content
    return contents


def load_blocks(
    pool: PagePool,
    group: LayerGroup,
    sequence: TokenSequence,
    formats: Sequence[str],
    contents: Sequence[Mapping[str, Words]],
) -> None:
    """Append blocks to a sequence, with pages as `block_bytes` gave them.

    Raises:
        ValueError: they are not what the layers hold.
        PoolExhausted: the budget does not hold them.
    """
    for name, content in zip(formats, contents, strict=True):
        _require_pages(group, name, content)
    table = sequence.table(group)
    first = len(table.blocks)
    pool.append_blocks(group, table, list(formats))
    for layer, pages in group.pages.items():
        arrays = [mx.array(content[f"layer.{layer}"]) for content in contents]
        pages.load(dict(zip(table.blocks[first:], arrays, strict=True)))


def ring_bytes(rings: TokenSequence) -> tuple[dict[str, Words], dict[str, Any]]:
    """The pages of every layer with a window, uint16 [words], one page behind the other; and what
    JSON can say of them."""
    pool = rings.pool
    contents, layers = {}, {}
    for layer, window in sorted(pool.windows.items()):
        if layer not in pool.group_of(layer).pages:
            continue
        context_len, written_len = rings.context_lens[layer], rings.written_lens[layer]
        formats = page_formats(pool, layer, rings)
        pages = [np.array(view) for view in page_views(pool, layer, rings)]
        if pages and not window.first_held(written_len):
            layout = _layout(pool, layer, formats[-1])
            _clear_rows(pages[-1], layout, written_len - (len(pages) - 1) * PAGE_SIZE)
        flat = [page.reshape(-1) for page in pages]
        contents[f"ring.{layer}"] = np.concatenate([*flat, np.zeros(0, np.uint16)])
        layers[str(layer)] = [context_len, written_len, formats]
    return contents, {"page_format": rings.page_format.name, "layers": layers}


def load_rings(
    pool: PagePool, num_tokens: int, contents: Mapping[str, Words], notes: Mapping[str, Any]
) -> TokenSequence:
    """A sequence that holds rings as `ring_bytes` gave them, behind so many tokens.

    Raises:
        ValueError: they are not what the layers hold.
        PoolExhausted: the budget does not hold them.
    """
    rings = TokenSequence(pool, page_format_named(notes["page_format"]))
    for name, (context_len, written_len, formats) in notes["layers"].items():
        layer = int(name)
        layouts = [_layout(pool, layer, each) for each in formats]
        ends = np.cumsum([layout.page_words for layout in layouts])
        pages = [
            mx.array(part.reshape(layout.page_units, layout.unit_words))
            for part, layout in zip(
                np.split(contents[f"ring.{layer}"], ends)[:-1], layouts, strict=True
            )
        ]
        geometry = pool.group_of(layer).pages[layer].geometry
        load_pages(pool, layer, rings, geometry, context_len, written_len, formats, pages)
    rings.begin_at(num_tokens)
    return rings


def _clear_rows(content: Words, layout: PageLayout, num_tokens: int) -> None:
    """Zero the rows of a page behind the first so many."""
    flat = content.reshape(-1)
    for plane, offset in zip(layout.planes, layout.offsets, strict=True):
        rows = flat[offset : offset + plane.words]
        rows.reshape(plane.heads, PAGE_SIZE, plane.row_words)[:, num_tokens:] = 0


def _require_pages(group: LayerGroup, page_format: str, content: Mapping[str, Words]) -> None:
    known = page_format_named(page_format)
    layouts = {
        f"layer.{layer}": PageLayout(known, pages.geometry) for layer, pages in group.pages.items()
    }
    shapes = {name: (layout.page_units, layout.unit_words) for name, layout in layouts.items()}
    found = {name: array.shape for name, array in content.items()}
    if found != shapes:
        raise ValueError(f"pages of shapes {shapes} are needed, got {found}")


def _layout(pool: PagePool, layer: int, page_format: str) -> PageLayout:
    geometry = pool.group_of(layer).pages[layer].geometry
    return PageLayout(page_format_named(page_format), geometry)
