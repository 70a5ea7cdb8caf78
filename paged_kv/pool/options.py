"""The options of a pool, which are those of a cache that concern its pages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from paged_kv.allocator.prefixes.eviction import BETTER_OF_TWO, EvictionPolicy, Use
from paged_kv.checks import described, whole_number
from paged_kv.commands.arguments import budget, path, positive
from paged_kv.options import Options, option
from paged_kv.sizes import size_in_bytes

if TYPE_CHECKING:
    from paged_kv.kernels.pages.backend import Backend
    from paged_kv.pool.arguments import FormatChoice

AUTO = "auto"


# Imports within functions: `--help` works where mlx cannot be loaded.
def _checked_format(choice: FormatChoice) -> FormatChoice:
    from paged_kv.pool.arguments import chosen_formats

    chosen_formats(choice)
    return choice


def _checked_read_tokens(read_tokens: int) -> int:
    from paged_kv.kernels.pages.choice import LEAST_READ_TOKENS

    return whole_number("read_tokens", read_tokens, least=LEAST_READ_TOKENS)


def _checked_budget(max_bytes: float | str) -> int | str:
    return AUTO if max_bytes == AUTO else size_in_bytes("max_bytes", max_bytes)


def _checked_policy(policy: EvictionPolicy) -> EvictionPolicy:
    ranks = callable(getattr(policy, "rank", None)) and not isinstance(policy, type)
    rank = policy.rank(Use(1, 1)) if ranks else None
    if not isinstance(rank, int | float) or rank != rank:  # NaN
        raise TypeError(
            "eviction_policy must be an object whose rank(use) returns a number, such as "
            f"LeastRecentlyUsed(), got {described(policy)}"
        )
    return policy


def _checked_backend(backend: Backend) -> Backend:
    if not hasattr(backend, "attend"):
        raise TypeError(
            f"backend must be a Backend, got {described(backend)}: leave it out for the best one, "
            "or name one with PAGED_KV_BACKEND"
        )
    return backend


@dataclass(frozen=True)
class PoolOptions(Options):
    """How a pool keeps pages.

    `page_format` may also be a pair of names, or a `RequantisationPolicy`. With "q4" a sequence's
    first page is "q8". The page that is being written, and layers with a sliding window or
    `max_kv_size`, keep 16 bits. `max_bytes` None means 80 % of what the machine recommends, less
    what is in use, as `stats()` shows; only a factory can measure "auto". docs/long-contexts.md
    says what `read_tokens` and `offload` cost. `eviction_policy` is an object with a method `rank`,
    see `EvictionPolicy`.

    Attributes:
        page_format: how full pages hold numbers: fp16, the model's own 16 bits, q8 or q4; or two of
            these for keys and values, such as q8/q4; or auto, which requantises the oldest pages to
            q8 and then q4 when memory is short.
        max_bytes: the most memory for pages, such as 4GB. A draft model gets its share of it.
            Snapshots of recurrent layers take up to a quarter of it besides, or all of it in a
            model without pages. With auto, what the machine has, less weights, a prompt step, which
            is measured, and a tenth for the system.
        read_tokens: an approximation: in layers that see the whole context, a decode step reads the
            first and the latest tokens and those that are likely to matter most, N in all, 768 or
            more; what is no longer is read whole. Prompts are computed exactly.
        offload: with a limit of tokens that are read: let the oldest pages go to a file in this
            folder when memory is short, and come back to layers for which they matter.
        wait_for_pages: let decode steps wait for such pages instead of leaving out those that are
            late.
        backend: reads and writes the pages; None means the best one for this device.
        eviction_policy: which cached prefixes to evict first from memory: by default those of
            `BetterOfTwo`.
    """

    page_format: FormatChoice = option("fp16", check=_checked_format, metavar="FORMAT")
    max_bytes: float | str | None = option(
        None,
        parse=budget,
        check=_checked_budget,
        flag="max_kv_bytes",
        usual="80% of what the machine recommends, less what is in use",
        metavar="SIZE",
    )
    read_tokens: int | None = option(
        None, parse=positive, check=_checked_read_tokens, usual="all tokens", metavar="N"
    )
    offload: str | os.PathLike[str] | None = option(
        None, parse=path, needs="read_tokens", usual="pages stay in memory", metavar="FOLDER"
    )
    wait_for_pages: bool = option(False, needs="offload")
    backend: Backend | None = option(None, parse=None, check=_checked_backend)
    eviction_policy: EvictionPolicy = option(BETTER_OF_TWO, parse=None, check=_checked_policy)


class PoolKeywords(TypedDict, total=False):
    """The same as keyword arguments."""

    page_format: FormatChoice
    max_bytes: float | str | None
    read_tokens: int | None
    offload: str | os.PathLike[str] | None
    wait_for_pages: bool
    backend: Backend | None
    eviction_policy: EvictionPolicy


POOL_OPTIONS = PoolOptions()
