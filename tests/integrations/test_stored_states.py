"""The states of layers without pages are the same after packing and unpacking."""

import json

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from paged_kv.integrations.stored_states import StoredStates


@pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32, mx.int32, mx.int64, mx.uint8, mx.bool_]
)
def test_caches_keep_their_order_and_arrays_their_dtype_and_shape(dtype: mx.Dtype) -> None:
    keys, states = KVCache(), ArraysCache(4)
    keys.update_and_fetch(mx.ones((1, 2, 3, 4), mx.bfloat16), mx.zeros((1, 2, 3, 4), mx.bfloat16))
    numbers = mx.random.normal((2, 5), key=mx.random.key(1)) * 100
    arrays = [numbers.astype(dtype), mx.arange(6).reshape(2, 3).T, mx.zeros((), dtype)]
    for at, each in enumerate(arrays):
        states[at] = each
    codec = StoredStates()
    assert codec.knows([keys, states])
    notes, packed = codec.pack([keys, states])
    first, second = codec.unpack(json.loads(json.dumps(notes)), packed)
    assert (type(first), type(second)) == (KVCache, ArraysCache)
    assert first.offset == 3
    assert mx.array_equal(first.state[0], keys.state[0])
    assert second[3] is None
    for at, each in enumerate(arrays):
        assert (second[at].dtype, second[at].shape) == (each.dtype, each.shape)
        assert mx.array_equal(second[at], each)
