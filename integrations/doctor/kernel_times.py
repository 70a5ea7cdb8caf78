"""Times the kernels that read pages, and plain operations on equal pages, in turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import mlx.core as mx

from paged_kv.integrations.bench.turns import in_turns, ratio
from paged_kv.kernels.backends import backend_for
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.choice import LEAST_READ_TOKENS
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import KEY_FORMATS
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE, page_format_named
from paged_kv.kernels.partial_backend import (
    CHOSEN_DECODE,
    DECODE,
    GATHER,
    LATENT_DECODE,
    PREFILL,
    STEP_DECODE,
    WINDOW_DECODE,
    kernel_name,
)
from paged_kv.kernels.plain.plain_backend import PlainBackend
from paged_kv.kernels.self_test import TOLERANCES

KV_HEADS, GQA_GROUP_SIZE, DIM = 4, 4, 128
REPETITIONS = 7
# A kernel that is slower by less than this may be left in: the next run may say the opposite.
LEAST_LOSS = 1.1


class Size(NamedTuple):
    """What is timed: rows, tokens of each one's context, and tokens of a prefill."""

    rows: int
    context: int
    prefill: int

    @property
    def window(self) -> int:
        return self.context // 2

    @property
    def read_tokens(self) -> int:
        return max(LEAST_READ_TOKENS, self.context // 4)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.context // PAGE_SIZE)


# A GPU that has little to do takes equally long for all.
ON_CPU, ON_GPU = Size(2, 1024, 32), Size(8, 8192, 512)


@dataclass(frozen=True)
class KernelTime:
    """A kernel beside plain operations, or beside what `other` says.

    Attributes:
        name: the kernel's; see `kernel_name`.
        kernel_s: the median of its times, in seconds.
        plain_s: the median of theirs.
        ratio: the median of the ratios within a turn, the kernel's time to theirs.
        least_ratio: the least of these ratios.
        other: what it is compared with.
    """

    name: str
    kernel_s: float
    plain_s: float
    ratio: float
    least_ratio: float
    other: str = "plain operations"

    @property
    def is_slow(self) -> bool:
        """Whether the other is quicker in every turn: on a busy machine, equal works differ
        by more than this in some of them."""
        return self.least_ratio > LEAST_LOSS

    def __str__(self) -> str:
        verdict = "SLOW" if self.is_slow else "time"
        times = f"{1e3 * self.kernel_s:.2f} ms, {self.other} {1e3 * self.plain_s:.2f} ms"
        return f"{verdict}  {self.name:<32} {times}"


def kernel_times(backend: Backend, without: Collection[str] = ()) -> Iterator[KernelTime]:
    """Time each kernel that reads pages, except those named in `without`."""
    size = ON_GPU if backend.name in ("metal", "cuda") else ON_CPU
    for dtype in TOLERANCES:
        for page_format in KEY_FORMATS:
            works = [
                _Reads(each, page_format, dtype, size).works() for each in (backend, PlainBackend())
            ]
            for operation in works[0]:
                name = kernel_name(operation, page_format, dtype)
                if name not in without:
                    kernel, plain = (each[operation] for each in works)
                    yield timed(name, kernel, plain)


def timed(
    name: str,
    kernel: Callable[[], None],
    plain: Callable[[], None],
    other: str = KernelTime.other,
) -> KernelTime:
    """Time two works in turns."""
    ours, theirs = in_turns(kernel, plain, repetitions=REPETITIONS)
    least = min(one / two for one, two in zip(ours, theirs, strict=True))
    return KernelTime(name, median(ours), median(theirs), ratio(ours, theirs), least, other)


class _Reads:
    """Pages of one backend, and the reads of them that are timed."""

    def __init__(self, backend: Backend, page_format: str, dtype: mx.Dtype, size: Size) -> None:
        self.size, self.dtype = size, dtype
        self.metadata = self._metadata(first_page=0 if page_format == "fp16" else self._count)
        self.pages, self.latents = (
            self._written(backend, page_format, heads) for heads in (KV_HEADS, 1)
        )
        self.summarised = self._written(backend, page_format, KV_HEADS, has_summaries=True)

    def works(self) -> dict[str, Callable[[], None]]:
        """Calls that read, by operation."""
        one, many = (self._normal(KV_HEADS * GQA_GROUP_SIZE, n) for n in (1, self.size.prefill))
        return {
            DECODE: lambda: self._attend(one),
            WINDOW_DECODE: lambda: self._attend(one, self.size.window),
            STEP_DECODE: lambda: self._write_and_attend(one),
            CHOSEN_DECODE: lambda: self._choose(one),
            PREFILL: lambda: self._attend(many),
            GATHER: lambda: mx.eval(*self.pages.gather(self.metadata)),
            LATENT_DECODE: lambda: mx.eval(
                self.latents.attend_latent(one, one, self.metadata, Attention(DIM**-0.5))
            ),
        }

    @property
    def _count(self) -> int:
        """Pages of all rows."""
        return self.size.rows * self.size.blocks

    def _metadata(self, first_page: int) -> AttentionMetadata:
        """Pages from `first_page` on, but for the last one of each row, which has 16 bits."""
        size = self.size
        tables = tuple(
            (*range(first_page + last - size.blocks + 1, first_page + last), last)
            for last in range(size.blocks - 1, self._count, size.blocks)
        )
        return AttentionMetadata(tables, (size.context,) * size.rows, (0,) * size.rows)

    def _written(
        self, backend: Backend, page_format: str, heads: int, *, has_summaries: bool = False
    ) -> LayerPages:
        """Pages of 16 bits in one slab, and the same pages recoded in the next one."""
        sizes = heads, DIM, self.dtype
        geometry = LayerGeometry(*sizes, *sizes, has_summaries)
        pages = LayerPages(geometry, backend_for(backend, geometry), self._count)
        pages.map_slab(0, self._count, FP16)
        keys, values = (self._normal(heads, self.size.context) for _ in range(2))
        pages.write(keys, values, self._metadata(first_page=0))
        if page_format != "fp16":
            pages.map_slab(1, self._count, page_format_named(page_format))
            pages.copy({page: self._count + page for page in range(self._count)})
        return pages

    def _attend(self, queries: mx.array, window: int | None = None) -> None:
        mx.eval(self.pages.attend(queries, self.metadata, Attention(DIM**-0.5, window=window)))

    def _choose(self, queries: mx.array) -> None:
        attention = Attention(DIM**-0.5, read_tokens=self.size.read_tokens)
        mx.eval(self.summarised.attend(queries, self.metadata, attention))

    def _write_and_attend(self, queries: mx.array) -> None:
        keys, values = self._normal(KV_HEADS, 1), self._normal(KV_HEADS, 1)
        self.pages.write_later(keys, values, self.metadata)
        self._attend(queries)

    def _normal(self, heads: int, tokens: int) -> mx.array:
        array = mx.random.normal((self.size.rows, heads, tokens, DIM)).astype(self.dtype)
        mx.eval(array)
        return array
