"""Layers of mlx-vlm's models whose attention reads only what an indexer chooses. Their keys and
values, or latents, are in pages. What the indexer keeps beside them stays in mlx-vlm's own caches,
one for each sequence, and is a state of the sequence as those of recurrent layers are:

    qwen4_exp      the keys of the index and their positions, one of each token; and a normalised
                   mean of each 4 keys, which follows from them
    minimax_m3_vl  the keys of the index, one of each token
    glm5_next      a key of the index for each 16 tokens, what the open ones are made of, and which
                   tokens are padding

The models take positions of tokens for columns of their caches, which pages of sequences of unequal
length do not have. So the sequences of a batch are computed one after the other.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList
from mlx_vlm.models.cache import ArraysCache, KVCache, PoolingCache

from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.integrations.batching.prompt_caches import is_list
from paged_kv.integrations.cache_library import LayerCache, Paged
from paged_kv.integrations.mlx_lm_internals import let_load
from paged_kv.integrations.model_hooks import Replacements
from paged_kv.integrations.states.one_by_one import SeparateCaches
from paged_kv.steps.read import PagedKeys


class IndexedLayer(CacheList):
    """The cache of a layer of qwen4_exp or minimax_m3_vl: that of its keys and values, in pages,
    and mlx-vlm's own, of which the index alone is used."""

    caches: tuple[Any, ...]

    @property
    def offset(self) -> Any:
        return self.caches[0].offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self.caches[0].update_and_fetch(keys, values)

    def make_mask(self, *args: Any, **options: Any) -> Any:
        return self.caches[0].make_mask(*args, **options)

    def extract(self, idx: int) -> CacheList:
        return type(self)(*[each.extract(idx) for each in self.caches])


class Qwen4Layer(IndexedLayer):
    """A layer of qwen4_exp."""

    def update_indexer(self, keys: mx.array, positions: mx.array) -> Any:
        """Append the index keys [1, S, dim] of the next S tokens and their positions, [1, S] or
        [3, 1, S]; returns those of all."""
        return self.caches[1].update_indexer(keys, positions)

    def is_trimmable(self) -> bool:
        return False  # other layers of the model are recurrent

    @property
    def index_block_keys(self) -> Any:
        """Of each 4 tokens, [1, 1, blocks, dim]."""
        return self.caches[1].index_block_keys

    @index_block_keys.setter
    def index_block_keys(self, keys: mx.array) -> None:
        self.caches[1].index_block_keys = keys

    @property
    def index_block_ratio(self) -> Any:
        """How many tokens a block has."""
        return self.caches[1].index_block_ratio

    @index_block_ratio.setter
    def index_block_ratio(self, ratio: int) -> None:
        self.caches[1].index_block_ratio = ratio


class MiniMaxLayer(IndexedLayer):
    """A layer of minimax_m3_vl. What is trimmed of its pages leaves the index with the next
    step."""

    def is_trimmable(self) -> Any:
        return self.caches[0].is_trimmable()

    def trim(self, n: int) -> Any:
        return self.caches[0].trim(n)

    def update_index_and_fetch(self, keys: mx.array) -> Any:
        """Append the index keys [1, heads, S, dim] of the S tokens that were written last; returns
        those of all."""
        index = self.caches[1]
        index.index_offset = min(index.index_offset, self.caches[0].size() - keys.shape[2])
        return index.update_index_and_fetch(keys)


let_load(Qwen4Layer)
let_load(MiniMaxLayer)


class Pools(PoolingCache):  # type: ignore[misc]  # mlx-vlm's
    """mlx-vlm's cache of pooled index keys, which copies what open groups are made of before it
    writes to it: an earlier state of the cache may hold the same arrays."""

    buf_kv: Any
    buf_gate: Any

    def accumulate_windows(self, kv: mx.array, gate: mx.array, offset: Any) -> Any:
        if self.buf_kv is not None:
            self.buf_kv, self.buf_gate = mx.array(self.buf_kv), mx.array(self.buf_gate)
        return super().accumulate_windows(kv, gate, offset)


