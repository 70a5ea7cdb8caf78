"""Which tokens a query may see."""

import mlx.core as mx

Mask = mx.array | str | None


def causal_window_mask(length: int, queries: int, window: int | None) -> mx.array:
    """Boolean [queries, length]: the last `queries` of `length` tokens see themselves and what is
    before them, less than `window` positions back."""
    keys = mx.arange(length)[None]
    at = mx.arange(length - queries, length)[:, None]
    mask = at >= keys
    return mask if window is None else mask & (at < keys + window)


def context_mask(
    context_lens: tuple[int, ...], queries: int, *, causal: bool, window: int | None
) -> Mask:
    """The mask for rows that end at the longest context: None, "causal" or boolean
    [B, 1, queries, longest], whichever is the least that says it."""
    longest = max(context_lens)
    ragged = min(context_lens) < longest
    windowed = window is not None and longest > window
    hides_later = causal and queries > 1
    if not ragged and not windowed:
        return "causal" if hides_later else None
    mask = causal_window_mask(longest, queries, window) if hides_later or windowed else None
    if not ragged:
        return mask
    starts = mx.array([longest - length for length in context_lens])[:, None, None, None]
    present = mx.arange(longest) >= starts
    return present if mask is None else present & mask
