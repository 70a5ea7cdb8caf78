"""Saves sequences as trees of arrays, numbers and strings, and restores them.

mlx-lm saves a prompt cache layer by layer, and restores each layer separately. So every layer
carries its sequences' uids, and layers with one uid become one sequence again. A saved layer:

    version, layer, num_layers                  numbers
    page_format                                 of the pool
    windows                                     [layer, size, write_chunk, sink tokens] of layers
                                                with a window
    geometry                                    k_heads, k_dim, k_dtype, v_heads, v_dim, v_dtype
    rows                                        per sequence: uid, context_len, written_len,
                                                page_format of full pages, formats, pages, and the
                                                identity of the model that computed them

Pages are saved whole, each in its format; their slots after the context length are undefined.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any

import mlx.core as mx

from paged_kv.checks import counted
from paged_kv.kernels.pages.page_format import (
    FP16,
    PAGE_SIZE,
    LayerGeometry,
    PageLayout,
    page_format_named,
)
from paged_kv.pool.layer_kinds import Window
from paged_kv.pool.page_pool import PagePool, open_pools
from paged_kv.steps.sequence import Sequence


def page_views(pool: PagePool, layer: int, sequence: Sequence) -> list[mx.array]:
    """Views of a sequence's pages in a layer, in table order.

    Do not keep them: a later write may show in them, or may have to copy the whole slab.
    """
    group = pool.group_of(layer)
    return [group.pages[layer].page(block) for block in _held(pool, layer, sequence)]


def page_formats(pool: PagePool, layer: int, sequence: Sequence) -> list[str]:
    """The formats of the pages of `page_views`."""
    group = pool.group_of(layer)
    return [group.content_format(block) for block in _held(pool, layer, sequence)]


def _held(pool: PagePool, layer: int, sequence: Sequence) -> tuple[int, ...]:
    """The sequence's blocks that hold tokens of a layer."""
    group, tokens = pool.group_of(layer), sequence.progress(layer).tokens
    held = _pages_held(pool, layer, tokens, sequence.layers.written(group))
    return sequence.blocks(group)[:held]