class NoProjections(KVCache):  # type: ignore[misc]  # mlx-vlm's
    """Stands for the keys and values of all heads that glm5_next projects from the latents of a
    prompt, and keeps up to 32,768 of: 64 KiB a token and layer, beside latents of 1 KiB. None are
    kept, and the model projects latents again in each step of a prompt."""

    def size(self) -> int:
        return -1  # no number of tokens, so the model never finds those that it looks for


def indexed_layer(kind: type[IndexedLayer], stock: Any, paged: Paged) -> Any:
    """The cache of a layer of qwen4_exp or minimax_m3_vl, which takes the place of mlx-vlm's."""
    if isinstance(stock, ArraysCache):
        return SeparateCaches(stock)
    return paged(stock) if type(stock) is KVCache else kind(paged(stock), SeparateCaches(stock))


def glm5_layer(stock: Any, paged: Paged) -> Any:
    """The cache of a layer of glm5_next, which takes the place of mlx-vlm's: latents, and behind
    those the flags and pools of an indexer, if the layer has one, and projections."""
    if not is_list(stock):
        return SeparateCaches(stock)
    latents, *index, _ = stock.caches
    kept = [Pools(each.ratio) if isinstance(each, PoolingCache) else each for each in index]
    return CacheList(paged(latents), *map(SeparateCaches, (*kept, NoProjections())))


INDEXED: dict[str, LayerCache] = {
    "glm5_next": glm5_layer,
    "minimax_m3_vl": partial(indexed_layer, MiniMaxLayer),
    "qwen4_exp": partial(indexed_layer, Qwen4Layer),
}
"""What makes a layer's cache, by the models' folders."""


@cache
def qwen4_attention() -> Replacements:
    """What takes the place of qwen4_exp's attention to chosen blocks."""
    from mlx_vlm.models.qwen4_exp import qsa_kernel

    stock = qsa_kernel.dispatch_qsa_attention

    def attend(
        queries: mx.array, keys: Any, values: Any, blocks: mx.array, ends: mx.array, **options: Any
    ) -> Any:
        if not isinstance(keys, PagedKeys) or options["mask"] is not None:
            return stock(queries, keys, values, blocks, ends, **options)
        cached, scale, size = options["cache"], options["scale"], options["block_size"]
        length, is_decode = keys.shape[2], queries.shape[2] == 1
        if length // size <= blocks.shape[2]:  # all are chosen
            mask = None if is_decode else "causal"
            return paged_attention(queries, keys, values, cached, scale, mask)
        if is_decode:
            # The tokens of the chosen blocks, and those behind the last whole block.
            begins = mx.sort(blocks[:, 0], axis=-1)[..., None] * size
            whole = (begins + mx.arange(size)).reshape(1, -1)
            rest = mx.arange(length - length % size, length)[None]
            tokens = mx.concatenate([whole, rest], axis=1)[:, None, :, None]
            chosen = keys.taken_along(tokens, 2), values.taken_along(tokens, 2)
            return paged_attention(queries, *chosen, cached, scale, None)
        return stock(queries, *keys.read.gather(), blocks, ends, **options)

    return Replacements({stock: attend})


@cache
def minimax_attention() -> Replacements:
    """What takes the place of minimax_m3_vl's attention by a kernel, which Metal alone has: it
    reads arrays of all keys and values."""
    from mlx_vlm.models.minimax_m3_vl import language

    stock = language._minimax_m3_sparse_prefill_attention

    def attend(queries: mx.array, keys: Any, values: Any, *more: Any) -> Any:
        if isinstance(keys, PagedKeys) and mx.default_device() == mx.gpu:
            keys, values = keys.read.gather()
        return stock(queries, keys, values, *more)

    return Replacements({stock: attend})


OWN_ATTENTION = {"minimax_m3_vl": minimax_attention, "qwen4_exp": qwen4_attention}
"""What makes replacements of functions for attention of the models' own, by the models' folders."""
