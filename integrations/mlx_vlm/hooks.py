"""Names mlx-vlm's cache classes, and replaces its functions that make and share prompt caches, for
models with an installed factory.

`generate` and `stream_generate` call `make_prompt_cache`. `batch_generate` and the server build
their batches with `_make_cache`, which asks for each cache's class and knows only its own. Its
automatic prefix caching would restore its own classes, and a chat's next turn may have to trim more
than a ring of pages can take back. Its quantisation of caches is refused where they are pages.

Some models look at the padding of mlx-vlm's batches themselves: `LeftPaddedCache` is their layer.

Some layers attend only to what an indexer chooses. Their keys and values, or latents, are in pages.
What the indexer keeps beside them stays in mlx-vlm's own caches, one for each sequence, and is a
state of the sequence as those of recurrent layers are:

    qwen4_exp      the keys of the index and their positions, one of each token; and a normalised
                   mean of each 4 keys, which follows from them
    minimax_m3_vl  the keys of the index, one of each token
    glm5_next      a key of the index for each 16 tokens, what the open ones are made of, and which
                   tokens are padding

The models take positions of tokens for columns of their caches, which pages of sequences of unequal
length do not have. So the sequences of a batch are computed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList
from mlx_vlm import apc_adapters
from mlx_vlm.apc_adapters import PrefixCachePlan
from mlx_vlm.generate import ar, common, dispatch
from mlx_vlm.generate.ar import GenerationBatch
from mlx_vlm.models import cache as mlx_vlm_cache
from mlx_vlm.models.cache import ArraysCache, ChunkedKVCache, KVCache, PoolingCache, RotatingKVCache

from paged_kv.cache.paged_kv_cache import PagedChunkedKVCache, PagedKVCache
from paged_kv.integrations.attention_hook import paged_attention
from paged_kv.integrations.batching.prompt_caches import is_list, paged_caches
from paged_kv.integrations.cache_library import (
    CacheLibrary,
    LayerCache,
    Paged,
    language_model,
    model_file,
)
from paged_kv.integrations.mlx_lm_internals import let_load
from paged_kv.integrations.model_hooks import Hooks, Replacements
from paged_kv.integrations.prompt_cache_hook import installed_factory
from paged_kv.integrations.states.one_by_one import SeparateCaches, is_separate
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.steps.progress import NO_PADDING, Padding
from paged_kv.steps.read import PagedKeys

stock_make_prompt_cache: Callable[..., list[Any]] = mlx_vlm_cache.make_prompt_cache
_stock_make_batch: Callable[..., list[Any]] = ar._make_cache
_stock_extend = GenerationBatch.extend
_stock_plan = apc_adapters.build_prefix_cache_plan
_stock_trim_amount: Callable[..., int | None] = dispatch._prefix_cache_trim_amount

REFUSAL = (
    "this model looks for the padding of a batch among its keys, and pages hold no padding: give "
    "it prompts one at a time, or of one length, or use mlx-vlm's own caches"
)


def make_prompt_cache(model: Module, max_kv_size: int | None = None) -> list[Any]:
    """mlx-vlm's function of this name; a model's installed factory makes its caches instead."""
    factory = installed_factory(model)
    if factory is None:
        return stock_make_prompt_cache(model, max_kv_size)
    return factory.make_cache(max_kv_size)


def make_batch_cache(
    model: Module, left_padding: list[int], kv_bits: float | None = None, **options: Any
) -> list[Any]:
    """mlx-vlm's `_make_cache`: a prompt cache for a batch, one row for each number.

    Raises:
        ValueError: mlx-vlm is to quantise the caches, which are pages.
    """
    factory = installed_factory(model)
    if factory is None:
        return _stock_make_batch(model, left_padding, kv_bits=kv_bits, **options)
    require_no_kv_bits(kv_bits)
    rows = [factory.make_cache() for _ in left_padding]
    if is_separate(model, rows[0]):
        if len(rows) > 1:
            raise NotImplementedError(REFUSAL)
        return rows[0]
    stock = _stock_make_batch(model, left_padding)
    merged = partial(padded_batch, model_file(model), left_padding=left_padding)
    return [_batch(list(row), own, merged) for own, *row in zip(stock, *rows, strict=True)]


stock_maybe_quantize: Callable[..., None] = common.maybe_quantize_kv_cache


def maybe_quantize_kv_cache(
    prompt_cache: list[Any], quantized_kv_start: int, kv_group_size: int, kv_bits: Any, **more: Any
) -> None:
    """mlx-vlm's function of this name, for caches that are not pages.

    Raises:
        ValueError: it is to quantise pages.
    """
    if paged_caches(prompt_cache):
        require_no_kv_bits(kv_bits)
    stock_maybe_quantize(prompt_cache, quantized_kv_start, kv_group_size, kv_bits, **more)


def require_no_kv_bits(kv_bits: float | None) -> None:
    """Raise ValueError if mlx-vlm is to quantise caches, which are pages."""
    if kv_bits is not None:
        raise ValueError(
            f"kv_bits={kv_bits} is for mlx-vlm's own caches, and a paged_kv factory is installed "
            "for this model: leave it out, and make the factory with page_format='q8' or 'q4'"
        )


def _batch(rows: list[Any], stock: Any, merged: Callable[[list[Any]], PagedKVCache]) -> Any:
    """One layer of all rows: paged caches merged, and mlx-vlm's own in the place of others."""
    if is_list(stock):
        inner = zip(stock.caches, *(row.caches for row in rows), strict=True)
        return type(stock)(*(_batch(list(row), own, merged) for own, *row in inner))
    # A layer that attends by chunks makes its mask of one sequence.
    if not isinstance(rows[0], PagedKVCache) or isinstance(rows[0], PagedChunkedKVCache):
        return stock
    return merged(rows)


