"""Chooses the tokens that a step of one token per sequence reads: an approximation of attention.

Each KV head reads the runs of 32 tokens in which its queries are likely to find the most weight, by
the summaries of their keys, and always the first run and the latest ones: nearly every query
attends to both. A sequence that has no more tokens than may be read is attended to exactly.

After Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024,
which chooses whole pages by bounds of their keys.
"""

from math import log

import mlx.core as mx

from paged_kv.kernels.pages.attention_metadata import Attention, AttentionMetadata
from paged_kv.kernels.pages.page_format import PAGE_SIZE, RUN_TOKENS

RUNS_OF_PAGE = PAGE_SIZE // RUN_TOKENS
# That many runs are always read before the last one. The page that is being written is, too: it has
# no summaries yet.
LATEST_RUNS = 3
LEAST_READ_TOKENS = 3 * PAGE_SIZE
# For each query, far below the score of any run.
UNKNOWN = -1e30


def chooses(attention: Attention, metadata: AttentionMetadata, queries: int) -> bool:
    """Whether a step of `queries` tokens per sequence does not read all tokens of all of them."""
    return (
        attention.read_tokens is not None
        and queries == 1
        and attention.window is None
        and exceeds(metadata, attention.read_tokens)
    )


def exceeds(metadata: AttentionMetadata, read_tokens: int) -> bool:
    """Whether a sequence has more than so many tokens. Kept in the batch's `memo`: all layers ask,
    and recorded steps, whose lengths are in arrays, are told so there."""
    key = exceeds_key(read_tokens)
    if key not in metadata.memo:
        metadata.memo[key] = max(metadata.context_lens, default=0) > read_tokens
    found: bool = metadata.memo[key]
    return found


def exceeds_key(read_tokens: int) -> str:
    """The key of `exceeds` in a batch's `memo`."""
    return f"exceeds {read_tokens}"


def tokens_read(length: int, read_tokens: int | None) -> int:
    """How many tokens are read of a sequence: all, or whole runs and its last one, which may be
    partly empty."""
    if read_tokens is None or length <= read_tokens:
        return length
    return read_tokens // RUN_TOKENS * RUN_TOKENS - (-length) % RUN_TOKENS


def run_scores(queries: mx.array, summaries: mx.array, scale: float) -> mx.array:
    """The logarithm of the weight that each query is expected to give to each run, up to a constant
    for each query: float32 [B, kv_heads, G, runs].

    The largest of n numbers of a normal distribution bounds the mean of their exponentials. Where
    the variance s^2 is above 2 log(n), the mean is about exp(s sqrt(2 log(n))) / n, no longer
    exp(s^2 / 2): see Derrida, "Random-energy model", 1981.

    Args:
        queries: [B, kv_heads * G, 1, k_dim].
        summaries: [B, kv_heads, runs, 2 * k_dim], see `summaries_of`.
        scale: of scores.
    """
    scaled = queries[:, :, 0].astype(mx.float32) * scale
    by_kv_head = mx.unflatten(scaled, 1, (summaries.shape[1], -1))
    means, variances = mx.split(summaries.astype(mx.float32).swapaxes(-1, -2), 2, axis=-2)
    spread, most = mx.square(by_kv_head) @ variances / 2, log(RUN_TOKENS)
    spread = mx.where(spread > most, mx.sqrt(4 * most * spread) - most, spread)
    return by_kv_head @ means + spread


def chosen_runs(scores: mx.array, lengths: mx.array, read_tokens: int) -> mx.array:
    """The runs to read, ascending: int32 [B, kv_heads, read_tokens / 32]. Where a sequence has
    fewer, all of its runs come first.

    Args:
        scores: see `run_scores`. Only those of full pages before the one that is being written are
            used.
        lengths: the tokens of each sequence, int32 [B].
        read_tokens: how many tokens to read; whole runs of these.
    """
    run = mx.arange(scores.shape[3])
    last = ((lengths - 1) // RUN_TOKENS)[:, None, None]
    summarised = ((lengths - 1) // PAGE_SIZE * RUNS_OF_PAGE)[:, None, None]
    known = mx.where(run < summarised[:, None], scores, UNKNOWN)
    weights = mx.softmax(known, axis=-1).sum(axis=2)
    always = (run == 0) | (run >= mx.minimum(summarised, last - LATEST_RUNS))
    ranked = mx.where(run > last, -1.0, mx.where(always, mx.inf, weights))
    count = min(read_tokens // RUN_TOKENS, ranked.shape[2])
    best = mx.argpartition(-ranked, count - 1, axis=-1)[..., :count]
    return mx.sort(best, axis=-1).astype(mx.int32)


def chosen_tokens(
    queries: mx.array, keys: mx.array, values: mx.array, summaries: mx.array, attention: Attention
) -> tuple[mx.array, mx.array]:
    """The keys and values [1, heads, tokens, dim] of one sequence that its query reads.

    Args:
        queries: [1, q_heads, 1, k_dim].
        keys, values: [1, heads, tokens, dim], of all tokens.
        summaries: of all pages, see `run_scores`.
    """
    assert attention.read_tokens is not None
    length = mx.array([keys.shape[2]])
    scores = run_scores(queries, summaries, attention.scale)
    runs = chosen_runs(scores, length, attention.read_tokens)
    at = mx.flatten(runs[..., None] * RUN_TOKENS + mx.arange(RUN_TOKENS), -2)
    at = at[..., : tokens_read(keys.shape[2], attention.read_tokens), None]
    return mx.take_along_axis(keys, at, axis=2), mx.take_along_axis(values, at, axis=2)
