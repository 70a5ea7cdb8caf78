"""Packs the states of caches that are not paged into bytes, and unpacks them.

A file names the class of each cache. Only the mlx-lm classes in this module's list are made from
it; no name is looked up elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from paged_kv.integrations.states.counted_states import CountedArraysCache
from paged_kv.integrations.states.separate_sequences import SeparateSequences

_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (ArraysCache, ChunkedKVCache, CountedArraysCache, KVCache, RotatingKVCache)
}
# Caches that mlx-lm cannot batch, and the files that define them. They cannot be made from a state,
# so all their attributes are packed.
_SEPARATE = {"LayerCache": "mlx_lm.models.deepseek_v41"}
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
        notes = [[name, _packed(content, arrays)] for name, content in map(_named, states)]
        return notes, arrays

    def unpack(self, notes: Any, arrays: Mapping[str, Any]) -> list[Any]:
        return [_made(name, _unpacked(tree, arrays)) for name, tree in notes]

    def knows(self, states: list[Any]) -> bool:
        """Whether all of these can be packed."""
        return all(
            type(cache.sequences[0]).__module__ in _SEPARATE.values()
            if isinstance(cache, SeparateSequences)
            else _CLASSES.get(type(cache).__name__) is type(cache)
            for cache in states
        )


def _named(cache: Any) -> tuple[str, Any]:
    """A class's name, and what an object of it is made from."""
    if isinstance(cache, SeparateSequences):
        (only,) = cache.sequences
        return type(only).__name__, [list(each) for each in vars(only).items()]
    return type(cache).__name__, cache.state


def _made(name: str, content: Any) -> Any:
    if name not in _SEPARATE:
        return _CLASSES[name].from_state(content)
    kind = getattr(import_module(_SEPARATE[name]), name)
    only = kind.__new__(kind)
    vars(only).update(content)
    return SeparateSequences([only], [None])


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