def extend(batch: GenerationBatch, other: GenerationBatch) -> None:
    """GenerationBatch's method of this name: rows of another batch join this one.

    Raises:
        NotImplementedError: the model takes the columns of its keys for positions, which pages of
            rows of unequal length have not.
    """
    is_paged = installed_factory(batch.model) is not None
    if is_paged and batch.uids and other.uids and model_file(batch.model) in {"inkling", *INDEXED}:
        raise NotImplementedError(REFUSAL)
    _stock_extend(batch, other)


def build_prefix_cache_plan(model: Module, overrides: Any = None) -> PrefixCachePlan:
    """mlx-vlm's function of this name; its automatic prefix caching (APC) leaves a model alone
    whose caches are pages: it would give it caches of its own."""
    if installed_factory(language_model(model)) is None:
        return _stock_plan(model, overrides)
    warn_once(
        "mlx-vlm's automatic prefix caching (APC) is off for models with a paged_kv factory: it "
        "keeps copies of mlx-vlm's own caches; fetch_cache() and insert_cache() share pages"
    )
    return PrefixCachePlan()


def prefix_cache_trim_amount(prompt_cache: list[Any], prefix_len: int) -> int | None:
    """mlx-vlm's function of this name: how many tokens to trim from the cache of a chat's last
    turn, or None if it cannot be trimmed so far, as rings of pages may not."""
    amount = _stock_trim_amount(prompt_cache, prefix_len)
    if amount and not all(cache.can_trim(amount) for cache in paged_caches(prompt_cache)):
        return None
    return amount


class _PaddingColumns:
    """Stands for the number of columns of padding, which pages do not hold. Models may ask whether
    there are such; to count them raises."""

    def __getitem__(self, index: Any) -> NoReturn:
        raise NotImplementedError(REFUSAL)


class LeftPaddedCache(PagedKVCache):
    """A layer of a batch that mlx-vlm pads on the left.

    Models like Qwen3.5 compute the rows of a padded step one after the other: they `extract` each
    row, give it its tokens without their padding, and `merge` the rows.
    """

    left_padding: Any = _PaddingColumns()
    # Of an extracted row: its padding in the batch, and its tokens before the step.
    _padding_before = 0
    _tokens_before = 0

    def empty(self) -> bool:
        """Also false if padding is announced: models make caches of their own for the rows of an
        empty batch."""
        paddings = [each.progress(self.layer).padding for each in self.sequences]
        return super().empty() and not any(each.left for each in paddings)

    def extract(self, idx: int) -> PagedKVCache:
        """A fork of one sequence, as a cache of its own, whose next token is not padding."""
        row = super().extract(idx)
        assert isinstance(row, LeftPaddedCache)
        (fork,) = row.sequences
        row._tokens_before, _, padding = fork.progress(self.layer)
        row._padding_before = padding.left
        fork.prepare(self.layer, NO_PADDING)
        return row

    @classmethod
    def merge(cls, caches: list[PagedKVCache]) -> PagedKVCache:
        """A batch of forks of all caches' sequences; see `PagedKVCache.merge`.

        Extracted rows whose step ended within their padding keep the rest of it.
        """
        merged = super().merge(caches)
        sources = [cache for cache in caches for _ in cache.sequences]
        rows = [
            (source, sequence)
            for source, sequence in zip(sources, merged.sequences, strict=True)
            if isinstance(source, LeftPaddedCache)
        ]
        steps = ((row, row.size() - row._tokens_before) for row, _ in rows)
        # As many as the step had, of rows that took tokens.
        columns = max((row._padding_before + new for row, new in steps if new), default=0)
        for row, sequence in rows:
            if row._padding_before > columns:
                sequence.prepare(merged.layer, Padding(left=row._padding_before - columns))
        return merged


