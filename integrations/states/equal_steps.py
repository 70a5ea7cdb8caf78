"""Computes the prompts of a batch without padding, for models with recurrent layers.

mlx-lm's PromptProcessingBatch pads shorter prompts on the right. Some of its models let that
padding enter their recurrent states, so a sequence's tokens depend on what it is batched with. Here
a step is as long as the shortest prompt that is left, and its sequence then leaves. So no state
takes in padding, and none is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import ArraysCache

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import is_list, leaves
from paged_kv.integrations.model_hooks import Replacements
from paged_kv.integrations.states.counted_states import CountedArraysCache

_stock_prompt = PromptProcessingBatch.prompt


def prompt(batch: PromptProcessingBatch, tokens: list[list[int]]) -> None:
    """PromptProcessingBatch's method of this name. Batches with mlx-lm's own caches, and those of
    models without recurrent layers, are computed as there."""
    ends = sorted({len(each) for each in tokens})
    if len(ends) < 2 or not _has_states(batch.prompt_cache):
        _stock_prompt(batch, tokens)
        return
    rows, caches, begin = list(range(len(tokens))), batch.prompt_cache, 0
    left: list[int] = []
    left_caches: list[Any] = []
    for end in ends:
        part = copy.copy(batch)
        part.uids, part.prompt_cache = [batch.uids[row] for row in rows], caches
        part.tokens = [batch.tokens[row] for row in rows]
        _stock_prompt(part, [tokens[row][begin:end] for row in rows])
        leaving = [at for at, row in enumerate(rows) if len(tokens[row]) == end]
        staying = [at for at, row in enumerate(rows) if len(tokens[row]) > end]
        left_caches = _joined(left_caches, _selected(caches, leaving))
        caches = _selected(caches, staying)
        left += [rows[at] for at in leaving]
        rows, begin = [rows[at] for at in staying], end
    batch.prompt_cache = _selected(left_caches, [left.index(row) for row in range(len(tokens))])


def _has_states(prompt_cache: Iterable[Any]) -> bool:
    """Whether these are a factory's caches, some of them of recurrent layers."""
    caches = list(leaves(prompt_cache))
    return any(isinstance(each, ArraysCache) for each in caches) and any(
        isinstance(each, PagedKVCache | CountedArraysCache) for each in caches
    )


def _selected(caches: list[Any], rows: list[int]) -> list[Any]:
    """Caches of these sequences of a batch, in this order, without a copy of their pages."""
    return [_selected_in(cache, rows) for cache in caches] if rows else []


def _selected_in(cache: Any, rows: list[int]) -> Any:
    if is_list(cache):
        return type(cache)(*[_selected_in(inner, rows) for inner in cache.caches])
    selected = copy.copy(cache)
    selected.filter(rows)
    return selected


def _joined(caches: list[Any], others: list[Any]) -> list[Any]:
    for cache, other in zip(caches, others, strict=False):
        cache.extend(other)
    return caches or others


EQUAL_STEPS = Replacements({_stock_prompt: prompt})
"""For `PromptProcessingBatch`."""
