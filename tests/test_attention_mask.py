"""Masks against a loop over every query and key."""

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.kernels.attention_mask import Mask, causal_window_mask, context_mask

Grid = npt.NDArray[np.bool_]


def visible(query: int, key: int, *, causal: bool, window: int | None) -> bool:
    """Whether the token at position `query` sees the one at `key`."""
    hidden_later = causal and key > query
    too_far_back = window is not None and key <= query - window
    return not hidden_later and not too_far_back


def brute_force(length: int, queries: int, *, causal: bool, window: int | None) -> Grid:
    """[queries, length] for the last `queries` of `length` tokens."""
    return np.array(
        [
            [visible(at, key, causal=causal, window=window) for key in range(length)]
            for at in range(length - queries, length)
        ],
        dtype=bool,
    ).reshape(queries, length)


def as_grid(mask: Mask, rows: int, queries: int, longest: int) -> Grid:
    """[rows, queries, longest], what any form of mask hides from queries at the end."""
    if mask is None:
        return np.ones((rows, queries, longest), dtype=bool)
    if isinstance(mask, str):
        assert mask == "causal"
        one = brute_force(longest, queries, causal=True, window=None)
        return np.broadcast_to(one, (rows, queries, longest))
    assert mask.dtype == mx.bool_
    wide = np.broadcast_to(np.asarray(mask), (rows, 1, queries, longest))
    return wide[:, 0]


def expected_grid(
    context_lens: tuple[int, ...], queries: int, *, causal: bool, window: int | None
) -> Grid:
    """[rows, queries, longest]: every row ends at the longest, and sees only its own tokens."""
    longest = max(context_lens)
    grid = np.zeros((len(context_lens), queries, longest), dtype=bool)
    for row, length in enumerate(context_lens):
        grid[row, :, longest - length :] = brute_force(
            length, queries, causal=causal, window=window
        )
    return grid


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    length=st.integers(1, 40),
    queries=st.integers(1, 40),
    window=st.none() | st.integers(1, 45),
)
def test_causal_window_mask(length: int, queries: int, window: int | None) -> None:
    queries = min(queries, length)
    mask = np.asarray(causal_window_mask(length, queries, window))
    assert mask.dtype == bool
    assert (mask == brute_force(length, queries, causal=True, window=window)).all()


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    context_lens=st.lists(st.integers(1, 24), min_size=1, max_size=4).map(tuple),
    queries=st.integers(1, 24),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 30),
)
def test_context_mask(
    context_lens: tuple[int, ...], queries: int, causal: bool, window: int | None
) -> None:
    queries = min(queries, *context_lens)
    mask = context_mask(context_lens, queries, causal=causal, window=window)
    found = as_grid(mask, len(context_lens), queries, max(context_lens))
    assert (found == expected_grid(context_lens, queries, causal=causal, window=window)).all()


@pytest.mark.parametrize(
    ("context_lens", "queries", "causal", "window", "least"),
    [
        ((9,), 1, True, None, None),
        ((9,), 3, False, None, None),
        ((9,), 3, True, None, "causal"),
        ((9, 9), 1, True, None, None),
        ((9, 9), 3, True, 9, "causal"),  # a window as long as the context hides nothing
        ((9,), 1, True, 20, None),
    ],
)
def test_says_the_least_that_hides_the_same(
    context_lens: tuple[int, ...],
    queries: int,
    causal: bool,
    window: int | None,
    least: str | None,
) -> None:
    assert context_mask(context_lens, queries, causal=causal, window=window) == least


def test_a_batch_of_one_length_needs_no_row_of_its_own() -> None:
    mask = context_mask((9, 9), 2, causal=True, window=4)
    assert isinstance(mask, mx.array)
    assert mask.size == 2 * 9


def test_ragged_rows_have_four_dimensions() -> None:
    """mlx-lm's models add or broadcast a batch's mask as [B, 1, queries, keys]."""
    mask = context_mask((9, 4), 2, causal=True, window=None)
    assert isinstance(mask, mx.array)
    assert mask.shape == (2, 1, 2, 9)


def test_one_query_of_ragged_rows() -> None:
    mask = context_mask((3, 1), 1, causal=True, window=None)
    assert isinstance(mask, mx.array)
    assert np.asarray(mask).reshape(2, 3).tolist() == [[True, True, True], [False, False, True]]
