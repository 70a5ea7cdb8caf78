"""Which runs are chosen, for any lengths and scores."""

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.kernels.pages.choice import (
    LEAST_READ_TOKENS,
    chosen_runs,
    tokens_read,
)
from paged_kv.kernels.pages.page_format import RUN_TOKENS
from tests.support.examples import examples

PAGES = 24


@given(
    lengths=st.lists(st.integers(1, PAGES * 256), min_size=1, max_size=3),
    read_tokens=st.integers(LEAST_READ_TOKENS, PAGES * 256),
    seed=st.integers(0, 99),
)
@examples(100)
def test_the_best_runs_beside_the_first_and_the_latest(
    lengths: list[int], read_tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # What lies behind full pages may be anything.
    scores = 5 * rng.standard_normal((len(lengths), 2, 3, PAGES * 8)).astype(np.float32)
    for row, length in enumerate(lengths):
        scores[row, :, :, (length - 1) // 256 * 8 :] = np.nan
    runs = np.array(chosen_runs(mx.array(scores), mx.array(lengths), read_tokens))
    count = read_tokens // RUN_TOKENS
    assert runs.shape == (len(lengths), 2, min(count, PAGES * 8))
    for row, length in enumerate(lengths):
        last = (length - 1) // RUN_TOKENS
        for head in range(2):
            if last < count:
                assert runs[row, head, : last + 1].tolist() == list(range(last + 1))
                continue
            found = runs[row, head].tolist()
            assert found == sorted(set(found))
            latest = min((length - 1) // 256 * 8, last - 3)
            assert {0, *range(latest, last + 1)} <= set(found)
            weights = np.exp(scores[row, head, :, :latest].astype(np.float64))
            every = np.exp(scores[row, head, :, : (length - 1) // 256 * 8].astype(np.float64))
            shares = (weights / every.sum(1, keepdims=True)).sum(0)
            others = [run for run in range(1, latest) if run not in found]
            chosen = [run for run in found if 0 < run < latest]
            if others and chosen:
                assert shares[chosen].min() >= shares[others].max() * (1 - 1e-5)
        if length > read_tokens:
            in_last = (length - 1) % RUN_TOKENS + 1
            assert tokens_read(length, read_tokens) == (count - 1) * RUN_TOKENS + in_last
        else:
            assert tokens_read(length, read_tokens) == length
        assert tokens_read(length, None) == length
