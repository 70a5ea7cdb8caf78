"""Masks against a loop over every query and key."""

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.dense_attention import batch_mask, causal_window_mask
from tests.support.examples import examples

Grid = npt.NDArray[np.bool_]


def brute_force(length: int, queries: int, window: int | None, keep: int = 0) -> Grid:
    """[queries, length] for the last `queries` of `length` tokens."""
    first = -length if window is None else -window
    return np.array(
        [
            [key <= at and (key > at + first or key < keep) for key in range(length)]
            for at in range(length - queries, length)
        ],
        dtype=bool,
    ).reshape(queries, length)


@examples(60)
@given(length=st.integers(1, 40), queries=st.integers(1, 40), window=st.none() | st.integers(1, 45))
def test_causal_window_mask(length: int, queries: int, window: int | None) -> None:
    queries = min(queries, length)
    mask = np.asarray(causal_window_mask(length, queries, window))
    assert mask.dtype == bool
    assert (mask == brute_force(length, queries, window)).all()


@st.composite
def steps(draw: st.DrawFn) -> tuple[AttentionMetadata, int]:
    """Sequences at the end of a step, and the step's number of tokens."""
    lengths = draw(st.lists(st.integers(0, 24), min_size=2, max_size=4))
    padding = draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    metadata = AttentionMetadata((), tuple(lengths), tuple(padding))
    return metadata, draw(st.integers(1, max(1, *metadata.ends)))


@examples(150)
@given(step=steps(), window=st.none() | st.integers(1, 30), keep=st.integers(0, 6))
def test_every_token_of_a_batch_sees_what_it_would_see_alone(
    step: tuple[AttentionMetadata, int], window: int | None, keep: int
) -> None:
    metadata, queries = step
    longest = max(metadata.ends)
    mask = np.asarray(batch_mask(metadata, queries, window, keep))
    for row, (length, end) in enumerate(zip(metadata.context_lens, metadata.ends, strict=True)):
        own = metadata.valid_tokens(queries)[row]
        seen = mask[row, 0, own.start : own.stop]
        start = longest - end
        assert not seen[:, :start].any()
        alone = brute_force(length, len(own), window, keep)
        assert (seen[:, start : start + length] == alone).all()
        assert not seen[:, start + length :].any()


def test_a_batch_of_stock_caches_has_the_same_mask() -> None:
    metadata = AttentionMetadata((), (9, 4, 7), (0, 0, 2))
    stock = create_causal_mask(3, offset=6, window_size=5, left_padding=mx.array([0, 5, 0]))
    assert mx.array_equal(batch_mask(metadata, 3, 5), stock)


def test_padding_before_and_behind_a_row_is_not_its_own() -> None:
    metadata = AttentionMetadata((), (9, 2, 1, 5), (0, 0, 2, 4))
    assert metadata.valid_tokens(4) == [range(4), range(2, 4), range(1, 2), range(0)]
