"""Pages with summaries, and steps that choose tokens by them."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import LayerGeometry, summaries_of
from tests.support.arrays import normal, numbers


def clustered(length: int, geometry: LayerGeometry, seed: int) -> mx.array:
    """Keys [heads, length, dim] that stay alike for some tokens, as those of texts do."""
    centres = normal((geometry.k_heads, length // 50 + 1, geometry.k_dim), mx.float32, seed)
    of_tokens = mx.repeat(centres, 50, axis=1)[:, :length]
    own = normal((geometry.k_heads, length, geometry.k_dim), mx.float32, seed + 1)
    return (1.5 * of_tokens + 0.7 * own).astype(geometry.k_dtype)


def queries_like(keys: Sequence[mx.array], group: int) -> mx.array:
    """Queries [B, heads * group, 1, dim] for keys [heads, length, dim] of each sequence: each is
    like a key somewhere in the past."""
    rows = []
    for row, own in enumerate(keys):
        at = np.random.default_rng(row).integers(0, own.shape[1], group)
        alike = mx.flatten(own[:, mx.array(at)], 0, 1)[:, None]
        rows.append(0.7 * alike + 0.3 * normal(alike.shape, mx.float32, 200 + row))
    return mx.stack(rows).astype(keys[0].dtype)


def summary_words(pages: LayerPages, entry: int) -> npt.NDArray[np.uint16]:
    return np.array(pages.page(entry).reshape(-1)[pages.layout_of(entry).summaries_at :])


def assert_summarised(pages: LayerPages, entry: int, keys: mx.array) -> None:
    """A page's summaries are those of keys [heads, 256, dim], but for rounding."""
    wanted = numbers(summaries_of(keys))
    found = numbers(mx.array(summary_words(pages, entry)).view(mx.float16)).reshape(wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
