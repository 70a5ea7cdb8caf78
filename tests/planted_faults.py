"""Faults in GPU kernels that are sound without them."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Fault:
    """A change to the text of an operation, and what is said of it; nothing where only the numbers
    are wrong."""

    name: str
    operation: str
    sound: str
    planted: str
    said: str = ""
    dialects: tuple[str, ...] = ("metal",)
    dtype: Any = mx.float16
    queries: int = field(default=1)


BOTH = ("metal", "cuda")
MEET = "  threads_meet();\n  uint splits"
FAULTS = [
    # Barriers.
    Fault("no barrier", "decode", MEET, "  uint splits", "race", BOTH),
    Fault(
        "a simdgroup's barrier for a threadgroup's",
        "decode",
        MEET,
        "  lanes_meet();\n  uint splits",
        "race",
        BOTH,
    ),
    Fault(
        "no barrier between lanes",
        "decode",
        "    lanes_meet();\n    // What lies outside",
        "    // What lies outside",
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
    ),
    Fault(
        "no barrier before a tile is loaded",
        "prefill",
        "const THREAD Place& place, SHARED T* to) {\n  threads_meet();\n",
        "const THREAD Place& place, SHARED T* to) {\n",
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
        "  if (place.simdgroup) threads_meet();\n  uint splits",
        "does not reach",
        BOTH,
    ),
    Fault(
        "a return before a barrier",
        "decode",
        MEET,
        "  if (place.simdgroup) return;\n  threads_meet();\n  uint splits",
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
        "page + numbers_at + row *",
        "page + 16 * ulong(layout[0]) + numbers_at + row *",
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
        "merge",
        "output[number * DIM + at]",
        "output[number * DIM + at - DIM]",
        "out of bounds",
        BOTH,
    ),
    Fault(
        "a write behind threadgroup memory",
        "decode",
        "weights[token * ROWS + r] = weight;",
        "weights[(token + 128) * ROWS + r] = weight;",
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
        "*(DEVICE const uint4*)(row + octet * 8)",
        "*(DEVICE const uint4*)(row + octet * 8 + (octet ? 0 : 1))",
        "misaligned",
        BOTH,
    ),
    Fault(
        "a misaligned load from threadgroup memory",
        "decode",
        "(SHARED const float4*)(queries + r * DIM + octet * 8)",
        "(SHARED const float4*)(queries + r * DIM + octet * 8 + (octet < 4 ? 1 : 0))",
        "misaligned",
        BOTH,
    ),
    Fault(
        "threadgroup memory that nobody wrote",
        "decode",
        "      if (at < DIM) staged[r * DIM + at] = x[i];\n",
        "      if (at < DIM && at) staged[r * DIM + at] = x[i];\n",
        "uninitialised",
        BOTH,
    ),
    Fault("a sum that does not begin at 0", "decode", "values[i] = 0.0f;", ";", "", BOTH),
    Fault(
        "an output that is not whole",
        "merge",
        "if (at < DIM) output",
        "if (at < DIM && head) output",
        "unwritten",
        BOTH,
    ),
    Fault(
        "an output that is read",
        "merge",
        "float above = LOWEST, sink = NEVER;",
        "float above = LOWEST + float(output[0]) * 0.0f, sink = NEVER;",
        "uninitialised",
        BOTH,
    ),
    Fault(
        "threadgroups that write the same",
        "merge",
        "output[number * DIM + at] =",
        "output[at] =",
        "race",
        BOTH,
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
        "rows of two tokens in one place",
        "write",
        "position % PAGE_SIZE, place.lane, x);",
        "position % PAGE_SIZE / 2, place.lane, x);",
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
        "threadgroup float weights[PARTS",
        "threadgroup float weights[32 * PARTS",
        "bytes of threadgroup memory",
    ),
    # Numbers.
    Fault(
        "a division by zero",
        "decode",
        " block = place.simdgroup % BLOCKS",
        " block = place.simdgroup % (BLOCKS - 1 + ratio - ratio)",
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
    # What Metal does not compile.
    Fault(
        "memory of a device as a thread's",
        "decode",
        "stage_queries<T, K_DIM, ROWS, BASES>(queries,",
        "stage_queries<T, K_DIM, ROWS, BASES>((SHARED const T*)staged,",
        "no matching function",
    ),
    Fault(
        "no address space",
        "decode",
        "inline void read_octet(DEVICE const ushort* row, DEVICE const",
        "inline void read_octet(const ushort* row, DEVICE const",
        "no address space",
    ),
    Fault(
        "a constant that is not in that address space",
        "merge",
        "CONSTANT float LOG2_E",
        "constexpr float LOG2_E",
        "a variable of the program",
    ),
    Fault(
        "a conversion to bfloat that is not written",
        "merge",
        "= T(total > 0.0f ? all[i] / total : 0.0f)",
        "= (total > 0.0f ? all[i] / total : 0.0f)",
        "conversion",
        dtype=mx.bfloat16,
    ),
    Fault(
        "a function that Metal has not",
        "merge",
        "float weight = power_of_2(",
        "float weight = std::exp2(",
        "undeclared",
    ),
    Fault("a double", "merge", "float total = params", "double total = params", "double"),
    Fault(
        "a static variable",
        "merge",
        "  float all[numbers",
        "  static float once = 0.0f;\n  float all[numbers",
        "static",
    ),
    Fault(
        "a lambda expression",
        "merge",
        "  float all[numbers",
        "  auto same = [](float x) { return x; };\n  sink = same(sink);\n  float all[numbers",
        "lambda",
    ),
    Fault(
        "threadgroup memory outside a kernel",
        "decode",
        "  uint heads = pages.parameter(KV_HEADS), ratio",
        "  threadgroup float here[4];\n  uint heads = pages.parameter(KV_HEADS), ratio",
        "local address space",
    ),
    Fault("more buffers than Metal binds", "write", "", "", "Metal binds 31"),
]
