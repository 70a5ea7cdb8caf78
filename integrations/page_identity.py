"""Computes the identity of a model's pages: everything that determines their content. It is the
same in every process.

The identity hashes all weights, as a name or a date does not tell models apart. It also hashes the
settings: every number and text in the model's modules, such as rope bases, scales and sizes. Both
include those of adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from hashlib import sha256
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from xxhash import xxh3_128

from paged_kv.integrations.heads.model_head import head_of
from paged_kv.integrations.model_trial import NOTED_POSITIONS
from paged_kv.integrations.model_version import ModelVersion
from paged_kv.kernels.pages.number_format import Quantised
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageFormat, page_format_named
from paged_kv.pool.page_pool import PagePool
from paged_kv.store.keys import Identity, Salt, salt_bytes

# Attributes of modules that change no result.
_ASIDE = frozenset({"_no_grad", *NOTED_POSITIONS})


class PageIdentity:
    """Returns the identity under which a namespace's pages are stored.

    Args:
        versions: of the model that computes the pages, counted as in namespaces.
        pool: the pages' pool, which knows all layers.
        name: of the model, for people.
    """

    def __init__(self, versions: ModelVersion, pool: PagePool, name: str) -> None:
        self._versions = versions
        self._pool = pool
        self._name = name
        # Every prompt asks for an identity, and this reads files.
        self._packages = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
        # Hash the weights here, so that the first prompt does not wait for it.
        self._of = {versions.count: fingerprints(versions.model)}
        head = head_of(pool)
        self._head = [] if head is None else [f"head {' '.join(fingerprints(head.head))}"]

    def __call__(self, namespace: Hashable) -> Identity | None:
        """The identity; None for pages of earlier weights, or not of the pool's first format: no
        later lookup asks for these.

        Raises:
            ValueError: the salt is of a type that cannot be stored.
        """
        model_version, page_format, salt = cast("tuple[int, str, Salt]", namespace)
        salt_bytes(salt)
        pool = self._pool
        if (model_version, page_format) != (self._versions.count, pool.page_format.name):
            return None
        weights, settings = self._fingerprints(model_version)
        return Identity(
            model=self._name,
            weights=weights,
            settings=settings,
            versions=self._packages,
            geometry="; ".join([*_geometry(pool), *self._head]),
            page_format=" > ".join([_of_full_pages(pool.page_format), *_smaller(pool)]),
            rotation=_rotation(pool),
            page_size=PAGE_SIZE,
            salt=salt,
        )

    def _fingerprints(self, model_version: int) -> tuple[str, str]:
        if model_version not in self._of:
            self._of = {model_version: fingerprints(self._versions.model)}
        return self._of[model_version]


def fingerprints(model: Module) -> tuple[str, str]:
    """Hashes of a model's arrays, and of its other content. O(bytes)."""
    weights, settings = sha256(), sha256()
    for path, leaf in _leaves(model, "", set()):
        if isinstance(leaf, mx.array):
            about = f"{path}\0{leaf.dtype}\0{leaf.shape}\0{_content(leaf)}\0"
            weights.update(about.encode())
        else:
            settings.update(f"{path}\0{leaf}\0".encode())
    return weights.hexdigest(), settings.hexdigest()


def _leaves(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Arrays, and the text of all other values, each with its path."""
    match value:
        case mx.array() | None | bool() | int() | float() | str():
            yield path, value if isinstance(value, mx.array) else repr(value)
            return
    yield path, f"{type(value).__module__}.{type(value).__qualname__}"
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, child in _children(value):
        yield from _leaves(child, f"{path}.{name}", seen)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Module):
        own = [*value.items(), *vars(value).items()]
        return sorted([each for each in own if each[0] not in _ASIDE], key=lambda named: named[0])
    if isinstance(value, dict):
        return sorted(((str(name), each) for name, each in value.items()), key=lambda it: it[0])
    if isinstance(value, list | tuple):
        return [(str(at), each) for at, each in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _content(array: mx.array) -> str:
    """A hash of an array's bytes."""
    whole = mx.contiguous(array if array.ndim else array.reshape(1)).view(mx.uint8)
    mx.eval(whole)
    # MLX's arrays have the buffer protocol, but their types do not declare it.
    content: Any = whole
    return xxh3_128(memoryview(content)).hexdigest() if whole.size else ""


def _geometry(pool: PagePool) -> list[str]:
    layers = [
        f"{layer}: {pool.geometry(layer)} {pool.windows.get(layer)}"
        for layer in range(pool.num_layers)
    ]
    # Steps that read less compute other keys and values for the layers above.
    reads = [] if pool.read_tokens is None else [f"reads {pool.read_tokens}"]
    if pool.offloading is not None:
        reads.append("of what is in memory")
    return layers + reads


def _of_full_pages(page_format: PageFormat) -> str:
    """The formats of a sequence's first page and of the others, if they differ."""
    names = dict.fromkeys((page_format.first.name, page_format.name))
    return " + ".join(names)


def _smaller(pool: PagePool) -> tuple[str, ...]:
    policy = pool.requantisation_policy
    return tuple(policy.page_formats) if policy else ()


def _rotation(pool: PagePool) -> str:
    formats = [pool.page_format, *map(page_format_named, _smaller(pool))]
    parts = [part for each in formats for part in (each.keys, each.values)]
    rotation = "hadamard" if any(isinstance(part, Quantised) for part in parts) else "none"
    return f"{rotation}, centred" if any(part.is_centred for part in parts) else rotation
