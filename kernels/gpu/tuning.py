"""Sets the tuning constants of the GPU kernels, each with its reason.

Those of CUDA that say so were measured on an H200, by benches/cuda_kernels.py. No Mac has run these
kernels yet. The other reasons are arithmetic on published figures of the devices;
kernels/metal/*.metal and kernels/cuda/*.cu do it in full.
"""

from math import ceil
from typing import NamedTuple

LANES = 32

# Simdgroups of a threadgroup that writes, copies or gathers slots, one each.
SLOT_SIMDGROUPS = 4

# Query heads of a simdgroup, which read keys and values once for all. Each head costs a lane
# v_dim / 32 floats of sums: 8 heads of 128 take 32 registers. With 16 sums of products, 8 numbers
# of two keys, and addresses that is about 90 of the 128 registers that let an Apple core run 24
# simdgroups at full size. Of 512 numbers 4 heads have as many sums as 8 of 256.
MOST_ROWS = 8
MOST_SUMS = 64

# Bytes of queries that a threadgroup of decode keeps. With the weights of 8 simdgroups, 1 KiB each,
# two threadgroups fit an Apple core's 60 KiB. One threadgroup may have at most 32 KiB.
QUERY_BYTES = 16 << 10

# Simdgroups of a threadgroup of decode, which share a part of a sequence's context. A context of
# one part takes one launch, and more simdgroups allow a longer part. With 128 registers per thread,
# 8 simdgroups take 128 of an Apple core's 208 KiB; 16 would not fit. Each needs memory for the
# values of a query head, which with the queries must fit the 32 KiB of a threadgroup: of 512
# numbers there are 4, so that 2 threadgroups fit a core's memory, and its registers.
DECODE_SIMDGROUPS = 8
VALUE_BYTES = 8 << 10

# Simdgroups that are worth having at once: 40 cores with 24 each (M3 Max), or 132 multiprocessors
# with 16 warps each (H200). There 8 warps each read keys and values at half of the bandwidth of a
# copy, and 16 at nine tenths.
SIMDGROUPS_AT_ONCE = {"metal": 1024, "cuda": 2048}

# The share of waves that is filled well, and the most waves. A part more costs its results, 2 % of
# what it reads.
ENOUGH, MOST_WAVES = 0.9, 4

# The least number of tokens of a part that each simdgroup reads, in tiles one after the other. With
# 128, a part has at least 1,024 tokens if the GQA group size is at most 8, and outputs (v_dim + 2)
# * 4 bytes per query head, written once and read once: under 2 % of its keys and values in 16 bits.
# On an H200 a tile takes longer than a launch: a row of 1,024 tokens took 30 us with 128, and 14
# with 32, the merge included.
LEAST_TOKENS = {"metal": 128, "cuda": 32}

TILE = 32  # tokens that a simdgroup reads at a time; divides a page


# Reads of values that a lane of decode asks for at once, before it waits for memory. On CUDA more,
# or more of a key than one or two times 16 bytes, takes so many registers that a multiprocessor
# runs 8 warps instead of 16. On Metal 8 reads of 4 numbers of 16 bits take 16 registers.
READS_AT_ONCE = {"metal": 8, "cuda": 16}


