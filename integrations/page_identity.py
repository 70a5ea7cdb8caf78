"""Computes the identity of a model's pages: everything that determines their content. It is the
same in every process.

The identity hashes all weights, as a name or a date does not tell models apart, and all settings:
see `model_version`.
"""

from __future__ import annotations

from collections.abc import Hashable
from importlib.metadata import version
from typing import cast

from paged_kv.integrations.fixed_steps import described_device
from paged_kv.integrations.heads.model_head import heads
from paged_kv.integrations.model_version import ModelVersion, identity_of
from paged_kv.kernels.pages.number_format import Quantised
from paged_kv.kernels.pages.page_format import PAGE_SIZE, PageFormat, page_format_named
from paged_kv.pool.page_pool import PagePool
from paged_kv.store.keys import Identity, Salt, salt_bytes


class PageIdentity:
    """Returns the identity under which a namespace's pages are stored.

    Args:
        versions: of the model that computes the pages, numbered as in namespaces.
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
        versions.identity(versions.number)
        head = heads.get(pool)
        self._head = [] if head is None else [f"head {' '.join(identity_of(head.head))}"]

    def __call__(self, namespace: Hashable) -> Identity | None:
        """The identity; None for pages not of the pool's first format, or of a version of the
        model that nobody knows any more: no later lookup asks for these.

        Raises:
            ValueError: the salt is of a type that cannot be stored.
        """
        model_version, page_format, salt = cast("tuple[int, str, Salt]", namespace)
        salt_bytes(salt)
        pool = self._pool
        identity = self._versions.identity(model_version)
        if identity is None or page_format != pool.page_format.name:
            return None
        weights, settings = identity
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


def _geometry(pool: PagePool) -> list[str]:
    layers = [
        f"{layer}: {pool.geometry(layer)} {pool.windows.get(layer)}"
        for layer in range(pool.num_layers)
    ]
    # Steps that read less compute other keys and values for the layers above.
    reads = [] if pool.read_tokens is None else [f"reads {pool.read_tokens}"]
    if pool.offloading is not None:
        reads.append("of what is in memory")
    if pool.is_reproducible:
        # On other machines the same steps round in other ways.
        reads.append(f"in fixed steps with {described_device(pool)}")
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
