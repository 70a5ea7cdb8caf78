"""Opens the tiers that addresses name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from paged_kv.checks import file_path
from paged_kv.extras import extra_module
from paged_kv.store.blob_store import BlobStore
from paged_kv.store.folder_store import FolderStore
from paged_kv.tiers.address import Address, RedisAddress, RemoteAddress, parse_address
from paged_kv.tiers.seal import UNSEALED, Seal, read_secret
from paged_kv.tiers.store_options import StoreOptions
from paged_kv.tiers.tier import Tier
from paged_kv.tiers.tiered_store import TieredStore

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


def open_tiers(addresses: Sequence[Address], max_bytes: int, options: StoreOptions) -> TieredStore:
    """Open all tiers. A server that does not answer counts as one that holds nothing.

    Raises:
        ValueError: a package is missing, or a server lacks a secret; the message says which.
        OSError: the secret cannot be read.
        StoreError: the folder cannot be used.
    """
    seal = UNSEALED if all(isinstance(each, Path) for each in addresses) else read_seal(options)
    tiers: list[Tier] = []
    try:
        for address in addresses:
            if isinstance(address, Path):
                daily = options.most_bytes_a_day
                tiers.append(folder_tier(FolderStore(address, max_bytes, daily_bytes=daily)))
            else:
                tiers.append(Tier(open_blobs(address), seal))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return TieredStore(tiers)


def folder_tier(folder: FolderStore) -> Tier:
    """The tier of a folder, which this brings below its cap if it was higher before."""
    tier = Tier(folder, UNSEALED)
    tier.queue.do(partial(folder.shrink, folder.limits.max_bytes))
    tier.queue.flush()
    return tier


def open_blobs(address: RemoteAddress) -> BlobStore:
    """A client of a server; it connects at its first call.

    Raises:
        ValueError: the package is missing; the message names the extra.
    """
    if isinstance(address, RedisAddress):
        module = extra_module("paged_kv.tiers.redis_blobs", "redis")
        blobs: BlobStore = module.RedisBlobs(address)
    else:
        module = extra_module("paged_kv.tiers.s3_blobs", "s3")
        blobs = module.S3Blobs(address)
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
