"""Dense attention in float64, one query at a time: the reference for kernels."""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def dense_attention(
    queries: Numbers,
    keys: Numbers,
    values: Numbers,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    sinks: Numbers | None,
    softcap: float | None = None,
) -> Numbers:
    """Attention of one sequence, [q_heads, S, v_dim]."""
    q_heads, count, _ = queries.shape
    kv_heads, length, _ = keys.shape
    result = np.zeros((q_heads, count, values.shape[2]))
    for head in range(q_heads):
        kv_head = head * kv_heads // q_heads
        for query in range(count):
            at = length - count + query
            first = 0 if window is None else max(0, at - window + 1)
            last = at + 1 if causal or window is not None else length
            scores = keys[kv_head, first:last] @ queries[head, query] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            top = max(scores.max(), -np.inf if sinks is None else sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - top))
            result[head, query] = weights / total @ values[kv_head, first:last]
    return result
