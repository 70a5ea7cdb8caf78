"""What a store knows of a model: the identity of its pages, and its states beside them.

The identity is everything that determines the content of pages, the same in every process. It
hashes all weights, as a name or a date does not tell models apart, and all settings: see
`model_version`.

States are packed into bytes. A file names the class of each cache. Only the classes in this
module's list are made from it, mlx-vlm's `ArraysCache`, and those that `SeparateCaches` of this
process have held; no name of a file is looked up elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from paged_kv.integrations.fixed_steps import described_device
from paged_kv.integrations.heads.model_head import heads
from paged_kv.integrations.mlx_lm_internals import cache_with, content_of
from paged_kv.integrations.model_version import ModelVersion, identity_of
from paged_kv.integrations.states.counted_states import CountedArraysCache
from paged_kv.integrations.states.one_by_one import SeparateCaches
from paged_kv.kernels.pages.number_format import Quantised
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageFormat, page_format_named
from paged_kv.pool.page_pool import PagePool
from paged_kv.store.keys import Identity, Salt, salt_bytes

_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(ArraysCache, ChunkedKVCache, CountedArraysCache, KVCache, RotatingKVCache),
        SeparateCaches,
    )
}
# mlx-vlm's class of the same name, in a process that has loaded it.
_VLM_MODULE, _VLM_ARRAYS = "mlx_vlm.models.cache", "mlx_vlm.ArraysCache"
_DTYPES = {
    str(dtype).rpartition(".")[2]: dtype
    for dtype in (
        *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64),
        *(mx.int8, mx.int16, mx.int32, mx.int64),
        *(mx.float16, mx.bfloat16, mx.float32, mx.float64, mx.complex64),
    )
}

Bytes = npt.NDArray[np.uint8]


def can_pack(states: list[Any]) -> bool:
    """Whether all of these states can be packed."""
    return all(_name_of(each) is not None for each in states)


def pack(states: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Notes for JSON, and the states' arrays as uint8, by name."""
    arrays: dict[str, Bytes] = {}
    notes = []
    for each in states:
        name = _name_of(each)
        content = each.state if name == _VLM_ARRAYS else content_of(each)
        notes.append([name, _packed(content, arrays)])
    return notes, arrays


def unpack(notes: Any, arrays: Mapping[str, Any]) -> list[Any]:
    """The states that `pack` was given.

    Raises:
        ValueError, KeyError or TypeError: the notes or arrays are not those of `pack`.
    """
    states = []
    for name, tree in notes:
        content = _unpacked(tree, arrays)
        if name == _VLM_ARRAYS:
            states.append(sys.modules[_VLM_MODULE].ArraysCache(len(content)))
            states[-1].state = content
        else:
            states.append(cache_with(_CLASSES[name], content))
    return states


def _name_of(state: Any) -> str | None:
    """The name of a state's class in files; None of a class that is not known."""
    module, name = type(state).__module__, type(state).__name__
    if _CLASSES.get(name) is type(state):
        return name
    is_vlms = (module, name) == (_VLM_MODULE, "ArraysCache")
    return _VLM_ARRAYS if is_vlms else None


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


def page_identity(
    versions: ModelVersion, pool: PagePool, name: str, library: str
) -> Callable[[Hashable], Identity | None]:
    """What returns the identity under which a namespace's pages are stored. That is None for pages
    not of the pool's first format, or of a version of the model that nobody knows any more: no
    later lookup asks for these. It raises ValueError for a salt of a type that cannot be stored.

    Args:
        versions: of the model that computes the pages, numbered as in namespaces.
        pool: the pages' pool, which knows all layers.
        name: of the model, for people.
        library: the package that the model is of.
    """
    # Hash the weights here, so that the first prompt does not wait for it.
    versions.identity(versions.number)
    policy = pool.requantisation_policy
    formats = [pool.page_format, *map(page_format_named, policy.page_formats if policy else ())]
    packages = dict.fromkeys(("mlx", "mlx-lm", library))
    of_pool = Identity(
        model=name,
        weights="",
        settings="",
        versions=", ".join(f"{each} {version(each)}" for each in packages),
        geometry="; ".join(_geometry(pool)),
        page_format=" > ".join(
            [_of_full_pages(pool.page_format), *(each.name for each in formats[1:])]
        ),
        rotation=_rotation(formats),
        page_size=PAGE_SIZE,
    )

    def identify(namespace: Hashable) -> Identity | None:
        model_version, page_format, salt = cast("tuple[int, str, Salt]", namespace)
        salt_bytes(salt)
        identity = versions.identity(model_version)
        if identity is None or page_format != pool.page_format.name:
            return None
        weights, settings = identity
        return replace(of_pool, weights=weights, settings=settings, salt=salt)

    return identify


def _geometry(pool: PagePool) -> list[str]:
    """What the layers hold, and how their steps compute it."""
    found = [
        f"{layer}: {pool.geometry(layer)} {pool.windows.get(layer)}"
        for layer in range(pool.num_layers)
    ]
    # Steps that read less compute other keys and values for the layers above.
    if pool.read_tokens is not None:
        found.append(f"reads {pool.read_tokens}")
    if pool.offloading is not None:
        found.append("of what is in memory")
    if pool.is_reproducible:
        # On other machines the same steps round in other ways.
        found.append(f"in fixed steps with {described_device(pool)}")
    if (head := heads.get(pool)) is not None:
        found.append(f"head {' '.join(identity_of(head.head))}")
    return found


def _of_full_pages(page_format: PageFormat) -> str:
    """The formats of a sequence's first page and of the others, if they differ."""
    return " + ".join(dict.fromkeys((page_format.first.name, page_format.name)))


def _rotation(formats: list[PageFormat]) -> str:
    parts = [part for each in formats for part in (each.keys, each.values)]
    rotation = "hadamard" if any(isinstance(part, Quantised) for part in parts) else "none"
    is_small = any(part.name == "q4" for part in parts)
    return f"{rotation}, keys of 5 bits and values of 4" if is_small else rotation
