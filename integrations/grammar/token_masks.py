"""Computes which tokens the grammars of many sequences allow, and masks logits with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from paged_kv.integrations.grammar.followed_grammar import FollowedGrammar


class MaskedRow(NamedTuple):
    """The positions of one sequence in a step.

    Attributes:
        grammar: of the sequence.
        first: the number of the sequence's first mask; those of its drafts follow.
        drafts: drafted tokens that the grammar allows; after each of them a mask is needed.
    """

    grammar: FollowedGrammar
    first: int
    drafts: list[int]


def token_masks(rows: Sequence[MaskedRow], positions: int, vocab_size: int) -> mx.array:
    """The tokens that may follow: bool [positions, vocabulary]. All may where no row has a mask.

    llguidance computes the masks on its own threads, without Python's lock.
    """
    masking = [row for row in rows if row.grammar.is_masking]
    known = max((row.grammar.vocab_size for row in masking), default=0)
    masks = np.full((positions, (known + 31) // 32), -1, dtype=np.int32)
    memory = masks.ctypes.data, masks.strides[0], positions
    begun = [row for row in masking if not row.grammar.is_free]
    if short := [(row.grammar.matcher, row.first) for row in begun if not row.drafts]:
        _executor().unsafe_compute_mask_ptr(short, *memory)
    if long := [(row.grammar.matcher, row.first, row.drafts) for row in begun if row.drafts]:
        _executor().unsafe_compute_mask_ptr_with_draft_token(long, *memory)
    for row in masking:
        if (opening := row.grammar.opening) is not None:
            masks[row.first].view(np.uint32)[opening // 32] |= np.uint32(1 << opening % 32)
        row.grammar.note_errors()
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=known)
    allowed = np.ones((positions, vocab_size), dtype=np.bool_)
    allowed[:, :known] = bits[:, :vocab_size]
    for row in masking:
        # A model may have more logits than tokens. A sequence whose grammar failed is dropped.
        its = allowed[row.first : row.first + 1 + len(row.drafts)]
        its[:, known:] = False
        if row.grammar.is_free:
            its[:, row.grammar.barred] = False
        its |= row.grammar.error is not None
    return mx.array(allowed)


def masked(logits: mx.array, allowed: mx.array) -> mx.array:
    """Logits [..., vocabulary] that are -inf where `allowed`, of the same shape, is false."""
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))


@cache
def _executor() -> Any:
    """llguidance's threads. Only who has a matcher asks: llguidance is installed."""
    from llguidance import LLExecutor

    return LLExecutor()
