"""Steps with padding: padding is not stored, not attended to, and makes no NaN."""

import mlx.core as mx
import pytest

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import FP16, LayerGeometry
from paged_kv.steps.progress import NO_PADDING, Padding
from tests.support.attention_metadata import unpadded
from tests.support.backends import BACKENDS, backend_named

GEOMETRY = LayerGeometry(2, 16, mx.float32, 2, 8, mx.float32)
TABLES = ((3, 0), (1,), (2,), (4,))
# In a step of 6 tokens the first sequence has 6, the second has three padding tokens after its own,
# the third has four before, the fourth has none.
ROWS = AttentionMetadata(TABLES, (300, 3, 20, 9), (0, 0, 2, 6))
STEP = 6


def normal(heads: int, tokens: int, dim: int, seed: int, batch: int = 4) -> mx.array:
    return mx.random.normal((batch, heads, tokens, dim), key=mx.random.key(seed))


@pytest.fixture(params=BACKENDS)
def pages(request: pytest.FixtureRequest) -> LayerPages:
    """Sequences of 294, 0, 16 and 9 tokens in pages that were full of NaN."""
    pages = LayerPages(GEOMETRY, backend_named(request.param, GEOMETRY), 8)
    pages.map_slab(0, 5, FP16)
    shape = (pages.layout_of(0).page_units, pages.layout_of(0).unit_words)
    pages.load({entry: mx.full(shape, 0x7FC0, dtype=WORD) for entry in range(5)})
    for row, tokens in enumerate((294, 0, 16, 9)):
        if tokens:
            step = normal(2, tokens, 16, row, 1), normal(2, tokens, 8, row, 1)
            pages.write(*step, unpadded((TABLES[row],), (tokens,)))
    return pages


def test_a_step_writes_and_attends_as_its_rows_alone(pages: LayerPages) -> None:
    keys, values, queries = normal(2, STEP, 16, 7), normal(2, STEP, 8, 8), normal(4, STEP, 16, 9)
    pages.write(keys, values, ROWS)
    together = pages.attend(queries, ROWS, Attention(0.25))
    gathered_keys, gathered_values = pages.gather(ROWS)
    assert gathered_keys.shape[2] == max(ROWS.ends) == 300
    for row, own in enumerate(ROWS.valid_tokens(STEP)):
        alone = unpadded((TABLES[row],), (ROWS.context_lens[row],))
        one = slice(row, row + 1)
        if own:
            part = queries[one, :, own.start : own.stop]
            expected = pages.attend(part, alone, Attention(0.25))
            assert mx.allclose(together[one, :, own.start : own.stop], expected, atol=1e-6)
        begin, end = 300 - ROWS.ends[row], 300 - ROWS.right_padding[row]
        for all_rows, single in zip(
            (gathered_keys, gathered_values), pages.gather(alone), strict=True
        ):
            assert mx.array_equal(all_rows[one, :, begin:end], single)
            assert not all_rows[one, :, :begin].any()
            assert not all_rows[one, :, end:].any()
        stored = pages.gather(alone)[0][0, :, ROWS.context_lens[row] - len(own) :]
        assert mx.array_equal(stored, keys[row, :, own.start : own.stop])
    for window in (None, 4):
        assert mx.isfinite(pages.attend(queries, ROWS, Attention(0.25, window=window))).all()


@pytest.mark.parametrize(
    ("padding", "own", "right"),
    [
        (NO_PADDING, 12, 0),
        (Padding(left=5), 7, 0),
        (Padding(tokens=4), 4, 8),
        (Padding(left=3, tokens=6), 6, 3),
        (Padding(left=20), 0, 0),
        (Padding(tokens=0), 0, 12),
    ],
)
def test_twelve_tokens_are_counted_alike_however_they_are_cut(
    padding: Padding, own: int, right: int
) -> None:
    for step in (1, 3, 4, 100):
        seen, left = 0, padding
        for begin in range(0, 12, step):
            count = min(step, 12 - begin)
            seen += left.own(count)
            left = left.after(count)
        assert (seen, left.right) == (own, right)
