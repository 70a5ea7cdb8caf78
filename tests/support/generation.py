"""Generates greedily with logits, compares two runs, and checks the pool after them."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step

from paged_kv import PagedCacheFactory


@dataclass
class Run:
    """Generated tokens, and for each the log-probabilities [tokens, vocabulary]."""

    tokens: list[int]
    logprobs: mx.array


def greedy(model: Any, prompt: Sequence[int], cache: Any, count: int, step: int = 2048) -> Run:
    """`count` tokens from mlx-lm's own generator."""
    produced = list(
        generate_step(
            mx.array(list(prompt)),
            model,
            max_tokens=count,
            prompt_cache=cache,
            prefill_step_size=step,
        )
    )
    return Run([int(token) for token, _ in produced], mx.stack([row for _, row in produced]))


def runs_of(generator: BatchGenerator, uids: Sequence[int]) -> list[Run]:
    """Everything that a batch generator still gives for its sequences. Caches are dropped at once:
    other sequences may need their pages."""
    given: dict[int, list[Any]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            response.prompt_cache = None
            given[response.uid].append(response)
    return [
        Run([each.token for each in given[uid]], mx.stack([each.logprobs for each in given[uid]]))
        for uid in uids
    ]


def speculate(
    model: Any, draft: Any, prompt: list[int], drafted: int, caches: Any, step: int
) -> tuple[Run, list[bool]]:
    """40 tokens from mlx-lm's speculative generator, and which of them were drafted."""
    produced = list(
        speculative_generate_step(
            mx.array(prompt),
            model,
            draft,
            max_tokens=40,
            num_draft_tokens=drafted,
            prompt_cache=caches,
            prefill_step_size=step,
        )
    )
    tokens = [int(token) for token, _, _ in produced]
    run = Run(tokens, mx.stack([row for _, row, _ in produced]))
    return run, [from_draft for _, _, from_draft in produced]


def assert_same_run(ours: Run, stock: Run, tolerance: float) -> None:
    """Logits agree within `tolerance`, and tokens agree wherever mlx-lm's two best tokens differ by
    more. After a token that differs the runs have read different text, so the rest is not compared.
    """
    assert len(ours.tokens) == len(stock.tokens)
    for at, (token, expected) in enumerate(zip(ours.tokens, stock.tokens, strict=True)):
        difference = mx.abs(ours.logprobs[at] - stock.logprobs[at])
        # Two models of the zoo give some tokens a probability of zero: -inf on both sides.
        difference = mx.where(ours.logprobs[at] == stock.logprobs[at], 0, difference)
        assert float(difference.max()) <= tolerance, f"logits differ at token {at}"
        if token != expected:
            best = mx.sort(stock.logprobs[at])[-2:]
            assert float(best[1] - best[0]) <= tolerance, f"token {at} differs without a tie"
            return


def assert_same_runs(ours: list[Run], stock: list[Run], tolerance: float) -> None:
    """Apply `assert_same_run` to each pair of two lists."""
    for our_run, stock_run in zip(ours, stock, strict=True):
        assert_same_run(our_run, stock_run, tolerance)


def assert_nothing_is_used(*factories: PagedCacheFactory) -> None:
    """Check that all blocks are free and that the pool's invariants hold."""
    gc.collect()
    for factory in factories:
        factory.pool.check()
        assert factory.stats().blocks_used == 0


def assert_written_and_free(*factories: PagedCacheFactory) -> None:
    """Check that pages were written, and that all blocks are free again."""
    assert all(factory.pool.is_open for factory in factories)
    assert_nothing_is_used(*factories)
