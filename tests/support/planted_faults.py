"""Faults to plant into correct GPU kernels."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Fault:
    """A change to the text of an operation, and the expected report; empty if only the numbers are
    wrong.

    Attributes:
        writes: whether the kernel that attends writes a token of each row too.
        least_tokens: of a simdgroup's part, if others than usual.
        softcap: of scores, if there is one.
        shares: whether the sequences are those of `SHARING`, which share pages.
        dim: size of heads.
    """

    name: str
    operation: str
    sound: str
    planted: str
    said: str = ""
    dialects: tuple[str, ...] = ("metal",)
    dtype: Any = mx.float16
    queries: int = 1
    lengths: tuple[int, ...] = (70, 33)
    formats: tuple[str, ...] = ("fp16",)
    gqa_group_size: int = 3
    writes: bool = False
    least_tokens: int = 0
    softcap: float | None = None
    shares: bool = False
    dim: int = 64


# Tables and lengths: a sequence that ends in a shared page, one that shares none, two branches.
SHARING = (
    ((9,), (0,), (0, 1, 2), (0, 1, 3), (0, 4, 5), (0, 4, 6)),
    (30, 200, 520, 600, 513, 700),
)
BOTH = ("metal", "cuda")
SOFTCAP = 0.5
MEET = "  threads_meet();\n  DEVICE const int* row = pages.row(number);"
ROW = "  DEVICE const int* row = pages.row(number);"
FAULTS = [
    # Barriers.
    Fault("no barrier", "decode", MEET, ROW, "race", BOTH),
    Fault(
        "a simdgroup's barrier for a threadgroup's",
        "decode",
        MEET,
        f"  lanes_meet();\n{ROW}",
        "race",
        BOTH,
    ),
    Fault(
        "no barrier between lanes",
        "decode",
        "    lanes_meet();\n    // Slots outside",
        "    // Slots outside",
        "race",
        BOTH,
    ),
    Fault(
        "no barrier before memory is used again",
        "decode",
        "first + end, lane, weights);\n    lanes_meet();\n",
        "first + end, lane, weights);\n",
        "race",
        BOTH,
        lengths=(300,),
    ),
    Fault(
        "no barrier before a tile is loaded",
        "prefill",
        "  threads_meet();\n  for (uint i = place.index;",
        "  for (uint i = place.index;",
        "race",
        BOTH,
        queries=9,
    ),
    Fault(
        "a barrier for another memory",
        "decode",
        "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup)",
        "metal::threadgroup_barrier(metal::mem_flags::mem_device)",
        "race",
    ),
    Fault(
        "a barrier that not all threads reach",
        "decode",
        MEET,
        f"  if (place.simdgroup) threads_meet();\n{ROW}",
        "does not reach",
        BOTH,
    ),
    Fault(
        "a return before a barrier",
        "decode",
        MEET,
        f"  if (place.simdgroup) return;\n{MEET}",
        "does not reach",
        BOTH,
    ),
    Fault(
        "lanes that take no part",
        "decode",
        "logit = kept + from_lane_xor(",
        "logit = kept; if (lane != 3) logit = kept + from_lane_xor(",
        "only part of its lanes",
        BOTH,
    ),
    # Memory.
    Fault(
        "a read behind a slab",
        "decode",
        "page + numbers_at + first *",
        "page + 16 * ulong(layout[0]) + numbers_at + first *",
        "out of bounds",
        BOTH,
    ),
    Fault(
        "a read behind the tables",
        "decode",
        "uint(row[ROW_FIELDS + position / PAGE_SIZE])",
        "uint(row[ROW_FIELDS + position / PAGE_SIZE + 64])",
        "out of bounds",
        BOTH,
    ),
    Fault(
        "a write before an output",
        "decode",
        "output + at * V_DIM",
        "output + at * V_DIM - V_DIM",
        "out of bounds",
        BOTH,
    ),
    Fault(
        "a write behind threadgroup memory",
        "decode",
        "weights[token * ROWS + r] = weight;",
        "weights[(token + 1024) * ROWS + r] = weight;",
        "out of bounds",
        BOTH,
    ),
    Fault(
        "a thread's array overrun",
        "decode",
        "for (uint i = 0; i < 2 * ROWS; i++) sums[i] = 0.0f;",
        "float few[2]; for (uint i = 0; i < 2 * ROWS; i++) few[i] = 0.0f, sums[i] = few[i];",
        "outside its array",
        BOTH,
    ),
    Fault(
        "a misaligned load of 16 bytes",
        "decode",
        "load<COUNT * 2>(slot + at, words)",
        "load<COUNT * 2>(slot + at + (at ? 0 : 1), words)",
        "misaligned",
        BOTH,
    ),
    Fault(
        "a misaligned load from threadgroup memory",
        "decode",
        "(SHARED const float4*)(queries + r * K_DIM + at)",
        "(SHARED const float4*)(queries + r * K_DIM + at + (at < 32 ? 1 : 0))",
        "misaligned",
        BOTH,
    ),
    Fault(
        "threadgroup memory that nobody wrote",
        "decode",
        "      if (at < K_DIM) staged[r * K_DIM + at] = x[i];\n",
        "      if (at < K_DIM && at) staged[r * K_DIM + at] = x[i];\n",
        "uninitialised",
        BOTH,
    ),
    Fault("a sum that does not begin at 0", "decode", "values[i] = 0.0f;", ";", "", BOTH),
    Fault(
        "an output that is not whole",
        "decode",
        "if (i * LANES + lane < DIM) to[",
        "if (i * LANES + lane < DIM && lane) to[",
        "unwritten",
        BOTH,
    ),
    Fault(
        "an output that is read",
        "merge",
        "  float total = power_of_2(sink - above);\n",
        "  float total = power_of_2(sink - above) + float(output[0]) * 0.0f;\n",
        "uninitialised",
        BOTH,
        formats=("fp16", "q4"),
    ),
    Fault(
        "threadgroups that write the same",
        "merge",
        "output + number * V_DIM",
        "output",
        "race",
        BOTH,
        formats=("fp16", "q4"),
    ),
    Fault(
        "a token that nobody writes",
        "write",
        "&& place.index < 8) done",
        "&& place.index < 7) done",
        "unwritten",
        BOTH,
    ),
    Fault(
        "two tokens in one slot",
        "write",
        "position % PAGE_SIZE, place.lane",
        "position % PAGE_SIZE / 2, place.lane",
        "race",
        BOTH,
    ),
    Fault(
        "a write to an input",
        "write",
        "float x[numbers_of_lane(DIM)];\n  read_step",
        "float x[numbers_of_lane(DIM)];\n  ((DEVICE int*)row)[0] = 0;\n  read_step",
        "read-only",
        BOTH,
    ),
    Fault(
        "too much threadgroup memory",
        "decode",
        "threadgroup float own_here[paged_kv::PARTS",
        "threadgroup float own_here[32 * paged_kv::PARTS",
        "bytes of threadgroup memory",
    ),
    # Numbers.
    Fault(
        "a division by zero",
        "decode",
        " block = place.simdgroup % BLOCKS",
        " block = place.simdgroup % (BLOCKS - 1 + gqa_group_size - gqa_group_size)",
        "division by zero",
        BOTH,
    ),
    Fault(
        "a shift by the width",
        "decode",
        "words[i / 2] >> i % 2 * 16",
        "words[i / 2] >> i % 2 * 32",
        "shift",
        ("cuda",),
    ),
    Fault(
        "a shift that Metal takes modulo the width",
        "decode",
        "words[i / 2] >> i % 2 * 16",
        "words[i / 2] >> i % 2 * 32",
    ),
    Fault(
        "hidden values that are multiplied",
        "decode",
        "first + begin, first + end, lane, weights)",
        "first, first + TILE, lane, weights)",
        "",
        BOTH,
    ),
    Fault(
        "a weight that is not put into the same measure",
        "decode",
        "sum[r] = multiply_add(sum[r], factor, weight)",
        "sum[r] = sum[r] + weight",
        "",
        BOTH,
        lengths=(600,),
    ),
    Fault(
        "a mask that is one token off",
        "prefill",
        "row.end = pages.parameter(CAUSAL) ? position + 1",
        "row.end = pages.parameter(CAUSAL) ? position + 2",
        "",
        BOTH,
        queries=9,
    ),
    # Text that Metal does not compile.
    Fault(
        "memory of a device as a thread's",
        "decode",
        "stage_queries(queries,",
        "stage_queries((SHARED const T*)staged,",
        "no matching function",
    ),
    Fault(
        "no address space",
        "decode",
        "void load(DEVICE const ushort* from",
        "void load(const ushort* from",
        "no address space",
    ),
    Fault(
        "a constant that is not in that address space",
        "decode",
        "CONSTANT float LOWEST",
        "constexpr float LOWEST",
        "a variable of the program",
    ),
    Fault(
        "a conversion to bfloat that is not written",
        "decode",
        "= To(x[i] * factor)",
        "= x[i] * factor",
        "conversion",
        dtype=mx.bfloat16,
    ),
    Fault(
        "a function that Metal has not",
        "decode",
        "weight = power_of_2(",
        "weight = std::exp2(",
        "undeclared",
    ),
    Fault("a double", "decode", "float total = join(", "double total = join(", "double"),
    Fault(
        "a static variable",
        "decode",
        "      float x[numbers_of_lane(V_DIM)];\n",
        "      static float once = 0.0f;\n      float x[numbers_of_lane(V_DIM)];\n",
        "static",
    ),
    Fault(
        "a lambda expression",
        "decode",
        "      float x[numbers_of_lane(V_DIM)];\n",
        "      auto same = [](float x) { return x; };\n      maximum = same(maximum);\n"
        "      float x[numbers_of_lane(V_DIM)];\n",
        "lambda",
    ),
    Fault(
        "threadgroup memory outside a kernel",
        "decode",
        "  uint heads = pages.parameter(KV_HEADS), gqa_group_size",
        "  threadgroup float here[4];\n  uint heads = pages.parameter(KV_HEADS), gqa_group_size",
        "local address space",
    ),
    Fault("more buffers than Metal binds", "write", "", "", "Metal binds 31"),
]
