"""Plans the launch that reads the pages which sequences share, once for each group of sequences
(kernels/pages/prefix_groups.py).

The query rows of its threadgroups come from several sequences. For keys and values it is the kernel
of prefill; for latents it is a variant of theirs.
"""

from typing import NamedTuple

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import PageKind, Scores
from paged_kv.kernels.gpu.kernels import DONE, GpuKernels, Launch, Output, launch_of
from paged_kv.kernels.gpu.tuning import (
    LANES,
    LATENT_GROUP_THREADS,
    LATENT_ROWS,
    LATENT_SIMDGROUPS,
    SIMDGROUP_ROWS,
    group_threads,
    latent_sharers,
)
from paged_kv.kernels.pages.prefix_groups import SEQUENCES, PrefixGroups

Groups = tuple[int, int]
"""How many groups read shared pages, and how many places their results have."""


class GroupReader(NamedTuple):
    """A kernel that reads pages for groups of sequences.

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


def reader_of_values(dialect: str, kind: PageKind) -> GroupReader:
    """For keys and values."""
    geometry = kind.geometry
    threads = group_threads(dialect, geometry.k_dim, geometry.v_dim)
    constants = {"K_DIM": geometry.k_dim, "V_DIM": geometry.v_dim, "THREADS": threads}
    flags = [*kind.flags, "IN_GROUPS", "PARTIAL"]
    rows = threads // LANES * SIMDGROUP_ROWS[dialect]
    return GroupReader("prefill", constants, flags, rows, rows, threads, geometry.v_dim)


def reader_of_latents(dialect: str, kind: PageKind) -> GroupReader:
    """For latents and their position keys."""
    geometry, threads = kind.geometry, LATENT_GROUP_THREADS[dialect]
    sharers = latent_sharers(dialect, geometry.k_dim)
    constants = {"K_DIM": geometry.k_dim, "V_DIM": geometry.v_dim, "THREADS": threads}
    constants["SHARERS"] = sharers
    flags = [*kind.flags, "IN_GROUPS", "OF_LATENTS"]
    rows = threads // LANES // sharers * SIMDGROUP_ROWS[dialect]
    alone = LATENT_ROWS * LATENT_SIMDGROUPS
    return GroupReader("latent", constants, flags, rows, alone, threads, geometry.k_dim)


def groups_of(
    groups: PrefixGroups, reader: GroupReader, kind: PageKind, queries: tuple[int, ...]
) -> Groups | None:
    """For queries [B, q_heads, S, k_dim]; None if each sequence is to read all of its pages,
    because no threadgroup holds twice as many queries as one that reads them for a sequence."""
    rows = queries[1] // kind.geometry.k_heads * queries[2]
    return groups.shape if 2 * min(rows, reader.alone) <= reader.rows else None


def prefix_launch(
    kernels: GpuKernels,
    reader: GroupReader,
    groups: Groups,
    kind: PageKind,
    heads: int,
    steps: int,
    scores: Scores,
) -> Launch:
    """Attention of groups to the pages that they share. Its results are float32 [places * q_heads *
    S, dim], weighted values in the plain basis, and float32 [places * q_heads * S, 2]."""
    geometry, (count, places) = kind.geometry, groups
    flags = [*reader.flags, *scores.softcap_flag]
    rows = SEQUENCES * heads // geometry.k_heads * steps
    return launch_of(
        kernels.kernel(reader.operation, geometry.k_dtype, reader.constants, flags),
        (-(-rows // reader.rows), geometry.k_heads, count),
        reader.threads,
        partial_outputs(places * heads * steps, reader.dim),
    )


def partial_outputs(results: int, dim: int) -> list[Output]:
    """Of a kernel whose results are merged: weighted values, then maxima and sums of weights."""
    return [Output((results, dim), mx.float32), Output((results, 2), mx.float32), DONE]
