"""Plans the launch that reads the pages which sequences share, once for each group of sequences
(kernels/pages/prefix_groups.py).

The query rows of its threadgroups come from several sequences. For keys and values it is the kernel
of prefill; for latents it is a variant of theirs.
"""

from typing import NamedTuple

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import PageKind
from paged_kv.kernels.gpu.kernels import DONE, GpuKernels, Launch, Output, launch_of
from paged_kv.kernels.gpu.tuning import (
    LATENT_ROWS,
    LATENT_SIMDGROUPS,
    WIDE_THREADS,
    column_sharers,
    group_threads,
    matrix_rows,
)
from paged_kv.kernels.pages.prefix_groups import SEQUENCES, PrefixGroups

Groups = tuple[int, int]
"""How many groups read shared pages, and how many places their results have."""


class MatrixReader(NamedTuple):
    """A kernel that reads pages on matrix units, for query rows of one sequence or of a group.

    Attributes:
        operation: see `GpuKernels.kernel`, as for `constants` and `flags`.
        rows: query rows of a threadgroup.
        alone: query rows of a threadgroup, at most, where each sequence reads its own pages. As
            many as `rows` stand for any number.
        threads: of a threadgroup.
        dim: numbers of a result.
    """

    operation: str
    constants: dict[str, int]
    flags: list[str]
    rows: int
    alone: int
    threads: int
    dim: int


def reader_of_steps(dialect: str, kind: PageKind, flags: list[str], threads: int) -> MatrixReader:
    """For keys and values, and the steps of each sequence."""
    dim, sharers = kind.geometry.v_dim, column_sharers(dialect, kind.geometry.v_dim)
    flags = [*kind.flags, *flags, *(["WIDE"] if sharers > 1 else [])]
    rows = matrix_rows(dialect, threads, sharers)
    constants = {"THREADS": threads, "SHARERS": sharers}
    return MatrixReader("prefill", constants, flags, rows, rows, threads, dim)


def reader_of_values(dialect: str, kind: PageKind, flags: list[str]) -> MatrixReader:
    """For keys and values, and groups of sequences."""
    threads = group_threads(dialect, kind.geometry.k_dim, kind.geometry.v_dim)
    return reader_of_steps(dialect, kind, [*flags, "IN_GROUPS", "PARTIAL"], threads)


def reader_of_latents(dialect: str, kind: PageKind, flags: list[str]) -> MatrixReader:
    """For latents and their position keys, and groups of sequences."""
    dim, threads = kind.geometry.k_dim, WIDE_THREADS[dialect]
    sharers = column_sharers(dialect, dim)
    flags = [*kind.flags, *flags, "IN_GROUPS", "OF_LATENTS"]
    rows, alone = matrix_rows(dialect, threads, sharers), LATENT_ROWS * LATENT_SIMDGROUPS
    constants = {"THREADS": threads, "SHARERS": sharers}
    return MatrixReader("latent", constants, flags, rows, alone, threads, dim)


def groups_of(
    groups: PrefixGroups, reader: MatrixReader, kind: PageKind, queries: tuple[int, ...]
) -> Groups | None:
    """For queries [B, q_heads, S, k_dim]; None if each sequence is to read all of its pages,
    because no threadgroup holds twice as many queries as one that reads them for a sequence."""
    rows = queries[1] // kind.geometry.k_heads * queries[2]
    return groups.shape if 2 * min(rows, reader.alone) <= reader.rows else None


def prefix_launch(
    kernels: GpuKernels,
    reader: MatrixReader,
    groups: Groups,
    kind: PageKind,
    queries: tuple[int, ...],
) -> Launch:
    """Attention of groups to the pages that they share, of queries [B, q_heads, S, k_dim]. Its
    results are float32 [places * q_heads * S, dim], weighted values in the plain basis, and float32
    [places * q_heads * S, 2]."""
    geometry, (count, places), (_, heads, steps, _) = kind.geometry, groups, queries
    rows = SEQUENCES * heads // geometry.k_heads * steps
    constants = kind.dims | reader.constants
    return launch_of(
        kernels.kernel(reader.operation, geometry.k_dtype, constants, reader.flags),
        (-(-rows // reader.rows), geometry.k_heads, count),
        reader.threads,
        partial_outputs(places * heads * steps, reader.dim),
    )


def partial_outputs(results: int, dim: int) -> list[Output]:
    """Of a kernel whose results are merged: weighted values, then maxima and sums of weights."""
    return [Output((results, dim), mx.float32), Output((results, 2), mx.float32), DONE]
