"""Packs the states of caches that are not paged into bytes, and unpacks them.

A file names the class of each cache. Only the classes in this module's list are made from it, and
those that `SeparateCaches` of this process have held; no name is looked up elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from paged_kv.integrations.mlx_lm_internals import cache_with, content_of
from paged_kv.integrations.states.counted_states import CountedArraysCache
from paged_kv.integrations.states.one_by_one import SeparateCaches

_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(ArraysCache, ChunkedKVCache, CountedArraysCache, KVCache, RotatingKVCache),
        SeparateCaches,
    )
}
_DTYPES = {
    str(dtype).rpartition(".")[2]: dtype
    for dtype in (
        *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64),
        *(mx.int8, mx.int16, mx.int32, mx.int64),
        *(mx.float16, mx.bfloat16, mx.float32, mx.float64, mx.complex64),
    )
}

Bytes = npt.NDArray[np.uint8]


class StoredStates:
    """See `StateCodec` for the operations."""

    def pack(self, states: list[Any]) -> tuple[Any, dict[str, Any]]:
        arrays: dict[str, Bytes] = {}
        notes = [[type(each).__name__, _packed(content_of(each), arrays)] for each in states]
        return notes, arrays

    def unpack(self, notes: Any, arrays: Mapping[str, Any]) -> list[Any]:
        return [cache_with(_CLASSES[name], _unpacked(tree, arrays)) for name, tree in notes]

    def knows(self, states: list[Any]) -> bool:
        """Whether all of these can be packed."""
        return all(_CLASSES.get(type(each).__name__) is type(each) for each in states)


def _packed(value: Any, arrays: dict[str, Bytes]) -> Any:
    """A value as a tree for JSON; its arrays go into `arrays`."""
    match value:
        case mx.array():
            name = f"state.{len(arrays)}"
            flat = mx.contiguous(value).reshape(-1).view(mx.uint8)
            arrays[name] = np.array(flat)
            return {"array": [name, str(value.dtype).rpartition(".")[2], list(value.shape)]}
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [_packed(each, arrays) for each in value]}
        case None | bool() | int() | float() | str():
            return {"value": value}
    raise TypeError(f"a state holds a {type(value).__name__}, which cannot be stored")


def _unpacked(tree: dict[str, Any], arrays: Mapping[str, Any]) -> Any:
    ((kind, content),) = tree.items()
    match kind:
        case "array":
            name, dtype, shape = content
            return mx.array(arrays[name]).view(_DTYPES[dtype]).reshape(shape)
        case "list":
            return [_unpacked(each, arrays) for each in content]
        case "tuple":
            return tuple(_unpacked(each, arrays) for each in content)
    return content
