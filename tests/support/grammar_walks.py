"""Texts that a grammar allows, written by chance and by malice: no model would."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

MOST_STEPS = 1200


def walked_text(compiled: Any, random: Random, snippets: Sequence[str]) -> str | None:
    """A text that ends by itself; None if none did in time.

    Args:
        compiled: a CompiledGrammar.
        random: chooses among the tokens that may follow.
        snippets: texts that are written as far as the grammar allows, every few tokens.
    """
    grammar = compiled.begin()
    matcher, tokens = grammar.matcher, compiled.tokens
    written: list[int] = []
    mask = np.zeros((tokens.vocab_size + 31) // 32, np.int32)
    for _ in range(MOST_STEPS):
        if matcher.is_accepting() and (matcher.is_stopped() or random.random() < 0.3):
            return str(tokens.decode_str(written))
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert not matcher.is_error(), (matcher.get_error(), tokens.decode_str(written))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        following = [int(each) for each in allowed if each not in tokens.eos_tokens]
        if not following:
            assert len(allowed), "no token may follow"
            return str(tokens.decode_str(written))
        wanted = tokens.tokenize_bytes(random.choice(snippets).encode(), parse_special=True)
        fitting = wanted[: matcher.validate_tokens(wanted)] if random.random() < 0.7 else []
        chosen = fitting or [random.choice(following)]
        assert matcher.consume_tokens(chosen), matcher.get_error()
        written += chosen
        if matcher.is_stopped():
            return str(tokens.decode_str(written))
    return None
