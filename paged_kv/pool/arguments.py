"""Checks the arguments of `PagePool`, and fills in their defaults."""

from __future__ import annotations

from collections.abc import Mapping

from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.prefixes.eviction import EvictionPolicy, Use
from paged_kv.checks import described
from paged_kv.kernels.pages.memory import recommended_bytes
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


def checked_eviction_policy(policy: EvictionPolicy) -> EvictionPolicy:
    """A policy that ranks a use with a number.

    Raises:
        TypeError: it does not.
    """
    rank = getattr(policy, "rank", None)
    if isinstance(policy, type) or not callable(rank) or not _is_number(rank(Use(1, 1))):
        raise TypeError(
            "eviction_policy must be an object whose rank(use) returns a number, such as "
            f"LeastRecentlyUsed(), got {described(policy)}"
        )
    return policy


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value == value