def _pages_held(pool: PagePool, layer: int, context_len: int, written_len: int) -> int:
    """Number of table entries that hold tokens of a layer: all entries of a ring that wrapped."""
    window = pool.windows.get(layer)
    if window is not None and window.first_held(written_len):
        return window.ring.size
    return -(-context_len // PAGE_SIZE)


class ModelIdentity(str):
    """The identity of the model that computed a sequence, as text; empty if it is not known.

    mlx-lm reads `state` in each step of a prompt too, to evaluate its arrays. Only saving iterates
    over texts, and only then all weights are hashed.
    """

    _sequence: Sequence

    def __new__(cls, sequence: Sequence) -> ModelIdentity:
        self = super().__new__(cls)
        self._sequence = sequence
        return self

    def __iter__(self) -> Iterator[str]:
        number = self._sequence.model_version
        return iter("" if number is None else _identity(self._sequence.pool, number))


def _identity(pool: PagePool, number: int) -> str:
    """The identity of a version of a pool's model; empty if it is not known."""
    known = None if pool.versions is None else pool.versions.identity(number)
    return " ".join(known or ())


VERSION = 5

_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Fields of a geometry.
_NUMBERS, _TYPES = ("k_heads", "k_dim", "v_heads", "v_dim"), ("k_dtype", "v_dtype")

# The latest sequence restored from each saved uid, while it is referenced elsewhere, and its
# restored layers.
_restored: weakref.WeakValueDictionary[str, Sequence] = weakref.WeakValueDictionary()
_layers: weakref.WeakKeyDictionary[Sequence, set[int]] = weakref.WeakKeyDictionary()


def saved_state(pool: PagePool, layer: int, sequences: list[Sequence]) -> dict[str, Any]:
    """One layer of the sequences as a tree. Its arrays are views of pages."""
    for sequence in sequences:
        sequence.commit()
    rows = [
        {
            "uid": sequence.uid,
            "context_len": sequence.progress(layer).tokens,
            "written_len": sequence.layers.written(pool.group_of(layer)),
            "page_format": sequence.page_format.name,
            "model": ModelIdentity(sequence),
            "formats": page_formats(pool, layer, sequence),
            "pages": page_views(pool, layer, sequence),
        }
        for sequence in sequences
    ]
    return {
        "version": VERSION,
        "layer": layer,
        "num_layers": pool.num_layers,
        "page_format": pool.page_format.name,
        "windows": [[layer, *astuple(window)] for layer, window in sorted(pool.windows.items())],
        "geometry": _geometry_state(pool.geometry(layer)),
        "rows": rows,
    }


def restore_layer(state: dict[str, Any]) -> tuple[PagePool, int, list[Sequence]]:
    """Copy the pages of a saved layer into a pool; returns the pool, layer and sequences.

    Raises:
        ValueError: another version saved the state, or its pages do not fit the layer, or are not
            as many as the tokens need.
        PoolExhausted: the pool's budget does not hold the pages.
    """
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise ValueError(
            f"the saved cache has format version {version!r}, and this paged_kv reads {VERSION}: "
            "compute the prompt again and save it with this version"
        )
    layer, rows = int(state["layer"]), state["rows"]
    geometry = _geometry_from(state["geometry"])
    pool = _pool_for(state, rows[0], layer, geometry)
    sequences = [_sequence_for(pool, row["uid"], layer) for row in rows]
    for sequence, row in zip(sequences, rows, strict=True):
        sequence.page_format = page_format_named(row["page_format"])
        sequence.model_version = _version_of(pool, row.get("model", ""))
        if geometry is not None:
            _load_pages(pool, layer, sequence, geometry, row)
    return pool, layer, sequences


def _load_pages(
    pool: PagePool, layer: int, sequence: Sequence, geometry: LayerGeometry, row: dict[str, Any]
) -> None:
    """Fill an empty layer of a sequence with saved pages. If the pool requantised the group's
    blocks since its first layer was filled, these pages are requantised too."""
    # Empty lists do not survive the file.
    formats, contents = list(row.get("formats") or []), list(row.get("pages") or [])
    context_len, written_len = int(row["context_len"]), int(row["written_len"])
    group = pool.group_of(layer)
    with pool.lock:
        pages = group.open_layer(layer, geometry)
        layouts = [PageLayout(page_format_named(name), geometry) for name in formats]
        shapes = [(layout.page_units, layout.unit_words) for layout in layouts]
        needed = _pages_held(pool, layer, context_len, written_len)
        found = [tuple(content.shape) for content in contents]
        if len(formats) != needed or found != shapes:
            raise ValueError(
                f"layer {layer} needs {counted(needed, 'page')} for "
                f"{counted(context_len, 'token')}, of shapes {shapes} in words, got {found}"
            )
        table = sequence.table(group)
        pool.append_blocks(group, table, formats[len(table.blocks) :])
        pages.load(
            {
                block: layout.recoded(content, pages.layout_of(block))
                for block, layout, content in zip(table.blocks, layouts, contents, strict=False)
            }
        )
        sequence.restore(layer, context_len, written_len)
        table.rewind(context_len)
    # Pages may be left that have neither 16 bits nor the format of full pages.
    full = sequence.page_format
    is_first_done = {FP16.name, full.first.name}.issuperset(formats[:1])
    is_done = is_first_done and {FP16.name, full.name}.issuperset(formats[1:])
    sequence.is_converting |= not is_done


def _pool_for(
    state: dict[str, Any], row: dict[str, Any], layer: int, geometry: LayerGeometry | None
) -> PagePool:
    sequence = _restored.get(row["uid"])
    if sequence is not None and layer not in _layers[sequence]:
        return sequence.pool
    num_layers, page_format = int(state["num_layers"]), state["page_format"]
    # An empty list does not survive the file.
    numbers = [[int(number) for number in entry] for entry in state.get("windows") or []]
    windows = {layer: Window(*fields) for layer, *fields in numbers}

    def fit(pool: PagePool) -> tuple[bool, bool, bool, int]:
        is_same_model = _version_of(pool, row.get("model", "")) is not None
        is_known = is_same_model or pool.geometry(layer) is not None
        return is_same_model, is_known, pool.page_format.name == page_format, pool.serial

    def is_alike(other: LayerGeometry | None) -> bool:
        """Whether the pages can be those of a layer; pages may be summarised or not."""
        if geometry is None or other is None:
            return True
        return replace(geometry, has_summaries=other.has_summaries) == other

    fitting = [
        pool
        for pool in open_pools.items()
        if (pool.num_layers, pool.windows) == (num_layers, windows)
        and is_alike(pool.geometry(layer))
    ]
    return max(fitting, key=fit, default=None) or PagePool(
        num_layers, windows=windows, page_format=page_format, name="loaded prompt cache"
    )


def _version_of(pool: PagePool, identity: str) -> int | None:
    """The version of a pool's model that has an identity: the present one or none."""
    if not identity or pool.versions is None:
        return None
    number = pool.versions.number
    return number if _identity(pool, number) == identity else None


def _sequence_for(pool: PagePool, uid: str, layer: int) -> Sequence:
    """The sequence with the other restored layers of this uid. A new one if there is none, or if
    this layer is already restored: then that sequence belongs to an earlier load of the file."""
    sequence = _restored.get(uid)
    if sequence is None or sequence.pool is not pool or layer in _layers[sequence]:
        sequence = Sequence(pool)
        _restored[uid], _layers[sequence] = sequence, set()
    _layers[sequence].add(layer)
    return sequence


def _geometry_state(geometry: LayerGeometry | None) -> dict[str, Any] | None:
    if geometry is None:
        return None
    fields = {name: getattr(geometry, name) for name in (*_NUMBERS, *_TYPES, "has_summaries")}
    return fields | {name: _NAMES[fields[name]] for name in _TYPES}


def _geometry_from(state: dict[str, Any] | None) -> LayerGeometry | None:
    if state is None:
        return None
    fields: dict[str, Any] = {name: int(state[name]) for name in _NUMBERS}
    fields |= {name: _DTYPES[state[name]] for name in _TYPES}
    return LayerGeometry(**fields, has_summaries=bool(state["has_summaries"]))
