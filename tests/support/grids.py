"""Chooses the cases of a parametrised test that each run takes; the soak takes the others."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = tuple[Hashable, ...]


def covering(cases: Sequence[Case]) -> list[int]:
    """Indices of cases that together cover every value of one axis or two, or every pair of values
    of three or more axes, as far as any case has it. Of cases that add equally much, the first is
    taken.

    Args:
        cases: for each its value on each axis.
    """
    columns = [column for column in zip(*cases, strict=True) if len(set(column)) > 1]
    together = min(len(columns), 1 if len(columns) <= 2 else 2)
    rows = list(zip(*columns, strict=True)) or [()] * len(cases)
    has = [set(combinations(enumerate(row), together)) for row in rows]
    missing = set().union(*has)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda at: len(has[at] & missing))
        chosen.append(best)
        missing -= has[best]
    return chosen


def plain_only(plain: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """The values of an argument; only the soak takes others than those named first."""
    return [
        value if value in plain else pytest.param(value, marks=pytest.mark.soak) for value in values
    ]


def plain_cases(plain: Sequence[Case], cases: Iterable[Case]) -> list[Any]:
    """The same for the values of several arguments."""
    return [
        case if case in plain else pytest.param(*case, marks=pytest.mark.soak) for case in cases
    ]


def case_of(item: Any) -> Case:
    """The case that a parametrised test runs: one axis for each `parametrize` and each fixture."""
    axes = [marker.args[0] for marker in item.iter_markers("parametrize")]
    axes = [axis.replace(" ", "").split(",") if isinstance(axis, str) else axis for axis in axes]
    of_fixtures = set(item.callspec.params).difference(*axes)
    # A value is the same object in all cases. Some values have no hash.
    return tuple(
        tuple(id(item.callspec.params[name]) for name in axis)
        for axis in (*axes, *([name] for name in sorted(of_fixtures)))
    )


def beyond_the_cover(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The collected tests that are left to the soak.

    Slow cases and plain ones are grids of their own, so that the plain run has a cover too.
    """
    grids: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("soak") is None:
            is_slow = item.get_closest_marker("slow") is not None
            grids[item.nodeid.split("[")[0], is_slow].append(item)
    left_out = []
    for grid in grids.values():
        covered = set(covering([case_of(item) for item in grid]))
        left_out += [item for at, item in enumerate(grid) if at not in covered]
    return left_out
