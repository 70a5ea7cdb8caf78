"""What `paged-kv bench` compares: mlx-lm's caches and pages with the same random numbers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from paged_kv.cache.paged_kv_cache import PagedKVCache
from paged_kv.checks import counted
from paged_kv.integrations.batching.prompt_caches import leaves
from paged_kv.integrations.bench.turns import Measurement, Skipped, compared, seconds
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.prompt_cache_hook import stock_make_prompt_cache
from paged_kv.kernels.pages.memory import recommended_bytes

Outcome = Measurement | Skipped
Caches = list[Any]

ROWS = (1, 8)
PROMPT_TOKENS = 512
SUFFIX_TOKENS = 32
CHUNK_TOKENS = 256


class BenchSizes(NamedTuple):
    """How much to measure: tokens that decoding follows, tokens of a fork and of a shared prefix,
    and about how many seconds one comparison may take."""

    contexts: tuple[int, ...]
    prefix: int
    part_s: float


WHOLE = BenchSizes((256, 4096, 32_768), prefix=4096, part_s=12.0)
QUICK = BenchSizes((256, 4096), prefix=1024, part_s=3.0)


class Bench:
    """Compares both kinds of caches of a model of mlx-lm; a factory makes the pages."""

    def __init__(self, model: Any, factory: PagedCacheFactory, sizes: BenchSizes) -> None:
        self._model, self._factory, self._sizes = model, factory, sizes
        self._makers: tuple[Callable[[], Caches], ...] = (
            lambda: stock_make_prompt_cache(model),
            factory.make_cache,
        )
        known = self._makers[0]()
        self._compute(known, 1, 1)
        self._shapes: dict[int, tuple[mx.array, mx.array]] = {}
        self._bytes_per_token = 0  # of keys and values, in layers without a window
        for number, cache in enumerate(leaves(known)):
            if isinstance(cache, KVCache | RotatingKVCache | ChunkedKVCache):
                keys, values = (each[..., :1, :] for each in cache.state[:2])
                self._shapes[number] = keys, values
                self._bytes_per_token += isinstance(cache, KVCache) * (keys.nbytes + values.nbytes)

    def outcomes(self) -> Iterator[Outcome]:
        """All comparisons, in the order of the report."""
        if self._factory.pool.rows:
            yield Skipped("decode, fork", "layers that append rows are not filled without a model")
        else:
            for context in self._sizes.contexts:
                for rows in ROWS:
                    yield from self._decode(context, rows)
            yield self._fork()
        yield from self._prefill()
        yield self._shared_prefix()

    def _decode(self, context: int, rows: int) -> Iterator[Outcome]:
        """A step of one token a row, and the memory of keys and values."""
        name = f"decode at {context:,}, {counted(rows, 'row')}"
        needed = 2 * context * rows * self._bytes_per_token  # of both kinds
        if needed > recommended_bytes():
            yield Skipped(name, f"it needs {needed / 1e9:.1f} GB for keys and values")
            return
        gc.collect()
        before = self._factory.stats().bytes_held
        try:
            both = self.filled(context, rows)
        except ValueError as error:
            yield Skipped(name, str(error))
            return
        yield self._compared(name, lambda kind: self._compute(both[kind], rows, 1))
        held = sum(cache.nbytes for cache in both[0])
        ours = self._factory.stats().bytes_held - before
        yield Measurement(f"{name}: keys and values held", "bytes", held, ours, held / max(1, ours))

    def _prefill(self) -> Iterator[Outcome]:
        """A prompt on empty caches, and the peak of memory beside what was there."""

        def work(kind: int) -> None:
            self._compute(self._makers[kind](), 1, PROMPT_TOKENS)

        def peak(kind: int) -> float:
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            work(kind)
            return float(mx.get_peak_memory() - before)

        name = f"prefill of {PROMPT_TOKENS:,}"
        yield self._compared(name, work)
        stock, ours = peak(0), peak(1)
        yield Measurement(f"{name}: peak memory", "bytes", stock, ours, stock / max(1.0, ours))

    def _fork(self) -> Outcome:
        """A copy of a cache, and its first token."""
        both = self.filled(self._sizes.prefix)
        name = f"fork of {self._sizes.prefix:,} and a token"
        return self._compared(name, lambda kind: self._compute(copy.deepcopy(both[kind]), 1, 1))

    def _shared_prefix(self) -> Outcome:
        """A prompt that begins like an earlier one, until its first token: mlx-lm copies the cache
        that its server has kept, pages are found by their tokens."""
        prefix, most_s = self._sizes.prefix, self._sizes.part_s
        name = f"prompt of {prefix + SUFFIX_TOKENS:,} whose first {prefix:,} are cached"
        stock, paged = (make() for make in self._makers)
        chunks = prefix // CHUNK_TOKENS
        taken = seconds(lambda: self._compute(self._makers[0](), 1, CHUNK_TOKENS)) * chunks
        if taken > most_s:
            return Skipped(name, f"to read the prefix twice takes about {2 * taken:.0f} s")
        for caches in (stock, paged):
            for _ in range(chunks):
                self._compute(caches, 1, CHUNK_TOKENS)
        self._factory.insert_cache([1] * prefix, paged)

        def find(kind: int) -> None:
            if kind == 0:
                self._compute(copy.deepcopy(stock), 1, SUFFIX_TOKENS)
                return
            found, cached = self._factory.fetch_cache([1] * (prefix + SUFFIX_TOKENS))
            self._compute(found, 1, prefix + SUFFIX_TOKENS - cached)

        return self._compared(name, find)

    def _compared(self, name: str, work: Callable[[int], None]) -> Outcome:
        """Both kinds of caches in turns: mlx-lm's, 0, and pages, 1."""
        return compared(name, lambda: work(0), lambda: work(1), self._sizes.part_s)

    def _compute(self, caches: Caches, rows: int, tokens: int) -> None:
        logits = self._model(mx.ones((rows, tokens), dtype=mx.int32), cache=caches)
        mx.eval(logits[:, -1])

    def filled(self, tokens: int, rows: int = 1) -> tuple[Caches, Caches]:
        """Caches of mlx-lm and pages, whose rows hold random keys and values of `tokens` tokens,
        and one token that the model has computed. Rows share no pages.

        Raises:
            ValueError: mlx-lm has no batches of a cache of this model.
        """
        both = []
        for make in self._makers:
            singles = [make() for _ in range(rows)]
            for caches in singles:
                self._fill(caches, tokens)
            both.append(singles[0] if rows == 1 else list(map(_merged, *singles)))
            self._compute(both[-1], rows, 1)
        return both[0], both[1]

    def _fill(self, caches: Caches, tokens: int) -> None:
        flat = list(leaves(caches))
        for number, shapes in self._shapes.items():
            cache, key = flat[number], mx.random.key(number)
            for start in range(0, tokens, CHUNK_TOKENS):
                count = min(CHUNK_TOKENS, tokens - start)
                key, *given = mx.random.split(key, 3)
                keys, values = (
                    mx.random.normal((*each.shape[:2], count, each.shape[3]), each.dtype, key=one)
                    for each, one in zip(shapes, given, strict=True)
                )
                if isinstance(cache, PagedKVCache):
                    written, _ = cache.batch.append(cache.layer, keys, values)
                    written.read.leave_unread()  # else it counts as gathered outside of a model
                else:
                    mx.eval(cache.update_and_fetch(keys, values))


def _merged(*rows: Any) -> Any:
    if not hasattr(rows[0], "merge"):
        raise ValueError(f"mlx-lm has no batches of {type(rows[0]).__name__}")
    return rows[0].merge(list(rows))
