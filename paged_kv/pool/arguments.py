"""Checks arguments of `PagePool`, and says which budget and formats they mean."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from numbers import Real

import mlx.core as mx

from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.requantisation import OldestFirst, RequantisationPolicy
from paged_kv.checks import described
from paged_kv.kernels.pages.memory import recommended_bytes
from paged_kv.kernels.pages.page_format import (
    FP16,
    FormatName,
    LayerGeometry,
    PageFormat,
    page_format_named,
)
from paged_kv.pool.window import Window
from paged_kv.sizes import counted, size_in_bytes


def chosen_budget(max_bytes: float | str | None, beside: ByteBudget | None) -> ByteBudget:
    """A budget of `max_bytes`, the budget `beside`, or by default `recommended_bytes()`.

    Raises:
        TypeError, ValueError: `max_bytes` is no size, or both are given.
    """
    if beside is None:
        own = None if max_bytes is None else size_in_bytes("max_bytes", max_bytes)
        return ByteBudget(recommended_bytes() if own is None else own)
    if max_bytes is not None:
        raise ValueError("a pool `beside` another shares its max_bytes: give one of the two")
    return beside


def checked_windows(windows: Mapping[int, Window] | None, num_layers: int) -> dict[int, Window]:
    """The windows by layer.

    Raises:
        TypeError: `windows` is no mapping of layers to windows.
        ValueError: the pool has no such layer.
    """
    if not isinstance(windows, Mapping | None):
        raise TypeError(f"windows must map layers to Windows, got {described(windows)}")
    for layer, window in (windows or {}).items():
        if not isinstance(window, Window):
            raise TypeError(f"windows must map layers to Windows, got {described(window)}")
        if layer not in range(num_layers):
            known = f"a pool of {counted(num_layers, 'layer')}, which count from 0"
            raise ValueError(f"windows must be of the layers of {known}, got {described(layer)}")
    return dict(windows or {})


FormatChoice = FormatName | RequantisationPolicy

# The order of formats by size is the same for all layers.
_ANY_LAYER = LayerGeometry(1, 32, mx.float16, 1, 32, mx.float16)


def chosen_formats(choice: FormatChoice) -> tuple[PageFormat, RequantisationPolicy | None]:
    """The format of new pages, and the policy that requantises them, if any.

    Raises:
        TypeError: `choice` is neither the name of a format, nor two names, nor a policy.
        ValueError: no format has that name, or the policy's watermark or formats are invalid.
    """
    policy = OldestFirst() if choice == "auto" else choice
    if isinstance(policy, str | tuple | list):
        return page_format_named(policy), None
    _require_policy(policy)
    formats = [FP16, *map(page_format_named, policy.page_formats)]
    sizes = [sum(plane.words for plane in each.planes(_ANY_LAYER)) for each in formats]
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
