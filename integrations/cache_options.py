"""The options of a factory's caches: those of its pools, of its store, and of its model's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paged_kv.checks import size_in_bytes, whole_number
from paged_kv.options import option, part
from paged_kv.pool.options import AUTO, PoolKeywords, PoolOptions
from paged_kv.store.options import (
    DEFAULT_STORE_BYTES,
    WRITE_EVERYTHING,
    StoreOptions,
    default_folder,
    store_size,
    tier,
)

if TYPE_CHECKING:
    from paged_kv.store.options import TierPlace


@dataclass(frozen=True)
class CacheOptions(PoolOptions):
    """How a factory makes caches: its keyword arguments, as one object.

    The others are those of `PoolOptions`. `store` is a place or a list of them, quickest first.
    A factory raises `StoreError` where its folder cannot be used.

    Attributes:
        store: persist prompts' pages and reuse them: in a folder, or on a server that machines
            share, as redis://HOST, rediss://HOST or s3://BUCKET (extras redis and s3). Give it
            several times for several tiers, quickest first. Without a place it is
            ~/.cache/paged-kv/pages, or in $XDG_CACHE_HOME.
        store_bytes: the most that the folder of --store may take on disk.
        store_options: which prefixes are written, and how much in a day.
        write_chunk: in layers with a sliding window, the longest step that is written before it is
            read. One token less can always be rolled back. None means 256, or the window if that is
            smaller.
        always_gather: give every layer keys and values that can be computed. Only a model that uses
            them later in other ways than in the factory's trial needs this; without it, such a use
            raises `PagesNotRead`, or MLX's RuntimeError for an array without a primitive.
        compile: let steps of one token per sequence be recorded once by `mx.compile` and repeated
            without Python, for models whose steps depend on no number: with the same tokens. None
            means what PAGED_KV_COMPILE says, 0 or 1, or else, on Metal and CUDA, if the first steps
            show that it is right and faster.
        reproducible: let the same tokens, sampling options and seed give the same tokens and
            log-probabilities, to the bit, on this machine with these versions: alone or in any
            company, and from any cache. docs/reproducible.md says what that costs.
    """

    store: TierPlace | Sequence[TierPlace] | None = option(
        None, parse=tier, nargs="?", action="append", const=default_folder, metavar="PLACE"
    )
    store_bytes: float | str = option(
        DEFAULT_STORE_BYTES,
        parse=store_size,
        check=partial(size_in_bytes, "store_bytes"),
        needs="store",
        metavar="SIZE",
    )
    store_options: StoreOptions = part(WRITE_EVERYTHING, prefix="store_")
    write_chunk: int | None = option(
        None, parse=None, check=partial(whole_number, "write_chunk", least=1)
    )
    always_gather: bool = option(False, parse=None)
    compile: bool | None = option(None, parse=None)
    reproducible: bool = option(False)

    @property
    def has_servers(self) -> bool:
        """Whether some tiers of `store` that a command line names are servers."""
        places = self.store if isinstance(self.store, list) else [self.store]
        return any(isinstance(place, str) for place in places)

    def require_usable(self) -> None:
        """Check what `store` names, before models are loaded.

        Raises:
            ValueError: servers lack a secret.
            OSError: the secret cannot be read, or the folder is a file.
        """
        places = self.store if isinstance(self.store, list) else []
        for place in places:
            if isinstance(place, Path) and place.is_file():
                raise NotADirectoryError(f"{place} is a file: name a folder for the pages")
        if self.has_servers:
            from paged_kv.store.tiered_store import read_seal

            read_seal(self.store_options)


class CacheKeywords(PoolKeywords, total=False):
    """The same as keyword arguments."""

    store: TierPlace | Sequence[TierPlace] | None
    store_bytes: float | str
    store_options: StoreOptions
    write_chunk: int | None
    always_gather: bool
    compile: bool | None
    reproducible: bool


CACHE_OPTIONS = CacheOptions()
FOR_EVERY_MODEL = CacheOptions(max_bytes=AUTO)
"""Those of `use_pages`: what it is to divide, it measures."""
