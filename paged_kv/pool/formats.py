"""Parses the argument `page_format`: the name of a format, two names, "auto", or a policy."""

from __future__ import annotations

from itertools import pairwise
from numbers import Real

import mlx.core as mx

from paged_kv.allocator.requantisation import OldestFirst, RequantisationPolicy
from paged_kv.checks import described
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import FP16, FormatName, PageFormat, page_format_named

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
