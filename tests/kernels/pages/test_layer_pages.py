"""A layer makes the arguments of its attention once, and keeps them."""

import mlx.core as mx
import pytest

from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_pages import KEPT_ATTENTIONS, LayerPages
from paged_kv.kernels.pages.page_format import LayerGeometry


@pytest.fixture
def pages() -> LayerPages:
    return LayerPages(LayerGeometry(2, 32, mx.float16, 2, 32, mx.float16), Backend(), 64)


def test_equal_arguments_give_the_kept_attention(pages: LayerPages) -> None:
    sinks = mx.ones((4,))
    kept = pages.attention(0.5, True, 9, sinks, 2.0)
    assert pages.attention(0.5, True, 9, sinks, 2.0) is kept
    assert (kept.scale, kept.causal, kept.window, kept.softcap) == (0.5, True, 9, 2.0)
    assert kept.sinks is sinks
    for other in (
        (0.25, True, 9, sinks, 2.0),
        (0.5, False, 9, sinks, 2.0),
        (0.5, True, None, sinks, 2.0),
        (0.5, True, 9, mx.zeros((4,)), 2.0),
        (0.5, True, 9, sinks, None),
    ):
        assert pages.attention(*other) is not kept


def test_sinks_that_are_new_in_every_step_are_not_all_kept(pages: LayerPages) -> None:
    for seed in range(3 * KEPT_ATTENTIONS):
        sinks = mx.full((4,), seed)
        assert pages.attention(1.0, True, None, sinks, None).sinks is sinks
    assert len(pages.attentions) <= KEPT_ATTENTIONS
