"""The plain run takes few cases of a grid, and covers every value."""

from itertools import combinations, product

import pytest

from tests.support.grids import beyond_the_cover, covering

pytest_plugins = ["pytester"]


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


GRIDS = """
import pytest

@pytest.fixture(params=["plain", "native"])
def backend(request):
    return request.param

@pytest.mark.parametrize(("k_dim", "v_dim"), [(32, 32), (64, 32), (64, 64)])
@pytest.mark.parametrize("dtype", [[16], [32]])
def test_two_axes(k_dim, v_dim, dtype): ...

@pytest.mark.parametrize("k_dim, v_dim", [(32, 32), (64, 32), (64, 64)])
@pytest.mark.parametrize("queries", [1, 2, 3])
def test_three_axes(k_dim, v_dim, queries, backend): ...

@pytest.mark.parametrize("queries", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_slow_ones_cover_nothing(queries, backend): ...

def test_of_no_grid(): ...
"""


def test_arguments_of_one_parametrize_are_one_axis(pytester: pytest.Pytester) -> None:
    items = pytester.getitems(GRIDS)
    assert len(items) == 6 + 18 + 4 + 1
    left_out = [item.name.split("[")[0] for item in beyond_the_cover(items)]
    counts = {name: left_out.count(name) for name in set(left_out)}
    assert counts == {"test_two_axes": 3, "test_three_axes": 9}