def values_ahead(dialect: str, v_dim: int) -> int:
    """Tokens of which a simdgroup asks for values at once; divides a tile. Of one token a lane
    makes a read for each 64 or 128 numbers: see kernels/gpu/decode.h."""
    reads = ceil(v_dim / (LANES * (2 if v_dim % 128 else 4)))
    return 1 << (READS_AT_ONCE[dialect] // reads).bit_length() - 1


def query_rows(gqa_group_size: int, v_dim: int) -> int:
    """Query heads of one KV head per simdgroup."""
    most = min(MOST_ROWS, MOST_SUMS * LANES // v_dim)
    return ceil(gqa_group_size / ceil(gqa_group_size / most))


def decode_simdgroups(v_dim: int) -> int:
    """Simdgroups of a threadgroup."""
    return min(DECODE_SIMDGROUPS, VALUE_BYTES // (v_dim * 4))


def row_blocks(gqa_group_size: int, k_dim: int, v_dim: int, bases: int) -> int:
    """Simdgroups of a threadgroup that read the same keys for different query heads; all but the
    first find the keys in the hardware cache."""
    rows = query_rows(gqa_group_size, v_dim)
    fitting = QUERY_BYTES // (rows * k_dim * 4 * bases)
    return max(1, min(ceil(gqa_group_size / rows), decode_simdgroups(v_dim), fitting))


class DecodeShape(NamedTuple):
    """How threadgroups divide the work of decode.

    Attributes:
        rows: query heads per simdgroup.
        blocks: simdgroups that read the same keys.
        parts: simdgroups that share a part's tiles.
        groups: threadgroups that read the same part.
        tiles: tiles per part.
        splits: parts of a sequence's context (split KV).
    """

    rows: int
    blocks: int
    parts: int
    groups: int
    tiles: int
    splits: int


def decode_shape(
    dialect: str,
    batch: int,
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    longest: int,
    *,
    bases: int,
) -> DecodeShape:
    """The shape for a batch whose longest sequence attends to `longest` tokens, with keys and
    values of `dims` numbers, and queries in `bases` bases."""
    gqa_group_size, v_dim = heads // kv_heads, dims[1]
    rows, blocks = query_rows(gqa_group_size, v_dim), row_blocks(gqa_group_size, *dims, bases)
    parts, groups = decode_simdgroups(v_dim) // blocks, ceil(gqa_group_size / (rows * blocks))
    of_a_part = batch * kv_heads * groups * parts * blocks
    wanted = parts_in_waves(SIMDGROUPS_AT_ONCE[dialect], of_a_part)
    tiles = ceil(max(LEAST_TOKENS[dialect] * parts, ceil(longest / wanted)) / TILE)
    return DecodeShape(rows, blocks, parts, groups, tiles, max(1, ceil(longest / (tiles * TILE))))


def parts_in_waves(at_once: int, of_a_part: int) -> int:
    """Parts of each context whose simdgroups fill whole waves of `at_once`, as few as fill the
    waves well: with one part, 1,280 simdgroups would leave a third of an H200 idle; 3 parts take
    two waves, and fill them."""

    def filled(waves: int) -> float:
        return min(ENOUGH, waves * at_once // of_a_part * of_a_part / (waves * at_once))

    return max(1, max(range(1, MOST_WAVES + 1), key=filled) * at_once // of_a_part)


# Simdgroups of a threadgroup that scores summaries, which share its queries. Each takes a page, 4
# KiB of summaries of 128 numbers in a KV head: 32 KiB for 8, beside 1 KiB of 4 queries.
SCORE_SIMDGROUPS = 8


def scored_rows(gqa_group_size: int, k_dim: int) -> int:
    """Query heads of one KV head that a threadgroup scores summaries for. It keeps them and half of
    their squares."""
    most = min(MOST_ROWS, QUERY_BYTES // (2 * k_dim * 4))
    return ceil(gqa_group_size / ceil(gqa_group_size / most))


# Query rows of a simdgroup of prefill: the rows of one 8x8 matrix on Metal, and of one 16x16 matrix
# on CUDA. So the 4 simdgroups of a threadgroup have 32 or 64.
SIMDGROUP_ROWS = {"metal": 8, "cuda": 16}
PREFILL_THREADS = 128

# From so many tokens of a step on, MLX's own attention takes keys and values that a kernel gathers
# from pages, where it has a fused kernel for them: heads of at most so many numbers. On an H200,
# cuDNN took a sixth of the time of the kernel that reads pages (2,048 tokens), which does not use
# the matrix operations of that chip. Nothing is known of Metal, and no step is long enough.
GATHERED_STEPS = {"metal": 1 << 30, "cuda": 64}
LARGEST_FUSED_HEAD = 128

# Query rows of a threadgroup that reads pages for several sequences: those of 16 sequences with 4
# query heads to a KV head. Queries, and a tile of 16 or 32 tokens, must fit the 32 KiB that a
# threadgroup may have: 64 queries of 128 numbers and a tile take 26 KiB.
GROUP_ROWS = 64
THREADGROUP_BYTES = 32 << 10
PAD = 8  # numbers behind each row in threadgroup memory


def prefill_threads(dialect: str, v_dim: int) -> int:
    """Threads of a threadgroup that reads pages for a step of one sequence."""
    return PREFILL_THREADS if column_sharers(dialect, v_dim) == 1 else WIDE_THREADS[dialect]


def group_threads(dialect: str, k_dim: int, v_dim: int) -> int:
    """Threads of a threadgroup that reads pages for several sequences."""
    if column_sharers(dialect, v_dim) > 1:
        return WIDE_THREADS[dialect]
    largest = max(k_dim, v_dim)
    tile = (16 if largest > 128 else 32) * (largest + PAD) * 2
    rows = min(GROUP_ROWS, (THREADGROUP_BYTES - tile) // ((k_dim + PAD) * 2))
    simdgroups = rows // SIMDGROUP_ROWS[dialect]
    return LANES * (1 << simdgroups.bit_length() - 1)


# Simdgroups of a threadgroup of latent decode, and the tokens of its tile, one each: 8 tokens of
# 576 floats take 18 of the 32 KiB that a threadgroup may have. Divides a page.
LATENT_SIMDGROUPS = 8

# Query heads of a simdgroup of latent decode. Each takes 34 registers of a lane for latents of 512:
# 18 numbers of its query, and 16 sums. Two keep a lane within 96.
LATENT_ROWS = 2


# Threads of a threadgroup whose simdgroups share the columns of values, because there are too many
# for one, and the most sums of a thread. It reads heads of 512 numbers, or latents for several
# sequences. In both dialects they sum 64 query rows of 512 numbers. That takes 128 of the 208 KiB
# of registers of an Apple core, or of the 256 KiB of an NVIDIA multiprocessor; 128 rows would fit
# neither. An Apple core runs 512 threads of 104 registers, and kernels/gpu/text.py tells its
# compiler so. Nothing tells NVIDIA's: it gave each of 512 threads 168 registers, where 128 fit. It
# gives 256 threads up to 252, and as many as a thread may have, 255, fit.
WIDE_THREADS = {"metal": 512, "cuda": 256}
MATRIX_SUMS = {"metal": 64, "cuda": 128}


def column_sharers(dialect: str, columns: int) -> int:
    """Simdgroups that share the query rows of one matrix, to sum so many columns."""
    return ceil(SIMDGROUP_ROWS[dialect] * columns / (LANES * MATRIX_SUMS[dialect]))


def matrix_rows(dialect: str, threads: int, sharers: int) -> int:
    """Query rows of a threadgroup."""
    return threads // LANES // sharers * SIMDGROUP_ROWS[dialect]


def latent_parts(dialect: str, batch: int, heads: int, longest: int) -> tuple[int, int]:
    """Tiles of a part, and parts of a context of `longest` tokens, for latent decode. A part has a
    multiple of LEAST_TOKENS, so that plans last for many steps."""
    groups = ceil(heads / (LATENT_ROWS * LATENT_SIMDGROUPS))
    at_once, least = SIMDGROUPS_AT_ONCE[dialect], LEAST_TOKENS[dialect]
    wanted = max(1, at_once // (batch * groups * LATENT_SIMDGROUPS))
    tokens = least * ceil(max(1, longest) / (wanted * least))
    return tokens // LATENT_SIMDGROUPS, max(1, ceil(longest / tokens))