class MaskingCache(LeftPaddedCache):
    """A layer for models that only mask columns of hidden states by the padding, as zaya1_vl does.
    Such a batch has as many columns as its longest sequence has tokens."""

    @property
    def left_padding(self) -> mx.array:
        """The padding before each sequence, [B]."""
        offsets = mx.array(self.offset).reshape(-1)
        return mx.max(offsets) - offsets


def padded_batch(folder: str, rows: list[PagedKVCache], left_padding: list[int]) -> PagedKVCache:
    """One layer of a batch of new sequences, each after so many columns of padding, of which one
    has none. `folder` is the model's in mlx-vlm."""
    merged = rows[0].merge(rows)
    if not any(left_padding):
        return merged
    # zaya1_vl needs the padding for hidden states alone.
    kind = MaskingCache if folder == "zaya1_vl" else LeftPaddedCache
    padded = kind(merged.pool, merged.layer, merged.sequences)
    padded.prepare(left_padding=left_padding)
    return padded


class IndexedLayer(CacheList):
    """The cache of a layer of qwen4_exp or minimax_m3_vl: that of its keys and values, in pages,
    and mlx-vlm's own, of which the index alone is used."""

    caches: tuple[PagedKVCache, Any]

    @property
    def offset(self) -> int | mx.array:
        return self.caches[0].offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.caches[0].update_and_fetch(keys, values)

    def make_mask(self, *args: Any, **options: Any) -> Any:
        return self.caches[0].make_mask(*args, **options)

    def extract(self, idx: int) -> CacheList:
        return type(self)(*[each.extract(idx) for each in self.caches])


class Qwen4Layer(IndexedLayer):
    """A layer of qwen4_exp."""

    def update_indexer(self, keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Append the index keys [1, S, dim] of the next S tokens and their positions, [1, S] or
        [3, 1, S]; returns those of all."""
        all_so_far: tuple[mx.array, mx.array] = self.caches[1].update_indexer(keys, positions)
        return all_so_far

    def is_trimmable(self) -> bool:
        return False  # other layers of the model are recurrent

    @property
    def index_block_keys(self) -> mx.array | None:
        """Of each 4 tokens, [1, 1, blocks, dim]."""
        keys: mx.array | None = self.caches[1].index_block_keys
        return keys

    @index_block_keys.setter
    def index_block_keys(self, keys: mx.array) -> None:
        self.caches[1].index_block_keys = keys

    @property
    def index_block_ratio(self) -> int | None:
        """How many tokens a block has."""
        ratio: int | None = self.caches[1].index_block_ratio
        return ratio

    @index_block_ratio.setter
    def index_block_ratio(self, ratio: int) -> None:
        self.caches[1].index_block_ratio = ratio


class MiniMaxLayer(IndexedLayer):
    """A layer of minimax_m3_vl. What is trimmed of its pages leaves the index with the next
    step."""

    def is_trimmable(self) -> bool:
        return self.caches[0].is_trimmable()

    def trim(self, n: int) -> int:
        return self.caches[0].trim(n)

    def update_index_and_fetch(self, keys: mx.array) -> mx.array:
        """Append the index keys [1, heads, S, dim] of the S tokens that were written last; returns
        those of all."""
        index = self.caches[1]
        index.index_offset = min(index.index_offset, self.caches[0].size() - keys.shape[2])
        all_so_far: mx.array = index.update_index_and_fetch(keys)
        return all_so_far


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

MLX_VLM = CacheLibrary(
    name="mlx-vlm",
    make_prompt_cache=stock_make_prompt_cache,
    full=KVCache,
    window=RotatingKVCache,
    chunked=ChunkedKVCache,
    unpaged=frozenset({"mlx_vlm.models.cache.ArraysCache"}),
    indexed=INDEXED,
    own_attention=OWN_ATTENTION,
    hooks=Hooks(
        {
            stock_make_prompt_cache: make_prompt_cache,
            _stock_make_batch: make_batch_cache,
            stock_maybe_quantize: maybe_quantize_kv_cache,
            _stock_plan: build_prefix_cache_plan,
            _stock_trim_amount: prefix_cache_trim_amount,
        },
        [(GenerationBatch, extend)],
    ),
)
