"""The states of layers without pages are the same after packing and unpacking."""

import json
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from paged_kv.integrations.stored_states import StoredStates

DTYPES = [mx.float16, mx.bfloat16, mx.float32, mx.int32, mx.int64, mx.uint8, mx.bool_]


def stored_and_loaded(states: list[Any]) -> list[Any]:
    codec = StoredStates()
    assert codec.knows(states)
    notes, arrays = codec.pack(states)
    loaded: list[Any] = codec.unpack(json.loads(json.dumps(notes)), arrays)
    return loaded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (1, 2, 5)])
def test_arrays_keep_their_dtype_and_shape(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    cache: Any = ArraysCache(3)
    numbers = mx.random.normal(shape, key=mx.random.key(1)) * 100
    cache[0], cache[2] = numbers.astype(dtype), mx.arange(6).reshape(2, 3).T
    (loaded,) = stored_and_loaded([cache])
    assert type(loaded) is ArraysCache
    assert loaded[1] is None
    for at in (0, 2):
        assert (loaded[at].dtype, loaded[at].shape) == (cache[at].dtype, cache[at].shape)
        assert mx.array_equal(loaded[at], cache[at])


def test_several_caches_come_back_in_their_order() -> None:
    keys: Any = KVCache()
    arrays: Any = ArraysCache(1)
    keys.update_and_fetch(mx.ones((1, 2, 3, 4), mx.bfloat16), mx.zeros((1, 2, 3, 4), mx.bfloat16))
    arrays[0] = mx.ones(2)
    first, second = stored_and_loaded([keys, arrays])
    assert (type(first), type(second)) == (KVCache, ArraysCache)
    assert first.offset == 3
    assert mx.array_equal(first.state[0], keys.state[0])
    assert mx.array_equal(second[0], arrays[0])
