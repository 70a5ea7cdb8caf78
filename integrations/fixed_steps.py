"""Computes steps in which no bit of a sequence depends on others: those of reproducible caches.

A product of matrices rounds a row alike whatever is in the other rows, as long as there are as many
of them. So every call of the model here has a shape that follows from the sequence alone:

    decode   a step of one token has `ROWS` rows. Empty rows fill it up, and more sequences take
             several steps. Where attention depends on the longest row, a step has one.
    prompt   a longer step is computed for one sequence after the other, in pieces that end where a
             page does, wherever the step begins.

Attention on CPUs sums each sequence's tokens in their own order. `trials` tries all of this
with the model on the device.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.integrations.batching.prompt_caches import leaves, paged_caches, replaced
from paged_kv.integrations.states.one_by_one import padded, widen
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.kernels.pages.verdicts import device_name
from paged_kv.pool.page_pool import PagePool
from paged_kv.steps.batch import Batch
from paged_kv.steps.blocks import reserve
from paged_kv.steps.progress import LayerProgress, Padding, Progress
from paged_kv.steps.sequence import Sequence
from paged_kv.steps.step import step_numbers

ROWS = 8
"""Rows of a decode step."""

Step = Callable[..., mx.array]


@dataclass(frozen=True)
class _NoTokens(Padding):
    """The padding of an empty row, which gets no token and stays at position 0."""

    tokens: int | None = 0

    def after(self, count: int) -> Padding:
        return self


class _Rows(NamedTuple):
    """The rows of one step."""

    sequences: tuple[Sequence, ...]  # of empty rows too
    numbers: list[int]  # their rows in the batch that takes the step; empty ones repeat the first
    used: int  # how many are not empty


# The decode steps of a batch, each with the batch of its rows, which knows their next step. That is
# None if it is the same one: it would keep itself.
_known: weakref.WeakKeyDictionary[Batch, list[tuple[_Rows, Batch | None]]] = (
    weakref.WeakKeyDictionary()
)


def fixed_steps(
    step: Step, tokens: mx.array, caches: list[Any], changed: list[Any], *, is_ragged: bool
) -> mx.array:
    """The logits of a call of a model, [sequences, tokens, vocabulary], in steps of fixed shapes.

    Args:
        step: the model's call, as `step(tokens, cache=)`.
        tokens: [sequences, tokens]. Padding is not computed; its logits are 0.
        caches: the prompt cache of all sequences.
        changed: gets the caches whose latest step is to be undone if what is computed of it fails.
        is_ragged: whether the model takes batches of sequences that are not equally long.

    Raises:
        PoolExhausted: the budget does not hold the step's blocks; nothing was changed.
        RollbackError: a piece of a prompt failed, and a ring has overwritten what it would need to
            forget the earlier pieces of the call.
    """
    widen(paged_caches(caches), tokens.shape[0])
    first = paged_caches(caches)[0]
    lengths = [each.progress(first.layer).tokens for each in first.sequences]
    is_decode, began = tokens.shape[1] == 1, next(step_numbers)
    if is_decode:
        steps = _decode_steps(first.batch, is_ragged)
    else:
        steps = [_Rows((each,), [row], 1) for row, each in enumerate(first.sequences)]
    found: list[mx.array | None] = []
    parts: list[list[Any]] = []
    try:
        for each in steps:
            part = [replaced(cache, partial(_part_of, each)) for cache in caches]
            parts.append(part)
            own = tokens[mx.array(each.numbers)]
            logits = step(own, cache=part) if is_decode else _in_pages(step, own, part)
            found.append(None if logits is None else logits[: each.used])
            if each.used < len(each.numbers):
                for cache in leaves(part):
                    if not isinstance(cache, PagedKVCache):
                        cache.filter(list(range(each.used)))
    except BaseException:
        for cache in paged_caches([each for part in parts for each in part]):
            begun = cache.batch.step
            if begun is not None and begun.number > began:
                begun.undo()
        for cache in paged_caches(caches):
            now = [each.progress(cache.layer).tokens for each in cache.sequences]
            cache.trim_per_sequence([a - b for a, b in zip(now, lengths, strict=True)])
        raise
    for part in parts:
        changed += leaves(part)
    _put_back(caches, parts)
    like = next(each for each in found if each is not None)
    return mx.concatenate([padded(each, tokens.shape[1], like) for each in found])


def described_device(pool: PagePool) -> str:
    """What the bits of a step depend on beside the model: the device, the kernels, the packages."""
    backend = f"{pool.backend.variant} {pool.backend.build}".strip()
    packages = ", ".join(f"{each} {version(each)}" for each in ("mlx", "mlx-lm", "paged-kv"))
    return f"{backend} on {device_name()} ({platform.machine()}), {packages}"


def rows_of_step(pool: PagePool) -> int:
    """The rows of a decode step: `ROWS`, or 1 where attention to several depends on the longest."""
    layers = [pages for group in pool.groups for pages in group.pages.values()]
    # Keys and values that are gathered are padded to those of the longest row.
    read = len(pool.attending_in_decode) == pool.num_layers
    return ROWS if read and all(each.backend.sums_apart for each in layers) else 1


def _decode_steps(batch: Batch, is_ragged: bool) -> list[_Rows]:
    if batch not in _known:
        rows = rows_of_step(batch.pool) if is_ragged else 1
        steps = [(each, Batch.of(batch.pool, each.sequences)) for each in _cut(batch, rows)]
        _known[batch] = [(each, None if of is batch else of) for each, of in steps]
    return [each for each, _ in _known[batch]]


def _cut(batch: Batch, rows: int) -> Iterator[_Rows]:
    for at in range(0, len(batch.sequences), rows):
        own = batch.sequences[at : at + rows]
        missing = rows - len(own)
        empty = [_empty_row(own[0]) for _ in range(missing)]
        numbers = [*range(at, at + len(own)), *[at] * missing]
        yield _Rows((*own, *empty), numbers, len(own))


def _empty_row(beside: Sequence) -> Sequence:
    empty = Sequence(beside.pool, beside.page_format)
    empty.model_version = beside.model_version
    empty.layers = LayerProgress(
        beside.pool, [Progress(padding=_NoTokens())] * beside.pool.num_layers
    )
    return empty


def _part_of(rows: _Rows, cache: Any) -> Any:
    """The cache of the rows of a step: of pages a view, of others a copy without padding."""
    if isinstance(cache, PagedKVCache):
        view = type(cache)(cache.pool, cache.layer, rows.sequences)
        view.depend_on([cache])
        return view
    part = copy(cache)
    part.filter(rows.numbers)
    if isinstance(part, ArraysCache):
        # Whether it has any depends on the others, and a mask takes another way through the model.
        part.left_padding = part.lengths = None
    return part


def _put_back(caches: list[Any], parts: list[list[Any]]) -> None:
    """Let the prompt cache of a batch be what it has become in parts."""
    for cache, first, *others in zip(leaves(caches), *map(leaves, parts), strict=True):
        if isinstance(cache, PagedKVCache):
            cache.depend_on([first, *others])
            continue
        for other in others:
            first.extend(other)
        vars(cache).clear()
        vars(cache).update(vars(first))


def _in_pages(step: Step, tokens: mx.array, caches: list[Any]) -> mx.array | None:
    """The logits of a prompt's next tokens, [1, tokens, vocabulary]; None if all are padding."""
    paged = paged_caches(caches)
    (sequence,) = paged[0].sequences
    layer = paged[0].layer
    begin = sequence.progress(layer).tokens
    end = begin + sequence.progress(layer).padding.own(tokens.shape[1])
    # What the budget does not hold is known before the first piece is computed.
    reserve(sequence.pool, [sequence.next_step(layer, end - begin)])
    found: list[mx.array] = []
    at = begin
    while at < end:
        border = min(at // PAGE_SIZE * PAGE_SIZE + PAGE_SIZE, end)
        found.append(step(tokens[:, at - begin : border - begin], cache=caches))
        sequence.record_piece(at, border)
        at = border
    return mx.concatenate(found, axis=1) if found else None
