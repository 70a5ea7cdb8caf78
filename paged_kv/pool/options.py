"""The options of a pool, which are those of a cache that concern its pages; and the budget and page
formats that they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, TypedDict

from paged_kv.allocator.prefixes.eviction import BETTER_OF_TWO, EvictionPolicy, Use
from paged_kv.allocator.requantisation import OldestFirst, RequantisationPolicy
from paged_kv.checks import described, size_in_bytes, whole_number
from paged_kv.options import Options, budget, option, path, positive

if TYPE_CHECKING:
    from paged_kv.kernels.pages.backend import Backend
    from paged_kv.kernels.pages.page_format import PageFormat

AUTO = "auto"

FormatChoice = str | tuple[str, str] | RequantisationPolicy


# Imports within functions: `--help` works where mlx cannot be loaded.
def chosen_bytes(max_bytes: float | str | None) -> int:
    """The bytes of a budget, by default `recommended_bytes()`.

    Raises:
        TypeError, ValueError: `max_bytes` is no size.
    """
    from paged_kv.kernels.pages.memory import recommended_bytes

    return recommended_bytes() if max_bytes is None else size_in_bytes("max_bytes", max_bytes)


def chosen_formats(choice: FormatChoice) -> tuple[PageFormat, RequantisationPolicy | None]:
    """The format of new pages, and the policy that requantises them, if any.

    Raises:
        TypeError: `choice` is neither the name of a format, nor two names, nor a policy.
        ValueError: no format has that name, or the policy's watermark or formats are invalid.
    """
    import mlx.core as mx

    from paged_kv.kernels.pages.page_format import FP16, LayerGeometry, page_format_named

    policy = OldestFirst() if choice == AUTO else choice
    if isinstance(policy, str | tuple | list):
        return page_format_named(policy), None
    _require_policy(policy)
    formats = [FP16, *map(page_format_named, policy.page_formats)]
    # Their order by size is the same for all layers.
    layer = LayerGeometry(1, 32, mx.float16, 1, 32, mx.float16)
    sizes = [sum(plane.words for plane in each.planes(layer)) for each in formats]
    if any(size <= smaller for size, smaller in pairwise(sizes)):
        raise ValueError(
            "page_formats of a RequantisationPolicy must each be smaller than the one before, "
            f"such as ('q8', 'q4'), got {policy.page_formats!r}"
        )
    return FP16, policy


def _require_policy(policy: RequantisationPolicy) -> None:
    members = ("watermark", "page_formats", "requantisations")
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in members):
        raise TypeError(
            "page_format must be the name of a format such as 'q8', two names for keys and values, "
            f"'auto' or a RequantisationPolicy, got {described(policy)}"
        )
    watermark, formats = policy.watermark, policy.page_formats
    if not isinstance(watermark, Real) or not 0 < watermark <= 1:
        raise ValueError(f"watermark must lie in (0, 1], got {described(watermark)}")
    is_names = isinstance(formats, tuple | list) and all(isinstance(each, str) for each in formats)
    if not formats or not is_names:
        raise ValueError(
            "page_formats of a RequantisationPolicy must be a tuple of formats such as "
            f"('q8', 'q4'), got {described(formats)}"
        )


def _checked_format(choice: FormatChoice) -> FormatChoice:
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
