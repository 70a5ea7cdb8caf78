"""New slabs hold zeros, also where their memory was used before."""

import mlx.core as mx
import numpy as np
import pytest

from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.untouched_memory import RECYCLED, untouched


@pytest.mark.parametrize("words", [64, 5000, 1 << 20, RECYCLED // 2, RECYCLED // 2 + 64])
def test_memory_that_was_used_is_cleared(words: int) -> None:
    used = [np.full(words, 7, np.uint16) for _ in range(4)]
    given = [untouched((words // 8, 8)) for _ in range(2)]
    del used, given
    memory = untouched((words // 8, 8))
    assert (memory.dtype, memory.shape) == (WORD, (words // 8, 8))
    assert not mx.any(memory)
