"""Opens the tiers that addresses name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paged_kv.allocator.prefixes.eviction import LEAST_WORTH, EvictionPolicy
from paged_kv.checks import file_path
from paged_kv.extras import extra_module
from paged_kv.store.background import BackgroundStore
from paged_kv.store.page_store import PageStore
from paged_kv.tiers.address import Address, RedisAddress, RemoteAddress, parse_address
from paged_kv.tiers.blobs import Blobs
from paged_kv.tiers.remote_tier import PATIENCE_S, RemoteTier
from paged_kv.tiers.seal import Seal, read_secret
from paged_kv.tiers.store_options import StoreOptions
from paged_kv.tiers.tiered_store import Tier, TieredStore

# An entry of a large model may take some seconds from a bucket. Whoever waits gives up earlier.
_LONGEST_S = 10.0

TierPlace = str | os.PathLike[str]
"""A folder, or the address of a server."""


def store_addresses(store: TierPlace | Sequence[TierPlace]) -> list[Address]:
    """The tiers that the argument `store` names, quickest first.

    Raises:
        TypeError: it is neither a path nor a list or tuple of paths.
        ValueError: it names no tier, several folders, or something that is no address.
        OSError: the file of a password cannot be read.
    """
    places = list(store) if isinstance(store, list | tuple) else [store]
    if not places:
        raise ValueError("store must name a folder or a server, got an empty list")
    found = [parse_address(_path(each)) for each in places]
    addresses = [each.expanduser() if isinstance(each, Path) else each for each in found]
    if sum(isinstance(each, Path) for each in addresses) > 1:
        raise ValueError("store names several folders: one is enough, and servers may follow it")
    return addresses


def open_tiers(
    addresses: Sequence[Address],
    max_bytes: int,
    options: StoreOptions,
    policy: EvictionPolicy = LEAST_WORTH,
) -> TieredStore:
    """Open all tiers. A server that does not answer counts as one that holds nothing.

    Raises:
        ValueError: a package is missing, or a server lacks a secret; the message says which.
        OSError: the secret cannot be read.
        StoreError: the folder cannot be used.
    """
    seal = read_seal(options) if any(not isinstance(each, Path) for each in addresses) else None
    tiers: list[Tier] = []
    try:
        for address in addresses:
            if isinstance(address, Path):
                daily = options.most_bytes_a_day
                pages = PageStore(address, max_bytes, policy=policy, daily_bytes=daily)
                tiers.append(BackgroundStore(pages))
            else:
                assert seal is not None
                blobs = open_blobs(address)
                tiers.append(RemoteTier(address.label, str(address), blobs, seal))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return TieredStore(tiers)


def open_blobs(address: RemoteAddress) -> Blobs:
    """A client of a server; it connects at its first call.

    Raises:
        ValueError: the package is missing; the message names the extra.
    """
    if isinstance(address, RedisAddress):
        module = extra_module("paged_kv.tiers.redis_blobs", "redis")
        blobs: Blobs = module.RedisBlobs(address, PATIENCE_S)
    else:
        module = extra_module("paged_kv.tiers.s3_blobs", "s3")
        blobs = module.S3Blobs(address, PATIENCE_S, _LONGEST_S)
    return blobs


def read_seal(options: StoreOptions) -> Seal:
    """What makes and verifies entries on servers.

    Raises:
        ValueError: there is no secret, or it is too short.
        OSError: its file cannot be read.
    """
    if options.secret is not None:
        return Seal(read_secret(Path(options.secret).expanduser()))
    if not options.unauthenticated:
        raise ValueError(
            "a store on a server needs a secret, or whoever can write there could change answers: "
            "give --store-secret FILE (StoreOptions(secret=...)), the same on all machines; or "
            "--store-unauthenticated (unauthenticated=True) if everybody there is trusted"
        )
    return Seal(b"")


def _path(place: object) -> TierPlace:
    return place if isinstance(place, str) and "://" in place else file_path("store", place)
