"""Constants of the GPU kernels that were chosen, each with its reason.

None was measured: no Mac and no NVIDIA GPU has run these kernels yet. The reasons are arithmetic
on what is published of the devices; kernels/metal/*.metal and kernels/cuda/*.cu do it in full.
"""

from math import ceil

LANES = 32

# Simdgroups of a threadgroup that writes, copies or gathers rows, one each.
ROW_SIMDGROUPS = 4

# Query heads that share one reading of keys and values in a simdgroup. Each costs a lane v_dim / 32
# floats of sums: 8 heads of 128 are 32 registers, and with 16 sums of products, 8 numbers of two
# keys and addresses about 90 of the 128 that let an Apple core run 24 simdgroups at full size.
MOST_ROWS = 8

# Bytes of queries that a threadgroup of decode keeps: with weights of 4 simdgroups, 1 KiB each,
# three threadgroups fit an Apple core's 60 KiB, and 32 KiB is what one may have.
QUERY_BYTES = 16 << 10

# Simdgroups of a threadgroup that decodes.
DECODE_SIMDGROUPS = 4

# Parts of all rows' contexts together that are worth having: 40 cores with 24 simdgroups each
# (M3 Max), or 132 multiprocessors with 8 warps each (H200), each with one.
DECODE_PARTS = 1024

# Tokens of a part at least. A part leaves (v_dim + 2) * 4 bytes for each query head, written once
# and read once; 128 tokens of 16 bits are 2 * 128 * k_dim * 2 bytes. With 4 heads to a KV head
# that is 6 % more to move, with 8 it is 12 %.
LEAST_PART_TOKENS = 128

TILE = 32  # tokens that a simdgroup reads at a time; divides a page


def query_rows(ratio: int) -> int:
    """Query heads of one KV head that a simdgroup takes."""
    return ceil(ratio / ceil(ratio / MOST_ROWS))


def row_blocks(ratio: int, k_dim: int, bases: int) -> int:
    """Simdgroups of a threadgroup that read the same keys for different query heads, so that all
    but the first find them in the cache."""
    rows = query_rows(ratio)
    fitting = QUERY_BYTES // (rows * k_dim * 4 * bases)
    return max(1, min(ceil(ratio / rows), DECODE_SIMDGROUPS, fitting))


def split_tiles(longest: int, others: int) -> int:
    """Tiles of a part, where the longest row sees so many tokens and `others` simdgroups would run
    if rows had one part each."""
    wanted = max(1, DECODE_PARTS // others)
    tokens = max(LEAST_PART_TOKENS, ceil(longest / wanted))
    return ceil(tokens / TILE)


# Query rows of a threadgroup of prefill: 4 simdgroups with one 8x8 matrix each on Metal, or with
# one 16x16 matrix each on CUDA, where 64 rows also read keys and values half as often.
PREFILL_ROWS = {"metal": 32, "cuda": 64}
PREFILL_THREADS = 128
