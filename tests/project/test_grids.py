"""The plain run takes few cases of a grid, and covers every value."""

from itertools import combinations, product

import pytest

from tests.support.grids import covering


@pytest.mark.parametrize("sizes", [(5,), (3, 7), (3, 7, 1), (4, 5, 8), (2, 2, 3, 5)])
def test_all_values_or_pairs_of_values_are_covered_by_few_cases(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[at] for at in covering(cases)]
    *_, second, first = sorted((1, *sizes))
    together = 2 if len([size for size in sizes if size > 1]) > 2 else 1
    fewest = first * (second if together == 2 else 1)
    assert fewest <= len(chosen) <= 1.5 * fewest
    for axes in combinations(range(len(sizes)), together):
        expected = product(*[range(sizes[axis]) for axis in axes])
        assert {tuple(case[axis] for axis in axes) for case in chosen} == set(expected)
