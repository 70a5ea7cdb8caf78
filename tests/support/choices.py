"""Which tokens a step reads, in float64: the reference for choices."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.dense_attention import Numbers


def chosen(queries: Numbers, keys: Numbers, scale: float, read_tokens: int) -> npt.NDArray[Any]:
    """The tokens that the queries of one KV head, [G, dim], read of keys [tokens, dim]."""
    length = len(keys)
    if length <= read_tokens:
        return np.arange(length)
    full = (length - 1) // 256 * 256
    groups = keys[:full].reshape(-1, 32, keys.shape[1])
    # Rounded as summaries are, so that both choose alike where two runs are as good.
    means, variances = (each.astype(np.float16) for each in (groups.mean(1), groups.var(1)))
    spread, most = (scale * queries) ** 2 @ variances.T / 2, np.log(32)
    spread = np.where(spread > most, 2 * np.sqrt(most * spread) - most, spread)
    scores = scale * queries @ means.T + spread
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights = (weights / weights.sum(1, keepdims=True)).sum(0)
    last = (length - 1) // 32
    latest = set(range(min(full // 32, last - 3), last + 1))
    others = sorted(set(range(1, full // 32)) - latest, key=lambda run: -weights[run])
    runs = sorted({0} | latest | set(others[: read_tokens // 32 - 1 - len(latest)]))
    tokens = np.concatenate([np.arange(32 * run, 32 * run + 32) for run in runs])
    return tokens[tokens < length]
