"""New slabs hold zeros, also where their memory was used before."""

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.pages import untouched_memory
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.untouched_memory import untouched


@pytest.mark.parametrize("words", [64, 5000, 1 << 20, 1 << 24, (1 << 24) + 64])
def test_memory_that_was_used_is_cleared(words: int) -> None:
    used = [np.full(words, 7, np.uint16) for _ in range(4)]
    given = [untouched((words // 8, 8)) for _ in range(2)]
    del used, given
    memory = untouched((words // 8, 8))
    assert (memory.dtype, memory.shape) == (WORD, (words // 8, 8))
    assert not mx.any(memory)


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("first", [0, 1, 4000])
@pytest.mark.parametrize("size", [10, 5000, 100_000])
def test_exactly_the_given_memory_is_cleared(
    size: int, first: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system refuses to."""
    if is_refused:
        monkeypatch.setattr(untouched_memory, "_madvise", lambda memory: -1)
    whole = np.full(first + size + 5000, 7, np.uint8)
    untouched_memory._clear(whole[first : first + size])
    assert not whole[first : first + size].any()
    assert (whole[:first] == 7).all()
    assert (whole[first + size :] == 7).all()
